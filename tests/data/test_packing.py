"""Packing and assembly of micro-batches, compared with slow, simple implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, PreTrainedTokenizerFast

from ratel_cli.data.samples.packing import assemble, one_per_sequence, pack, random_order
from ratel_cli.data.samples.samples import Sample
from ratel_cli.sizes import IGNORED_TARGET
from tests.tiers import examples

LENGTHS = st.lists(st.integers(1, 12), max_size=60)


def _pack(lengths: list[int], capacity: int = 12, *, seed: int | None = None) -> list[list[int]]:
    """Sequences as lists of indices into `lengths`."""
    count = len(lengths)
    order = np.arange(count) if seed is None else random_order(count, seed)
    sequences = pack(np.arange(count), np.array(lengths, dtype=np.int64), capacity=capacity, order=order)
    return [sequences[sequence].tolist() for sequence in range(len(sequences))]


def _slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The length of each sequence if every sequence is tried for every sample."""
    sequences: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [sequence for sequence in range(len(sequences)) if sequences[sequence] + length <= capacity]
        if fitting:
            sequences[max(fitting, key=lambda sequence: sequences[sequence])] += length
        else:
            sequences.append(length)
    return sorted(sequences)


@given(lengths=LENGTHS, seed=st.none() | st.integers(0, 5))
def test_packing_is_best_fit_decreasing(lengths: list[int], seed: int | None) -> None:
    sequences = _pack(lengths, seed=seed)
    assert sorted(sum(lengths[sample] for sample in sequence) for sequence in sequences) == _slow_best_fit(lengths, 12)
    assert sorted(sample for sequence in sequences for sample in sequence) == list(range(len(lengths)))
    assert all(sequence == sorted(sequence) for sequence in sequences)
    assert [sequence[0] for sequence in sequences] == sorted(sequence[0] for sequence in sequences)


def test_packing_keeps_sample_numbers() -> None:
    sequences = pack(np.array([10, 20, 30]), np.array([3, 4, 1]), capacity=4, order=np.arange(3))
    assert [sequences[sequence].tolist() for sequence in range(len(sequences))] == [[10, 30], [20]]


def test_a_seed_mixes_samples_of_one_length() -> None:
    lengths = [6] * 40
    assert _pack(lengths) == [[2 * sequence, 2 * sequence + 1] for sequence in range(20)]
    mixed = _pack(lengths, seed=1)
    assert mixed == _pack(lengths, seed=1)
    assert mixed != _pack(lengths, seed=2)
    assert sum(sequence[1] == sequence[0] + 1 for sequence in mixed) < 10


def test_more_samples_than_one_chunk() -> None:
    lengths = np.random.default_rng(0).integers(2, 65, size=(1 << 16) + 1)
    sequences = pack(np.arange(len(lengths)), lengths, capacity=64, order=np.arange(len(lengths)))
    fill = np.add.reduceat(lengths[sequences.samples], sequences.starts[:-1])
    assert fill.max() <= 64
    assert fill.sum() / (64 * len(sequences)) > 0.99
    assert np.array_equal(np.sort(sequences.samples), np.arange(len(lengths)))


def test_without_packing_every_sample_has_its_own_sequence() -> None:
    sequences = one_per_sequence(np.array([4, 7]))
    assert [sequences[sequence].tolist() for sequence in range(len(sequences))] == [[4], [7]]
    assert len(one_per_sequence(np.arange(0))) == 0
    assert _pack([]) == []


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_random_order_is_a_permutation_and_depends_on_its_key_alone(count: int) -> None:
    order = random_order(count, 42, 3)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(count))
    np.random.seed(0)  # a global state that must not matter
    assert np.array_equal(order, random_order(count, 42, 3))
    if count == 1000:
        keys = [(42, 4), (43, 3), (3, 42), (-1, 3), (2**70, 3)]
        assert all(not np.array_equal(order, random_order(count, *key)) for key in keys)


def test_random_order_is_pinned() -> None:
    """This list must never change: with another order no interrupted run could resume."""
    assert random_order(8, 42, 2).tolist() == [2, 6, 0, 3, 4, 7, 5, 1]


def _sample(*labels: int) -> Sample:
    ids = np.arange(100, 100 + len(labels), dtype=np.int32)
    return Sample(input_ids=ids, labels=np.array(labels, dtype=np.int32))


@examples(60)
@given(
    shape=st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=3), min_size=1, max_size=4),
    packed=st.booleans(),
    multiple=st.integers(1, 8),
    data=st.data(),
)
def test_micro_batches_against_a_loop_over_positions(
    shape: list[list[int]], packed: bool, multiple: int, data: st.DataObject
) -> None:
    if not packed:
        shape = [row[:1] for row in shape]
    label = st.sampled_from([IGNORED_TARGET, 5, 6])
    samples = [_sample(*data.draw(st.lists(label, min_size=n, max_size=n))) for row in shape for n in row]
    numbers = iter(range(40, 80))
    rows = [np.array([next(numbers) for _ in row]) for row in shape]
    width = 16 if packed else max(sum(row) for row in shape)
    while not packed and width % multiple:
        width += 1
    batch = assemble(rows, samples, packed_tokens=16 if packed else None, padding_id=9, multiple=multiple)

    left = iter(samples)
    for index, row in enumerate(shape):
        expected: list[tuple[int, int, int]] = []  # (id, target, position)
        for _ in row:
            sample = next(left)
            follows = [*sample.labels[1:].tolist(), IGNORED_TARGET]
            expected += list(zip(sample.input_ids.tolist(), follows, range(len(follows)), strict=True))
        padding = width - len(expected)
        begin = 0 if packed else len(expected)
        expected += [(9, IGNORED_TARGET, begin + offset) for offset in range(padding)]
        got = zip(
            *(tensor[index].tolist() for tensor in (batch.input_ids, batch.targets, batch.position_ids)), strict=True
        )
        assert list(got) == expected
    assert batch.num_tokens == sum(map(sum, shape))
    assert batch.num_targets == int((batch.targets != IGNORED_TARGET).sum())
    assert batch.num_targets == sum(int((sample.labels[1:] != IGNORED_TARGET).sum()) for sample in samples)
    assert batch.sample_ids == tuple(range(40, 40 + len(samples)))
    tensors = (batch.input_ids, batch.targets, batch.position_ids)
    assert all(tensor.dtype == torch.int64 and tensor.shape == (len(shape), width) for tensor in tensors)


def test_transformers_separates_samples_and_padding_by_our_positions() -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    samples = [_sample(1, 2, 3), _sample(1, 2), _sample(1, 2)]
    batch = assemble([np.array([0, 1]), np.array([2])], samples, packed_tokens=6, padding_id=0)
    found = find_packed_sequence_indices(batch.position_ids)
    assert found is not None
    assert found.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_gets_positions_where_transformers_collators_give_them(packed: bool) -> None:
    """Rows of one sample have none, which the model's code counts by itself; samples that share a row do."""
    samples = [_sample(1, 2, 3), _sample(1, 2)]
    rows = [{"input_ids": each.input_ids.tolist(), "labels": each.labels.tolist()} for each in samples]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"p": 0}, unk_token="p")), pad_token="p")
    collate = DataCollatorWithFlattening() if packed else DataCollatorForSeq2Seq(tokenizer)
    wanted = collate(rows)
    batch = assemble(
        [np.array([0, 1])] if packed else [np.array([0]), np.array([1])],
        samples,
        packed_tokens=5 if packed else None,
        padding_id=0,
    )
    assert ("position_ids" in batch.inputs) == ("position_ids" in wanted) == packed
    assert torch.equal(batch.inputs["input_ids"], wanted["input_ids"])
    assert not packed or torch.equal(batch.inputs["position_ids"], wanted["position_ids"])
    assert batch.to(torch.device("cpu")).inputs.keys() == batch.inputs.keys()
