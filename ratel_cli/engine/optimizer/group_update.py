"""The update of one group of parameters in host memory, by the native kernel of its rule, or in torch.

The kernel (`ratel_cli._native`) releases the GIL and has no threads of its own: if the plan wants several, each takes a
part of the group. What it computes with is in `ratel_cli/engine/optimizer/settings.py`.

The same pass over the bytes takes checksums (`GroupChecksums`), since the bytes are in the caches then: of what was
read, just before it is updated, and of what will be written. The kernel makes the seeds and compares, too: chunk by
chunk in Python, a group of 16 Mi parameters cost a millisecond of the GIL. For the same reason the kernel gets arrays
as their bytes: views of torch took a tenth of a millisecond. An update in torch takes no checksums.

Invariants: the bits do not depend on the number of threads; a parameter without a gradient, and the gaps between
parameters, keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from xxhash import xxh3_64_intdigest

from ratel_cli import _native
from ratel_cli.closing import Closing
from ratel_cli.engine.device.device import Device, HostDevice
from ratel_cli.engine.optimizer.block_gradient import BlockGradient
from ratel_cli.engine.optimizer.settings import (
    OptimizerSettings,
    UpdateNumbers,
    kernel_of,
    square_root_of_torch,
)
from ratel_cli.engine.optimizer.torch_update import GroupPart, make_direction, update_in_torch
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.updates import InTorch
from ratel_cli.store.generation import Generation
from ratel_cli.store.shadow import Shadow
from ratel_cli.units import align_up

_WITHOUT_CHECKSUMS = 1 << 20
"""Chunk size for the kernel when no checksums are taken: any would do."""


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


class GroupUpdater(Closing):
    """Updates groups of parameters in host memory, on `num_threads` threads. Use as a context manager."""

    def __init__(
        self, settings: OptimizerSettings, *, seed: int, num_threads: int = 1, device: Device | None = None
    ) -> None:
        """`seed`: the run's, which decides how updates are rounded stochastically. `device`: where the
        model is; None: on the CPU."""
        assert num_threads > 0
        self._settings = settings
        self._seed = seed
        self._device = device or HostDevice(None)
        self._kernel_of = kernel_of
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ratel-update") if num_threads > 1 else None
        self._square_root = square_root_of_torch()

    def update(
        self,
        memories: Mapping[str, memoryview],
        gradient: BlockGradient,
        update: UpdateNumbers,
        *,
        values: memoryview,
        start: int,
        stop: int,
        checksums: GroupChecksums | None = None,
        buffer: memoryview | None = None,
    ) -> None:
        """Update elements `[start, stop)` of the gradient's block in place.

        `memories` holds every field of the record for these elements, `values` their gradients. `buffer`: memory for
        what torch computes (`BlockSpec.update_buffer_bytes`). `checksums` takes the checksums of their chunks; None
        takes none. Raises IntegrityFailure if the bytes that were read are not those that were written.
        """
        block, rule = gradient.block, gradient.block.rule.update
        known = (self._settings, memories, gradient, update)
        if isinstance(rule, InTorch):
            assert buffer is not None
            of_group = list(_parts_of_group(block, gradient.present, start, stop))
            roundings = self._roundings(of_group, update.number)
            update_in_torch(rule, *known, of_group, values=values, buffer=buffer, roundings=roundings)
            return
        if rule is not None and gradient.present[0]:
            assert buffer is not None
            make_direction(rule, *known, self._device, values=values, into=buffer)
        scalars = self._settings.scalars(update, block, self._square_root)
        kernel = self._kernel_of(block.rule, block.dtype)
        chunk_elements, before, after = _WITHOUT_CHECKSUMS, None, None
        if checksums is not None:
            chunk_elements, before, after = checksums.chunk_elements, checksums.before, checksums.after

        def update_part(part: tuple[int, int]) -> None:
            first, last = part
            assert checksums is None or (
                first % chunk_elements == 0 and (last % chunk_elements == 0 or last == block.num_elements)
            ), "a part has whole chunks"
            segments = list(_parts_of_group(block, gradient.present, first, last))
            mismatches = kernel(
                *[field.part(memories[field.name], first - start, last - start) for field in block.record.fields],
                *([] if buffer is None else [_elements(buffer, stop - start, first - start, last - start)]),
                _elements(values, stop - start, first - start, last - start),
                scalars=scalars,
                segments=[each.bounds for each in segments],
                chunk_elements=chunk_elements,
                first_chunk=first // chunk_elements,
                before=before,
                after=after,
                roundings=self._roundings(segments, update.number) if block.rounds_stochastically else [],
                gradient_dtype=gradient.dtype_name,
            )
            if mismatches and checksums is not None:
                checksums.check(first, last, mismatches)

        if self._threads is None:
            update_part((start, stop))
            return
        alignment = block.record.page_elements if checksums is None else checksums.chunk_elements
        parts = [self._threads.submit(update_part, part) for part in _parts(start, stop, self._num_threads, alignment)]
        wait(parts)  # all of them: the memory is given back when one fails
        for part in parts:
            part.result()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()

    def _roundings(self, segments: Sequence[GroupPart], number: int) -> list[tuple[int, int]]:
        """What the random bits of each segment follow from: a key, and the number of its first element in its
        parameter. So they depend neither on blocks and groups, nor on ranks (docs/store-format.md)."""
        keys = [xxh3_64_intdigest(f"{self._seed}/{number}/{each.parameter.name}".encode()) for each in segments]
        return [(key, each.first_element) for key, each in zip(keys, segments, strict=True)]


def _parts(start: int, stop: int, number: int, alignment: int) -> list[tuple[int, int]]:
    """Cut `[start, stop)` into `number` parts of nearly equal size, a multiple of `alignment`; fewer if it is short."""
    size = align_up(max(1, -(-(stop - start) // number)), alignment)
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def _elements(memory: memoryview, number: int, first: int, last: int) -> memoryview:
    """The bytes of elements `[first, last)` of an array with `number` elements."""
    size = len(memory) // number
    return memory[first * size : last * size]


def _parts_of_group(block: BlockSpec, present: tuple[bool, ...], start: int, stop: int) -> Iterator[GroupPart]:
    """What has a gradient in elements `[start, stop)` of a block, the arrays. `present`: which parameters have one."""
    for parameter, has_gradient in zip(block.parameters, present, strict=True):
        first, last = max(start, parameter.start), min(stop, parameter.stop)
        if has_gradient and first < last:
            bounds = (first - start, last - start, parameter.decay)
            yield GroupPart(parameter, bounds, parameter.first + first - parameter.start)
