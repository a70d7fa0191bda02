"""Simulates a GPU: `RATEL_SIMULATED_GPU=1 python -m pytest tests/gpu` runs the tests of the GPU without one.

Torch without CUDA has all of torch.cuda's Python, but no device behind it. `device.cpp` is that device: tensors on
"cuda" have memory of their own, operators compute on the CPU, and copies on streams happen at random either at once or
as late as events allow. `cuda.py` builds the functions of `torch.cuda` that Ratel calls on top of it.

It shows that the engine's CUDA path runs, respects the order of streams, takes the memory that was planned and gives
the right bits. It shows nothing about speed, a GPU's own kernels, or CUDA where CUDA differs from this simulation.
"""

from __future__ import annotations

import os

import torch

from ratel_cli.hardware import gpu


def install_if_asked() -> None:
    """Replace CUDA by the simulated GPU for the rest of this process, if RATEL_SIMULATED_GPU is 1. Idempotent.

    Does nothing if torch was built for CUDA: then the tests need a real GPU.
    """
    if os.environ.get("RATEL_SIMULATED_GPU") == "1" and not torch.backends.cuda.is_built() and not is_simulated():
        from tests.simulated_gpu import cuda

        cuda.install()
        gpu._MATMUL_SIZES["cuda"] = 256  # its speed does not matter


def is_simulated() -> bool:
    """True if the GPU of this process is simulated."""
    return torch.cuda.is_available() and not torch.backends.cuda.is_built()


def num_stops() -> int:
    """How often the host has waited for a number to be computed. On a simulated GPU only."""
    from tests.simulated_gpu import cuda

    return cuda.num_stops()


def set_eagerness(share: float) -> None:
    """Set how often queued copies happen at once: 0 never (as late as allowed), 1 always. No effect on a real GPU."""
    if is_simulated():
        from tests.simulated_gpu import cuda

        cuda.set_eagerness(share)
