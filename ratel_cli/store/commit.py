"""Commits: how the next manifest of a store takes the place of the one before.

The store decides what a manifest says. All syncs and manifest writes go through a `Barrier`, so that tests can record
them or let them fail.

Invariants: a manifest counts in memory only once it is durable; after a failed sync or manifest write nothing more is
committed, because the kernel has dropped what it could not write, and a second try would report a false success.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.barrier import Barrier, failpoint
from ratel_cli.store.layout import NUM_MANIFESTS
from ratel_cli.store.lock import StoreLock
from ratel_cli.store.manifest import Manifest, encode_manifest, page_sha256


class Commits:
    """The sequence of manifests of one open store. For one thread at a time."""

    def __init__(self, lock: StoreLock, manifest: Manifest, previous_sha256: bytes, barrier: Barrier) -> None:
        """`manifest` is the one that counts, and `previous_sha256` the SHA-256 of its page."""
        self.manifest = manifest
        """The manifest that counts."""
        self._lock = lock
        self._previous_sha256 = previous_sha256
        self._barrier = barrier
        self._is_stopped = False

    def check_usable(self) -> None:
        """Raise IntegrityFailure if an earlier commit failed or `stop` was called."""
        if self._is_stopped:
            raise IntegrityFailure(
                "the store accepts no more commits: an earlier commit failed", "check the drive, then resume"
            )

    def stop(self) -> None:
        """Let every later commit fail."""
        self._is_stopped = True

    def sync(self, step: int) -> None:
        """Make durable what was written to the files. Raises IntegrityFailure, and stops all commits, if it fails."""
        for fd, path in zip(self._lock.fds, self._lock.paths, strict=True):
            try:
                self._barrier.sync(fd)
            except OSError as exc:
                self._fail(f"{path}: step {step} could not be made durable: {exc.strerror}", exc)

    def publish(self, manifest: Manifest) -> None:
        """Write `manifest` to the page that does not hold the current one. It counts when this returns.

        Generation number and hash of the previous page are filled in. Raises IntegrityFailure, and stops all commits,
        if the write fails.
        """
        self.check_usable()
        generation = self.manifest.generation + 1
        manifest = replace(manifest, generation=generation, previous_sha256=self._previous_sha256)
        content = encode_manifest(manifest)
        with BufferPool(None) as pool, pool.lease(PAGE_BYTES, "the manifest") as page:
            page.memory[:] = content
            failpoint("manifest.ready")
            try:
                self._barrier.write_through(self._lock.fds[0], generation % NUM_MANIFESTS * PAGE_BYTES, page.memory)
            except OSError as exc:
                self._fail(f"{self._lock.paths[0]}: the manifest could not be written: {exc.strerror}", exc)
        failpoint("manifest.published")
        self.manifest, self._previous_sha256 = manifest, page_sha256(content)

    def _fail(self, message: str, cause: OSError) -> NoReturn:
        self._is_stopped = True
        raise IntegrityFailure(f"{message}; nothing more is committed", "check the drive, then resume") from cause
