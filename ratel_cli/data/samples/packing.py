"""Which samples share a sequence, the order of sequences, and how sequences become the tensors of a micro-batch.

A sequence is one line of a micro-batch: one sample, or several if samples are packed. Invariants: everything here is a
pure function of its arguments (no hash order, no global random state). Every sample is in exactly one sequence. No
sequence is longer than the capacity. No position has its target in another sample.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from ratel_cli.data.samples.comparison import Comparison
from ratel_cli.data.samples.samples import Sample, TokenIds
from ratel_cli.sizes import IGNORED_TARGET, Task
from ratel_cli.units import align_up

Integers = npt.NDArray[np.int64]

_PART_SAMPLES = 1 << 16  # samples whose numbers exist as Python objects at a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The data of one forward and backward pass. Each line of the tensors is one sequence."""

    input_ids: torch.Tensor
    """int64 `[batch, tokens]`."""
    targets: torch.Tensor
    """int64 `[batch, tokens]`: `targets[b, t]` is the token that position t must predict: for causal models the next
    one, so that targets are shifted. Of a classifier `targets[b, 0]` is the class of row b.

    -100 where there is no loss, as at the last token of every sample of a causal model.
    """
    position_ids: torch.Tensor
    """int64 `[batch, tokens]`. Positions start at 0 in every packed sample.

    They also start at 0 in the padding after the last sample, so that a model that separates samples by their positions
    separates the padding too.
    """
    gives_positions: bool = True
    """Whether a model gets the positions. If not, its own code counts them, once for all lines: the gradient of a table
    of positions is then summed over the lines before it is rounded. Transformers' collators that pad rows give none."""
    mask: torch.Tensor | None = None
    """int64 `[batch, tokens]`, 0 for padding; None where no token sees padding."""
    is_pair: bool = False
    """Whether the targets are those of a second text, `[batch, target tokens]`, which a decoder writes."""
    decoder_ids: torch.Tensor | None = None
    """int64 `[batch, target tokens]`: what that decoder gets; None: what the model makes of the targets."""
    sample_ids: tuple[int, ...]
    """The numbers of the samples, one sequence after another."""
    num_targets: int
    """Positions with loss; where rows are compared 1, since each micro-batch counts alike then."""
    num_tokens: int
    """Tokens of the samples; padding does not count."""
    comparison: Comparison | None = None
    """How rows are compared; None: they are not, and each target has its own loss."""

    @classmethod
    def of_tokens(cls, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Self:
        """One without targets, of tokens and positions `[batch, tokens]`."""
        return cls(
            input_ids=input_ids,
            targets=torch.full_like(input_ids, IGNORED_TARGET),
            position_ids=position_ids,
            sample_ids=(),
            num_targets=0,
            num_tokens=input_ids.numel(),
        )

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """What a model gets, by the names that transformers has for it."""
        named = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids if self.gives_positions else None,
            "attention_mask": self.mask,
            "decoder_input_ids": self.decoder_ids,
        }
        return {name: each for name, each in named.items() if each is not None}

    @property
    def looked_up(self) -> torch.Tensor:
        """All tokens that are looked up: `[batch, tokens]`, or of two stacks in one line `[tokens]`."""
        if self.decoder_ids is None:
            return self.input_ids
        return torch.cat([self.input_ids.reshape(-1), self.decoder_ids.reshape(-1)])

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of all lines, padding included; of two stacks those of both."""
        return self.input_ids.numel() + (self.targets.numel() if self.is_pair else 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Lines, and tokens of a line."""
        return self.input_ids.shape[0], self.input_ids.shape[1]

    @property
    def width(self) -> int:
        """Tokens of a line, of the longer text if there are two."""
        return max(self.input_ids.shape[1], self.targets.shape[1])

    def to(self, device: torch.device) -> Self:
        """Return a copy with its tensors on a device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            targets=self.targets.to(device),
            position_ids=self.position_ids.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            decoder_ids=None if self.decoder_ids is None else self.decoder_ids.to(device),
            comparison=None if self.comparison is None else self.comparison.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """The samples of each sequence: sequence s holds `samples[starts[s]:starts[s + 1]]`."""

    samples: Integers
    """Sample numbers `[samples]`."""
    starts: Integers
    """Indices into `samples`: `[sequences + 1]`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Integers:
        return self.samples[self.starts[index] : self.starts[index + 1]]


def one_per_sequence(sample_ids: Integers) -> Sequences:
    """Put every sample into a sequence of its own: no packing. `sample_ids`: `[samples]`."""
    return Sequences(samples=sample_ids, starts=np.arange(len(sample_ids) + 1, dtype=np.int64))


def pack(sample_ids: Integers, lengths: Integers, *, capacity: int, order: Integers) -> Sequences:
    """Pack by best-fit decreasing: the longest sample first, into the fullest sequence that still has space for it.

    `sample_ids`, `lengths` and `order`: `[samples]`. `lengths[i]` is the length of `sample_ids[i]`, at most `capacity`.
    `order` is a permutation: among samples of one length the first in `order` goes first, so a random order mixes
    samples that are neighbours in the files. Sequences are sorted by their first sample.
    """
    assert len(lengths) == 0 or lengths.max() <= capacity
    longest_first = order[np.argsort(-lengths[order], kind="stable")]
    sequence_of = np.empty(len(sample_ids), dtype=np.int64)
    by_space: dict[int, list[int]] = {}  # free tokens -> the sequences with this many
    spaces: list[int] = []  # the keys of by_space, ascending
    num_sequences = 0
    for begin in range(0, len(longest_first), _PART_SAMPLES):
        part = longest_first[begin : begin + _PART_SAMPLES]
        for index, length in zip(part.tolist(), lengths[part].tolist(), strict=True):
            at = bisect_left(spaces, length)
            if at == len(spaces):
                sequence, space = num_sequences, capacity
                num_sequences += 1
            else:
                space = spaces[at]
                sequence = by_space[space].pop()
                if not by_space[space]:
                    del by_space[space], spaces[at]
            sequence_of[index] = sequence
            left = space - length
            if left:
                if left not in by_space:
                    by_space[left] = []
                    insort(spaces, left)
                by_space[left].append(sequence)
    return _group(sample_ids, sequence_of, num_sequences)


def _group(sample_ids: Integers, sequence_of: Integers, num_sequences: int) -> Sequences:
    """Sequences sorted by their first sample, with ascending samples. `sequence_of`: `[samples]`."""
    _, first_index = np.unique(sequence_of, return_index=True)
    rank = np.empty(num_sequences, dtype=np.int64)
    rank[np.argsort(first_index, kind="stable")] = np.arange(num_sequences)
    ranked = rank[sequence_of]
    counts = np.bincount(ranked, minlength=num_sequences)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Sequences(samples=sample_ids[np.argsort(ranked, kind="stable")], starts=starts)


def random_order(count: int, *key: int) -> Integers:
    """A permutation of 0 to count - 1, `[count]`, that depends only on the key.

    It sorts the raw output of PCG64 instead of calling `Generator.permutation`: from release to release numpy keeps the
    bits of its bit generators, but not of the methods that use them.
    """
    bits = np.random.PCG64(np.random.SeedSequence([part % 2**64 for part in key]))
    return np.argsort(bits.random_raw(count), kind="stable").astype(np.int64)


def assemble(
    sequences: Sequence[Integers],
    samples: Sequence[Sample],
    *,
    packed_tokens: int | None,
    padding_id: int,
    multiple: int = 1,
    task: Task = "causal_lm",
) -> MicroBatch:
    """Make a micro-batch of sequences, given as sample numbers. `samples` are their samples, in order.

    `packed_tokens` is the width of packed sequences, which is always the same, so that every step moves the same bytes.
    None pads to the longest sequence, and on to a multiple of `multiple`; then positions continue in the padding, which
    causal attention never reaches. For another `task` there is a mask, and the targets are the labels as they are.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    width = align_up(max(lengths), multiple) if packed_tokens is None else packed_tokens
    if task == "seq2seq":
        numbers = [int(number) for sequence in sequences for number in sequence]
        return _pairs(numbers, samples, padding_id=padding_id, multiple=multiple)
    input_ids = np.full((len(sequences), width), padding_id, dtype=np.int64)
    targets = np.full((len(sequences), width), IGNORED_TARGET, dtype=np.int64)
    position_ids = np.tile(np.arange(width, dtype=np.int64), (len(sequences), 1))
    mask = np.zeros_like(input_ids)
    remaining = iter(samples)
    for index, sequence in enumerate(sequences):
        at = 0
        for _ in sequence:
            sample = next(remaining)
            end = at + len(sample.input_ids)
            input_ids[index, at:end] = sample.input_ids
            if task == "causal_lm":
                targets[index, at : end - 1] = sample.labels[1:]
            else:
                targets[index, at:end] = sample.labels
                mask[index, at:end] = 1
            if packed_tokens is not None:
                position_ids[index, at:] = np.arange(width - at)
            at = end
        if packed_tokens is not None:
            position_ids[index, at:] = np.arange(width - at)
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(position_ids),
        gives_positions=packed_tokens is not None,
        mask=None if task == "causal_lm" else torch.from_numpy(mask),
        sample_ids=tuple(int(sample_id) for sequence in sequences for sample_id in sequence),
        num_targets=int((targets != IGNORED_TARGET).sum()),
        num_tokens=sum(lengths),
    )


def _pairs(numbers: Sequence[int], samples: Sequence[Sample], *, padding_id: int, multiple: int) -> MicroBatch:
    """A micro-batch of two texts a line: of each sample the tokens without a label, and behind them those with one."""
    sources, targets = [], []
    for sample in samples:
        is_target = sample.labels != IGNORED_TARGET
        sources.append(sample.input_ids[~is_target])
        targets.append(sample.labels[is_target])
    input_ids, mask = _padded(sources, padding_id, multiple)
    labels, _ = _padded(targets, IGNORED_TARGET, multiple)
    return MicroBatch(
        input_ids=input_ids,
        targets=labels,
        position_ids=torch.arange(input_ids.shape[1]).repeat(len(samples), 1),
        mask=mask,
        is_pair=True,
        sample_ids=tuple(numbers),
        num_targets=int((labels != IGNORED_TARGET).sum()),
        num_tokens=sum(len(sample.input_ids) for sample in samples),
    )


def _padded(lines: Sequence[TokenIds], padding: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lines in a tensor of the width of the longest one, in whole chunks, and a mask that is 0 for what fills them up;
    int64 `[lines, tokens]`."""
    width = align_up(max(map(len, lines)), multiple)
    values, mask = np.full((len(lines), width), padding, dtype=np.int64), np.zeros((len(lines), width), dtype=np.int64)
    for index, line in enumerate(lines):
        values[index, : len(line)], mask[index, : len(line)] = line, 1
    return torch.from_numpy(values), torch.from_numpy(mask)
