"""Malformed tokenizer files: the base model's, damaged or not fitting the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tests.inputs.cases import DAMAGED_JSON, MalformedInput, RunFiles, no_line

_UNUSABLE = "no usable tokenizer"
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_MODELS: dict[str, object] = {
    "of no type": {"type": "nosuch"},
    "of type BPE without a vocabulary": {"type": "BPE"},
    "that is null": None,
    "that is a text": "BPE",
    "with a vocabulary that is a list": {"type": "BPE", "vocab": ["a"], "merges": []},
    "with ids that are texts": {"type": "BPE", "vocab": {"a": "0"}, "merges": []},
    "with negative ids": {"type": "BPE", "vocab": {"a": -1}, "merges": []},
    "with ids of 70 bits": {"type": "BPE", "vocab": {"a": 1 << 70}, "merges": []},
    "with merges of unknown tokens": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]},
    "with malformed merges": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x"]},
    "of words, without one for unknown ones": {"type": "WordLevel", "vocab": {"zzz": 0}, "unk_token": "[UNK]"},
    "of type Unigram without pieces": {"type": "Unigram", "vocab": [], "unk_id": 5},
}


def cases() -> Iterator[MalformedInput]:
    for name, content in DAMAGED_JSON.items():
        yield _content(_TOKENIZER, name, content)
    for name in ("cut", "not UTF-8", "a list", "nested deeply", "zeros"):
        yield _content(_CONFIG, name, DAMAGED_JSON[name])
    for name, model in _MODELS.items():
        message = f"{_UNUSABLE}|the tokenizer fails on a text"
        yield _changed(f"model {name}", _TOKENIZER, lambda values, model=model: values.update(model=model), message)
    for part in ("pre_tokenizer", "decoder", "normalizer", "post_processor"):
        change = {part: {"type": "nosuch"}}
        yield _changed(f"{part} of no type", _TOKENIZER, lambda values, change=change: values.update(change), _UNUSABLE)
    yield _changed(
        "added token without an id", _TOKENIZER, lambda values: values["added_tokens"][0].pop("id"), _UNUSABLE
    )
    yield _changed(
        "malformed pattern",
        _TOKENIZER,
        lambda values: values.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
        ),
        _UNUSABLE,
    )
    yield _changed(
        "end beyond the embedding", _TOKENIZER, _move_end, "eos_token '<.end.>' has the id 900, but the model"
    )
    yield _changed(
        "id beyond the embedding", _TOKENIZER, _move, "no usable tokenizer|has the id 1000000, but the model's"
    )

    def remove(inputs: RunFiles) -> None:
        for path in inputs.base.glob("token*"):
            path.unlink()

    yield MalformedInput(name="tokenizer that is not there", damage=no_line(remove), message=_UNUSABLE)


def _content(file_name: str, name: str, content: bytes) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        (inputs.base / file_name).write_bytes(content)

    return MalformedInput(name=f"{file_name} that is {name}", damage=no_line(damage), message=_UNUSABLE)


def _changed(name: str, file_name: str, change: Callable[[dict[str, Any]], object], message: str) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        path = inputs.base / file_name
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return MalformedInput(name=f"tokenizer with a {name}", damage=no_line(damage), message=message)


def _move_end(values: dict[str, Any]) -> None:
    values["model"]["vocab"]["<|end|>"] = values["added_tokens"][0]["id"] = 900


def _move(values: dict[str, Any]) -> None:
    """Give a token that all rows have an id far beyond the size of the vocabulary."""
    values["model"]["vocab"]["e"] = 1_000_000
