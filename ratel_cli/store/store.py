"""The store: all model state on NVMe, in generations of which one is always whole.

Opened by the commands; filled by `model.import_weights`, read and written by `engine`, pinned by `training.loop`,
read by `model.export_weights`. A slot of its files holds one whole generation, every block's record. A step writes a
free slot (the shadow) and commits it by one page, the manifest; until that is durable the generation before it is the
valid one.

Invariants: the shadow is never the current slot, a pinned or a held one; a manifest never speaks of bytes that are
not durable; after a failed sync or manifest write nothing more is committed.

The files are made in `creation` and looked at again in `opening`; the manifest's format is in `manifest`, how one
follows another in `commits`; the addresses are in `geometry`. A slot is read through a `Generation`, which checks
every chunk (`checksums`), and filled through a `Shadow`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import Self

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import StripedFiles, check_directories, use_direct_io
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.tickets import Ticket
from ratel_cli.sizes import CHUNK_ELEMENTS, STRIPE_BYTES
from ratel_cli.store.barrier import KILL_POINTS, Barrier, KernelBarrier, failpoint
from ratel_cli.store.commit import Commits
from ratel_cli.store.create import fill_with_zeros, make_files
from ratel_cli.store.generation import Generation, StoreSlots
from ratel_cli.store.geometry import Geometry
from ratel_cli.store.headers import existing_store, read_header
from ratel_cli.store.layout import RecordLayout
from ratel_cli.store.lock import DATA_FILE_NAME, DEFAULT_WAIT_SECONDS, StoreLock
from ratel_cli.store.manifest import (
    NO_PREVIOUS,
    Manifest,
    Pin,
    Progress,
    StoreIdentity,
    first_manifest,
    page_sha256,
)
from ratel_cli.store.open import START_OVER, open_files
from ratel_cli.store.shadow import Shadow
from ratel_cli.store.slots import check_room, kept_slots

__all__ = ["KILL_POINTS", "Progress", "Store", "StoreIdentity"]


class _Phase(Enum):
    IMPORTING = auto()
    READY = auto()
    STEPPING = auto()
    CLOSED = auto()


class Store(Closing):
    """Use as a context manager. Reads and writes may come from any thread; all else from one at a time."""

    def __init__(
        self, lock: StoreLock, manifest: Manifest, previous_sha256: bytes, *, queue: IoQueue, barrier: Barrier
    ) -> None:
        """Used by `create` and `open`; takes the lock over."""
        geometry = manifest.geometry
        self._lock = lock
        self._commits = Commits(lock, manifest, previous_sha256, barrier)
        self._records = geometry.records()
        self._files = StripedFiles(lock.fds, geometry.stripes(), queue)
        self._slots = StoreSlots(
            files=self._files, records=self._records, chunks=geometry.chunks(), store_id=manifest.store_id
        )
        self._held: list[Generation] = []
        self._phase = _Phase.READY if manifest.generation else _Phase.IMPORTING
        self._current = self._generation(manifest.current)
        self._shadow = self._new_shadow(manifest.slot, step=0)

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
        chunk_elements: int = CHUNK_ELEMENTS,
        notice: Callable[[str], None] | None = None,
        progress: Callable[[int], None] | None = None,
        lock_wait_seconds: float = DEFAULT_WAIT_SECONDS,
        barrier: Barrier | None = None,
    ) -> Self:
        """A new store, all zeros, that becomes valid with `commit_import`. Writes every byte: minutes for a large one.

        `weights` are the directories' shares of the stripes, for the store's whole life; None: equal ones.
        Every `chunk_elements` of a field have a checksum; 0: there are none.
        `progress` is told the bytes of each part written, `num_slots * slot_bytes` in all.
        """
        directories, barrier = check_directories(paths), barrier or KernelBarrier()
        geometry = Geometry(
            dtype=layout.dtype,
            block_elements=tuple(block_elements),
            num_slots=num_slots,
            weights=tuple(weights or [1] * len(directories)),
            stripe_bytes=stripe_bytes,
            in_place=in_place,
            chunk_elements=chunk_elements,
        )
        manifest = first_manifest(os.urandom(16), identity, geometry)
        lock = make_files(
            directories,
            file_bytes=geometry.file_bytes(),
            store_id=manifest.store_id,
            overwrite=overwrite,
            barrier=barrier,
            lock_wait_seconds=lock_wait_seconds,
        )
        try:
            use_direct_io(lock.fds, lock.paths, notice or _ignore)
            store = cls(lock, manifest, NO_PREVIOUS, queue=queue, barrier=barrier)
            fill_with_zeros(store._files, num_slots * store.slot_bytes, progress or _ignore)
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
            notice=notice or _ignore,
            lock_wait_seconds=lock_wait_seconds,
        )
        return cls(lock, manifest, page_sha256(page), queue=queue, barrier=barrier or KernelBarrier())

    @staticmethod
    def exists(paths: Sequence[Path]) -> bool:
        """Whether `create` would want `overwrite`: a store is there, whole or damaged. An unfinished import is none."""
        return existing_store([read_header(path / DATA_FILE_NAME) for path in check_directories(paths)]) is not None

    @property
    def layout(self) -> RecordLayout:
        return self._records.layout

    @property
    def block_elements(self) -> tuple[int, ...]:
        return self._records.block_elements

    @property
    def num_slots(self) -> int:
        """Generations that there is room for, the one being written included."""
        return self._commits.manifest.geometry.num_slots

    @property
    def in_place(self) -> bool:
        """Whether there is one slot only, and a step that fails while it writes loses the store."""
        return self._commits.manifest.geometry.in_place

    @property
    def identity(self) -> StoreIdentity:
        return self._commits.manifest.identity

    @property
    def progress(self) -> Progress:
        """Of the current generation."""
        return self._commits.manifest.progress

    @property
    def pinned_steps(self) -> tuple[int, ...]:
        """The steps whose generations are kept, oldest first."""
        return tuple(sorted(pin.progress.step for pin in self._commits.manifest.pins))

    @property
    def slot_bytes(self) -> int:
        """What one generation takes, and what a step writes."""
        return self._records.slot_bytes

    @property
    def nvme_bytes(self) -> int:
        """Space that the data files take."""
        return sum(self._commits.manifest.geometry.file_bytes())

    @property
    def chunk_elements(self) -> int:
        """Elements of a field that have a checksum together; 0: there are none."""
        return self._commits.manifest.geometry.chunk_elements

    def current(self) -> Generation:
        """The last committed generation, to be read until the step after the next begins to write."""
        assert self._phase is not _Phase.CLOSED
        return self._current

    def kept(self, step: int) -> Generation:
        """A pinned generation, to be read until it is unpinned. Raises BadInput if none of that step is kept."""
        return self._generation(self._pin_of(step))

    def read(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Elements ``[start, stop)`` of a field, from the current generation, checked (generation.py)."""
        return self.current().read(block, field, start, stop, memory)

    def shadow(self) -> Shadow:
        """The generation in the making, to be filled between `begin_step` (or `create`) and the commit."""
        assert self._phase in (_Phase.IMPORTING, _Phase.STEPPING), "write between begin_step and commit"
        return self._shadow

    def write(self, block: int, field: str, start: int, stop: int, memory: memoryview) -> Ticket:
        """Seal and write elements ``[start, stop)`` of a field. Every one of these tickets must be waited for."""
        shadow = self.shadow()
        shadow.seal(block, field, start, stop, memory)
        return shadow.write(block, field, start, stop, memory)

    def commit_import(self, progress: Progress) -> None:
        """Make what was written since `create` the first generation; what was not written is zero."""
        assert self._phase is _Phase.IMPORTING
        self._shadow.leave_zeros()
        self._commit(replace(self._commits.manifest, progress=progress))

    def begin_step(self) -> None:
        """Choose the shadow. In place: first commit that the only generation is about to be overwritten."""
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        slot, step = self._commits.manifest.slot, self.progress.step + 1
        if self.in_place:
            self._publish(replace(self._commits.manifest, step_in_place=step))
        else:
            slot = min(self._free_slots())
        self._shadow = self._new_shadow(slot, step=step)
        self._phase = _Phase.STEPPING

    def commit(self, progress: Progress) -> None:
        """Make the shadow the current generation. In phases:

        1 every write of the step was waited for, and every byte of every record was written
        2 the table of checksums, behind the records
        3 fdatasync each file: now the shadow is durable, and still nobody's
        4 the manifest, durable, to the place of the one before the current: now the shadow is current
        5 the slot that was current is free for the next step, unless it is pinned
        """
        self._commits.check_usable()
        assert self._phase is _Phase.STEPPING
        self._shadow.check_written()
        before = None if self.in_place else self._commits.manifest.current
        self._commit(replace(self._commits.manifest, progress=progress, step_in_place=None, before=before))

    def commit_progress(self, progress: Progress) -> None:
        """Commit a step that was not applied: the same generation, further in the data."""
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        self._publish(replace(self._commits.manifest, progress=progress))

    def discard(self) -> None:
        """Abandon the step; the current generation stays, and the shadow is free again."""
        self._commits.check_usable()
        assert self._phase is _Phase.STEPPING
        self._files.settle()
        if self.in_place:
            if self._shadow.submitted_bytes:
                self._commits.refuse_more()
                raise IntegrityFailure(
                    f"step {self.progress.step + 1} cannot be abandoned: it was partly written in place", START_OVER
                )
            self._publish(replace(self._commits.manifest, step_in_place=None))
        self._phase = _Phase.READY

    def pin(self) -> None:
        """Keep the current generation until `unpin`. Costs a slot, and no copy."""
        self._commits.check_usable()
        assert self._phase in (_Phase.READY, _Phase.STEPPING)
        manifest = self._commits.manifest
        if manifest.current not in manifest.pins:
            check_room(manifest, self._held)
            self._publish(replace(manifest, pins=(*manifest.pins, manifest.current)))

    def unpin(self, step: int) -> None:
        """Let a kept generation go; its slot is used again."""
        self._commits.check_usable()
        assert step in self.pinned_steps, step
        manifest = self._commits.manifest
        self._publish(replace(manifest, pins=tuple(pin for pin in manifest.pins if pin.progress.step != step)))

    def hold(self) -> Generation:
        """The current generation, not written over until `release`: like a pin, but a crash lets it go."""
        check_room(self._commits.manifest, self._held)
        self._held.append(self.current())
        return self._held[-1]

    def release(self, generation: Generation) -> None:
        """Let a generation go that was held; its slot is used again."""
        self._held.remove(generation)

    def rewind(self, step: int) -> None:
        """Make a kept generation the current one. Later ones are let go: going on from here makes them again."""
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        self._go_to(self._pin_of(step))

    def ensure_whole(self, pool: BufferPool, *, progress: Callable[[int], None], notice: Callable[[str], None]) -> None:
        """Check every byte of the current generation before training goes on from it.

        If it is damaged, the one before becomes the current one, with a notice, if that is whole: no step began to
        write since. Raises IntegrityFailure, naming block and field, if neither is. `progress` as in
        `Generation.check_all`.
        """
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        try:
            self._current.check_all(pool, progress=progress)
        except IntegrityFailure as failure:
            before = self._commits.manifest.before
            if before is None or not self.chunk_elements:  # without checksums nobody knows whether it is whole
                raise
            try:
                self._generation(before).check_all(pool, progress=progress)
            except IntegrityFailure:
                raise failure from None
            notice(
                f"step {self.progress.step} is damaged ({failure.message}); going on from step {before.progress.step}"
            )
            self._go_to(before)

    def refuse_more(self) -> None:
        """Commit nothing from now on, whatever another thread is about to. From any thread."""
        self._commits.refuse_more()

    def close(self) -> None:
        """Wait for transfers in flight, and unlock. Commits nothing. Idempotent."""
        if self._phase is not _Phase.CLOSED:
            self._phase = _Phase.CLOSED
            self._files.settle()
            self._lock.close()

    def _free_slots(self) -> set[int]:
        return set(range(self.num_slots)) - kept_slots(self._commits.manifest, self._held)

    def _generation(self, pin: Pin) -> Generation:
        return Generation(self._slots, pin)

    def _new_shadow(self, slot: int, *, step: int) -> Shadow:
        return Shadow(self._slots, replace(self._commits.manifest.current, slot=slot), step=step)

    def _commit(self, manifest: Manifest) -> None:
        """Phases 1 to 4 of `commit`."""
        self._shadow.check_waited()
        failpoint("commit.written")
        root = self._shadow.write_table()
        self._commits.sync(manifest.progress.step)
        failpoint("commit.synced")
        self._publish(replace(manifest, slot=self._shadow.slot, root_checksum=root), self._shadow.generation)
        failpoint("commit.published")
        self._phase = _Phase.READY

    def _pin_of(self, step: int) -> Pin:
        for pin in self._commits.manifest.pins:
            if pin.progress.step == step:
                return pin
        steps = ", ".join(map(str, self.pinned_steps)) or "none"
        raise BadInput(f"no generation of step {step} is kept; kept are: {steps}")

    def _go_to(self, pin: Pin) -> None:
        """Make an earlier generation the current one, and let later ones go."""
        manifest = self._commits.manifest.at(pin)
        pins = tuple(kept for kept in manifest.pins if kept.progress.step <= pin.progress.step)
        self._publish(replace(manifest, pins=pins, before=None), self._generation(pin))

    def _publish(self, manifest: Manifest, generation: Generation | None = None) -> None:
        """The current generation is then `generation`, or the one it was."""
        self._commits.publish(manifest)
        self._current = (generation or self._current).committed(self._commits.manifest.current)


def _ignore(_: object) -> None:
    return
