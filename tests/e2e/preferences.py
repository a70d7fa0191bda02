"""Rows for preference tuning, and the trainings of TRL that runs are compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Config
from tests.trl_oracle import Recipe, Tuned

NUM_STEPS = 4
LENGTH = 64
LEARNING_RATE = 5e-5
Row = Mapping[str, object]


def _answers(number: int) -> tuple[str, str]:
    """The right one and the wrong one, of different lengths."""
    names = ("even", "odd") if number % 2 == 0 else ("odd", "even")
    return tuple(f" {number} is {name}{' indeed' * (number * (7 - at) % 5)}" for at, name in enumerate(names))  # type: ignore[return-value]


def pairs(count: int = 24) -> list[Row]:
    """Texts: a prompt, a chosen and a rejected answer."""
    found = []
    for number in range(count):
        chosen, rejected = _answers(number)
        found.append({"prompt": f"Which number is {number}?", "chosen": chosen, "rejected": rejected})
    return found


def chats(count: int = 24) -> list[Row]:
    """The same as turns of a conversation."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")},
        }
        for row in pairs(count)
    ]


def verdicts(count: int = 24) -> list[Row]:
    """A right answer or a wrong one, with a verdict."""
    found = []
    for number, row in enumerate(pairs(count)):
        is_good = number * 5 % 7 < 3
        found.append(
            {"prompt": row["prompt"], "completion": row["chosen" if is_good else "rejected"], "label": is_good}
        )
    return found


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def keys_of(recipe: Recipe) -> dict[str, object]:
    """The config's keys that mean the same as a training of TRL."""
    lora = dict(recipe.lora or ())
    adapter = {
        "adapter": "lora",
        "lora_r": lora.get("r"),
        "lora_alpha": lora.get("lora_alpha"),
        "lora_target_linear": True,
    }
    return {
        "rl": recipe.method,
        "shuffle": False,
        "data_type": "auto",
        "max_steps": recipe.num_steps,
        "micro_batch_size": recipe.micro_batch_size,
        "gradient_accumulation_steps": recipe.accumulation,
        "learning_rate": recipe.learning_rate,
        "sequence_len": recipe.max_length,
        **(adapter if recipe.lora is not None else {}),
    }


def recipe(method: str, *, adapted: bool = False, **changes: object) -> Recipe:
    lora = (("r", 4), ("lora_alpha", 8), ("target_modules", "all-linear"), ("task_type", "CAUSAL_LM"))
    settings = {
        "num_steps": NUM_STEPS,
        "micro_batch_size": 2,
        "accumulation": 2,
        "learning_rate": LEARNING_RATE,
        "max_length": LENGTH,
        "lora": lora if adapted else None,
    }
    return Recipe(method=method, **{**settings, **changes})  # type: ignore[arg-type]


def assert_same_training(config: Config, wanted: Tuned) -> None:
    """Losses, norms, rewards and weights to 1e-6, relative to what they are computed from."""
    lines = config.metrics
    assert [line["loss"] for line in lines] == pytest.approx(wanted.losses, rel=1e-6)
    assert [line["grad_norm"] for line in lines] == pytest.approx(wanted.norms, rel=1e-5)
    for line, figures in zip(lines, wanted.figures, strict=True):
        assert_same_figures(line["preferences"], figures)  # type: ignore[arg-type]
    found = weights_of(config)
    trained = {name.replace(".default", ""): each for name, each in wanted.weights.items()}
    assert found.keys() == trained.keys()
    worst = max(float((found[name] - each).abs().max()) for name, each in trained.items())
    assert worst <= 1e-6, worst
    assert any(not torch.equal(each, each.new_zeros(())) for each in found.values())


def assert_same_figures(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    """A reward is a difference of sums of log-probabilities, which have about 7 digits."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=2e-6), name


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    adapter = config.output / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else config.output / "model.safetensors")
