"""Which operators of a layer are recomputed in backward. Pure. (Ratel section IV-D decides per operator.)

The replay decides with this function what to run, and the profile counts with it what a swapped output saves. So a plan
counts what will happen.

Storages are numbers: each operator reads some and writes some. From the last operator to the first, one is alive if
something alive, or autograd, needs what it wrote.

Invariant: everything that is needed was run or fetched. The values of everything else may be anything.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import ChainMap, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


class Decision(enum.Enum):
    """What the replay does with one operator."""

    EXEC = enum.auto()
    """Run it again."""
    SWAP = enum.auto()
    """Return its offloaded output."""
    DEAD = enum.auto()
    """Skip it: return an empty tensor of that shape. A layer's last matrix product and residual add are dead."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What decides whether one operator must run again."""

    reads: tuple[int, ...]
    """Storages that it reads."""
    writes: tuple[int, ...]
    """Storages that it writes."""
    is_needed: bool
    """Its result decides what runs, or is saved where no hook sees it, so it must run again."""
    can_be_skipped: bool
    """A replay may answer without running it: it is no view, no mutation, and not needed."""


def decide(operators: Sequence[Recorded], saved: Collection[int], swapped: Collection[int] = ()) -> list[Decision]:
    """A decision for each operator. `saved` are storages that autograd needs, `swapped` are positions of operators."""
    decisions = []
    for position, is_alive in enumerate(_alive(operators, saved, swapped)):
        can_be_skipped = operators[position].can_be_skipped
        if is_alive and can_be_skipped and position in swapped:
            decisions.append(Decision.SWAP)
        else:
            decisions.append(Decision.EXEC if is_alive or not can_be_skipped else Decision.DEAD)
    return decisions


def _alive(operators: Sequence[Recorded], saved: Collection[int], swapped: Collection[int] = ()) -> list[bool]:
    """Whether something needs what each operator wrote."""
    needed, alive = set(saved), [False] * len(operators)
    for position in range(len(operators) - 1, -1, -1):
        operator = operators[position]
        alive[position] = operator.is_needed or not needed.isdisjoint(operator.writes)
        if alive[position] and not (operator.can_be_skipped and position in swapped):
            needed.update(operator.reads)
    return alive


class Liveness:
    """Which operators are alive while one output after the other is swapped: what `decide` says of all swaps so far.

    An operator is needed as long as the last reader of what it wrote comes after it. So a swap is followed from last
    reader to last reader, and costs no more than what it frees. A layer may have thousands of operators.
    """

    def __init__(self, operators: Sequence[Recorded], saved: Collection[int]) -> None:
        self._operators = operators
        self._alive = {position for position, is_alive in enumerate(_alive(operators, saved)) if is_alive}
        self._run = set(self._alive)
        """Operators alive that are not swapped, so what they read is needed."""
        self._readers, self._writers = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        """Positions by storage, the first one first; of those that read, only the ones alive."""
        for position, operator in enumerate(operators):
            for storage in set(operator.writes):
                self._writers[storage].append(position)
            for storage in set(operator.reads) if position in self._alive else ():
                self._readers[storage].append(position)
        self._last = {storage: positions[-1] for storage, positions in self._readers.items()}
        """The last reader of each storage: -1 where none is left, and behind all operators where it is autograd."""
        self._last |= dict.fromkeys(saved, len(operators))

    def is_run(self, position: int) -> bool:
        """Whether something needs what the operator wrote, and its output is not swapped."""
        return position in self._run

    def freed_by(self, position: int) -> list[int]:
        """The others alive that nothing would need any more if the output of this one, which is run, were swapped."""
        return self._follow(position)[0]

    def swap(self, position: int) -> None:
        """Swap the output of an operator that is run and can be skipped."""
        freed, last = self._follow(position)
        self._alive.difference_update(freed)
        self._run.difference_update([position, *freed])
        self._last |= last

    def _follow(self, swapped: int) -> tuple[list[int], dict[int, int]]:
        """What a swap frees, and the last readers that change with it."""
        freed, last = list[int](), dict[int, int]()
        all_last = ChainMap(last, self._last)
        gone, waiting = {swapped}, [swapped]
        while waiting:
            reader = waiting.pop()
            for storage in set(self._operators[reader].reads):
                if all_last[storage] != reader:
                    continue  # a later one reads it, or has gone already and left it behind
                last[storage] = self._reader_before(storage, reader, gone)
                for writer in self._writers[storage]:
                    if writer not in self._alive or writer in gone or self._is_needed(writer, all_last):
                        continue
                    gone.add(writer)
                    freed.append(writer)
                    if writer in self._run:
                        waiting.append(writer)
        return freed, last

    def _reader_before(self, storage: int, reader: int, gone: Collection[int]) -> int:
        readers = self._readers[storage]
        for index in range(bisect_left(readers, reader) - 1, -1, -1):
            if readers[index] in self._run and readers[index] not in gone:
                return readers[index]
        return -1

    def _is_needed(self, position: int, last: Mapping[int, int]) -> bool:
        operator = self._operators[position]
        return operator.is_needed or any(last.get(storage, -1) > position for storage in operator.writes)
