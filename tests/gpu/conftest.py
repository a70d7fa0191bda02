"""Every test on a GPU gets deterministic kernels and free memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from tests.simulated_gpu import has_gpu, install_if_asked, set_eagerness

install_if_asked()  # before any test checks for a GPU

# Before anything is multiplied on a GPU; a run does the same (hardware/gpu.py).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _eagerness(request: pytest.FixtureRequest) -> None:
    """On a simulated GPU, copies are always late in a third of the tests and half of the time in another third."""
    set_eagerness((0.0, 0.5, 1.0)[zlib.crc32(request.node.nodeid.encode()) % 3])


@pytest.fixture(autouse=True)
def _deterministic_like_a_run() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    if has_gpu():
        torch.accelerator.empty_cache()
