"""A GPU where there is none: `RATEL_SIMULATED_GPU=1 python -m pytest tests/gpu` runs the tests of the GPU on it.

Torch without CUDA has all of its Python and no device behind it. `device.cpp` is that device: tensors on "cuda" lie in
memory of their own, operators compute on the CPU, and copies on streams happen as late as events let them, or at once,
as is drawn. `cuda.py` puts the functions of `torch.cuda` that Ratel calls on top of it.

It shows that the engine's CUDA path runs, keeps its order, takes the memory that was planned and gives the right bits.
It says nothing about speed, about a GPU's own kernels, and about CUDA where that differs from what is written here.
"""

from __future__ import annotations

import os

import torch

from ratel_cli.hardware import gpu


def install_if_asked() -> None:
    """Put the simulated GPU in CUDA's place, for the rest of this process. Idempotent.

    Not where torch was built for CUDA: there the tests want a real one.
    """
    if os.environ.get("RATEL_SIMULATED_GPU") == "1" and not torch.backends.cuda.is_built() and not is_simulated():
        from tests.simulated_gpu import cuda

        cuda.install()
        gpu._MATMUL_SIZES["cuda"] = 256  # its speed is of no interest


def is_simulated() -> bool:
    """Whether the GPU here is the simulated one."""
    return torch.cuda.is_available() and not torch.backends.cuda.is_built()


def num_stops() -> int:
    """How often the host has stood still until a number was computed, on a simulated GPU."""
    from tests.simulated_gpu import cuda

    return cuda.num_stops()


def set_eagerness(share: float) -> None:
    """How often what is queued happens at once, from 0, as late as it may, to 1. A real GPU does as it likes."""
    if is_simulated():
        from tests.simulated_gpu import cuda

        cuda.set_eagerness(share)
