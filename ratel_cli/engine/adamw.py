"""AdamW out of core: states come from NVMe, are updated by the native kernel, and go back.

`engine.step` hands over one block's gradient at a time. The update walks through the block in groups
of parameters, so that the state buffers are as large as a group and not as the largest block. All
numbers that AdamW derives from the step are computed here in Python floats, exactly as
`torch.optim.AdamW` does; the kernel (`ratel_cli._native`) does the rest with the same bits.

Phases for each group, one after another for now (Ratel Fig. 3a; the order is all that overlap changes):

    1. read    compute weights (unless backward still holds them), master, m, v of the current generation
    2. update  every parameter that has a gradient; the others are carried over unchanged
    3. write   the same fields to the shadow slot of the next generation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch

from ratel_cli import _native
from ratel_cli.engine.gradients import BlockGradient
from ratel_cli.engine.telemetry import StepClock
from ratel_cli.model.spec import BLOCK_ALIGNMENT, BlockSpec
from ratel_cli.movement.buffers import BufferPool, Lease
from ratel_cli.movement.copies import FIELD_DTYPES, view_field
from ratel_cli.movement.records import ComputeDtype, Field
from ratel_cli.movement.store import Store
from ratel_cli.movement.tickets import join

GROUP_ELEMENTS = 1024 * BLOCK_ALIGNMENT
"""2 Mi parameters, 24 MiB of state: large enough for full NVMe speed, small against any block."""


_TELLING, _TELLING_ROOT = 1.000680923461914, 1.000340461730957
"""A value whose root the two ways round differently, and its root if rounded correctly."""

SquareRoot = Literal["correct", "mkl_avx512"]


class _Kernel(Protocol):
    def __call__(
        self,
        *arrays: torch.Tensor,
        decay_factor: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        step_size: float,
        bias_correction2_sqrt: float,
        epsilon: float,
        gradient_scale: float,
        square_root: SquareRoot,
    ) -> None: ...


_KERNELS: dict[ComputeDtype, _Kernel] = {
    "bfloat16": cast(_Kernel, _native.adamw_bfloat16),
    "float32": cast(_Kernel, _native.adamw_float32),
    "float16": cast(_Kernel, _native.adamw_float16),
}


def square_root_of_torch() -> SquareRoot:
    """How torch rounds square roots here: on some processors MKL's are 1 ulp low now and then (kernels/README.md)."""
    return "correct" if float(torch.tensor([_TELLING]).sqrt()) == _TELLING_ROOT else "mkl_avx512"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings:
    """What the user chose."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWUpdate:
    """One update: its number counts from 1 and leaves out steps that were not applied."""

    number: int
    learning_rate: float
    gradient_scale: float
    """What every gradient is multiplied with first: the inverse loss scale times the clip coefficient."""


class OutOfCoreAdamW:
    """Updates blocks of the store."""

    def __init__(self, settings: AdamWSettings, store: Store, pool: BufferPool, *, clock: StepClock) -> None:
        self._settings = settings
        self._store = store
        self._pool = pool
        self._clock = clock
        self._group_elements = GROUP_ELEMENTS
        self._square_root = square_root_of_torch()

    def update(self, gradient: BlockGradient, weights: Lease | None, update: AdamWUpdate) -> None:
        """Write the next generation of one block. `weights` holds its compute weights, or None to read them."""
        block = gradient.block
        for start in range(0, block.num_elements, self._group_elements):
            stop = min(start + self._group_elements, block.num_elements)
            self._update_group(gradient, weights, update, start, stop)

    def _update_group(
        self, gradient: BlockGradient, weights: Lease | None, update: AdamWUpdate, start: int, stop: int
    ) -> None:
        layout, index = self._store.layout, gradient.block.index
        compute = layout.compute_field
        to_read = layout.state_fields if weights is not None else layout.fields
        leases: list[Lease] = []
        memories: dict[str, memoryview] = {}
        if weights is not None:
            memories[compute.name] = weights.memory[
                start * compute.bytes_per_element : stop * compute.bytes_per_element
            ]
        try:
            for field in to_read:
                leases.append(self._lease(field, stop - start))
                memories[field.name] = leases[-1].memory
            with self._clock.during("nvme read"):
                join([self._store.read(index, f.name, start, stop, memories[f.name]) for f in to_read]).wait()
            with self._clock.during("optimizer"):
                self._update_segments(gradient, memories, update, start, stop)
            with self._clock.during("nvme write"):
                join([self._store.write(index, f.name, start, stop, memories[f.name]) for f in layout.fields]).wait()
        finally:
            memories.clear()
            for lease in leases:
                lease.release()

    def _lease(self, field: Field, num_elements: int) -> Lease:
        return self._pool.lease(num_elements * field.bytes_per_element, f"optimizer state {field.name}")

    def _update_segments(
        self, gradient: BlockGradient, memories: dict[str, memoryview], update: AdamWUpdate, start: int, stop: int
    ) -> None:
        fields = [view_field(memories[name], name, stop - start) for name in FIELD_DTYPES if name in memories]
        flat = gradient.flat
        for first, last, decay in _segments(gradient.block, gradient.present, start, stop):
            self._kernel(
                [field[first - start : last - start] for field in fields], flat[first:last], update, decay=decay
            )

    def _kernel(self, fields: list[torch.Tensor], gradient: torch.Tensor, update: AdamWUpdate, *, decay: bool) -> None:
        settings = self._settings
        bias_correction1 = 1 - settings.beta1**update.number
        bias_correction2 = 1 - settings.beta2**update.number
        _KERNELS[self._store.layout.dtype](
            *fields,
            gradient,
            decay_factor=1 - update.learning_rate * settings.weight_decay if decay else 1.0,
            one_minus_beta1=1 - settings.beta1,
            beta2=settings.beta2,
            one_minus_beta2=1 - settings.beta2,
            step_size=update.learning_rate / bias_correction1,
            bias_correction2_sqrt=bias_correction2**0.5,
            epsilon=settings.epsilon,
            gradient_scale=update.gradient_scale,
            square_root=self._square_root,
        )


def _segments(block: BlockSpec, present: tuple[bool, ...], start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Element ranges of the group [start, stop) to update, with whether weight decay applies."""
    segments = []
    for parameter, has_gradient in zip(block.parameters, present, strict=True):
        first, last = max(start, parameter.start), min(stop, parameter.stop)
        if has_gradient and first < last:
            segments.append((first, last, parameter.decay))
    return segments
