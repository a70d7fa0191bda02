"""Datasets with weights, and datasets for evaluation: which samples an epoch has, and what changes the hash."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput
from tests.data.conftest import Load, WriteRows, read_rejects


def _sources(write_rows: WriteRows, *weights: float) -> list[DatasetSource]:
    """One dataset of ten samples for each weight; the first token of a sample names both."""
    return [
        DatasetSource(
            path=str(write_rows(*({"input_ids": [20 * number + i, 5, 6]} for i in range(10)), name=f"{number}.jsonl")),
            weight=weight,
        )
        for number, weight in enumerate(weights)
    ]


def _visits(data: TrainingData, epoch: int = 0) -> Counter[int]:
    first = epoch * data.steps_per_epoch
    batches = [batch for index in range(data.steps_per_epoch) for batch in data.step(first + index)]
    return Counter(sample for batch in batches for sample in batch.sample_ids)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_visits_each_sample_as_its_weight_says(
    load: Load, write_rows: WriteRows, packing: bool, shuffle: bool
) -> None:
    data = load(*_sources(write_rows, 2, 1, 0.3, 1.5), packing=packing, shuffle=shuffle, sequence_len=8)
    visits = _visits(data)
    assert [visits[sample] for sample in range(20)] == [2] * 10 + [1] * 10
    assert sorted(visits[sample] for sample in range(20, 30)) == [0] * 7 + [1] * 3
    assert sorted(visits[sample] for sample in range(30, 40)) == [1] * 5 + [2] * 5
    assert _visits(data, epoch=1) == visits
    assert (data.num_samples, data.num_tokens) == (48, 144)


def test_held_out_samples_are_not_visited(load: Load, write_rows: WriteRows) -> None:
    data = load(*_sources(write_rows, 3, 1), val_set_size=6)
    held_out = {sample for batch in data.eval_batches() for sample in batch.sample_ids}
    visits = _visits(data)
    assert len(held_out) == 6 and not held_out & set(visits)
    assert all(visits[sample] == (3 if sample < 10 else 1) for sample in set(range(20)) - held_out)


def test_weights_are_part_of_the_data(load: Load, write_rows: WriteRows) -> None:
    prints = {
        weights: load(*_sources(write_rows, *weights)).fingerprint for weights in ((1, 1), (2, 1), (1, 2), (1, 1.01))
    }
    assert len(set(prints.values())) == 4


def test_weights_that_leave_nothing(load: Load, write_rows: WriteRows) -> None:
    with pytest.raises(BadInput, match="the weights of the datasets leave nothing to train on"):
        load(*_sources(write_rows, 0.01))


def test_datasets_for_evaluation(load: Load, write_rows: WriteRows, tmp_path: Path, notices: list[str]) -> None:
    train, test = _sources(write_rows, 1, 1)
    alone = load(train)
    for _ in range(2):  # the second time from the cache
        data = load(train, test_sources=[test])
        ids = [batch.input_ids[0, 0].item() for batch in data.eval_batches()]
        assert ids == list(range(20, 30))
        assert (data.num_samples, data.num_eval_samples) == (10, 10)
        assert data.fingerprint == alone.fingerprint
        assert _visits(data) == _visits(alone)
    bad = write_rows(*({"input_ids": [7, 8]} for _ in range(200)), {"input_ids": []}, name="bad.jsonl")
    load(train, test_sources=[DatasetSource(path=str(bad))])
    (tmp_path / "run" / "test-rejects.jsonl").rename(tmp_path / "run" / "rejects.jsonl")
    assert read_rejects(tmp_path) == [(str(bad), 201, "the row has no tokens")]
