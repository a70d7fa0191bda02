"""Tiny encoders, classifiers and encoder-decoders, and the batches that they learn, as a loop around transformers has
them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
)

from ratel_cli.sizes import Task
from tests.engine.architectures import tiny_config
from tests.reference import Recipe, Trained, train_module

VOCABULARY, NUM_CLASSES = 99, 3
AUTO_CLASSES = {
    "masked_lm": AutoModelForMaskedLM,
    "classification": AutoModelForSequenceClassification,
    "seq2seq": AutoModelForSeq2SeqLM,
}
_SHAPE = {"vocab_size": VOCABULARY, "pad_token_id": 0}
_USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, object]] = {
    "bert": {**_USUAL, **_NO_DROPOUT},
    "roberta": {**_USUAL, **_NO_DROPOUT, "max_position_embeddings": 40},
    "modernbert": {**_USUAL, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0, "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "electra": {**_USUAL, **_NO_DROPOUT, "embedding_size": 16},
    "deberta-v2": {
        **_USUAL, **_NO_DROPOUT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
    },
    "mpnet": {**_USUAL, **_NO_DROPOUT, "max_position_embeddings": 40},
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 40, "dropout": 0.0,
    "attention_dropout": 0.0, "decoder_start_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
PAIRS: dict[str, dict[str, object]] = {
    "t5": _T5,
    "t5 untied": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": _T5,
    "umt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "marian": {**_BART, "decoder_vocab_size": VOCABULARY},
    "pegasus": _BART,
    "m2m_100": {**_BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
}
"""Encoder-decoders. What is between the stacks has no parameters in some, and positions are frozen in some."""
_HALF = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
DROPOUT: dict[str, dict[str, object]] = {
    "bert": {**_HALF, "classifier_dropout": 0.4},
    "roberta": {**_HALF, "classifier_dropout": 0.4},
    "modernbert": {"embedding_dropout": 0.3, "mlp_dropout": 0.3, "attention_dropout": 0.2, "classifier_dropout": 0.4},
    "distilbert": {"dropout": 0.3, "attention_dropout": 0.2, "seq_classif_dropout": 0.4},
    "electra": {**_HALF, "classifier_dropout": 0.4},
    "mpnet": _HALF,
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.2},
    "t5": {"dropout_rate": 0.3},
    "t5 untied": {"dropout_rate": 0.3},
    "bart": {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.2},
}
"""Changes of a configuration that let a model drop in its embedding, its layers and its head, by name."""
EAGER = ("deberta-v2", "mpnet")
"""Without another kernel of attention."""
CAUSAL = ("llama", "gpt2")
"""Decoders, whose classifiers look at the last token that is no padding."""


def encoder_config(name: str, *, drops: bool = False) -> PretrainedConfig:
    """`drops`: with dropout wherever the model may have it."""
    changes = DROPOUT[name] if drops else {}
    if name in CAUSAL:
        config = tiny_config(name, **{**dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0), **changes})
        config.pad_token_id = 0
    elif name in PAIRS:
        return AutoConfig.for_model(name.split(maxsplit=1)[0], **{**_SHAPE, **PAIRS[name], **changes})
    else:
        config = AutoConfig.for_model(name, **{**_SHAPE, **CONFIGS[name], **changes})
    config.id2label = {index: f"class {index}" for index in range(NUM_CLASSES)}
    return config


def encoder(name: str, task: Task, dtype: torch.dtype = torch.float32, *, drops: bool = False) -> PreTrainedModel:
    """A model with random weights, far enough from those of a step that rounding hides none."""
    torch.manual_seed(7)
    attention = "eager" if name in EAGER else "sdpa"
    drawn = AUTO_CLASSES[task].from_config(encoder_config(name, drops=drops), attn_implementation=attention)
    model = AUTO_CLASSES[task].from_config(
        encoder_config(name, drops=drops), attn_implementation=attention, dtype=dtype
    )
    model.load_state_dict(drawn.state_dict())
    assert isinstance(model, PreTrainedModel)
    return model


def saved_encoder(directory: Path, name: str, task: Task, *, drops: bool = False) -> Path:
    encoder(name, task, drops=drops).save_pretrained(directory)
    return directory


class LabelledBatch(dict[str, torch.Tensor]):
    """A batch by the names that transformers has for its tensors."""

    @property
    def num_targets(self) -> int:
        return int((self["labels"] != -100).sum())


def labelled_steps(
    task: Task, number: int, num_micro_batches: int, *, vocabulary: int = VOCABULARY
) -> list[list[LabelledBatch]]:
    """Of each step the micro-batches: two rows of 9 tokens, the second one padded. Of the first one no label is in the
    last token, so that not all rows have alike many."""
    generator = torch.Generator().manual_seed(number + num_micro_batches)

    def batch() -> LabelledBatch:
        tokens = torch.randint(5, vocabulary, (2, 9), generator=generator)
        mask = torch.ones_like(tokens)
        mask[1, 6:] = 0
        tokens = tokens.masked_fill(mask == 0, 0)
        if task == "seq2seq":
            labels = torch.randint(5, vocabulary, (2, 6), generator=generator)
            labels[0, 4:] = -100
        elif task == "classification":
            labels = torch.randint(0, NUM_CLASSES, (2,), generator=generator)
        else:
            chosen = torch.rand(tokens.shape, generator=generator) < 0.4
            chosen[:, 2] = True
            chosen[0, 8] = False
            labels = tokens.masked_fill(~chosen | (mask == 0), -100)
            tokens = tokens.masked_fill(chosen, 3)
        return LabelledBatch(input_ids=tokens, attention_mask=mask, labels=labels)

    return [[batch() for _ in range(num_micro_batches)] for _ in range(number)]


def trained_encoder(
    name: str, task: Task, steps: Sequence[Sequence[LabelledBatch]], recipe: Recipe, *, drops: bool = False
) -> Trained:
    """What plain PyTorch makes of the model on these steps. `drops`: with dropout, seeded as Ratel promises."""
    model = encoder(name, task, recipe.dtype, drops=drops)
    weights = {key: each.detach().clone() for key, each in encoder(name, task).named_parameters()}
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    # A cache lays keys and values out in another way, and products of these then round otherwise.
    settings = {"use_cache": False} if name in CAUSAL or name in PAIRS else {}

    def loss_sum(batch: LabelledBatch) -> torch.Tensor:
        placed = {name: each.to(recipe.device) for name, each in batch.items()}
        labels = placed["labels"].reshape(-1)
        logits = model(**(placed if task == "seq2seq" else {**placed, "labels": None}), **settings).logits
        return cross_entropy(logits.reshape(len(labels), -1).float(), labels, ignore_index=-100, reduction="sum")

    model.train().to(recipe.device)
    model.tie_weights()  # on devices that torch does not know, `to` separates tied weights
    stacks = _stacks(model) if drops else ()
    return train_module(model, loss_sum, weights, steps, recipe, decayed=decayed, stacks=stacks)


def _stacks(model: PreTrainedModel) -> list[tuple[nn.Module, nn.ModuleList]]:
    """The modules with layers, in the order in which they run, each with its layers."""
    found: list[tuple[nn.Module, nn.ModuleList]] = []
    for around in model.modules():
        is_in_layer = any(around is each for _, layers in found for each in layers.modules())
        layers = next((each for each in around.children() if isinstance(each, nn.ModuleList)), None)
        if layers is not None and not is_in_layer:
            found.append((around, layers))
    return found
