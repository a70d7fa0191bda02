"""Which tokens are masked: how many, into what, and that a resumed run masks the same."""

from __future__ import annotations

import numpy as np
import pytest

from ratel_cli.data.samples.samples import Sample
from ratel_cli.data.text.masking import Masking

MASKING = Masking(probability=0.15, mask_id=4, num_tokens=1000, seed=7)


def sample(num_tokens: int) -> Sample:
    """Between a token in front and one behind, which may not be masked."""
    ids = np.arange(100, 100 + num_tokens + 2, dtype=np.int32)
    labels = ids.copy()
    labels[[0, -1]] = -100
    return Sample(input_ids=ids, labels=labels)


def test_as_many_as_the_probability_says_and_into_what() -> None:
    """Of 40,000 tokens 15 % are chosen; of these 80 % become the mask, 10 % a random token, and 10 % stay."""
    before = sample(40_000)
    after = MASKING.masked(before, 0, 0)
    chosen = after.labels != -100
    assert np.array_equal(after.labels[chosen], before.input_ids[chosen])
    assert np.array_equal(after.input_ids[~chosen], before.input_ids[~chosen])
    assert not chosen[[0, -1]].any()
    assert chosen.mean() == pytest.approx(0.15, abs=0.006)
    became = after.input_ids[chosen]
    is_mask, stayed = became == 4, became == before.input_ids[chosen]
    assert is_mask.mean() == pytest.approx(0.8, abs=0.02)
    assert stayed.mean() == pytest.approx(0.1, abs=0.02)
    random = became[~is_mask & ~stayed]
    assert 0 <= random.min() < 50
    assert 950 < random.max() < 1000
    assert random.mean() == pytest.approx(500, abs=40)


def test_the_same_again_and_other_ones_in_each_epoch_and_sample() -> None:
    before = sample(50)
    first = MASKING.masked(before, 3, 1)
    again = MASKING.masked(before, 3, 1)
    assert np.array_equal(first.input_ids, again.input_ids)
    assert np.array_equal(first.labels, again.labels)
    others = [(3, 2), (4, 1), (3, -1)]
    assert all(not np.array_equal(MASKING.masked(before, *other).labels, first.labels) for other in others)
    assert np.array_equal(before.labels[1:-1], before.input_ids[1:-1]), "the sample itself stays"


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3])
def test_a_short_sample_has_a_masked_token(num_tokens: int) -> None:
    """If any may be masked: otherwise it would be computed for nothing."""
    for number in range(40):
        chosen = MASKING.masked(sample(num_tokens), number, 0).labels != -100
        assert chosen.any() == bool(num_tokens)


def test_where_several_may_be_the_only_one_it_is_not_always_the_same() -> None:
    found = {int(np.argmax(MASKING.masked(sample(3), number, 0).labels != -100)) for number in range(60)}
    assert found == {1, 2, 3}
