"""Makes a store's files: checks, locks and reserves them, erases what was there, and writes every byte once.

Whatever is in the directories stays as it is until every check has passed and every byte is reserved. From the first
byte that is changed, the store counts as incomplete until an import is committed, and the next creation replaces it
without asking.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from ratel_cli.errors import BadInput, IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import SpaceNeed, check_space, make_directory, reserve
from ratel_cli.io.striped_files import StripedFiles
from ratel_cli.io.tickets import in_flight
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.barrier import Barrier, failpoint
from ratel_cli.store.headers import Header, Identification, erase_headers, existing_store, read_header
from ratel_cli.store.layout import IDENTIFICATION_OFFSET
from ratel_cli.store.lock import DATA_FILE_NAME, StoreLock

_FILL_BYTES = 32 << 20
_BLOCK_UNIT_BYTES = 512
"""The unit of st_blocks, whatever the file system."""


def make_files(
    directories: Sequence[Path],
    *,
    file_bytes: Sequence[int],
    store_id: bytes,
    overwrite: bool,
    barrier: Barrier,
    lock_wait_seconds: float,
) -> StoreLock:
    """Make files that are locked, reserved and identified, without a valid manifest. In phases:

    1 check what is there, and the space; nothing is created yet
    2 create the directories, lock the files, check again what is there
    3 reserve every file: the last phase that may fail for an ordinary reason
    4 erase the headers of what was there: from here on the store is incomplete
    5 cut to size, identify (the first file first), make the directory entries durable

    Raises BadInput if there is a store and `overwrite` is False, EnvironmentFailure if space or permission is missing,
    and IntegrityFailure if a write fails.
    """
    paths = [directory / DATA_FILE_NAME for directory in directories]
    begun = [path.parent for path in paths if path.exists()]
    if begun and not overwrite:  # by a run that began in the same moment: then this raises as for a later one
        StoreLock(begun, create=False, wait_seconds=lock_wait_seconds).close()
    _check_replaceable([read_header(path) for path in paths], overwrite=overwrite)
    check_space(
        [
            SpaceNeed(
                directory=path.parent,
                num_bytes=num_bytes,
                held_bytes=path.stat().st_blocks * _BLOCK_UNIT_BYTES if path.is_file() else 0,
            )
            for path, num_bytes in zip(paths, file_bytes, strict=True)
        ]
    )
    for directory in directories:
        make_directory(directory)
    lock = StoreLock(directories, create=True, wait_seconds=lock_wait_seconds)
    try:
        headers = [read_header(path) for path in paths]
        _check_replaceable(headers, overwrite=overwrite)
        _reserve_all(lock, file_bytes)
        failpoint("create.reserved")
        try:
            with BufferPool(None) as pool, pool.lease(PAGE_BYTES, "a page of the header") as page:
                _identify(lock, headers, file_bytes, store_id, page.memory, barrier)
            for directory in directories:
                _sync_directory(directory, barrier)
        except OSError as exc:
            raise IntegrityFailure(
                f"the store's files could not be written: {exc.strerror}", "check the drive"
            ) from exc
        failpoint("create.identified")
    except BaseException:
        lock.close()
        raise
    return lock


def fill_with_zeros(files: StripedFiles, num_bytes: int, progress: Callable[[int], None]) -> None:
    """Write every byte once, so that no later write has to allocate. `progress` is called with the bytes of each part.

    Two parts are in flight at a time.
    """
    with BufferPool(None) as pool, pool.lease(min(_FILL_BYTES, num_bytes), "zeros") as zeros:
        parts = ((offset, zeros.memory[: num_bytes - offset]) for offset in range(0, num_bytes, _FILL_BYTES))
        writes = ((len(part), files.write(offset, part)) for offset, part in parts)
        with closing(in_flight(writes, at_most=2)) as finished:
            for part_bytes in finished:
                progress(part_bytes)
    failpoint("create.filled")


def _identify(
    lock: StoreLock,
    headers: Sequence[Header],
    file_bytes: Sequence[int],
    store_id: bytes,
    page: memoryview,
    barrier: Barrier,
) -> None:
    erase_headers(lock.fds, headers, page, barrier)
    failpoint("create.erased")
    for index, (fd, num_bytes) in enumerate(zip(lock.fds, file_bytes, strict=True)):
        os.ftruncate(fd, num_bytes)
        page[:] = Identification(store_id=store_id, file_index=index, num_files=len(lock.fds)).page()
        barrier.write_through(fd, IDENTIFICATION_OFFSET, page)


def _check_replaceable(headers: Sequence[Header], *, overwrite: bool) -> None:
    reason = existing_store(headers)
    if reason is not None and not overwrite:
        raise BadInput(
            reason,
            "resume it with --resume auto, replace it with --resume no, or set storage.paths to other directories",
        )


def _reserve_all(lock: StoreLock, file_bytes: Sequence[int]) -> None:
    sizes_before = [os.fstat(fd).st_size for fd in lock.fds]
    try:
        for fd, path, num_bytes in zip(lock.fds, lock.paths, file_bytes, strict=True):
            reserve(fd, path, num_bytes)
    except BaseException:
        for fd, size_before in zip(lock.fds, sizes_before, strict=True):
            os.ftruncate(fd, size_before)
        raise


def _sync_directory(directory: Path, barrier: Barrier) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        barrier.sync(fd)
    finally:
        os.close(fd)
