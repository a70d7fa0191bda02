"""What a training loop follows, and what it calls.

Invariant: settings do not change during a run, except what a new plan predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratel_cli.engine.measure.telemetry import StepTimes
from ratel_cli.training.best import BestRule
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.schedule import LearningRateSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings that do not change during a run."""

    num_steps: int
    """Steps in the whole run, those before a resume included."""
    micro_batches_per_step: int
    schedule: LearningRateSchedule
    deterministic: bool
    """Whether a step that is run again must give the same bits."""
    scale_loss: bool
    """Dynamic loss scaling: a step whose gradients overflow is skipped. Without it, such a step ends the run."""
    eval_steps: int | None
    """Evaluate every N steps. The last step is always evaluated."""
    save_steps: int | None
    """Save every N steps. None: never."""
    save_total_limit: int
    """The most saved steps; the oldest is dropped first. The best step is one of them, and if there is but one, one
    more."""
    first_step: int
    """The step that the store was made with: 0, or the step of another run that this one started from."""
    max_bytes_written: int | None
    """End the run before the step that would write more than this to the store."""
    flops_per_token: float
    """Forward and backward of the model."""
    flops_recomputed_per_token: float
    """The part of the forward that backward computes again."""
    predicted_seconds: float
    """Seconds that the plan predicts for a step that is clipped."""
    predicted_unclipped_seconds: float
    """Seconds that it predicts for any other step."""
    planned_nvme_bytes: int
    """Bytes that the plan has a step read from the drives and write to them."""
    best: BestRule | None = None
    """None: no step is the best, and the run has all its steps."""
    num_copied: int = 0
    """Slots of the store that saved steps must leave free, for the generation that is copied to a snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCallbacks:
    """What the loop calls, always in its own thread."""

    check_stop: Callable[[], None] = lambda: None
    """Called before each step and during evaluations. It raises Interrupted to end the run."""
    announce: Callable[[StepMetrics], None] = lambda metrics: None
    """Called with a step's metrics before the step is committed."""
    trace_step: Callable[[int, StepTimes, float], None] = lambda step, times, start: None
    """Called with a step's number (from 1), its times, and its start by `perf_counter`."""
    after_commit: Callable[[], None] = lambda: None
    """Called when the loop begins, and after every commit."""
    after_save: Callable[[int, Sequence[int]], None] = lambda step, dropped: None
    """Called with a step that was saved, and with the saved steps that were dropped for it."""
    before_evaluation: Callable[[int], None] = lambda step: None
    """Called with a step that is committed and will be evaluated."""
    best_is_lost: Callable[[int, int | None], None] = lambda best, saved: None
    """Called when the loop begins, if the best step is not saved any more: with it, and with the best that is saved."""
    evaluated_again: Callable[[StepMetrics], None] = lambda metrics: None
    """Called with the last step of an earlier process, which ended before the step was evaluated."""
