"""A tiny BERT and a tiny T5 with their tokenizers, rows with a text and its class, and rows of two texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from ratel_cli.data.samples.packing import MicroBatch
from tests.library.encoders import AUTO_CLASSES
from tests.reference import Recipe, Trained, loaded_model, train_module

CLASSES = ("dull", "warm", "loud")
_WORDS = (("grey", "flat", "slow"), ("soft", "kind", "sunny"), ("shrill", "brass", "thunder"))
_THINGS = ("film", "soup", "book", "song", "room")


def encoder_rows() -> list[dict[str, object]]:
    """Texts of 7 to 15 tokens."""
    rows: list[dict[str, object]] = []
    for number in range(60):
        kind, thing = number % 3, _THINGS[number % 5]
        words = " and ".join(_WORDS[kind][: 1 + number % 3])
        text = f"the {thing} was {words}" + (", so we left" if number % 4 == 0 else "")
        rows.append({"text": text, "label": CLASSES[kind] if number % 2 else kind})
    return rows


def write_encoder_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in encoder_rows()), encoding="utf-8")
    return path


def save_encoder(directory: Path, *, dropout: float = 0.0) -> Path:
    """A BERT for masked tokens. Without dropout, whose draws the oracle of modules does not seed."""
    tokenizer = _tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    torch.manual_seed(3)
    BertForMaskedLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[arg-type]
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=110, special_tokens=special, show_progress=False)
    backend.train_from_iterator([str(row["text"]) for row in encoder_rows()], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def pair_rows() -> list[dict[str, object]]:
    """Some words, and the same in the other order: sources of 5 to 8 tokens, targets of 3 to 6."""
    words = ["red", "blue", "green", "tall", "small", "cold", "round"]
    rows: list[dict[str, object]] = []
    for number in range(48):
        chosen = [words[(number * step + step) % 7] for step in range(1, 3 + number % 4)]
        rows.append({"question": "turn: " + " ".join(chosen), "answer": " ".join(reversed(chosen))})
    return rows


def write_pair_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in pair_rows()), encoding="utf-8")
    return path


def save_pair_model(directory: Path) -> Path:
    """A T5 whose head is its embedding, which both stacks look tokens up in."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))  # type: ignore[arg-type]
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    backend.train_from_iterator([str(text) for row in pair_rows() for text in row.values()], trainer)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>", eos_token="</s>"
    )
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(3)
    T5ForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def trained_by_pytorch(
    base: Path,
    task: str,
    weights: dict[str, torch.Tensor],
    steps: Sequence[Sequence[MicroBatch]],
    recipe: Recipe,
    *,
    padding_id: int | None = None,
) -> Trained:
    """What plain PyTorch makes of these weights on the batches of a run. `padding_id`: if the files do not name it."""
    config = AutoConfig.from_pretrained(base)
    model = loaded_model(config, recipe.dtype, "sdpa", AUTO_CLASSES[task])
    if padding_id is not None:
        model.config.pad_token_id = padding_id
    for name, parameter in model.named_parameters():
        if recipe.unfrozen is not None and not name.startswith(recipe.unfrozen):
            parameter.requires_grad_(False)
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]

    def loss_sum(batch: MicroBatch) -> torch.Tensor:
        of_decoder = {"labels": batch.targets} if task == "seq2seq" else {}
        logits = model(input_ids=batch.input_ids, attention_mask=batch.mask, **of_decoder).logits
        targets = batch.targets[:, 0] if task == "classification" else batch.targets.reshape(-1)
        return cross_entropy(logits.reshape(len(targets), -1).float(), targets, ignore_index=-100, reduction="sum")

    model.train()
    return train_module(model, loss_sum, weights, steps, recipe, decayed=decayed)
