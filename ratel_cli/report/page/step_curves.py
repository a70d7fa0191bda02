"""What is drawn over the steps besides the loss, in the terminal and in the picture of the model card.

Invariant: each curve has one value for each step, and all of them follow from the steps alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import TRAFFIC_UNITS, byte_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """One curve over the steps."""

    name: str
    unit: str
    values: Sequence[float]
    predicted: Sequence[float] = ()
    """What was predicted of each step; empty if nothing was."""


def step_curves(steps: Sequence[StepMetrics]) -> list[StepCurve]:
    """The curves of some steps, at least one, in their order. That of the GPU's memory only if the run had a GPU."""
    predicted = [each.predicted_seconds for each in steps]
    written = list(accumulate(each.nvme_written_bytes for each in steps))
    unit, size = next((each for each in TRAFFIC_UNITS if written[-1] >= each[1]), TRAFFIC_UNITS[-1])
    curves = [
        StepCurve(name="learning rate", unit="", values=[each.learning_rate for each in steps]),
        StepCurve(name="gradient norm", unit="", values=[each.grad_norm for each in steps]),
        StepCurve(name="speed", unit="tokens/s", values=[each.tokens_per_second for each in steps]),
        StepCurve(
            name="step time",
            unit="seconds",
            values=[each.step_seconds for each in steps],
            predicted=predicted if any(map(isfinite, predicted)) else (),
        ),
        _memory("RAM at the peak", [each.host_peak_bytes for each in steps]),
        StepCurve(name="written to NVMe", unit=f"{unit} in all", values=[each / size for each in written]),
    ]
    if any(each.gpu_peak_bytes for each in steps):
        curves.insert(5, _memory("GPU memory at the peak", [each.gpu_peak_bytes for each in steps]))
    return curves


def _memory(name: str, sizes: Sequence[int]) -> StepCurve:
    unit, size = byte_unit(max(sizes))
    return StepCurve(name=name, unit=unit, values=[each / size for each in sizes])
