"""Copies generations to a store on another device, beneath training.

`run.train` hands `after_commit` to `training.loop`, which calls it after every commit. In phases:

    1. a commit that is due: hold its generation, so that its slot is not written again     the loop's thread
    2. copy it, each part checked as it is read, no faster than it was told; commit it      a thread of its own
    3. after the next commit: let the generation go, tell what went wrong                   the loop's thread

Invariants: training waits for a copy at its end alone; the second store holds a whole generation at every moment,
the last one that was copied; a device that fails costs the snapshots, never the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import Event, Thread
from time import perf_counter
from types import TracebackType
from typing import Self

from ratel_cli.errors import EnvironmentFailure, RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.store.copy import COPY_BYTES, copy_generation
from ratel_cli.store.generation import Generation
from ratel_cli.store.store import Store

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 10.0
"""For a copy that was told to stop. Transfers end in time, but a device may hang in making them durable."""


class Snapshots:
    """Use as a context manager; all methods are for the loop's thread. The stores are borrowed."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        is_new: bool,
        every: int,
        bytes_per_second: float,
        notice: Callable[[str], None],
        warn: Callable[[str], None],
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """`target` holds an earlier snapshot of this run, or `is_new`, nothing was committed to it yet."""
        assert every > 0 and bytes_per_second > 0
        self._source = source
        self._target = target
        self._is_new = is_new
        self._every = every
        self._bytes_per_second = bytes_per_second
        self._notice = notice
        self._warn = warn
        self._patience_seconds = patience_seconds
        self._pool = BufferPool(COPY_BYTES)
        self._stop = Event()
        self._copy: _Copy | None = None
        self._is_over = False
        """A copy failed, and there will be no more."""

    def after_commit(self) -> None:
        """Begin to copy the current generation if it is due and no other copy is under way. Never waits."""
        self._end_copy()
        step = self._source.progress.step
        if self._is_over or not step or step % self._every:
            return
        if self._copy is not None and self._copy.generation.progress.step == step:
            return
        if self._copy is not None:
            self._notice(
                "a snapshot takes longer than the steps between two of them (storage.snapshot.every); "
                "steps that are due meanwhile are left out"
            )
        elif self._target.progress.step != step:
            self._begin_copy(step)

    def finish(self, check_stop: Callable[[], None]) -> None:
        """Wait for the copy that is under way, which need not be slow any more, and make the one that is due after it.

        `check_stop` may raise.
        """
        self._bytes_per_second = math.inf
        self._wait(check_stop)
        self.after_commit()
        self._wait(check_stop)

    def close(self) -> None:
        """Give up the copy that is under way; the snapshot before it stays. Idempotent."""
        self._stop.set()
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.join(self._patience_seconds)
            if copy.is_alive:  # what it uses stays with it
                self._target.refuse_more()
                self._warn("the snapshot's device does not answer; the snapshot before it stays")
                return
            self._source.release(copy.generation)
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, check_stop: Callable[[], None]) -> None:
        while self._copy is not None:
            check_stop()
            self._copy.join(_POLL_SECONDS)
            self._end_copy()

    def _begin_copy(self, step: int) -> None:
        """Phase 1."""
        try:
            generation = self._source.hold()
        except EnvironmentFailure as failure:  # more generations are kept than the config asks for
            self._warn(f"there is no snapshot of step {step}: {failure.message}")
            return
        self._copy = _Copy(generation, self._target, self._pool, self._pace(), self._stop, is_first=self._is_new)

    def _end_copy(self) -> None:
        """Phase 3, if the copy has ended."""
        copy = self._copy
        if copy is None or copy.is_alive:
            return
        self._copy = None
        self._source.release(copy.generation)
        if copy.error is None:
            self._is_new = False
            return
        if not isinstance(copy.error, RatelError):
            raise copy.error
        self._is_over = True
        self._warn(
            f"step {copy.generation.progress.step} could not be copied to the snapshot: {copy.error.message}; "
            "training goes on without snapshots"
        )

    def _pace(self) -> Callable[[int], float]:
        """For one copy: given the bytes of a part that was copied, the seconds to wait before the next."""
        start, copied_bytes = perf_counter(), 0

        def seconds(num_bytes: int) -> float:
            nonlocal copied_bytes
            copied_bytes += num_bytes
            return start + copied_bytes / self._bytes_per_second - perf_counter()

        return seconds


class _GivenUp(Exception):
    """The copy was told to stop: no failure, the run ends."""


class _Copy:
    """One generation on its way, in a thread of its own."""

    def __init__(
        self,
        generation: Generation,
        target: Store,
        pool: BufferPool,
        pace: Callable[[int], float],
        stop: Event,
        *,
        is_first: bool,
    ) -> None:
        self.generation = generation
        self.error: BaseException | None = None
        """Why it failed; to be looked at when it has ended."""
        self._target = target
        self._pool = pool
        self._pace = pace
        self._stop = stop
        self._is_first = is_first
        self._thread = Thread(target=self._run, name="ratel-snapshot", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_seconds: float | None) -> None:
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._carry_out()
        except _GivenUp:
            return
        except BaseException as error:  # noqa: BLE001  the loop's thread looks at it
            self.error = error

    def _carry_out(self) -> None:
        """Phase 2."""
        if not self._is_first:
            self._target.begin_step()
        copy_generation(self.generation, self._target, self._pool, progress=self._wait)
        commit = self._target.commit_import if self._is_first else self._target.commit
        commit(self.generation.progress)

    def _wait(self, num_bytes: int) -> None:
        if self._stop.wait(max(0.0, self._pace(num_bytes))):
            raise _GivenUp
