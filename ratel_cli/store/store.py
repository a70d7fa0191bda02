"""The store: all model state on NVMe, in generations, one of which is always whole.

The data files are divided into slots. A slot holds one generation: every block's record, and their checksums. A step
writes a free slot (the shadow) and commits it with one page, the manifest. Until the manifest is durable, the
generation before is the current one. A slot is read through a `Generation`, which checks every chunk, and written
through a `Shadow`.

Invariants: the shadow is never in the slot of the current, a pinned or a held generation, except in place; a manifest
never refers to bytes that are not durable; after a failed sync or manifest write nothing more is committed.

docs/store-format.md describes the files to the byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Final, Self

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import check_directories, use_direct_io
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.striped_files import StripedFiles
from ratel_cli.store.barrier import Barrier, failpoint
from ratel_cli.store.base_files import BaseFiles, list_bytes_of
from ratel_cli.store.base_reader import BaseFilesReader
from ratel_cli.store.checksums import FROZEN_STEP
from ratel_cli.store.commit import Commits
from ratel_cli.store.create import fill_with_zeros, make_files
from ratel_cli.store.generation import Generation, StoreRegions
from ratel_cli.store.headers import existing_store, read_header
from ratel_cli.store.layout import Geometry, Region
from ratel_cli.store.lock import DATA_FILE_NAME, DEFAULT_WAIT_SECONDS, StoreLock
from ratel_cli.store.manifest import (
    NO_PREVIOUS,
    GenerationEntry,
    Manifest,
    Progress,
    StoreIdentity,
    first_manifest,
    page_sha256,
)
from ratel_cli.store.open import START_OVER, open_files
from ratel_cli.store.region import OpenRegion, RegionPlace
from ratel_cli.store.shadow import Shadow

__all__ = ["Progress", "Staged", "Store", "StoreIdentity"]
_FROZEN: Final = "frozen blocks"


class _Phase(Enum):
    """What the store is doing, which decides what may be called."""

    IMPORTING = auto()
    """Made, and not committed yet: the shadow is open."""
    READY = auto()
    """Between steps."""
    STEPPING = auto()
    """Between `begin_step` and `stage` or `discard`: the shadow is open."""
    STAGED = auto()
    """Between `stage` and `publish` or `discard`: the shadow is durable."""
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Staged:
    """A generation that is durable, and counts once it is published."""

    manifest: Manifest
    generation: Generation


class Store(Closing):
    """An open, locked store. Use as a context manager.

    Generations and the shadow may be read and written from any thread. Everything else is for one thread at a time.
    Every method that commits raises IntegrityFailure if the commit, or an earlier one, failed.
    """

    def __init__(
        self,
        lock: StoreLock,
        manifest: Manifest,
        previous_sha256: bytes,
        *,
        queue: IoQueue,
        barrier: Barrier,
        notice: Callable[[str], None],
        base_files: BaseFiles | None = None,
    ) -> None:
        """Use `create` or `open` instead. The store owns the lock from here on. `base_files`: of a new store."""
        geometry = manifest.geometry
        self.identity = manifest.identity
        """The model, settings, data and seed that the store belongs to."""
        self.store_id = manifest.store_id
        """Drawn when the store was made. A copy of its files has it, too."""
        self.blocks = geometry.blocks
        """What the store has of each block."""
        self.shares = geometry.shares
        """Each directory's share of all bytes."""
        self.rank_slice = geometry.rank_slice
        """Which part of each block of the model that is."""
        self.num_slots = geometry.num_slots
        """Generations that the store can hold, the shadow included."""
        self.overwrites = geometry.overwrites
        """True if the store has one slot. A step that fails while it writes then loses the store."""
        self.chunk_elements = geometry.chunk_elements
        """Elements of a field that share a checksum. 0: the store has no checksums."""
        self.slot_bytes = geometry.slot.num_bytes
        """Size of one slot with its checksums, which is what a step writes."""
        self.generation_bytes = geometry.frozen.num_bytes + geometry.in_files_bytes + self.slot_bytes
        """Size of all that belongs to one generation, frozen blocks included."""
        self.frozen_bytes = geometry.frozen.num_bytes
        """Size of the frozen region with its checksums, which the import writes."""
        self.nvme_bytes = sum(geometry.file_bytes())
        """Size of all data files together."""
        self.made_bytes = geometry.made_bytes
        """What making it has written before its first generation."""
        self._lock = lock
        self._commits = Commits(lock, manifest, previous_sha256, barrier)
        self._files = StripedFiles(lock.fds, geometry.stripes(), queue)
        self._reader: BaseFilesReader | None = None
        if geometry.list_bytes:
            load = partial(_read_list, self._files, geometry.frozen) if base_files is None else lambda: base_files
            self._reader = BaseFilesReader(load, queue, notice)
        place = RegionPlace(
            files=self._files,
            shape=geometry.frozen,
            address=0,
            store_id=manifest.store_id,
            base_files=self._reader,
        )
        frozen = (
            OpenRegion.to_write(place, name=_FROZEN, step=FROZEN_STEP)
            if self.is_new
            else OpenRegion(place, name=_FROZEN, root=manifest.frozen_checksum)
        )
        self._regions = StoreRegions(files=self._files, geometry=geometry, store_id=manifest.store_id, frozen=frozen)
        self._held: list[Generation] = []
        self._phase = _Phase.IMPORTING if self.is_new else _Phase.READY
        self._current = self._generation(manifest.current)
        self._shadow = self._new_shadow(manifest.slot, step=0)

    @classmethod
    def create(
        cls,
        paths: Sequence[Path],
        geometry: Geometry,
        *,
        identity: StoreIdentity,
        queue: IoQueue,
        overwrite: bool = False,
        notice: Callable[[str], None] = lambda text: None,
        progress: Callable[[int], None] = lambda num_bytes: None,
        lock_wait_seconds: float = DEFAULT_WAIT_SECONDS,
        barrier: Barrier | None = None,
        base_files: BaseFiles | None = None,
    ) -> Self:
        """Make a store that holds zeros. It becomes valid with `commit_import`.

        Writes every byte, which takes minutes for a large store. `progress` is called with the bytes of each part,
        `frozen_bytes + num_slots * slot_bytes` in all. With one slot, steps are written in place. `base_files`: which
        have the blocks that lie in files; the geometry has room for this list.

        Raises BadInput if the directories hold a store and `overwrite` is False, EnvironmentFailure if space, a
        permission or the lock is missing, and IntegrityFailure if a write fails.
        """
        directories, barrier = check_directories(paths), barrier or Barrier()
        assert geometry.list_bytes == list_bytes_of(base_files)
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
            use_direct_io(lock.fds, lock.paths, notice)
            store = cls(lock, manifest, NO_PREVIOUS, queue=queue, barrier=barrier, notice=notice, base_files=base_files)
            fill_with_zeros(store._files, geometry.slot_address(geometry.num_slots), progress)
            if base_files is not None:
                _write_list(base_files, store._files, geometry.frozen)
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
        notice: Callable[[str], None] = lambda text: None,
        lock_wait_seconds: float = DEFAULT_WAIT_SECONDS,
        barrier: Barrier | None = None,
        read_only: bool = False,
        shared: bool = False,
    ) -> Self:
        """Open the store in these directories at its last committed generation.

        `read_only`: no permission to write is needed, and nothing may be written. `shared`: others may open it so, too.

        Raises BadInput if there is none, or if it is another store than `identity` says (None: any store will do),
        EnvironmentFailure if another process holds it, and IntegrityFailure if it is damaged.
        """
        lock, manifest, page = open_files(
            check_directories(paths),
            identity=identity,
            notice=notice,
            lock_wait_seconds=lock_wait_seconds,
            read_only=read_only,
            shared=shared,
        )
        return cls(lock, manifest, page_sha256(page), queue=queue, barrier=barrier or Barrier(), notice=notice)

    @staticmethod
    def exists(paths: Sequence[Path]) -> bool:
        """True if the directories hold a store, whole or damaged, so that `create` needs `overwrite`.

        An import that was never committed is not a store.
        """
        return existing_store([read_header(path / DATA_FILE_NAME) for path in check_directories(paths)]) is not None

    @property
    def is_new(self) -> bool:
        """True if no generation was committed yet."""
        return self._commits.manifest.generation == 0

    @property
    def progress(self) -> Progress:
        """How far training had come when the current generation was committed."""
        return self._commits.manifest.progress

    @property
    def base_files(self) -> BaseFiles | None:
        """Which of the base model's files have blocks of the store; None if it has all itself.

        Raises IntegrityFailure if the list is damaged.
        """
        return None if self._reader is None else self._reader.files

    @property
    def pinned_steps(self) -> tuple[int, ...]:
        """The steps whose generations are pinned, in ascending order."""
        return tuple(sorted(entry.progress.step for entry in self._commits.manifest.pins))

    @property
    def deletion(self) -> str | None:
        """What to tell whoever trains if a data file was deleted since it was opened; None if none was."""
        path = self._lock.find_deleted()
        if path is None:
            return None
        return (
            f"{path} was deleted while it is in use. Training goes on, but cannot be resumed: everything is lost "
            "if the process ends before it has written the model"
        )

    def current(self) -> Generation:
        """The last committed generation. It can be read until the step after the next one begins to write."""
        assert self._phase is not _Phase.CLOSED
        return self._current

    def pinned(self, step: int) -> Generation:
        """The pinned generation of this step. It can be read until it is unpinned. Raises BadInput if there is none."""
        return self._generation(self._pinned_entry(step))

    def generation_of(self, step: int) -> Generation:
        """The current generation or the one before it, by its step. It can be read until a step begins to write."""
        entries = [self._commits.manifest.current, self._commits.manifest.before]
        return next(self._generation(entry) for entry in entries if entry is not None and entry.progress.step == step)

    def shadow(self) -> Shadow:
        """The generation that is being written, between `begin_step` (or `create`) and the commit."""
        assert self._phase in (_Phase.IMPORTING, _Phase.STEPPING), "write between begin_step and stage"
        return self._shadow

    def commit_import(self, progress: Progress) -> None:
        """Commit what was written since `create` as the first generation. What was not written is zero."""
        assert self._phase is _Phase.IMPORTING
        self._shadow.leave_zeros()
        self.publish(self._stage(replace(self._commits.manifest, progress=progress)))

    def belong_to(self, identity: StoreIdentity) -> None:
        """Commit that the store belongs to this from now on. Its generations stay."""
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        self._publish(replace(self._commits.manifest, identity=identity))
        self.identity = identity

    def begin_step(self) -> None:
        """Choose a slot for the shadow. In place: first commit that the only generation is about to be overwritten."""
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        slot, step = self._commits.manifest.slot, self.progress.step + 1
        if self.overwrites:
            self._publish(replace(self._commits.manifest, step_in_place=step))
        else:
            slot = min(self._free_slots())
        self._shadow = self._new_shadow(slot, step=step)
        self._phase = _Phase.STEPPING

    def commit(self, progress: Progress) -> None:
        """Make the shadow the current generation: `stage` and `publish`, one after the other."""
        self.publish(self.stage(progress))

    def stage(self, progress: Progress) -> Staged:
        """Make the shadow durable, without effect on what is current. In phases:

        1 check that every byte of every record was written, and every write was waited for
        2 write the checksum table behind the records
        3 fdatasync each file: now the shadow is durable, but no manifest refers to it

        `publish` ends the commit, `discard` takes it back. Between them others may be asked, such as other ranks.
        """
        self._commits.check_usable()
        assert self._phase is _Phase.STEPPING
        self._shadow.check_written()
        before = None if self.overwrites else self._commits.manifest.current
        return self._stage(replace(self._commits.manifest, progress=progress, step_in_place=None, before=before))

    def publish(self, staged: Staged) -> None:
        """Make a staged generation the current one. In phases, after those of `stage`:

        4 write the manifest through, over the older of the two: now the shadow is current
        5 the slot that was current is free for the next step, unless it is pinned or held
        """
        self._commits.check_usable()
        assert self._phase is _Phase.STAGED
        self._publish(staged.manifest, staged.generation)
        failpoint("commit.published")
        self._phase = _Phase.READY

    def commit_progress(self, progress: Progress, *, may_fall_back: bool = False) -> None:
        """Commit a step that was not applied: the same generation, with the progress of a later step.

        `may_fall_back`: the step before can become the current one again, instead of the generation before.
        """
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        manifest = self._commits.manifest
        before = manifest.current if may_fall_back else manifest.before
        self._publish(replace(manifest, progress=progress, before=before))

    def discard(self) -> None:
        """Drop the step. The current generation stays, and the shadow's slot is free again.

        Raises IntegrityFailure in place, if the step has begun to write.
        """
        self._commits.check_usable()
        assert self._phase in (_Phase.STEPPING, _Phase.STAGED)
        self._files.settle()  # nothing is written to base files
        if self.overwrites:
            if self._shadow.submitted_bytes:
                self._commits.stop()
                raise IntegrityFailure(
                    f"step {self.progress.step + 1} cannot be discarded: a part of it was written in place", START_OVER
                )
            self._publish(replace(self._commits.manifest, step_in_place=None))
        self._phase = _Phase.READY

    def pin(self) -> None:
        """Keep the current generation until `unpin`. Takes a slot, but copies nothing.

        Raises EnvironmentFailure if no slot is left for it.
        """
        self._commits.check_usable()
        assert self._phase in (_Phase.READY, _Phase.STEPPING)
        manifest = self._commits.manifest
        if manifest.current not in manifest.pins:
            self._check_slot_left()
            self._publish(replace(manifest, pins=(*manifest.pins, manifest.current)))

    def unpin(self, step: int) -> None:
        """Let the pinned generation of this step be overwritten."""
        self._commits.check_usable()
        assert step in self.pinned_steps, step
        manifest = self._commits.manifest
        self._publish(replace(manifest, pins=tuple(entry for entry in manifest.pins if entry.progress.step != step)))

    def hold(self) -> Generation:
        """The current generation, which is not overwritten until `release`. Like a pin, but a crash ends it.

        Raises EnvironmentFailure if no slot is left for it.
        """
        self._check_slot_left()
        self._held.append(self.current())
        return self._held[-1]

    def release(self, generation: Generation) -> None:
        """Let a held generation be overwritten."""
        self._held.remove(generation)

    def rewind(self, step: int) -> None:
        """Make the pinned generation of this step the current one, and unpin all later ones.

        Raises BadInput if no generation of this step is pinned.
        """
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        self._go_to(self._pinned_entry(step))

    @property
    def step_before(self) -> int | None:
        """The step of the generation before the current one, which is there until the next step is written."""
        before = self._commits.manifest.before
        return None if before is None else before.progress.step

    def fall_back(self, pool: BufferPool | None, *, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Make the generation before the current one current, because other ranks have no later one. `pool`: for memory
        to check it; None: that is done by who reads it.

        Raises IntegrityFailure if it is damaged. `progress` as in `ensure_whole`.
        """
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        before = self._commits.manifest.before
        assert before is not None
        if pool is not None:
            self._generation(before).check_all(pool, progress=progress)
        self._go_to(before)

    def forget_before(self) -> None:
        """Let the generation before the current one go for good: nobody may fall back on it from now on."""
        self._commits.check_usable()
        if self._commits.manifest.before is not None:
            self._publish(replace(self._commits.manifest, before=None))

    def ensure_whole(self, pool: BufferPool, *, progress: Callable[[int], None], notice: Callable[[str], None]) -> None:
        """Check every byte of the current generation before training resumes from it.

        If it is damaged, and the generation before it is whole because no step has begun to write since, that one
        becomes the current one, with a notice. Otherwise raises IntegrityFailure with block and field. `progress` is
        called with the bytes of each chunk.
        """
        self._commits.check_usable()
        assert self._phase is _Phase.READY
        try:
            self._current.check_all(pool, progress=progress)
        except IntegrityFailure as failure:
            before = self._commits.manifest.before
            if before is None:
                raise
            try:
                self._generation(before).check_all(pool, progress=progress)
            except IntegrityFailure:
                raise failure from None
            notice(
                f"step {self.progress.step} is damaged ({failure.message}); resuming from step {before.progress.step}"
            )
            self._go_to(before)

    def stop_commits(self) -> None:
        """Let every later commit fail, even one that another thread has begun to prepare. From any thread."""
        self._commits.stop()

    def close(self) -> None:
        """Wait for transfers in flight, then unlock the files. Commits nothing. Idempotent."""
        if self._phase is not _Phase.CLOSED:
            self._phase = _Phase.CLOSED
            if self._reader is not None:
                self._reader.close()
            self._files.settle()
            self._lock.close()

    def _used_slots(self) -> set[int]:
        """Slots of the current, the pinned and the held generations."""
        manifest = self._commits.manifest
        pinned = {entry.slot for entry in manifest.pins}
        return {manifest.slot, *pinned, *(generation.slot for generation in self._held)}

    def _free_slots(self) -> set[int]:
        return set(range(self.num_slots)) - self._used_slots()

    def _check_slot_left(self) -> None:
        """Raise EnvironmentFailure unless steps can be written while the current generation keeps its slot."""
        num_used = len(self._used_slots())
        if num_used + 2 > self.num_slots:
            raise EnvironmentFailure(
                f"step {self.progress.step} cannot be saved: the store has {self.num_slots} slots, training needs 2, "
                f"and other steps use {num_used - 1}",
                "lower save_total_limit, or start over with a larger storage.keep_generations",
            )

    def _generation(self, entry: GenerationEntry) -> Generation:
        return Generation(self._regions, entry)

    def _new_shadow(self, slot: int, *, step: int) -> Shadow:
        entry = replace(self._commits.manifest.current, slot=slot)
        return Shadow(self._regions, entry, step=step, is_import=self.is_new)

    def _stage(self, manifest: Manifest) -> Staged:
        self._shadow.check_waited()
        failpoint("commit.written")
        root, frozen_root = self._shadow.write_tables()
        self._commits.sync(manifest.progress.step)
        failpoint("commit.synced")
        self._phase = _Phase.STAGED
        written = self._shadow.generation
        frozen_checksum = frozen_root or manifest.frozen_checksum
        return Staged(
            replace(manifest, slot=written.slot, root_checksum=root, frozen_checksum=frozen_checksum), written
        )

    def _pinned_entry(self, step: int) -> GenerationEntry:
        for entry in self._commits.manifest.pins:
            if entry.progress.step == step:
                return entry
        steps = ", ".join(map(str, self.pinned_steps)) or "none"
        raise BadInput(f"step {step} is not saved in the store; saved steps: {steps}")

    def _go_to(self, entry: GenerationEntry) -> None:
        """Make an earlier generation the current one, and unpin later ones."""
        manifest = self._commits.manifest.at(entry)
        pins = tuple(pinned for pinned in manifest.pins if pinned.progress.step <= entry.progress.step)
        self._publish(replace(manifest, pins=pins, before=None), self._generation(entry))

    def _publish(self, manifest: Manifest, generation: Generation | None = None) -> None:
        """Commit the manifest. `generation` is then the current one; None: the one that was current stays so."""
        self._commits.publish(manifest)
        self._current = (generation or self._current).with_entry(self._commits.manifest.current)


def _write_list(base_files: BaseFiles, files: StripedFiles, frozen: Region) -> None:
    with BufferPool(None) as pool, pool.lease(frozen.list_bytes, "the list of the base model's files") as lease:
        lease.memory[:] = base_files.content
        files.write(frozen.list_address, lease.memory).wait()


def _read_list(files: StripedFiles, frozen: Region) -> BaseFiles:
    with BufferPool(None) as pool, pool.lease(frozen.list_bytes, "the list of the base model's files") as lease:
        files.read(frozen.list_address, lease.memory).wait()
        return BaseFiles.from_content(bytes(lease.memory))
