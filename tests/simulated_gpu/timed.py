"""Time on the simulated GPU: work lasts by rates that a test gives (clock.h), so that overlap can be asserted.

The host's own clock goes on, so a test chooses durations that are long against what Python and the CPU take for the
same work. What the CPU and the drives do takes its real time; `ThrottledQueue` slows drives down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast the simulated GPU is."""

    flops_per_second: float
    """Of products of matrices."""
    up_bytes_per_second: float
    down_bytes_per_second: float
    memory_bytes_per_second: float = math.inf
    """Of the bytes that an operator reads and writes, where that takes longer than its FLOPs."""
    launch_seconds: float = 4e-6
    """Of each operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the simulated GPU has done."""

    flops: float
    memory_bytes: float
    """What operators without FLOPs read and wrote."""
    up_bytes: float
    down_bytes: float
    computing_seconds: float
    """How long operators took, whatever they waited for; 0 where work takes no time."""

    def __sub__(self, before: Work) -> Work:
        return Work(**{each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(Work)})


def work_so_far() -> Work:
    """Since the process began."""
    from tests.simulated_gpu import module

    return Work(**dict(zip((each.name for each in fields(Work)), module.counts(), strict=True)))


@contextmanager
def timed(rates: Rates) -> Iterator[None]:
    """Let work on the simulated GPU last, inside the `with` statement."""
    from tests.simulated_gpu import module

    torch.accelerator.synchronize()
    module.set_rates(
        rates.flops_per_second,
        rates.memory_bytes_per_second,
        rates.up_bytes_per_second,
        rates.down_bytes_per_second,
        rates.launch_seconds,
    )
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        module.forget_rates()
