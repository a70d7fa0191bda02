"""Trains: runs the steps of a run that are not committed yet, under its plan.

If the model's profile is only an estimate, the first step offloads nothing and is recorded. The following steps run
under a new plan. Its engine takes over what is resident and what is left to update, so a new plan costs no step more.

Invariant: the bits are the same under every plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter

from ratel_cli.closing import Closing
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.measure.telemetry import Span, StepTimes, Timeline
from ratel_cli.engine.measure.trace import TraceFile
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.errors import Diverged
from ratel_cli.hardware.host import free_bytes
from ratel_cli.hardware.load import LoadMeter, OtherLoad
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.plan import Plan
from ratel_cli.report.words.panel import Panel, PanelFacts
from ratel_cli.report.words.run import (
    adapted_line,
    ended_early_line,
    evaluation_line,
    lost_best_line,
    plan_line,
    run_summary,
    saved_line,
    step_line,
)
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.origin import read_origin
from ratel_cli.run.files.run_directory import METRICS_NAME, TRACE_NAME, run_directory
from ratel_cli.run.inputs.inputs import Inputs
from ratel_cli.run.inputs.length import learning_rates
from ratel_cli.run.inputs.settings import best_rule, max_bytes_written
from ratel_cli.run.train.adaptation import NUM_STEPS, Adaptation
from ratel_cli.run.train.engine import open_planned_engines, pin_ahead
from ratel_cli.run.train.planner import Planner
from ratel_cli.run.train.ranks import stop_together
from ratel_cli.run.train.trackers import Trackers
from ratel_cli.store.store import Store
from ratel_cli.training.best import BestSoFar
from ratel_cli.training.history import check_best_is_known, read_history, read_recent
from ratel_cli.training.loop import TrainingLoop
from ratel_cli.training.loop_settings import LoopCallbacks, LoopSettings
from ratel_cli.training.metrics import RunTotals, StepMetrics
from ratel_cli.training.metrics_log import MetricsLog
from ratel_cli.training.snapshots import Snapshots
from ratel_cli.training.step_warnings import StepWarnings
from ratel_cli.training.wear_limit import written_bytes
from ratel_cli.units import counted


class Training(Closing):
    """What all steps of a run share under every plan: metrics, trace, totals. Use as a context manager."""

    def __init__(
        self,
        context: RunContext,
        inputs: Inputs,
        planner: Planner,
        store: Store,
        *,
        snapshots: Snapshots | None,
        trackers: Trackers,
        save_plan: Callable[[Plan, ModelProfile], None],
    ) -> None:
        """`save_plan` is called with each new plan and the profile that it was made from."""
        self._context = context
        self._config = config = context.config
        self._inputs = inputs
        self._planner = planner
        self._store = store
        self._snapshots = snapshots
        self._trackers = trackers
        self._log = log = context.log
        self._save_plan = save_plan
        self._timeline = Timeline()
        self._totals = RunTotals()
        self._warnings = StepWarnings(log.warn)
        origin = read_origin(config)
        self._first_step = 0 if origin is None else origin.first_step
        self._max_bytes_written = max_bytes_written(config, num_sharing=context.layout.on_drives)
        self.best = BestSoFar()
        """The best step, once the steps are done; without a rule for it, none is."""
        self.best_saved = BestSoFar()
        """The best step that is saved, which is the run's result; none if the last one is."""
        self.ended_early_at: int | None = None
        """The step after which the evaluations ended the run; None if they did not."""
        self._last: StepMetrics | None = None
        """Metrics of the last step that was announced."""
        self._adaptation: Adaptation | None = None
        """None until there is a plan from a recorded profile."""
        self._spans: tuple[Span, ...] = ()
        """Spans of the last step."""
        self._meter = LoadMeter()
        self._other_loads: deque[OtherLoad | None] = deque(maxlen=NUM_STEPS)
        """Load of other processes during each of the last steps; None where none is to report."""
        self._estimate: ModelProfile | None = None
        """The profile before the step that is recorded; None if none is."""
        self._resources = ExitStack()
        run_dir = run_directory(config.output_dir)
        self._metrics = self._resources.enter_context(
            MetricsLog(run_dir / METRICS_NAME, committed_step=store.progress.step, warn=log.warn)
        )
        self._trace = (
            self._resources.enter_context(TraceFile(run_dir / TRACE_NAME, warn=log.warn)) if config.trace else None
        )

    def run(self, plan: Plan, profile: ModelProfile) -> None:
        """Run all steps that are left; record the first of them if the profile is an estimate."""
        panel = self._open_panel(plan)  # with the time of the whole run, not of the step that is recorded
        if profile.source == "analytic":
            self._estimate = profile
            plan = self._planner.plan_recording(profile)
        else:
            self._adaptation = Adaptation(self._planner, plan, profile)
        pin_ahead(self._context, self._inputs.model.spec, plan)
        try:
            with self._log.live(panel.lines):
                self._steps(plan, panel, recording=StepRecording() if profile.source == "analytic" else None)
                if self._snapshots is not None:
                    panel.show_work("copying the last snapshot")
                    self._snapshots.finish(self._context.stop.check)
        finally:
            if self._log.is_live and self._last is not None:
                self._log.say(self._step_line(self._last, width=self._log.columns))
        self._log.facts(run_summary(self._totals, endurance_tb=self._config.storage.endurance_tb))
        self._reject_unapplied()

    def close(self) -> None:
        """Close the files, and let the trackers finish. Idempotent."""
        self._trackers.finish(self._store.progress.step)
        self._resources.close()

    def _open_panel(self, plan: Plan) -> Panel:
        config, hardware, decisions = self._config, self._planner.hardware, plan.decisions
        first_step = self._store.progress.step
        facts = PanelFacts(
            num_steps=self._inputs.num_steps,
            steps_per_epoch=self._inputs.data.steps_per_epoch,
            first_step=first_step,
            has_gpu=hardware.link is not None,
            host_limit_bytes=decisions.host_limit_bytes,
            gpu_limit_bytes=decisions.device_limit_bytes,
            store_bytes=plan.nvme_bytes,
            free_bytes=partial(free_bytes, config.storage.paths),
            written_bytes=written_bytes(
                first_step - self._first_step, store_bytes=self._store.made_bytes, slot_bytes=self._store.slot_bytes
            ),
            state_bytes=self._store.slot_bytes,
            max_bytes_written=self._max_bytes_written,
            num_ranks=self._context.ranks.size,
        )
        return Panel(
            facts,
            predicted_seconds=plan.time.total,
            earlier_losses=self._metrics.earlier_losses,
            earlier_steps=self._earlier_steps(),
            is_stopping=lambda: self._context.stop.is_requested,
            ascii_only=self._log.ascii_only,
        )

    def _earlier_steps(self) -> Sequence[StepMetrics]:
        try:
            return read_recent(run_directory(self._config.output_dir) / METRICS_NAME).steps
        except OSError:  # the log of the metrics has said so
            return ()

    def _steps(self, plan: Plan, panel: Panel, *, recording: StepRecording | None) -> None:
        """Run the steps that are left; with a recording, all but the first under the plan that follows from it."""
        num_steps = self._inputs.num_steps
        with open_planned_engines(
            self._context,
            self._inputs.model,
            self._store,
            plan,
            timeline=self._timeline,
            drive_shares=self._planner.hardware.nvme.shares,
        ) as engine_for:
            loop = self._loop(engine_for(plan), plan, panel, recording)
            previous: StepMetrics | None = None  # the step before, if its update overlaps with this one's forward
            for metrics in loop.steps():
                self._other_loads.append(self._meter.other_load())
                self._meter.restart()
                self._metrics.write(metrics)
                self._totals.add(metrics)
                self._warnings.note(metrics)
                self._trackers.report(self._store.progress.step)
                panel.show_work(None)
                if metrics.eval_loss is not None:
                    panel.show_evaluation(metrics.step, metrics.eval_loss, best_step=loop.best.step)
                    found = metrics.eval_loss, metrics.eval_accuracy, metrics.eval_preferences
                    self._log.say(evaluation_line(metrics.step, *found, best_step=loop.best.step))
                # A step that was clipped leaves its update to the next one.
                is_overlapped = not loop.is_committed and loop.has_computed
                is_typical = is_overlapped and previous is not None and previous.clipped == metrics.clipped
                followed = self._new_plan(metrics, recording, is_typical=is_typical)
                recording, previous = None, None if loop.is_committed else metrics
                if followed is not None and metrics.step < num_steps:
                    panel.show_work("pinning host memory")
                    pin_ahead(self._context, self._inputs.model.spec, followed, units_only=True)
                    loop.follow(partial(engine_for, followed), self._loop_settings(followed))
                    previous = None
            self.best, self.best_saved = loop.best, loop.best_saved
            if loop.ends_early:
                self.ended_early_at = self._store.progress.step
                self._log.say(ended_early_line(loop.best, step=self.ended_early_at, metric=self._metric_words))

    def _reject_unapplied(self) -> None:
        """Raise Diverged if the run has applied no step, in this process or before: it has learnt nothing."""
        progress = self._store.progress
        num_steps = progress.step - self._first_step
        own = self._earlier() if self._first_step else ()  # of a run that began with another's updates
        is_known = len(own) == num_steps
        if not progress.updates or (is_known and not any(each.applied for each in own)):
            failure = Diverged(
                f"no update in {counted(num_steps, 'step')}: each had a loss or a gradient that was not finite; the "
                "model has not changed, and is not exported",
                "set dtype: bfloat16, which has the range of float32, for a new run; if the losses were finite, more "
                "steps may be enough: each skipped step halves the loss scale"
                f", which is {progress.loss_scale:g} now",
            )
            failure.reported_by = 0
            raise failure

    @property
    def _metric_words(self) -> str:
        return f"eval {self._config.metric_for_best_model}"

    def _earlier(self) -> Sequence[StepMetrics]:
        """The steps that are done."""
        path = run_directory(self._config.output_dir) / METRICS_NAME
        try:
            history = read_history(path)
        except OSError:  # the log of the metrics has said so
            return ()
        rule = best_rule(self._config)
        if rule is not None and rule.saves_best:
            check_best_is_known(path, history)
        return history.up_to(self._store.progress.step).steps

    def _evaluated_again(self, metrics: StepMetrics) -> None:
        self._metrics.write(metrics)
        assert metrics.eval_loss is not None
        self._log.say(evaluation_line(metrics.step, metrics.eval_loss, metrics.eval_accuracy, metrics.eval_preferences))

    def _new_plan(self, metrics: StepMetrics, recording: StepRecording | None, *, is_typical: bool) -> Plan | None:
        """The plan for the next steps; None if it stays as it is and is predicted as before."""
        if recording is not None:
            return self._plan_from(recording, step=metrics.step)
        adaptation = self._adaptation
        if adaptation is None or not is_typical:
            return None
        if adaptation.refine(metrics.step_seconds, self._spans):
            self._save_plan(adaptation.plan, adaptation.profile)
        adapted = adaptation.adapt(
            metrics.step_seconds,
            self._spans,
            predicted_seconds=metrics.predicted_seconds,
            clipped=metrics.clipped,
        )
        if adapted is None:
            return None
        self._save_plan(adapted.plan, adapted.profile)
        self._log.remark(
            adapted_line(
                adapted.plan,
                step=metrics.step,
                num_steps=NUM_STEPS,
                is_changed=adapted.is_changed,
                seconds=adapted.seconds,
                predicted_seconds=adapted.predicted_seconds,
                other_load=max(filter(None, self._other_loads), key=lambda load: load.cores, default=None),
            )
        )
        return adapted.plan

    def _announce(self, panel: Panel, metrics: StepMetrics) -> None:
        """Write and show a step that will be committed: as a row of the panel or, without a terminal, as a line."""
        self._metrics.write(metrics)
        self._last = metrics
        is_due = metrics.step % self._config.logging_steps == 0 or metrics.step in (1, self._inputs.num_steps)
        if self._log.is_live:
            panel.show(metrics)
        elif is_due:
            self._log.say(self._step_line(metrics))

    def _step_line(self, metrics: StepMetrics, *, width: int | None = None) -> str:
        inputs = self._inputs
        return step_line(metrics, inputs.num_steps, steps_per_epoch=inputs.data.steps_per_epoch, width=width)

    def _loop(
        self, engine: StepEngine[MicroBatch], plan: Plan, panel: Panel, recording: StepRecording | None
    ) -> TrainingLoop:
        return TrainingLoop(
            engine,
            store=self._store,
            queue=self._context.queue,
            data=self._inputs.data,
            settings=self._loop_settings(plan),
            timeline=self._timeline,
            callbacks=LoopCallbacks(
                check_stop=partial(stop_together, self._context.ranks, self._context.stop),
                announce=partial(self._announce, panel),
                trace_step=self._trace_step,
                after_commit=self._after_commit,
                after_save=lambda step, dropped: self._log.say(saved_line(step, dropped)),
                before_evaluation=lambda step: panel.show_work(f"evaluating after step {step}"),
                best_is_lost=lambda best, saved: self._log.warn(lost_best_line(best, saved)),
                evaluated_again=self._evaluated_again,
            ),
            recording=recording,
            ranks=self._context.ranks,
            earlier=self._earlier(),
        )

    def _plan_from(self, recording: StepRecording, *, step: int) -> Plan:
        """The plan that follows from `step`, which was recorded."""
        assert self._estimate is not None
        profile = self._planner.recorded(recording, self._spans, estimate=self._estimate)
        plan = self._planner.plan_again(profile, self._log)
        self._adaptation = Adaptation(self._planner, plan, profile)
        self._save_plan(plan, profile)
        self._log.remark(plan_line(plan, step=step))
        return plan

    def _trace_step(self, step: int, times: StepTimes, start: float) -> None:
        self._spans = times.spans
        if self._trace is not None:
            self._trace.write_step(step, times.spans, start=start, end=perf_counter())

    def _after_commit(self) -> None:
        deletion = self._store.deletion
        if deletion is not None:
            self._log.warn(deletion)
        self._context.stop.saved_step = self._store.progress.step if deletion is None else None
        if self._snapshots is not None:
            self._snapshots.after_commit()

    def _loop_settings(self, plan: Plan) -> LoopSettings:
        config = self._config
        return LoopSettings(
            num_steps=self._inputs.num_steps,
            micro_batches_per_step=config.known_split[1],
            schedule=learning_rates(config, self._inputs.num_steps, rounds_up=self._inputs.rounds_up),
            deterministic=config.deterministic,
            scale_loss=config.dtype == "float16",
            eval_steps=config.eval_interval(self._inputs.num_steps),
            save_steps=config.save_interval(self._inputs.num_steps),
            save_total_limit=config.save_total_limit,
            first_step=self._first_step,
            max_bytes_written=self._max_bytes_written,
            flops_per_token=plan.flops_model / plan.workload.computed_tokens,
            flops_recomputed_per_token=plan.flops_recomputed / plan.workload.computed_tokens,
            predicted_seconds=plan.time.total,
            predicted_unclipped_seconds=plan.time.total if plan.unclipped_seconds is None else plan.unclipped_seconds,
            planned_nvme_bytes=plan.traffic.read_bytes + plan.traffic.written_bytes,
            best=best_rule(config),
            num_copied=int(config.storage.snapshot is not None),
        )
