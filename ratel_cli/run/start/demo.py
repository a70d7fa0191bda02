"""What the demo trains on, made from nothing but Python itself: a small base model, a dataset and a config.

    base/         a Llama-type model of about 15M parameters with random weights, its tokenizer (BPE, trained here) and
                  a chat template
    topics.jsonl  questions and answers from Python's own help (`pydoc_data.topics`): what is it about, and how its text
                  begins
    demo.yaml     `configs/demo.yaml` with the paths of this directory

Invariant: the same Python makes the same files, byte for byte; nothing is read but what is installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ratel_cli.config.json_schema import editor_line
from ratel_cli.run.start.planned_config import SHIPPED

ANSWER_CHARACTERS: Final = 300
CONFIG_NAME: Final = "demo.yaml"
_BASE, _DATA = "base", "topics.jsonl"
_PATH = re.compile(r"\bdemo/(\S+)")
"""A path in the config, as `make demo` has it."""
_VOCAB_SIZE = 4096
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A special token stands right before each answer: then no text can change how the prompt is cut into tokens."""


def write_base(directory: Path) -> tuple[PreTrainedTokenizerFast, int]:
    """Write the base model and the dataset. Returns the tokenizer, and how many rows there are."""
    transformers.logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    rows = list(questions_and_answers())
    with (directory / _DATA).open("w", encoding="utf-8") as file:
        for question, answer in rows:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = _trained_tokenizer([text for row in rows for text in row])
    _save_model(directory / _BASE, tokenizer)
    return tokenizer, len(rows)


def write_config(directory: Path) -> Path:
    """Write the config that trains the base model of this directory. Returns its path."""
    path = directory / CONFIG_NAME
    keys = (SHIPPED / CONFIG_NAME).read_text(encoding="utf-8").splitlines()
    lines = [editor_line(), *(line for line in keys if not line.startswith("#"))]
    text = _PATH.sub(lambda found: json.dumps(str(directory / found[1])), "\n".join(lines) + "\n")
    path.write_text(text, encoding="utf-8")
    return path


def questions_and_answers() -> Iterator[tuple[str, str]]:
    """One row for every topic that Python's help knows."""
    for topic in sorted(topics):
        yield f"What is {topic}?", beginning(topics[topic].strip())


def beginning(text: str) -> str:
    """Whole paragraphs, as many as fit, without the title; a single long paragraph stays whole."""
    title, *paragraphs = text.split("\n\n")
    if not paragraphs or set(title.splitlines()[-1]) - set("*=-"):
        paragraphs = [title, *paragraphs]
    begun = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if len(begun) + len(paragraph) > ANSWER_CHARACTERS:
            break
        begun += f"\n\n{paragraph}"
    return begun


def _trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _save_model(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Random weights; training has to teach it everything."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,  # twice the default: so small a model then learns in a quarter of the steps
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
