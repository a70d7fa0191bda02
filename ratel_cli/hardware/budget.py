"""How thoroughly to measure, and how to time.

Each quantity is measured repeatedly for a while, and the best run counts: on a busy machine the best run is nearest to
what the machine can do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ratel_cli.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementBudget:
    """The time and the memory that measuring may take."""

    seconds: float
    """Time for each quantity. Where each drive is measured alone, the drives share it."""
    span_bytes: int
    """Bytes that one run moves on each drive. A multiple of `buffer_bytes`."""
    buffer_bytes: int
    """Memory that the span is moved to and from, again and again."""
    memory_bytes: int
    """Memory whose own rate is measured. 0: it is not measured."""
    adamw_bytes: int
    """Gradients and states that AdamW's rate is measured on; less where the run has less memory to spare."""


BRIEF = MeasurementBudget(
    seconds=0.2, span_bytes=128 * MIB, buffer_bytes=32 * MIB, memory_bytes=0, adamw_bytes=512 * MIB
)
"""About a second and, next to what AdamW reads, little memory, because a run may have none to spare. For the start of a
run."""

FULL = MeasurementBudget(
    seconds=2.0, span_bytes=256 * MIB, buffer_bytes=128 * MIB, memory_bytes=1024 * MIB, adamw_bytes=1024 * MIB
)
"""Less than half a minute. The buffers are larger than caches: drives read a third faster into a cached buffer
(scripts/bench/io.py). For `ratel profile`."""


def best_seconds(work: Callable[[], object], at_least_seconds: float) -> float:
    """The time of the fastest run. Runs `work` until the runs took `at_least_seconds`, after one run as a warm-up."""
    work()
    times: list[float] = []
    while sum(times) < at_least_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
