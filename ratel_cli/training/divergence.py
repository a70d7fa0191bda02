"""What a step whose loss or gradients are not finite means: training diverged, or the machine errs.

`training.loop` runs such a step a second time, from the same state and with the same draws, and raises what
`diagnose_nonfinite_step` returns. Invariant: a step is a function of (configuration, step), so other bits in the
second run mean that something moved or computed them wrongly; only the same bits are called divergence. Where the
user gave up determinism for speed, bits mean nothing, and two runs that are not finite do.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.state import StepOutcome
from ratel_cli.errors import Diverged, IntegrityFailure, RatelError

_MOST_SAMPLES = 20


def diagnose_nonfinite_step(
    step: int,
    first: StepOutcome,
    second: StepOutcome,
    batches: Sequence[MicroBatch],
    *,
    scale_loss: bool,
    deterministic: bool,
) -> RatelError:
    """The error that ends the run; `step` counts from 1, and `first` was not applied."""
    samples = _named_samples(batches)
    is_repeated = _bits(first) == _bits(second) if deterministic else not second.applied
    if not is_repeated:
        return IntegrityFailure(
            f"step {step} came out differently when it was run again from the same state: loss {first.loss}, gradient "
            f"norm {first.grad_norm}, then loss {second.loss}, gradient norm {second.grad_norm}; the hardware is "
            f"suspected, and step {step - 1} stands (samples {samples})",
            "test memory and processor, look for errors in dmesg, then resume",
        )
    hint = "lower learning_rate, or look at those samples"
    if scale_loss:
        hint += "; dtype: bfloat16 has more range than float16"
    return Diverged(
        f"step {step}: {_what(first)}, and again when it was run again; the step was not applied and "
        f"step {step - 1} stands (samples {samples})",
        hint,
    )


def _bits(outcome: StepOutcome) -> tuple[bytes, str | None]:
    """Compared as bits: NaN equals no number, not even itself."""
    return struct.pack("<dd", outcome.loss, outcome.grad_norm), outcome.first_not_finite


def _what(outcome: StepOutcome) -> str:
    if not math.isfinite(outcome.loss):
        return f"the loss is {outcome.loss}"
    place = f", first in {outcome.first_not_finite}" if outcome.first_not_finite else ""
    return f"the gradient norm is {outcome.grad_norm}{place}"


def _named_samples(batches: Sequence[MicroBatch]) -> str:
    samples = sorted({sample for batch in batches for sample in batch.sample_ids})
    return ", ".join(map(str, samples[:_MOST_SAMPLES])) + (", ..." if len(samples) > _MOST_SAMPLES else "")
