"""What training data consists of: rows, samples, tokens and tokens with loss of each dataset, and how well they pack.

Invariant: everything is counted in the token cache, so it is what a run trains on. Memory holds few samples at a time.
"""

from __future__ import annotations

from itertools import accumulate, islice

import numpy as np

from ratel_cli.data.samples.summary import SetStatistics
from ratel_cli.data.samples.token_cache import SourceCounts, TokenCache
from ratel_cli.sizes import IGNORED_TARGET

_GROUP_SAMPLES = 1024


def statistics_of(
    cache: TokenCache, names: list[str], *, first_label: int = 1, per_sample: int = 1
) -> list[SetStatistics]:
    """Count the samples of each dataset of a cache; `names` are those of the datasets. `first_label`: labels before it
    have no loss, since nothing predicts the first token of a causal model. `per_sample`: 2 where answers are compared,
    so that a sample is two of the cache's. Raises EnvironmentFailure.

    A cache of the first version does not know which samples belong to which dataset: its datasets are counted as one.
    """
    found = []
    start = 0
    for name, counts in zip(*_sources(cache, names), strict=True):
        first, start = start, start + per_sample * counts.num_samples
        ids = np.arange(first, start)
        lengths = cache.lengths[ids]
        percentiles = np.percentile(lengths, [0, 50, 95, 100], method="nearest") if len(lengths) else np.zeros(4)
        shortest, median, long, longest = (int(each) for each in percentiles)
        found.append(
            SetStatistics(
                name=name,
                num_rows=counts.num_rows,
                num_rejected=counts.num_rejected,
                num_truncated=counts.num_truncated,
                num_dropped=counts.num_dropped,
                num_samples=counts.num_samples,
                num_tokens=int(lengths.sum()),
                num_loss_tokens=_num_loss_tokens(cache, first, start, first_label),
                lengths=(shortest, median, long, longest),
            )
        )
    return found


def first_samples(
    cache: TokenCache, names: list[str], num_samples: int, *, per_sample: int = 1
) -> list[tuple[str, int, int]]:
    """Which samples to show: one of each dataset in turn. For each the dataset, the number in it, and in the cache,
    where it is `per_sample`."""
    names, counts = _sources(cache, names)
    starts = accumulate((per_sample * each.num_samples for each in counts), initial=0)
    sets = [*zip(names, counts, starts, strict=False)]
    in_turn = (
        (name, number + 1, first + per_sample * number)
        for number in range(max((each.num_samples for each in counts), default=0))
        for name, each, first in sets
        if number < each.num_samples
    )
    return list(islice(in_turn, num_samples))


def _sources(cache: TokenCache, names: list[str]) -> tuple[list[str], list[SourceCounts]]:
    if len(cache.summary.sources) == len(names):
        return names, list(cache.summary.sources)
    summary = cache.summary
    whole = SourceCounts(summary.num_rows, summary.num_rejected, 0, len(cache.lengths))
    return [", ".join(names)], [whole]


def _num_loss_tokens(cache: TokenCache, first: int, end: int, first_label: int) -> int:
    """The targets of these samples."""
    total = 0
    for start in range(first, end, _GROUP_SAMPLES):
        for sample in cache.read(np.arange(start, min(start + _GROUP_SAMPLES, end))):
            total += int((sample.labels[first_label:] != IGNORED_TARGET).sum())
    return total
