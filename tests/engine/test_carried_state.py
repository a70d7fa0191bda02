"""A model whose code changes itself when it runs: every micro-batch begins with the state that it was built with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from tests.engine.architectures import VOCAB_SIZE, tiny_config
from tests.engine.exactness import assert_same_training
from tests.engine.machine import initial_weights, machine
from tests.reference import Recipe, train_in_memory
from tests.tiers import sample

POSITIONS = 16
LENGTHS = ((8, 40, 12), (20, 9), (33, 17, 16))
"""Tokens of each step's micro-batches."""
_FACTORS = [1.0 + place / 4 for place in range(4)]
ROPE: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
    "longrope": {
        "short_factor": _FACTORS, "long_factor": _FACTORS[::-1], "original_max_position_embeddings": POSITIONS,
    },
    "llama3": {
        "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
RECIPE = Recipe(fresh=True, max_grad_norm=0.5)


def rope_config(rope_type: str, architecture: str = "llama") -> PretrainedConfig:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, **ROPE[rope_type]}
    return tiny_config(architecture, max_position_embeddings=POSITIONS, rope_parameters=rope)


def batch_of(num_tokens: int, seed: int) -> MicroBatch:
    tokens = torch.randint(3, VOCAB_SIZE, (1, num_tokens + 1), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(
        input_ids=tokens[:, :-1],
        targets=tokens[:, 1:].contiguous(),
        position_ids=torch.arange(num_tokens).unsqueeze(0),
        sample_ids=(seed,),
        num_targets=num_tokens,
        num_tokens=num_tokens,
    )


STEPS = [[batch_of(length, 10 * step + length) for length in lengths] for step, lengths in enumerate(LENGTHS)]


def test_all_kinds_are_here() -> None:
    assert {*ROPE} == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.full
@pytest.mark.parametrize(
    "rope_type", sample(["dynamic", "linear", "yarn", "longrope", "llama3", "default", "proportional"], every=3)
)
def test_rows_of_any_length_in_any_order_train_exactly(rope_type: str, tmp_path: Path) -> None:
    """As plain PyTorch on a model that has not run; so does a resumed run, and an evaluation changes nothing."""
    config = rope_config(rope_type)
    wanted = train_in_memory(config, initial_weights(config), STEPS, RECIPE)
    long, short = [batch_of(60, 1)], [batch_of(5, 2)]
    with machine(tmp_path / "one", config, RECIPE, weights=initial_weights(config)) as ratel:
        assert_same_training(ratel.train(STEPS, RECIPE), ratel.weights(), wanted)
        losses = [ratel.engine.evaluate(each).loss for each in (short, long, short)]
        assert losses[0] == losses[2]
    outcomes = []
    for step in range(len(STEPS)):
        weights = initial_weights(config) if step == 0 else None
        with machine(tmp_path / "two", config, RECIPE, weights=weights) as ratel:
            outcomes += ratel.train(STEPS[: step + 1], RECIPE)
            ratel.engine.evaluate(long if step % 2 else short)
            if step == len(STEPS) - 1:
                assert_same_training(outcomes, ratel.weights(), wanted)


def decoder(config: PretrainedConfig, change: Callable[[nn.Module], None] = lambda skeleton: None) -> DecoderModel:
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="sdpa")
    change(skeleton)
    return find_blocks(skeleton, name="tiny")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_whole_passes_begin_fresh_too(rope_type: str) -> None:
    """Generation runs the model's own forward."""
    config = rope_config(rope_type)
    model = decoder(config)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    values = dict(plain.named_parameters())
    bound: Mapping[str, nn.Parameter] = dict(values)
    for block in model.spec.blocks:
        flat = torch.zeros(block.num_elements)
        for parameter in block.parameters:
            flat[parameter.start : parameter.stop] = bound[parameter.name].detach().reshape(-1)
        model.bind(block, flat)
    model.skeleton.eval()

    def nothing(_: int) -> torch.no_grad:
        return torch.no_grad()

    with model.layer_runner.running_whole(nothing), torch.no_grad():
        for length in (60, 20, 5, 33):
            ids = batch_of(length, length).input_ids
            wanted = copy.deepcopy(plain)(input_ids=ids, use_cache=False).logits
            assert torch.equal(model.skeleton(input_ids=ids, use_cache=False).logits, wanted)


class Changing(nn.Module):
    """Adds to `change` whenever it runs."""

    def __init__(self, inner: nn.Module, change: str) -> None:
        super().__init__()
        self.inner = inner
        self.change = change
        self.num_calls = 0
        self.calls: tuple[int, ...] = ()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *arguments: object, **keywords: object) -> object:
        output = self.inner(*arguments, **keywords)
        if self.change == "number":
            self.num_calls += 1
        elif self.change == "buffer":
            self.register_buffer("seen", self.seen + 1)
        elif self.change == "new attribute":
            self.last = self.num_calls
        elif self.change == "in place":
            self.seen.add_(1)
        return output * (1 + self.num_calls + self.seen)


CHANGES = ("number", "buffer", "new attribute", "in place")


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_outside_the_layers_is_put_back(change: str) -> None:
    def wrap(skeleton: nn.Module) -> None:
        owner = skeleton.get_submodule("model")
        owner.norm = Changing(owner.norm, change)

    model = decoder(tiny_config("llama"), wrap)
    norm = model.skeleton.get_submodule("model.norm")
    before = {**vars(norm)}
    hidden, ids = torch.randn(1, 5, 32), torch.zeros((1, 5), dtype=torch.long)
    for _ in range(3):
        model.layer_runner.finish(hidden, {"input_ids": ids})
    assert vars(norm) == before and norm.num_calls == 0 and norm.seen == 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_inside_a_layer_is_put_back_or_refused(change: str, tmp_path: Path) -> None:
    config = tiny_config("llama")

    def wrap(skeleton: nn.Module) -> None:
        layer = skeleton.get_submodule("model.layers.1")
        layer.mlp = Changing(layer.mlp, change)

    model = decoder(config, wrap)
    mlp = model.skeleton.get_submodule("model.layers.1.mlp")
    call = model.layer_runner.embed({"input_ids": torch.zeros((1, 5), dtype=torch.long)}).calls[1]
    block = model.spec.blocks[2]
    model.bind(block, torch.zeros(block.num_elements))
    for _ in range(2):
        if change == "in place":
            with pytest.raises(BadInput, match=r"LlamaForCausalLM: its code changes model.layers.1.mlp.seen whenever"):
                model.layer_runner.run_layer(1, torch.zeros(1, 5, 32), call)
        else:
            model.layer_runner.run_layer(1, torch.zeros(1, 5, 32), call)
            assert mlp.num_calls == 0 and mlp.seen == 0 and not hasattr(mlp, "last")


def test_state_that_is_set_for_the_layers_is_refused() -> None:
    """Each micro-batch would set it before any layer runs, so all would run with that of the last."""

    def wrap(skeleton: nn.Module) -> None:
        owner = skeleton.get_submodule("model")
        plain_forward = owner.forward

        def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> object:
            owner.layers[1].mlp.rows = input_ids.shape[1]
            return plain_forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

        owner.forward = forward

    with pytest.raises(BadInput, match=r"its code sets model.layers.1.mlp.rows before its layers run"):
        decoder(tiny_config("llama"), wrap)


def test_parts_that_are_replaced_for_the_layers_are_refused() -> None:
    """Plain PyTorch would keep the new ones, here each call would make them again."""

    def wrap(skeleton: nn.Module) -> None:
        owner = skeleton.get_submodule("model")
        plain_forward = owner.forward

        def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> object:
            owner.layers[1].mlp = copy.copy(owner.layers[1].mlp)
            return plain_forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

        owner.forward = forward

    with pytest.raises(BadInput, match=r"its code sets model.layers.1.mlp before its layers run"):
        decoder(tiny_config("llama"), wrap)
