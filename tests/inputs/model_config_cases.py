"""Malformed model configurations: the base model's config.json, damaged or asking for what cannot be trained."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.inputs.cases import DAMAGED_JSON, MalformedInput, RunFiles, no_line

_NOT_KNOWN = "config.json: not a model configuration that transformers knows"
_NOT_BUILT = "config.json: transformers cannot build a .* language model from it"
_OTHER_SHAPE = "has shape .*, but the model needs|is missing|does not belong to|cannot be combined"

_VALUES: dict[str, dict[Any, str]] = {
    "model_type": {
        None: _NOT_KNOWN,
        7: _NOT_KNOWN,
        "": _NOT_KNOWN,
        "nosuch": _NOT_KNOWN,
        "\x1b[2J": _NOT_KNOWN,
        "t5": "encoder-decoder|cannot build|not a model",
        "vit": "cannot build|only causal language models",
        "gpt2": _OTHER_SHAPE,
    },
    "hidden_size": {0: "config.json", -32: "config.json", "32": "config.json", 32.5: "config.json", 64: _OTHER_SHAPE},
    "intermediate_size": {
        None: "config.json",
        -1: "config.json",
        0: "without elements",
        49: _OTHER_SHAPE,
        1 << 70: "config.json",
    },
    "num_hidden_layers": {
        0: "config.json: num_hidden_layers is 0; it must be at least 1",
        -1: "config.json: num_hidden_layers is -1; it must be at least 1",
        "2": "config.json",
        1: _OTHER_SHAPE,
        3: _OTHER_SHAPE,
        1_000_000: "1000000 layers are more than the limit",
        1 << 70: "layers are more than",
    },
    "num_attention_heads": {0: "config.json", "4": "config.json", 8: "config.json|has shape"},
    "num_key_value_heads": {
        3: "4 attention heads cannot share 3 key-value heads",
        0: "config.json|has shape",
        4: _OTHER_SHAPE,
        -1: "config.json|has shape",
    },
    "head_dim": {16: _OTHER_SHAPE, 0: "config.json|has shape", "x": "config.json"},
    "vocab_size": {0: "config.json|has shape", -1: "config.json", "many": "config.json", 1_000: _OTHER_SHAPE},
    "hidden_act": {None: "config.json", "nosuch": "config.json", "silu; import os": "config.json"},
    "rope_parameters": {"x": "config.json", 7: "config.json"},
    "tie_word_embeddings": {True: "ties .* to .*, but their values in the files differ"},
    "output_router_logits": {True: "sets output_router_logits: true"},
    "output_hidden_states": {True: "sets output_hidden_states: true"},
    "layerdrop": {0.1: "sets layerdrop: layers that are skipped"},
    "is_encoder_decoder": {True: "is an encoder-decoder"},
    "attention_dropout": {
        2: "attention_dropout is 2; it must be a probability",
        -0.1: "it must be a probability between 0 and 1",
        None: "attention_dropout is None; it must be a probability|not a model configuration",
    },
    "initializer_range": {
        float("inf"): "initializer_range is inf; it must be a number|not a model configuration",
        -0.02: "initializer_range is -0.02; it must be a number|not a model configuration",
    },
    "mlp_bias": {True: _OTHER_SHAPE},
    "attention_bias": {True: _OTHER_SHAPE},
    "pad_token_id": {1 << 40: "config.json"},
}
_OBJECTS: tuple[tuple[str, object, str], ...] = (
    ("rope_parameters", {"rope_type": "nosuch"}, "config.json"),
    ("rope_parameters", {"rope_type": "linear"}, "config.json"),
    ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}, "config.json"),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantised by gptq, but no file"),
    ("quantization_config", {"quant_method": "nosuch"}, "config.json|the weights are quantised"),
)
_CONTENTS = {
    **DAMAGED_JSON,
    "in single quotes": b"{'model_type': 'llama'}",
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "a number": b"7",
    "YAML": b"model_type: llama\n",
}


def cases() -> Iterator[MalformedInput]:
    for key, values in _VALUES.items():
        for value, message in values.items():
            yield _changed(key, value, message)
    for key, value, message in _OBJECTS:
        yield _changed(key, value, message)
    for name, content in _CONTENTS.items():
        yield _placed(name, lambda path, content=content: path.write_bytes(content), _NOT_KNOWN)
    yield _placed("not there", lambda path: None, "no config.json")
    yield _placed("a directory", lambda path: path.mkdir(), "config.json is not a regular file")
    yield _placed("a dangling link", lambda path: path.symlink_to("gone"), "config.json is missing")
    yield _placed("a FIFO", os.mkfifo, "config.json is not a regular file")
    yield _placed(
        "a link to a device", lambda path: path.symlink_to("/dev/zero"), "config.json is a link to a file outside"
    )
    yield _remote_code()
    yield from _bases()


def _changed(key: str, value: object, message: str) -> MalformedInput:
    def damage(inputs: RunFiles) -> None:
        path = inputs.base / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return MalformedInput(name=f"config.json with {key}: {value!r}", damage=no_line(damage), message=message)


def _placed(name: str, put: Callable[[Path], object], message: str) -> MalformedInput:
    """Something else in the place of config.json."""

    def damage(inputs: RunFiles) -> None:
        path = inputs.base / "config.json"
        path.unlink()
        put(path)

    return MalformedInput(name=f"config.json that is {name}", damage=no_line(damage), message=message)


def _remote_code() -> MalformedInput:
    """A model with its own code. The code must not run."""

    def damage(inputs: RunFiles) -> None:
        code = f"open({str(inputs.directory / 'canary')!r}, 'w').close()\n"
        (inputs.base / "modeling_own.py").write_text(code)
        path = inputs.base / "config.json"
        own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "own", "auto_map": own}))

    return MalformedInput(name="config.json with code of its own", damage=no_line(damage), message=_NOT_KNOWN)


def _bases() -> Iterator[MalformedInput]:
    """Values of `base_model` that are no directory with a model."""

    def base(name: str, value: str, message: str, **settings: object) -> MalformedInput:
        def damage(inputs: RunFiles) -> None:
            inputs.settings.update({"base_model": value.replace("HERE", str(inputs.directory)), **settings})

        return MalformedInput(name=f"base_model that is {name}", damage=no_line(damage), message=message)

    neither = "there is no directory .*, and this cannot be a hub id"
    yield base("not there", "HERE/gone", neither)
    yield base("a file", "HERE/run.yaml", "run.yaml is a file")
    yield base("an empty directory", "HERE", "no config.json: this is not a model's directory")
    yield base("inside a file", "HERE/run.yaml/base", neither)
    yield base("a name too long", "HERE/" + "a" * 300, neither)
    yield base("a path too long", "HERE/" + "a/" * 3_000, neither)
    yield base("a device", "/dev/null", "/dev/null is a file")
    yield base("a URL", "https://example.org/model", neither)
    yield base("a name with spaces", "my model", neither)
    yield base("a name with a line end", "a\nb", r"base_model: 'a\\nb' is neither a directory nor a hub id")
