"""Directories of stores on drives of every kind: what lies below them is found, and what is wrong with them is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.hardware.checkup import Verdict
from ratel_cli.hardware.checkup_drives import Place, check_place, check_sharing, check_space
from ratel_cli.hardware.mounts import Drive, Mount, mount_of
from ratel_cli.io.probe import Probe
from ratel_cli.units import GIB
from tests.hardware.machines import Machine

NVME = Drive(name="nvme0n1", model="Samsung SSD 990 PRO 2TB", rotates=False)
DISK = Drive(name="sda", model="", rotates=True)
EXT4 = Mount(place="/mnt/a", file_system="ext4", is_read_only=False, drives=(NVME,))
GOOD = Probe(failure=None, is_direct=True)
PLACE = Place(path=Path("/mnt/a/ratel"), mount=EXT4, free_bytes=100 * GIB, probe=GOOD)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """With a root on a virtual disk, and an NVMe drive with two partitions."""
    machine = Machine(tmp_path / "root")
    machine.drive("vda", "254:0", rotational=1)
    machine.drive("nvme0n1", "259:0", model=NVME.model, partitions=("nvme0n1p1=259:1", "nvme0n1p2=259:2"))
    machine.drive("sda", "8:0", rotational=1, partitions=("sda1=8:1",))
    return machine.mount("254:0", "/", "ext4", "/dev/vda")


def found(machine: Machine, path: str) -> Mount:
    mount = mount_of(Path(path), machine.files)
    assert mount is not None
    return mount


def test_the_deepest_mount_counts(machine: Machine) -> None:
    machine.mount("259:1", "/mnt/a", "ext4", "/dev/nvme0n1p1").mount("8:1", "/mnt/a/old", "xfs", "/dev/sda1")
    assert found(machine, "/mnt/a/ratel") == Mount(
        place="/mnt/a", file_system="ext4", is_read_only=False, drives=(NVME,)
    )
    assert found(machine, "/mnt/a") == found(machine, "/mnt/a/ratel")
    assert found(machine, "/mnt/a/old/x").drives == (DISK,)
    assert found(machine, "/mnt/abc").place == "/", "a name that only begins like a mount is not on it"
    assert found(machine, "/").drives == (Drive(name="vda", model="", rotates=None),), "a virtual disk says anything"


def test_a_mount_on_a_mount_hides_it(machine: Machine) -> None:
    machine.mount("8:1", "/mnt/a", "ext4", "/dev/sda1").mount("0:50", "/mnt/a", "nfs4", "server:/export", options="ro")
    mount = found(machine, "/mnt/a/ratel")
    assert (mount.file_system, mount.is_network, mount.is_read_only, mount.drives) == ("nfs4", True, True, ())


def test_a_place_with_a_space(machine: Machine) -> None:
    machine.mount("8:1", "/mnt/my disk", "ext4", "/dev/sda1")
    assert found(machine, "/mnt/my disk/ratel").place == "/mnt/my disk"


def test_drives_below_layers(machine: Machine) -> None:
    """LVM on a RAID of a whole drive and a partition; btrfs, whose device number is its own."""
    machine.layered("md0", "9:0", "nvme0n1p2", "sda").layered("dm-0", "253:0", "md0")
    machine.mount("253:0", "/mnt/lvm", "xfs", "/dev/mapper/a-b").mount("0:60", "/mnt/b", "btrfs", "/dev/nvme0n1p1")
    assert found(machine, "/mnt/lvm").drives == (NVME, DISK)
    assert found(machine, "/mnt/b").drives == (NVME,)


def test_what_is_not_told(machine: Machine) -> None:
    machine.mount("0:70", "/mnt/c", "overlay", "overlay").mount("7:77", "/mnt/d", "ext4", "/dev/gone")
    assert found(machine, "/mnt/c").drives == found(machine, "/mnt/d").drives == ()
    machine.write("proc/self/mountinfo", "odd\n36 35 8:1 / /\n")
    assert mount_of(Path("/mnt"), machine.files) is None
    machine.remove("proc/self/mountinfo")
    assert mount_of(Path("/mnt"), machine.files) is None


@pytest.mark.parametrize(
    ("changes", "verdict", "reason", "remedy"),
    [
        ({}, "ok", "ext4 on nvme0n1 (Samsung SSD 990 PRO 2TB), 100 GiB free, direct I/O", None),
        ({"mount": None}, "ok", "100 GiB free, direct I/O", None),
        ({"mount": replace(EXT4, drives=(NVME, DISK))}, "slow", "a hard disk, ext4 on nvme0n1", "NVMe drives"),
        (
            {"mount": replace(EXT4, drives=(Drive(name="vda", model="", rotates=None),))},
            "ok",
            "ext4 on vda, 100 GiB free",
            None,
        ),
        ({"mount": replace(EXT4, file_system="nfs4", drives=())}, "slow", "on a network, nfs4, ", "storage.paths"),
        ({"mount": replace(EXT4, file_system="tmpfs", drives=())}, "slow", "in RAM (tmpfs)", "storage.paths"),
        ({"probe": Probe(failure=None, is_direct=False)}, "slow", "no direct I/O", "storage.paths"),
        ({"mount": replace(EXT4, is_read_only=True)}, "broken", "mounted read-only", "sudo mount -o remount,rw /mnt/a"),
        (
            {"probe": Probe(failure="/mnt/a/ratel: a file cannot be created in it: denied", is_direct=False)},
            "broken",
            "a file cannot be created in it: denied",
            "the right to write",
        ),
        ({"free_bytes": GIB - 1}, "broken", "too little space, ext4", "free some space"),
        ({"free_bytes": GIB}, "ok", "1.00 GiB free", None),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value)[:20],
)
def test_places(changes: dict[str, object], verdict: Verdict, reason: str, remedy: str | None) -> None:
    diagnosis = check_place(replace(PLACE, **changes))  # type: ignore[arg-type]
    assert (diagnosis.what, diagnosis.verdict) == ("/mnt/a/ratel", verdict)
    assert reason in diagnosis.reason and not diagnosis.reason.startswith("/mnt/a/ratel")
    assert (diagnosis.remedy is None) == (remedy is None)
    assert remedy is None or (diagnosis.remedy is not None and remedy in diagnosis.remedy)


def test_one_drive_twice() -> None:
    """Also where a mirror of two drives shares one of them, and where a third directory is between."""
    second = replace(PLACE, path=Path("/mnt/b"), mount=replace(EXT4, drives=(DISK,)))
    both = replace(PLACE, path=Path("/mnt/c"), mount=replace(EXT4, drives=(NVME, DISK)))
    unknown = replace(PLACE, path=Path("/mnt/d"), mount=replace(EXT4, drives=()))
    assert list(check_sharing([PLACE, second, unknown, unknown, replace(PLACE, mount=None)])) == []
    diagnoses = list(check_sharing([PLACE, second, both]))
    assert [(each.what, each.verdict) for each in diagnoses] == [("/mnt/c", "slow"), ("/mnt/c", "slow")]
    assert diagnoses[0].reason == "on the same drive as /mnt/a/ratel (nvme0n1): it adds no speed"
    assert diagnoses[1].reason == "on the same drive as /mnt/b (sda): it adds no speed"


def test_the_space_of_a_store() -> None:
    enough = check_space([PLACE], need_bytes=10 * GIB, available_bytes=10 * GIB)
    assert (enough.verdict, enough.reason) == ("ok", "the store needs 10.0 GiB, 10.0 GiB available")
    short = check_space([PLACE], need_bytes=10 * GIB, available_bytes=8 * GIB)
    assert short.verdict == "broken" and "short by 2.00 GiB" in short.reason
    assert short.remedy is not None and "/mnt/a/ratel" in short.remedy
