"""The I/O engine that works everywhere: preadv and pwritev on threads, driven by asyncio and aiofiles.

`queue.open_queue` uses it where io_uring is refused or threads are asked for. One lane is one event
loop on a named thread; it holds the requests to come, and hands up to ``depth`` of them to threads
of its own, which block in the kernel without the GIL. Everything but ``submit`` and ``close`` runs
on the loop, so nothing there needs a lock.

Phases of a request: 1 submitted, from any thread; 2 waiting in the loop; 3 in the kernel, again for
the rest after a short transfer; 4 counted; 5 its ticket told.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic
from typing import ParamSpec, TypeVar

from aiofiles.os import wrap

from ratel_cli.errors import RatelError
from ratel_cli.io.requests import Direction, Request, closed_error, lane_error, timeout_error

# (direction, file descriptor, memory, offset) -> bytes moved; raises OSError. Called on many threads at once.
Transfer = Callable[[Direction, int, memoryview, int], int]

# How long close() waits for a thread whose transfer timed out, before it leaves that thread behind.
_GRACE_SECONDS = 0.5

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def transfer_with_kernel(direction: Direction, fd: int, memory: memoryview, offset: int) -> int:
    """One preadv or pwritev."""
    return os.preadv(fd, [memory], offset) if direction == "read" else os.pwritev(fd, [memory], offset)


class ThreadedLane:
    """A lane (requests.py) on an event loop and threads. Tests inject ``transfer``."""

    def __init__(
        self, direction: Direction, *, depth: int, timeout_seconds: float, transfer: Transfer = transfer_with_kernel
    ) -> None:
        assert depth > 0 and timeout_seconds > 0
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._transfer = wrap(transfer)
        self._moved_bytes = 0
        self._waiting: deque[Request] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._lock = Lock()
        self._closed = False
        self._threads = _DaemonThreads(f"ratel-io-{direction}", depth)
        self._loop = asyncio.new_event_loop()
        self._loop_thread = Thread(target=self._loop.run_forever, name=f"ratel-io-{direction}-loop", daemon=True)
        self._loop_thread.start()

    @property
    def moved_bytes(self) -> int:
        return self._moved_bytes

    def submit(self, requests: Sequence[Request]) -> None:
        if self._broken is not None:
            raise lane_error(self._broken)
        with self._lock:  # against close(): a loop that has stopped would never look at them
            assert not self._closed, "a transfer was submitted to a closed queue"
            self._loop.call_soon_threadsafe(self._accept, requests)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        self._threads.shutdown()

    def _accept(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)
        if self._broken is not None:
            self._fail_waiting(lane_error(self._broken))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._in_flight) < self._depth:
            task = self._loop.create_task(self._move(self._waiting.popleft()))
            self._in_flight.add(task)
            task.add_done_callback(self._refill)

    def _refill(self, ended: asyncio.Task[None]) -> None:
        self._in_flight.discard(ended)
        self._fill()

    async def _move(self, request: Request) -> None:
        error: RatelError | None = None
        request.ticket.begin_part()
        try:
            while request.memory and error is None:
                result = await self._call_kernel(request)
                if result is None:
                    error = timeout_error(request, self._timeout_seconds)
                    self._break(error)
                else:  # counted here and not across the await, which would lose the bytes of others
                    self._moved_bytes += request.advance(result)
        except RatelError as failure:
            error = failure
        except BaseException as cause:  # noqa: BLE001 - every ticket must end, whatever failed
            self._break(cause)
            error = lane_error(cause)
        request.finish(error)

    async def _call_kernel(self, request: Request) -> int | OSError | None:
        """What one call moved, or why not; None when it does not come back."""
        call = asyncio.ensure_future(
            self._transfer(request.direction, request.fd, request.memory, request.offset, executor=self._threads)
        )
        # Not wait_for: its TimeoutError is an OSError, like one of the device.
        finished, _ = await asyncio.wait((call,), timeout=self._timeout_seconds)
        if not finished:
            call.cancel()  # the thread stays in the kernel, and keeps its memory
            return None
        try:
            return call.result()
        except OSError as exc:
            return exc

    def _break(self, cause: BaseException) -> None:
        self._broken = self._broken or cause
        self._fail_waiting(lane_error(self._broken))

    def _fail_waiting(self, error: RatelError) -> None:
        while self._waiting:
            self._waiting.popleft().finish(error)

    async def _drain(self) -> None:
        self._fail_waiting(closed_error())
        while self._in_flight:
            await asyncio.wait(self._in_flight)


class _DaemonThreads(Executor):
    """Like ThreadPoolExecutor, but a thread stuck in the kernel holds up neither close nor exit."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(
        self, function: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        future: Future[_Result] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - the future carries it to the loop
                future.set_exception(error)

        self._work.put(work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        for _ in self._threads:
            self._work.put(None)
        give_up = monotonic() + _GRACE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up - monotonic()) if wait else 0.0)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it refers to the memory, and the next may be long in coming
