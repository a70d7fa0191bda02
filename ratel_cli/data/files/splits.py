"""The split of a dataset as its key says it: a name, and perhaps a part of its rows, like `train[:20%]`.

Invariant: a part has the rows that `datasets` takes of a split of the hub: bounds in percent are rounded to the nearest
row, negative ones count from the end, and bounds beyond the rows are those of the rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPLIT = re.compile(
    r"(?P<name>[\w.-]+)(\[(?P<part>(?P<first>-?[0-9_]+%?)?:(?P<end>-?[0-9_]+%?)?)\])?", re.ASCII
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The rows from `first` up to `end`; None: the beginning or the end of all rows."""

    written: str
    """The part as the user wrote it: `:20%`."""
    first: int | None
    end: int | None
    in_percent: bool
    """Whether the bounds are percent of all rows."""

    @property
    def needs_count(self) -> bool:
        """Whether the number of all rows decides which rows these are."""
        return self.in_percent or min(self.first or 0, self.end or 0) < 0

    def of(self, num_rows: int) -> tuple[int, int]:
        """The first row of the part, and the one after its last, in a set of this many rows."""
        first, end = (
            default if bound is None else self._bound(bound, num_rows)
            for bound, default in ((self.first, 0), (self.end, num_rows))
        )
        return first, end

    def _bound(self, bound: int, num_rows: int) -> int:
        at = round(bound * num_rows / 100) if self.in_percent else bound
        return min(max(at + num_rows if bound < 0 else at, 0), num_rows)


def parse_split(text: str) -> tuple[str, Part | None]:
    """The name of a split, and the part of it; None: all of it. Raises ValueError with what is wrong about it."""
    found = _SPLIT.fullmatch(text)
    if found is None:
        raise ValueError("it must be a name, or a name and a part like train[:20%] or train[100:200]")
    if found["part"] is None:
        return found["name"], None
    bounds = [found["first"], found["end"]]
    percent = [bound.endswith("%") for bound in bounds if bound is not None]
    if len(set(percent)) > 1:
        raise ValueError("one bound is in percent and the other is not")
    first, end = (None if bound is None else int(bound.rstrip("%").replace("_", "") or 0) for bound in bounds)
    in_percent = any(percent)
    most, words = (100, "100 %") if in_percent else (10**15, "10^15")
    if max(abs(first or 0), abs(end or 0)) > most:
        raise ValueError(f"a bound is more than {words}")
    return found["name"], Part(written=found["part"], first=first, end=end, in_percent=in_percent)
