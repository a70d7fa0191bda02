"""What becomes of a step's gradients: updated on arrival, or held until the step is decided.

`engine.step` hands over one block's gradient after another, in backward order, and then asks for the
decision: is the norm finite, must it be clipped. Three ways, with the same bits:

    eager        without clipping: every gradient is updated as it arrives, beneath the backward of the
                 blocks below it (active gradient offloading, Ratel section IV-C)
    deferred     with clipping: all are held; when the norm is known, each block's update waits until the
                 next step's forward comes near the block, and runs beneath that forward
    speculative  with clipping that has been rare: as eager, with the gradients held besides. If the norm
                 must be clipped after all, the shadow is discarded and everything is done again, deferred

So a step ends in two parts: decided by `decide`, and settled when the last byte of its update has been
written: beneath the next step's forward, or in `settle`. Only then can the caller commit it.

Invariant: whatever is written goes to the shadow slot, so that a step which turns out not finite is
taken back by forgetting it. Where nothing can be taken back (one slot), every gradient is held.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ratel_cli.engine.optimizer.adamw import AdamWUpdate
from ratel_cli.engine.optimizer.gradients import BlockGradient, GradientSum, Norms, clip_coefficient, total_norm
from ratel_cli.engine.optimizer.groups import BlockUpdate
from ratel_cli.engine.optimizer.pipeline import UpdatePipeline
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.engine.weights import BlockWeights, HostWeights, ResidentWeights
from ratel_cli.errors import BadInput
from ratel_cli.io.scratch import Scratch
from ratel_cli.model.spec import BlockSpec
from ratel_cli.planning.placement import Overlap, Placement
from ratel_cli.store.store import Store

_RARE = 8
"""Clipping counts as rare when none of so many steps before was clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What stays the same for all steps of a run."""

    gradient_dtype: torch.dtype
    max_grad_norm: float | None
    hold: bool
    """Hold every gradient until the step is decided, whether it may be clipped or not."""
    held_in_memory_bytes: int | None
    """The first held gradient beyond this goes to the scratch file, and so do all after it; None keeps all."""
    overlap: Overlap = "optimized"
    """`separate`: gradients are held until backward is over, and then updated before the next step begins."""


class Updates:
    """The updates of one step after another. All methods are for the compute thread."""

    def __init__(
        self,
        settings: UpdateSettings,
        placement: Placement,
        blocks: Sequence[BlockSpec],
        store: Store,
        pipeline: UpdatePipeline,
        resident: ResidentWeights,
        scratch: Scratch | None,
        *,
        timeline: Timeline,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._blocks = blocks
        self._store = store
        self._pipeline = pipeline
        self._resident = resident
        self._scratch = scratch
        self._timeline = timeline
        self._presence: dict[int, tuple[bool, ...]] = {}
        """Which parameters of each block had a gradient in the first step."""
        self._was_clipped: deque[bool] = deque(maxlen=_RARE)
        self._started: dict[int, BlockUpdate] = {}
        """Of the step that is arriving or not yet settled."""
        self._waiting: dict[int, BlockGradient] = {}
        """Decided, and to be updated when their weights are used again."""
        self._held: list[BlockGradient] = []
        """Of the step that is arriving; of a speculation, until it is settled."""
        self._is_writing = False
        """The store's step has begun."""
        self._is_decided = False

    @property
    def is_unsettled(self) -> bool:
        """Whether a step was decided whose update has not been waited for."""
        return self._is_decided

    @property
    def is_written(self) -> bool:
        """Whether `settle` would return at once."""
        return not self._waiting and all(update.is_written for update in self._started.values())

    # For engine.weights: the newest weights are here or there.

    def is_in_shadow(self, block: BlockSpec) -> bool:
        update = self._started.get(block.index)
        return self._is_decided and update is not None and update.is_written

    def is_under_way(self, block: BlockSpec) -> bool:
        update = self._started.get(block.index)
        return self._is_decided and update is not None and not update.is_written

    def start_waiting(self, weights: HostWeights) -> None:
        gradient = self._waiting.pop(weights.block.index, None)
        if gradient is not None:
            self._start(gradient, weights.share())

    def is_updated(self, block: BlockSpec) -> bool:
        update = self._started.get(block.index)
        return not self._is_decided or update is None or update.is_updated

    def wait_updated(self, block: BlockSpec) -> None:
        update = self._started.get(block.index)
        if self._is_decided and update is not None:
            self._pipeline.wait_updated(update)

    def wait_written(self, block: BlockSpec) -> None:
        update = self._started.get(block.index)
        if self._is_decided and update is not None:
            self._pipeline.wait_written(update)

    # For engine.step, in this order.

    def begin(self, adamw: AdamWUpdate) -> None:
        """Gradients of a step will come, to be updated so. The step before must have been settled and committed."""
        assert not self._is_decided
        self._adamw = adamw
        self._norms: Norms = {}
        self._held_bytes = self._spilled_bytes = 0
        self._mode = self._choose_mode()
        if self._mode != "deferred":
            self._begin_writing()
            self._pipeline.expect([block for block in reversed(self._blocks) if not self._is_deferred(block)])

    def hand_over(self, total: GradientSum, weights: BlockWeights) -> None:
        """Take over a block's summed gradient and its weights, which are closed."""
        block = weights.block
        weights.unbind()
        gradient = total.finish(self._adamw.gradient_scale)
        try:
            self._norms |= gradient.norms
            self._check_presence(gradient)
            if self._mode == "deferred" or self._is_deferred(block):
                weights.close()
                self._hold(gradient)
                return
        except BaseException:
            gradient.release()
            raise
        if self._mode == "speculative":
            self._held.append(gradient)
        self._start(gradient, weights.host.share())
        weights.close()
        with self._timeline.waiting(self._pipeline.waits_for):
            self._pipeline.wait_unfinished(at_most=self._placement.pending_updates)

    def decide(self, order: Sequence[str]) -> torch.Tensor:
        """The global norm, stacked in `order`. Not finite: the step is abandoned."""
        norm = total_norm(self._norms, order)
        if not torch.isfinite(norm):
            self.abandon()
            return norm
        clip = 1.0
        if self._settings.max_grad_norm is not None:
            clip = clip_coefficient(norm, self._settings.max_grad_norm)
            self._was_clipped.append(clip < 1.0)
        if self._mode == "speculative":
            if clip == 1.0:
                self._is_decided = True
                return norm
            self._take_back()
        self._begin_writing()
        self._clip = clip
        self._waiting = {gradient.block.index: gradient for gradient in self._held}
        self._held = []
        self._is_decided = True
        if self._settings.overlap == "separate":
            with self._timeline.waiting(self._pipeline.waits_for):
                self._write_all()
        return norm

    def first_not_finite(self, order: Sequence[str]) -> str | None:
        """The first parameter in `order` whose gradient, of the step that came last, is not finite."""
        return next((name for name in order if not math.isfinite(self._norms.get(name, 0.0))), None)

    def settle(self) -> None:
        """Return when everything that was decided is in the shadow; the caller commits it."""
        with self._timeline.waiting(self._pipeline.waits_for):
            self._write_all()
        for gradient in self._held:  # of a speculation that was right
            gradient.release()
        self._held = []
        self._started.clear()
        self._is_decided = self._is_writing = False

    def abandon(self) -> None:
        """The arriving step will not be decided, or not applied: the current generation stays. Idempotent."""
        if self._is_decided:
            return  # what was decided before stays decided
        self._take_back()
        self._resident.forget()  # if it is run again, nothing in memory is taken on trust
        for gradient in self._held:
            gradient.release()
        self._held = []

    def close(self) -> None:
        """Give memory back; what is not settled is lost. Idempotent."""
        self._held.extend(self._waiting.values())
        self._waiting = {}
        if self._store.in_place and self._started:
            self._pipeline.cancel()  # what was written in place cannot be taken back
            self._is_writing = False
        self._is_decided = False
        self.abandon()

    def _choose_mode(self) -> Literal["eager", "deferred", "speculative"]:
        settings = self._settings
        if settings.hold or settings.overlap == "separate" or self._store.in_place:
            return "deferred"
        if settings.max_grad_norm is None:
            return "eager"
        in_memory = settings.held_in_memory_bytes is None
        is_rare = len(self._was_clipped) == _RARE and not any(self._was_clipped)
        return "speculative" if in_memory and is_rare else "deferred"

    def _is_deferred(self, block: BlockSpec) -> bool:
        return self._mode == "eager" and block.index in self._placement.deferred

    def _begin_writing(self) -> None:
        if not self._is_writing:
            self._store.begin_step()
            self._is_writing = True
            self._clip = 1.0

    def _take_back(self) -> None:
        """Forget what the arriving step has updated so far; the gradients that are held stay."""
        if not self._is_writing:
            return
        self._pipeline.cancel()
        self._resident.forget()
        self._started.clear()
        self._is_writing = False
        self._store.discard()

    def _start(self, gradient: BlockGradient, weights: HostWeights | None) -> None:
        update = BlockUpdate(
            gradient=gradient,
            weights=weights,
            adamw=replace(self._adamw, gradient_scale=self._adamw.gradient_scale * self._clip),
            keeps_gradient=self._mode == "speculative" and not self._is_decided,
        )
        self._started[gradient.block.index] = update
        self._pipeline.submit(update)

    def _write_all(self) -> None:
        for block in self._blocks:
            gradient = self._waiting.pop(block.index, None)
            if gradient is not None:
                self._start(gradient, self._resident.get(block))
        self._pipeline.wait_unfinished(at_most=0)

    def _check_presence(self, gradient: BlockGradient) -> None:
        """AdamW counts updates for all parameters together, so none may sit out some steps and not others."""
        before = self._presence.setdefault(gradient.block.index, gradient.present)
        for parameter, now, then in zip(gradient.block.parameters, gradient.present, before, strict=True):
            if now != then:
                raise BadInput(
                    f"{parameter.name} gets a gradient in some steps and none in others; "
                    "its bias correction would differ from that of plain PyTorch"
                )

    def _hold(self, gradient: BlockGradient) -> None:
        self._held.append(gradient)
        limit = self._settings.held_in_memory_bytes
        fits = limit is None or self._held_bytes + gradient.num_bytes <= limit
        if fits and not self._spilled_bytes:
            self._held_bytes += gradient.num_bytes
            return
        assert self._scratch is not None, "a limit on held gradients needs a scratch file"
        with self._timeline.waiting("nvme write"):
            gradient.spill(self._scratch, self._spilled_bytes)
        self._spilled_bytes += gradient.num_bytes
