"""What leases take, by purpose, while each use of a step is open: a meter that knows nothing of lifetimes."""

from __future__ import annotations

import re
from collections import defaultdict
from threading import Lock

import pytest

from ratel_cli.engine.reading.weights import SegmentWeights, WeightReader
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.schedule.ledger import Purpose

PURPOSES: tuple[tuple[str, Purpose], ...] = (
    (r"weights of .*", "weights"),
    (r"gradient of .* so far", "partial sums"),
    (r"gradient of the tied head|rows of .* gradient|sums of gradients of .*", "sums"),
    (r"gradient of .*|norms of .*", "gradients"),
    (r"gradients of .*", "exchange"),
    (r"optimizer states of .*|update of .*", "states"),
    (r"rows of .*", "rows"),
)
"""How a lease is called, and what it is for. Those of units, and of states that stay, are there all the time."""


class LeaseMeter:
    """Counts the leases of a pool from now on.

    What is leased between two uses of a step, before the next segment is opened, is for that one. Behind the last use
    of a step comes the turn to the next one.
    """

    def __init__(
        self, pool: BufferPool, monkeypatch: pytest.MonkeyPatch, *, num_uses: int, staying: frozenset[str]
    ) -> None:
        """`num_uses`: of a step. `staying`: names of blocks whose weights do not count."""
        self._num_uses = num_uses
        self.most: list[dict[Purpose, int]] = []
        """Of each use the most bytes at once. The last is open, or will be opened next."""
        self._begin_next()
        self._is_open = False
        self._staying = frozenset(f"weights of {name}" for name in staying)
        self._now: dict[Purpose, int] = defaultdict(int)
        self._lock = Lock()
        self._counted: dict[int, tuple[Purpose, int]] = {}
        """By region."""
        lease, take_back = BufferPool.lease, BufferPool._take_back
        opened, closed = WeightReader.open, SegmentWeights.close

        def leased(of: BufferPool, num_bytes: int, purpose: str, **keywords: object) -> Lease:
            found = lease(of, num_bytes, purpose, **keywords)  # type: ignore[arg-type]
            if of is pool:
                self._add(id(found._region), purpose, num_bytes)
            return found

        def taken_back(of: BufferPool, region: object) -> None:
            self._remove(id(region))
            take_back(of, region)  # type: ignore[arg-type]

        def open_next(reader: WeightReader, *arguments: object) -> object:
            with self._lock:
                if self._at_turn:
                    self._begin_next()
                for purpose, num_bytes in self._now.items():
                    self._count(purpose, num_bytes)
                self._is_open = True
            return opened(reader, *arguments)  # type: ignore[arg-type]

        def close(weights: SegmentWeights) -> None:
            closed(weights)
            with self._lock:
                if self._is_open:
                    self._begin_next()
                self._is_open = False

        monkeypatch.setattr(BufferPool, "lease", leased)
        monkeypatch.setattr(BufferPool, "_take_back", taken_back)
        monkeypatch.setattr(WeightReader, "open", open_next)
        monkeypatch.setattr(SegmentWeights, "close", close)

    def of_step(self, number: int) -> list[dict[Purpose, int]]:
        """What the uses of a step took, and the turn behind it, the steps counted from 0."""
        return self.most[number * (self._num_uses + 1) :][: self._num_uses + 1]

    @property
    def _at_turn(self) -> bool:
        return len(self.most) % (self._num_uses + 1) == 0

    def _begin_next(self) -> None:
        self.most.append(defaultdict(int))

    def _count(self, purpose: Purpose, num_bytes: int) -> None:
        self.most[-1][purpose] = max(self.most[-1][purpose], num_bytes)

    def _add(self, region: int, called: str, num_bytes: int) -> None:
        purpose = next((purpose for pattern, purpose in PURPOSES if re.fullmatch(pattern, called)), None)
        if purpose is None or called in self._staying:
            return
        with self._lock:
            self._counted[region] = purpose, num_bytes
            self._now[purpose] += num_bytes
            self._count(purpose, self._now[purpose])

    def _remove(self, region: int) -> None:
        with self._lock:
            purpose, num_bytes = self._counted.pop(region, (None, 0))
            if purpose is not None:
                self._now[purpose] -= num_bytes
