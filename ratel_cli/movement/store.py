"""The store: all model state on NVMe, in generations of which one is always whole.

Opened by `cli.training_run`; filled by `model.load`, read and written by `engine`, pinned by
`training.loop`, read by `model.export`. The files hold `num_slots` slots; a slot holds one whole
generation, every block's record. A step writes a free slot (the shadow) and then commits it by one
page, the manifest; until that page is durable the generation before it is the valid one.

Invariants: the shadow is never the current slot nor a pinned one; a manifest never speaks of bytes
that are not durable; after a failed sync or manifest write nothing more is committed.

The files are made in `creation` and looked at again in `opening`; the manifest's format is in
`manifest`, the addresses are in `geometry`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.movement.buffers import PAGE_BYTES, BufferPool
from ratel_cli.movement.creation import fill_with_zeros, make_files
from ratel_cli.movement.durable import Barrier, KernelBarrier, reach
from ratel_cli.movement.files import StripedFiles, check_directories, use_direct_io
from ratel_cli.movement.geometry import NUM_MANIFESTS, STRIPE_BYTES, Geometry
from ratel_cli.movement.headers import occupant, read_header
from ratel_cli.movement.lock import DATA_FILE_NAME, DEFAULT_WAIT_SECONDS, StoreLock
from ratel_cli.movement.manifest import (
    NO_PREVIOUS,
    Manifest,
    Pin,
    Progress,
    StoreIdentity,
    encode_manifest,
    page_sha256,
)
from ratel_cli.movement.opening import START_OVER, open_files
from ratel_cli.movement.queue import IoQueue
from ratel_cli.movement.records import ELEMENT_ALIGNMENT, RecordLayout
from ratel_cli.movement.tickets import Ticket
from ratel_cli.movement.writes import CountedWrite, StepWrites

__all__ = ["KILL_POINTS", "STRIPE_BYTES", "Progress", "Store", "StoreIdentity"]

KILL_POINTS = (
    "create.reserved",
    "create.erased",
    "create.identified",
    "create.filled",
    "commit.written",
    "commit.synced",
    "commit.published",
    "manifest.ready",
    "manifest.published",
)
"""Arguments of `durable.reach`; the manifest points are passed by every change of state, commits included."""

_LARGEST = 1 << 53


class _Phase(Enum):
    IMPORTING = auto()
    READY = auto()
    STEPPING = auto()
    FAILED = auto()
    CLOSED = auto()


class Store:
    """Use as a context manager. Reads and writes may come from two threads; all else from one at a time."""

    def __init__(
        self, lock: StoreLock, manifest: Manifest, previous_sha256: bytes, *, queue: IoQueue, barrier: Barrier
    ) -> None:
        """Used by `create` and `open`; takes the lock over."""
        geometry = manifest.geometry
        self._lock = lock
        self._manifest = manifest
        self._previous_sha256 = previous_sha256
        self._barrier = barrier
        self._records = geometry.records()
        self._files = StripedFiles(lock.fds, geometry.stripes(), queue)
        self._writes = StepWrites()
        self._phase = _Phase.READY if manifest.generation else _Phase.IMPORTING
        self._shadow = manifest.slot

    @classmethod
    def create(
        cls,
        paths: Sequence[Path],
        *,
        identity: StoreIdentity,
        layout: RecordLayout,
        block_elements: Sequence[int],
        num_slots: int,
        queue: IoQueue,
        in_place: bool = False,
        overwrite: bool = False,
        weights: Sequence[int] | None = None,
        stripe_bytes: int = STRIPE_BYTES,
        notice: Callable[[str], None] | None = None,
        progress: Callable[[int], None] | None = None,
        lock_wait_seconds: float = DEFAULT_WAIT_SECONDS,
        barrier: Barrier | None = None,
    ) -> Self:
        """A new store, all zeros, that becomes valid with `commit_import`. Writes every byte: minutes for a large one.

        `weights` are the directories' shares of the stripes, for the store's whole life; None: equal ones.
        `progress` is told the bytes of each part written, `num_slots * slot_bytes` in all.
        """
        directories = check_directories(paths)
        manifest = Manifest(
            store_id=os.urandom(16),
            generation=0,
            previous_sha256=NO_PREVIOUS,
            identity=identity,
            geometry=Geometry(
                dtype=layout.dtype,
                block_elements=tuple(block_elements),
                num_slots=num_slots,
                weights=tuple(weights or [1] * len(directories)),
                stripe_bytes=stripe_bytes,
                in_place=in_place,
            ),
            progress=Progress(step=0, updates=0, loss_scale=1.0, good_steps=0, tokens=0),
            slot=0,
            pins=(),
            step_in_place=None,
            root_checksum="",
        )
        encode_manifest(_largest(manifest))
        barrier = barrier or KernelBarrier()
        with BufferPool(None) as pool, pool.lease(PAGE_BYTES, "a page of the header") as page:
            lock = make_files(
                directories,
                file_bytes=manifest.geometry.file_bytes(),
                store_id=manifest.store_id,
                overwrite=overwrite,
                page=page.memory,
                barrier=barrier,
                lock_wait_seconds=lock_wait_seconds,
            )
        try:
            use_direct_io(lock.fds, lock.paths, notice or _ignore_text)
            store = cls(lock, manifest, NO_PREVIOUS, queue=queue, barrier=barrier)
            fill_with_zeros(store._files, num_slots * store.slot_bytes, progress or _ignore_count)
        except BaseException:
            lock.close()
            raise
        return store

    @classmethod
    def open(
        cls,
        paths: Sequence[Path],
        *,
        queue: IoQueue,
        identity: StoreIdentity | None,
        notice: Callable[[str], None] | None = None,
        lock_wait_seconds: float = DEFAULT_WAIT_SECONDS,
        barrier: Barrier | None = None,
    ) -> Self:
        """The store in these directories, at its last committed generation. `identity` None: whatever it is."""
        lock, manifest, page = open_files(
            check_directories(paths),
            identity=identity,
            notice=notice or _ignore_text,
            lock_wait_seconds=lock_wait_seconds,
        )
        return cls(lock, manifest, page_sha256(page), queue=queue, barrier=barrier or KernelBarrier())

    @staticmethod
    def exists(paths: Sequence[Path]) -> bool:
        """Whether `create` would want `overwrite`: a store is there, whole or damaged. An unfinished import is none."""
        return occupant([read_header(path / DATA_FILE_NAME) for path in check_directories(paths)]) is not None

    @property
    def layout(self) -> RecordLayout:
        return self._records.layout

    @property
    def block_elements(self) -> tuple[int, ...]:
        return self._records.block_elements

    @property
    def num_slots(self) -> int:
        """Generations that there is room for, the one being written included."""
        return self._manifest.geometry.num_slots

    @property
    def in_place(self) -> bool:
        """Whether there is one slot only, and a step that fails while it writes loses the store."""
        return self._manifest.geometry.in_place

    @property
    def identity(self) -> StoreIdentity:
        return self._manifest.identity

    @property
    def progress(self) -> Progress:
        """Of the current generation."""
        return self._manifest.progress

    @property
    def pinned_steps(self) -> tuple[int, ...]:
        """The steps whose generations are kept, oldest first."""
        return tuple(sorted(pin.progress.step for pin in self._manifest.pins))

    @property
    def slot_bytes(self) -> int:
        """What one generation takes, and what a step writes."""
        return self._records.slot_bytes

    @property
    def nvme_bytes(self) -> int:
        """Space that the data files take."""
        return sum(self._manifest.geometry.file_bytes())

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Elements ``[start, stop)`` of a field, from the current generation."""
        assert self._phase is not _Phase.CLOSED
        return self._files.read(self._address(self._manifest.slot, block, field, start, stop, memory), memory)

    def read_shadow(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """As `read`, from the generation being written. What it names must have been written and waited for."""
        assert self._phase is _Phase.STEPPING
        return self._files.read(self._address(self._shadow, block, field, start, stop, memory), memory)

    def write(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Elements ``[start, stop)`` of a field, into the shadow. Every one of these tickets must be waited for."""
        assert self._phase in (_Phase.IMPORTING, _Phase.STEPPING), "write between begin_step and commit"
        address = self._address(self._shadow, block, field, start, stop, memory)
        return CountedWrite(self._files.write(address, memory), self._writes, len(memory))

    def commit_import(self, progress: Progress) -> None:
        """Make what was written since `create` the first generation; what was not written is zero."""
        assert self._phase is _Phase.IMPORTING
        self._commit(replace(self._manifest, progress=progress))

    def begin_step(self) -> None:
        """Choose the shadow. In place: first commit that the only generation is about to be overwritten."""
        self._check_usable()
        assert self._phase is _Phase.READY
        self._writes = StepWrites()
        if self._manifest.geometry.in_place:
            self._publish(replace(self._manifest, step_in_place=self.progress.step + 1))
        else:
            self._shadow = min(self._free_slots())
        self._phase = _Phase.STEPPING

    def commit(self, progress: Progress) -> None:
        """Make the shadow the current generation. In phases:

        1 every write of the step was waited for, and every byte of every record was written
        2 fdatasync each file: now the shadow is durable, and still nobody's
        3 the manifest, durable, to the place of the one before the current: now the shadow is current
        4 the slot that was current is free for the next step, unless it is pinned
        """
        self._check_usable()
        assert self._phase is _Phase.STEPPING
        assert self._writes.confirmed_bytes == self.slot_bytes, "a step writes every byte of every record once"
        self._commit(replace(self._manifest, progress=progress, slot=self._shadow, step_in_place=None))

    def commit_progress(self, progress: Progress) -> None:
        """Commit a step that was not applied: the same generation, further in the data."""
        self._check_usable()
        assert self._phase is _Phase.READY
        self._publish(replace(self._manifest, progress=progress))

    def discard(self) -> None:
        """Abandon the step; the current generation stays, and the shadow is free again."""
        self._check_usable()
        assert self._phase is _Phase.STEPPING
        self._files.settle()
        if self._manifest.geometry.in_place:
            if self._writes.submitted_bytes:
                self._phase = _Phase.FAILED
                raise IntegrityFailure(
                    f"step {self.progress.step + 1} cannot be abandoned: it was partly written in place", START_OVER
                )
            self._publish(replace(self._manifest, step_in_place=None))
        self._phase = _Phase.READY

    def pin(self) -> None:
        """Keep the current generation until `unpin`. Costs a slot, and no copy."""
        self._check_usable()
        assert self._phase in (_Phase.READY, _Phase.STEPPING)
        current = Pin(slot=self._manifest.slot, progress=self.progress)
        if current in self._manifest.pins:
            return
        num_slots = self._manifest.geometry.num_slots
        kept = {pin.slot for pin in (*self._manifest.pins, current)}
        if len(kept) + 2 > num_slots:
            raise EnvironmentFailure(
                f"step {current.progress.step} cannot be kept: the store has {num_slots} slots, a step needs 2, "
                f"and {len(kept) - 1} are kept already",
                "lower save_total_limit, or start over with a larger storage.keep_generations",
            )
        self._publish(replace(self._manifest, pins=(*self._manifest.pins, current)))

    def unpin(self, step: int) -> None:
        """Let a kept generation go; its slot is used again."""
        self._check_usable()
        assert step in self.pinned_steps, step
        self._publish(replace(self._manifest, pins=tuple(p for p in self._manifest.pins if p.progress.step != step)))

    def rewind(self, step: int) -> None:
        """Make a kept generation the current one. Later ones are let go: going on from here makes them again."""
        self._check_usable()
        assert self._phase is _Phase.READY
        kept = [pin for pin in self._manifest.pins if pin.progress.step <= step]
        chosen = [pin for pin in kept if pin.progress.step == step]
        if not chosen:
            steps = ", ".join(map(str, self.pinned_steps)) or "none"
            raise BadInput(f"--resume {step}: no generation of that step is kept; kept are: {steps}")
        self._publish(replace(self._manifest, slot=chosen[0].slot, progress=chosen[0].progress, pins=tuple(kept)))

    def close(self) -> None:
        """Wait for transfers in flight, and unlock. Commits nothing. Idempotent."""
        if self._phase is not _Phase.CLOSED:
            self._phase = _Phase.CLOSED
            self._files.settle()
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _address(self, slot: int, block: int, field: str, start: int, stop: int, memory: memoryview) -> int:
        assert start <= stop <= self.block_elements[block] and stop % ELEMENT_ALIGNMENT == 0, (start, stop)
        assert len(memory) == (stop - start) * self.layout.field(field).bytes_per_element, len(memory)
        return self._records.address(slot, block, field, start)

    def _free_slots(self) -> set[int]:
        taken = {self._manifest.slot, *(pin.slot for pin in self._manifest.pins)}
        return set(range(self._manifest.geometry.num_slots)) - taken

    def _commit(self, manifest: Manifest) -> None:
        assert self._writes.confirmed_bytes == self._writes.submitted_bytes, "a write was not waited for, or failed"
        reach("commit.written")
        for fd, path in zip(self._lock.fds, self._lock.paths, strict=True):
            try:
                self._barrier.sync(fd)
            except OSError as exc:
                self._fail(f"{path}: step {manifest.progress.step} could not be made durable: {exc.strerror}", exc)
        reach("commit.synced")
        self._publish(manifest)
        reach("commit.published")
        self._phase = _Phase.READY

    def _publish(self, manifest: Manifest) -> None:
        """Write the next manifest beside the current one; in memory it counts once it is durable."""
        generation = self._manifest.generation + 1
        manifest = replace(manifest, generation=generation, previous_sha256=self._previous_sha256)
        content = encode_manifest(manifest)
        with BufferPool(None) as pool, pool.lease(PAGE_BYTES, "the manifest") as page:
            page.memory[:] = content
            reach("manifest.ready")
            try:
                self._barrier.write_through(self._lock.fds[0], generation % NUM_MANIFESTS * PAGE_BYTES, page.memory)
            except OSError as exc:
                self._fail(f"{self._lock.paths[0]}: the manifest could not be written: {exc.strerror}", exc)
        reach("manifest.published")
        self._manifest, self._previous_sha256 = manifest, page_sha256(content)

    def _fail(self, message: str, cause: OSError) -> NoReturn:
        self._phase = _Phase.FAILED
        raise IntegrityFailure(f"{message}; nothing more is committed", "check the drive, then resume") from cause

    def _check_usable(self) -> None:
        if self._phase is _Phase.FAILED:
            raise IntegrityFailure(
                "the store takes no more commits: an earlier one failed", "check the drive, then resume"
            )


def _largest(manifest: Manifest) -> Manifest:
    """The largest manifest that this store can come to need, to see in advance whether it fits on its page."""
    progress = Progress(step=_LARGEST, updates=_LARGEST, loss_scale=1 / 3, good_steps=_LARGEST, tokens=_LARGEST)
    slots = range(manifest.geometry.num_slots - 2)
    pins = tuple(Pin(slot=slot, progress=progress) for slot in slots)
    return replace(manifest, progress=progress, pins=pins, step_in_place=_LARGEST, root_checksum="0" * 64)


def _ignore_text(_: str) -> None:
    return


def _ignore_count(_: int) -> None:
    return
