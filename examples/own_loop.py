"""Fine-tune a model on a text, in a loop of one's own: its state is on drives, a layer at a time in memory.

    python examples/own_loop.py MODEL TEXT --storage DIR [DIR ...] --output DIR

Stop it at any time and start it again: it resumes after the last step that was committed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup

import ratel_cli as ratel


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("text", type=Path, help="a file to learn")
    parser.add_argument("--storage", nargs="+", required=True, help="a directory on each drive")
    parser.add_argument("--output", required=True, help="where the model goes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step, with two rows each")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0]
    rows = tokens[: len(tokens) // options.tokens * options.tokens].view(-1, options.tokens)

    def batches(step: int) -> list[dict[str, torch.Tensor]]:
        """Two rows for each micro-batch, drawn by the number of the step alone, so that a loop can resume."""
        shape = options.micro_batches, 2
        drawn = torch.randint(len(rows), shape, generator=torch.Generator().manual_seed(step))
        return [{"input_ids": rows[each]} for each in drawn]

    # The rate of each step, without an optimizer of torch's: Ratel has its own.
    scheduled = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2e-5)
    scheduler = get_cosine_schedule_with_warmup(scheduled, num_warmup_steps=3, num_training_steps=options.steps)

    with ratel.open(options.model, storage=options.storage, max_grad_norm=1.0) as model:
        for step in range(options.steps):
            scheduled.step()
            if step < model.num_steps:  # done by an earlier loop
                scheduler.step()
                continue
            loss = model.forward_backward(batches(step))
            print(f"step {step + 1}: loss {loss:.4f}, norm {model.grad_norm:.3f}")
            model.step(learning_rate=scheduler)
        model.save_pretrained(options.output)  # with the tokenizer


if __name__ == "__main__":
    main()
