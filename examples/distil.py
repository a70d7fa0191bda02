"""Distil a large model into a small one: neither needs to fit into memory.

    python examples/distil.py TEACHER STUDENT TEXT --storage DIR DIR --output DIR

Both need the same tokenizer. The blocks of both are in memory only while they compute; the teacher's state has nothing
but its weights. Stop it at any time and start it again: it resumes after the last step that was committed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ratel_cli as ratel


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", help="a directory or a hub id")
    parser.add_argument("student", help="a directory or a hub id")
    parser.add_argument("text", type=Path, help="a file to learn from")
    parser.add_argument("--storage", nargs=2, required=True, help="a directory for each of them")
    parser.add_argument("--output", required=True, help="where the weights go")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512, help="of a row")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    dtype, temperature = getattr(torch, options.dtype), float(options.temperature)

    tokenizer = AutoTokenizer.from_pretrained(options.student)
    tokens = tokenizer(options.text.read_text(), return_tensors="pt").input_ids[0]
    rows = tokens[: len(tokens) // options.tokens * options.tokens].view(-1, options.tokens)
    teacher, teacher_state = hooked(options.teacher, options.storage[0], dtype, is_trained=False)
    student, state = hooked(options.student, options.storage[1], dtype, is_trained=True)

    def log_probabilities(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=batch).logits.float() / temperature
        return logits.log_softmax(dim=-1)

    optimizer = ratel.AdamW(student, lr=2e-5, weight_decay=0.0, max_grad_norm=1.0)
    for step in range(state.num_steps, options.steps):
        batch = rows[torch.randint(len(rows), (2,), generator=torch.Generator().manual_seed(step))]
        with torch.no_grad():
            wanted = log_probabilities(teacher, batch)
        found = log_probabilities(student, batch)
        loss = kl_div(found, wanted, reduction="batchmean", log_target=True) * temperature**2 / batch.shape[1]
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.detach():.4f}, norm {state.grad_norm:.3f}")
        optimizer.zero_grad()
    state.save(options.output)
    tokenizer.save_pretrained(options.output)
    state.close()
    teacher_state.close()


def hooked(name: str, storage: str, dtype: torch.dtype, *, is_trained: bool) -> tuple[PreTrainedModel, ratel.Hooked]:
    """A model whose blocks are on the drives, whatever its size, and its state."""
    with ratel.init(storage=[storage]):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, use_cache=False)
        model.requires_grad_(is_trained)
        model.train(is_trained)
        return model, ratel.hook(model)


if __name__ == "__main__":
    main()
