"""Measuring gives usable numbers, takes about a second and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ratel_cli.errors import DoesNotFit, EnvironmentFailure
from ratel_cli.hardware.host import processor_name
from ratel_cli.hardware.measure import free_bytes, measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.extents import MAX_WEIGHT
from ratel_cli.movement.queue import EngineName, IoQueue, open_queue
from ratel_cli.units import MIB

CPU = torch.device("cpu")


@pytest.fixture(params=["io_uring", "threads"])
def queue(request: pytest.FixtureRequest) -> Iterator[IoQueue]:
    name: EngineName = request.param
    try:
        opened = open_queue(name, notice=pytest.fail)
    except EnvironmentFailure as refusal:
        pytest.skip(refusal.message)
    with opened:
        yield opened


def test_numbers_are_usable_and_nothing_stays(queue: IoQueue, tmp_path: Path) -> None:
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
    assert seconds < 30
    assert 1e8 < profile.gpu.flops_per_second < 1e15
    assert profile.gpu.name == processor_name()
    assert 1e6 < profile.nvme.read_bytes_per_second < 1e12
    assert 1e6 < profile.nvme.write_bytes_per_second < 1e12
    assert 1e6 < profile.nvme.mixed_bytes_per_second < 1e12
    assert profile.nvme.weights == (1, 1), "directories on one drive are equally fast"
    assert 1e6 < profile.host.adam_parameters_per_second < 1e11
    assert 0 < profile.host.available_bytes <= profile.host.memory_bytes == profile.gpu.memory_bytes
    assert profile.nvme.paths == tuple(map(str, paths))
    assert [list(path.iterdir()) for path in paths] == [[], []]
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_the_profile_is_the_hardware_file(queue: IoQueue, tmp_path: Path) -> None:
    with BufferPool(None) as pool:
        profile = measure([tmp_path], queue, pool, dtype=torch.float32, device=CPU)
    found = json.loads(json.dumps(profile.to_json(), allow_nan=False))
    assert found["format_version"] == 1
    assert set(found["gpu"]) == {"name", "memory_bytes", "flops_per_second"}
    assert set(found["nvme"]) == {
        "paths",
        "read_bytes_per_second",
        "write_bytes_per_second",
        "mixed_bytes_per_second",
        "weights",
        "free_bytes",
    }
    assert set(found["host"]) == {"memory_bytes", "available_bytes", "adam_parameters_per_second"}
    assert found["nvme"]["paths"] == [str(tmp_path)]
    assert isinstance(profile, HardwareProfile)


def test_a_drive_that_directories_share_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    here, free = free_bytes([tmp_path, tmp_path / "a", tmp_path]), shutil.disk_usage(tmp_path).free
    assert abs(here - free) < 0.2 * free
    memory = Path("/dev/shm")
    if memory.is_dir() and memory.stat().st_dev != tmp_path.stat().st_dev:
        assert free_bytes([tmp_path, memory]) > free_bytes([memory])


def test_directories_yet_to_be_made_may_share_their_parent(tmp_path: Path) -> None:
    """Where two store directories do not exist yet, both are measured where they will be."""
    with BufferPool(None) as pool, open_queue("threads", notice=pytest.fail) as queue:
        profile = measure([tmp_path, tmp_path], queue, pool, dtype=torch.float32, device=CPU)
    assert profile.nvme.read_bytes_per_second > 0
    assert profile.nvme.weights == (1, 1)


def test_each_drive_is_measured_alone(tmp_path: Path) -> None:
    """The disk, named twice, beside main memory: the two directories weigh the same, and memory not less than both."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    if shutil.disk_usage(memory).free < 512 * MIB:
        pytest.skip("there is too little shared memory")
    with (
        tempfile.TemporaryDirectory(dir=memory) as other,
        BufferPool(64 * MIB) as pool,
        open_queue("threads", notice=pytest.fail) as queue,
    ):
        paths = [tmp_path, Path(other), tmp_path]
        profile = measure(paths, queue, pool, dtype=torch.float32, device=CPU)
        assert list(Path(other).iterdir()) == list(tmp_path.iterdir()) == []
    first, second, third = profile.nvme.weights
    assert 1 <= first == third <= second <= MAX_WEIGHT


def test_given_rates_are_taken_and_no_file_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with BufferPool(None) as pool, open_queue("threads", notice=pytest.fail) as queue:
        nvme = measure([file, file], queue, pool, dtype=torch.float32, device=CPU, nvme_rates=(1e9, 3e9)).nvme
    assert (nvme.read_bytes_per_second, nvme.write_bytes_per_second) == (1e9, 3e9)
    assert nvme.mixed_bytes_per_second == pytest.approx(1.5e9)
    assert nvme.weights == (1, 1)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with (
        BufferPool(None) as pool,
        open_queue("threads", notice=pytest.fail) as queue,
        pytest.raises(EnvironmentFailure),
    ):
        measure([file], queue, pool, dtype=torch.float32, device=CPU)


def test_a_limit_too_small_even_for_measuring(tmp_path: Path) -> None:
    with (
        BufferPool(MIB) as pool,
        open_queue("threads", notice=pytest.fail) as queue,
        pytest.raises(DoesNotFit, match="measuring the drives"),
    ):
        measure([tmp_path], queue, pool, dtype=torch.float32, device=CPU)
    assert list(tmp_path.iterdir()) == []
