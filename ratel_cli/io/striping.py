"""Striping: which byte of which file a logical address is, as pure arithmetic.

A store has one file on each NVMe drive. Logical addresses run from 0. Consecutive stripes go to the files in turn, so a
large transfer keeps every drive busy. Drives of different speed have different shares: in a cycle of `sum(shares)`
stripes each file gets as many as its share, spread as evenly as possible. With equal shares the files take turns.

`_native.Stripes` follows the turns that a map deals (`StripeMap.turns`): a transfer may have a hundred ranges.

Invariant: logical bytes and the bytes behind the files' headers correspond one to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

MAX_WEIGHT = 8
_EQUAL_RATIO = 1.1
"""Ratio of two rates up to which they count as equal: one drive differs as much from day to day."""
_WORTH_LARGER_TERMS = 1.01
"""A longer cycle must be at least this much faster, because it needs larger transfers to keep every drive busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripeMap:
    """Spreads a range of logical addresses over files, one for each share. Each file begins with a header."""

    shares: tuple[int, ...]
    stripe_bytes: int
    header_bytes: int

    def __post_init__(self) -> None:
        assert self.shares and min(self.shares) > 0 and self.stripe_bytes > 0 and self.header_bytes >= 0

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """For each stripe of a cycle: its file, and how many stripes of that file came before it in the cycle."""
        return _turns(self.shares)

    def file_bytes(self, logical_bytes: int) -> tuple[int, ...]:
        """The size of each file, header included, when `logical_bytes` are stored."""
        turns = _turns(self.shares)
        full_stripes, rest = divmod(logical_bytes, self.stripe_bytes)
        cycles, extra_stripes = divmod(full_stripes, len(turns))
        sizes = [self.header_bytes + cycles * share * self.stripe_bytes for share in self.shares]
        for file_index, _ in turns[:extra_stripes]:
            sizes[file_index] += self.stripe_bytes
        sizes[turns[extra_stripes][0]] += rest
        return tuple(sizes)


def shares_for(rates: Sequence[float]) -> tuple[int, ...]:
    """Weights, at most MAX_WEIGHT each, with which drives of these rates need nearly the same time for their shares.

    All 1 if the rates differ by 10 % at most. Otherwise the smallest shares within 1 % of the best total rate.
    """
    fastest = max(rates)
    if fastest <= _EQUAL_RATIO * min(rates):
        return (1,) * len(rates)
    candidates = [
        tuple(max(1, round(largest * rate / fastest)) for rate in rates) for largest in range(1, MAX_WEIGHT + 1)
    ]
    # A long transfer takes as long as its slowest part.
    together = [
        sum(shares) * min(rate / share for rate, share in zip(rates, shares, strict=True)) for shares in candidates
    ]
    return next(
        shares for shares, rate in zip(candidates, together, strict=True) if rate * _WORTH_LARGER_TERMS >= max(together)
    )


@cache
def _turns(shares: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """For each stripe of a cycle: its file, and how many stripes of that file came before it in the cycle.

    Smooth weighted round-robin: before each stripe every file's balance grows by its share. The stripe goes to the
    file with the largest balance (the first of equals), which pays `sum(shares)` for it.
    """
    cycle_stripes = sum(shares)
    balances, taken = [0] * len(shares), [0] * len(shares)
    turns: list[tuple[int, int]] = []
    for _ in range(cycle_stripes):
        balances = [balance + share for balance, share in zip(balances, shares, strict=True)]
        file_index = balances.index(max(balances))
        balances[file_index] -= cycle_stripes
        turns.append((file_index, taken[file_index]))
        taken[file_index] += 1
    return tuple(turns)
