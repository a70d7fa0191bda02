"""Simulates a GPU: `RATEL_SIMULATED_GPU=1 python -m pytest tests/gpu` runs the tests of the GPU without one.

`device.cpp` is a device of torch's kind PrivateUse1, which every build of torch has, those for CUDA too: tensors on it
have memory of their own, operators compute on the CPU, and copies on streams happen at random either at once or as late
as events allow. `module.py` is its device module, as `torch.cuda` is CUDA's. Ratel uses a GPU through `torch.Stream`,
`torch.Event`, `torch.accelerator` and the GPU's device module, so it runs on this one as on CUDA.

It shows that the engine's GPU path runs, respects the order of streams, takes the memory that was planned and gives
the right bits; and in a test that gives it rates (`timed.py`), what overlaps and what the GPU waits for. It shows
nothing about the speed of a GPU's own kernels, or about CUDA where CUDA differs from this simulation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ratel_cli.hardware import gpu

_NAME = "simulated"


def install_if_asked() -> None:
    """Give this process the simulated GPU for the rest of its life, if RATEL_SIMULATED_GPU is 1. Idempotent.

    Does nothing on a machine with a real GPU: its tests run on that.
    """
    if os.environ.get("RATEL_SIMULATED_GPU") == "1" and not is_simulated() and not torch.cuda.is_available():
        from tests.simulated_gpu import module

        module.install()
        gpu._MATMUL_SIZES["gpu"] = 256  # its speed does not matter


def is_simulated() -> bool:
    """True if the GPU of this process is simulated."""
    return torch._C._get_privateuse1_backend_name() == _NAME


def has_gpu() -> bool:
    """True if this process has a GPU, a real or a simulated one."""
    return is_simulated() or torch.cuda.is_available()


def gpu_of_this_process() -> torch.device:
    """The GPU that tests use. On a machine without one, name it only in tests that are skipped there."""
    return torch.device(_NAME if is_simulated() else "cuda")


def num_stops() -> int:
    """How often the host has waited for a number to be computed. On a simulated GPU only."""
    from tests.simulated_gpu import module

    return module.num_stops()


def set_eagerness(share: float) -> None:
    """Set how often queued copies happen at once: 0 never (as late as allowed), 1 always. No effect on a real GPU."""
    if is_simulated():
        from tests.simulated_gpu import module

        module.set_eagerness(share)


@contextmanager
def pinning(*, refusals: int = 0, most_bytes: int = sys.maxsize, seconds_per_byte: float = 0.0) -> Iterator[None]:
    """Inside the `with` statement, how the simulated GPU registers host memory: it refuses the next `refusals` ranges,
    and those of more than `most_bytes`; and nothing else is done on the GPU while it registers one."""
    from tests.simulated_gpu import module

    module.set_pinning(refusals, most_bytes, seconds_per_byte)
    try:
        yield
    finally:
        module.set_pinning(0, sys.maxsize, 0.0)
