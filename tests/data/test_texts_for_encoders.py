"""Rows with a text alone, or with its class, as samples for encoders; compared with transformers' own tokenisation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from transformers import AutoTokenizer

from ratel_cli.data.batches.dataset import DataSettings, TrainingData
from ratel_cli.data.batches.load_data import load_training_data
from ratel_cli.data.samples.packing import assemble
from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.sources.encode import Encoding, SampleEncoder
from ratel_cli.data.sources.formats import decide_format
from ratel_cli.data.sources.load_tokens import TokenFiles
from ratel_cli.data.text.drafts import PairDraft, RowDraft, Unusable
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer
from ratel_cli.errors import BadInput
from tests.e2e.encoders import CLASSES, encoder_rows, pair_rows, save_encoder, save_pair_model, write_encoder_rows

TEXT = "the film was grey and flat and slow, so we left"
SETTINGS = DataSettings(
    sequence_len=32,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    packing=False,
    shuffle=True,
    seed=3,
    val_set_size=0,
    task="masked_lm",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return cast(Tokenizer, AutoTokenizer.from_pretrained(save_encoder(tmp_path_factory.mktemp("bert"))))


def encoded(
    tokenizer: Tokenizer, draft: RowDraft | PairDraft, *, sequence_len: int = 64, truncates: bool = True
) -> Encoded:
    with SampleEncoder(tokenizer, sequence_len=sequence_len, train_on_inputs=False, truncates=truncates) as encoder:
        [found] = encoder.encode([draft])
    assert isinstance(found, Encoded), str(found)
    return found


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """As transformers has it, special tokens included."""
    return cast(list[int], tokenizer([text])["input_ids"][0])  # type: ignore[call-arg, index]


def test_a_text_has_the_tokenizers_special_tokens_around_it(tokenizer: Tokenizer) -> None:
    found = encoded(tokenizer, RowDraft(text=TEXT, label=None))
    [sample] = found.samples
    wanted = whole(tokenizer, TEXT)
    assert sample.input_ids.tolist() == wanted
    assert sample.labels.tolist() == [-100, *wanted[1:-1], -100], "all but these may be masked"


@pytest.mark.parametrize("sequence_len", [3, 4, 7, 100])
def test_a_long_text_becomes_several_samples(tokenizer: Tokenizer, sequence_len: int) -> None:
    """Each has the special tokens, and every token of the text is in one of them."""
    found = encoded(tokenizer, RowDraft(text=TEXT, label=None), sequence_len=sequence_len)
    first, *inside, last = whole(tokenizer, TEXT)
    assert all(len(each.input_ids) <= sequence_len for each in found.samples)
    assert all((each.input_ids[0], each.input_ids[-1]) == (first, last) for each in found.samples)
    assert [int(token) for each in found.samples for token in each.input_ids[1:-1]] == inside


@pytest.mark.parametrize("truncates", [True, False])
def test_a_long_text_with_a_class_is_truncated_or_dropped(tokenizer: Tokenizer, truncates: bool) -> None:
    found = encoded(tokenizer, RowDraft(text=TEXT, label=2), sequence_len=6, truncates=truncates)
    wanted = whole(tokenizer, TEXT)
    assert found.excess_tokens == len(wanted) - 6
    assert [each.input_ids.tolist() for each in found.samples] == ([[*wanted[:5], wanted[-1]]] if truncates else [])
    assert [each.labels.tolist() for each in found.samples] == ([[2, *[-100] * 5]] if truncates else [])


def test_no_room_beside_the_special_tokens(tokenizer: Tokenizer) -> None:
    with SampleEncoder(tokenizer, sequence_len=2, train_on_inputs=False) as encoder:
        [found] = encoder.encode([RowDraft(text=TEXT, label=0)])
    assert str(found) == "sequence_len has no room for a token"


@pytest.mark.parametrize(
    ("value", "label"),
    [("dull", 0), ("loud", 2), (1, 1), ("1", 1), (" 2 ", 2), (0, 0)],
)
def test_classes_by_name_and_by_number(value: object, label: int) -> None:
    assert draft_of(value, CLASSES).label == label


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("loudest", "is loudest; it must be one of the classes, or 0 to 2"),
        (3, "is 3; it must be one"),
        (-1, "is -1; it must be one"),
        (True, "is True; it must be one"),
        (1.0, "is 1.0; it must be one"),
        (None, "'label' is missing"),
    ],
)
def test_values_that_are_no_class(value: object, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        draft_of(value, CLASSES)


def test_a_class_whose_name_is_a_number_is_found_by_its_name() -> None:
    assert draft_of("1", ("2", "1", "0")).label == 1


def draft_of(value: object, labels: Sequence[str]) -> RowDraft:
    record: dict[str, object] = {"text": TEXT, "label": value}
    source = DatasetSource(path="p", type="classification", labels=tuple(labels))
    found = decide_format(source, record, has_chat_template=False).draft(record)
    assert isinstance(found, RowDraft)
    return found


@pytest.mark.parametrize("kind", ["mlm", "classification", "seq2seq"])
@pytest.mark.parametrize("text", ["", "  ", None, 3])
def test_texts_that_are_none(kind: str, text: object) -> None:
    record: dict[str, object] = {"text": text, "label": 0, "prompt": "a", "completion": text}
    source = DatasetSource(path="p", type=kind, labels=CLASSES)  # type: ignore[arg-type]
    with pytest.raises(Unusable):
        decide_format(source, record, has_chat_template=False).draft(record)


def load(path: Path, tokenizer: Tokenizer, settings: DataSettings, *, kind: str = "mlm", size: int = 0) -> TrainingData:
    return load_training_data(
        [DatasetSource(path=str(path), type=kind, labels=CLASSES if kind == "classification" else None)],  # type: ignore[arg-type]
        replace(settings, val_set_size=size),
        Encoding(tokenizer=tokenizer, train_on_inputs=False),
        TokenFiles(cache_dir=path.parent / "tokens", rejects_path=None),
        notice=lambda text: None,
    )


def test_batches_of_masked_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Padded to the longest row, with a mask; each masked token is its own target; other ones in the next epoch."""
    data = load(write_encoder_rows(tmp_path / "rows.jsonl"), tokenizer, SETTINGS)
    originals = {tuple(whole(tokenizer, str(row["text"]))) for row in encoder_rows()}
    for batch in data.step(0):
        assert batch.mask is not None
        restored = batch.input_ids.where(batch.targets == -100, batch.targets)
        rows = [tuple(row[:length].tolist()) for row, length in zip(restored, batch.mask.sum(1), strict=True)]
        assert set(rows) <= originals
        assert batch.input_ids.shape[1] == max(map(len, rows))
        assert (batch.targets[batch.mask == 0] == -100).all()
        assert all((row != -100).any() for row in batch.targets)
        assert batch.num_targets == int((batch.targets != -100).sum())
    assert [batch.input_ids.tolist() for batch in data.step(1)] == [batch.input_ids.tolist() for batch in data.step(1)]
    by_epoch = [
        {
            number: row
            for batch in data.step(step)
            for number, row in zip(batch.sample_ids, batch.targets.tolist(), strict=True)
        }
        for epoch in range(2)
        for step in range(epoch * data.steps_per_epoch, epoch * data.steps_per_epoch + 1)
    ]
    shared = by_epoch[0].keys() & by_epoch[1].keys()
    assert all(by_epoch[0][number] != by_epoch[1][number] for number in shared)


def test_evaluation_masks_the_same_every_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = load(write_encoder_rows(tmp_path / "rows.jsonl"), tokenizer, SETTINGS, size=8)
    first, second = ([batch.targets.tolist() for batch in data.eval_batches()] for _ in range(2))
    assert first == second
    assert data.loss_share == pytest.approx(0.15 * (1 - 2 / np.mean(data.cache.lengths)), rel=1e-6)


def test_batches_of_classes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = replace(SETTINGS, task="classification")
    data = load(write_encoder_rows(tmp_path / "rows.jsonl"), tokenizer, settings, kind="classification")
    rows = encoder_rows()
    for batch in data.step(0):
        for number, tokens, targets in zip(batch.sample_ids, batch.input_ids, batch.targets, strict=True):
            wanted = whole(tokenizer, str(rows[number]["text"]))
            assert tokens[: len(wanted)].tolist() == wanted
            assert targets.tolist() == [number % 3, *[-100] * (len(targets) - 1)]
        assert batch.num_targets == 4
    assert data.loss_share is None


def test_what_belongs_to_a_task_changes_only_its_fingerprint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A store of another task stays what it was, whatever the share of masked tokens is."""
    rows = write_encoder_rows(tmp_path / "rows.jsonl")
    other = replace(SETTINGS, mlm_probability=0.3)
    assert load(rows, tokenizer, SETTINGS).fingerprint != load(rows, tokenizer, other).fingerprint
    causal = replace(SETTINGS, task="causal_lm")
    assert causal.described() == replace(causal, mlm_probability=0.3).described()
    assert not {"task", "mlm_probability"} & causal.described().keys()


@pytest.fixture(scope="module")
def pair_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return cast(Tokenizer, AutoTokenizer.from_pretrained(save_pair_model(tmp_path_factory.mktemp("t5"))))


@pytest.mark.parametrize(("sequence_len", "excess"), [(64, 0), (6, 0), (5, 1), (2, 4)])
def test_two_texts_are_a_source_without_labels_and_a_target(
    pair_tokenizer: Tokenizer, sequence_len: int, excess: int
) -> None:
    """Each is truncated by itself, as transformers does."""
    draft = PairDraft(source="turn: red blue green tall", target="tall green blue red")
    limits = {"truncation": True, "max_length": sequence_len}
    source = pair_tokenizer([draft.source], **limits)["input_ids"][0]  # type: ignore[call-arg, index]
    target = pair_tokenizer(text_target=[draft.target], **limits)["input_ids"][0]  # type: ignore[call-arg, index]
    found = encoded(pair_tokenizer, draft, sequence_len=sequence_len)
    [sample] = found.samples
    assert sample.input_ids.tolist() == [*source, *target]
    assert sample.labels.tolist() == [*[-100] * len(source), *target]
    assert found.excess_tokens == excess
    dropped = encoded(pair_tokenizer, draft, sequence_len=sequence_len, truncates=False)
    assert len(dropped.samples) == (excess == 0)


@pytest.mark.parametrize("multiple", [1, 4])
def test_a_batch_of_pairs_pads_both_texts(pair_tokenizer: Tokenizer, multiple: int) -> None:
    rows = [("turn: red blue green", "green blue red"), ("turn: red", "red")]
    samples = []
    for source, target in rows:
        samples += encoded(pair_tokenizer, PairDraft(source=source, target=target)).samples
    batch = assemble(
        [np.array([4]), np.array([7])], samples, packed_tokens=None, padding_id=0, multiple=multiple, task="seq2seq"
    )
    assert batch.is_pair
    assert batch.sample_ids == (4, 7)
    assert batch.input_ids.shape[1] == (5 if multiple == 1 else 8)
    assert batch.targets.shape[1] == 4
    assert batch.mask is not None
    for line, (source, target) in enumerate(rows):
        wanted, labels = whole(pair_tokenizer, source), whole(pair_tokenizer, target)
        assert batch.input_ids[line].tolist() == [*wanted, *[0] * (batch.input_ids.shape[1] - len(wanted))]
        assert batch.mask[line].tolist() == [*[1] * len(wanted), *[0] * (batch.input_ids.shape[1] - len(wanted))]
        assert batch.targets[line].tolist() == [*labels, *[-100] * (4 - len(labels))]
    assert batch.num_targets == 6
    assert batch.num_tokens == 5 + 4 + 3 + 2
    assert batch.num_computed_tokens == batch.input_ids.numel() + batch.targets.numel()


@pytest.mark.parametrize(("steps", "error"), [(8, 0.0), (24, 0.1)])
def test_the_tokens_that_an_epoch_of_pairs_computes(
    tmp_path: Path, pair_tokenizer: Tokenizer, steps: int, error: float
) -> None:
    """Those of both texts with the padding of each; of a long epoch those of some steps stand for all."""
    settings = replace(SETTINGS, task="seq2seq", micro_batch_size=48 // steps, gradient_accumulation_steps=1)
    path, rows = tmp_path / "rows.jsonl", [(row["question"], row["answer"]) for row in pair_rows()]
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows))
    data = load(path, pair_tokenizer, settings, kind="seq2seq")
    assert data.steps_per_epoch == steps
    computed = sum(batch.num_computed_tokens for step in range(steps) for batch in data.step(step))
    assert data.num_computed_tokens == pytest.approx(computed, rel=error, abs=0)


def test_a_tokenizer_without_a_mask_token(tmp_path: Path) -> None:
    tokens = tmp_path / "rows.jsonl"
    tokens.write_text(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    with pytest.raises(BadInput, match="the tokenizer has no mask token"):
        load(tokens, NoTokenizer("no files", num_tokens=9), SETTINGS, kind="tokens")
