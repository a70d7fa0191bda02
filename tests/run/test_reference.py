"""Ranks share what is known of the reference model before they choose what each computes, so nothing is left out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from ratel_cli.data.pairs.compared_samples import ComparedSamples
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.run.train.reference import _Reference, _Set
from tests.ranks.threads import together

USED = np.array([3, 5, 6, 8, 9, 12, 20, 21, 30])
BATCHES = [np.array(each) for each in ([30, 3], [5, 20], [12, 6], [8], [21, 9])]


def reference() -> _Reference:
    """Nothing is known yet; the samples are trained in an order of their own, and none is evaluated."""
    nothing: Any = None

    def made(used: Any, batches: list[Any]) -> _Set:  # noqa: ANN401
        samples = ComparedSamples(
            cache=nothing, compares="pairs", trains_prompts=False, used=used, others=used, sequence_len=8,
            padding_id=0, multiple=1,
        )  # fmt: skip
        values = np.full((len(used), 2), np.nan, dtype=np.float32)
        return _Set(key="", samples=samples, batches=batches, values=values)

    sets = made(USED, BATCHES), made(USED[:0], [])
    return _Reference(context=nothing, origin=None, weights=None, known_weights=None, sets=sets)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_ranks_choose_is_everything_once(size: int) -> None:
    """Whatever part of all micro-batches each had computed when they were killed."""
    draws = random.Random(size)
    for _ in range(20):
        known = [draws.sample(range(len(BATCHES)), draws.randrange(len(BATCHES) + 1)) for _ in range(size)]

        def chosen(ranks: Ranks, known: list[list[int]] = known) -> tuple[list[list[int]], list[float]]:
            found = reference()
            for number in known[ranks.rank]:
                found.sets[0].values[np.searchsorted(USED, BATCHES[number])] = number + 10 * ranks.rank
            found.share(ranks)
            own = found.missing()[ranks.rank :: ranks.size]
            for part in own:
                part.values[part.places] = 100
            found.share(ranks)
            assert not found.missing()
            return [part.numbers.tolist() for part in own], found.sets[0].values.reshape(-1).tolist()

        found = together(size, chosen)
        computed = [numbers for of_rank, _ in found for numbers in of_rank]
        missing = [each.tolist() for number, each in enumerate(BATCHES) if not any(number in had for had in known)]
        assert sorted(computed) == sorted(missing)
        assert all(values == found[0][1] for _, values in found)
