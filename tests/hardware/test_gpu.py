"""Which device computes, and what determinism means on it."""

from __future__ import annotations

import pytest
import torch
from torch.utils import deterministic

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware import gpu
from ratel_cli.hardware.gpu import compute_device, determinism


def test_cpu_means_the_cpu() -> None:
    assert compute_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_auto_means_the_cpu_and_cuda_is_an_error() -> None:
    assert compute_device("auto") == torch.device("cpu")
    with pytest.raises(EnvironmentFailure, match="PyTorch finds no CUDA device") as raised:
        compute_device("cuda")
    assert raised.value.hint == "set device: cpu, or leave it at auto"


@pytest.mark.parametrize(("device", "warns"), [("cpu", True), ("cuda", False)], ids=["cpu", "gpu"])
def test_an_operator_that_is_not_deterministic_warns_on_the_cpu_and_raises_on_a_gpu(device: str, warns: bool) -> None:
    """The backward of attention on a GPU is deterministic only if every operator must be."""

    def settings() -> tuple[bool, bool, bool]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        )

    before = settings()
    with determinism(True, torch.device(device), notice=pytest.fail):
        assert settings() == (True, warns, False)
        with determinism(False, torch.device(device), notice=pytest.fail):
            assert settings()[0] is False
        assert settings() == (True, warns, False)
    assert settings() == before


@pytest.mark.parametrize(("rate", "sizes"), [(1e12, [128, 1024]), (1.3e9, [128, 256]), (1e6, [128, 128])])
def test_a_slow_cpu_multiplies_smaller_matrices(monkeypatch: pytest.MonkeyPatch, rate: float, sizes: list[int]) -> None:
    asked: list[int] = []

    def rate_of_products(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
        asked.append(size)
        return rate

    monkeypatch.setattr(gpu, "_rate_of_products", rate_of_products)
    assert gpu.measure_device(torch.bfloat16, torch.device("cpu"), 0.1).flops_per_second == rate
    assert asked == sizes
