"""Copies generations to a store on another device, overlapped with training.

`after_commit` is called after every commit. A snapshot has these phases:

    1. hold     a generation that is due, so that its slot is not overwritten          the loop's thread
    2. copy     it at a limited rate, with a check of every part; commit the copy      a thread of its own
    3. release  the generation after a later commit, and report an error               the loop's thread

Invariants: training waits for a copy only at the end of the run. The second store always holds one complete generation,
the last one that was copied; of several ranks, all hold one of the same step. A drive that fails ends the snapshots,
never the run; an error that is no RatelError is a fault of Ratel's own, and ends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from time import perf_counter

from ratel_cli.closing import Closing
from ratel_cli.errors import EnvironmentFailure, RatelError
from ratel_cli.io.buffers import BufferPool
from ratel_cli.store.fill import COPY_BYTES, Copied, fill
from ratel_cli.store.generation import Generation
from ratel_cli.store.store import Store

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 10.0
"""How long `close` waits for a copy. Transfers end in time, but a device may hang when it makes them durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllRanks:
    """How the snapshots of several ranks keep to the same steps. Each is called in all of them."""

    of_all: Callable[[bool, bool], tuple[bool, bool]] = lambda is_busy, is_over: (is_busy, is_over)
    """Called at each step that is due, with whether this rank is copying and whether its snapshots are over; returns
    whether any rank's are."""
    meet: Callable[[], None] = lambda: None
    """Called when copies have been waited for; returns when all have called it."""


ONE_RANK = AllRanks()


class Snapshots(Closing):
    """The snapshots of a run. All methods are for the loop's thread. It closes neither store."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        every: int,
        bytes_per_second: float,
        notice: Callable[[str], None],
        warn: Callable[[str], None],
        after_copy: Callable[[int], None] = lambda step: None,
        ranks: AllRanks = ONE_RANK,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        """`target` holds an earlier snapshot of this run, or is new.

        Every N-th step is copied, N being `every`, at `bytes_per_second` at most. `after_copy` is called with each step
        whose copy is complete.
        """
        assert every > 0 and bytes_per_second > 0
        self._source = source
        self._target = target
        self._every = every
        self._bytes_per_second = bytes_per_second
        self._notice = notice
        self._warn = warn
        self._after_copy = after_copy
        self._ranks = ranks
        self._patience_seconds = patience_seconds
        self._pool = BufferPool(COPY_BYTES)
        self._stop = Event()
        self._copy: _Copy | None = None
        self._is_over = False
        """A copy failed, and there will be no further one."""

    def after_commit(self) -> None:
        """Begin to copy the current generation if it is due and no other copy is running. Never waits."""
        self._end_copy()
        step = self._source.progress.step
        if not step or step % self._every:
            return
        # While any rank copies, the generations before that one are what all have in common.
        is_busy, is_over = self._ranks.of_all(self._copy is not None, self._is_over)
        if is_over and not self._is_over:
            self._is_over = True
            self._warn("another rank cannot copy to its snapshot; training continues without snapshots")
        if self._is_over or (self._copy is not None and self._copy.generation.progress.step == step):
            return
        if is_busy:
            self._notice(
                "copying a snapshot takes longer than the steps between two snapshots (storage.snapshot.every); "
                "some snapshots are skipped"
            )
        elif self._target.progress.step != step:
            self._begin_copy(step)

    def finish(self, check_stop: Callable[[], None]) -> None:
        """Wait for the copy that is running, at full speed from now on, and make the last one if it is due.

        `check_stop` is called while it waits; what it raises ends the waiting.
        """
        self._bytes_per_second = math.inf
        self._wait(check_stop)
        self._ranks.meet()
        self.after_commit()
        self._wait(check_stop)
        self._ranks.meet()

    def close(self) -> None:
        """Abandon the copy that is running; the snapshot before it stays. Idempotent."""
        self._stop.set()
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.join(self._patience_seconds)
            if copy.is_alive():  # its generation and its buffers must stay
                self._target.stop_commits()
                self._warn("the device of the snapshot does not respond; the last complete snapshot remains valid")
                return
            self._source.release(copy.generation)
        self._pool.close()

    def _wait(self, check_stop: Callable[[], None]) -> None:
        while self._copy is not None:
            check_stop()
            self._copy.join(_POLL_SECONDS)
            self._end_copy()

    def _begin_copy(self, step: int) -> None:
        """Phase 1."""
        try:
            generation = self._source.hold()
        except EnvironmentFailure as failure:  # more steps are saved than the config asks for
            self._warn(f"no snapshot of step {step}: {failure.message}")
            return
        self._copy = _Copy(generation, self._target, self._pool, self._pace(), self._stop)

    def _end_copy(self) -> None:
        """Phase 3, if the copy has ended."""
        copy = self._copy
        if copy is None or copy.is_alive():
            return
        self._copy = None
        self._source.release(copy.generation)
        if copy.error is None:
            self._after_copy(copy.generation.progress.step)
            return
        if not isinstance(copy.error, RatelError):
            raise copy.error
        self._is_over = True
        self._warn(
            f"step {copy.generation.progress.step} could not be copied to the snapshot: {copy.error.message}; "
            "training continues without snapshots"
        )

    def _pace(self) -> Callable[[int], float]:
        """Make the pace of one copy: a function from the bytes of a part that was copied to the seconds to wait before
        the next."""
        start, copied_bytes = perf_counter(), 0

        def seconds(num_bytes: int) -> float:
            nonlocal copied_bytes
            copied_bytes += num_bytes
            return start + copied_bytes / self._bytes_per_second - perf_counter()

        return seconds


class _Abandoned(Exception):
    """The run ends before its copy is complete. Not a failure."""


class _Copy(Thread):
    """The copy of one generation, in a thread of its own."""

    def __init__(
        self,
        generation: Generation,
        target: Store,
        pool: BufferPool,
        pace: Callable[[int], float],
        stop: Event,
    ) -> None:
        super().__init__(name="ratel-snapshot", daemon=True)
        self.generation = generation
        self.error: BaseException | None = None
        """Why it failed; valid when the thread has ended."""
        self._snapshot = target
        self._pool = pool
        self._pace = pace
        self._abandon = stop
        self.start()

    def run(self) -> None:
        """Phase 2."""
        try:
            self._snapshot.forget_before()  # its slot is written now
            fill(self._snapshot, Copied(self.generation), self._pool, progress=self._wait)
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001  the loop's thread reports it
            self.error = error

    def _wait(self, num_bytes: int) -> None:
        if self._abandon.wait(max(0.0, self._pace(num_bytes))):
            raise _Abandoned
