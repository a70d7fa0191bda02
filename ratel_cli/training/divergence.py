"""Decides what a loss or gradient that is not finite means: divergence of the training, or a fault of the machine.

The loop computes such a step a second time, from the same state and with the same random draws. Invariant: a step is a
function of (configuration, step). So the same bits twice mean divergence, and other bits mean that something was moved
or computed wrongly. Without `deterministic`, bits may differ; then two results that are not finite mean divergence.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.errors import Diverged, IntegrityFailure, RatelError

_MOST_SAMPLES = 20


def diagnose_nonfinite_step(
    step: int,
    first: StepOutcome,
    second: StepOutcome,
    batches: Sequence[AnyModelBatch],
    *,
    scale_loss: bool,
    deterministic: bool,
) -> RatelError:
    """The error that ends the run: Diverged, or IntegrityFailure for a fault of the machine.

    `step` counts from 1. `first` and `second` are the outcomes of the two computations; `first` was not applied.
    """
    which = f"step {step} (samples {_named_samples(batches)})"
    is_repeated = _bits(first) == _bits(second) if deterministic else not second.applied
    if not is_repeated:
        return IntegrityFailure(
            f"{which} gave different results when computed twice from the same state: loss {first.loss}, gradient "
            f"norm {first.grad_norm}, then loss {second.loss}, gradient norm {second.grad_norm}; this points to a "
            f"hardware fault; step {step - 1} is saved",
            "test the memory and the processor, look for errors in dmesg, then resume",
        )
    hint = (
        "look at these samples; or lower learning_rate and train anew with another output_dir, since the steps before "
        "may have spoiled the weights already"
    )
    if scale_loss:
        hint += "; or use dtype: bfloat16, which has more range than float16"
    return Diverged(
        f"{which}: {_what(first)}, also when it was computed again from the same state; the step was not applied, and "
        f"step {step - 1} is saved",
        hint,
    )


def _bits(outcome: StepOutcome) -> tuple[bytes, str | None]:
    """The outcome as bits, to compare: NaN is not equal to itself."""
    return struct.pack("<dd", outcome.loss, outcome.grad_norm), outcome.first_not_finite


def _what(outcome: StepOutcome) -> str:
    if not math.isfinite(outcome.loss):
        return f"the loss is {outcome.loss}"
    place = f", first in {outcome.first_not_finite}" if outcome.first_not_finite else ""
    return f"the gradient norm is {outcome.grad_norm}{place}"


def _named_samples(batches: Sequence[AnyModelBatch]) -> str:
    samples = sorted({sample for batch in batches for sample in batch.sample_ids})
    return ", ".join(map(str, samples[:_MOST_SAMPLES])) + (", ..." if len(samples) > _MOST_SAMPLES else "")
