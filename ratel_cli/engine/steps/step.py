"""One training step: the vertical schedule over blocks, with the micro-batches inside.

A block's weights cross the link and the drives once for all micro-batches, so only time limits the batch. A step walks
the uses of segments in their order (schedule/uses.py); what a segment does in a use is in engine/segments:

    1. forward   bind the segment's weights; run each micro-batch; unbind
    2. backward  from the last segment, whose forward and backward are one use, down to the first one that is trained:
                 bind the weights; add up the gradients of each micro-batch; hand them over to the update
    3. decide    compute the global norm: is it finite, must it be clipped? (engine.optimizer.update)

Overlapped with these run the reads of the next blocks' weights (engine/reading/weights.py) and the optimizer
(engine.optimizer.pipeline). The update of a step is settled at the latest when the next step's first gradient is
handed over. The step is committed then, or after `settle`.

Invariants: at most one segment is bound; memory does not grow with the number of layers, apart from what is offloaded,
held gradients and what the placement keeps resident; a step whose loss or norm is not finite leaves the current
generation as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.optimizer.phases import StepDecision
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch, Program, tokens_looked_up
from ratel_cli.engine.replay.loss import NOTHING_EVALUATED, EvaluatedSums, evaluated_sums, mean_figures
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.segments.passes import forward_pass, run_backward, run_forward, runnable_segments
from ratel_cli.engine.steps.following import EngineSettings, Following
from ratel_cli.engine.steps.state import Draws, PassState, StepOutcome, StepServices, StepState
from ratel_cli.model.values.finished import Finished
from ratel_cli.schedule.uses import step_uses


class StepEngine(Closing, Generic[AnyBatch]):
    """Runs steps and evaluations of one program on one store. Use as a context manager."""

    def __init__(
        self,
        program: Program[AnyBatch],
        following: Following,
        services: StepServices,
        settings: EngineSettings,
        *,
        ranks: Ranks,
        check_stop: Callable[[], None],
    ) -> None:
        """`following`: the parts that follow these settings. `check_stop` is called between blocks; what it raises
        abandons the step."""
        self._program = program
        self._following = following
        self._reader = following.reader
        self._updates = following.updates
        self._services = services
        self._settings = settings
        self._device = services.device
        self._ranks = ranks
        self._check_stop = check_stop
        self._segments = runnable_segments(program, services.device, program.spec.segments)
        self._most_rows = None if services.device.is_host else settings.placement.gpu_embedding_rows
        """A GPU gets rows instead of the embedding's matrix, if a step has no more tokens than this."""

    @property
    def is_unsettled(self) -> bool:
        """True if a step was decided to be applied, but is not settled and committed yet."""
        return self._updates.is_unsettled

    def run(
        self,
        batches: Sequence[AnyBatch],
        *,
        step: int,
        update: int,
        learning_rate: float | None,
        group_rates: tuple[float, ...] = (),
        loss_scale: float = 1.0,
        commit_previous: Callable[[], None] = lambda: None,
        recording: StepRecording | None = None,
        first_micro_batch: int = 0,
    ) -> StepOutcome:
        """Run one step. If its outcome is applied, the step is unsettled afterwards.

        `batches`: this rank's, of which the first has the number `first_micro_batch` among those of all ranks. `update`
        counts applied updates from 1. Without a learning rate, `apply` or `discard` follows it. `group_rates`: those of
        groups that have their own. If the step before is unsettled, it is settled during this one's forward and head,
        and `commit_previous` is called. A `recording` notes what every operator of the layers costs. Raises RatelError;
        the step is then abandoned, and the store's current generation is unchanged.
        """
        num_targets = int(sum(count for (count,) in self._ranks.gathered([sum(each.num_targets for each in batches)])))
        assert num_targets, "a step without targets has no loss"
        tokens = tokens_looked_up(self._program, batches)
        state = StepState(
            batches,
            self._services,
            tokens=tokens,
            num_targets=num_targets,
            draws=Draws(self._settings.seed, step, first_micro_batch),
            loss_scale=loss_scale,
            recording=recording,
            rows=self._rows_of(tokens),
        )
        begin = partial(
            self._updates.begin,
            number=update,
            learning_rate=learning_rate,
            group_rates=group_rates,
            gradient_scale=1.0 / loss_scale,
        )
        try:
            # On a thread of its own, backward would drop its last tensors whenever that thread is scheduled.
            with self._device.translate_errors(), torch.autograd.set_multithreading_enabled(False):
                return self._run(state, begin, commit_previous)
        except BaseException:
            self._give_up()
            raise
        finally:
            state.resources.close()
            self._services.activations.reset()
            self._reader.reset()
            self._device.collect()
            self._services.gradient_sums.wait_released()
            self._trim()

    def apply(self, learning_rate: float) -> None:
        """Let the step that ran without a learning rate be updated with this one."""
        self._updates.apply(learning_rate)

    def discard(self) -> None:
        """Forget the step that ran without a learning rate, if it was not applied. Idempotent."""
        self._give_up()
        self._trim()

    def settle(self) -> None:
        """Return when the update of the unsettled step is in the shadow. The caller then commits it."""
        self._updates.settle()
        self._trim()  # the gradients' buffers: whatever comes next is no backward

    def evaluate(self, batches: Sequence[AnyBatch]) -> EvaluatedSums:
        """What the targets of `batches` add up to, with dropout off. No step may be unsettled."""
        assert not self._updates.is_unsettled
        total, chunk_tokens = NOTHING_EVALUATED, self._services.chunk_tokens

        def add(number: int, finished: Finished) -> None:
            nonlocal total
            sums = evaluated_sums(finished, num_targets=batches[number].num_targets, chunk_tokens=chunk_tokens)
            total = total.and_of(sums)

        was_training = self._program.train(False)
        try:
            with torch.no_grad(), self._device.translate_errors():
                rows = self._rows_of(tokens_looked_up(self._program, batches))
                placed = [batch.to(self._device.torch_device) for batch in batches]
                forward_pass(self._segments, PassState(placed, rows=rows, measure=add), self._reader)
        finally:
            self._program.train(was_training)
            self._reader.reset()
            self._device.collect()
            self._trim()
        return total

    def close(self) -> None:
        """Give all memory back; a step that is not settled is lost. Idempotent."""
        self._updates.close()
        self._reader.reset()

    def _run(
        self, state: StepState[AnyBatch], begin: Callable[[], None], commit_previous: Callable[[], None]
    ) -> StepOutcome:
        """Walk the uses in their order, and decide. `begin` is called once, with the first use in backward."""

        def begin_updates() -> None:
            self._finish_previous(commit_previous)
            begin()

        uses, marks = step_uses(self._program.spec.segments), [self._device.mark()]
        self._reader.expect(uses, rows=state.rows)
        before = self._segments[uses[0].segment.index]
        for use in uses:
            segment = self._segments[use.segment.index]
            self._check_stop()
            if type(segment) is not type(before):
                self._trim()  # a segment of another kind has buffers of other sizes
            before = segment
            if use.stage == "forward":
                self._finish_previous(commit_previous, only_if_written=True)
                run_forward(segment, state, self._reader)
                continue
            on_first = begin_updates if len(marks) == 1 else None
            if on_first is not None:
                marks.append(self._device.mark())
            run_backward(segment, state, self._following, on_first)
        self._following.exchange.finish()
        self._updates.wait_pending()  # of what was exchanged last
        of_ranks = self._ranks.gathered([float(state.loss), *state.figures.sums()])
        loss_total = sum(of_rank for of_rank, *_ in of_ranks)
        decision = self._decide(loss_total)
        start, forward_end = (mark() for mark in marks)
        return StepOutcome(
            loss=loss_total / state.mean.num_targets,
            grad_norm=decision.norm,
            forward_seconds=forward_end - start,
            swapped_bytes=self._services.activations.put_bytes,
            applied=math.isfinite(decision.norm),
            clipped=decision.is_clipped,
            first_not_finite=decision.first_not_finite,
            figures=mean_figures([figures for _, *figures in of_ranks]),
        )

    def _decide(self, loss_total: float) -> StepDecision:
        """If anything is not finite, the step is abandoned."""
        if not math.isfinite(loss_total):
            self._updates.abandon()
            return StepDecision(math.nan, {}, first_not_finite="the loss")
        return self._updates.decide(self._program.parameter_names)

    def _give_up(self) -> None:
        """Abandon the step that arrives, or is decided without a learning rate."""
        self._following.exchange.drop()
        self._updates.abandon()

    def _finish_previous(self, commit: Callable[[], None], *, only_if_written: bool = False) -> None:
        """Settle and commit the step before, if it is unsettled. `only_if_written`: do nothing while its update is
        still being written, or where other ranks would be waited for: they may need weights that are gathered later."""
        if only_if_written and self._ranks.size > 1:
            return
        if self._updates.is_unsettled and (self._updates.is_written or not only_if_written):
            self._updates.settle()
            commit()

    def _rows_of(self, tokens: Sequence[torch.Tensor]) -> EmbeddingRows | None:
        return EmbeddingRows.of(self._program.spec, tokens, self._device.torch_device, most_rows=self._most_rows)

    def _trim(self) -> None:
        """Give free buffers back that no other phase can use, but for what the plan leaves of host memory.

        Not those registered with a GPU: making them again costs as much as filling them.
        """
        if self._device.is_host:
            self._services.pool.trim(keep_bytes=self._settings.spare_bytes)
