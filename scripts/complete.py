"""Loads Hugging Face directories with transformers, and prints what each model answers to a question.

    python scripts/complete.py QUESTION DIRECTORY...

Nothing of Ratel is used here: the directories are what any other program would load.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 80


def main() -> None:
    """One answer per directory, under its name."""
    parser = argparse.ArgumentParser(description="Ask models a question.")
    parser.add_argument("question")
    parser.add_argument("directories", nargs="+", type=Path, metavar="directory")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    print(f"> {arguments.question}")
    for directory in arguments.directories:
        print(f"\n{directory}:\n{answer(directory, arguments.question)}")


def answer(directory: Path, question: str) -> str:
    """The likeliest next token, again and again, to the end of the answer or for NUM_TOKENS."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(str(text), add_special_tokens=False, return_tensors="pt")["input_ids"]
    tokens = model.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id)  # type: ignore[misc]
    return str(tokenizer.decode(cast(torch.Tensor, tokens)[0, prompt.shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
