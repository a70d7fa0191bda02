"""Decides when each gradient of a step updates its block: on arrival, or after the step is decided.

The step hands over one block's gradient after another, in backward order, and then asks for the decision: is the
global norm finite, and must the gradients be clipped? There are three ways, which give the same bits:

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
may be during the next step's forward. Only then can the caller commit it. Where it stands is one value
(engine/optimizer/phases.py).

Invariant: all writes go to the shadow, so that a step which turns out not to be finite is abandoned by discarding the
shadow. In a store of one slot, where nothing can be discarded, every gradient is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.block_gradient import BlockGradient, Norms
from ratel_cli.engine.optimizer.gradients import NormParts, clip_coefficient, first_not_finite, one_part, total_norm
from ratel_cli.engine.optimizer.groups import BlockUpdate
from ratel_cli.engine.optimizer.phases import Arriving, BegunStep, Decided, Phase, Settled, StepDecision
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
        """None if nothing can be clipped: then what is updated on arrival stands."""
        if settings.max_grad_norm is not None:
            num_elements = sum(segment.trained_elements for segment in segments)
            costs = settings.speculation or COUNTED_ALIKE
            self._speculation = Speculation(settings.max_grad_norm, costs, num_elements=num_elements)
        self._phase: Phase = Settled()

    def follow(self, settings: UpdateSettings, placement: Placement, scratch: Scratch | None) -> None:
        """Follow another plan from the next step on. No step may be arriving.

        Updates that have started are written first. Deferred ones stay deferred: a gradient that waits in an earlier
        `scratch` is fetched from there.
        """
        assert not isinstance(self._phase, Arriving)
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
        return isinstance(self._phase, Decided)

    @property
    def is_written(self) -> bool:
        """True if `settle` would return at once."""
        return not isinstance(self._phase, Decided) or self._phase.is_written

    # For the weight reader: where a block's newest weights are.

    def is_in_shadow(self, block: BlockSpec) -> bool:
        """True if the block's newest weights are in the shadow: written, but not committed."""
        update = self._decided_update(block)
        return update is not None and update.is_written

    def is_updating(self, block: BlockSpec) -> bool:
        """True if the block is being updated, so that its newest weights can be read from neither generation."""
        update = self._decided_update(block)
        return update is not None and not update.is_written

    def start_deferred(self, weights: HostWeights) -> None:
        """Start the update of the weights' block if it was deferred until this use."""
        decided = self._phase
        if isinstance(decided, Decided) and weights.block.index in decided.held:
            self._start(decided, decided.held.pop(weights.block.index), weights.share())

    def is_updated(self, block: BlockSpec) -> bool:
        """True if `wait_updated` would return at once."""
        update = self._decided_update(block)
        return update is None or update.is_updated

    def wait_updated(self, block: BlockSpec) -> None:
        """Return when the block's update, if there is one, has changed the weights in memory."""
        self.waiting_for(block)()

    def waiting_for(self, block: BlockSpec) -> Callable[[], None]:
        """What returns, on any thread, when the block's update, if there is one now, has changed the weights in memory.
        It raises as the pipeline does."""
        update = self._decided_update(block)
        return (lambda: None) if update is None else partial(self._pipeline.wait_updated, update)

    def wait_written(self, block: BlockSpec) -> None:
        """Return when the block's update, if there is one, is in the shadow."""
        update = self._decided_update(block)
        if update is not None:
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

        Without a learning rate, all gradients are held, and `apply` or `abandon` follows the decision. Others as in
        `UpdateNumbers`.
        """
        assert isinstance(self._phase, Settled)
        numbers = UpdateNumbers(
            number=number, learning_rate=learning_rate, gradient_scale=gradient_scale, group_rates=group_rates
        )
        if self._speculation is not None:
            self._speculation.begin()
        updates_on_arrival = self._updates_on_arrival(learning_rate)
        if updates_on_arrival:
            self._store.begin_step()
        self._phase = Arriving(numbers=numbers, writes=updates_on_arrival)
        if not updates_on_arrival:
            self._pipeline.fill(self._trained)  # nothing is updated in this backward, so drives may be idle
        elif come_in_order:
            arriving = (block for segment in reversed(self._segments) for block in segment.trained)
            self._pipeline.expect([block for block in arriving if not self._is_deferred(block)])

    def hand_over(self, gradient: BlockGradient, weights: HostWeights | None) -> None:
        """Take over a block's summed gradient: start its update on `weights`, or hold it. None: those in the store.

        Raises BadInput if other parameters of the block have a gradient than in the first step.
        """
        arriving = self._arriving
        try:
            arriving.norms |= gradient.norms
            self._check_presence(gradient)
            self._watch_norm(arriving, gradient)
            starts = arriving.writes and not self._is_deferred(gradient.block)
            if self._speculation is not None or not starts:
                self._hold(arriving, gradient.share() if starts else gradient)
        except BaseException:
            gradient.release()
            raise
        if starts:
            self._start(arriving, gradient, None if weights is None else weights.share())

    def wait_pending(self) -> None:
        """Return when updates of no more segments are unfinished than the placement allows."""
        with self._timeline.stalled_on(self._pipeline.waits_for):
            self._pipeline.wait_unfinished(at_most=self._placement.pending_updates)

    def decide(self, order: Sequence[str]) -> StepDecision:
        """Decide the step, with the global norm stacked by parameter in `order`. If it is not finite, abandon it."""
        arriving, clip = self._arriving, 1.0
        parts = self._parts_of(arriving.norms)
        norm = total_norm(parts, order)
        if not torch.isfinite(norm):
            self.abandon()
            return StepDecision(float(norm), arriving.norms, first_not_finite=first_not_finite(parts, order))
        if self._speculation is not None:
            assert self._settings.max_grad_norm is not None
            clip = clip_coefficient(norm, self._settings.max_grad_norm)
            self._speculation.end(is_clipped=clip < 1.0)
        if clip < 1.0:
            self._discard(arriving)
        if not arriving.writes:
            self._store.begin_step()
        for block in arriving.started:
            if block in arriving.held:
                arriving.held.pop(block).release()
        numbers = replace(arriving.numbers, gradient_scale=arriving.numbers.gradient_scale * clip)
        self._phase = Decided(numbers=numbers, writes=True, held=arriving.held, started=arriving.started)
        self._write_if_separate(self._phase)
        return StepDecision(float(norm), arriving.norms, is_clipped=clip < 1.0)

    def apply(self, learning_rate: float) -> None:
        """Let the decided step, which began without a learning rate, be updated with this one."""
        decided = self._phase
        assert isinstance(decided, Decided) and decided.waits_for_rate
        decided.numbers = replace(decided.numbers, learning_rate=learning_rate)
        self._write_if_separate(decided)

    @property
    def gradient_scale(self) -> float:
        """What the gradients of the arriving step are multiplied with."""
        return self._arriving.numbers.gradient_scale

    def settle(self) -> None:
        """Return when all updates of the decided step are in the shadow. The caller then commits it. Idempotent."""
        if isinstance(self._phase, Decided):
            self._write_all(self._phase)
            self._phase = Settled()

    def abandon(self) -> None:
        """Abandon the step that arrives, or waits for its learning rate: the current generation stays. Any other
        decided step is not affected. Idempotent."""
        if not isinstance(self._phase, Decided) or self._phase.waits_for_rate:
            self._forget()

    def close(self) -> None:
        """Give all memory back; a step that is not settled is lost. Idempotent."""
        phase = self._phase
        if self._store.overwrites and isinstance(phase, Decided) and phase.started:
            self._pipeline.cancel(frozenset(phase.started))  # what was written in place cannot be discarded
            phase.writes = False
        self._forget()

    @property
    def _arriving(self) -> Arriving:
        assert isinstance(self._phase, Arriving), "no step has begun, or all its gradients have come"
        return self._phase

    def _decided_update(self, block: BlockSpec) -> BlockUpdate | None:
        """The block's update by the decided step, if it has started."""
        return self._phase.started.get(block.index) if isinstance(self._phase, Decided) else None

    def _updates_on_arrival(self, learning_rate: float | None) -> bool:
        """Whether blocks of the next step are updated as their gradients come: eager, or speculative if some steps may
        be clipped."""
        settings = self._settings
        if learning_rate is None or settings.holds_all or settings.overlap == "separate" or self._store.overwrites:
            return False
        is_possible = settings.speculation is not None and settings.held_in_memory_bytes is None
        return self._speculation is None or (is_possible and self._speculation.is_worthwhile)

    def _is_deferred(self, block: BlockSpec) -> bool:
        return self._speculation is None and block.segment in self._placement.deferred

    def _watch_norm(self, arriving: Arriving, gradient: BlockGradient) -> None:
        """Follow the norm of the gradients that have arrived, and stop speculating when clipping is certain.

        When that is depends on when downloads end. The bits of the step do not; how much is written for nothing does.
        """
        if self._speculation is None:
            return
        self._speculation.watch(gradient)
        if arriving.writes and self._speculation.is_clipping_certain:
            self._discard(arriving)
            self._pipeline.fill(self._trained)

    def _blocks_of(self, segments: frozenset[int]) -> frozenset[int]:
        """Indices of the blocks of these segments."""
        return frozenset(block.index for block in self._blocks if block.segment in segments)

    def _discard(self, step: BegunStep) -> None:
        """Discard all that was written of a step. Its held gradients stay."""
        if not step.writes:
            return
        updated = frozenset(step.started)
        self._pipeline.cancel(updated)
        self._resident.forget(updated)
        step.started.clear()
        step.writes = False
        self._store.discard()

    def _forget(self) -> None:
        """Forget the step that has begun, if there is one."""
        phase = self._phase
        if isinstance(phase, BegunStep):
            self._discard(phase)
            for gradient in phase.held.values():
                gradient.release()
        self._resident.forget()  # the step may be run again: trust nothing in memory
        self._phase = Settled()

    def _start(self, step: BegunStep, gradient: BlockGradient, weights: HostWeights | None) -> None:
        assert step.numbers.learning_rate is not None, "the step was not applied"
        update = BlockUpdate(gradient=gradient, weights=weights, numbers=step.numbers)
        step.started[gradient.block.index] = update
        self._pipeline.submit(update)

    def _write_if_separate(self, decided: Decided) -> None:
        if self._settings.overlap == "separate" and not decided.waits_for_rate:
            self._write_all(decided)

    def _write_all(self, decided: Decided) -> None:
        with self._timeline.stalled_on(self._pipeline.waits_for):
            for block in self._trained:
                if block.index in decided.held:
                    self._start(decided, decided.held.pop(block.index), self._resident.get(block))
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

    def _hold(self, arriving: Arriving, gradient: BlockGradient) -> None:
        arriving.held[gradient.block.index] = gradient
        limit = self._settings.held_in_memory_bytes
        fits = limit is None or arriving.held_bytes + gradient.num_bytes <= limit
        if fits and not arriving.spilled_bytes:
            arriving.held_bytes += gradient.num_bytes
            return
        assert self._scratch is not None, "a limit on held gradients needs a scratch file"
        with self._timeline.stalled_on("nvme write"):
            gradient.spill(self._scratch, arriving.spilled_bytes)
        arriving.spilled_bytes += gradient.num_bytes
