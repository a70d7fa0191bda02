"""The parts that measure Ratel's steps, some of them beside one layer."""

from __future__ import annotations

from scripts.bench.findings import Report
from scripts.bench.gpu_cases import CASES, measure_case
from scripts.gpu_kit import layers
from scripts.gpu_kit.machine import device_of_part


def measure_packed(report: Report) -> None:
    """Packed rows and whole ones, next to plain PyTorch."""
    _measure(report, "packed")


def measure_adapters(report: Report) -> None:
    """LoRA on bf16 and NF4, and Muon next to AdamW."""
    _measure(report, "lora", "nf4", "muon", "adamw")


def measure_small(report: Report) -> None:
    """Few tokens: where Python decides."""
    layers.measure(report, "small")
    _measure(report, "small")


def measure_long(report: Report) -> None:
    """Long rows: where memory decides."""
    layers.measure(report, "long")
    _measure(report, "long")


def measure_little_memory(report: Report) -> None:
    """12 GiB of main memory: activations go to the store."""
    _measure(report, "little memory")


def _measure(report: Report, *names: str) -> None:
    device_of_part()
    for name in names:
        measure_case(report, CASES[name])
