"""Ranks that are threads of one process, of which any can end at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.errors import EnvironmentFailure

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0


class Killed(BaseException):
    """Stands for the end of a process."""


class _Meeting:
    """What the threads of one channel share."""

    def __init__(self, size: int, ended: threading.Event) -> None:
        self.boxes = {(one, other): SimpleQueue[bytes]() for one in range(size) for other in range(size)}
        self.ended = ended


class ThreadChannel:
    """See Channel."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        others = [rank for rank in range(len(send)) if rank != self._rank]
        for rank in others:
            if len(send[rank]):
                self._meeting.boxes[self._rank, rank].put(bytes(send[rank]))
        for rank in others:
            if len(receive[rank]):
                receive[rank][:] = self._next(rank)

    def _next(self, rank: int) -> bytes:
        box = self._meeting.boxes[rank, self._rank]
        for _ in range(int(_PATIENCE_SECONDS / _POLL_SECONDS)):
            try:
                return box.get(timeout=_POLL_SECONDS)
            except Empty:
                if self._meeting.ended.is_set() and box.empty():
                    break
        raise EnvironmentFailure(f"rank {rank} does not answer")


def together(size: int, task: Callable[[Ranks], Any]) -> list[Any]:
    """What `task` returns in each rank, or raises: the exception itself. Where one ends with an exception, the others
    get no more answers."""
    ended = threading.Event()
    meetings = [_Meeting(size, ended) for _ in range(4)]
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        control, weights, gradients, patient = (ThreadChannel(meeting, rank) for meeting in meetings)
        ranks = Ranks(rank=rank, size=size, control=control, weights=weights, gradients=gradients, patient=patient)
        try:
            found[rank] = task(ALONE if size == 1 else ranks)
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            ended.set()
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
