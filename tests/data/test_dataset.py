"""From files to steps: rejects, the 1 % rule, the cache, the evaluation split, and steps as a pure function."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ratel_cli.data.dataset import DatasetSource, MicroBatch
from ratel_cli.data.lines import MAX_ROW_BYTES
from ratel_cli.errors import BadInput, EnvironmentFailure
from tests.data.conftest import Load, MakeTokenizer, WriteRows
from tests.tiers import examples

GOOD = {"text": "the quick brown fox"}


def _same(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        a.sample_ids == b.sample_ids
        and torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.position_ids, b.position_ids)
        for a, b in zip(one, other, strict=True)
    )


def _rejects(tmp_path: Path) -> list[tuple[str, int, str]]:
    lines = (tmp_path / "run" / "rejects.jsonl").read_text().splitlines()
    return [(row["file"], row["line"], row["reason"]) for row in map(json.loads, lines)]


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
        assert _same(forward[index], fresh.step(index))
    assert _same(forward[0], data.step(0))
    assert _same(list(data.eval_batches()), list(fresh.eval_batches()))
    assert data.step(1000 * data.steps_per_epoch + 1)


def test_epochs_differ_only_in_order_and_only_when_shuffled(load: Load, write_rows: WriteRows) -> None:
    path = write_rows(*(GOOD for _ in range(50)))
    for shuffle in (False, True):
        data = load(path, shuffle=shuffle)
        epochs = [[data.step(epoch * 50 + index)[0].sample_ids[0] for index in range(50)] for epoch in range(3)]
        assert (epochs[0] == list(range(50))) == (not shuffle)
        assert (epochs[0] != epochs[1] != epochs[2] != epochs[0]) == shuffle
    assert [load(path, shuffle=True, seed=seed).step(0)[0].sample_ids for seed in (0, 1)] != [(0,), (0,)]


def test_targets_end_with_eos(load: Load, write_rows: WriteRows) -> None:
    (batch,) = load(write_rows(GOOD)).step(0)
    assert batch.targets[0].tolist() == [*batch.input_ids[0, 1:].tolist(), -100]
    assert batch.targets[0, -2] == 0  # <|endoftext|>
    assert batch.num_targets == batch.num_tokens - 1


def test_a_tokenizer_without_eos_gives_a_notice(
    load: Load, write_rows: WriteRows, make_tokenizer: MakeTokenizer, notices: list[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    (batch,) = load(write_rows(GOOD), tokenizer=tokenizer).step(0)
    assert batch.input_ids[0, -1] != 0
    assert notices[1] == "the tokenizer has no EOS token: the model will not learn where a text ends"


# Types


def test_every_type_and_auto_agree(load: Load, write_rows: WriteRows, notices: list[str]) -> None:
    chat = write_rows(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, name="c.jsonl"
    )
    share = write_rows(
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, name="s.jsonl"
    )
    asked = write_rows({"question": "a", "answer": "b"}, name="q.jsonl")
    first, *others = [load(path).step(0) for path in (chat, share, asked)]
    assert all(_same(first, other) for other in others)
    assert notices[0] == f"{chat}: type chat_template: conversations from messages, loss on assistant turns"
    assert notices[2] == f"{asked}: type chat_template: question and answer as two turns, loss on answer"
    pair = write_rows({"prompt": "a ", "completion": "b"}, name="p.jsonl")
    (batch,) = load(pair).step(0)
    assert batch.num_targets == 2  # "b" and the end
    alpaca = write_rows({"instruction": "a", "output": "b"}, name="a.jsonl")
    auto, named = (load(DatasetSource(path=str(alpaca), type=kind), sequence_len=512) for kind in ("auto", "alpaca"))
    assert _same(auto.step(0), named.step(0))


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
    texts = write_rows({"text": "a b c d e f g h i j"}, GOOD, name="t.jsonl")
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


def _write_text(path: Path, num_good: int, bad: list[str]) -> Path:
    """Write good rows, then the bad ones. The first bad line has the number num_good + 1."""
    path.write_text("".join(line + "\n" for line in [json.dumps(GOOD)] * num_good + bad))
    return path


def test_rejects_are_counted_and_written(load: Load, tmp_path: Path, notices: list[str]) -> None:
    path = _write_text(tmp_path / "x.jsonl", 600, [line for line, _ in BAD_LINES])
    data = load(path)
    assert (data.rejected, data.num_samples) == (6, 600)
    assert _rejects(tmp_path) == [(str(path), 601 + index, reason) for index, (_, reason) in enumerate(BAD_LINES)]
    assert notices[-1] == f"rejected 6 of 606 rows: see {tmp_path / 'run' / 'rejects.jsonl'}"


@pytest.mark.parametrize(
    ("num_good", "num_bad", "stops"), [(99, 1, False), (98, 1, True), (198, 2, False), (197, 2, True)]
)
def test_more_than_one_percent_of_rejects_stops_the_run(
    load: Load, tmp_path: Path, num_good: int, num_bad: int, stops: bool
) -> None:
    path = _write_text(tmp_path / "x.jsonl", num_good, ["{}"] * num_bad)
    if not stops:
        assert load(path).rejected == num_bad
        return
    with pytest.raises(
        BadInput, match=f"rejected {num_bad} of {num_good + num_bad} rows; more than 1 % stops the run"
    ) as caught:
        load(path)
    assert [str(other) for other in caught.value.others] == [
        f"{path}:{num_good + 1 + index}: the field 'text' is missing" for index in range(num_bad)
    ]
    assert caught.value.hint is not None
    assert str(tmp_path / "run" / "rejects.jsonl") in caught.value.hint
    assert len(_rejects(tmp_path)) == num_bad
    assert list((tmp_path / "cache").iterdir()) == []


def test_rejects_of_an_earlier_run_are_removed(load: Load, tmp_path: Path) -> None:
    path = _write_text(tmp_path / "x.jsonl", 100, ["{}"])
    load(path)
    assert len(_rejects(tmp_path)) == 1
    load(_write_text(path, 100, []))
    assert not (tmp_path / "run" / "rejects.jsonl").exists()


def test_a_parquet_row_is_bounded_too(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    texts = [{"text": "x" * (MAX_ROW_BYTES + 1)}, *[GOOD] * 99]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts), path)
    assert load(path).rejected == 1
    assert _rejects(tmp_path) == [(str(path), 1, f"the row has more than {MAX_ROW_BYTES} characters")]


def test_all_masked_rows_stop_the_run(load: Load, write_rows: WriteRows) -> None:
    path = write_rows(
        {"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}
    )
    with pytest.raises(BadInput) as caught:
        load(path)
    assert str(caught.value.others[1]) == f"{path}:2: all masked: no token has loss"
    assert load(path, train_on_inputs=True).num_samples == 2


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"])
def test_an_empty_file_stops_the_run(load: Load, tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match="nothing to train on"):
        load(path)


def test_no_source_and_no_sample_wanted(load: Load, write_rows: WriteRows) -> None:
    for sources in ([], [DatasetSource(path=str(write_rows(GOOD)), max_samples=0)]):
        with pytest.raises(BadInput, match="nothing to train on"):
            load(*sources)


def test_a_row_needs_two_tokens(load: Load, write_rows: WriteRows) -> None:
    with pytest.raises(BadInput, match="sequence_len is 1; a sample needs at least 2 tokens"):
        load(write_rows(GOOD), sequence_len=1)


# The held-out split


@pytest.mark.parametrize(("val_set_size", "num_eval"), [(0, 0), (0.0, 0), (3, 3), (0.1, 2), (0.001, 1), (19, 19)])
def test_the_split_is_disjoint_and_seeded(
    load: Load, write_rows: WriteRows, val_set_size: float, num_eval: int
) -> None:
    path = write_rows(*(GOOD for _ in range(20)))

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
        load(write_rows(*(GOOD for _ in range(20))), val_set_size=val_set_size)


# Fingerprint and cache


class Counting(PreTrainedTokenizerFast):
    """A tokenizer that counts its texts."""

    num_texts = 0

    def __call__(self, text: list[str], **more: object) -> object:
        type(self).num_texts += len(text)
        return super().__call__(text, **more)


MakeCounting = Callable[[str], Counting]
EOS_TOKEN = "<|endoftext|>"


@pytest.fixture
def counting(make_tokenizer: MakeTokenizer) -> MakeCounting:
    """Makes counting tokenizers. The count starts at 0."""
    Counting.num_texts = 0

    def make(eos_token: str) -> Counting:
        backend = make_tokenizer().backend_tokenizer
        return Counting(tokenizer_object=backend, eos_token=eos_token)  # type: ignore[no-untyped-call]

    return make


def test_the_cache_is_used_again_with_the_same_notices(
    load: Load, tmp_path: Path, counting: MakeCounting, notices: list[str]
) -> None:
    path = _write_text(tmp_path / "x.jsonl", 300, ["{}"])
    first = load(path, tokenizer=counting(EOS_TOKEN))
    first_notices, counted = list(notices), Counting.num_texts
    (tmp_path / "run" / "rejects.jsonl").unlink()
    second = load(path, tokenizer=counting(EOS_TOKEN), seed=1, packing=True, shuffle=True, micro_batch_size=2)
    assert Counting.num_texts == counted
    assert notices == first_notices * 2
    assert second.rejected == first.rejected == 1
    assert len(_rejects(tmp_path)) == 1
    assert second.fingerprint != first.fingerprint
    assert load(path, tokenizer=counting(EOS_TOKEN)).fingerprint == first.fingerprint


def test_another_cache_is_made_when_anything_changes(
    load: Load, tmp_path: Path, write_rows: WriteRows, counting: MakeCounting
) -> None:
    path = write_rows(GOOD, GOOD)
    load(path, tokenizer=counting(EOS_TOKEN))
    changes: list[Callable[[], object]] = [
        lambda: load(path, tokenizer=counting(EOS_TOKEN), sequence_len=32),
        lambda: load(path, tokenizer=counting(EOS_TOKEN), train_on_inputs=True),
        lambda: load(path, tokenizer=counting("<|im_end|>")),
        lambda: load(DatasetSource(path=str(path), max_samples=1), tokenizer=counting(EOS_TOKEN)),
        lambda: load(path, path, tokenizer=counting(EOS_TOKEN)),
        lambda: load(write_rows(GOOD, {"text": "other"}), tokenizer=counting(EOS_TOKEN)),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        assert len(list((tmp_path / "cache").iterdir())) == number


def test_the_fingerprint_depends_on_data_and_order_but_not_on_paths(load: Load, write_rows: WriteRows) -> None:
    path, twin = write_rows(GOOD, GOOD), write_rows(GOOD, GOOD, name="twin.jsonl")
    first = load(path).fingerprint
    assert len(first) == 64
    assert load(twin).fingerprint == first
    others = [
        load(path, seed=1),
        load(path, packing=True),
        load(path, shuffle=True),
        load(path, micro_batch_size=2),
        load(path, gradient_accumulation_steps=2),
        load(path, val_set_size=1),
        load(path, sequence_len=32),
        load(write_rows(GOOD, {"text": "the quick brown dog"})),
    ]
    assert len({first, *(data.fingerprint for data in others)}) == 9


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def _pickle_lengths(directory: Path) -> None:
    np.save(directory / "lengths.npy", np.array([object()]), allow_pickle=True)


def _old_version(directory: Path) -> None:
    meta = json.loads((directory / "meta.json").read_text())
    (directory / "meta.json").write_text(json.dumps({**meta, "format_version": 0}))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "token flipped": lambda directory: _flip(directory / "tokens.bin"),
    "length flipped": lambda directory: _flip(directory / "lengths.npy"),
    "cut off": lambda directory: os.truncate(directory / "tokens.bin", 8),
    "no meta": lambda directory: (directory / "meta.json").unlink(),
    "meta torn": lambda directory: os.truncate(directory / "meta.json", 9),
    "no rejects": lambda directory: (directory / "rejects.jsonl").unlink(),
    "a pickle": _pickle_lengths,
    "old version": _old_version,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_built_again(
    load: Load, tmp_path: Path, write_rows: WriteRows, notices: list[str], damage: str
) -> None:
    path = write_rows(GOOD, {"text": "and another"})
    before = load(path)
    steps = [before.step(index) for index in range(2)]
    (directory,) = (tmp_path / "cache").iterdir()
    DAMAGE[damage](directory)
    after = load(path)
    assert sum("the token cache is damaged or of another version; rebuilding it" in text for text in notices) == 1
    assert all(_same(steps[index], after.step(index)) for index in range(2))
    assert after.fingerprint == before.fingerprint
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [directory.name]


def test_a_cache_that_vanishes_during_the_run(load: Load, tmp_path: Path, write_rows: WriteRows) -> None:
    data = load(write_rows(GOOD))
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    os.truncate(tokens, 4)
    with pytest.raises(EnvironmentFailure, match="sample 0 is truncated"):
        data.step(0)
    tokens.unlink()
    with pytest.raises(EnvironmentFailure, match="No such file"):
        data.step(0)


def test_partial_caches_of_killed_runs_are_removed_and_of_running_ones_stay(
    load: Load, tmp_path: Path, write_rows: WriteRows
) -> None:
    path = write_rows(GOOD)
    load(path)
    (whole,) = (tmp_path / "cache").iterdir()
    (whole / "meta.json").unlink()
    dead, living = (whole.with_name(f"{whole.name}.partial-{pid}") for pid in (2**22 + 1, os.getppid()))
    for partial in (dead, living):
        partial.mkdir()
    load(path)
    assert not dead.exists()
    assert living.exists()


def test_a_file_changed_while_it_is_read(load: Load, tmp_path: Path, write_rows: WriteRows) -> None:
    path = write_rows(GOOD)

    def meddle(_: str) -> None:
        with path.open("a") as file:
            file.write(json.dumps(GOOD) + "\n")

    with pytest.raises(BadInput, match="was changed while it was being read"):
        load(path, notice=meddle)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_changed_since_the_run_began_has_another_fingerprint(load: Load, write_rows: WriteRows) -> None:
    before = load(write_rows(GOOD)).fingerprint
    assert load(write_rows(GOOD, GOOD)).fingerprint != before
    assert load(write_rows(GOOD)).fingerprint == before


def test_no_space_for_the_cache(
    load: Load, tmp_path: Path, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFailure, match=r"cannot be written \(no space left\)"):
        load(write_rows(GOOD))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_directory_that_cannot_be_made(load: Load, tmp_path: Path, write_rows: WriteRows) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(EnvironmentFailure, match="cannot be written"):
        load(write_rows(GOOD))
