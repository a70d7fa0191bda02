"""The parts that measure one layer."""

from __future__ import annotations

from scripts.bench.findings import Report
from scripts.bench.gpu_layer import PARTS
from scripts.gpu_kit.machine import device_of_part


def measure_layer(report: Report) -> None:
    """Kernels of a layer, and what determinism costs."""
    measure(report, "kernels", "determinism")


def measure_masks(report: Report) -> None:
    """Masks of packed rows."""
    measure(report, "masks")


def measure_quantised(report: Report) -> None:
    """Rates of dequantising."""
    measure(report, "dequantising")


def measure_remedies(report: Report) -> None:
    """What other kernels would give: adapters under autocast, fused functions, compiled code."""
    measure(report, "adapters", "fused", "compiled")


def measure(report: Report, *names: str) -> None:
    """Parts of `bench.gpu_layer`."""
    device = device_of_part()
    for name in names:
        PARTS[name](report, device)
