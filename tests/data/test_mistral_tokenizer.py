"""The tokenizer of mistral-common: texts, hashes, the choice of a file, and files that cannot be read."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Library
from mistral_common.tokens.tokenizers.utils import get_one_valid_tokenizer_file

from ratel_cli.commands import install_extras
from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.sources.encode import SampleEncoder
from ratel_cli.data.text import mistral_tokenizer
from ratel_cli.data.text.drafts import TextDraft
from ratel_cli.data.text.mistral_tokenizer import MistralTokenizer, mistral_file
from ratel_cli.data.text.prompts import encode_prompts
from ratel_cli.data.text.tokenizer import has_chat_template, tokenizer_hash
from ratel_cli.errors import BadInput
from tests.mistral_vocabularies import DATA, SHIPPED, save_vocabulary

TEXTS = ["Hello, world", "", " [INST] </s>", "straße 東京\n\n"]


@pytest.mark.parametrize("version", SHIPPED)
def test_texts(tmp_path: Path, version: str) -> None:
    path = save_vocabulary(tmp_path, version)
    ours, theirs = MistralTokenizer(path), Library.from_file(str(path)).instruct_tokenizer.tokenizer
    for special in (False, True):
        expected = [theirs.encode(text, bos=special, eos=False) for text in TEXTS]
        assert ours(TEXTS, add_special_tokens=special)["input_ids"] == expected
    assert len(ours) == theirs.n_words and has_chat_template(ours)
    assert ours.pad_token_id == (theirs.pad_id if theirs.pad_id >= 0 else None)
    with SampleEncoder(ours, sequence_len=64, train_on_inputs=False) as encoder:
        (found,) = encoder.encode([TextDraft(prompt="two and", answer=" two")])
    assert isinstance(found, Encoded)
    ids = [theirs.bos_id, *theirs.encode("two and", bos=False, eos=False), *theirs.encode(" two", bos=False, eos=False)]
    assert found.samples[0].input_ids.tolist() == [*ids, theirs.eos_id]
    (raw,) = encode_prompts(ours, ["two and"], raw=True, notice=print)
    assert raw == theirs.encode("two and", bos=True, eos=False)


@pytest.mark.parametrize("version", ["v3", "v3 tekken"])
def test_the_text_of_tokens(tmp_path: Path, version: str) -> None:
    tokenizer = MistralTokenizer(save_vocabulary(tmp_path, version))
    (ids,) = tokenizer(["Hello, world"], add_special_tokens=True)["input_ids"]  # type: ignore[misc]
    assert tokenizer.eos_token_id is not None
    ids = [*ids, tokenizer.eos_token_id, len(tokenizer), 10**6]  # a model may have more rows than there are tokens
    for skips, expected in ((False, "<s>Hello, world</s>"), (True, "Hello, world")):
        assert tokenizer.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False) == expected


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    """Two versions may have the same tokens, and encode conversations in other ways."""
    names = [("v13", 600), ("v11", 600), ("v13", 601), ("v13", 600)]
    paths = [save_vocabulary(tmp_path / f"{at}", version, num_tokens=n) for at, (version, n) in enumerate(names)]
    first, *others = (tokenizer_hash(MistralTokenizer(path)) for path in paths)
    assert [each == first for each in others] == [False, False, True]


def test_the_file_is_the_one_that_mistral_common_takes(caplog: pytest.LogCaptureFixture) -> None:
    names = ["tekken.json", "tokenizer.model", "tokenizer.model.v3", "tokenizer.model.v7m1"]
    for number in range(1, len(names) + 1):
        for some in itertools.permutations(names, number):
            assert mistral_file([*some, "tokenizer.json", "config.json"]) == get_one_valid_tokenizer_file(list(some))
    assert caplog.messages, "theirs warns of every choice"
    assert mistral_file(["tokenizer.json", "spiece.model", "tekken.json.bak"]) is None


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("tekken.json", "{", "Expecting property name"),
        ("tekken.json", '{"config": {"version": "v99"}}', "Unknown version: v99"),
        ("tokenizer.model.v3", "no model", "no usable tokenizer: "),
        ("tokenizer.model.v99", "", "no usable tokenizer: Unrecognized tokenizer file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput) as raised:
        MistralTokenizer(tmp_path / name)
    assert (
        raised.value.message.startswith(f"{tmp_path / name}: no usable tokenizer: ") and reason in raised.value.message
    )


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistral_tokenizer, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="the package mistral-common is not installed here") as raised:
        MistralTokenizer(DATA / SHIPPED["v1"])
    assert raised.value.hint is not None and install_extras("mistral") in raised.value.hint
