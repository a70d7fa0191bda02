"""Training a part of the weights: what is frozen is as in plain PyTorch, and backward ends where nothing is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.planning.profile.activations import offload
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import tiny_config
from tests.engine.exactness import PLACEMENTS, check_training
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.mixed import CARRYING, mixed_config
from tests.engine.test_step import PLACEMENTS as AHEAD_AND_RESIDENT
from tests.engine.test_step import moved_by_last_step
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import rotating

ARCHITECTURES = ("llama", "llama_tied", "gpt2", "gemma3", "mixtral", "qwen3_moe", "phi3", "falcon", "olmo", "bloom")
PARTS: dict[str, Callable[[str], bool]] = {
    "the last layer": lambda name: ".2." in name,
    "all but the embedding": lambda name: "embed" not in name and "wte" not in name,
    "the first layer's norms": lambda name: ".0." in name and ("norm" in name or "ln_" in name),
    "attention": lambda name: "att" in name,
    "the middle": lambda name: ".1." in name,
    "outside the layers": lambda name: not any(f".{index}." in name for index in range(3)),
}


def names_of(config: PretrainedConfig, part: str) -> tuple[str, ...]:
    """All parameters if none is in the part."""
    names = tuple(initial_weights(config))
    return tuple(filter(PARTS[part], names)) or names


@pytest.mark.parametrize(
    ("architecture", "part", "dtype", "num_micro_batches", "max_grad_norm"),
    rotating(
        ARCHITECTURES, list(PARTS), ["float32", "bfloat16", "float16"], [1, 3], [None, 0.5], every=2, full_rotation=True
    ),
)
def test_equals_plain_pytorch(
    tmp_path: Path,
    architecture: str,
    part: str,
    dtype: DtypeName,
    num_micro_batches: int,
    max_grad_norm: float | None,
) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(
        dtype=DTYPES[dtype],
        unfrozen=names_of(config, part),
        max_grad_norm=max_grad_norm,
        loss_scale=1024.0 if dtype == "float16" else 1.0,
    )
    check_training(machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize(("family", "part"), rotating(CARRYING, list(PARTS), every=3, full_rotation=True))
def test_layers_that_pass_more_on(tmp_path: Path, family: str, part: str) -> None:
    config = mixed_config(family)
    check_training(machine, tmp_path, config, Recipe(unfrozen=names_of(config, part), max_grad_norm=0.5))


@pytest.mark.parametrize(
    ("placement", "part", "architecture"),
    rotating(list(PLACEMENTS), list(PARTS), ["llama", "llama_tied"], every=4, full_rotation=True),
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, part: str, architecture: str) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, unfrozen=names_of(config, part), max_grad_norm=0.5)
    check_training(machine, tmp_path, config, recipe, **PLACEMENTS[placement])


@pytest.mark.parametrize(
    ("placement", "part", "max_grad_norm"),
    rotating(list(AHEAD_AND_RESIDENT), list(PARTS), [None, 1e-3], every=3, full_rotation=True),
)
def test_traffic_is_the_prediction_to_the_byte(
    tmp_path: Path, placement: str, part: str, max_grad_norm: float | None
) -> None:
    config, chosen = tiny_config("llama_tied"), AHEAD_AND_RESIDENT[placement]
    recipe = Recipe(dtype=torch.bfloat16, unfrozen=names_of(config, part), max_grad_norm=max_grad_norm)
    weights = initial_weights(config)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=weights, placement=chosen) as ratel:
        wanted = step_traffic(
            ratel.model.spec,
            chosen,
            offload([0], num_micro_batches=1, spilled_units=0),
            holds_gradients=max_grad_norm is not None,
        )
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2, packed=False))
        assert moved == (wanted.read_bytes, wanted.written_bytes)


class _Products(TorchDispatchMode):
    """Counts the products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.number = Counter[str]()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.number[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("part", "num_run_again"), [("the last layer", 6), ("the middle", 12), ("attention", 18)])
def test_backward_runs_what_plain_pytorch_runs(tmp_path: Path, part: str, num_run_again: int) -> None:
    """And once more what it needs of forward: of a layer all products but the last."""
    config = tiny_config("llama")
    unfrozen, weights = names_of(config, part), initial_weights(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in unfrozen)
    [[batch]] = random_steps(1, 1, packed=False)
    with _Products() as plain:
        model(input_ids=batch.input_ids, labels=batch.input_ids).loss.backward()
    recipe = Recipe(unfrozen=unfrozen)
    with machine(tmp_path, config, recipe, weights=weights) as ratel, _Products() as found:
        ratel.train([[batch]], recipe)
    assert found.number["aten.mm.default"] == plain.number["aten.mm.default"] + num_run_again
