"""The training loop: steps, commits, saves, evaluations.

`run.finetune` builds what it needs and iterates over `steps`. Invariant: everything a step depends
on is a function of (configuration, step), so the loop starts wherever the store's last commit ends and
goes on as if nothing had happened.

For each step:

    1. batches of the step; forward, backward, and the decision whether it applies    (engine.step)
       not finite, and not to be skipped: all of it once more, and the run ends      (training.divergence)
    2. announce the step, so that a crash after its commit cannot leave it unreported
    3. its update is written and committed beneath the next step's forward; or at once when it is time to
       save, to evaluate, or to end
    4. pin the generation, when it is time: a checkpoint, at no cost; and tell of the commit, for snapshots
    5. evaluate, when it is time
    6. report
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ratel_cli.data.dataset import MicroBatch
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.state import StepOutcome
from ratel_cli.engine.telemetry import RESOURCES, StepTimes, Timeline
from ratel_cli.errors import EnvironmentFailure, Interrupted
from ratel_cli.store.store import Progress
from ratel_cli.training.divergence import diagnose_nonfinite_step
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.schedule import LearningRateSchedule, LossScale


class Engine(Protocol):
    """What the loop needs of `engine.step.StepEngine`."""

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        step: int,
        update: int,
        learning_rate: float,
        loss_scale: float,
        commit_previous: Callable[[], None],
        recording: StepRecording | None,
    ) -> StepOutcome: ...
    def settle(self) -> None: ...
    def evaluate(self, batches: Sequence[MicroBatch]) -> float: ...


class Generations(Protocol):
    """What the loop needs of `movement.store.Store`."""

    @property
    def progress(self) -> Progress: ...
    @property
    def pinned_steps(self) -> tuple[int, ...]: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def nvme_bytes(self) -> int: ...
    def commit(self, progress: Progress) -> None: ...
    def commit_progress(self, progress: Progress) -> None: ...
    def pin(self) -> None: ...
    def unpin(self, step: int) -> None: ...


class TransferCounts(Protocol):
    """What the loop needs of `movement.queue.IoQueue`."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...


class Samples(Protocol):
    """What the loop needs of `training.data.TrainingData`."""

    @property
    def num_eval_samples(self) -> int: ...
    def step(self, step_index: int) -> list[MicroBatch]: ...
    def eval_batches(self) -> Iterator[MicroBatch]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What stays the same for all steps."""

    num_steps: int
    """Of the run."""
    micro_batches_per_step: int
    deterministic: bool
    """A step that is run again gives the same bits."""
    scale_loss: bool
    """Dynamic loss scaling: a step that overflows is skipped. Without it such a step ends the run."""
    eval_steps: int | None
    """Held-out samples are evaluated this often, and after the last step."""
    save_steps: int | None
    """Generations are kept this often."""
    save_total_limit: int
    """So many are kept, the newest ones."""
    max_bytes_written: int | None
    """End cleanly before the step that would bring what was written to the store above this."""
    flops_forward_per_token: float
    flops_recomputed_per_token: float
    """Of the forward, what backward runs again."""
    predicted_seconds: float


class TrainingLoop:
    """One run over the steps that the store has not committed yet."""

    def __init__(
        self,
        engine: Engine,
        store: Generations,
        queue: TransferCounts,
        data: Samples,
        schedule: LearningRateSchedule,
        settings: LoopSettings,
        *,
        timeline: Timeline,
        check_stop: Callable[[], None],
        host_peak_bytes: Callable[[], int],
        announce: Callable[[StepMetrics], None] = lambda metrics: None,
        draw: Callable[[int, StepTimes, float], None] = lambda step, times, start: None,
        committed: Callable[[], None] = lambda: None,
        recording: StepRecording | None = None,
    ) -> None:
        """With a `recording` the loop runs one step, which the recording takes in, and commits it."""
        self._engine = engine
        self._store = store
        self._queue = queue
        self._data = data
        self._schedule = schedule
        self._settings = settings
        self._timeline = timeline
        self._check_stop = check_stop
        self._host_peak_bytes = host_peak_bytes
        self._announce = announce
        """Told each step as it is decided, before it is committed."""
        self._draw = draw
        """Told the step, what happened in it, and when it began (by `perf_counter`)."""
        self._committed = committed
        """Called when the run begins, and after each commit: the store is there, not further."""
        self._recording = recording
        self._decided: Progress | None = None
        """Of a step that is not committed yet."""

    def steps(self) -> Iterator[StepMetrics]:
        """Run them all. A step that was yielded is committed when the next one is, and the last one already.

        Raises Diverged, IntegrityFailure, Interrupted, EnvironmentFailure. When it raises Diverged or Interrupted,
        every step that was yielded is committed.
        """
        # A run that was killed between commit and pin left its checkpoint out.
        self._save_if_due()
        self._committed()
        while self._progress.step < self._settings.num_steps:
            try:
                self._check_stop()
                self._check_wear()
                metrics = self._step()
            except Interrupted:
                self._commit_decided()
                raise
            self._save_if_due()
            try:
                eval_loss = self._evaluate() if self._eval_is_due(metrics.step) else None
            except Interrupted:
                yield metrics  # the step counts, without its evaluation
                raise
            yield replace(metrics, eval_loss=eval_loss)
            if self._recording is not None:
                return

    @property
    def _progress(self) -> Progress:
        """After the newest step, committed or not."""
        return self._decided or self._store.progress

    def _check_wear(self) -> None:
        limit, slot_bytes, step = self._settings.max_bytes_written, self._store.slot_bytes, self._progress.step
        # Making the store wrote all of it once, the import a generation, and every step another.
        written = self._store.nvme_bytes + (1 + step) * slot_bytes
        if limit is not None and written + slot_bytes > limit:
            self._commit_decided()
            raise EnvironmentFailure(
                f"step {step + 1} would write more than storage.max_tb_written allows "
                f"({written / 1e12:.3g} TB are written, a step writes {slot_bytes / 1e12:.3g} TB)",
                "raise storage.max_tb_written to train on; every step so far is committed",
            )

    def _step(self) -> StepMetrics:
        progress, settings = self._progress, self._settings
        start = time.perf_counter()
        read_bytes, written_bytes = self._queue.read_bytes, self._queue.written_bytes
        batches = self._data.step(progress.step)
        outcome = self._run(progress, batches, recording=self._recording)
        following = self._following(progress, outcome, batches)
        ends_here = self._ends_here(following.step)
        if outcome.applied and ends_here:
            self._engine.settle()
        seconds = time.perf_counter() - start
        times = self._timeline.take()
        self._draw(following.step, times, start)
        tokens = following.tokens - progress.tokens
        tera_per_second = sum(batch.input_ids.numel() for batch in batches) / seconds / 1e12
        metrics = StepMetrics(
            step=following.step,
            loss=outcome.loss,
            learning_rate=self._schedule.at(progress.step),
            grad_norm=outcome.grad_norm,
            tokens=tokens,
            step_seconds=seconds,
            forward_seconds=outcome.forward_seconds,
            backward_seconds=seconds - outcome.forward_seconds,
            tokens_per_second=tokens / seconds,
            tflops_model=3 * settings.flops_forward_per_token * tera_per_second,
            tflops_hardware=(3 * settings.flops_forward_per_token + settings.flops_recomputed_per_token)
            * tera_per_second,
            swapped_bytes=outcome.swapped_bytes,
            nvme_read_bytes=self._queue.read_bytes - read_bytes,
            nvme_written_bytes=self._queue.written_bytes - written_bytes,
            gpu_peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            host_peak_bytes=self._host_peak_bytes(),
            bottleneck=max(RESOURCES, key=lambda resource: times.busy[resource]),
            busy_seconds=times.busy,
            waited_seconds=times.waited,
            predicted_seconds=settings.predicted_seconds,
            applied=outcome.applied,
            eval_loss=None,
        )
        self._announce(metrics)
        if outcome.applied:
            self._decided = following
            if ends_here:
                self._commit()
        else:
            self._store.commit_progress(following)
            self._committed()
        return metrics

    def _run(
        self, progress: Progress, batches: Sequence[MicroBatch], *, recording: StepRecording | None
    ) -> StepOutcome:
        """The step after `progress`; the same one again if it was not applied."""
        return self._engine.run(
            batches,
            step=progress.step,
            update=progress.updates + 1,
            learning_rate=self._schedule.at(progress.step),
            loss_scale=progress.loss_scale if self._settings.scale_loss else 1.0,
            commit_previous=self._commit,
            recording=recording,
        )

    def _ends_here(self, step: int) -> bool:
        """Whether the step must be committed before anything else is done."""
        is_last = step == self._settings.num_steps or self._recording is not None
        return is_last or self._save_is_due(step) or self._eval_is_due(step)

    def _following(self, progress: Progress, outcome: StepOutcome, batches: Sequence[MicroBatch]) -> Progress:
        """What the step leads to. Not finite: it is run again, to tell divergence from a fault of the machine.

        Raises Diverged or IntegrityFailure; either way the generation before the step stands.
        """
        scale_loss = self._settings.scale_loss
        scale = LossScale(scale=progress.loss_scale, good_steps=progress.good_steps)
        if not outcome.applied and (not scale_loss or scale.exhausted):
            again = self._run(progress, batches, recording=None)
            raise diagnose_nonfinite_step(
                progress.step + 1,
                outcome,
                again,
                batches,
                scale_loss=scale_loss,
                deterministic=self._settings.deterministic,
            )
        if scale_loss:
            scale = scale.after(applied=outcome.applied)
        return replace(
            progress,
            step=progress.step + 1,
            updates=progress.updates + outcome.applied,
            loss_scale=scale.scale,
            good_steps=scale.good_steps,
            tokens=progress.tokens + sum(batch.num_tokens for batch in batches),
        )

    def _commit(self) -> None:
        """The newest step has been settled."""
        decided, self._decided = self._decided, None
        assert decided is not None
        with self._timeline.waiting("nvme write"):
            self._store.commit(decided)
        self._committed()

    def _commit_decided(self) -> None:
        """Settle and commit the newest step, if it is not yet."""
        if self._decided is not None:
            self._engine.settle()
            self._commit()

    def _save_is_due(self, step: int) -> bool:
        every = self._settings.save_steps
        return every is not None and step > 0 and step % every == 0 and step not in self._store.pinned_steps

    def _save_if_due(self) -> None:
        if not self._save_is_due(self._progress.step):
            return
        pinned = self._store.pinned_steps
        # The store has slots for the limit and no more: the oldest must go first.
        for oldest in pinned[: max(0, len(pinned) - self._settings.save_total_limit + 1)]:
            self._store.unpin(oldest)
        self._store.pin()

    def _eval_is_due(self, step: int) -> bool:
        every = self._settings.eval_steps
        is_time = step == self._settings.num_steps or (every is not None and step % every == 0)
        return is_time and self._data.num_eval_samples > 0

    def _evaluate(self) -> float | None:
        """Mean loss over the held-out samples, as many micro-batches at a time as a step has."""
        total, num_targets = 0.0, 0
        waiting: list[MicroBatch] = []
        for batch in self._data.eval_batches():
            self._check_stop()
            waiting.append(batch)
            num_targets += batch.num_targets
            if len(waiting) == self._settings.micro_batches_per_step:
                total += self._engine.evaluate(waiting)
                waiting = []
        if waiting:
            total += self._engine.evaluate(waiting)
        self._timeline.take()
        return total / num_targets if num_targets else None
