"""Trying a directory: what can be written there, and that nothing remains."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from ratel_cli.io.probe import probe_directory
from ratel_cli.io.queue import open_queue
from tests.fakes import Fault, FaultyQueue


def test_a_directory_that_works(tmp_path: Path) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    with open_queue("auto", notice=lambda text: None) as queue:
        assert probe_directory(tmp_path, queue).failure is None
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_directories_that_do_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with open_queue("threads", notice=pytest.fail) as queue:
        for path in (tmp_path / "none", tmp_path / "file", Path("/proc")):
            probe = probe_directory(path, queue)
            assert probe.failure is not None and "a file cannot be created in it" in probe.failure
            assert not probe.is_direct
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", [0, 1], ids=["writing", "reading"])
def test_a_drive_that_fails(tmp_path: Path, call: int) -> None:
    with FaultyQueue({call: Fault(error_number=errno.EIO)}) as queue:
        probe = probe_directory(tmp_path, queue)
    assert probe.failure is not None and "Input/output error" in probe.failure
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(place)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if result.returncode:
        pytest.skip(f"mounting is refused: {result.stderr.strip()}")
    try:
        (place / "all").write_bytes(bytes(4096))
        with open_queue("threads", notice=pytest.fail) as queue:
            probe = probe_directory(place, queue)
        assert probe.failure is not None and "space cannot be reserved" in probe.failure
        assert [path.name for path in place.iterdir()] == ["all"]
    finally:
        subprocess.run(["umount", str(place)], check=True)
