"""Lets the reader read ahead what a loop of the caller's own will use, in the order of the last pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from ratel_cli.engine.reading.weights import WeightReader
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage, Use

_Key: TypeAlias = tuple[int, Stage]


class ReadAhead:
    """Announces uses to the reader, as far as they are known. A wrong guess costs the reads that it started."""

    def __init__(self, reader: WeightReader, blocks: Sequence[Segment]) -> None:
        """`blocks`: in the order in which a loop that nothing is known of is taken to call them."""
        self._reader = reader
        self._most = 2 * len(blocks)
        self._next: dict[_Key, Use] = {}
        """What followed each use when it came last."""
        self._coming: deque[Use] = deque()
        """What the reader expects."""
        self._last: Use | None = None
        for block, after in pairwise(blocks):
            self._next[block.index, "forward"] = Use(after, "forward")
            self._next[after.index, "backward"] = Use(block, "backward")

    def expect(self, use: Use) -> None:
        """A use comes: the reader can open it now, and reads what is taken to follow."""
        if self._last is not None:
            self._next[_key(self._last)] = use
        self._last = use
        if self._coming and self._coming[0] == use:
            self._coming.popleft()
            return
        chain = [use]
        while len(chain) < self._most:
            after = self._next.get(_key(chain[-1]))
            if after is None or (chain[-1].stage == "backward" and after.stage == "forward"):
                break  # weights may change between
            chain.append(after)
        self._reader.reset()
        self._reader.expect(chain)
        self._coming = deque(chain[1:])

    def forget(self) -> None:
        """Nothing is known of what comes next."""
        self._reader.reset()
        self._coming.clear()
        self._last = None


def _key(use: Use) -> _Key:
    return use.segment.index, use.stage
