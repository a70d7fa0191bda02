"""A step that is not finite is computed twice: the same bits are divergence, other bits a fault of the machine."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest

from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.errors import Diverged, IntegrityFailure, Interrupted, RatelError
from ratel_cli.training.divergence import diagnose_nonfinite_step
from tests.training.loop_fakes import BAD_TENSOR, Failure, Run, micro_batch

INFINITE = (0.5, math.inf)
NOT_A_NUMBER = (math.nan, math.nan)
OTHER_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0001))[0]


def outcome(loss: float, norm: float, first_not_finite: str | None = BAD_TENSOR) -> StepOutcome:
    return StepOutcome(
        loss=loss,
        grad_norm=norm,
        forward_seconds=0.0,
        swapped_bytes=0,
        applied=False,
        clipped=False,
        first_not_finite=first_not_finite,
    )


def diagnosis(
    first: StepOutcome, second: StepOutcome, *, scale_loss: bool = False, deterministic: bool = True
) -> RatelError:
    batches = [micro_batch(4, 9), micro_batch(4, 2)]
    return diagnose_nonfinite_step(3, first, second, batches, scale_loss=scale_loss, deterministic=deterministic)


@pytest.mark.parametrize(
    ("twice", "what"),
    [
        (outcome(math.nan, math.nan, "the loss"), "the loss is nan, also when it was computed again from"),
        (outcome(math.inf, math.nan, "the loss"), "the loss is inf, also when it was computed again from"),
        (
            outcome(0.5, math.inf),
            f"the gradient norm is inf, first in {BAD_TENSOR}, also when it was computed again from",
        ),
        (
            outcome(0.5, math.nan),
            f"the gradient norm is nan, first in {BAD_TENSOR}, also when it was computed again from",
        ),
        (outcome(0.5, math.inf, None), "the gradient norm is inf, also when it was computed again from"),
    ],
)
def test_the_same_bits_twice_are_divergence(twice: StepOutcome, what: str) -> None:
    error = diagnosis(twice, twice)
    assert isinstance(error, Diverged)
    assert error.message.startswith(f"step 3 (samples 2, 4, 9): {what}")
    assert error.message.endswith("step 2 is saved")
    assert error.hint is not None and "float16" not in error.hint


def test_without_determinism_other_bits_are_divergence_too() -> None:
    first, second = outcome(0.5, math.inf), outcome(0.25, math.nan)
    assert isinstance(diagnosis(first, second), IntegrityFailure)
    assert isinstance(diagnosis(first, second, deterministic=False), Diverged)
    finite = replace(second, grad_norm=1.0, applied=True)
    assert isinstance(diagnosis(first, finite, deterministic=False), IntegrityFailure)


def test_the_hint_names_the_samples_and_what_to_train_anew_with() -> None:
    hint = diagnosis(outcome(*NOT_A_NUMBER), outcome(*NOT_A_NUMBER)).hint
    assert hint is not None and hint.startswith("look at these samples; or lower learning_rate and train anew")
    assert "another output_dir" in hint, "the weights that are saved may be spoiled"


def test_with_loss_scaling_the_hint_names_a_dtype() -> None:
    hint = diagnosis(outcome(0.5, math.inf), outcome(0.5, math.inf), scale_loss=True).hint
    assert hint is not None and "bfloat16" in hint


@pytest.mark.parametrize(
    "second",
    [
        outcome(0.5, 0.25, None),
        outcome(0.5, math.nan),
        outcome(math.nextafter(0.5, 1.0), math.inf),
        outcome(0.5, math.inf, "layers.1.weight"),
        outcome(math.nan, math.nan, "the loss"),
    ],
)
def test_other_bits_are_a_fault_of_the_machine(second: StepOutcome) -> None:
    error = diagnosis(outcome(0.5, math.inf), second)
    assert isinstance(error, IntegrityFailure)
    assert error.message.startswith(
        "step 3 (samples 2, 4, 9) gave different results when computed twice from the same state: loss 0.5, "
        f"gradient norm inf, then loss {second.loss}, gradient norm {second.grad_norm}"
    )
    assert error.message.endswith("this points to a hardware fault; step 2 is saved")


def test_a_nan_with_other_bits_is_another_result() -> None:
    assert math.isnan(OTHER_NAN)
    error = diagnosis(outcome(math.nan, math.nan, "the loss"), outcome(OTHER_NAN, math.nan, "the loss"))
    assert isinstance(error, IntegrityFailure)


def test_a_long_list_of_samples_is_cut() -> None:
    batches = [micro_batch(*range(30))]
    error = diagnose_nonfinite_step(
        1, outcome(math.nan, math.nan), outcome(math.nan, math.nan), batches, scale_loss=False, deterministic=True
    )
    assert error.message.startswith("step 1 (samples " + ", ".join(map(str, range(20))) + ", ...): ")


@pytest.mark.parametrize(
    ("runs", "kind"),
    [
        ([INFINITE, INFINITE], Diverged),
        ([NOT_A_NUMBER, NOT_A_NUMBER], Diverged),
        ([INFINITE, (0.5, 0.5)], IntegrityFailure),
        ([INFINITE, NOT_A_NUMBER], IntegrityFailure),
        ([NOT_A_NUMBER, (0.5, 0.5)], IntegrityFailure),
    ],
)
def test_the_step_is_computed_twice_and_never_committed(runs: list[Failure], kind: type[RatelError]) -> None:
    run = Run(failing={1: list(runs)}, save_steps=1)
    with pytest.raises(kind, match="step 1 is saved"):
        run.run_all()
    assert run.events == ["run 1", "settle", "commit 1", "pin 1", "report 1", "run 2", "run 2"]
    assert run.engine.asked[-1] == run.engine.asked[-2]
    assert [metrics.step for _, metrics in run.announced] == [1]


def test_a_recorded_step_is_recorded_once() -> None:
    recording = StepRecording()
    run = Run(failing={0: [INFINITE, INFINITE]}, recording=recording)
    with pytest.raises(Diverged):
        run.run_all()
    assert run.engine.recorded == [recording, None]


def test_a_stop_during_the_second_computation_is_a_stop() -> None:
    run = Run(failing={1: [INFINITE, Interrupted(2, "Stopped.")]})
    with pytest.raises(Interrupted):
        run.run_all()
    assert run.store.progress.step == 1


def test_a_skipped_overflow_is_not_computed_again() -> None:
    run = Run(scale_loss=True, failing={1: [INFINITE]})
    run.run_all()
    assert [event for event in run.events if event.startswith("run")] == ["run 1", "run 2", "run 3", "run 4"]
