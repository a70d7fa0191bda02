"""The ranks that torchrun has started: processes that meet through torch.distributed.

Bytes go from host memory to host memory, by gloo: what ranks send lies there, as the drives and the update have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, Queue
from threading import Thread
from time import sleep

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ratel_cli.engine.ranks.launched import is_launched, restart_count
from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.errors import EnvironmentFailure, Interrupted, RankLost, RatelError, first_line

_REPORTER = "who reports"
_LINGER_SECONDS = 2.0
"""For so long a rank waits for torchrun's store; and it keeps its connections when another has ended, so that all see
which one it was, and that one ends before it."""
_PATIENCE = timedelta(days=7)


class ProcessChannel:
    """A channel between the processes of a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        """See Channel."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        begun, failure = list[tuple[int, dist.Work]](), None
        for begin, memories in ((self._receive, receive), (self._send, send)):
            for rank in others:
                if failure is None and len(memories[rank]):
                    try:
                        begun.append((rank, begin(memories[rank], rank)))
                    except RuntimeError as error:
                        failure = failure_of(rank, error)
        for rank, work in begun:
            try:
                work.wait()
            except RuntimeError as error:  # the others end, too: nothing may be written to memory that is given back
                failure = failure or failure_of(rank, error)
        if failure is not None:
            raise failure

    def _receive(self, memory: memoryview, rank: int) -> dist.Work:
        return _begun(dist.irecv(_tensor(memory), group=self._group, group_src=rank))

    def _send(self, memory: memoryview, rank: int) -> dist.Work:
        return _begun(dist.isend(_tensor(memory), group=self._group, group_dst=rank))


@contextmanager
def open_ranks(*, timeout_seconds: float) -> Iterator[Ranks]:
    """The ranks of this run, if torchrun has started this process; else this one alone.

    A rank that does not answer for `timeout_seconds` is an error. Raises EnvironmentFailure if ranks do not meet.
    """
    if not is_launched():
        yield ALONE
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun's store has what earlier attempts have left there, such as addresses of processes that have ended.
        store = PrefixStore(f"attempt {restart_count()}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        ranks = ranks_of(dist.get_rank(), dist.get_world_size(), timeout)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFailure(f"cannot connect the ranks: {first_line(error)}") from error
    try:
        yield ranks
    except Interrupted as stopped:
        if stopped.reported_by is not None:  # the launcher ends the others as soon as one has ended
            with suppress(RankLost):
                ranks.wait_for_all()
        first_reporter(store, 0)
        raise
    except Exception as error:
        # What all raise together, rank 0 says. Else the first does: others find the same, or that it has ended.
        is_of_all = isinstance(error, RatelError) and error.reported_by is not None and not isinstance(error, RankLost)
        first = first_reporter(store, 0 if is_of_all else rank)
        if isinstance(error, RatelError) and first is not None and not is_of_all:
            error.reported_by = first
        if isinstance(error, RankLost):
            sleep(_LINGER_SECONDS)  # the launcher has the exit code of the rank that ends first
        raise
    finally:
        dist.destroy_process_group()


def ranks_of(rank: int, size: int, timeout: timedelta) -> Ranks:
    """The ranks of the default group's first `size` processes, of which all must call this."""
    if size == 1:
        return ALONE

    def channel(timeout: timedelta) -> ProcessChannel:
        return ProcessChannel(dist.new_group(list(range(size)), timeout=timeout, backend="gloo"), rank, size)

    control, weights, gradients, patient = map(channel, (timeout, timeout, timeout, _PATIENCE))
    return Ranks(rank=rank, size=size, control=control, weights=weights, gradients=gradients, patient=patient)


def first_reporter(store: PrefixStore, reporter: int) -> int | None:
    """The rank that reports why all end: the `reporter` that the first one to call this names; None if the store does
    not answer."""
    answers = Queue[int]()

    def ask() -> None:
        with suppress(RuntimeError):
            answers.put(int(store.compare_set(_REPORTER, "", str(reporter))))

    Thread(target=ask, daemon=True).start()  # a store whose machine is lost may never answer
    try:
        return answers.get(timeout=_LINGER_SECONDS)
    except Empty:
        return None


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is in the group"
    return work


def _tensor(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def failure_of(rank: int, error: RuntimeError) -> RankLost:
    """What is raised if a rank does not answer. Of those that are left, one reports it."""
    text = str(error)
    if "closed by peer" in text or "reset by peer" in text:
        what = "has ended"
    else:
        what = "does not answer" if "imed out" in text else f"does not answer: {first_line(error)}"
    lost = RankLost(
        f"rank {rank} {what}", "see its output; the same command resumes from the newest step that all ranks have"
    )
    lost.reported_by = 1 if rank == 0 else 0
    return lost
