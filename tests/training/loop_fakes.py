"""Fakes of everything that the training loop uses. Each notes what the loop asks of it, all in one list of events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.measure.telemetry import SpanLabel, StepTimes, Timeline
from ratel_cli.engine.replay.loss import EvaluatedSums
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.errors import Interrupted
from ratel_cli.store.manifest import Progress
from ratel_cli.training.loop import TrainingLoop
from ratel_cli.training.loop_settings import LoopCallbacks, LoopSettings
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.schedule import LearningRateSchedule

Failure = tuple[float, float] | Exception
BAD_TENSOR = "layers.0.weight"

SLOT_BYTES = 1200
SETTINGS = LoopSettings(
    deterministic=True,
    num_steps=4,
    micro_batches_per_step=2,
    schedule=LearningRateSchedule(scheduler="linear", peak=1e-3, num_warmup_steps=1, num_steps=4),
    scale_loss=False,
    eval_steps=None,
    save_steps=None,
    save_total_limit=1,
    first_step=0,
    max_bytes_written=None,
    flops_per_token=3e9,
    flops_recomputed_per_token=0.75e9,
    predicted_seconds=0.125,
    predicted_unclipped_seconds=0.0625,
    planned_nvme_bytes=26,
)


def micro_batch(*sample_ids: int, num_targets: int = 3, num_tokens: int = 5) -> MicroBatch:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    return MicroBatch(
        input_ids=ids,
        targets=ids,
        position_ids=ids,
        sample_ids=sample_ids,
        num_targets=num_targets,
        num_tokens=num_tokens,
    )


class FakeStore:
    """Generations without bytes."""

    slot_bytes = SLOT_BYTES
    made_bytes = 2 * SLOT_BYTES
    num_slots: int = 1 << 20

    def __init__(self, events: list[str], *, step: int = 0, loss_scale: float = 65536.0) -> None:
        self.progress = Progress(step=step, updates=step, loss_scale=loss_scale, good_steps=0, tokens=10 * step)
        self.pinned_steps: tuple[int, ...] = ()
        self._events = events

    def commit(self, progress: Progress) -> None:
        self._events.append(f"commit {progress.step}")
        self.progress = progress

    def commit_progress(self, progress: Progress, *, may_fall_back: bool) -> None:
        assert not may_fall_back, "one rank alone keeps the generation before"
        self._events.append(f"commit_progress {progress.step}")
        self.progress = progress

    def pin(self) -> None:
        assert len(self.pinned_steps) < self.num_slots - 2, "no slot is left"
        self._events.append(f"pin {self.progress.step}")
        self.pinned_steps = (*self.pinned_steps, self.progress.step)

    def unpin(self, step: int) -> None:
        self._events.append(f"unpin {step}")
        self.pinned_steps = tuple(pinned for pinned in self.pinned_steps if pinned != step)


class FakeQueue:
    """Counts the bytes that the fake engine reports."""

    read_bytes = 1000
    written_bytes = 2000


class FakeEngine:
    """The loss of a step is a function of the step's arguments.

    `failing` maps steps to (loss, norm) or to an error. A list has one of them for each time that the step is computed.
    """

    def __init__(
        self, events: list[str], queue: FakeQueue, timeline: Timeline, failing: dict[int, Failure | list[Failure]]
    ) -> None:
        self.asked: list[tuple[int, int, float, float, tuple[int, ...]]] = []
        self.evaluated: list[tuple[int, ...]] = []
        self.recorded: list[StepRecording | None] = []
        self.evaluation: Callable[[], float] | None = None
        """The sum of an evaluation's losses; None: it follows from the samples."""
        self._events = events
        self._queue = queue
        self._timeline = timeline
        self._unsettled = False
        self._failing = failing

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        step: int,
        update: int,
        learning_rate: float,
        group_rates: tuple[float, ...],
        loss_scale: float,
        commit_previous: Callable[[], None],
        recording: StepRecording | None,
        first_micro_batch: int,
    ) -> StepOutcome:
        assert first_micro_batch == 0 and group_rates == ()
        self.recorded.append(recording)
        samples = tuple(sample for batch in batches for sample in batch.sample_ids)
        self.asked.append((step, update, learning_rate, loss_scale, samples))
        self._events.append(f"run {step + 1}")
        self._queue.read_bytes += 14
        self._queue.written_bytes += 12
        with self._timeline.during("optimizer", SpanLabel(text="AdamW", block=0, stage="update")):
            pass
        outcome = self._failing.get(step, (1.0 / (1 + step + update + learning_rate), 0.5))
        if isinstance(outcome, list):
            outcome = outcome.pop(0)
        if isinstance(outcome, Interrupted):  # in the forward, before the previous step is settled
            raise outcome
        if self._unsettled:
            self._unsettled = False
            commit_previous()
        if isinstance(outcome, Exception):
            raise outcome
        loss, norm = outcome
        self._unsettled = math.isfinite(loss) and math.isfinite(norm)
        return StepOutcome(
            loss=loss,
            grad_norm=norm,
            forward_seconds=0.0,
            swapped_bytes=5,
            applied=self._unsettled,
            clipped=self._unsettled,
            first_not_finite=None if self._unsettled else BAD_TENSOR if math.isfinite(loss) else "the loss",
        )

    def take_over(self, other: FakeEngine, events: list[str]) -> FakeEngine:
        """What another engine has left to do is this one's; its events go where that one's do."""
        self._unsettled, other._unsettled = other._unsettled, False
        self._events = events
        events.append("take over")
        return self

    def settle(self) -> None:
        assert self._unsettled
        self._unsettled = False
        self._events.append("settle")

    def evaluate(self, batches: Sequence[MicroBatch]) -> EvaluatedSums:
        samples = tuple(sample for batch in batches for sample in batch.sample_ids)
        self.evaluated.append(samples)
        self._events.append("evaluate")
        with self._timeline.during("compute", SpanLabel(text="forward", block=0, stage="forward")):
            num_targets = sum(batch.num_targets for batch in batches)
            if self.evaluation is not None:
                return EvaluatedSums(self.evaluation() * num_targets, None, num_targets)
            return EvaluatedSums(float(sum(sample**2 for sample in samples)), None, num_targets)


class FakeData:
    """Two micro-batches for each step. Held-out micro-batches have 1, 2, 3 ... targets."""

    def __init__(self, num_eval_batches: int) -> None:
        self.num_eval_samples = num_eval_batches

    def step(self, step_index: int) -> list[MicroBatch]:
        return [micro_batch(step_index, 100 + step_index), micro_batch(200 + step_index)]

    def eval_batches(self) -> Iterator[MicroBatch]:
        for number in range(1, self.num_eval_samples + 1):
            yield micro_batch(number, num_targets=number)


class Run:
    """A loop with its fakes."""

    def __init__(
        self,
        *,
        step: int = 0,
        pinned: tuple[int, ...] = (),
        loss_scale: float = 65536.0,
        failing: dict[int, Failure | list[Failure]] | None = None,
        num_eval_batches: int = 0,
        check_stop: Callable[[], None] = lambda: None,
        notes_commits: bool = False,
        recording: StepRecording | None = None,
        eval_losses: dict[int, float] | None = None,
        earlier: Sequence[StepMetrics] = (),
        num_slots: int = 1 << 20,
        **changes: object,
    ) -> None:
        """`eval_losses`: of each step that is evaluated; else the samples decide."""
        self.events: list[str] = []
        self._notes_commits = notes_commits
        self.store = FakeStore(self.events, step=step, loss_scale=loss_scale)
        self.store.pinned_steps, self.store.num_slots = pinned, num_slots
        timeline, queue = Timeline(), FakeQueue()
        self.engine = FakeEngine(self.events, queue, timeline, failing or {})
        settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
        schedule = replace(settings.schedule, num_steps=settings.num_steps)
        if eval_losses is not None:
            losses = eval_losses
            self.engine.evaluation = lambda: losses[self.store.progress.step]
        self.evaluated_again: list[StepMetrics] = []
        self.saved: list[tuple[int, Sequence[int]]] = []
        self.lost: list[tuple[int, int | None]] = []
        self.loop = TrainingLoop(
            self.engine,
            store=self.store,
            queue=queue,
            data=FakeData(num_eval_batches),
            settings=replace(settings, schedule=schedule),
            timeline=timeline,
            callbacks=LoopCallbacks(
                check_stop=check_stop,
                announce=self._announce,
                after_commit=self._after_commit,
                trace_step=self._trace,
                after_save=lambda step, dropped: self.saved.append((step, tuple(dropped))),
                best_is_lost=lambda best, saved: self.lost.append((best, saved)),
                evaluated_again=self.evaluated_again.append,
            ),
            recording=recording,
            earlier=earlier,
        )
        self.announced: list[tuple[int, StepMetrics]] = []
        """Each with the step that was committed at that moment."""
        self.traced: list[tuple[int, StepTimes]] = []
        self.reported: list[StepMetrics] = []

    def run_all(self) -> list[StepMetrics]:
        """Run all steps. `reported` has what the loop yielded, also if the run ends with an error."""
        for metrics in self.loop.steps():
            self.events.append(f"report {metrics.step}")
            self.reported.append(metrics)
        return self.reported

    def _after_commit(self) -> None:
        if self._notes_commits:
            self.events.append(f"after commit {self.store.progress.step}")

    def _trace(self, step: int, times: StepTimes, start: float) -> None:
        assert start <= time.perf_counter()
        self.traced.append((step, times))

    def _announce(self, metrics: StepMetrics) -> None:
        self.announced.append((self.store.progress.step, metrics))
