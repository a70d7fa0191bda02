"""Directories that are no causal language model, or none that can be trained: the error names what they are.

`finetune` and `check` say the same before any work: no store and no output directory is made.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import ratel
from tests.tiers import sample_kinds

Change = Callable[[Path], object]
"""Makes a directory, which is a copy of a healthy base model, what it shall be."""

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip


class Case(NamedTuple):
    """One directory, and parts of the error and of the hint that must name it."""

    kind: str
    name: str
    change: Change
    message: tuple[str, ...]
    hint: str


def only(**files: str) -> Change:
    """Leave nothing but these files. In their names, `_DOT_` stands for a dot and two underscores for a slash."""

    def change(directory: Path) -> None:
        shutil.rmtree(directory)
        for name, content in files.items():
            path = directory / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return change


def config_of(model_type: str, *, architecture: str | None = None, **keys: object) -> Change:
    """The configuration of a model of this type, whose weights must not matter."""

    def change(directory: Path) -> None:
        config = AutoConfig.for_model(model_type, **keys)
        config.architectures = None if architecture is None else [architecture]
        config.save_pretrained(directory)

    return change


def without_weights(*names: str) -> Change:
    """Other files in place of the weights."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        for name in names:
            (directory / name).write_bytes(b"x")

    return change


def edited(**keys: object) -> Change:
    """Keys of config.json."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    return change


def saved_classifier(directory: Path) -> None:
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(directory))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)


def renamed_classifier(directory: Path) -> None:
    """A classifier whose class transformers does not know."""
    saved_classifier(directory)
    edited(architectures=["OurScorer"])(directory)


def bare_model(directory: Path) -> None:
    """The model without its head, as `AutoModel` saves it."""
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name.removeprefix("model."): each for name, each in tensors.items() if name != "lm_head.weight"},
        directory / "model.safetensors",
    )
    edited(architectures=["LlamaModel"])(directory)


def saved(model_type: str, **keys: object) -> Change:
    """A whole causal language model of this type, saved by transformers."""

    def change(directory: Path) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **keys)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]

    return change


ADAPTER = only(adapter_config_DOT_json="{}", adapter_model_DOT_safetensors="x")
DECODER = "use a decoder model; its config.json names a causal language model"
ENCODER = "it trains on datasets of type: mlm or classification"
PAIRS = "it trains on datasets of type: seq2seq"
CLASSIFIER = "is a sequence classifier; only causal language models can be fine-tuned"
ENCODER_CLASSIFIER = "is a sequence classifier; it does not learn to predict the next token"
_NO_PART = "its language model cannot be trained within it: it cannot run on text alone"
LANGUAGE_PART = "as a model of its own and train that; docs/guide/models.md shows how"
CASES = [
    Case("directory", "empty", only(README="x"), ("no config.json",), "safetensors files"),
    Case("directory", "adapter", ADAPTER, ("adapter_config.json", "an adapter (LoRA"), "merge_and_unload"),
    Case(
        "directory",
        "adapter without weights",
        without_weights("adapter_config.json"),
        ("an adapter (LoRA",),
        "merge_and_unload",
    ),
    Case("directory", "gguf", only(m_DOT_gguf="x"), ("m.gguf", "GGUF"), "gguf_file"),
    Case("directory", "gguf and config", without_weights("m.gguf"), ("m.gguf", "GGUF"), "gguf_file"),
    Case(
        "directory",
        "maker's format",
        only(params_DOT_json="{}", consolidated_DOT_00_DOT_pth="x"),
        ("consolidated.00.pth", "format of the model's maker"),
        "version for transformers",
    ),
    Case(
        "directory",
        "maker's weights",
        without_weights("consolidated.safetensors"),
        ("consolidated.safetensors", "format of the model's maker"),
        "version for transformers",
    ),
    Case("directory", "pipeline", only(model_index_DOT_json="{}"), ("a diffusion pipeline",), "safetensors files"),
    Case("directory", "parent", only(checkpoint5__config_DOT_json="{}"), ("no config.json",), "/checkpoint5?"),
    Case(
        "directory",
        "run without export",
        only(run__config_DOT_yaml=""),
        ("has not exported a model yet",),
        "`ratel export ",
    ),
    Case(
        "directory",
        "run of an adapter",
        only(run__config_DOT_yaml="", adapter_config_DOT_json="{}"),
        ("an adapter that a run has trained",),
        "`ratel merge ",
    ),
    Case("directory", "nothing but a config", without_weights(), ("no weights",), "random_init"),
    Case(
        "class",
        "classifier",
        saved_classifier,
        ("LlamaForSequenceClassification (llama)", CLASSIFIER),
        "made from, a LlamaForCausalLM",
    ),
    Case(
        "class",
        "unknown class",
        renamed_classifier,
        ("score.weight does not belong to LlamaForCausalLM",),
        "the weights are a OurScorer; use those of a LlamaForCausalLM",
    ),
    Case(
        "class",
        "bare",
        bare_model,
        ("lm_head.weight is missing",),
        "the weights are a LlamaModel; use those of a LlamaForCausalLM",
    ),
    Case(
        "class",
        "token classifier",
        edited(architectures=["LlamaForTokenClassification"]),
        ("a token classifier",),
        "LlamaForCausalLM",
    ),
    Case(
        "class",
        "question answering",
        edited(architectures=["LlamaForQuestionAnswering"]),
        ("a model for question answering",),
        "LlamaForCausalLM",
    ),
    Case(
        "class",
        "no architectures",
        config_of("modernbert"),
        ("ModernBertForMaskedLM (modernbert) is a masked language model",),
        ENCODER,
    ),
    Case(
        "class",
        "masked",
        config_of("bert", architecture="BertForMaskedLM"),
        ("BertForMaskedLM (bert) is a masked language model",),
        ENCODER,
    ),
    Case(
        "class",
        "encoder classifier",
        config_of("bert", architecture="BertForSequenceClassification"),
        ("BertForSequenceClassification (bert)", ENCODER_CLASSIFIER),
        ENCODER,
    ),
    Case(
        "class",
        "encoder-decoder",
        config_of("t5", architecture="T5ForConditionalGeneration"),
        ("T5ForConditionalGeneration (t5) is an encoder-decoder",),
        PAIRS,
    ),
    Case(
        "class",
        "whole encoder-decoder",
        config_of("bart", architecture="BartForConditionalGeneration"),
        ("BartForConditionalGeneration (bart) is an encoder-decoder",),
        PAIRS,
    ),
    Case("class", "unnamed encoder-decoder", config_of("bart"), ("bart is an encoder-decoder",), PAIRS),
    Case("class", "image encoder", config_of("vit"), ("ViTModel (vit) is an image encoder",), DECODER),
    Case(
        "class",
        "speech",
        config_of("wav2vec2", architecture="Wav2Vec2ForCTC"),
        ("a speech recogniser",),
        DECODER,
    ),
    Case(
        "class",
        "text part alone",
        config_of("qwen2_5_vl_text"),
        ("no causal language model for the model type qwen2_5_vl_text",),
        "AutoModelForCausalLM",
    ),
    Case(
        "layers",
        "code between layers",
        saved("rwkv", hidden_size=32, attention_hidden_size=32, num_hidden_layers=8, vocab_size=300),
        ("RwkvForCausalLM: its code does something between its layers",),
        "",
    ),
    Case(
        "layers",
        "an encoder",
        saved("bert", **TEXT),
        ("BertLMHeadModel: its attention is bidirectional",),
        "is_decoder: true",
    ),
    Case(
        "layers",
        "parts that it replaces",
        saved("big_bird", is_decoder=True, attention_type="block_sparse", **TEXT),
        ("BigBirdForCausalLM: its code sets bert.encoder.layer.", "before its layers run"),
        "",
    ),
    Case(
        "multimodal",
        "idefics",
        config_of("idefics", architecture="IdeficsForVisionText2Text"),
        ("IdeficsForVisionText2Text (idefics) is a vision-language model; only causal language models",),
        "use a decoder model",
    ),
    *(
        Case(
            "multimodal",
            name,
            config_of(name, architecture=architecture, text_config={"model_type": text, **TEXT}),
            (f"{architecture}: {reason}",),
            hint,
        )
        for name, architecture, text, reason, hint in (
            ("idefics3", "Idefics3ForConditionalGeneration", "llama", _NO_PART, LANGUAGE_PART),
            ("paligemma", "PaliGemmaForConditionalGeneration", "gemma", "its attention is bidirectional", ""),
        )
    ),
]


@pytest.mark.parametrize("case", sample_kinds(CASES, kind=lambda case: case.kind, every=5), ids=lambda case: case.name)
def test_what_the_model_is_comes_before_any_work(
    make_config: MakeConfig, base: Path, tmp_path: Path, case: Case
) -> None:
    directory = Path(shutil.copytree(base, tmp_path / "model"))
    case.change(directory)
    config = make_config(base=directory)
    before = sorted(tmp_path.rglob("*"))
    trained, checked = config.finetune(), ratel("check", config)
    assert (trained.code, checked.code) == (2, 2), trained.stderr
    [error], [found] = trained.errors, checked.errors
    assert [part for part in case.message if part not in error] == [], error
    assert error.removeprefix("error: ") in found, found
    hints = [line for line in trained.stderr.splitlines() if line.startswith("hint: ")]
    assert case.hint in "".join(hints), hints
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
