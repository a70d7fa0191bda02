"""Random weights: the distribution of transformers' own initialiser, bits that depend on the seed only."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.initialise import RandomSource, SelfDrawn
from ratel_cli.model.files.skeleton import build_skeleton, read_model_config
from ratel_cli.model.values.spec import ModelSpec
from tests.model.tiny import FAMILIES, Tensors, assert_same, read_all, skeleton_of, tiny_config
from tests.tiers import thinned


def saved(directory: Path, family: str) -> tuple[PreTrainedModel, ModelSpec]:
    """A tiny model's configuration, and what is read of it."""
    tiny_config(family).save_pretrained(directory)
    return skeleton_of(directory)


def draw(directory: Path, *, seed: int, num_elements: int = 1000) -> Tensors:
    skeleton, spec = skeleton_of(directory)
    return read_all(RandomSource(skeleton, seed), spec, num_elements=num_elements)


@pytest.mark.parametrize("family", thinned(list(FAMILIES), every=3, full_every=2))
def test_same_distribution_as_in_memory(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    found = draw(tmp_path, seed=1)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.std() == 0:
            assert torch.equal(found[name], tensor), name
        elif tensor.numel() >= 16:
            spread = float(tensor.std())
            assert float(found[name].std()) == pytest.approx(spread, rel=0.15), name
            assert abs(float(found[name].mean())) < 6 * spread / tensor.numel() ** 0.5, name


def test_same_seed_same_bits(tmp_path: Path) -> None:
    skeleton, spec = saved(tmp_path, "gpt2")
    before = torch.get_rng_state()
    first = read_all(RandomSource(skeleton, 7), spec)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert_same(draw(tmp_path, seed=7, num_elements=333), first)
    other = draw(tmp_path, seed=8)
    drawn = [name for name, tensor in first.items() if tensor.std() > 0]
    assert drawn and not any(torch.equal(first[name], other[name]) for name in drawn)


def test_bits_do_not_depend_on_the_order_of_reading(tmp_path: Path) -> None:
    skeleton, spec = saved(tmp_path, "mixtral")
    forwards = read_all(RandomSource(skeleton, 3), spec)
    source = RandomSource(skeleton, 3)
    for name in reversed(forwards):
        assert torch.equal(source.read(name, 0, forwards[name].numel()), forwards[name].reshape(-1)), name


def test_no_two_layers_are_equal(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    found = draw(tmp_path, seed=1)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(found[name.format(0)], found[name.format(1)])


def test_one_module_at_a_time(tmp_path: Path) -> None:
    skeleton, spec = saved(tmp_path, "gpt2")
    source = RandomSource(skeleton, 1)
    for parameter in (parameter for block in spec.blocks for parameter in block.parameters):
        source.read(parameter.name, 0, 1)
        assert len(source._parameters) <= 2
        assert all(value.device.type == "meta" for value in source._model.parameters())


def test_a_parameter_that_nothing_initialises(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    skeleton = build_skeleton(read_model_config(tmp_path), dtype="float32", attn_implementation="eager")
    spec = find_blocks(skeleton, name="tiny").spec
    source = RandomSource(skeleton, 1)
    source._model.get_submodule("model.norm").register_parameter("forgotten", torch.nn.Parameter(torch.empty(3)))
    with pytest.raises(BadInput, match=r"does not initialise model\.norm\.forgotten"):
        read_all(source, spec)


@pytest.mark.parametrize("value", [-1.0, -0.02, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_scale_that_no_distribution_has(family: str, value: float) -> None:
    config = tiny_config(family)
    object.__setattr__(config, "initializer_range", value)  # transformers checks it in some families, not in all
    with pytest.raises(
        BadInput, match=r"config\.json: initializer_range is .*it must be a number that is not negative"
    ):
        build_skeleton(config, dtype="float32", attn_implementation="eager")


def test_an_initialiser_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, spec = saved(tmp_path, "llama")
    source = RandomSource(skeleton, 1)

    def fail(module: torch.nn.Module) -> None:
        raise RuntimeError("normal expects std >= 0.0\nand more")

    monkeypatch.setattr(source._model, "_init_weights", fail)
    before = torch.get_rng_state()
    with pytest.raises(BadInput, match=r"random_init: LlamaForCausalLM cannot initialise model\.embed_tokens: normal"):
        read_all(source, spec)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(value.device.type == "meta" for value in source._model.parameters())


def test_modules_draw_themselves() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Embedding(64, 64), torch.nn.LayerNorm(64))
    before = {name: each.clone() for name, each in module.named_parameters()}
    source = SelfDrawn(module, 1)
    found = {name: source.read(name, 0, each.numel()).view(each.shape) for name, each in before.items()}
    assert all(torch.equal(each, before[name]) for name, each in module.named_parameters())
    assert found["0.weight"].abs().max() == pytest.approx(1 / 8, rel=0.01)
    assert float(found["1.weight"].std()) == pytest.approx(1, rel=0.05)
    assert torch.equal(found["2.weight"], torch.ones(64))
    assert not torch.equal(found["0.weight"], before["0.weight"])


def test_a_module_that_cannot_draw_itself() -> None:
    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(torch.zeros(3))

    source = SelfDrawn(torch.nn.Sequential(Shift()), 1)
    with pytest.raises(BadInput, match=r"random_init: Sequential cannot initialise 0: .*reset_parameters"):
        source.read("0.by", 0, 3)
