"""Makes what the demo trains on, from nothing but Python itself: a small base model and a dataset.

    python scripts/make_demo.py DIRECTORY

leaves

    DIRECTORY/base         a Llama-type model of about 15M parameters with random weights, its tokenizer
                           (BPE, trained here) and a chat template
    DIRECTORY/topics.jsonl questions and answers from Python's own help (`pydoc_data.topics`): what is it
                           about, and how its text begins
    DIRECTORY/llama-1b     the config and tokenizer of a 1.1B Llama shape, without weights, for
                           configs/llama-1b.yaml

The same Python makes the same files, byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 4096
ANSWER_CHARACTERS = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A special token stands right before each answer: then no text can change how the prompt is cut into tokens."""


def main(directory: Path) -> None:
    """Write everything below `directory`."""
    transformers.logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    rows = list(questions_and_answers())
    with (directory / "topics.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in rows:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = train_tokenizer([text for row in rows for text in row])
    save_base_model(directory / "base", tokenizer)
    save_shape(directory / "llama-1b", tokenizer)
    print(f"{directory}: {len(rows)} questions and answers, a base model and its tokenizer")


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


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_base_model(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Random weights; training has to teach it everything."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
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


def save_shape(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """1.1B parameters: the shape of TinyLlama. Weights are drawn when it is trained (`random_init`)."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
