"""One training step: the vertical schedule over blocks, micro-batches inside.

`training.loop` calls `StepEngine.run` with the step's micro-batches and commits what it wrote. The
weights of a block cross the wires once for all micro-batches, so the batch is bounded by time alone.

    1. embed     embedding of every micro-batch; every layer's arguments
    2. forward   layers upwards: bind, run each micro-batch under a Recorder, offload its input and what
                 the plan swaps, unbind
    3. head      norm, head and loss in chunks, and their gradients right away
    4. backward  layers downwards: bind, fetch and replay each micro-batch, sum gradients, hand them over
    5. embedding backward; a tied weight gets the head's part and its own, and is updated once
    6. decide    global norm, finite or not, clip coefficient (engine.optimizer.update)

Beneath it run the reads of the next blocks' weights (engine.weights) and the optimizer (engine.optimizer.pipeline).
The update of a step is settled no later than the next step's first gradient; the step before is
committed there, or after `settle`.

Invariants: at most one block is bound, the embedding beside the head excepted; memory does not grow
with the number of layers but for what is offloaded, held gradients and what the placement keeps; a step whose
loss or norm is not finite leaves the current generation as it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.engine.activations import Activations, Unit
from ratel_cli.engine.device.device import Device, SpanLabel
from ratel_cli.engine.loss import loss_and_gradients, loss_only, tokens_per_chunk
from ratel_cli.engine.optimizer.adamw import AdamWUpdate
from ratel_cli.engine.optimizer.gradients import GradientSum, TiedSum
from ratel_cli.engine.optimizer.pipeline import UpdatePipeline
from ratel_cli.engine.optimizer.update import Updates, UpdateSettings
from ratel_cli.engine.replay.randomness import seed_draws
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.tape import Recorder, Replayer
from ratel_cli.engine.state import StepOutcome, StepState, Tied, place
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.engine.weights import BlockWeights, ResidentWeights, WeightReader
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.layer_runner import last_hidden_state
from ratel_cli.model.spec import BlockSpec
from ratel_cli.planning.placement import Placement, Stage
from ratel_cli.store.store import Store


class StepEngine:
    """Runs steps and evaluations of one model on one store. Use as a context manager."""

    def __init__(
        self,
        model: DecoderModel,
        store: Store,
        pool: BufferPool,
        pipeline: UpdatePipeline,
        settings: UpdateSettings,
        placement: Placement,
        *,
        seed: int,
        device: Device,
        timeline: Timeline,
        scratch: Scratch | None = None,
        activation_scratch: Scratch | None = None,
        chunk_tokens: int | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._layer_runner = model.layer_runner
        self._pool = pool
        self._settings = settings
        self._seed = seed
        self._device = device
        self._check_stop = check_stop
        """Called between blocks; what it raises abandons the step."""
        self._chunk_tokens = chunk_tokens or tokens_per_chunk(model.spec.vocab_size)
        self._resident = ResidentWeights(placement.resident_weights)
        self._swapped = placement.swapped
        self._activations = Activations(pool, activation_scratch, placement, device=device, timeline=timeline)
        self._updates = Updates(
            settings,
            placement,
            model.spec.blocks,
            store,
            pipeline,
            self._resident,
            scratch,
            timeline=timeline,
        )
        self._reader = WeightReader(
            model,
            store,
            pool,
            self._updates,
            self._resident,
            prefetch_blocks=placement.prefetch_blocks,
            kept=placement.gpu_weights,
            device=device,
            timeline=timeline,
        )

    @property
    def is_unsettled(self) -> bool:
        """Whether a step was decided that is still to be settled and committed."""
        return self._updates.is_unsettled

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        step: int,
        update: int,
        learning_rate: float,
        loss_scale: float = 1.0,
        commit_previous: Callable[[], None] = lambda: None,
        recording: StepRecording | None = None,
    ) -> StepOutcome:
        """One step; `update` counts applied updates from 1. If its outcome is applied, it is unsettled.

        An unsettled step before is settled beneath this one's forward; then `commit_previous` is called.
        A `recording` takes in what every operator of the layers costs.
        """
        assert any(batch.num_targets for batch in batches), "a step without targets has no loss"
        state = StepState(batches, step, loss_scale, self._activations, recording, device=self._device.torch_device)
        adamw = AdamWUpdate(number=update, learning_rate=learning_rate, gradient_scale=1.0 / loss_scale)
        try:
            with self._device.translate_errors():
                return self._run(state, adamw, commit_previous)
        except BaseException:
            self._updates.abandon()
            raise
        finally:
            state.resources.close()
            self._activations.reset()
            self._reader.reset()
            self._device.collect()
            self._trim()

    def settle(self) -> None:
        """Finish the update of an unsettled step; the caller commits it."""
        self._updates.settle()

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """Sum of cross-entropies over the targets of `batches`, with dropout off. No step may be unsettled."""
        assert not self._updates.is_unsettled
        self._model.skeleton.eval()
        try:
            with torch.no_grad(), self._device.translate_errors():
                return self._evaluate(place(batches, self._device.torch_device))
        finally:
            self._model.skeleton.train()
            self._reader.reset()
            self._device.collect()
            self._trim()

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._updates.close()
        self._reader.reset()
        self._resident.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, state: StepState, adamw: AdamWUpdate, commit_previous: Callable[[], None]) -> StepOutcome:
        begun = self._device.mark()
        self._expect_uses()
        hidden = self._embed(state)
        for block in self._model.spec.blocks[1:-1]:
            self._check_stop()
            self._finish_previous(commit_previous, if_written=True)
            self._forward(state, block, hidden)
        forward_end, swapped_bytes = self._device.mark(), self._activations.put_bytes

        def begin_updates() -> None:
            self._finish_previous(commit_previous)
            self._updates.begin(adamw)

        losses, gradients, tied = self._head(state, hidden, begin_updates)
        hidden.clear()
        for block in reversed(self._model.spec.blocks[1:-1]):
            self._check_stop()
            gradients = self._backward(state, block, gradients)
        self._embedding_backward(state, gradients, tied)
        loss_total = float(losses)
        if math.isfinite(loss_total):
            norm = self._updates.decide(self._model.parameter_names)
            is_finite = bool(torch.isfinite(norm))
            not_finite = None if is_finite else self._updates.first_not_finite(self._model.parameter_names)
        else:
            norm, not_finite = torch.tensor(math.nan), "the loss"
            self._updates.abandon()
        return StepOutcome(
            loss=loss_total / state.num_targets,
            grad_norm=float(norm),
            forward_seconds=forward_end() - begun(),
            swapped_bytes=swapped_bytes,
            applied=bool(torch.isfinite(norm)),
            first_not_finite=not_finite,
        )

    def _expect_uses(self) -> None:
        embedding, *layers, head = self._model.spec.blocks
        self._reader.expect([embedding, *layers], "forward")
        self._reader.expect([head, embedding] if self._model.spec.tied else [head], "backward")
        self._reader.expect([*reversed(layers), embedding], "backward")

    def _embed(self, state: StepState) -> list[torch.Tensor]:
        hidden = []
        block = self._model.spec.blocks[0]
        with self._reader.open(block), self._computing(block, "forward"):
            for position, batch in enumerate(state.batches):
                self._seed_draws(state, 0, position)
                embedded = self._layer_runner.embed(batch.input_ids, batch.position_ids)
                state.calls.append(embedded.calls)
                hidden.append(embedded.hidden.detach())
        self._trim()
        return hidden

    def _finish_previous(self, commit: Callable[[], None], *, if_written: bool = False) -> None:
        """Settle and commit the step before, if it is not yet; `if_written`: only if that takes no waiting."""
        if self._updates.is_unsettled and (self._updates.is_written or not if_written):
            self._updates.settle()
            commit()

    def _forward(self, state: StepState, block: BlockSpec, hidden: list[torch.Tensor]) -> None:
        """Take `hidden`, one tensor for each micro-batch, through one layer: the last one first, since
        backward ends with it, and fetches in the opposite order."""
        with self._reader.open(block) as weights:
            for position in reversed(range(len(state.batches))):
                with self._computing(block, "forward"):
                    self._seed_draws(state, block.index, position)
                    leaf = hidden[position].requires_grad_()
                    recorder = self._recorder(state, weights, position)
                    with recorder.recording():
                        output = self._layer_runner.run_layer(
                            block.index - 1, leaf, state.calls[position][block.index - 1]
                        )
                    hidden[position] = output.detach()
                    state.tapes[block.index, position], offloaded = recorder.finish()
                state.activations.put(block.index, position, Unit(leaf=leaf, offloaded=offloaded))
                del leaf, output, offloaded

    def _recorder(self, state: StepState, weights: BlockWeights, position: int) -> Recorder:
        block, swapped = weights.block.index, self._swapped.get(weights.block.index, frozenset())
        if state.recording is None:
            return Recorder(weights.parameters, swapped)
        return state.recording.recorder(
            weights.parameters, swapped, block=block, micro_batch=position, module=self._layer_runner.layers[block - 1]
        )

    def _head(
        self, state: StepState, hidden: list[torch.Tensor], begin_updates: Callable[[], None]
    ) -> tuple[torch.Tensor, list[torch.Tensor], Tied | None]:
        """The sum of all losses, gradients of the last hidden states, and of the embedding if it is tied."""
        block = self._model.spec.blocks[-1]
        total, gradients = torch.zeros((), dtype=torch.float64, device=self._device.torch_device), []
        tied = self._open_tied(state) if self._model.spec.tied else None
        with self._reader.open(block) as weights, self._sum(block, single=False) as head_sum:
            begun_early = self._updates.is_written
            if begun_early:
                begin_updates()

            def take(contribution: Sequence[torch.Tensor | None]) -> None:
                head_sum.add(contribution[: len(block.parameters)])
                if tied is not None and contribution[-1] is not None:
                    tied.rows.add_head(contribution[-1])

            with self._tied_embedding() as tied_weight:
                parameters = (*weights.parameters, *tied_weight)
                for position, batch in enumerate(state.batches):
                    with self._computing(block, "backward"):
                        self._seed_draws(state, block.index, position)
                        leaf = hidden[position].requires_grad_()
                        finished = self._layer_runner.finish(leaf, batch.input_ids, batch.position_ids)
                        loss, gradient = loss_and_gradients(
                            self._layer_runner,
                            finished,
                            batch.targets,
                            parameters,
                            take,
                            chunk_tokens=self._chunk_tokens,
                            num_targets=state.num_targets,
                            loss_scale=state.loss_scale,
                        )
                        first, *others = torch.autograd.grad(
                            last_hidden_state(finished), (leaf, *parameters), gradient, allow_unused=True
                        )
                        take(others)
                        if tied is not None:
                            tied.rows.end_micro_batch()
                        total += loss
                        gradients.append(first)
                del parameters, finished, others
            if not begun_early:
                begin_updates()
            self._updates.hand_over(head_sum, weights)
        self._trim()
        return total, gradients, tied

    def _backward(self, state: StepState, block: BlockSpec, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._reader.open(block) as weights, self._sum(block, single=len(state.batches) == 1) as total:
            for position in range(len(state.batches)):
                with state.activations.fetch(block.index, position) as unit, self._computing(block, "backward"):
                    output = self._replay(state, block, position, unit)
                    first, *others = torch.autograd.grad(
                        output, (unit.leaf, *weights.parameters), gradients[position], allow_unused=True
                    )
                    total.add(others)
                    gradients[position] = first
                    del unit, output, others
            self._updates.hand_over(total, weights)
        return gradients

    def _replay(self, state: StepState, block: BlockSpec, position: int, unit: Unit) -> torch.Tensor:
        """A layer's output, with the autograd graph that forward did not keep."""
        with Replayer(state.tapes.pop((block.index, position)), unit.offloaded) as replayer:
            output = self._layer_runner.run_layer(block.index - 1, unit.leaf, state.calls[position][block.index - 1])
        replayer.check_complete()
        return output

    def _embedding_backward(self, state: StepState, gradients: list[torch.Tensor], tied: Tied | None) -> None:
        self._trim()
        block = self._model.spec.blocks[0]
        total = tied.total if tied else state.resources.enter_context(self._sum(block, single=len(state.batches) == 1))
        with self._reader.open(block) as weights:
            with self._computing(block, "backward"):
                for position, batch in enumerate(state.batches):
                    self._seed_draws(state, 0, position)
                    embedded = self._layer_runner.embed(batch.input_ids, batch.position_ids)
                    first, *others = torch.autograd.grad(
                        embedded.hidden, weights.parameters, gradients[position], allow_unused=True
                    )
                    if tied:
                        tied.rows.add_embedding(first)
                    else:
                        total.add_one(0, first)
                    total.add([None, *others])
                del embedded, first, others
            self._updates.hand_over(total, weights)

    def _evaluate(self, batches: Sequence[MicroBatch]) -> float:
        embedding, *layers, head = self._model.spec.blocks
        self._reader.expect([embedding, *layers, *([embedding] if self._model.spec.tied else []), head], "forward")
        with self._reader.open(embedding), self._computing(embedding, "forward"):
            embedded = [self._layer_runner.embed(batch.input_ids, batch.position_ids) for batch in batches]
        hidden = [item.hidden for item in embedded]
        for index, block in enumerate(layers):
            with self._reader.open(block), self._computing(block, "forward"):
                for position, item in enumerate(embedded):
                    hidden[position] = self._layer_runner.run_layer(index, hidden[position], item.calls[index])
        total = 0.0
        with self._tied_embedding(), self._reader.open(head), self._computing(head, "forward"):
            for state, batch in zip(hidden, batches, strict=True):
                finished = self._layer_runner.finish(state, batch.input_ids, batch.position_ids)
                total += loss_only(self._layer_runner, finished, batch.targets, chunk_tokens=self._chunk_tokens)
        return total

    @contextlib.contextmanager
    def _tied_embedding(self) -> Iterator[tuple[torch.nn.Parameter, ...]]:
        """The embedding's weight bound to the head too, if the model ties them; else nothing."""
        if not self._model.spec.tied:
            yield ()
            return
        with self._reader.open(self._model.spec.blocks[0]) as embedding:
            yield (self._model.tie(embedding.parameters),)

    def _open_tied(self, state: StepState) -> Tied:
        total = state.resources.enter_context(self._sum(self._model.spec.blocks[0], single=False))
        return Tied(total, TiedSum(total, state.input_ids))

    def _sum(self, block: BlockSpec, *, single: bool) -> GradientSum:
        return GradientSum(block, self._pool, self._device, dtype=self._settings.gradient_dtype, single=single)

    def _computing(self, block: BlockSpec, stage: Stage) -> contextlib.AbstractContextManager[None]:
        return self._device.computing(SpanLabel(label=f"{stage} of {block.name}", block=block.index, stage=stage))

    def _trim(self) -> None:
        """Give buffers back that no other phase of a step has a use for. Not where to make them anew costs as much as
        to fill them: those that CUDA copies from."""
        if self._device.is_host:
            self._pool.trim()

    def _seed_draws(self, state: StepState, block: int, micro_batch: int) -> None:
        seed_draws(self._seed, step=state.step, block=block, micro_batch=micro_batch)
