"""From files to steps: rejects, the 1 % rule, the cache, the evaluation split, and steps as a pure function."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.batches.dataset import MicroBatch, TrainingData
from ratel_cli.data.files.lines import MAX_ROW_BYTES
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput
from tests.data.conftest import GOOD_ROW, Load, MakeTokenizer, WriteRows, read_rejects, same_batches, write_text_rows
from tests.tiers import examples

# Steps


@examples(25)
@given(
    lengths=st.lists(st.integers(2, 16), min_size=1, max_size=30),
    micro_batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    packing=st.booleans(),
    shuffle=st.booleans(),
    num_eval=st.integers(0, 3),
)
@example(lengths=[16] * 7, micro_batch_size=2, accumulation=3, packing=False, shuffle=True, num_eval=0)
@example(lengths=[16] * 10, micro_batch_size=2, accumulation=2, packing=True, shuffle=False, num_eval=1)
def test_an_epoch_holds_every_sample_once_and_exactly(
    load: Load,
    write_rows: WriteRows,
    lengths: list[int],
    micro_batch_size: int,
    accumulation: int,
    packing: bool,
    shuffle: bool,
    num_eval: int,
) -> None:
    num_eval = min(num_eval, len(lengths) - 1)
    rows = [[5 + (7 * index + offset) % 200 for offset in range(length)] for index, length in enumerate(lengths)]
    data = load(
        write_rows(*({"input_ids": row} for row in rows)),
        sequence_len=16,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        packing=packing,
        shuffle=shuffle,
        val_set_size=num_eval,
    )
    for epoch in range(2):
        first = epoch * data.steps_per_epoch
        steps = [data.step(first + index) for index in range(data.steps_per_epoch)]
        batches = [batch for step in steps for batch in step]
        trained = [sample for batch in batches for sample in batch.sample_ids]
        held_out = [sample for batch in data.eval_batches() for sample in batch.sample_ids]
        assert sorted(trained + held_out) == list(range(len(lengths)))
        assert (len(trained), len(held_out)) == (data.num_samples, data.num_eval_samples)
        assert len(held_out) == num_eval
        assert sum(batch.num_tokens for batch in batches) == data.num_tokens
        assert all(len(step) == accumulation for step in steps[:-1])
        assert all(len(batch.input_ids) == micro_batch_size for batch in batches[:-1])
        assert 1 <= len(steps[-1]) <= accumulation
        for batch in batches:
            _check_samples(batch, rows, packing=packing)


@pytest.mark.parametrize("packing", [False, True])
def test_the_share_of_tokens_with_loss_is_that_of_the_steps(load: Load, write_rows: WriteRows, packing: bool) -> None:
    rows = [{"input_ids": [7] * 6, "labels": [-100] * (index % 6) + [7] * (6 - index % 6)} for index in range(11)]
    data = load(write_rows(*rows), packing=packing, val_set_size=0)
    batches = [batch for index in range(data.steps_per_epoch) for batch in data.step(index)]
    assert data.loss_share == sum(batch.num_targets for batch in batches) / data.num_tokens
    assert 0 < data.loss_share < 1


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_same_steps_in_other_micro_batches(load: Load, write_rows: WriteRows, size: int, packing: bool) -> None:
    """`split_by` gives what loading with that split gives, its fingerprint too."""
    path = write_rows(*({"input_ids": [5 + index] * (3 + index % 9)} for index in range(40)))

    def loaded(micro_batch_size: int) -> TrainingData:
        number = 6 // micro_batch_size
        return load(
            path,
            sequence_len=16,
            packing=packing,
            shuffle=True,
            micro_batch_size=micro_batch_size,
            gradient_accumulation_steps=number,
        )

    one, wanted = loaded(1), loaded(size)
    before, found = one.fingerprint, one.split_by(size)
    assert found.fingerprint == wanted.fingerprint
    assert (one.fingerprint, found.fingerprint == before) == (before, size == 1)
    for step in range(2 * wanted.steps_per_epoch):
        assert same_batches(found.step(step), wanted.step(step))


def _check_samples(batch: MicroBatch, rows: list[list[int]], *, packing: bool) -> None:
    """Each sample is complete, with its own targets and no others."""
    wanted = iter(batch.sample_ids)
    for ids, targets, positions in zip(
        batch.input_ids.tolist(), batch.targets.tolist(), batch.position_ids.tolist(), strict=True
    ):
        assert len(ids) == 16 if packing else len(ids) <= 16
        at = 0
        while at < len(ids) and any(target >= 0 for target in targets[at:]):
            row = rows[next(wanted)]
            end = at + len(row)
            assert ids[at:end] == row
            assert targets[at:end] == [*row[1:], -100]
            assert positions[at:end] == list(range(len(row)))
            at = end
            if not packing:
                break
        assert set(targets[at:]) <= {-100}
    assert list(wanted) == []


@pytest.mark.parametrize("packing", [False, True])
def test_steps_are_pure_and_random_access(load: Load, write_rows: WriteRows, packing: bool) -> None:
    path = write_rows(*({"input_ids": list(range(5, 7 + index % 9))} for index in range(40)))
    arguments = {"sequence_len": 16, "micro_batch_size": 2, "packing": packing, "shuffle": True, "seed": 3}
    data, fresh = load(path, **arguments), load(path, **arguments)
    count = 3 * data.steps_per_epoch
    forward = [data.step(index) for index in range(count)]
    for index in reversed(range(count)):
        assert same_batches(forward[index], fresh.step(index))
    assert same_batches(forward[0], data.step(0))
    assert same_batches(list(data.eval_batches()), list(fresh.eval_batches()))
    assert data.step(1000 * data.steps_per_epoch + 1)


def test_epochs_differ_only_in_order_and_only_when_shuffled(load: Load, write_rows: WriteRows) -> None:
    path = write_rows(*(GOOD_ROW for _ in range(50)))
    for shuffle in (False, True):
        data = load(path, shuffle=shuffle)
        epochs = [[data.step(epoch * 50 + index)[0].sample_ids[0] for index in range(50)] for epoch in range(3)]
        assert (epochs[0] == list(range(50))) == (not shuffle)
        assert (epochs[0] != epochs[1] != epochs[2] != epochs[0]) == shuffle
    assert [load(path, shuffle=True, seed=seed).step(0)[0].sample_ids for seed in (0, 1)] != [(0,), (0,)]


def test_a_tokenizer_without_eos_gives_a_notice(
    load: Load, write_rows: WriteRows, make_tokenizer: MakeTokenizer, notices: list[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    (batch,) = load(write_rows(GOOD_ROW), tokenizer=tokenizer).step(0)
    assert batch.input_ids[0, -1] != 0
    assert notices[1] == "the tokenizer has no EOS token: the model will not learn where a text ends"


# Types


@pytest.mark.full
def test_conversations_of_every_form_agree_and_are_told(load: Load, write_rows: WriteRows, notices: list[str]) -> None:
    steps = []
    for number, (row, words) in enumerate([
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "conversations in the column messages, loss on assistant turns"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         "conversations in the column conversations, loss on assistant turns"),
        ({"question": "a", "answer": "b"}, "question and answer as two turns, loss on answer"),
    ]):  # fmt: skip
        path = write_rows(row, name=f"{number}.jsonl")
        steps.append(load(path).step(0))
        assert f"{path}: type chat_template: {words}" in notices
    assert all(same_batches(steps[0], each) for each in steps[1:])


def test_sources_follow_each_other_and_max_samples_counts_good_rows(
    load: Load, write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    one = write_rows(*({"text": f"one {index}"} for index in range(300)), {"bad": 1}, name="one.jsonl")
    two = write_rows({"body": "two"}, {"body": "three"}, name="two.jsonl")
    data = load(
        DatasetSource(path=str(one), max_samples=2),
        DatasetSource(path=str(two), field="body"),
        DatasetSource(path=str(two), type="completion", field="body", max_samples=1),
    )
    texts = [tokenizer.decode(data.step(index)[0].input_ids[0], skip_special_tokens=True) for index in range(5)]
    assert texts == ["one 0", "one 1", "two", "three", "two"]
    assert (data.num_samples, data.rejected) == (5, 0)


def test_long_samples_are_split_or_truncated_and_counted(load: Load, write_rows: WriteRows, notices: list[str]) -> None:
    texts = write_rows({"text": "a b c d e f g h i j"}, GOOD_ROW, name="t.jsonl")
    tokens = write_rows({"input_ids": [5] * 9}, {"input_ids": [5] * 8}, {"input_ids": [5] * 20}, name="i.jsonl")
    data = load(texts, tokens, sequence_len=8)
    assert notices[2:] == [
        "split 1 of 5 texts: longer than sequence_len (8 tokens)",
        "truncated 2 of 5 samples: longer than sequence_len (8 tokens)",
    ]
    assert max(len(data.step(index)[0].input_ids[0]) for index in range(data.steps_per_epoch)) == 8


# Rejects

BAD_LINES = [
    ('{"text": ', "not JSON: Expecting value at column 10"),
    ("[1]", "a row must be an object, not an array"),
    ("{}", "the field 'text' is missing"),
    ('{"text": 5}', "'text' must be text, not a number"),
    ('{"text": ""}', "the text to train on is empty"),
    ('{"text": "\\ud800"}', "'text' contains half of a surrogate pair"),
]


def test_rejects_are_counted_and_written(load: Load, tmp_path: Path, notices: list[str]) -> None:
    path = write_text_rows(tmp_path / "x.jsonl", 600, [line for line, _ in BAD_LINES])
    data = load(path)
    assert (data.rejected, data.num_samples) == (6, 600)
    assert read_rejects(tmp_path) == [(str(path), 601 + index, reason) for index, (_, reason) in enumerate(BAD_LINES)]
    assert notices[-1] == f"rejected 6 of 606 rows: see {tmp_path / 'run' / 'rejects.jsonl'}"


def test_where_no_row_fits_the_type_is_what_is_wrong(load: Load, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        load(write_text_rows(tmp_path / "x.jsonl", 0, ['{"text": 3}'] * 3))
    hint = caught.value.others[-1].hint
    assert hint is not None and hint.startswith("no row is as the dataset's `type` and columns say; set those that the")
    with pytest.raises(BadInput) as caught:
        load(write_text_rows(tmp_path / "x.jsonl", 0, ['{"text": 3}', '{"text": null}']))
    hint = caught.value.others[-1].hint
    assert hint is not None and hint.startswith("repair or remove these rows")


@pytest.mark.parametrize(
    ("num_good", "num_bad", "stops"), [(99, 1, False), (98, 1, True), (198, 2, False), (197, 2, True)]
)
def test_more_than_one_percent_of_rejects_stops_the_run(
    load: Load, tmp_path: Path, num_good: int, num_bad: int, stops: bool
) -> None:
    path = write_text_rows(tmp_path / "x.jsonl", num_good, ["{}"] * num_bad)
    if not stops:
        assert load(path).rejected == num_bad
        return
    with pytest.raises(
        BadInput, match=f"rejected {num_bad} of {num_good + num_bad} rows; at most 1 % may be bad"
    ) as caught:
        load(path)
    assert [str(other) for other in caught.value.others] == [
        f"{path}:{num_good + 1 + index}: the field 'text' is missing" for index in range(num_bad)
    ]
    hint = caught.value.others[-1].hint
    assert hint is not None and str(tmp_path / "run" / "rejects.jsonl") in hint
    assert len(read_rejects(tmp_path)) == num_bad
    assert list((tmp_path / "cache").iterdir()) == []


def test_rejects_of_an_earlier_run_are_removed(load: Load, tmp_path: Path) -> None:
    path = write_text_rows(tmp_path / "x.jsonl", 100, ["{}"])
    load(path)
    assert len(read_rejects(tmp_path)) == 1
    load(write_text_rows(path, 100, []))
    assert not (tmp_path / "run" / "rejects.jsonl").exists()


def test_a_parquet_row_is_bounded_too(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = [{"text": "x" * (MAX_ROW_BYTES + 1)}, *[GOOD_ROW] * 99]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), path)
    assert load(path).rejected == 1
    assert read_rejects(tmp_path) == [(str(path), 1, f"the row has more than {MAX_ROW_BYTES} characters")]


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_an_empty_file_stops_the_run(load: Load, tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match="no samples: no "):
        load(path)


def test_no_source_and_no_sample_wanted(load: Load, write_rows: WriteRows) -> None:
    for sources in ([], [DatasetSource(path=str(write_rows(GOOD_ROW)), max_samples=0)]):
        with pytest.raises(BadInput, match="no samples: no "):
            load(*sources)


def test_a_row_needs_two_tokens(load: Load, write_rows: WriteRows) -> None:
    with pytest.raises(BadInput, match="sequence_len is 1; a sample needs at least 2 tokens"):
        load(write_rows(GOOD_ROW), sequence_len=1)


# The held-out split


@pytest.mark.parametrize(("val_set_size", "num_eval"), [(0, 0), (0.0, 0), (3, 3), (0.1, 2), (0.001, 1), (19, 19)])
def test_the_split_is_disjoint_and_seeded(
    load: Load, write_rows: WriteRows, val_set_size: float, num_eval: int
) -> None:
    path = write_rows(*(GOOD_ROW for _ in range(20)))

    def held_out(**changes: object) -> list[int]:
        data = load(path, val_set_size=val_set_size, **changes)
        assert (data.num_samples, data.num_eval_samples) == (20 - num_eval, num_eval)
        return [sample for batch in data.eval_batches() for sample in batch.sample_ids]

    assert held_out() == held_out(packing=True, shuffle=True, micro_batch_size=4)
    if num_eval == 3:
        assert held_out() != held_out(seed=1)


@pytest.mark.parametrize("val_set_size", [20, 21, 0.99, -1])
def test_a_split_that_leaves_nothing(load: Load, write_rows: WriteRows, val_set_size: float) -> None:
    with pytest.raises(BadInput, match="val_set_size"):
        load(write_rows(*(GOOD_ROW for _ in range(20))), val_set_size=val_set_size)


def test_the_tokens_that_an_epoch_computes(load: Load, write_rows: WriteRows) -> None:
    """They are those of its micro-batches, padding included."""
    path = write_rows(*({"text": "fox " * (1 + 7 * index % 23)} for index in range(41)))
    for packing, shuffle, (size, number) in product(
        (False, True), (False, True), [(1, 1), (1, 3), (2, 2), (3, 1), (50, 1)]
    ):
        data = load(path, packing=packing, shuffle=shuffle, micro_batch_size=size, gradient_accumulation_steps=number)
        batches = [batch for step in range(data.steps_per_epoch) for batch in data.step(step)]
        computed = sum(batch.input_ids.numel() for batch in batches)
        assert data.num_computed_tokens == computed
        assert data.packing_efficiency == sum(batch.num_tokens for batch in batches) / computed
        assert packing or size > 1 or data.packing_efficiency == 1
        full_tokens = data.steps_per_epoch * size * number * 64
        assert (data.filling is None) == packing
        if data.filling is not None:
            assert data.filling.computed * full_tokens == pytest.approx(computed)
            assert data.filling.tokens * full_tokens == pytest.approx(sum(batch.num_tokens for batch in batches))
            assert data.filling.micro_batches * data.steps_per_epoch * number == pytest.approx(len(batches))


def test_rows_of_the_model_decide_what_is_cached(load: Load, write_rows: WriteRows, tmp_path: Path) -> None:
    """The tokens of a model with a row for each of them are not those of a smaller one. A tokenizer whose ids fit has
    one key for all models."""
    path = write_rows(*[{"text": "one two"}] * 200, {"text": "<|im_end|>"})
    whole = load(path)
    num_ids = 1 + max(int(sample.input_ids.max()) for sample in whole.cache.read(range(whole.num_samples)))
    assert load(path, num_embeddings=10_000).cache.directory == whole.cache.directory
    with pytest.raises(BadInput, match="rejected 200 of 201 rows"):  # the last one has another
        load(path, num_embeddings=num_ids - 1)
