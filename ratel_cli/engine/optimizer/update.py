"""Decides when each gradient of a step updates its block: on arrival, or after the step is decided.

The step hands over one block's gradient after another, in backward order, and then asks for the decision: is the
global norm finite, and must the gradients be clipped? There are three modes, which give the same bits:

    eager        without clipping: each gradient updates its block as it arrives, overlapped with the backward of the
                 blocks below (active gradient offloading, Ratel section IV-C)
    deferred     with clipping, or without a learning rate: all gradients are held. When norm and rate are known, each
                 block's update waits until the next step's forward comes near the block, and is overlapped with that
                 forward
    speculative  with clipping, while that pays (engine/optimizer/speculation.py): as eager, but the gradients are held
                 too. As soon as clipping is certain, the shadow is discarded, the gradients that follow are only held,
                 and all blocks are updated deferred

The path of one block's gradient:

    1. sum       step.py adds up its parts (gradients.GradientSum); `finish` rounds the sum to G16 and downloads it
    2. hand over `Updates.hand_over` starts the update, or holds the gradient, in memory or in the scratch file
    3. submit    `UpdatePipeline.submit` gives it to the optimizer thread, which walks through the block by groups
    4. update    `GroupWork` reads a group's states, lets `GroupUpdater` update them in place, and writes them
    5. settle    when every group has been written to the shadow, `Updates.settle` returns and the caller commits

So a step ends twice: `decide` decides it, and it is settled when the last byte of its update is in the shadow, which
may be during the next step's forward. Only then can the caller commit it.

Invariant: all writes go to the shadow, so that a step which turns out not to be finite is abandoned by discarding the
shadow. In a store of one slot, where nothing can be discarded, every gradient is held.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.optimizer.gradients import NormParts, clip_coefficient, one_part, total_norm
from ratel_cli.engine.optimizer.groups import BlockUpdate
from ratel_cli.engine.optimizer.pipeline import UpdatePipeline
from ratel_cli.engine.optimizer.settings import UpdateNumbers
from ratel_cli.engine.optimizer.speculation import Speculation
from ratel_cli.engine.reading.host_weights import HostWeights, ResidentWeights
from ratel_cli.errors import BadInput
from ratel_cli.io.scratch import Scratch
from ratel_cli.planning.profile.placement import Overlap, Placement
from ratel_cli.planning.search.clipping import COUNTED_ALIKE, SpeculationCosts
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Settings of the update that do not change during a run."""

    max_grad_norm: float | None
    """Clip the global gradient norm to this; None does not clip."""
    holds_all: bool
    """Hold every gradient until the step is decided, even if nothing can be clipped."""
    held_in_memory_bytes: int | None
    """Host memory for held gradients. The first gradient that does not fit goes to the scratch file, and so do all
    later ones of the step. None: all stay in host memory."""
    speculation: SpeculationCosts | None = COUNTED_ALIKE
    """What updating blocks before it is known if the step is clipped gains and loses; None never does it."""
    overlap: Overlap = "optimized"
    """`separate` holds all gradients until backward is over, and updates all blocks before the next step begins."""


class Updates:
    """The updates of one step after another. All methods are for the compute thread.

    A failure of the optimizer thread is raised by the next call that submits or waits.
    """

    def __init__(
        self,
        settings: UpdateSettings,
        placement: Placement,
        segments: Sequence[Segment],
        store: Store,
        pipeline: UpdatePipeline,
        resident: ResidentWeights,
        scratch: Scratch | None,
        *,
        timeline: Timeline,
        parts_of: Callable[[Norms], NormParts] = one_part,
    ) -> None:
        """`parts_of`: from the norms of this rank's gradients to those of all ranks."""
        self._settings = settings
        self._parts_of = parts_of
        self._norm_parts: NormParts = {}
        """Norms of all ranks' gradients in the last decided step, by parameter."""
        self._placement = placement
        self._segments = segments
        self._blocks = [block for segment in segments for block in segment.blocks]
        """In the order in which forward uses them."""
        self._trained = [block for block in self._blocks if block.is_trained]
        self._store = store
        self._pipeline = pipeline
        self._resident = resident
        self._scratch = scratch
        self._timeline = timeline
        self._presence: dict[int, tuple[bool, ...]] = {}
        """By block: which of its parameters had a gradient in the first step."""
        self._speculation: Speculation | None = None
        if settings.max_grad_norm is not None:
            num_elements = sum(segment.trained_elements for segment in segments)
            costs = settings.speculation or COUNTED_ALIKE
            self._speculation = Speculation(settings.max_grad_norm, costs, num_elements=num_elements)
        self._unknown_norms: deque[BlockGradient] = deque()
        """Gradients of the arriving step whose norms are not known in host memory yet."""
        self._started: dict[int, BlockUpdate] = {}
        """By block: updates of the arriving step, or of the decided step that is not settled yet."""
        self._deferred: dict[int, BlockGradient] = {}
        """By block: gradients of the decided step whose updates start when the block's weights are used again."""
        self._held: list[BlockGradient] = []
        """Gradients of the arriving step that wait for its decision."""
        self._number, self._gradient_scale = 0, 1.0
        self._learning_rate: float | None = None
        self._group_rates: tuple[float, ...] = ()
        """Learning rates of the groups in the arriving or the decided step. `_learning_rate` None: not known yet."""
        self._is_writing = False
        """True from the store's `begin_step` until the step is settled or discarded."""
        self._is_decided = False
        self.is_clipped = False
        """True if the gradients of the last decided step were clipped."""

    def follow(self, settings: UpdateSettings, placement: Placement, scratch: Scratch | None) -> None:
        """Follow another plan from the next step on. No step may be arriving.

        Updates that have started are written first. Deferred ones stay deferred: a gradient that waits in an earlier
        `scratch` is fetched from there.
        """
        assert not self._is_writing or self._is_decided
        with self._timeline.stalled_on(self._pipeline.waits_for):
            self._pipeline.wait_unfinished(at_most=0)
        self._settings, self._placement, self._scratch = settings, placement, scratch
        if self._speculation is not None:
            self._speculation.costs = settings.speculation or COUNTED_ALIKE
        self._resident.follow(self._blocks_of(placement.resident_weights))
        self._pipeline.follow(placement.groups, resident_states=self._blocks_of(placement.resident_states))

    @property
    def is_unsettled(self) -> bool:
        """True if a step is decided and not settled yet."""
        return self._is_decided

    @property
    def is_written(self) -> bool:
        """True if `settle` would return at once."""
        return not self._deferred and all(update.is_written for update in self._started.values())

    # For the weight reader: where a block's newest weights are.

    def is_in_shadow(self, block: BlockSpec) -> bool:
        """True if the block's newest weights are in the shadow: written, but not committed."""
        update = self._started.get(block.index)
        return self._is_decided and update is not None and update.is_written

    def is_updating(self, block: BlockSpec) -> bool:
        """True if the block is being updated, so that its newest weights can be read from neither generation."""
        update = self._started.get(block.index)
        return self._is_decided and update is not None and not update.is_written

    def start_deferred(self, weights: HostWeights) -> None:
        """Start the update of the weights' block if it was deferred until this use."""
        gradient = self._deferred.pop(weights.block.index, None)
        if gradient is not None:
            self._start(gradient, weights.share())

    def is_updated(self, block: BlockSpec) -> bool:
        """True if `wait_updated` would return at once."""
        update = self._started.get(block.index)
        return not self._is_decided or update is None or update.is_updated

    def wait_updated(self, block: BlockSpec) -> None:
        """Return when the block's update, if there is one, has changed the weights in memory."""
        update = self._started.get(block.index)
        if self._is_decided and update is not None:
            self._pipeline.wait_updated(update)

    def waiting_for(self, block: BlockSpec) -> Callable[[], None]:
        """What returns, on any thread, when the block's update, if there is one now, has changed the weights in memory.
        It raises as the pipeline does."""
        update = self._started.get(block.index)
        if not self._is_decided or update is None:
            return lambda: None
        return partial(self._pipeline.wait_updated, update)

    def wait_written(self, block: BlockSpec) -> None:
        """Return when the block's update, if there is one, is in the shadow."""
        update = self._started.get(block.index)
        if self._is_decided and update is not None:
            self._pipeline.wait_written(update)

    # For the step, in this order.

    def begin(
        self,
        *,
        number: int,
        learning_rate: float | None,
        gradient_scale: float,
        group_rates: tuple[float, ...] = (),
        come_in_order: bool = True,
    ) -> None:
        """Begin a step whose gradients will come. The step before must be settled and committed.

        `come_in_order`: one segment after another, the last one first; then states are read before they come.

        Without a learning rate, all gradients are held, and `apply` or `discard` follows the decision. Others as in
        `UpdateNumbers`.
        """
        assert not self._is_decided
        self._number, self._gradient_scale, self._learning_rate = number, gradient_scale, learning_rate
        self._group_rates = group_rates
        self._norms: Norms = {}
        self._held_bytes = self._spilled_bytes = 0
        self._unknown_norms.clear()
        if self._speculation is not None:
            self._speculation.begin()
        self._mode = self._choose_mode()
        if self._mode == "deferred":
            self._pipeline.fill(self._trained)  # nothing is updated in this backward, so drives may be idle
        else:
            self._begin_writing()
            arriving = (block for segment in reversed(self._segments) for block in segment.trained)
            if come_in_order:
                self._pipeline.expect([block for block in arriving if not self._is_deferred(block)])

    def hand_over(self, gradient: BlockGradient, weights: HostWeights | None) -> None:
        """Take over a block's summed gradient: start its update on `weights`, or hold it. None: those in the store.

        Raises BadInput if other parameters of the block have a gradient than in the first step.
        """
        try:
            self._norms |= gradient.norms
            self._check_presence(gradient)
            self._watch_norm(gradient)
            if self._mode == "deferred" or self._is_deferred(gradient.block):
                self._hold(gradient)
                return
        except BaseException:
            gradient.release()
            raise
        if self._mode == "speculative":
            self._held.append(gradient)
        self._start(gradient, None if weights is None else weights.share())

    def wait_pending(self) -> None:
        """Return when updates of no more segments are unfinished than the placement allows."""
        with self._timeline.stalled_on(self._pipeline.waits_for):
            self._pipeline.wait_unfinished(at_most=self._placement.pending_updates)

    def decide(self, order: Sequence[str]) -> torch.Tensor:
        """Return the global norm (fp32 scalar), stacked by parameter in `order`. If it is not finite, abandon the
        step."""
        self._norm_parts = self._parts_of(self._norms)
        norm = total_norm(self._norm_parts, order)
        if not torch.isfinite(norm):
            self.abandon()
            return norm
        clip = 1.0
        if self._speculation is not None:
            assert self._settings.max_grad_norm is not None
            clip = clip_coefficient(norm, self._settings.max_grad_norm)
            self.is_clipped = clip < 1.0
            self._speculation.end(is_clipped=self.is_clipped)
        if self._mode == "speculative":
            if clip == 1.0:
                self._pipeline.let_go(self._started.values())
                self._held = []
                self._is_decided = True
                return norm
            self._discard()
        self._begin_writing()
        self._clip = clip
        self._deferred = {gradient.block.index: gradient for gradient in self._held}
        self._held = []
        self._is_decided = True
        if self._settings.overlap == "separate" and self._learning_rate is not None:
            self._write_separately()
        return norm

    @property
    def waits_for_rate(self) -> bool:
        """Whether a step is decided that has still to be applied or discarded."""
        return self._is_decided and self._learning_rate is None

    def apply(self, learning_rate: float) -> None:
        """Let the decided step, which began without a learning rate, be updated with this one."""
        assert self.waits_for_rate
        self._learning_rate = learning_rate
        if self._settings.overlap == "separate":
            self._write_separately()

    def discard(self) -> None:
        """Forget the decided step, which was not applied."""
        assert self.waits_for_rate
        self._is_decided = False
        self._held, self._deferred = list(self._deferred.values()), {}
        self.abandon()

    @property
    def gradient_scale(self) -> float:
        """What the gradients of the step are multiplied with."""
        return self._gradient_scale

    @property
    def norms(self) -> Norms:
        """Norms of the gradients that have come in the last step, by parameter."""
        return self._norms

    def first_not_finite(self, order: Sequence[str]) -> str | None:
        """Name of the first parameter in `order` whose gradient in the last step is not finite; None if all are."""
        return next((name for name in order if not all(map(math.isfinite, self._norm_parts.get(name, ())))), None)

    def settle(self) -> None:
        """Return when all updates of the decided step are in the shadow. The caller then commits it."""
        with self._timeline.stalled_on(self._pipeline.waits_for):
            self._write_all()
        self._started.clear()
        self._is_decided = self._is_writing = False

    def abandon(self) -> None:
        """Abandon the arriving step: the current generation stays. A decided step is not affected. Idempotent."""
        if self._is_decided:
            return
        self._discard()
        self._resident.forget()  # the step may be run again: trust nothing in memory
        for gradient in self._held:
            gradient.release()
        self._held = []

    def close(self) -> None:
        """Give all memory back; a step that is not settled is lost. Idempotent."""
        self._held.extend(self._deferred.values())
        self._deferred = {}
        if self._store.overwrites and self._started:
            self._pipeline.cancel(frozenset(self._started))  # what was written in place cannot be discarded
            self._is_writing = False
        self._is_decided = False
        self.abandon()

    def _choose_mode(self) -> Literal["eager", "deferred", "speculative"]:
        settings, overwrites = self._settings, self._store.overwrites
        if self._learning_rate is None or settings.holds_all or settings.overlap == "separate" or overwrites:
            return "deferred"
        if settings.max_grad_norm is None:
            return "eager"
        assert self._speculation is not None
        is_possible = settings.speculation is not None and settings.held_in_memory_bytes is None
        return "speculative" if is_possible and self._speculation.is_worthwhile else "deferred"

    def _watch_norm(self, gradient: BlockGradient) -> None:
        """Follow the norm of the gradients that have arrived, and stop speculating when clipping is certain.

        When that is depends on when downloads end. The bits of the step do not; how much is written for nothing does.
        """
        if self._speculation is None:
            return
        self._unknown_norms.append(gradient)
        while self._unknown_norms and self._unknown_norms[0].is_in_host_memory:
            known = self._unknown_norms.popleft()
            self._speculation.add(known.squared_norm, known.block.num_elements)
        if self._mode == "speculative" and self._speculation.is_clipping_certain:
            self._discard()
            self._mode = "deferred"
            self._pipeline.fill(self._trained)

    def _blocks_of(self, segments: frozenset[int]) -> frozenset[int]:
        """Indices of the blocks of these segments."""
        return frozenset(block.index for block in self._blocks if block.segment in segments)

    def _is_deferred(self, block: BlockSpec) -> bool:
        return self._mode == "eager" and block.segment in self._placement.deferred

    def _begin_writing(self) -> None:
        if not self._is_writing:
            self._store.begin_step()
            self._is_writing = True
            self._clip = 1.0

    def _discard(self) -> None:
        """Discard all updates of the arriving step. Held gradients stay."""
        if not self._is_writing:
            return
        updated = frozenset(self._started)
        self._pipeline.cancel(updated)
        self._resident.forget(updated)
        self._started.clear()
        self._is_writing = False
        self._store.discard()

    def _start(self, gradient: BlockGradient, weights: HostWeights | None) -> None:
        assert self._learning_rate is not None, "the step was not applied"
        update = BlockUpdate(
            gradient=gradient,
            weights=weights,
            numbers=UpdateNumbers(
                number=self._number,
                learning_rate=self._learning_rate,
                group_rates=self._group_rates,
                gradient_scale=self._gradient_scale * self._clip,
            ),
            holds_gradient=self._mode == "speculative" and not self._is_decided,
        )
        self._started[gradient.block.index] = update
        self._pipeline.submit(update)

    def _write_separately(self) -> None:
        with self._timeline.stalled_on(self._pipeline.waits_for):
            self._write_all()

    def _write_all(self) -> None:
        for block in self._trained:
            gradient = self._deferred.pop(block.index, None)
            if gradient is not None:
                self._start(gradient, self._resident.get(block))
        self._pipeline.wait_unfinished(at_most=0)

    def _check_presence(self, gradient: BlockGradient) -> None:
        """Updates are counted for all parameters together, so each needs a gradient in every step or in none."""
        before = self._presence.setdefault(gradient.block.index, gradient.present)
        for parameter, now, then in zip(gradient.block.parameters, gradient.present, before, strict=True):
            if now != then:
                raise BadInput(
                    f"{parameter.name} gets a gradient in some steps and none in others; "
                    "the number of its updates would then differ from that of plain PyTorch"
                )

    def _hold(self, gradient: BlockGradient) -> None:
        self._held.append(gradient)
        limit = self._settings.held_in_memory_bytes
        fits = limit is None or self._held_bytes + gradient.num_bytes <= limit
        if fits and not self._spilled_bytes:
            self._held_bytes += gradient.num_bytes
            return
        assert self._scratch is not None, "a limit on held gradients needs a scratch file"
        with self._timeline.stalled_on("nvme write"):
            gradient.spill(self._scratch, self._spilled_bytes)
        self._spilled_bytes += gradient.num_bytes
