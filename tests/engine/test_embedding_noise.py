"""Noise on the embedding: the bits of transformers' hook in plain PyTorch, and none where nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.planning.profile.placement import Placement
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.exactness import DROPOUT, check_training
from tests.engine.machine import attention_of, initial_weights, machine, random_steps
from tests.engine.swaps import ChosenEverywhere
from tests.reference import Recipe
from tests.tiers import rotating


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches"),
    rotating(ARCHITECTURES, [torch.float32, torch.bfloat16], [1, 3], every=2),
)
def test_the_weights_are_those_of_transformers_hook(
    tmp_path: Path, architecture: str, dtype: torch.dtype, num_micro_batches: int
) -> None:
    recipe = Recipe(dtype=dtype, noise_alpha=5.0, max_grad_norm=0.5 if num_micro_batches == 3 else None)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, num_micro_batches=num_micro_batches)


def test_noise_and_dropout_are_drawn_again_in_backward(tmp_path: Path) -> None:
    name = next(iter(DROPOUT))
    placement = Placement(swapped=ChosenEverywhere(0.5))
    check_training(machine, tmp_path, tiny_config(name, **DROPOUT[name]), Recipe(noise_alpha=15.0), placement=placement)


def test_noise_changes_a_step_and_no_evaluation(tmp_path: Path) -> None:
    config, steps = tiny_config("llama"), random_steps(1, 2)
    losses, evaluated = [], []
    for number, alpha in enumerate((None, 5.0)):
        recipe = Recipe(noise_alpha=alpha)
        with machine(tmp_path / str(number), config, recipe, weights=initial_weights(config)) as ratel:
            evaluated.append(ratel.engine.evaluate(steps[0]).loss)
            losses.append(ratel.train(steps, recipe)[0].loss)
    assert evaluated[0] == evaluated[1] and losses[0] != losses[1]


def test_a_model_without_one_embedding_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama")
    skeleton = build_skeleton(config, dtype="float32", attn_implementation=attention_of(config))
    model = find_blocks(skeleton, name="tiny")
    monkeypatch.setattr(skeleton, "get_input_embeddings", lambda: torch.nn.Embedding(2, 2))
    with pytest.raises(BadInput, match="neftune_noise_alpha: LlamaForCausalLM does not look its tokens up once"):
        model.add_noise(5.0)
