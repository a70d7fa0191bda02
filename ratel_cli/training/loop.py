"""The training loop: steps, commits, saves, evaluations.

Each step goes through these phases:

    1. check     for a request to stop, and that the step may be written to the drives
    2. compute   forward and backward, and the decision whether the update applies (engine/steps/step.py). If the step
                 is not finite and must not be skipped: run it once more, and end the run (training.divergence)
    3. announce  its metrics before its commit, so that a crash after the commit cannot leave the step unreported
    4. commit    its update: overlapped with the next step's forward, or at once if a save, an evaluation or the end
                 follows
    5. save      it, if due: pin the generation, which costs no writes
    6. evaluate  on the held-out samples, if due. Where the best step is saved (training.best), 5 follows 6
    7. report    its metrics to the caller

Invariant: everything that a step depends on is a function of (configuration, step). So a loop that resumes after the
store's last commit computes the same bits as a loop that was never interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ratel_cli.data.batches.latents import AnyData
from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.engine.measure.telemetry import StepTimes, Timeline
from ratel_cli.engine.ranks.commits import commit_progress_together, commit_together
from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.engine.replay.loss import NOTHING_EVALUATED, EvaluatedSums, mean_figures
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.errors import EnvironmentFailure, Interrupted
from ratel_cli.hardware.gpu import num_alloc_retries, peak_gpu_bytes
from ratel_cli.hardware.host import peak_resident_bytes
from ratel_cli.io.queue import IoQueue
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.store.store import Progress, Store
from ratel_cli.training.best import BestSoFar
from ratel_cli.training.divergence import diagnose_nonfinite_step
from ratel_cli.training.loop_settings import LoopCallbacks, LoopSettings
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.saved_steps import SavedSteps
from ratel_cli.training.schedule import LossScale
from ratel_cli.training.wear_limit import WearLimit
from ratel_cli.units import format_traffic


def may_skip(before: Progress, *, scale_loss: bool) -> bool:
    """Whether the step that follows `before` may overflow and not be applied, as a smaller scale can prevent that."""
    return scale_loss and not _loss_scale(before).exhausted


def progress_after(before: Progress, *, applied: bool, num_tokens: int, scale_loss: bool) -> Progress:
    """The progress that a step of `num_tokens` tokens leads to."""
    scale = _loss_scale(before)
    if scale_loss:
        scale = scale.after(applied=applied)
    return replace(
        before,
        step=before.step + 1,
        updates=before.updates + applied,
        loss_scale=scale.scale,
        good_steps=scale.good_steps,
        tokens=before.tokens + num_tokens,
    )


def _loss_scale(progress: Progress) -> LossScale:
    return LossScale(scale=progress.loss_scale, good_steps=progress.good_steps)


class TrainingLoop:
    """Runs the steps that the store has not committed yet."""

    def __init__(
        self,
        engine: StepEngine[Any],
        *,
        store: Store,
        queue: IoQueue,
        data: AnyData,
        settings: LoopSettings,
        timeline: Timeline,
        callbacks: LoopCallbacks,
        recording: StepRecording | None = None,
        ranks: Ranks = ALONE,
        earlier: Sequence[StepMetrics] = (),
    ) -> None:
        """With a `recording` the loop's first step records what each operator costs. `data`: what all `ranks` train
        on together. `earlier`: the steps that are done, of which those count that were evaluated, and the last one."""
        self._ranks = ranks
        self._has_computed = True
        self._engine = engine
        self._store = store
        self._queue = queue
        self._data = data
        self._settings = settings
        self._timeline = timeline
        self._callbacks = callbacks
        self._take_over: Callable[[], StepEngine[Any]] | None = None
        self._counted_bytes = (0, 0)
        """Bytes read and written that do not count for the next step. Updates go on between two steps."""
        self._recording = recording
        """Recording of the next step, if there is one."""
        self._uncommitted: Progress | None = None
        """Progress of the step that is computed but not yet committed; None if there is none."""
        self._saved = SavedSteps(store, settings, callbacks, ranks, earlier)
        self._last_done = earlier[-1] if earlier else None
        """Metrics of the last step that an earlier process has done; None if there is none."""

    def steps(self) -> Iterator[StepMetrics]:
        """Run all steps. A step is committed when the next one is yielded; the last one when it is yielded itself.

        Raises Diverged, IntegrityFailure, Interrupted, EnvironmentFailure. With Diverged and Interrupted, every step
        that was yielded is committed.
        """
        # A run that was killed between a commit and its save has still to save it, or to evaluate it.
        self._saved.find_best(self._progress.step)
        self._evaluate_again()
        self._saved.save_if_due(self._progress.step)
        self._callbacks.after_commit()
        self._count_bytes()
        while self._progress.step < self._settings.num_steps and not self.ends_early:
            try:
                # 1. check
                self._callbacks.check_stop()
                self._check_wear()
                # 2. compute, 3. announce, 4. commit
                metrics = self._step()
            except Interrupted:
                self._commit_pending()
                self._callbacks.check_stop()  # raises again, with the step that is committed now
                raise
            # 5. save
            if not self._saved.saves_best:
                self._saved.save_if_due(metrics.step)
            # 6. evaluate
            try:
                evaluated = self._evaluate(metrics) if self._eval_is_due(metrics.step) else metrics
            except Interrupted:
                yield metrics  # the step counts, without its evaluation
                raise
            self._saved.save_if_due(metrics.step)
            # 7. report
            yield evaluated

    def follow(self, take_over: Callable[[], StepEngine[Any]], settings: LoopSettings) -> None:
        """Run the steps that come on another engine.

        `take_over` makes it, as a part of the next step: it may wait for updates of the last one.
        """
        self._take_over, self._settings = take_over, settings

    @property
    def best(self) -> BestSoFar:
        """The best step so far."""
        return self._saved.best

    @property
    def best_saved(self) -> BestSoFar:
        """The best step that is saved, if the best one is."""
        return self._saved.best_saved

    @property
    def ends_early(self) -> bool:
        """Whether the evaluations end the run."""
        return self._saved.ends_run

    @property
    def has_computed(self) -> bool:
        """False if the last step had no micro-batch for this rank, as the last one of an epoch may."""
        return self._has_computed

    @property
    def is_committed(self) -> bool:
        """True if the last step is committed already: nothing of it overlaps with the next one."""
        return self._uncommitted is None

    @property
    def _progress(self) -> Progress:
        """After the last step that was computed, committed or not."""
        return self._uncommitted or self._store.progress

    def _check_wear(self) -> None:
        settings, step = self._settings, self._progress.step
        if settings.max_bytes_written is None:
            return
        limit = WearLimit(
            max_bytes=settings.max_bytes_written,
            store_bytes=self._store.made_bytes,
            slot_bytes=self._store.slot_bytes,
            first_step=settings.first_step,
        )
        if any(is_over for (is_over,) in self._ranks.gathered([step + 1 > limit.last_step])):
            self._commit_pending()
            failure = EnvironmentFailure(
                f"step {step + 1} would write more than storage.max_tb_written allows "
                f"({format_traffic(limit.written_bytes(step))} are written, a step writes "
                f"{format_traffic(limit.slot_bytes)})",
                "increase storage.max_tb_written to continue; every step so far is saved",
            )
            failure.reported_by = 0
            raise failure

    def _step(self) -> StepMetrics:
        """Phases 2 to 4."""
        before = self._progress
        start = time.perf_counter()
        if self._take_over is not None:
            self._engine, self._take_over = self._take_over(), None
        batches = self._data.step(before.step)
        outcome = self._compute(before, batches, recording=self._recording)
        self._recording = None
        after = self._progress_after(before, outcome, batches)
        is_last = after.step == self._settings.num_steps
        commits_now = is_last or self._saved.is_due(after.step) or self._eval_is_due(after.step)
        if outcome.applied and commits_now:
            self._engine.settle()
        seconds = time.perf_counter() - start
        times = self._timeline.take()
        self._callbacks.trace_step(after.step, times, start)
        metrics = self._metrics(
            outcome,
            before=before,
            after=after,
            seconds=seconds,
            times=times,
            num_computed_tokens=sum(batch.num_computed_tokens for batch in batches),
            read_bytes=self._queue.read_bytes - self._counted_bytes[0],
            written_bytes=self._queue.written_bytes - self._counted_bytes[1],
        )
        self._count_bytes()
        self._callbacks.announce(metrics)
        if outcome.applied:
            self._uncommitted = after
            if commits_now:
                self._commit()
        else:
            commit_progress_together(self._store, self._ranks, after)
            self._callbacks.after_commit()
        return metrics

    def _compute(
        self, progress: Progress, batches: Sequence[AnyModelBatch], *, recording: StepRecording | None
    ) -> StepOutcome:
        """The step that follows `progress`. It can be computed again as long as it was not applied."""
        own = self._own(batches)
        self._has_computed = bool(own)
        return self._engine.run(
            own,
            first_micro_batch=self._ranks.rank * self._settings.micro_batches_per_step,
            step=progress.step,
            update=progress.updates + 1,
            learning_rate=self._settings.schedule.at(progress.step),
            group_rates=self._settings.schedule.groups_at(progress.step),
            loss_scale=progress.loss_scale if self._settings.scale_loss else 1.0,
            commit_previous=self._commit,
            recording=recording,
        )

    def _progress_after(self, before: Progress, outcome: StepOutcome, batches: Sequence[AnyModelBatch]) -> Progress:
        """The progress that the step leads to.

        If the step is not finite and may not be skipped, it is computed again, and that ends the run: the same bits
        mean divergence, other bits a fault of the machine. Raises Diverged or IntegrityFailure; the step before it
        stays committed.
        """
        scale_loss = self._settings.scale_loss
        if not outcome.applied and not may_skip(before, scale_loss=scale_loss):
            failure = diagnose_nonfinite_step(
                before.step + 1,
                outcome,
                self._compute(before, batches, recording=None),
                batches,
                scale_loss=scale_loss,
                deterministic=self._settings.deterministic,
            )
            failure.reported_by = 0
            raise failure
        num_tokens = sum(batch.num_tokens for batch in batches)
        return progress_after(before, applied=outcome.applied, num_tokens=num_tokens, scale_loss=scale_loss)

    def _metrics(
        self,
        outcome: StepOutcome,
        *,
        before: Progress,
        after: Progress,
        seconds: float,
        times: StepTimes,
        num_computed_tokens: int,
        read_bytes: int,
        written_bytes: int,
    ) -> StepMetrics:
        """`num_computed_tokens` includes padding, which is computed too."""
        settings = self._settings
        tokens = after.tokens - before.tokens
        flops = settings.flops_per_token
        slowest_rank, slowest_bottleneck = slowest_rank_of(self._ranks, times)
        tera_tokens_per_second = num_computed_tokens / seconds / 1e12
        return StepMetrics(
            step=after.step,
            loss=outcome.loss,
            learning_rate=self._settings.schedule.at(before.step),
            grad_norm=outcome.grad_norm,
            tokens=tokens,
            step_seconds=seconds,
            forward_seconds=outcome.forward_seconds,
            backward_seconds=seconds - outcome.forward_seconds,
            tokens_per_second=tokens / seconds,
            tflops_model=flops * tera_tokens_per_second,
            tflops_hardware=(flops + settings.flops_recomputed_per_token) * tera_tokens_per_second,
            swapped_bytes=outcome.swapped_bytes,
            nvme_read_bytes=read_bytes,
            nvme_written_bytes=written_bytes,
            gpu_peak_bytes=peak_gpu_bytes(),
            num_alloc_retries=num_alloc_retries(),
            host_peak_bytes=peak_resident_bytes(),
            bottleneck=max(RESOURCES, key=lambda resource: times.busy[resource]),
            busy_seconds=times.busy,
            waited_seconds=times.stalled,
            predicted_seconds=settings.predicted_seconds if outcome.clipped else settings.predicted_unclipped_seconds,
            planned_nvme_bytes=settings.planned_nvme_bytes,
            applied=outcome.applied,
            clipped=outcome.clipped,
            eval_loss=None,
            slowest_rank=slowest_rank,
            slowest_bottleneck=slowest_bottleneck,
            preferences=dict(outcome.figures) or None,
        )

    def _own(self, batches: Sequence[AnyModelBatch]) -> Sequence[AnyModelBatch]:
        """The micro-batches of this rank."""
        number = self._settings.micro_batches_per_step
        first = self._ranks.rank * number
        return batches[first : first + number] if self._ranks.size > 1 else batches

    def _of_all(self, sums: EvaluatedSums) -> EvaluatedSums:
        """What all ranks have evaluated."""
        found = self._ranks.gathered([sums.loss, sums.num_right or 0, sums.num_targets, *sums.figures])
        loss, num_right, num_targets, *figures = (sum(each) for each in zip(*found, strict=True))
        is_counted = sums.num_right is not None
        return EvaluatedSums(loss, int(num_right) if is_counted else None, int(num_targets), tuple(figures))

    def _commit(self) -> None:
        """Commit the last computed step, whose update is written completely."""
        progress, self._uncommitted = self._uncommitted, None
        assert progress is not None
        commit_together(self._store, self._ranks, progress, self._timeline)
        self._callbacks.after_commit()

    def _commit_pending(self) -> None:
        """Finish the update of the last computed step and commit it, if it is not committed yet."""
        if self._uncommitted is not None:
            self._engine.settle()
            self._commit()

    def _count_bytes(self) -> None:
        """Let the bytes that were moved until now not count for the next step."""
        self._counted_bytes = self._queue.read_bytes, self._queue.written_bytes

    def _evaluate_again(self) -> None:
        """Evaluate the last step that is done, if it should have been and its process ended before."""
        rule, last, step = self._settings.best, self._last_done, self._progress.step
        if not step or not self._eval_is_due(step):
            return
        is_known = last is not None and last.step == step
        is_missing = last is not None and (last.eval_loss if rule is None else rule.value_of(last)) is None
        known = self._ranks.gathered([is_known, is_missing])
        if last is not None and known[0][1] and all(is_known for is_known, _ in known):
            self._callbacks.evaluated_again(self._evaluate(last))

    def _eval_is_due(self, step: int) -> bool:
        every = self._settings.eval_steps
        is_time = step == self._settings.num_steps or (every is not None and step % every == 0)
        return is_time and self._data.num_eval_samples > 0

    def _evaluate(self, metrics: StepMetrics) -> StepMetrics:
        """The metrics with those of the held-out samples: their mean loss, and of a classifier its accuracy. As many
        micro-batches are computed at a time as a step has."""
        self._callbacks.before_evaluation(self._progress.step)
        total = NOTHING_EVALUATED
        waiting: list[AnyModelBatch] = []
        for batch in self._data.eval_batches():
            self._callbacks.check_stop()
            waiting.append(batch)
            if len(waiting) == self._settings.micro_batches_per_step * self._ranks.size:
                total = total.and_of(self._engine.evaluate(self._own(waiting)))
                waiting = []
        if waiting:
            total = total.and_of(self._engine.evaluate(self._own(waiting)))
        total = self._of_all(total)
        self._timeline.take()
        self._count_bytes()
        if not total.num_targets:
            return metrics
        figures = mean_figures([total.figures]) or None
        evaluated = replace(metrics, eval_loss=total.mean_loss, eval_accuracy=total.accuracy, eval_preferences=figures)
        self._saved.take_as_evaluated(evaluated)
        return evaluated


def slowest_rank_of(ranks: Ranks, times: StepTimes) -> tuple[int, Resource] | tuple[None, None]:
    """The slowest of several ranks in a step that took `times` here, and what was busy longest there. The others waited
    for it, so that their stalls on the network are longer than its own. Raises as `Channel.swap`."""
    if ranks.size == 1:
        return None, None
    own: list[Resource] = [resource for resource in RESOURCES if resource != "network"]
    bottleneck = max(own, key=lambda resource: times.busy[resource])
    known = ranks.gathered([times.stalled["network"], own.index(bottleneck)])
    rank = min(range(ranks.size), key=lambda rank: known[rank][0])
    return rank, own[int(known[rank][1])]
