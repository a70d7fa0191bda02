"""Every malformed input of the corpus, through the command line: the exit code, the place, no trace, nothing touched.

A run has finished and left its store and its model; each case then asks for another one, with something
wrong in what it is given. Invariant: whatever it was, the store and the model are as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ratel_cli.cli.app import main
from tests.e2e.runs import output_of, store_of, succeed, write_config
from tests.inputs import (
    argument_cases,
    hardware_cases,
    index_cases,
    model_config_cases,
    row_cases,
    safetensors_cases,
    template_cases,
    tokenizer_cases,
    yaml_cases,
)
from tests.inputs.cases import Case, Inputs

CORPUS = [
    case
    for kind in (
        yaml_cases,
        argument_cases,
        hardware_cases,
        model_config_cases,
        tokenizer_cases,
        safetensors_cases,
        index_cases,
        row_cases,
        template_cases,
    )
    for case in kind.cases()
]
HARDWARE = """\
gpu:
  name: a GPU
  memory_bytes: 24GiB
  flops_per_second: 165e12
link:
  to_gpu_bytes_per_second: 22.6GB/s
  from_gpu_bytes_per_second: 21e9
nvme:
  num_devices: 2
  read_bytes_per_second: 6.5GB/s
  write_bytes_per_second: 3.4GB/s
  free_bytes: 4e12
host:
  memory_bytes: 768GiB
  available_bytes: 64GiB
  adam_parameters_per_second: 1e10
  memory_bytes_per_second: 300e9
  num_cores: 52
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run that is over."""

    config: Path
    base: Path
    hardware: Path

    def left(self) -> dict[str, tuple[int, str]]:
        """Its store and its model: when each file was written, and what it holds."""
        exported = (path for path in output_of(self.config).iterdir() if path.is_file())
        return {
            str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in (store_of(self.config), *exported)
        }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Finished:
    directory = tmp_path_factory.mktemp("finished")
    config = write_config(directory, base=base, rows=rows, max_steps=1)
    succeed(config)
    hardware = directory / "hardware.yaml"
    hardware.write_text(HARDWARE)
    return Finished(config=config, base=base, hardware=hardware)


@pytest.fixture
def inputs(tmp_path: Path, finished: Finished) -> Inputs:
    """Those of the finished run, in a directory of this case alone."""
    return Inputs(
        directory=tmp_path,
        healthy_base=finished.base,
        healthy_hardware=finished.hardware,
        settings=yaml.safe_load(finished.config.read_text()),
    )


def test_the_corpus_is_large() -> None:
    names = [case.name for case in CORPUS]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert len(names) >= 400


def test_healthy_inputs_are_taken(inputs: Inputs, finished: Finished) -> None:
    """Else the corpus would prove nothing."""
    before = finished.left()
    inputs.arguments = ["--resume", "auto", "--dry-run"]
    assert ask(inputs.command_line())[:1] == (0,)
    inputs.plan_for(finished.hardware.read_bytes())
    assert ask(inputs.command_line())[:1] == (0,)
    assert finished.left() == before


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: ascii(case.name)[1:-1][:80])
def test_malformed_input(case: Case, inputs: Inputs, finished: Finished) -> None:
    line = case.damage(inputs)
    command_line = inputs.command_line()
    before = finished.left()
    code, told, seconds = ask(command_line)
    if seconds > case.seconds:  # of a machine that others use too, the second time may be the better one
        code, told, seconds = ask(command_line)
    assert code == case.code, told
    assert all(each.isprintable() for each in told.split("\n")), ascii(told)
    assert "Traceback" not in told
    errors = [each for each in told.splitlines() if each.startswith("error: ")]
    assert errors, told
    place = "" if line is None else rf"error: [^\s:]+:{line}(:\d+)?: "
    assert any(re.match(place, each) and re.search(case.told, each) for each in errors), told
    assert max(map(len, told.splitlines())) < 10_000, "too long to be read"
    assert finished.left() == before
    assert not (inputs.directory / "canary").exists()
    assert seconds <= case.seconds


def ask(command_line: list[str]) -> tuple[int, str, float]:
    """`ratel` in this process: its exit code, its stderr, and how long it took.

    Time is that of the clock, or where the machine is busy with something else, of the processor; waiting
    for ten times as long is never excused.
    """
    told = io.StringIO()
    start, start_cpu = time.monotonic(), processor_seconds()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        code = main(command_line)
    seconds, cpu_seconds = time.monotonic() - start, processor_seconds() - start_cpu
    return code, told.getvalue(), max(cpu_seconds, seconds / 10)


def processor_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that could be one of the hub's must not be looked up there."""
    monkeypatch.setattr("ratel_cli.model.directory._download", _unreachable)


def _unreachable(repository: str) -> str:
    raise AssertionError(f"{repository} was asked for on the hub")
