"""What becomes of a step's gradients: updated on arrival, or held until the step is decided.

`engine.step` hands over one block's gradient after another, in backward order. Without clipping each
one is consumed at once (active gradient offloading, Ratel §IV-C): the update of block i runs before
the backward of block i-1 begins, and the compute weights that backward used need not be read again.
With clipping the coefficient is known only after the last gradient; so all are held, in host memory
up to a limit and then in the scratch file, and consumed in forward order when `decide` is called.

Invariant: whatever is written goes to the shadow slot, so that a step which turns out not finite is
taken back by forgetting it. Where nothing can be taken back (one slot), gradients are held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ratel_cli.engine.adamw import AdamWUpdate, OutOfCoreAdamW
from ratel_cli.engine.gradients import BlockGradient, GradientSum, clip_coefficient, total_norm
from ratel_cli.engine.telemetry import StepClock
from ratel_cli.engine.weights import BlockWeights
from ratel_cli.errors import BadInput
from ratel_cli.movement.buffers import BufferPool
from ratel_cli.movement.scratch import Scratch
from ratel_cli.movement.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What stays the same for all steps of a run."""

    gradient_dtype: torch.dtype
    max_grad_norm: float | None
    hold: bool
    """Hold every gradient until the step is decided. Implied by `max_grad_norm`."""
    held_in_memory_bytes: int | None
    """The first held gradient beyond this goes to the scratch file, and so do all after it; None keeps all."""

    @property
    def holds(self) -> bool:
        return self.hold or self.max_grad_norm is not None


class StepUpdate:
    """The gradients of one step. Close it whatever happens; undecided, it leaves the store as it was."""

    def __init__(
        self,
        settings: UpdateSettings,
        store: Store,
        pool: BufferPool,
        optimizer: OutOfCoreAdamW,
        scratch: Scratch | None,
        *,
        clock: StepClock,
        number: int,
        learning_rate: float,
        loss_scale: float,
        check_stop: Callable[[], None],
        presence: dict[int, tuple[bool, ...]],
    ) -> None:
        """`presence` is shared by all steps: which parameters of each block had a gradient in the first."""
        self._settings = settings
        self._store = store
        self._pool = pool
        self._optimizer = optimizer
        self._scratch = scratch
        self._clock = clock
        self._number = number
        self._learning_rate = learning_rate
        self._inverse_scale = 1.0 / loss_scale
        self._check_stop = check_stop
        self._presence = presence
        self._norms: dict[str, float] = {}
        self._held: list[BlockGradient] = []
        self._held_bytes = 0
        self._spilled_bytes = 0
        self._writing = False

    def hand_over(self, total: GradientSum, weights: BlockWeights) -> None:
        """Take over a block's summed gradient and its weights, which are closed."""
        weights.unbind()
        assert self._settings.holds or not self._store.in_place, "what is written in place cannot be taken back"
        with self._clock.during("compute"):
            gradient = total.finish()
            self._norms |= gradient.norms(self._inverse_scale)
        self._check_presence(gradient)
        if self._settings.holds:
            weights.close()
            self._hold(gradient)
            return
        try:
            self._begin()
            self._optimizer.update(gradient, weights.lease, self._adamw(clip=1.0))
        finally:
            gradient.release()
            weights.close()

    def decide(self, order: Sequence[str]) -> torch.Tensor:
        """The global norm, stacked in `order`. If it is finite, every held gradient has been consumed."""
        norm = total_norm(self._norms, order)
        if not torch.isfinite(norm):
            return norm
        clip = 1.0 if self._settings.max_grad_norm is None else clip_coefficient(norm, self._settings.max_grad_norm)
        self._begin()
        for gradient in reversed(self._held):
            if not self._store.in_place:
                self._check_stop()
            with self._clock.during("nvme read"):
                gradient.fetch(self._pool)
            self._optimizer.update(gradient, None, self._adamw(clip=clip))
            gradient.release()
        self._writing = False
        return norm

    def close(self) -> None:
        """Give buffers back; discard what an undecided step has written."""
        for gradient in self._held:
            gradient.release()
        self._held.clear()
        if self._writing:
            self._writing = False
            self._store.discard()

    def _begin(self) -> None:
        if not self._writing:
            self._store.begin_step()
            self._writing = True

    def _check_presence(self, gradient: BlockGradient) -> None:
        """AdamW counts updates for all parameters together, so none may sit out some steps and not others."""
        before = self._presence.setdefault(gradient.block.index, gradient.present)
        for parameter, now, then in zip(gradient.block.parameters, gradient.present, before, strict=True):
            if now != then:
                gradient.release()
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
        with self._clock.during("nvme write"):
            gradient.spill(self._scratch, self._spilled_bytes)
        self._spilled_bytes += gradient.num_bytes

    def _adamw(self, *, clip: float) -> AdamWUpdate:
        return AdamWUpdate(
            number=self._number, learning_rate=self._learning_rate, gradient_scale=self._inverse_scale * clip
        )
