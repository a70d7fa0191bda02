"""The samples of a token cache where answers are compared, and the micro-batches of them.

Each sample is two of the cache's, one after the other: see `samples`. A micro-batch has two rows for each of its
samples, of which all first ones come first.

Of answers with a verdict, the second row has the sample's prompt with the answer of another sample behind it, by which
the KL divergence is estimated: that of the sample before it in its group, where groups have the size of a micro-batch
(of a step, if that is 1) and follow the order of the data, as in TRL. Invariant: which one that is does not depend on
the epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ratel_cli.data.pairs.reference import NO_REFERENCE, Reference
from ratel_cli.data.samples.comparison import Comparison
from ratel_cli.data.samples.packing import Integers, MicroBatch, assemble
from ratel_cli.data.samples.samples import Sample
from ratel_cli.data.samples.token_cache import TokenCache
from ratel_cli.data.text.rows import Compares
from ratel_cli.json_fields import hash_of
from ratel_cli.sizes import IGNORED_TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSamples:
    """The samples of one cache."""

    cache: TokenCache
    compares: Compares
    trains_prompts: bool
    """Whether the prompts of chosen answers are targets, too."""
    used: Integers
    """Numbers of the samples that are trained, or evaluated, in the order of the data."""
    others: Integers
    """`[samples]`: the sample whose answer stands behind the prompt of each, where answers have verdicts."""
    sequence_len: int
    padding_id: int
    multiple: int
    """Rows are padded to a multiple of it."""
    reference: Reference = NO_REFERENCE

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the tokens of the rows of the samples that are used."""
        orders = [
            hashlib.sha256(each.astype("<i8").tobytes()).hexdigest() for each in (self.used, self.others[self.used])
        ]
        return hash_of([self.cache.summary.tokens_sha256, self.compares, self.sequence_len, *orders])

    def places(self, numbers: Integers) -> Integers:
        """Where samples are among those that are used."""
        return np.searchsorted(self.used, numbers)

    @property
    def num_tokens(self) -> Integers:
        """Tokens of both rows of each sample, `[samples]`."""
        first, second = self._row_lengths()
        return first + second

    @property
    def widths(self) -> Integers:
        """Tokens of the longer row of each sample, `[samples]`."""
        return np.maximum(*self._row_lengths())

    def _row_lengths(self) -> tuple[Integers, Integers]:
        first, second = self.cache.lengths[0::2], self.cache.lengths[1::2]
        if self.compares == "pairs":
            return first, second
        return first, np.minimum(second + (first - second)[self.others], self.sequence_len)

    def batch(self, numbers: Integers) -> MicroBatch:
        """The micro-batch of these samples. Raises EnvironmentFailure."""
        firsts, seconds = self.cache.read(2 * numbers), self.cache.read(2 * numbers + 1)
        is_good = None
        if self.compares == "verdicts":
            is_good = torch.tensor([bool(prompt.labels[0]) for prompt in seconds])
            seconds = self._with_other_answers(numbers, seconds)

        def made(rows: Sequence[Sample]) -> MicroBatch:
            sequences = [np.array([number]) for number in range(len(rows))]
            return assemble(sequences, rows, packed_tokens=None, padding_id=self.padding_id, multiple=self.multiple)

        batch = made([*firsts, *seconds])
        is_answer, targets = batch.targets != IGNORED_TARGET, batch.targets
        if self.trains_prompts:
            whole = [Sample(input_ids=each.input_ids, labels=each.input_ids) for each in firsts]
            targets = made([*whole, *seconds]).targets
        comparison = Comparison(
            is_answer=is_answer,
            reference=self.reference.of(self.places(numbers)),
            is_good=is_good,
            num_good=0 if is_good is None else int(is_good.sum()),
        )
        sample_ids = tuple(int(number) for number in numbers)
        return replace(batch, targets=targets, sample_ids=sample_ids, num_targets=1, comparison=comparison)

    def _with_other_answers(self, numbers: Integers, prompts: Sequence[Sample]) -> list[Sample]:
        others = self.others[numbers]
        found = zip(prompts, self.cache.read(2 * others), self.cache.lengths[2 * others + 1], strict=True)
        rows = []
        for prompt, other, start in found:
            input_ids = np.concatenate([prompt.input_ids, other.input_ids[start:]])[: self.sequence_len]
            unlabelled = np.full_like(prompt.input_ids, IGNORED_TARGET)
            labels = np.concatenate([unlabelled, other.labels[start:]])[: self.sequence_len]
            rows.append(Sample(input_ids=input_ids, labels=labels))
        return rows


def in_groups(num_samples: int, used: Integers, size: int) -> Integers:
    """For each sample the one before it in its group, `[samples]`; for the first of a group the last. `used`: the
    samples that are used together, in the order of the data, of which `size` are a group."""
    others = np.arange(num_samples)
    for first in range(0, len(used), size):
        group = used[first : first + size]
        others[group] = np.roll(group, 1)
    return others
