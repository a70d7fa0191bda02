"""Several ranks train as plain PyTorch does that adds their gradients in the order of ranks, bit for bit."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.model.files.skeleton import NAMES_OF_DTYPES
from ratel_cli.model.values.adapter_settings import AdapterSettings
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.exactness import AHEAD, PLACEMENTS
from tests.engine.machine import attention_of, initial_weights, machine, random_steps
from tests.engine.test_adapters import recipe_of
from tests.ranks.oracle import cuts_of
from tests.ranks.processes import Processes
from tests.reference import Recipe, train_in_memory
from tests.tiers import rotating

Found = tuple[list[float], list[float], dict[str, torch.Tensor]]
NUM_STEPS = 3
DRAWN = random.Random(29).sample(ARCHITECTURES, k=10)
ADAPTER = AdapterSettings(rank=16, alpha=8, dropout=0.1)
"""Large enough that each rank has a part of it."""
PLANS = ("nothing ahead", "two ahead, small groups", "some gradients on disk", "two drives", "of its own")
OWN_PLANS: tuple[dict[str, object], ...] = (
    {"placement": Placement()},
    {"placement": Placement(prefetch_blocks=3, pending_updates=2, deferred=frozenset({1, 2}))},
    {"placement": AHEAD, "held_in_memory_bytes": 0, "hold": True},
    {"placement": Placement(pending_updates=9, resident_states=frozenset(range(8)))},
)
"""Each rank follows another plan."""


def trained(ranks: Ranks, config: PretrainedConfig, recipe: Recipe, num_micro_batches: int, plan: str) -> Found:
    """Losses, norms, and what the rank has of the weights."""
    steps = [
        step[ranks.rank * num_micro_batches :][:num_micro_batches]
        for step in random_steps(NUM_STEPS, num_micro_batches * ranks.size, packed=False)
    ]
    adapter = None if recipe.lora is None else ADAPTER
    options: Any = OWN_PLANS[ranks.rank] if plan == "of its own" else PLACEMENTS.get(plan, {})
    weights = initial_weights(config)
    with (
        tempfile.TemporaryDirectory() as directory,
        machine(
            Path(directory),
            config,
            recipe,
            dtype=NAMES_OF_DTYPES[recipe.dtype],
            weights=weights,
            ranks=ranks,
            adapter=adapter,
            **options,
        ) as ratel,
    ):
        outcomes = ratel.train(steps, recipe)
        return [each.loss for each in outcomes], [each.grad_norm for each in outcomes], ratel.weights()


def check(
    processes: Processes,
    config: PretrainedConfig,
    recipe: Recipe,
    *,
    size: int,
    num_micro_batches: int,
    plan: str = PLANS[0],
) -> None:
    recipe = replace(recipe, attn_implementation=attention_of(config))
    found: Sequence[Found] = processes.run(size, trained, config, recipe, num_micro_batches, plan)
    wanted = train_in_memory(
        config,
        initial_weights(config),
        random_steps(NUM_STEPS, num_micro_batches * size, packed=False),
        replace(recipe, of_rank=num_micro_batches, cuts=cuts_of(config, size, lora=recipe.lora)),
    )
    for losses, norms, _ in found:
        assert losses == list(wanted.losses)
        assert norms == list(wanted.norms)
    for name, values in wanted.weights.items():
        whole = torch.cat([weights[name].view(-1) for _, _, weights in found if name in weights])
        assert torch.equal(whole.view(torch.int32), values.view(-1).view(torch.int32)), name


@pytest.mark.parametrize(
    ("name", "size", "dtype", "limit", "num_micro_batches", "plan"),
    rotating(DRAWN, (2, 3, 4, 1), ("bfloat16", "float32"), (0.5, None), (1, 2, 3), PLANS, every=3, full_rotation=True),
)
def test_the_bits_of_plain_pytorch(
    processes: Processes,
    name: str,
    size: int,
    dtype: str,
    limit: float | None,
    num_micro_batches: int,
    plan: str,
) -> None:
    recipe = Recipe(dtype=getattr(torch, dtype), max_grad_norm=limit)
    check(processes, tiny_config(name), recipe, size=size, num_micro_batches=num_micro_batches, plan=plan)


@pytest.mark.parametrize(
    ("name", "size", "dtype", "limit", "plan"),
    rotating(
        ("qwen3", "gpt2", "llama_tied"),
        (3, 2, 4),
        ("bfloat16", "float32"),
        (0.5, None),
        PLANS,
        every=3,
        full_rotation=True,
    ),
)
def test_the_bits_of_peft(
    processes: Processes, size: int, name: str, dtype: DtypeName, limit: float | None, plan: str
) -> None:
    """Of an adapter that all ranks have a part of. The model beside it is cut by itself."""
    recipe = recipe_of(ADAPTER, dtype, max_grad_norm=limit)
    check(processes, tiny_config(name), recipe, size=size, num_micro_batches=2, plan=plan)


def test_gradients_are_summed_before_they_are_rounded(processes: Processes) -> None:
    """In fp32, although the model has bf16; the limit on the norm is met by all ranks together."""
    recipe = Recipe(dtype=torch.bfloat16, gradient_dtype=torch.float32, max_grad_norm=0.1)
    check(processes, tiny_config("qwen3"), recipe, size=3, num_micro_batches=2)


@pytest.mark.parametrize("size", [1, 3])
def test_how_ranks_cut_a_block_decides_nothing_of_stochastic_rounding(processes: Processes, size: int) -> None:
    recipe = Recipe(dtype=torch.bfloat16, bf16_master="stochastic", max_grad_norm=0.1)
    check(processes, tiny_config("qwen3"), recipe, size=size, num_micro_batches=2)


def test_ranks_are_as_one_with_the_same_batches(processes: Processes) -> None:
    """But for the order of sums."""
    config, recipe = tiny_config("llama"), Recipe()
    of_two = processes.run(2, trained, config, recipe, 1, PLANS[0])
    [(losses, norms, weights)] = processes.run(1, trained, config, recipe, 2, PLANS[0])
    assert of_two[0][0] == pytest.approx(losses, rel=1e-6) and of_two[0][1] == pytest.approx(norms, rel=1e-5)
    for name, values in weights.items():
        whole = torch.cat([found[name].view(-1) for _, _, found in of_two if name in found])
        assert torch.allclose(whole, values.view(-1), rtol=1e-5, atol=1e-6), name


def test_a_scaled_loss(processes: Processes) -> None:
    """In fp16 norms are those of gradients that are scaled back."""
    recipe = Recipe(dtype=torch.float16, loss_scale=1024.0, max_grad_norm=0.5)
    check(processes, tiny_config("llama"), recipe, size=3, num_micro_batches=2)
