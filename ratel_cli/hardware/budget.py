"""How thoroughly to measure, and how to time: shared by everything in `hardware` that measures.

Each quantity is measured again and again for a while, and the best run counts: on a busy machine that
is nearest to what it can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ratel_cli.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementBudget:
    """What measuring may take."""

    seconds: float
    """For each quantity; for each drive's alone, divided by the number of drives."""
    span_bytes: int
    """Moved at once, for each drive: a multiple of `buffer_bytes`."""
    buffer_bytes: int
    """Of memory, from which and to which the span is moved."""
    memory_bytes: int
    """Of memory: what its rate is measured on. 0: that is not measured."""


BRIEF = MeasurementBudget(seconds=0.2, span_bytes=128 * MIB, buffer_bytes=32 * MIB, memory_bytes=0)
"""SpanLabel a second, and little memory: a run may have none to spare."""

FULL = MeasurementBudget(seconds=2.0, span_bytes=256 * MIB, buffer_bytes=128 * MIB, memory_bytes=1024 * MIB)
"""Under half a minute, with buffers that caches do not hold: drives read into a cached one a third faster than they
read otherwise (scripts/bench/io.py)."""


def best_seconds(work: Callable[[], object], at_least_seconds: float) -> float:
    """Least seconds of the runs that fit in the time. The first one warms up and does not count."""
    work()
    times: list[float] = []
    while sum(times) < at_least_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
