"""AdamW on one group of parameters: the numbers of a step, and the native kernel with torch's bits.

`engine.optimizer.pipeline` brings the fields of a group to host memory and calls `GroupAdamW.update` on its thread. All
numbers that AdamW derives from the step are computed here in Python floats, exactly as `torch.optim.AdamW`
does; the kernel (`ratel_cli._native`) does the rest. It releases the GIL and has no threads of its own: where
the plan wants several, each takes a part of the group.

Checksums are taken in the same pass (`Chunks`), since the bytes are in the caches then: of what was read, just
before it is updated, and of what is to be written.

Invariants: the bits do not depend on the number of threads; a parameter without a gradient, and the gaps
between parameters, keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self, TypedDict, Unpack, cast

import torch

from ratel_cli import _native
from ratel_cli.engine.optimizer.gradients import BlockGradient
from ratel_cli.io.views import FIELD_DTYPES, view_field
from ratel_cli.model.spec import BlockSpec
from ratel_cli.sizes import PARAMETER_ALIGNMENT, DtypeName
from ratel_cli.units import align_up

SquareRoot = Literal["correct", "mkl_avx512", "mkl_sse"]
_WITHOUT_CHUNKS = 1 << 20
"""Elements at once, where nothing depends on it."""
_Numbers = list[int | None]


class _Scalars(TypedDict):
    decay_factor: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    bias_correction2_sqrt: float
    epsilon: float
    gradient_scale: float
    square_root: SquareRoot


class _Kernel(Protocol):
    def __call__(
        self,
        *arrays: torch.Tensor,
        segments: list[tuple[int, int, bool]],
        chunk_elements: int,
        seeds_before: _Numbers,
        seeds_after: _Numbers,
        **scalars: Unpack[_Scalars],
    ) -> tuple[_Numbers, _Numbers]: ...


class Chunks(Protocol):
    """Checksums of a group's chunks. Called on the updating threads.

    Numbers go chunk by chunk, and within one field by field, in the order of the record, which is the kernel's too.
    """

    num_elements: int
    """Of a chunk; they begin at multiples of it."""

    def seeds(self, start: int, stop: int) -> tuple[_Numbers, _Numbers]:
        """For the checksums of elements [start, stop) before and after their update; None, or no list: not wanted."""
        ...

    def take(self, start: int, stop: int, before: _Numbers, after: _Numbers) -> None:
        """These are they. Raises IntegrityFailure if the group was made of other bytes than it should be."""
        ...


_KERNELS: dict[DtypeName, _Kernel] = {
    "bfloat16": cast(_Kernel, _native.update_bfloat16),
    "float32": cast(_Kernel, _native.update_float32),
    "float16": cast(_Kernel, _native.update_float16),
}


def square_root_of_torch() -> SquareRoot:
    """How torch rounds square roots here: on many processors MKL's are 1 ulp off now and then (kernels/README.md)."""
    values = torch.arange(0x3F800000, 0x40800000, 4099, dtype=torch.int32).view(torch.float32)  # [1, 4)
    kinds: tuple[SquareRoot, ...] = (_native.native_square_root(), "correct", "mkl_avx512")
    for kind in kinds:
        roots = values.clone()
        _native.square_root(roots, square_root=kind)
        if torch.equal(roots, values.sqrt()):
            return kind
    return "correct"


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


class GroupAdamW:
    """Updates groups of parameters in host memory, on `num_threads` threads. Use as a context manager."""

    def __init__(self, settings: AdamWSettings, dtype: DtypeName, *, num_threads: int = 1) -> None:
        assert num_threads > 0
        self._settings = settings
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ratel-adamw") if num_threads > 1 else None
        self._kernel = _KERNELS[dtype]
        self._square_root = square_root_of_torch()

    def update(
        self,
        memories: Mapping[str, memoryview],
        gradient: BlockGradient,
        update: AdamWUpdate,
        *,
        start: int,
        stop: int,
        chunks: Chunks | None = None,
    ) -> None:
        """Update elements [start, stop) of the gradient's block in place. `memories` has every field of the record."""
        fields = [view_field(memories[name], name, stop - start) for name in FIELD_DTYPES if name in memories]
        flat = gradient.flat

        def update_part(part: tuple[int, int]) -> None:
            first, last = part
            before, after = ([], []) if chunks is None else chunks.seeds(first, last)
            found = self._kernel(
                *(field[first - start : last - start] for field in fields),
                flat[first:last],
                segments=_segments(gradient.block, gradient.present, first, last),
                chunk_elements=_WITHOUT_CHUNKS if chunks is None else chunks.num_elements,
                seeds_before=before,
                seeds_after=after,
                **self._scalars(update),
            )
            if chunks is not None:
                chunks.take(first, last, *found)

        if self._threads is None:
            update_part((start, stop))
            return
        alignment = PARAMETER_ALIGNMENT if chunks is None else chunks.num_elements
        parts = [self._threads.submit(update_part, part) for part in _parts(start, stop, self._num_threads, alignment)]
        wait(parts)  # all of them: the memory is given back when one fails
        for part in parts:
            part.result()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scalars(self, update: AdamWUpdate) -> _Scalars:
        settings = self._settings
        bias_correction1 = 1 - settings.beta1**update.number
        bias_correction2 = 1 - settings.beta2**update.number
        return {
            "decay_factor": 1 - update.learning_rate * settings.weight_decay,
            "one_minus_beta1": 1 - settings.beta1,
            "beta2": settings.beta2,
            "one_minus_beta2": 1 - settings.beta2,
            "step_size": update.learning_rate / bias_correction1,
            "bias_correction2_sqrt": bias_correction2**0.5,
            "epsilon": settings.epsilon,
            "gradient_scale": update.gradient_scale,
            "square_root": self._square_root,
        }


def _parts(start: int, stop: int, number: int, alignment: int) -> list[tuple[int, int]]:
    """[start, stop) in so many parts of nearly equal size, a multiple of `alignment`; fewer if it is short."""
    size = align_up(max(1, -(-(stop - start) // number)), alignment)
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def _segments(block: BlockSpec, present: tuple[bool, ...], start: int, stop: int) -> list[tuple[int, int, bool]]:
    """What of [start, stop) is to be updated, counted from its start, with whether weight decay applies."""
    segments = []
    for parameter, has_gradient in zip(block.parameters, present, strict=True):
        first, last = max(start, parameter.start), min(stop, parameter.stop)
        if has_gradient and first < last:
            segments.append((first - start, last - start, parameter.decay))
    return segments
