"""Ends a rank that is a thread at a chosen moment: where it makes something durable, or meets the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ratel_cli.engine.ranks.ranks import Channel
from ratel_cli.store.barrier import Barrier
from tests.ranks.threads import Killed


@dataclass(slots=True)
class Moments:
    """Counts the moments of one rank, and ends it at one of them."""

    kill_at: int | None = None
    """The number of the moment, from 0; None: never."""
    after: bool = False
    """After it, not before."""
    seen: list[str] = field(default_factory=list)

    def pass_(self, name: str, do: Callable[[], None] = lambda: None) -> None:
        number = len(self.seen)
        self.seen.append(name)
        if number == self.kill_at and not self.after:
            raise Killed
        do()
        if number == self.kill_at:
            raise Killed


class KillingBarrier(Barrier):
    def __init__(self, moments: Moments) -> None:
        self._moments = moments

    def sync(self, fd: int) -> None:
        self._moments.pass_("sync", lambda: super(KillingBarrier, self).sync(fd))

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        self._moments.pass_("publish", lambda: super(KillingBarrier, self).write_through(fd, offset, page))


@dataclass(frozen=True, slots=True)
class KillingChannel:
    channel: Channel
    moments: Moments

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        self.moments.pass_("meet", lambda: self.channel.swap(send, receive))
