"""One training step: the vertical schedule over blocks, micro-batches inside.

`training.loop` calls `StepEngine.run` with the step's micro-batches and commits what it wrote. The
weights of a block cross the wires once for all micro-batches, so the batch is bounded by time alone.

    1. embed     embedding of every micro-batch; every layer's arguments
    2. forward   layers upwards: bind, run each micro-batch under a Recorder, keep its input, unbind
    3. head      norm, head and loss in chunks, and their gradients right away
    4. backward  layers downwards: bind, replay each micro-batch, sum gradients, hand them over
    5. embedding backward; a tied weight gets the head's part and its own, and is updated once
    6. decide    global norm, finite or not, clip coefficient; held gradients are consumed (engine.update)

Invariants: at most one block is bound, the embedding beside the head excepted; memory does not grow
with the number of layers but for block inputs and held gradients; a step whose loss or norm is not
finite leaves the current generation as it was.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ratel_cli.engine.activations import BlockInputs
from ratel_cli.engine.adamw import OutOfCoreAdamW
from ratel_cli.engine.gradients import GradientSum, TiedSum
from ratel_cli.engine.loss import loss_and_gradients, loss_only, tokens_per_chunk
from ratel_cli.engine.randomness import seed_draws
from ratel_cli.engine.tape import Recorder, Replayer, Tape
from ratel_cli.engine.telemetry import StepClock
from ratel_cli.engine.update import StepUpdate, UpdateSettings
from ratel_cli.engine.weights import WeightReader
from ratel_cli.model.blocks import DecoderModel
from ratel_cli.model.drive import LayerCall, last_hidden_state
from ratel_cli.model.spec import BlockSpec
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Store


class Batch(Protocol):
    """One micro-batch: int64 tensors [batch, tokens]; targets are shifted already, -100 counts for nothing."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def position_ids(self) -> torch.Tensor: ...
    @property
    def num_targets(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step did."""

    loss: float
    """Mean cross-entropy over the step's targets."""
    grad_norm: float
    """Global 2-norm before clipping; not finite when `applied` is False for that reason."""
    forward_seconds: float
    """From the start to the last layer's output; head, backward and update are the rest."""
    applied: bool
    """False: the loss or a gradient was not finite, and the store is as it was."""


class StepEngine:
    """Runs steps and evaluations of one model on one store."""

    def __init__(
        self,
        model: DecoderModel,
        store: Store,
        pool: BufferPool,
        optimizer: OutOfCoreAdamW,
        settings: UpdateSettings,
        *,
        seed: int,
        device: torch.device,
        clock: StepClock,
        scratch: Scratch | None = None,
        chunk_tokens: int | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._drive = model.drive
        self._store = store
        self._pool = pool
        self._optimizer = optimizer
        self._settings = settings
        self._seed = seed
        self._device = device
        self._clock = clock
        self._scratch = scratch
        self._presence: dict[int, tuple[bool, ...]] = {}
        self._check_stop = check_stop
        """Called between blocks; what it raises abandons the step."""
        self._chunk_tokens = chunk_tokens or tokens_per_chunk(model.spec.vocab_size)
        self._reader = WeightReader(model, store, pool, device=device, clock=clock)

    def run(
        self, batches: Sequence[Batch], *, step: int, update: int, learning_rate: float, loss_scale: float = 1.0
    ) -> StepOutcome:
        """One step; `update` counts applied updates from 1. The caller commits if the outcome is applied."""
        assert any(batch.num_targets for batch in batches), "a step without targets has no loss"
        consumer = StepUpdate(
            self._settings,
            self._store,
            self._pool,
            self._optimizer,
            self._scratch,
            clock=self._clock,
            number=update,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            check_stop=self._check_stop,
            presence=self._presence,
        )
        state = _Step(batches, step, loss_scale, self._device)
        try:
            return self._run(state, consumer)
        finally:
            state.resources.close()
            consumer.close()
            self._pool.trim()

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Sum of cross-entropies over the targets of `batches`, with dropout off."""
        self._model.skeleton.eval()
        try:
            with torch.no_grad():
                return self._evaluate(batches)
        finally:
            self._model.skeleton.train()
            self._pool.trim()

    def _run(self, state: _Step, consumer: StepUpdate) -> StepOutcome:
        start = time.perf_counter()
        hidden = self._forward(state, self._embed(state))
        forward_seconds = time.perf_counter() - start
        loss_total, gradients, tied = self._head(state, hidden, consumer)
        for block in reversed(self._model.spec.blocks[1:-1]):
            self._check_stop()
            gradients = self._backward(state, block, gradients, consumer)
        self._embedding_backward(state, gradients, tied, consumer)
        finite = math.isfinite(loss_total)
        norm = consumer.decide(self._model.parameter_names) if finite else torch.tensor(math.nan)
        return StepOutcome(
            loss=loss_total / state.num_targets,
            grad_norm=float(norm),
            forward_seconds=forward_seconds,
            applied=finite and bool(torch.isfinite(norm)),
        )

    def _embed(self, state: _Step) -> list[torch.Tensor]:
        hidden = []
        with self._reader.open(self._model.spec.blocks[0]), self._clock.during("compute"):
            for position, batch in enumerate(state.batches):
                self._seed_draws(state, 0, position)
                embedded = self._drive.embed(batch.input_ids, batch.position_ids)
                state.calls.append(embedded.calls)
                hidden.append(embedded.hidden.detach())
        self._pool.trim()
        return hidden

    def _forward(self, state: _Step, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        for block in self._model.spec.blocks[1:-1]:
            self._check_stop()
            with self._reader.open(block), self._clock.during("compute"):
                for position, calls in enumerate(state.calls):
                    state.inputs.put(block.index, position, hidden[position])
                    leaf = hidden[position].requires_grad_()
                    self._seed_draws(state, block.index, position)
                    recorder = Recorder()
                    with recorder.recording():
                        output = self._drive.run_layer(block.index - 1, leaf, calls[block.index - 1])
                    state.tapes[block.index, position] = recorder.tape()
                    hidden[position] = output.detach()
        return hidden

    def _head(
        self, state: _Step, hidden: list[torch.Tensor], consumer: StepUpdate
    ) -> tuple[float, list[torch.Tensor], _Tied | None]:
        block = self._model.spec.blocks[-1]
        total, gradients = 0.0, []
        tied = self._open_tied(state) if self._model.spec.tied else None
        with self._reader.open(block) as weights, self._sum(block, single=False) as head_sum:

            def take(contribution: Sequence[torch.Tensor | None]) -> None:
                head_sum.add(contribution[: len(block.parameters)])
                if tied is not None and contribution[-1] is not None:
                    tied.rows.add_head(contribution[-1])

            with self._tied_embedding() as tied_weight:
                parameters = (*weights.parameters, *tied_weight)
                for position, batch in enumerate(state.batches):
                    with self._clock.during("compute"):
                        self._seed_draws(state, block.index, position)
                        leaf = hidden[position].requires_grad_()
                        finished = self._drive.finish(leaf, batch.input_ids, batch.position_ids)
                        loss, gradient = loss_and_gradients(
                            self._drive,
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
            consumer.hand_over(head_sum, weights)
        self._pool.trim()
        return total, gradients, tied

    def _backward(
        self, state: _Step, block: BlockSpec, gradients: list[torch.Tensor], consumer: StepUpdate
    ) -> list[torch.Tensor]:
        with self._reader.open(block) as weights, self._sum(block, single=len(state.batches) == 1) as total:
            with self._clock.during("compute"):
                for position, calls in enumerate(state.calls):
                    leaf = state.inputs.take(block.index, position)
                    with Replayer(state.tapes.pop((block.index, position))) as replayer:
                        output = self._drive.run_layer(block.index - 1, leaf, calls[block.index - 1])
                    replayer.check_complete()
                    first, *others = torch.autograd.grad(
                        output, (leaf, *weights.parameters), gradients[position], allow_unused=True
                    )
                    total.add(others)
                    gradients[position] = first
                    del output, others
            consumer.hand_over(total, weights)
        return gradients

    def _embedding_backward(
        self, state: _Step, gradients: list[torch.Tensor], tied: _Tied | None, consumer: StepUpdate
    ) -> None:
        self._pool.trim()
        block = self._model.spec.blocks[0]
        total = tied.total if tied else state.resources.enter_context(self._sum(block, single=len(state.batches) == 1))
        with self._reader.open(block) as weights:
            with self._clock.during("compute"):
                for position, batch in enumerate(state.batches):
                    self._seed_draws(state, 0, position)
                    embedded = self._drive.embed(batch.input_ids, batch.position_ids)
                    first, *others = torch.autograd.grad(
                        embedded.hidden, weights.parameters, gradients[position], allow_unused=True
                    )
                    if tied:
                        tied.rows.add_embedding(first)
                    else:
                        total.add_one(0, first)
                    total.add([None, *others])
                del embedded, first, others
            consumer.hand_over(total, weights)

    def _evaluate(self, batches: Sequence[Batch]) -> float:
        embedding, *layers, head = self._model.spec.blocks
        with self._reader.open(embedding), self._clock.during("compute"):
            embedded = [self._drive.embed(batch.input_ids, batch.position_ids) for batch in batches]
        hidden = [item.hidden for item in embedded]
        for index, block in enumerate(layers):
            with self._reader.open(block), self._clock.during("compute"):
                for position, item in enumerate(embedded):
                    hidden[position] = self._drive.run_layer(index, hidden[position], item.calls[index])
        total = 0.0
        with self._tied_embedding(), self._reader.open(head), self._clock.during("compute"):
            for state, batch in zip(hidden, batches, strict=True):
                finished = self._drive.finish(state, batch.input_ids, batch.position_ids)
                total += loss_only(self._drive, finished, batch.targets, chunk_tokens=self._chunk_tokens)
        return total

    @contextlib.contextmanager
    def _tied_embedding(self) -> Iterator[tuple[torch.nn.Parameter, ...]]:
        """The embedding's weight bound to the head too, if the model ties them; else nothing."""
        if not self._model.spec.tied:
            yield ()
            return
        with self._reader.open(self._model.spec.blocks[0]) as embedding:
            yield (self._model.tie(embedding.parameters),)

    def _open_tied(self, state: _Step) -> _Tied:
        total = state.resources.enter_context(self._sum(self._model.spec.blocks[0], single=False))
        return _Tied(total, TiedSum(total, [batch.input_ids for batch in state.batches]))

    def _sum(self, block: BlockSpec, *, single: bool) -> GradientSum:
        return GradientSum(block, self._pool, dtype=self._settings.gradient_dtype, single=single)

    def _seed_draws(self, state: _Step, block: int, micro_batch: int) -> None:
        seed_draws(self._seed, step=state.step, block=block, micro_batch=micro_batch)


@dataclass(frozen=True, slots=True)
class _Tied:
    """The embedding block's gradient, begun by the head."""

    total: GradientSum
    rows: TiedSum


class _Step:
    """What the phases of one step hand to each other."""

    def __init__(self, batches: Sequence[Batch], step: int, loss_scale: float, device: torch.device) -> None:
        self.batches = batches
        self.step = step
        self.loss_scale = loss_scale
        self.num_targets = sum(batch.num_targets for batch in batches)
        self.calls: list[tuple[LayerCall, ...]] = []
        self.tapes: dict[tuple[int, int], Tape] = {}
        self.inputs = BlockInputs(device)
        self.resources = contextlib.ExitStack()
        """What a phase leaves open for a later one; closed with the step, however it ends."""
