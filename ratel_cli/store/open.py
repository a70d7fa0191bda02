"""Opens a store's files: locks them, identifies them, and checks them before anything in them is used.

Each way in which a store can be the wrong one, or incomplete, ends here with an error that names what is wrong. A
manifest counts on the evidence of its own page. Whether its slot holds the bytes that it refers to is checked by
`Store.ensure_whole` and by every read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ratel_cli.errors import BadInput, IntegrityFailure, RatelError
from ratel_cli.io.files import use_direct_io
from ratel_cli.store.headers import check_first, check_membership, check_ours, read_header
from ratel_cli.store.layout import NUM_MANIFESTS, RankSlice
from ratel_cli.store.lock import DATA_FILE_NAME, StoreLock
from ratel_cli.store.manifest import Manifest, StoreIdentity, choose_manifest

START_OVER = "start over with --resume no"
REPLACE_STORE = (
    "set another output_dir or storage.paths for a new run, or replace that store with --resume no --overwrite-store"
)


def stored_identity(directories: Sequence[Path]) -> StoreIdentity | None:
    """What the store in these directories belongs to; None if there is none, or its manifests cannot be read.

    It takes no lock: a run that is training does not change the identity.
    """
    manifest = _stored_manifest(directories)
    return None if manifest is None else manifest.identity


def stored_step(directories: Sequence[Path]) -> int | None:
    """The step of the store in these directories, as `stored_identity` finds it."""
    manifest = _stored_manifest(directories)
    return None if manifest is None else manifest.progress.step


def stored_rank_slice(directories: Sequence[Path]) -> RankSlice | None:
    """Which part of each block the store in these directories has, as `stored_identity` finds it."""
    manifest = _stored_manifest(directories)
    return None if manifest is None else manifest.geometry.rank_slice


def _stored_manifest(directories: Sequence[Path]) -> Manifest | None:
    try:
        return choose_manifest(read_header(directories[0] / DATA_FILE_NAME).manifest_pages)[0]
    except RatelError:
        return None


class StoreMismatch(BadInput):
    """The store belongs to a run with another model, other settings, other data or another seed."""

    def __init__(self, message: str, hint: str, *, others: tuple[BadInput, ...], fields: tuple[str, ...]) -> None:
        super().__init__(message, hint, others=others)
        self.fields = fields
        """The fields of StoreIdentity that differ."""


def open_files(
    directories: Sequence[Path],
    *,
    identity: StoreIdentity | None,
    notice: Callable[[str], None],
    lock_wait_seconds: float,
    read_only: bool,
    shared: bool,
) -> tuple[StoreLock, Manifest, bytes]:
    """The locked files, the manifest that counts, and its page. In phases:

    1 lock the files
    2 choose the manifest
    3 check that these are the manifest's files, in its order
    4 check that the store belongs to this run (`identity` None: to any run)
    5 check that the files have their full size and no step was overwriting them
    """
    lock = StoreLock(directories, create=False, wait_seconds=lock_wait_seconds, read_only=read_only, shared=shared)
    try:
        headers = [read_header(path) for path in lock.paths]
        check_first(headers)
        check_ours(headers)
        manifest, is_damaged = choose_manifest(headers[0].manifest_pages)
        if manifest is None:
            raise BadInput(
                f"the store in {directories[0]} is incomplete: its import or restore never finished",
                "if it was being restored, run `ratel restore CONFIG` again; "
                "if not, run the same command without --resume: it makes the store again",
            )
        check_membership(headers, manifest)
        if identity is not None:
            _check_identity(manifest.identity, identity, directories[0], notice)
        _check_state(manifest, lock)
        if is_damaged:
            notice(
                "one of the store's two manifests is damaged, as after a power cut during a commit; "
                f"resuming from step {manifest.progress.step}"
            )
        use_direct_io(lock.fds, lock.paths, notice)
    except BaseException:
        lock.close()
        raise
    return lock, manifest, headers[0].manifest_pages[manifest.generation % NUM_MANIFESTS]


def _check_identity(
    stored: StoreIdentity, wanted: StoreIdentity, directory: Path, notice: Callable[[str], None]
) -> None:
    pairs: tuple[tuple[str, str, str | int, str | int], ...] = (
        ("the base model", "model_hash", stored.model_hash, wanted.model_hash),
        ("the settings", "config_hash", stored.config_hash, wanted.config_hash),
        ("the training data", "data_hash", stored.data_hash, wanted.data_hash),
        ("the seed", "seed", stored.seed, wanted.seed),
    )
    hint = REPLACE_STORE
    wrong = {
        name: f"{what} changed since the store in {directory} was made: {name} was {old}, is now {new}"
        for what, name, old, new in pairs
        if old != new
    }
    if wrong:
        first, *others = wrong.values()
        raise StoreMismatch(
            first, hint, others=tuple(BadInput(message, hint) for message in others), fields=tuple(wrong)
        )
    if stored.software != wanted.software:
        notice(f"the software was {stored.software}, is now {wanted.software}: resuming is valid, but not bit-exact")


def _check_state(manifest: Manifest, lock: StoreLock) -> None:
    for fd, path, num_bytes in zip(lock.fds, lock.paths, manifest.geometry.file_bytes(), strict=True):
        size_bytes = os.fstat(fd).st_size
        if size_bytes < num_bytes:
            raise IntegrityFailure(f"{path} is truncated: it has {size_bytes} of {num_bytes} bytes", START_OVER)
    if manifest.step_in_place is not None:
        raise IntegrityFailure(
            f"step {manifest.step_in_place} was being written in place (storage.durability: none) when the run ended: "
            f"the state after step {manifest.progress.step} is lost",
            f"{START_OVER}; to survive crashes, set storage.durability: step",
        )
