"""Base models and data, made once, and configs that train with them."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from torch.utils import deterministic

from ratel_cli.store.lock import StoreLock
from ratel_cli.training.stopping import StopRequest
from tests.e2e.runs import Config, save_base, write_config, write_rows


class MakeConfig(Protocol):
    def __call__(self, name: str = "run", /, **changes: object) -> Config: ...


class SignalAt(Protocol):
    def __call__(self, call: int, number: int) -> None: ...


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Config:
    """The config of an undisturbed run. Tests must not change it."""
    config = write_config(tmp_path_factory.mktemp("plain"), base=base, rows=rows)
    config.succeed()
    return config


@pytest.fixture
def make_config(tmp_path: Path, base: Path, rows: Path) -> MakeConfig:
    """Writes a config in a new directory; changes are keys of the config."""

    def make(name: str = "run", /, **changes: object) -> Config:
        return write_config(tmp_path / name, **{"base": base, "rows": rows, **changes})  # type: ignore[arg-type]

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mountpoint)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if result.returncode:
        pytest.skip(f"mounting is refused: {result.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", str(mountpoint)], check=True)


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> SignalAt:
    """Sends this process a signal when the command checks for signals the n-th time."""
    look = StopRequest.check

    def arrange(call: int, number: int) -> None:
        calls = itertools.count(1)

        def check(stop: StopRequest) -> None:
            if next(calls) == call:
                os.kill(os.getpid(), number)
            look(stop)

        monkeypatch.setattr(StopRequest, "check", check)

    return arrange


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that finds its store in use gives up after a tenth of a second, not after ten seconds."""
    waits: list[float] = []

    def lock(directories: Sequence[Path], *, wait_seconds: float, **options: bool) -> StoreLock:
        waits.append(wait_seconds)
        return StoreLock(directories, wait_seconds=0.1, **options)

    monkeypatch.setattr("ratel_cli.store.open.StoreLock", lock)
    yield
    assert 10 in waits


@pytest.fixture(autouse=True)
def _deterministic_like_a_run() -> Iterator[None]:
    """The tests compute with deterministic kernels, as a run does. Afterwards the earlier setting is restored."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
    deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
