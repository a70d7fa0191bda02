"""Which device computes, and how deterministic it is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device, set_determinism


@pytest.fixture
def _as_it_was() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def test_the_cpu_where_it_is_wanted() -> None:
    assert compute_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu() -> None:
    assert compute_device("auto") == torch.device("cpu")
    with pytest.raises(EnvironmentFailure, match="there is no CUDA device here") as raised:
        compute_device("cuda")
    assert raised.value.hint == "set device: cpu"


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize(("device", "warns"), [("cpu", True), ("cuda", False)])
def test_what_is_not_deterministic_warns_on_the_cpu_and_raises_on_a_gpu(device: str, warns: bool) -> None:
    """Attention's backward on a GPU is deterministic only where all else must be."""
    set_determinism(True, torch.device(device))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    assert not deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    set_determinism(False, torch.device(device))
    assert not torch.are_deterministic_algorithms_enabled()
