"""One training step: the vertical schedule over blocks, with the micro-batches inside.

A block's weights cross the link and the drives once for all micro-batches, so only time limits the batch. Phases:

    1. embed     run the embedding for every micro-batch; note every layer's arguments
    2. forward   for each layer upwards: bind its weights; run each micro-batch under a Recorder; offload its input and
                 the operator outputs that the plan swaps; unbind
    3. head      run final norm, head and loss in chunks of tokens, each chunk's gradients right away; hand the head's
                 gradient over to the update
    4. backward  for each layer downwards: bind its weights; fetch and replay each micro-batch; sum the gradients as
                 autograd makes them, let each leave with the last micro-batch, and hand them over
    5. embedding run the embedding's backward and hand its gradient over, with the head's part if the head borrows it;
                 where the embedding or layers are frozen, backward ends at the first segment that is trained
    6. decide    compute the global norm: is it finite, must it be clipped? (engine.optimizer.update)

Overlapped with these run the reads of the next blocks' weights (engine/steps/weights.py) and the optimizer
(engine.optimizer.pipeline). The update of a step is settled at the latest when the next step's first gradient is
handed over. The step is committed then, or after `settle`.

Invariants: at most one segment is bound; memory does not grow with the number of layers, apart from what is offloaded,
held gradients and what the placement keeps resident; a step whose loss or norm is not finite leaves the current
generation as it was.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeAlias

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.cache.activations import ActivationOffloader
from ratel_cli.engine.cache.units import Unit
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import SpanLabel
from ratel_cli.engine.optimizer.gradients import gradient_of_input
from ratel_cli.engine.optimizer.host_sums import SumThread
from ratel_cli.engine.optimizer.lookup_sum import LookupSum
from ratel_cli.engine.optimizer.partial_sums import PartialSums
from ratel_cli.engine.optimizer.phases import StepDecision
from ratel_cli.engine.optimizer.segment_sum import SegmentSum, adding_to
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch, Program, tokens_looked_up
from ratel_cli.engine.replay.loss import (
    NOTHING_EVALUATED,
    ChunkSums,
    EvaluatedSums,
    evaluated_sums,
    loss_and_gradients,
    mean_figures,
)
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.repeating import AnyRecorder, Template, Unrepeated, repeater_of, template_of
from ratel_cli.engine.replay.tape import Recorder, Replayer, Tape
from ratel_cli.engine.steps.following import EngineSettings, Following
from ratel_cli.engine.steps.state import Draws, StepOutcome, StepState
from ratel_cli.engine.steps.weights import SegmentWeights
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.values.carried import Carried, LayerCall, LayerOutput, Roots, signature_of
from ratel_cli.planning.profile.activations import tokens_per_chunk
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage, forward_uses, step_uses

_Offloaded: TypeAlias = "dict[int, tuple[torch.Tensor, ...]]"
"""By position in the tape: outputs within a layer that its replay gets."""


class StepEngine(Closing, Generic[AnyBatch]):
    """Runs steps and evaluations of one program on one store. Use as a context manager."""

    def __init__(
        self,
        program: Program[AnyBatch],
        pool: BufferPool,
        following: Following,
        activations: ActivationOffloader,
        sums: SumThread,
        settings: EngineSettings,
        *,
        device: Device,
        ranks: Ranks,
        check_stop: Callable[[], None],
    ) -> None:
        """`following`: the parts that follow these settings. `check_stop` is called between blocks; what it raises
        abandons the step."""
        placement = settings.placement
        self._program = program
        self._pool = pool
        self._reader = following.reader
        self._updates = following.updates
        self._exchange = following.exchange
        self._ranks = ranks
        self._activations = activations
        self._swapped = placement.swapped
        self._seed = settings.seed
        self._device = device
        self._most_rows = None if device.is_host else placement.gpu_embedding_rows
        """A GPU gets rows instead of the embedding's matrix, if a step has no more tokens than this."""
        self._gradient_sums = following.gradient_sums
        self._sums = sums
        self._chunk_tokens = settings.chunk_tokens or tokens_per_chunk(program.spec.vocab_size)
        self._spare_bytes = settings.spare_bytes
        self._check_stop = check_stop
        self._templates: dict[int, tuple[object, Template | None]] = {}
        """By layer: the signature of its last recorded unit's arguments, and what others like it repeat, if they do."""

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
            tokens=tokens,
            num_targets=num_targets,
            draws=Draws(self._seed, step, first_micro_batch),
            loss_scale=loss_scale,
            recording=recording,
            rows=self._rows_of(tokens),
            substitutes=self._program.spec.substitutes,
            partial_sums=PartialSums(self._pool, self._device),
            device=self._device.torch_device,
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
            self._activations.reset()
            self._reader.reset()
            self._device.collect()
            self._sums.wait_released()
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
        was_training = self._program.train(False)
        try:
            with torch.no_grad(), self._device.translate_errors():
                rows = self._rows_of(tokens_looked_up(self._program, batches))
                return self._evaluate([batch.to(self._device.torch_device) for batch in batches], rows)
        finally:
            self._program.train(was_training)
            self._reader.reset()
            self._device.collect()
            self._trim()

    def close(self) -> None:
        """Give all memory back; a step that is not settled is lost. Idempotent."""
        self._updates.close()
        self._reader.reset()

    def _run(
        self, state: StepState[AnyBatch], begin: Callable[[], None], commit_previous: Callable[[], None]
    ) -> StepOutcome:
        """The phases of the module's docstring, in their order."""
        forward_start = self._device.mark()
        self._reader.expect(step_uses(self._program.spec.segments), rows=state.rows)
        layers = self._program.spec.layers
        hidden = self._embed(state)
        for layer in layers:
            self._check_stop()
            self._finish_previous(commit_previous, only_if_written=True)
            self._forward(state, layer, hidden)
        forward_end, swapped_bytes = self._device.mark(), self._activations.put_bytes

        def begin_updates() -> None:
            self._finish_previous(commit_previous)
            begin()

        loss, gradients, lookup_sum = self._head(state, hidden, begin_updates)
        for layer in filter(self._program.spec.has_backward, reversed(layers)):
            self._check_stop()
            self._backward(state, layer, gradients)
        if self._program.spec.has_backward(self._program.spec.embedding):
            self._embedding_backward(state, gradients, lookup_sum)
        self._exchange.finish()
        self._updates.wait_pending()  # of what was exchanged last
        of_ranks = self._ranks.gathered([float(loss), *state.figures.sums()])
        loss_total = sum(of_rank for of_rank, *_ in of_ranks)
        decision = self._decide(loss_total)
        return StepOutcome(
            loss=loss_total / state.mean.num_targets,
            grad_norm=decision.norm,
            forward_seconds=forward_end() - forward_start(),
            swapped_bytes=swapped_bytes,
            applied=math.isfinite(decision.norm),
            clipped=decision.is_clipped,
            first_not_finite=decision.first_not_finite,
            figures=mean_figures([figures for _, *figures in of_ranks]),
        )

    def _give_up(self) -> None:
        """Abandon the step that arrives, or is decided without a learning rate."""
        self._exchange.drop()
        self._updates.abandon()

    def _finish_previous(self, commit: Callable[[], None], *, only_if_written: bool = False) -> None:
        """Settle and commit the step before, if it is unsettled. `only_if_written`: do nothing while its update is
        still being written, or where other ranks would be waited for: they may need weights that are gathered later."""
        if only_if_written and self._ranks.size > 1:
            return
        if self._updates.is_unsettled and (self._updates.is_written or not only_if_written):
            self._updates.settle()
            commit()

    def _embed(self, state: StepState[AnyBatch]) -> list[torch.Tensor]:
        """Phase 1. Returns the hidden states `[batch, tokens, hidden]` of each micro-batch."""
        hidden = []
        segment = self._program.spec.embedding
        with self._reader.open(segment), self._computing(segment, "forward"):
            for number, batch in enumerate(state.batches):
                state.seed_draws(segment.index, number)
                embedded = self._program.begin(batch)
                state.carried.append(Carried(embedded))
                hidden.append(embedded.hidden.detach())
        self._trim()
        return hidden

    def _forward(self, state: StepState[AnyBatch], layer: Segment, hidden: list[torch.Tensor]) -> None:
        """Phase 2 for one layer: replace `hidden`, `[batch, tokens, hidden]` for each micro-batch, by its output.

        The last micro-batch runs first: backward begins with the first, and fetches in the opposite order of `put`.
        A layer that backward does not reach has no units.
        """
        has_backward = self._program.spec.has_backward(layer)
        if not has_backward:
            self._activations.skip(len(state.batches))
        with self._reader.open(layer) as weights:
            for number in reversed(range(len(state.batches))):
                if not has_backward:
                    with self._computing(layer, "forward"):
                        state.seed_draws(layer.index, number)
                        run = partial(self._program.run, layer.index - 1, hidden[number])
                        hidden[number] = state.carried[number].forward(layer.index - 1, run)
                    continue
                with self._computing(layer, "forward"):
                    leaf = hidden[number].requires_grad_(self._program.spec.passes_on(layer))
                    hidden[number], offloaded = self._run_unit(state, weights, number, leaf)
                self._activations.put(layer.index, number, Unit(leaf=leaf, offloaded=offloaded))
                del leaf, offloaded

    def _run_unit(
        self, state: StepState[AnyBatch], weights: SegmentWeights, number: int, leaf: torch.Tensor
    ) -> tuple[torch.Tensor, _Offloaded]:
        """Run a layer on one micro-batch, and note its tape. Returns its output, and outputs within it to offload.

        It repeats the last recorded unit of the layer, if it gets tensors of the same shapes; else it is recorded.
        """
        layer, carried = weights.segment.index, state.carried[number]

        def run(recorder: AnyRecorder) -> tuple[torch.Tensor, Tape, _Offloaded]:
            state.seed_draws(layer, number)
            self._activations.begin_unit()
            finished = list[tuple[Tape, _Offloaded]]()

            def forward(call: LayerCall) -> LayerOutput:
                with recorder.recording():
                    output = self._program.run(layer - 1, leaf, call)
                finished.append(recorder.finish())  # here, where what is carried is put back if it raises
                return output

            output = carried.forward(layer - 1, forward, has_backward=True)
            return output.detach(), *finished[0]

        signature = (signature_of(leaf), carried.signature(layer - 1))
        known_signature, template = self._templates.get(layer, (None, None))
        if template is not None and known_signature == signature and state.recording is None:
            with contextlib.suppress(Unrepeated):
                output, tape, offloaded = run(repeater_of(template, self._activations.limit_downloads))
                state.tapes.put_repeated(layer, number, tape)
                return output, offloaded
        recorder = self._recorder(state, weights, number)
        output, tape, offloaded = run(recorder)
        self._templates[layer] = signature, template_of(recorder, state.tapes.put(layer, number, tape))
        return output, offloaded

    def _recorder(self, state: StepState[AnyBatch], weights: SegmentWeights, number: int) -> Recorder:
        index = weights.segment.index
        swapped = self._swapped.get(index, frozenset())
        if state.recording is None:
            return Recorder(weights.parameters, swapped, self._activations.limit_downloads)
        return state.recording.recorder(
            weights.parameters,
            swapped,
            block=index,
            micro_batch=number,
            module=self._program.module(index - 1),
            on_output=self._activations.limit_downloads,
        )

    def _head(
        self, state: StepState[AnyBatch], hidden: list[torch.Tensor], begin_updates: Callable[[], None]
    ) -> tuple[torch.Tensor, list[torch.Tensor], LookupSum | None]:
        """Phase 3, for all micro-batches.

        `hidden`: the last layer's output `[batch, tokens, hidden]` of each micro-batch, removed one by one. Returns the
        sum of all losses (fp64 scalar), the gradients of these outputs if something below is trained, and the sum of
        the gradient of what the head borrows of the embedding. Calls `begin_updates` at once if the update of the step
        before is written, otherwise after the head is computed.
        """
        head, scale = self._program.spec.head, state.gradient_scale
        total, gradients = torch.zeros((), dtype=torch.float64, device=self._device.torch_device), []
        lookup_sum: LookupSum | None = None
        for block in head.borrowed_lookups:
            lookup_sum = self._gradient_sums.of_lookup(block, state.distinct_tokens, scale=scale)
            state.resources.enter_context(lookup_sum)
        with self._reader.open(head) as weights, self._gradient_sums.of_head(head, scale=scale) as head_sum:
            begins_early = self._updates.is_written
            if begins_early:
                begin_updates()

            lent, shared = weights.of(*head.borrowed_lookups), weights.of(*head.unfinished)
            shared_sums, parameters = ChunkSums(shared), (*weights.trained, *shared, *lent)
            num_own, num_lent = len(weights.trained), len(lent)

            def take(contribution: Sequence[torch.Tensor | None]) -> None:
                head_sum.add(contribution[:num_own])
                shared_sums.add(contribution[num_own : len(contribution) - num_lent])
                if lookup_sum is not None and contribution[-1] is not None:
                    lookup_sum.add_head(contribution[-1])

            for number, batch in enumerate(state.batches):
                with self._computing(head, "backward"):
                    state.seed_draws(head.index, number)
                    leaf = hidden.pop(0).requires_grad_(self._program.spec.passes_on(head))
                    loss, gradient = loss_and_gradients(
                        self._program.finish(leaf, batch),
                        leaf,
                        parameters,
                        take,
                        mean=state.mean,
                        chunk_tokens=self._chunk_tokens,
                        figures=state.figures,
                    )
                    if lookup_sum is not None:
                        lookup_sum.end_micro_batch()
                    state.partial_sums.begin(head, shared_sums.take(), number)
                    total += loss
                    if gradient is not None:
                        gradients.append(gradient)
                    del leaf, gradient
            del parameters, lent, shared
            if not begins_early:
                begin_updates()
            self._hand_over(head_sum, weights)
        if lookup_sum is not None:
            lookup_sum.end_head()
        self._trim()
        return total, gradients, lookup_sum

    def _backward(self, state: StepState[AnyBatch], layer: Segment, gradients: list[torch.Tensor]) -> None:
        """Phase 4 for one layer: replace the `gradients` of its output, `[batch, tokens, hidden]` for each micro-batch,
        by those of its input, if something below is trained."""
        single = len(state.batches) == 1
        self._activations.catch_up()
        of_layer = self._gradient_sums.of_layer(layer, single=single, scale=state.gradient_scale)
        with self._reader.open(layer) as weights, of_layer as total:
            for number in range(len(state.batches)):
                is_last = number == len(state.batches) - 1
                if is_last:
                    total.expect_last()
                with self._activations.fetch(layer.index, number) as unit, self._computing(layer, "backward"):
                    passes_on = self._program.spec.passes_on(layer)
                    unit.leaf.requires_grad_(passes_on)
                    output, roots = self._replay(state, layer, number, unit)
                    with (
                        gradient_of_input(unit.leaf) as taken,
                        adding_to(weights.trained, total, is_last=is_last),
                        self._activations.preparing_more(layer, weights.trained),
                        state.partial_sums.added_to(weights, number) as shared_roots,
                    ):
                        if output.requires_grad:  # unless all that is trained was not used, such as experts
                            roots.tensors.insert(0, output)
                            roots.gradients.insert(0, gradients[number])
                        inputs = [*([unit.leaf] if passes_on else []), *weights.trained]
                        if tensors := [*roots.tensors, *shared_roots.tensors]:
                            torch.autograd.backward(
                                tensors,
                                [*roots.gradients, *shared_roots.gradients],
                                inputs=[*inputs, *roots.inputs, *shared_roots.inputs],
                            )
                        del tensors
                    if passes_on:
                        gradients[number] = taken()
                    del unit, output, roots, shared_roots, taken
            self._hand_over(total, weights)

    def _replay(
        self, state: StepState[AnyBatch], layer: Segment, number: int, unit: Unit
    ) -> tuple[torch.Tensor, Roots]:
        """A layer's output `[batch, tokens, hidden]`, with the autograd graph that forward dropped, and what else its
        backward begins with."""

        def run(call: LayerCall) -> LayerOutput:
            with Replayer(state.tapes.take(layer.index, number), unit.offloaded) as replayer:
                output = self._program.run(layer.index - 1, unit.leaf, call)
            replayer.check_complete()
            return output

        return state.carried[number].replay(layer.index - 1, run)

    def _embedding_backward(
        self, state: StepState[AnyBatch], gradients: list[torch.Tensor], lookup_sum: LookupSum | None
    ) -> None:
        """Phase 5. `gradients`: those of the first hidden states, `[batch, tokens, hidden]` for each micro-batch."""
        self._trim()
        self._sums.wait_released()
        embedding = self._program.spec.embedding
        single, rows = len(state.batches) == 1, state.rows
        total = self._gradient_sums.of_embedding(
            embedding, lookup_sum, single=single, scale=state.gradient_scale, rows=rows
        )
        state.resources.enter_context(total)
        if lookup_sum is not None:
            lookup_sum.fetch()
        with self._reader.open(embedding) as weights:
            with self._computing(embedding, "backward"):
                for number, batch in enumerate(state.batches if weights.trained else ()):
                    state.seed_draws(embedding.index, number)
                    embedded = self._program.begin(batch)
                    roots = state.carried[number].root_embedding(embedded)
                    if embedded.hidden.requires_grad:
                        roots.tensors.insert(0, embedded.hidden)
                        roots.gradients.insert(0, gradients[number])
                    parts: list[list[torch.Tensor | None]] = []
                    if lookup_sum is not None and embedded.second is not None:
                        parts.append(roots.gradients_of(embedded.second, weights.trained))
                    with state.partial_sums.added_to(weights, number) as shared_roots:
                        found = torch.autograd.grad(
                            [*roots.tensors, *shared_roots.tensors],
                            weights.trained,
                            [*roots.gradients, *shared_roots.gradients],
                            allow_unused=True,
                        )
                        parts.append(list(found))
                        del found  # it holds the matrix's gradient, which need not last
                        if lookup_sum is not None:
                            chosen = slice(None) if rows is not None else state.distinct_tokens
                            if looked_up := _looked_up(parts, chosen):
                                lookup_sum.add_embedding(*looked_up)
                            del looked_up
                        total.add([_sum(each) for each in zip(*parts, strict=True)])
                    del embedded, roots, shared_roots, parts
            self._hand_over(total, weights)

    def _decide(self, loss_total: float) -> StepDecision:
        """Phase 6. If anything is not finite, the step is abandoned."""
        if not math.isfinite(loss_total):
            self._updates.abandon()
            return StepDecision(math.nan, {}, first_not_finite="the loss")
        return self._updates.decide(self._program.parameter_names)

    def _hand_over(self, total: SegmentSum, weights: SegmentWeights) -> None:
        """Hand a segment's gradients over to the update, and give it up; wait if too many updates are pending."""
        weights.unbind()
        for block_sum, host in zip(total.blocks, weights.hosts, strict=True):
            self._exchange.pass_on(block_sum.finish(), host)
        weights.close()
        self._updates.wait_pending()

    def _evaluate(self, batches: Sequence[AnyBatch], rows: EmbeddingRows | None) -> EvaluatedSums:
        embedding, *layers, head = self._program.spec.segments
        self._reader.expect(forward_uses(self._program.spec.segments), rows=rows)
        with self._reader.open(embedding), self._computing(embedding, "forward"):
            embedded = [self._program.begin(batch) for batch in batches]
        hidden, carried = [item.hidden for item in embedded], list(map(Carried, embedded))
        del embedded
        for index, layer in enumerate(layers):
            with self._reader.open(layer), self._computing(layer, "forward"):
                for number, item in enumerate(carried):
                    run = partial(self._program.run, index, hidden[number])
                    hidden[number] = item.forward(index, run)
        total = NOTHING_EVALUATED
        with self._reader.open(head), self._computing(head, "forward"):
            for last, batch in zip(hidden, batches, strict=True):
                finished = self._program.finish(last, batch)
                sums = evaluated_sums(finished, num_targets=batch.num_targets, chunk_tokens=self._chunk_tokens)
                total = total.and_of(sums)
        return total

    def _rows_of(self, tokens: Sequence[torch.Tensor]) -> EmbeddingRows | None:
        return EmbeddingRows.of(self._program.spec, tokens, self._device.torch_device, most_rows=self._most_rows)

    def _computing(self, segment: Segment, stage: Stage) -> contextlib.AbstractContextManager[None]:
        return self._device.computing(SpanLabel.of(stage, segment, stage))

    def _trim(self) -> None:
        """Give free buffers back that no other phase can use, but for what the plan leaves of host memory.

        Not those registered with a GPU: making them again costs as much as filling them.
        """
        if self._device.is_host:
            self._pool.trim(keep_bytes=self._spare_bytes)


def _looked_up(parts: Sequence[list[torch.Tensor | None]], chosen: slice | torch.Tensor) -> list[torch.Tensor]:
    """Take the gradient of the matrix, which comes first, out of each part. Returns its chosen rows."""
    matrices = [part[0] for part in parts]
    for part in parts:
        part[0] = None
    return [each[chosen] for each in matrices if each is not None]


def _sum(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The sum of gradients, in their order; None if there are none."""
    found = [each for each in gradients if each is not None]
    return functools.reduce(torch.add, found) if found else None
