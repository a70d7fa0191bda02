"""Time on the simulated GPU: work lasts by rates that a test gives (clock.h), so that overlap can be asserted.

The host's own clock goes on, so a test chooses durations that are long against what Python and the CPU take for the
same work. What the CPU and the drives do takes its real time; `ThrottledQueue` slows drives down.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast the simulated GPU is."""

    flops_per_second: float
    """Of products of matrices. Everything else that is computed takes no time."""
    up_bytes_per_second: float
    down_bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the simulated GPU has done."""

    flops: float
    up_bytes: float
    down_bytes: float

    def __sub__(self, before: Work) -> Work:
        return Work(
            flops=self.flops - before.flops,
            up_bytes=self.up_bytes - before.up_bytes,
            down_bytes=self.down_bytes - before.down_bytes,
        )


def work_so_far() -> Work:
    """Since the process began."""
    from tests.simulated_gpu import module

    flops, up_bytes, down_bytes = module.counts()
    return Work(flops=flops, up_bytes=up_bytes, down_bytes=down_bytes)


@contextmanager
def timed(rates: Rates) -> Iterator[None]:
    """Let work on the simulated GPU last, inside the `with` statement."""
    from tests.simulated_gpu import module

    torch.accelerator.synchronize()
    module.set_rates(rates.flops_per_second, rates.up_bytes_per_second, rates.down_bytes_per_second)
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        module.forget_rates()
