"""The ranks of a run, and what carries bytes between them.

All that ranks do together is one operation, `Channel.swap`: each sends every other one some bytes, and gets some of
each. Ranks meet on several channels, so that what one waits for on one of them holds up no other: `control` for the
thread that computes, `weights` and `gradients` for the threads that gather and exchange (reading/turns.py).

Invariant: on each channel every rank does the same swaps in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ratel_cli.store.layout import RankSlice


class Channel(Protocol):
    """Carries bytes between all ranks."""

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        """Send `send[r]` to each rank r, and fill `receive[r]` with what it sends. What is this rank's own is left
        alone; empty memory is not sent, and its receiver expects none. Returns when all of it is sent and received.

        Raises EnvironmentFailure, which names a rank that does not answer.
        """


class _Alone:
    """The channel of one rank alone."""

    def swap(self, send: Sequence[memoryview], receive: Sequence[memoryview]) -> None:
        """There is no other rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that train one model."""

    rank: int
    """From 0."""
    size: int
    """How many there are."""
    control: Channel
    weights: Channel
    gradients: Channel
    patient: Channel
    """For the thread that computes, where others may take hours."""

    @property
    def slice(self) -> RankSlice:
        """What this rank has of every block."""
        return RankSlice(self.rank, self.size)

    def wait_for_all(self) -> None:
        """Return when all ranks have come here, however long that takes. Raises as `Channel.swap`."""
        here = [memoryview(bytearray(1)) for _ in range(self.size)]
        self.patient.swap([memoryview(bytearray(1))] * self.size, here)

    def gathered(self, values: Sequence[float], *, lengths: Sequence[int] | None = None) -> list[list[float]]:
        """What each rank has given, in the order of ranks. `lengths`: how many values each gives; None: all as many.

        Raises as `Channel.swap`.
        """
        if self.size == 1:
            return [list(values)]
        lengths = [len(values)] * self.size if lengths is None else lengths
        assert lengths[self.rank] == len(values)
        own = bytearray(struct.pack(f"<{len(values)}d", *values))
        received = [bytearray(8 * length) for length in lengths]
        received[self.rank][:] = own
        self.control.swap([memoryview(own)] * self.size, [memoryview(each) for each in received])
        return [list(struct.unpack(f"<{len(each) // 8}d", each)) for each in received]


ALONE = Ranks(rank=0, size=1, control=_Alone(), weights=_Alone(), gradients=_Alone(), patient=_Alone())
