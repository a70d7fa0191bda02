"""How much other processes compute on this machine, while a run measures or trains.

The kernel counts the time of each core. What is not idle and not this process's own is other work, the hypervisor's
share (steal) included. Other work matters where something waits for a core: where cores are hardly ever idle, or where
the kernel says that tasks waited (`/proc/pressure/cpu`) or are more than there are cores (`/proc/loadavg`).

Invariant: this process's own threads are never reported as other work, however many they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ratel_cli.hardware.system_files import SystemFiles

_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT, _NUM_COUNTED = 3, 4, 8
"""Columns of /proc/stat: user nice system idle iowait irq softirq steal; guests are counted in user and nice."""
_LEAST_SECONDS = 0.1
"""A shorter time says nothing: the kernel counts hundredths of a second."""
_LEAST_SHARE = 0.1
"""Least share of the cores that other work must take to be reported, and least share of the time with a task that waits
for a core."""
_LEAST_IDLE = 0.1
"""Share of the time of all cores: with more than this idle, nothing waits for a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLoad:
    """What others computed in some time on the cores that this process may use."""

    cores: float
    """Cores' worth of time."""
    num_cores: int

    @property
    def words(self) -> str:
        """`other processes use 1.2 of 2 cores`."""
        return f"other processes use {self.cores:.1f} of {self.num_cores} cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    all_seconds: float
    """Seconds of all cores together."""
    idle_seconds: float
    own_seconds: float
    waited_seconds: float
    """Seconds for which at least one task waited for a core."""


class LoadMeter:
    """Compares the cores' counters at two moments."""

    def __init__(
        self,
        files: SystemFiles | None = None,
        *,
        cores: Collection[int] | None = None,
        own_seconds: Callable[[], float] = lambda: sum(os.times()[:4]),
    ) -> None:
        """`cores`: those to look at; None: those that this process may use. `own_seconds`: the CPU time of this process
        and of its children that have ended."""
        self._files = files or SystemFiles()
        self._cores = os.sched_getaffinity(0) if cores is None else cores
        self._own_seconds = own_seconds
        self._begin = self._now()

    def restart(self) -> None:
        """Measure from now on."""
        self._begin = self._now()

    def other_load(self) -> OtherLoad | None:
        """Other work since the begin that this process had to wait for; None if there was none worth a word, or if the
        kernel does not say."""
        begin, end, number = self._begin, self._now(), len(self._cores)
        if begin is None or end is None or not number:
            return None
        elapsed = (end.all_seconds - begin.all_seconds) / number
        if elapsed < _LEAST_SECONDS:
            return None
        idle, own = end.idle_seconds - begin.idle_seconds, end.own_seconds - begin.own_seconds
        cores = number - (idle + own) / elapsed
        waited = end.waited_seconds - begin.waited_seconds
        is_short = (
            idle < _LEAST_IDLE * number * elapsed or waited > _LEAST_SHARE * elapsed or self._num_runnable() > number
        )
        if cores < _LEAST_SHARE * number or not is_short:
            return None
        return OtherLoad(cores=min(cores, float(number)), num_cores=number)

    def _now(self) -> _Moment | None:
        times = [
            [int(word) for word in words[1 : 1 + _NUM_COUNTED]]
            for line in (self._files.text("proc/stat") or "").splitlines()
            if (words := line.split()) and words[0].removeprefix("cpu").isdigit() and int(words[0][3:]) in self._cores
        ]
        if len(times) != len(self._cores) or any(len(each) <= _IOWAIT for each in times):
            return None
        return _Moment(
            all_seconds=_TICK_SECONDS * sum(map(sum, times)),
            idle_seconds=_TICK_SECONDS * sum(each[_IDLE] + each[_IOWAIT] for each in times),
            own_seconds=self._own_seconds(),
            waited_seconds=self._waited_seconds(),
        )

    def _waited_seconds(self) -> float:
        """The total of `/proc/pressure/cpu`; 0 where the kernel does not count it."""
        for line in (self._files.text("proc/pressure/cpu") or "").splitlines():
            kind, *values = line.split()
            total = dict(value.partition("=")[::2] for value in values).get("total", "")
            if kind == "some" and total.isdigit():
                return int(total) / 1e6
        return 0.0

    def _num_runnable(self) -> int:
        """Tasks that run or wait for a core now, of `/proc/loadavg`; 0 if it does not say."""
        words = (self._files.text("proc/loadavg") or "").split()
        running = words[3].partition("/")[0] if len(words) > 3 else ""
        return int(running) if running.isdigit() else 0
