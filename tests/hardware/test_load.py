"""Other work on the cores, on machines whose counters the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ratel_cli.hardware.load import LoadMeter
from ratel_cli.hardware.system_files import SystemFiles

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """Two cores, and a third one that this process may not use and that others keep busy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.busy, self.idle, self.steal, self.own, self.waited = 100.0, 100.0, 0.0, 7.0, 5.0
        self.runnable = 1
        self.write()
        self.meter = LoadMeter(SystemFiles(root=root), cores={0, 1}, own_seconds=lambda: self.own)

    def write(self) -> None:
        (self.root / "proc" / "pressure").mkdir(parents=True, exist_ok=True)
        user, idle, steal = (int(TICKS * seconds / 2) for seconds in (self.busy, self.idle, self.steal))
        cores = "".join(f"cpu{core} {user} 0 0 {idle} 0 0 0 {steal} 0 0\n" for core in (0, 1))
        stat = f"cpu  1 2 3 4 5 6 7 8 9 10\n{cores}cpu2 {9 * user} 0 0 0 0 0 0 0 0 0\nintr 5\n"
        (self.root / "proc" / "stat").write_text(stat)
        some = f"some avg10=1.00 avg60=0.00 avg300=0.00 total={int(1e6 * self.waited)}\nfull avg10=0.00 total=0\n"
        (self.root / "proc" / "pressure" / "cpu").write_text(some)
        (self.root / "proc" / "loadavg").write_text(f"0.5 0.5 0.5 {self.runnable}/300 999\n")

    def pass_time(self, *, own: float, others: float, idle: float, steal: float = 0.0, waited: float = 0.0) -> None:
        """Seconds of both cores together."""
        self.busy, self.own, self.idle = self.busy + own + others, self.own + own, self.idle + idle
        self.steal, self.waited = self.steal + steal, self.waited + waited
        self.write()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_others_that_take_a_core_are_said_by_how_much(machine: Machine) -> None:
    machine.pass_time(own=8.0, others=12.0, idle=0.0)
    load = machine.meter.other_load()
    assert load is not None and load.words == "other processes use 1.2 of 2 cores"


def test_what_the_hypervisor_takes_counts(machine: Machine) -> None:
    machine.pass_time(own=10.0, others=0.0, idle=0.0, steal=10.0)
    load = machine.meter.other_load()
    assert load is not None and load.cores == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("own", "others", "idle", "waited", "runnable"),
    [
        (20.0, 0.0, 0.0, 9.0, 9),  # its own threads wait for each other
        (20.0, 1.9, 0.0, 9.0, 9),  # too little
        (1.0, 9.0, 10.0, 0.9, 2),  # there is a free core
        (0.01, 0.1, 0.0, 0.0, 1),  # too short
    ],
)
def test_nothing_is_said(
    machine: Machine, own: float, others: float, idle: float, waited: float, runnable: int
) -> None:
    machine.runnable = runnable
    machine.pass_time(own=own, others=others, idle=idle, waited=waited)
    assert machine.meter.other_load() is None


@pytest.mark.parametrize(("waited", "runnable"), [(2.0, 1), (0.0, 3)])
def test_a_queue_for_cores_that_are_partly_idle_is_said(machine: Machine, waited: float, runnable: int) -> None:
    machine.runnable = runnable
    machine.pass_time(own=4.0, others=10.0, idle=6.0, waited=waited)
    assert machine.meter.other_load() is not None


def test_it_can_begin_again(machine: Machine) -> None:
    machine.pass_time(own=0.0, others=20.0, idle=0.0)
    machine.meter.restart()
    machine.pass_time(own=20.0, others=0.0, idle=0.0)
    assert machine.meter.other_load() is None


@pytest.mark.parametrize("stat", [None, "", "cpu0 1 2\ncpu1 1 2\n", "cpu0 1 2 3 4 5 6 7 8\n", "nonsense\n\n"])
def test_a_kernel_that_does_not_say_is_no_error(tmp_path: Path, stat: str | None) -> None:
    machine = Machine(tmp_path)
    machine.pass_time(own=0.0, others=20.0, idle=0.0)
    path = tmp_path / "proc" / "stat"
    if stat is None:
        path.unlink()
    else:
        path.write_text(stat)
    assert machine.meter.other_load() is None
    (tmp_path / "proc" / "pressure" / "cpu").write_text("nonsense\nsome total=x\n")
    (tmp_path / "proc" / "loadavg").unlink()
    machine.write()
    assert machine.meter.other_load() is not None


def test_this_machine_says_something_or_nothing() -> None:
    meter = LoadMeter(SystemFiles())
    load = meter.other_load()
    assert load is None or 0 < load.cores <= load.num_cores
