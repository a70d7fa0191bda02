"""Trains: runs the steps of a run that are not committed yet, under its plan.

If the model's profile is only an estimate, the first step offloads nothing and is recorded. The following steps run
under a new plan, with a new engine. The bits are the same under every plan.

Invariant: between two engines every step is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter

from ratel_cli.closing import Closing
from ratel_cli.console import Bar
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.telemetry import Span, StepTimes, Timeline
from ratel_cli.engine.trace import TraceFile
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.plan import Plan
from ratel_cli.report.run import plan_line, run_summary, step_line
from ratel_cli.run.context import RunContext
from ratel_cli.run.engine import open_planned_engine
from ratel_cli.run.inputs import Inputs
from ratel_cli.run.planner import Planner
from ratel_cli.run.run_directory import run_directory
from ratel_cli.store.store import Store
from ratel_cli.training.loop import LoopCallbacks, LoopSettings, TrainingLoop
from ratel_cli.training.metrics import MetricsLog, RunTotals
from ratel_cli.training.schedule import LearningRateSchedule
from ratel_cli.training.snapshots import Snapshots


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
        save_plan: Callable[[Plan, ModelProfile], None],
    ) -> None:
        """`save_plan` is called with each new plan and the profile that it was made from."""
        self._context = context
        self._config = config = context.config
        self._inputs = inputs
        self._planner = planner
        self._store = store
        self._snapshots = snapshots
        self._log = log = context.log
        self._save_plan = save_plan
        self._timeline = Timeline()
        self._totals = RunTotals()
        self._resources = ExitStack()
        run_dir = run_directory(config.output_dir)
        self._metrics = self._resources.enter_context(
            MetricsLog(run_dir / "metrics.jsonl", committed_step=store.progress.step, warn=log.warn)
        )
        self._trace = (
            self._resources.enter_context(TraceFile(run_dir / "trace.json", warn=log.warn)) if config.trace else None
        )

    def run(self, plan: Plan, profile: ModelProfile) -> None:
        """Run all steps that are left; record the first of them if the profile is an estimate."""
        num_steps = self._inputs.num_steps
        with self._log.bar("training", num_steps - self._store.progress.step) as bar:
            if profile.source == "analytic" and self._store.progress.step < num_steps:
                plan = self._record(profile, bar)
            self._steps(plan, bar)
            if self._snapshots is not None:
                self._snapshots.finish(self._context.stop.check)
        self._log.facts(run_summary(self._totals))

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._resources.close()

    def _record(self, profile: ModelProfile, bar: Bar) -> Plan:
        """Record one step, and return the plan that follows from it."""
        recording, spans = StepRecording(), list[Span]()
        plan = self._planner.plan_recording(profile)
        self._steps(plan, bar, recording=recording, add_spans=spans.extend)
        profile = self._planner.recorded(recording, spans)
        plan = self._planner.plan_again(profile, self._log)
        self._save_plan(plan, profile)
        self._log.say(plan_line(plan))
        return plan

    def _steps(
        self,
        plan: Plan,
        bar: Bar,
        *,
        recording: StepRecording | None = None,
        add_spans: Callable[[tuple[Span, ...]], None] = lambda spans: None,
    ) -> None:
        """Run the steps that are left under one plan; with a recording, only one step.

        `add_spans` is called with the spans of each step.
        """
        num_steps, every = self._inputs.num_steps, self._config.logging_steps

        def trace_step(step: int, times: StepTimes, start: float) -> None:
            add_spans(times.spans)
            if self._trace is not None:
                self._trace.write_step(step, times.spans, start=start, end=perf_counter())

        with open_planned_engine(
            self._context,
            self._inputs.model,
            self._store,
            plan,
            timeline=self._timeline,
            drive_weights=self._planner.hardware.nvme.weights,
        ) as engine:
            loop = TrainingLoop(
                engine,
                store=self._store,
                queue=self._context.queue,
                data=self._inputs.data,
                schedule=LearningRateSchedule(
                    scheduler=self._config.lr_scheduler,
                    peak=self._config.learning_rate,
                    num_warmup_steps=self._config.warmup_steps or int(self._config.warmup_ratio * num_steps),
                    num_steps=num_steps,
                ),
                settings=self._loop_settings(plan),
                timeline=self._timeline,
                callbacks=LoopCallbacks(
                    check_stop=self._context.stop.check,
                    announce=self._metrics.write,
                    trace_step=trace_step,
                    after_commit=self._after_commit,
                ),
                recording=recording,
            )
            for metrics in loop.steps():
                self._metrics.write(metrics)
                self._totals.add(metrics)
                bar.advance()
                if metrics.step % every == 0 or metrics.step in (1, num_steps):
                    self._log.say(step_line(metrics, num_steps))

    def _after_commit(self) -> None:
        self._context.stop.saved_step = self._store.progress.step
        if self._snapshots is not None:
            self._snapshots.after_commit()

    def _loop_settings(self, plan: Plan) -> LoopSettings:
        config, max_tb_written = self._config, self._config.storage.max_tb_written
        return LoopSettings(
            num_steps=self._inputs.num_steps,
            micro_batches_per_step=config.gradient_accumulation_steps,
            deterministic=config.deterministic,
            scale_loss=config.dtype == "float16",
            eval_steps=config.eval_steps,
            save_steps=config.save_steps,
            save_total_limit=config.save_total_limit,
            max_bytes_written=None if max_tb_written is None else int(max_tb_written * 1e12),
            flops_forward_per_token=plan.flops_forward / plan.workload.tokens,
            flops_recomputed_per_token=plan.flops_recomputed / plan.workload.tokens,
            predicted_seconds=plan.time.total,
            predicted_unclipped_seconds=plan.time.total if plan.unclipped_seconds is None else plan.unclipped_seconds,
        )
