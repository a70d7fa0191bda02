"""Learn from pairs of answers: DPO, with the model as it was as reference, or a reward model with a scalar head.

    python examples/preferences.py dpo MODEL PAIRS --storage DIR DIR --output DIR
    python examples/preferences.py reward MODEL PAIRS --storage DIR --output DIR

PAIRS is a file of JSON lines with `prompt`, `chosen` and `rejected`. The models are hooked: their blocks are in memory
only while they compute. DPO has two of them, each with a state of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import ratel_cli as ratel


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objective", choices=["dpo", "reward"])
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--storage", nargs="+", required=True, help="a directory for each of the models")
    parser.add_argument("--output", required=True, help="where the weights go")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs-per-step", type=int, default=4)
    parser.add_argument("--beta", type=float, default=0.1, help="of DPO: how far it may go from the reference")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pairs = [json.loads(line) for line in options.pairs.read_text().splitlines()]
    options.dtype = getattr(torch, options.dtype)

    def batch(step: int) -> dict[str, torch.Tensor]:
        """First the chosen answers, then the rejected ones, padded on the right. Drawn by the number of the step."""
        drawn = torch.randint(len(pairs), (options.pairs_per_step,), generator=torch.Generator().manual_seed(step))
        chosen = [pairs[each] for each in drawn]
        texts = [each["prompt"] + each[answer] for answer in ("chosen", "rejected") for each in chosen]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        starts = torch.tensor([len(tokenizer(each["prompt"]).input_ids) for each in chosen] * 2)
        tokens, mask = encoded.input_ids, encoded.attention_mask
        answers = mask * (torch.arange(tokens.shape[1]) >= starts[:, None])
        return {"input_ids": tokens, "attention_mask": mask, "answers": answers}

    if options.objective == "dpo":
        policy, state = hooked(AutoModelForCausalLM, options, options.storage[0], is_trained=True)
        reference, reference_state = hooked(AutoModelForCausalLM, options, options.storage[1], is_trained=False)

        def loss_of(step: int) -> torch.Tensor:
            """DPO, equation 7 (arXiv 2305.18290)."""
            tensors = batch(step)
            with torch.no_grad():
                before = log_probabilities(reference, tensors)
            chosen, rejected = (log_probabilities(policy, tensors) - before).chunk(2)
            return -logsigmoid(options.beta * (chosen - rejected)).mean()
    else:
        policy, state = hooked(
            AutoModelForSequenceClassification, options, options.storage[0], is_trained=True, num_labels=1
        )
        reference_state = None

        def loss_of(step: int) -> torch.Tensor:
            """Bradley and Terry: the chosen answer has the higher reward."""
            tensors = batch(step)
            rewards = policy(input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"]).logits[:, 0]
            chosen, rejected = rewards.float().chunk(2)
            return -logsigmoid(chosen - rejected).mean()

    optimizer = ratel.AdamW(policy, lr=1e-5, weight_decay=0.0, max_grad_norm=1.0)
    for step in range(state.num_steps, options.steps):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.detach():.4f}, norm {state.grad_norm:.3f}")
        optimizer.zero_grad()
    state.save(options.output)
    tokenizer.save_pretrained(options.output)
    for each in (state, reference_state):
        if each is not None:
            each.close()


def hooked(
    kind: type, options: argparse.Namespace, storage: str, *, is_trained: bool, **settings: object
) -> tuple[PreTrainedModel, ratel.Hooked]:
    """A model whose blocks are on the drives, whatever its size, and its state."""
    with ratel.init(storage=[storage]):
        model = kind.from_pretrained(options.model, dtype=options.dtype, use_cache=False, **settings)  # type: ignore[attr-defined]
        model.requires_grad_(is_trained)
        model.train(is_trained)
        return model, ratel.hook(model)


def log_probabilities(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each answer `[rows]`: the sum over its tokens."""
    tokens = batch["input_ids"]
    logits = model(input_ids=tokens, attention_mask=batch["attention_mask"]).logits[:, :-1].float()
    found: torch.Tensor = logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (found * batch["answers"][:, 1:]).sum(dim=1)


if __name__ == "__main__":
    main()
