"""AdamW on one group of parameters in host memory: the scalars of a step, and the native kernel with torch's bits.

The scalars that AdamW derives from the step are computed here in Python floats, exactly as `torch.optim.AdamW` does;
the kernel (`ratel_cli._native`) does the rest. It releases the GIL and has no threads of its own: if the plan wants
several, each takes a part of the group.

The same pass over the bytes takes checksums (`GroupChecksums`), since the bytes are in the caches then: of what was
read, just before it is updated, and of what will be written. The kernel makes the seeds and compares, too: chunk by
chunk in Python, a group of 16 Mi parameters cost a millisecond of the GIL. For the same reason the kernel gets arrays
as their bytes: views of torch took a tenth of a millisecond.

Invariants: the bits do not depend on the number of threads; a parameter without a gradient, and the gaps between
parameters, keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal

import torch

from ratel_cli import _native
from ratel_cli.closing import Closing
from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.sizes import PARAMETER_ALIGNMENT, WeightDtype
from ratel_cli.store.generation import Generation
from ratel_cli.store.shadow import Shadow
from ratel_cli.units import align_up

SquareRoot = Literal["correct", "mkl_avx512", "mkl_sse"]
_WITHOUT_CHECKSUMS = 1 << 20
"""Chunk size for the kernel when no checksums are taken: any would do."""


# Each takes the fields of `ADAMW.record` for that compute dtype, in their order.
_KERNELS: dict[WeightDtype, _native._Update[_native.AdamWScalars]] = {
    "bfloat16": _native.update_adamw_bfloat16,
    "float32": _native.update_adamw_float32,
    "float16": _native.update_adamw_float16,
}


def square_root_of_torch() -> SquareRoot:
    """How torch rounds square roots on this processor: MKL's are sometimes 1 ulp off (kernels/README.md)."""
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
    """AdamW's settings for a whole run."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWUpdate:
    """What AdamW needs to know of one update."""

    number: int
    """Counts applied updates, from 1."""
    learning_rate: float
    """The run's."""
    gradient_scale: float
    """Every gradient is multiplied by this first: the inverse loss scale times the clip coefficient."""
    group_rates: tuple[float, ...] = ()
    """Learning rates of the groups that have their own, from group 1 on."""

    def rate_of(self, block: BlockSpec) -> float:
        """The block's learning rate."""
        return self.group_rates[block.rate - 1] if block.rate else self.learning_rate


class GroupChecksums:
    """Checksums of one group's chunks: of the bytes read from one generation and of those to be written to the shadow.

    Its methods may be called from several threads.
    """

    def __init__(
        self, block: int, current: Generation, shadow: Shadow, *, read: frozenset[str], chunk_elements: int
    ) -> None:
        """`read`: the fields that were read and are still unchecked. `chunk_elements`: elements of one chunk."""
        self._block = block
        self._current = current
        self._shadow = shadow
        self._read = read
        self.chunk_elements = chunk_elements

    @property
    def before(self) -> _native.ChunkChecksums | None:
        """The checksums of the block's chunks as they were read. None: all are checked already."""
        return self._current.to_compare(self._block, self._read) if self._read else None

    @property
    def after(self) -> _native.ChunkChecksums:
        """Where the checksums of the block's chunks after their update go."""
        return self._shadow.to_enter(self._block)

    def check(self, start: int, stop: int, mismatches: list[tuple[int, int]]) -> None:
        """Raise IntegrityFailure if a kernel has found that bytes of `[start, stop)` are not those written before."""
        for field_index, chunk in mismatches:
            raise self._current.mismatch(self._block, start, stop, field_index=field_index, chunk=chunk)


class GroupAdamW(Closing):
    """Updates groups of parameters in host memory, on `num_threads` threads. Use as a context manager."""

    def __init__(self, settings: AdamWSettings, *, num_threads: int = 1) -> None:
        assert num_threads > 0
        self._settings = settings
        self._kernels = _KERNELS
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ratel-adamw") if num_threads > 1 else None
        self._square_root = square_root_of_torch()
        self._last: tuple[AdamWUpdate, _native.AdamWScalars] | None = None

    def update(
        self,
        memories: Mapping[str, memoryview],
        gradient: BlockGradient,
        update: AdamWUpdate,
        *,
        values: memoryview,
        start: int,
        stop: int,
        checksums: GroupChecksums | None = None,
    ) -> None:
        """Update elements `[start, stop)` of the gradient's block in place.

        `memories` holds every field of the record for these elements, `values` their gradients.
        `checksums` takes the checksums of their chunks; None takes none. Raises IntegrityFailure if the bytes that were
        read are not those that were written.
        """
        block, scalars = gradient.block, self._scalars(update, update.rate_of(gradient.block))
        kernel, fields = self._kernels[block.dtype], [memories[field.name] for field in block.record.fields]
        chunk_elements, before, after = _WITHOUT_CHECKSUMS, None, None
        if checksums is not None:
            chunk_elements, before, after = checksums.chunk_elements, checksums.before, checksums.after

        def update_part(part: tuple[int, int]) -> None:
            first, last = part
            assert checksums is None or (
                first % chunk_elements == 0 and (last % chunk_elements == 0 or last == block.num_elements)
            ), "a part has whole chunks"
            mismatches = kernel(
                *[_elements(field, stop - start, first - start, last - start) for field in fields],
                _elements(values, stop - start, first - start, last - start),
                scalars=scalars,
                segments=_segments(block, gradient.present, first, last),
                chunk_elements=chunk_elements,
                first_chunk=first // chunk_elements,
                before=before,
                after=after,
                gradient_dtype=gradient.dtype_name,
            )
            if mismatches and checksums is not None:
                checksums.check(first, last, mismatches)

        if self._threads is None:
            update_part((start, stop))
            return
        alignment = PARAMETER_ALIGNMENT if checksums is None else checksums.chunk_elements
        parts = [self._threads.submit(update_part, part) for part in _parts(start, stop, self._num_threads, alignment)]
        wait(parts)  # all of them: the memory is given back when one fails
        for part in parts:
            part.result()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()

    def _scalars(self, update: AdamWUpdate, learning_rate: float) -> _native.AdamWScalars:
        """The scalars of an update. All groups of a block have the same one."""
        if self._last is not None and self._last[0] is update:
            return self._last[1]
        settings = self._settings
        bias_correction1 = 1 - settings.beta1**update.number
        bias_correction2 = 1 - settings.beta2**update.number
        scalars = _native.AdamWScalars(
            decay_factor=1 - learning_rate * settings.weight_decay,
            beta1=settings.beta1,
            one_minus_beta1=1 - settings.beta1,
            beta2=settings.beta2,
            one_minus_beta2=1 - settings.beta2,
            step_size=learning_rate / bias_correction1,
            bias_correction2_sqrt=bias_correction2**0.5,
            epsilon=settings.epsilon,
            gradient_scale=update.gradient_scale,
            square_root=self._square_root,
        )
        self._last = update, scalars
        return scalars


def _parts(start: int, stop: int, number: int, alignment: int) -> list[tuple[int, int]]:
    """Cut `[start, stop)` into `number` parts of nearly equal size, a multiple of `alignment`; fewer if it is short."""
    size = align_up(max(1, -(-(stop - start) // number)), alignment)
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def _elements(memory: memoryview, number: int, first: int, last: int) -> memoryview:
    """The bytes of elements `[first, last)` of an array with `number` elements."""
    size = len(memory) // number
    return memory[first * size : last * size]


def _segments(block: BlockSpec, present: tuple[bool, ...], start: int, stop: int) -> list[tuple[int, int, bool]]:
    """The ranges of `[start, stop)` that have a gradient, counted from `start`, and whether weight decay applies."""
    segments = []
    for parameter, has_gradient in zip(block.parameters, present, strict=True):
        first, last = max(start, parameter.start), min(stop, parameter.stop)
        if has_gradient and first < last:
            segments.append((first - start, last - start, parameter.decay))
    return segments
