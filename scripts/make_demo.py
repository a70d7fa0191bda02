"""Makes what `make demo` and the benchmarks train on: the demo's files, and a larger shape.

    python scripts/make_demo.py DIRECTORY

leaves

    DIRECTORY/base         the demo's model with random weights, and its tokenizer
    DIRECTORY/topics.jsonl the demo's questions and answers: ratel_cli/run/start/demo.py
    DIRECTORY/llama-1b     the config and tokenizer of a 1.1B Llama shape, without weights, for
                           configs/llama-1b.yaml

The same Python makes the same files, byte for byte.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import LlamaConfig, PreTrainedTokenizerFast

from ratel_cli.run.start.demo import write_base


def main(directory: Path) -> None:
    """Write everything below `directory`."""
    tokenizer, num_rows = write_base(directory)
    save_shape(directory / "llama-1b", tokenizer)
    print(f"{directory}: {num_rows} questions and answers, a base model and its tokenizer")


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
