"""Measuring gives usable numbers, takes about a second, and nothing remains afterwards."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ratel_cli import _native
from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.hardware import budget as measuring_budget
from ratel_cli.hardware import measure as measuring
from ratel_cli.hardware.budget import BRIEF, MeasurementBudget
from ratel_cli.hardware.drives import measure_drives
from ratel_cli.hardware.host import num_cores, processor_name
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import EngineName, IoQueue, open_queue
from ratel_cli.io.striping import MAX_WEIGHT
from ratel_cli.sizes import CHUNK_ELEMENTS
from ratel_cli.units import MIB
from scripts.bench import throttled_queue
from scripts.bench.throttled_queue import ThrottledQueue

CPU = torch.device("cpu")
SMALL = MeasurementBudget(
    seconds=0.05, span_bytes=8 * MIB, buffer_bytes=4 * MIB, memory_bytes=4 * MIB, adamw_bytes=8 * MIB
)


@pytest.fixture(params=["io_uring", "threads"])
def queue(request: pytest.FixtureRequest) -> Iterator[IoQueue]:
    name: EngineName = request.param
    try:
        opened = open_queue(name, notice=pytest.fail)
    except EnvironmentFailure as failure:
        pytest.skip(failure.message)
    with opened:
        yield opened


def measured(*paths: Path, pool_bytes: int | None = None, **options: Any) -> HardwareProfile:  # noqa: ANN401
    with BufferPool(pool_bytes) as pool, open_queue("threads", notice=pytest.fail) as queue:
        profile = measure(paths, queue, pool, dtype=torch.float32, device=CPU, **options)
        assert pool.leased_bytes == 0
    return profile


@pytest.mark.full
def test_numbers_are_usable_and_nothing_remains(queue: IoQueue, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [tmp_path / "a", tmp_path / "b"]
    open_files = len(os.listdir("/proc/self/fd"))
    drawn = torch.random.get_rng_state()
    with BufferPool(64 * MIB) as pool:
        start = time.perf_counter()
        profile = measure(paths, queue, pool, dtype=torch.bfloat16, device=CPU)
        seconds = time.perf_counter() - start
        assert pool.leased_bytes == 0
        pool.lease(64 * MIB, "all of it").release()
    # A second on a machine that is free; the bound is for one that is not.
    assert seconds < 300
    assert 1e8 < profile.gpu.flops_per_second < 1e15
    assert profile.gpu.name == processor_name()
    assert 1e6 < profile.nvme.read_bytes_per_second < 1e12
    assert 1e6 < profile.nvme.write_bytes_per_second < 1e12
    assert 1e6 < profile.nvme.mixed_bytes_per_second < 1e12
    assert profile.nvme.shares == (1, 1), "directories on one drive are equally fast"
    assert 1e6 < profile.host.adam_parameters_per_second < 1e11
    assert 0 < profile.host.available_bytes <= profile.host.memory_bytes == profile.gpu.memory_bytes
    assert profile.host.num_cores == num_cores()
    assert profile.host.memory_bytes_per_second is None, "a run may have no memory to spare"
    assert profile.link is None and profile.gpu.memory_bytes_per_second is None
    assert profile.nvme.paths == tuple(map(str, paths))
    assert profile.nvme.num_devices == 1
    assert [list(path.iterdir()) for path in paths] == [[], []]
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_the_profile_has_the_keys_of_a_hardware_file(queue: IoQueue, tmp_path: Path) -> None:
    with BufferPool(None) as pool:
        profile = measure([tmp_path], queue, pool, dtype=torch.float32, device=CPU, budget=SMALL)
    found = json.loads(json.dumps(profile.to_json(), allow_nan=False))
    assert found["format_version"] == 1
    rates = {"read_bytes_per_second", "write_bytes_per_second", "mixed_bytes_per_second"}
    assert set(found) == {"format_version", "gpu", "link", "nvme", "host", "network", "prices"}
    assert found["prices"] is None, "nothing measures prices"
    assert set(found["gpu"]) == {"name", "memory_bytes", "flops_per_second", "memory_bytes_per_second"}
    assert found["link"] is None
    facts = {"paths", "num_devices", "weights", "free_bytes", "endurance_tb_written", "alone"}
    assert set(found["nvme"]) == facts | rates
    assert [set(each) for each in found["nvme"]["alone"]] == [rates]
    speeds = {"adam_parameters_per_second", "memory_bytes_per_second"}
    assert set(found["host"]) == {"memory_bytes", "available_bytes", "num_cores", "activation_bytes"} | speeds
    assert found["nvme"]["paths"] == [str(tmp_path)]
    assert isinstance(profile, HardwareProfile)


@pytest.mark.parametrize(("limit_mib", "most_mib"), [(None, 512), (2048, 512), (264, 32), (0, 4)])
def test_adamw_is_measured_on_what_the_run_can_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_mib: int | None, most_mib: int
) -> None:
    """512 MiB, which no cache holds; at most half of what the limit leaves next to the process, but a chunk."""
    monkeypatch.setattr(measuring, "resident_bytes", lambda: 200 * MIB)
    updated: list[int] = []
    kernel = _native.update_adamw_bfloat16

    def update(*fields: torch.Tensor, **others: object) -> object:
        updated.append(sum(field.nbytes for field in fields))
        return kernel(*fields, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(_native, "update_adamw_bfloat16", update)
    limit_bytes = None if limit_mib is None else limit_mib * MIB
    with BufferPool(limit_bytes) as pool, open_queue("threads", notice=pytest.fail) as queue:
        budget = replace(BRIEF, seconds=1e-6)
        measure([tmp_path], queue, pool, dtype=torch.float32, device=CPU, nvme_rates=(1e9, 1e9), budget=budget)
        assert pool.peak_bytes == 0
    chunk_bytes = 14 * CHUNK_ELEMENTS
    assert set(updated) == {max(1, most_mib * MIB // chunk_bytes) * chunk_bytes}


def test_directories_that_do_not_exist_yet_may_share_their_parent(tmp_path: Path) -> None:
    """Two store directories that do not exist yet are both measured in the directory where they will be made."""
    profile = measured(tmp_path, tmp_path, budget=SMALL)
    assert profile.nvme.read_bytes_per_second > 0
    assert profile.nvme.shares == (1, 1)
    alone = profile.nvme.alone[0]
    assert profile.nvme.alone == (alone, alone)
    assert alone.mixed_bytes_per_second == profile.nvme.mixed_bytes_per_second, "one drive alone is all drives together"


@pytest.mark.nightly
def test_each_drive_is_measured_alone(tmp_path: Path) -> None:
    """The disk twice, and main memory: both entries of the disk have the same weight, and memory at least as much."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    if shutil.disk_usage(memory).free < 512 * MIB:
        pytest.skip("there is too little shared memory")
    reported: list[str] = []
    with tempfile.TemporaryDirectory(dir=memory) as other:
        paths = (tmp_path, Path(other), tmp_path)
        profile = measured(*paths, pool_bytes=64 * MIB, budget=SMALL, progress=reported.append)
        assert list(Path(other).iterdir()) == list(tmp_path.iterdir()) == []
    first, second, third = profile.nvme.shares
    assert 1 <= first == third <= second <= MAX_WEIGHT
    assert profile.nvme.num_devices == 2
    assert profile.nvme.alone[0] == profile.nvme.alone[2] != profile.nvme.alone[1]
    alone = [f"{tmp_path}, alone", f"{other}, alone"]
    assert reported == [*alone, "all directories together", "matrix products", "RAM and AdamW"]


def test_a_throttled_store_is_measured_as_it_is(
    queue: IoQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the throttled drive moves on: a drive or a machine that stalls does not count."""
    clock = _Clock()
    monkeypatch.setattr(throttled_queue, "time", clock)
    monkeypatch.setattr(measuring_budget, "time", clock)
    throttled = ThrottledQueue(queue, read_bytes_per_second=100e6, write_bytes_per_second=50e6)
    with BufferPool(None) as pool:
        nvme = measure_drives([tmp_path], throttled, pool, budget=SMALL, progress=lambda what: None)
    assert nvme.read_bytes_per_second == pytest.approx(100e6, rel=1e-9)
    assert nvme.write_bytes_per_second == pytest.approx(50e6, rel=1e-9)
    mixed = nvme.mixed_bytes_per_second
    assert mixed == pytest.approx(100e6, rel=1e-9), "as much read as written: the slower direction bounds"


class _Clock:
    """The part of `time` that measuring a throttled queue uses. Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def perf_counter(self) -> float:
        return self._seconds

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds


def test_a_larger_budget_measures_main_memory_too(tmp_path: Path) -> None:
    host = measured(tmp_path, pool_bytes=4 * MIB, budget=SMALL).host
    assert host.memory_bytes_per_second is not None
    assert 1e8 < host.memory_bytes_per_second < 1e13


def test_a_limit_too_small_for_measuring_memory(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="measuring RAM"):
        measured(tmp_path, pool_bytes=7 * MIB, budget=replace(SMALL, memory_bytes=8 * MIB))


def test_given_rates_are_used_and_no_file_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    nvme = measured(file, file, nvme_rates=(1e9, 3e9)).nvme
    assert (nvme.read_bytes_per_second, nvme.write_bytes_per_second) == (1e9, 3e9)
    assert nvme.mixed_bytes_per_second == pytest.approx(1.5e9)
    assert nvme.shares == (1, 1)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(EnvironmentFailure):
        measured(file)


def test_a_limit_too_small_for_measuring_the_drives(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="measuring the drives"):
        measured(tmp_path, pool_bytes=MIB)
    assert list(tmp_path.iterdir()) == []
