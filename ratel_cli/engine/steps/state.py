"""What the uses of one pass hand to each other, by micro-batch, and what a step returns.

Invariant: nothing in a `PassState` outlives its pass; every random draw of training is a function of (seed, step,
block, micro-batch) and of nothing else. So a resumed run needs no generator state, and the order in which blocks run
does not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic

import torch

from ratel_cli.engine.cache.activations import ActivationOffloader
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.optimizer.gradient_sums import GradientSums
from ratel_cli.engine.optimizer.lookup_sum import LookupSum
from ratel_cli.engine.optimizer.partial_sums import PartialSums
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.engine.reading.program import AnyBatch
from ratel_cli.engine.replay.loss import Figures, MeanLoss
from ratel_cli.engine.replay.recording import StepRecording
from ratel_cli.engine.replay.tape import Tapes
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.values.carried import Carried
from ratel_cli.model.values.finished import Finished
from ratel_cli.model.values.row_lookup import DistinctTokens
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step did."""

    loss: float
    """The mean of the losses over the step's targets."""
    grad_norm: float
    """Global 2-norm of the gradients before clipping. It may be why `applied` is False: then it is not finite."""
    forward_seconds: float
    """Seconds from the start of the step to the last layer's output, without the head."""
    swapped_bytes: int
    """Bytes offloaded in forward for backward, layers' inputs included."""
    applied: bool
    """False if the loss or a gradient was not finite. The store's current generation is then unchanged."""
    clipped: bool
    """True if the gradients were scaled down to the limit on their norm."""
    first_not_finite: str | None
    """What was not finite: "the loss", or the first parameter whose gradient was not; None if only the global norm was
    not, or if all were finite."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Means over the micro-batches whose rows are compared, by name (`sizes.FIGURES`)."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What decides the random draws of one step."""

    seed: int
    step: int
    first_micro_batch: int
    """The number of the first micro-batch among those of all ranks."""

    def seed_of(self, block: int, micro_batch: int) -> int:
        """The seed for the draws of one block on one micro-batch."""
        return draw_seed(self.seed, step=self.step, block=block, micro_batch=self.first_micro_batch + micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepServices:
    """What the segments of a step use of an engine."""

    pool: BufferPool
    device: Device
    gradient_sums: GradientSums
    activations: ActivationOffloader
    swapped: Mapping[int, frozenset[str]]
    """By segment: names of the operators whose outputs are offloaded."""
    chunk_tokens: int
    """Tokens whose logits exist at once."""
    substitutes: Sequence[int]
    """Tokens that the model may look up in the place of others."""


class PassState(Generic[AnyBatch]):
    """What the uses of a forward pass hand to each other."""

    def __init__(
        self,
        batches: Sequence[AnyBatch],
        *,
        rows: EmbeddingRows | None,
        measure: Callable[[int, Finished], None] = lambda number, finished: None,
    ) -> None:
        """`batches`: on the compute device. `measure`: gets what comes out behind the last segment, by micro-batch."""
        self.batches = list(batches)
        self.rows = rows
        """What is used of the embedding's matrix to look up tokens; None: all of it."""
        self.measure = measure
        self.hidden: dict[int, torch.Tensor] = {}
        """What came out of the last segment that has run forward, `[batch, tokens, hidden]`."""
        self.carried: dict[int, Carried] = {}
        """What later uses get besides."""

    def forward_order(self) -> Iterable[int]:
        """The numbers of the micro-batches, in the order in which a use runs them."""
        return range(len(self.batches))

    def seed_draws(self, block: int, micro_batch: int) -> None:
        """No-op: nothing is drawn, since dropout is off."""


class StepState(PassState[AnyBatch]):
    """What the uses of one step hand to each other, and the services that they use."""

    def __init__(
        self,
        batches: Sequence[AnyBatch],
        services: StepServices,
        *,
        tokens: Sequence[torch.Tensor],
        num_targets: int,
        draws: Draws,
        loss_scale: float,
        recording: StepRecording | None,
        rows: EmbeddingRows | None,
    ) -> None:
        """`tokens`: those that each micro-batch looks up, `[batch, tokens]`, in host memory. `num_targets`: of all
        ranks."""
        device = services.device.torch_device
        super().__init__([batch.to(device) for batch in batches], rows=rows)
        self.services = services
        self.is_single = len(batches) == 1
        """Whether each parameter gets one contribution, apart from what is computed in chunks."""
        self.last = len(batches) - 1
        """The number of the micro-batch with which gradients leave."""
        self.mean = MeanLoss(num_targets, loss_scale)
        self.gradient_scale = 1.0 / loss_scale
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """The sum of all losses so far."""
        self.gradients: dict[int, torch.Tensor] = {}
        """The gradients of what came out of the segment whose backward comes next, `[batch, tokens, hidden]`."""
        self.tapes = Tapes()
        self.recording = recording
        self.resources = contextlib.ExitStack()
        """What one use opens and a later one closes. Closed with the step, however the step ends."""
        self.figures = Figures()
        """Figures of the micro-batches whose rows are compared."""
        self.partial_sums = self.resources.enter_context(PartialSums(services.pool, services.device))
        """The gradients of blocks that several segments bind."""
        self.lookup_sums: dict[int, LookupSum] = {}
        """By block: that of a matrix that a segment borrows of one below, where tokens are looked up in it."""
        self._tokens = tokens
        self._draws = draws
        self._device = device

    def forward_order(self) -> Iterable[int]:
        """The last one first: backward begins with the first, and fetches units in the opposite order of `put`."""
        return reversed(range(len(self.batches)))

    def lend(self, block: BlockSpec, lookup_sum: LookupSum) -> LookupSum:
        """Hand on the sum of a borrowed matrix, from its borrower to the segment that it belongs to."""
        self.lookup_sums[block.index] = self.resources.enter_context(lookup_sum)
        return lookup_sum

    def lent_of(self, segment: Segment) -> LookupSum | None:
        """The sum that a borrower has begun of the segment's own matrix; None if nobody borrows it."""
        found = (self.lookup_sums.get(block.index) for block in segment.blocks)
        return next((each for each in found if each is not None), None)

    @cached_property
    def distinct_tokens(self) -> torch.Tensor:
        """The distinct tokens that the step may look up, sorted `[rows]`, on the compute device."""
        if self.rows is not None:
            return self.rows.tokens.on_device
        return DistinctTokens.of(self._tokens, self._device, substitutes=self.services.substitutes).on_device

    def seed_draws(self, block: int, micro_batch: int) -> None:
        """Seed the generators of the CPU and of the compute device for the draws of one block on one micro-batch."""
        seed = self._draws.seed_of(block, micro_batch)
        # torch.manual_seed takes a millisecond: it notes the call, with its traceback, for each kind of idle device.
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed_all(seed)


def draw_seed(seed: int, *, step: int, block: int, micro_batch: int) -> int:
    """A 63-bit seed for the draws of one block on one micro-batch of one step."""
    key = f"{seed}/{step}/{block}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
