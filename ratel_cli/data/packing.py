"""Which samples share a row, in which order rows come, and how rows become tensors.

For `data/dataset.py`. Invariants: everything here is a pure function of its arguments (no hash order, no global
random state); every sample lies in exactly one row; no row is longer than the capacity; no position has a target
in another sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ratel_cli.data.encode import Sample
from ratel_cli.sizes import IGNORED_TARGET

Integers = npt.NDArray[np.int64]

_CHUNK_SAMPLES = 1 << 16  # samples that are Python objects at one time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The tensors of one forward pass, int64 [rows, tokens].

    `targets[b, t]` is the token that position t must predict: already shifted, -100 where there is no loss, which
    includes the last token of every sample. `position_ids` restart at 0 with every packed sample, and once more
    for the padding behind the last, so that a model which separates samples by them separates padding too.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: tuple[int, ...]
    num_targets: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Row r holds the samples `samples[starts[r]:starts[r + 1]]`."""

    samples: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Integers:
        return self.samples[self.starts[row] : self.starts[row + 1]]


def one_per_row(sample_ids: Integers) -> Rows:
    """No packing."""
    return Rows(samples=sample_ids, starts=np.arange(len(sample_ids) + 1, dtype=np.int64))


def pack(sample_ids: Integers, lengths: Integers, *, capacity: int, order: Integers) -> Rows:
    """Best-fit decreasing: the longest sample first, into the fullest row that still has room for it.

    `lengths[i]` and `order` belong to `sample_ids[i]`; among samples of one length, those early in `order` go
    first, so a random order mixes what lies together in the files. Rows come out by their smallest sample.
    """
    assert len(lengths) == 0 or lengths.max() <= capacity
    longest_first = order[np.argsort(-lengths[order], kind="stable")]
    row_of = np.empty(len(sample_ids), dtype=np.int64)
    rows_with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of rows_with_room, ascending
    num_rows = 0
    for begin in range(0, len(longest_first), _CHUNK_SAMPLES):
        chunk = longest_first[begin : begin + _CHUNK_SAMPLES]
        for index, length in zip(chunk.tolist(), lengths[chunk].tolist(), strict=True):
            at = bisect_left(rooms, length)
            if at == len(rooms):
                row, room = num_rows, capacity
                num_rows += 1
            else:
                room = rooms[at]
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    del rows_with_room[room], rooms[at]
            row_of[index] = row
            left = room - length
            if left:
                if left not in rows_with_room:
                    rows_with_room[left] = []
                    insort(rooms, left)
                rows_with_room[left].append(row)
    return _group(sample_ids, row_of, num_rows)


def _group(sample_ids: Integers, row_of: Integers, num_rows: int) -> Rows:
    """Rows by their smallest sample, samples ascending within each."""
    _, first_index = np.unique(row_of, return_index=True)
    rank = np.empty(num_rows, dtype=np.int64)
    rank[np.argsort(first_index, kind="stable")] = np.arange(num_rows)
    ranked = rank[row_of]
    counts = np.bincount(ranked, minlength=num_rows)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Rows(samples=sample_ids[np.argsort(ranked, kind="stable")], starts=starts)


def random_order(count: int, *key: int) -> Integers:
    """A permutation of 0 .. count - 1 that depends on the key alone.

    Sorting PCG64's raw output rather than `Generator.permutation`: numpy keeps the bits of its bit generators
    from release to release, but not those of the methods built on them.
    """
    bits = np.random.PCG64(np.random.SeedSequence([part % 2**64 for part in key]))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def assemble(
    rows: Sequence[Integers], samples: Sequence[Sample], *, packed_tokens: int | None, padding_id: int
) -> MicroBatch:
    """The tensors of some rows; `samples` are theirs, row after row.

    `packed_tokens`: the width of packed rows, always the same so that every step moves the same bytes; None pads
    to the longest row, positions counting on through the padding, which causal attention never reaches.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    width = max(lengths) if packed_tokens is None else packed_tokens
    input_ids = np.full((len(rows), width), padding_id, dtype=np.int64)
    targets = np.full((len(rows), width), IGNORED_TARGET, dtype=np.int64)
    position_ids = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
    taken = iter(samples)
    for index, row in enumerate(rows):
        at = 0
        for _ in row:
            sample = next(taken)
            end = at + len(sample.input_ids)
            input_ids[index, at:end] = sample.input_ids
            targets[index, at : end - 1] = sample.labels[1:]
            if packed_tokens is not None:
                position_ids[index, at:] = np.arange(width - at)
            at = end
        if packed_tokens is not None:
            position_ids[index, at:] = np.arange(width - at)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(position_ids),
        sample_ids=tuple(int(sample_id) for row in rows for sample_id in row),
        num_targets=int((targets != IGNORED_TARGET).sum()),
        num_tokens=sum(lengths),
    )
