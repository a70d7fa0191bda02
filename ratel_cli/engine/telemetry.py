"""Where the time of a step goes.

`engine.step` and what it calls wrap every phase that keeps the compute thread: computing, reading,
writing, updating. `training.loop` turns the sums into the step line and `metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, get_args

Cause = Literal["compute", "nvme read", "nvme write", "optimizer"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class StepClock:
    """Seconds of one step by cause. The causes never overlap on the compute thread, so they add up."""

    def __init__(self) -> None:
        self._seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)

    @contextlib.contextmanager
    def during(self, cause: Cause) -> Iterator[None]:
        """Charge the time inside to `cause`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[cause] += time.perf_counter() - start

    def take(self) -> dict[Cause, float]:
        """The sums since the last call, which start again at zero."""
        taken, self._seconds = self._seconds, dict.fromkeys(CAUSES, 0.0)
        return taken
