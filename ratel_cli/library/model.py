"""A model whose training state is on drives, in a loop of the caller's own.

A step has two halves: `forward_backward` computes the gradients of all micro-batches, a segment at a time, so that
weights cross the link and the drives once; `step` gives the learning rate. The update runs in the next forward,
overlapped with it, and the step is committed there; or when something needs it: `evaluate`, `save_pretrained`, `close`.

Invariant: after any crash the state is that of the last committed step, which is at most one behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ratel_cli.data.samples.sample_batch import AnyModelBatch
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.errors import BadInput, Diverged, DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.library.batches import Tensors
from ratel_cli.library.has_state import HasState
from ratel_cli.library.plans import is_within, measured_plan, workload_of
from ratel_cli.library.surroundings import usual_settings
from ratel_cli.library.trained_model import TrainedModel
from ratel_cli.model.files.marker import read_marker
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.output import own_output
from ratel_cli.run.train.engine import open_planned_engines, pin_ahead
from ratel_cli.store.store import Store
from ratel_cli.training.loop import may_skip, progress_after

Loss = Callable[..., torch.Tensor]
"""Computes the sum of the losses, a scalar. For a language model: from the logits `[tokens, vocabulary]` of some
tokens, and the labels `[tokens]` of the next ones. For a module: from its output, and the batch."""


class Model(HasState):
    """An open model, made by `open_model`. Use it as a context manager, on one thread."""

    _closed = ("the model is closed", "open it again: its state is in its storage")

    def __init__(
        self,
        context: RunContext,
        trained: TrainedModel,
        store: Store,
        hardware: HardwareProfile,
        resources: ExitStack,
    ) -> None:
        """`resources` closes everything that is open."""
        super().__init__(context, trained.model.spec, store, quantised=trained.quantised)
        self._trained = trained
        self._hardware = hardware
        self._resources = resources
        self._engines = resources.enter_context(ExitStack())
        """Closed first: the engine of the plan that fits the batches so far."""
        self._engine: StepEngine[Any] | None = None
        self._plan: Plan | None = None
        self._computed: StepOutcome | None = None
        """Outcome of the step that `forward_backward` has computed, until `step`; None if there is none."""
        self._timeline = Timeline()
        self._num_tokens = 0

    @property
    def plan(self) -> Plan | None:
        """What steps follow; None before the first batch."""
        return self._plan

    @usual_settings("forward_backward")
    def forward_backward(self, batch: Tensors | Sequence[Tensors], *, loss: Loss | None = None) -> float:
        """Compute the gradients of one step. Returns its loss: the mean over all labels of the next tokens.

        `batch`: a mapping as transformers' models take it (`library/batches.py`), or a list of such micro-batches,
        whose gradients are those of one batch with all their rows: activations of one of them are computed at a time.
        `loss`: from the logits `[tokens, vocabulary]` of some tokens, and the labels `[tokens]` of the next ones, to
        the sum of their losses, a scalar; a label of -100 has none. It is called for some tokens after others, so that
        the logits of all never exist. None: the cross-entropy, as transformers computes it.

        Raises BadInput if a batch cannot be used or gradients wait for `step`, DoesNotFit if the step does not fit into
        the limits, Diverged if loss or gradients are not finite.
        """
        self._check_open()
        if self._computed is not None:
            raise BadInput(
                "forward_backward was called twice without step() in between",
                "to accumulate gradients, give it a list of micro-batches",
            )
        batches = self._trained.batches(batch)
        if not any(each.num_targets for each in batches):
            raise BadInput("a step needs a label: all of this batch are -100, or the first in their line")
        before = self._pending
        with self._as_before(), self._trained.model.losing(loss):
            engine = self._engine_for(batches)
            try:
                outcome = engine.run(
                    batches,
                    step=before.step,
                    update=before.updates + 1,
                    learning_rate=None,
                    loss_scale=before.loss_scale if self._scales_loss else 1.0,
                    commit_previous=self._commit,
                )
            except BaseException:
                engine.discard()  # it may have been decided
                raise
        if not outcome.applied and not may_skip(before, scale_loss=self._scales_loss):
            what = f"the loss is {outcome.loss}"
            if math.isfinite(outcome.loss):
                what = f"the gradient of {outcome.first_not_finite} is not finite"
            raise Diverged(f"step {before.step + 1}: {what}; step {before.step} is saved", "lower the learning rate")
        self._computed, self._grad_norm = outcome, outcome.grad_norm
        self._num_tokens = sum(each.num_tokens for each in batches)
        return outcome.loss

    @usual_settings("step")
    def step(self, *, learning_rate: float | LRScheduler) -> None:
        """Let the gradients of `forward_backward` update the weights, by AdamW with this learning rate.

        Of a scheduler of torch it is the one of its first group, and the scheduler steps. Raises BadInput without a
        `forward_backward` before. In fp16 a step whose gradients overflowed is skipped, as by torch's GradScaler.
        """
        self._check_open()
        outcome = self._computed
        if outcome is None:
            raise BadInput("step needs gradients: call forward_backward first, once for each step")
        assert self._engine is not None
        if isinstance(learning_rate, ReduceLROnPlateau):
            raise BadInput("ReduceLROnPlateau needs a metric: step it yourself, and give its get_last_lr()[0]")
        rate = learning_rate.get_last_lr()[0] if isinstance(learning_rate, LRScheduler) else learning_rate
        rate = float(rate)
        if not math.isfinite(rate) or rate < 0:
            raise BadInput(f"learning_rate must be a number from 0 on, not {rate}")
        after = progress_after(
            self._pending, applied=outcome.applied, num_tokens=self._num_tokens, scale_loss=self._scales_loss
        )
        if outcome.applied:
            self._engine.apply(rate)
        else:
            self._store.commit_progress(after)
        self._pending, self._computed = after, None
        if isinstance(learning_rate, LRScheduler):
            learning_rate.step()

    @usual_settings("evaluate")
    def evaluate(self, batch: Tensors | Sequence[Tensors], *, loss: Loss | None = None) -> float:
        """The mean loss over all labels of the next tokens, without dropout and without gradients. `loss` as above."""
        self._check_ready("evaluate")
        batches = self._trained.batches(batch)
        num_targets = sum(each.num_targets for each in batches)
        if not num_targets:
            raise BadInput("a loss needs a label: all of this batch are -100, or the first in their line")
        total = 0.0
        with self._as_before(), self._trained.model.losing(loss):
            for batch_of_step in batches:  # one at a time takes no more than a step does
                engine = self._engine_for([batch_of_step])
                self._settle()
                total += engine.evaluate([batch_of_step]).loss
        return total / num_targets

    @usual_settings("save_pretrained")
    def save_pretrained(self, directory: str | Path, *, overwrite: bool = False) -> None:
        """Write the model as it is after the last step: a directory that transformers' from_pretrained loads.

        A file that Ratel did not write, or the model of another loop or run, is replaced only with `overwrite`; the
        model that was opened never is. Raises BadInput, EnvironmentFailure.
        """
        self._check_ready("save_pretrained")
        config, output = self._context.config, Path(directory)
        marker = read_marker(output)
        if marker is not None and not overwrite and marker.run != own_output(config):
            raise BadInput(f"{output} has the model of {marker.run}", "choose another directory, or set overwrite=True")
        self._settle()
        for text in self._trained.save(self._context, self._store, output, overwrite):
            self._context.log.notice(text)

    def close(self) -> None:
        """Commit the last step and give everything back. Gradients that no `step` followed are dropped. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with self._resources:
            if self._engine is not None:
                self._engine.discard()
            self._settle()

    @property
    def _scales_loss(self) -> bool:
        return self._context.config.dtype == "float16"

    def _check_ready(self, asked: str) -> None:
        self._check_open()
        if self._computed is not None:
            raise BadInput(f"{asked} was called between forward_backward and step()", "call step() first")

    def _settle(self) -> None:
        """Commit the last step, if it is not yet."""
        if self._engine is not None and self._engine.is_unsettled:
            self._engine.settle()
        if self._pending != self._store.progress:
            self._commit()

    def _engine_for(self, batches: Sequence[AnyModelBatch]) -> StepEngine[Any]:
        """The engine of a plan that these batches follow: the last one, or a new one for these and those before.

        Where both together do not fit, that of these batches alone.
        """
        known = None if self._plan is None else self._plan.workload
        wanted = workload_of(batches, None)
        if self._engine is not None and known is not None and is_within(wanted, known):
            return self._engine
        self._trained.check(wanted, self._context.log)
        self._settle()
        self._engine = self._plan = None
        self._engines.close()
        planned = partial(measured_plan, self._context, self._trained.model, self._hardware, batch=batches[0])
        try:
            plan = planned(workload=workload_of(batches, known))
        except DoesNotFit:
            if known is None:
                raise
            plan = planned(workload=wanted)
        pin_ahead(self._context, self._trained.model.spec, plan)
        engine_for: Callable[[Plan], StepEngine[Any]] = self._engines.enter_context(
            open_planned_engines(
                self._context,
                self._trained.model,
                self._store,
                plan,
                timeline=self._timeline,
                drive_shares=self._hardware.nvme.shares,
            )
        )
        self._engine, self._plan = engine_for(plan), plan
        return self._engine

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """A context after which torch's random generators are as before, and nothing is noted of what has run."""
        device = self._context.device
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
            try:
                yield
            finally:
                self._timeline.take()
