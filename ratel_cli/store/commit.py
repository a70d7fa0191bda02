"""The commits of a store: the manifest that counts, and how the next one takes its place.

Owned by `store`, which decides what a manifest says. Syncs and manifests go through a `Barrier`, so that tests can
record them or let them fail.

Invariants: in memory a manifest counts once it is durable; after a failed sync or write nothing more is
committed, since the kernel has dropped what it could not write, and a second try would lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.barrier import Barrier, failpoint
from ratel_cli.store.geometry import NUM_MANIFESTS
from ratel_cli.store.lock import StoreLock
from ratel_cli.store.manifest import Manifest, encode_manifest, page_sha256


class Commits:
    """The line of manifests of one store. For one thread at a time."""

    def __init__(self, lock: StoreLock, manifest: Manifest, previous_sha256: bytes, barrier: Barrier) -> None:
        """`previous_sha256` is that of the manifest's page."""
        self._lock = lock
        self._manifest = manifest
        self._previous_sha256 = previous_sha256
        self._barrier = barrier
        self._has_failed = False

    @property
    def manifest(self) -> Manifest:
        """The one that counts."""
        return self._manifest

    def check_usable(self) -> None:
        """Raise IntegrityFailure if an earlier commit failed."""
        if self._has_failed:
            raise IntegrityFailure(
                "the store takes no more commits: an earlier one failed", "check the drive, then resume"
            )

    def refuse_more(self) -> None:
        """Commit nothing from now on."""
        self._has_failed = True

    def sync(self, step: int) -> None:
        """What was written to the files is durable on return."""
        for fd, path in zip(self._lock.fds, self._lock.paths, strict=True):
            try:
                self._barrier.sync(fd)
            except OSError as exc:
                self._fail(f"{path}: step {step} could not be made durable: {exc.strerror}", exc)

    def publish(self, manifest: Manifest) -> None:
        """Write it as the next manifest, to the place of the one before the current."""
        self.check_usable()
        generation = self._manifest.generation + 1
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
        self._manifest, self._previous_sha256 = manifest, page_sha256(content)

    def _fail(self, message: str, cause: OSError) -> NoReturn:
        self._has_failed = True
        raise IntegrityFailure(f"{message}; nothing more is committed", "check the drive, then resume") from cause
