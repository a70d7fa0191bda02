"""What a layer's activations take, measured without values, against the same layer run with values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.pytorch_utils import Conv1D

from ratel_cli.engine.replay.tape import Recorder
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.cut.layer_runner import last_hidden_state, text_inputs
from ratel_cli.model.files.skeleton import DTYPES, build_skeleton
from ratel_cli.model.values.spec import LayerActivations, LayerTraits, name_in_layer
from ratel_cli.planning.profile.analytic import gpt_activations, gpt_norm
from tests.engine.architectures import ARCHITECTURES, larger_config
from tests.engine.machine import attention_of
from tests.tiers import sample, thinned

NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gptj": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "bloom": {"hidden_dropout": 0.0},
    "gpt_neox": {"hidden_dropout": 0.0},
}
"""Masks of dropout are drawn by other operators for fake tensors than for real ones."""


def model_of(architecture: str, **changes: object) -> DecoderModel:
    config = larger_config(architecture, **NO_DROPOUT.get(architecture, {}), **changes)
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation=attention_of(config))
    return find_blocks(skeleton, name=architecture)


def activations_of(model: DecoderModel) -> LayerActivations:
    found = measured_traits(model).activations
    assert found is not None
    return found


def two_samples(num_tokens: int) -> torch.Tensor:
    """Positions `[1, tokens]` of one row of two samples."""
    return torch.cat([torch.arange(num_tokens // 2), torch.arange(num_tokens - num_tokens // 2)]).unsqueeze(0)


def saved_bytes(model: DecoderModel, num_tokens: int) -> int:
    """What autograd saves of the first layer on one row of two samples."""
    positions = two_samples(num_tokens)
    embedded = model.layer_runner.embed(text_inputs(torch.zeros_like(positions), positions))
    block = model.spec.blocks[1]
    parameters = model.bind(block, (torch.randn(block.num_elements) / 10).to(model.skeleton.dtype))
    recorder = Recorder(parameters)
    with recorder.recording():
        model.layer_runner.run_layer(0, embedded.hidden.detach().requires_grad_(), embedded.calls[0])
    recorder.finish()
    model.release(model.spec.segments[block.segment])
    return recorder.saved_bytes


DENSE = [each for each in ARCHITECTURES if each not in ("mixtral", "qwen3_moe", "gpt_oss")]
"""How many tokens visit an expert depends on values."""


@pytest.mark.parametrize("architecture", thinned(sample(DENSE, every=4), every=2))
def test_what_is_saved_is_what_a_recorded_layer_saves(architecture: str) -> None:
    """Of another number of tokens: it grows with the tokens, and masks with their square."""
    model, tokens = model_of(architecture), 96
    found = activations_of(model)
    wanted = saved_bytes(model, tokens)
    assert tokens * found.saved_per_token + tokens**2 * found.saved_per_pair == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("architecture", thinned(sample(DENSE, every=4, offset=1), every=2, offset=1))
def test_the_products_that_are_saved_are_those_that_autograd_packs(architecture: str) -> None:
    """The results of the layer's linear modules, next to what the hooks of autograd are given."""
    model = model_of(architecture)
    positions = two_samples(96)
    embedded = model.layer_runner.embed(text_inputs(torch.zeros_like(positions), positions))
    block, layer = model.spec.blocks[1], model.layer_runner.layers[0]
    packed: list[torch.Tensor] = []
    made: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        return lambda module, inputs, output: made.update({name: output})

    linear = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    handles = [module.register_forward_hook(keep(f"{name}.weight")) for name, module in linear.items()]
    model.bind(block, torch.randn(block.num_elements).bfloat16() / 10)
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda tensor: tensor):
        model.layer_runner.run_layer(0, embedded.hidden.detach().requires_grad_(), embedded.calls[0])
    model.release(model.spec.segments[block.segment])
    for handle in handles:
        handle.remove()
    pointers = {tensor.untyped_storage().data_ptr() for tensor in packed}
    wanted = {name for name, output in made.items() if output.untyped_storage().data_ptr() in pointers}
    assert set(activations_of(model).saved_products) == wanted
    assert len(wanted) >= 1


@pytest.mark.parametrize("architecture", thinned(sample(ARCHITECTURES, every=4, offset=2), every=2))
def test_backward_takes_more_than_what_is_saved(architecture: str) -> None:
    model = model_of(architecture)
    found, width = activations_of(model), model.spec.hidden_size * 2
    assert found.more_per_token >= max(width, found.making_per_token)
    assert found.forward_per_token >= width


@pytest.mark.parametrize("architecture", thinned(sample(ARCHITECTURES, every=4, offset=3), every=2, offset=1))
def test_backward_takes_less_and_less(architecture: str) -> None:
    """After gradients of its own parameters, in an order in which products are left out one after another. Forward
    takes no less when results of products stay."""
    model = model_of(architecture)
    found, names = activations_of(model), {name_in_layer(each.name) for each in model.spec.blocks[1].parameters}
    assert found.forward_held_per_token >= found.forward_per_token
    peak, products = found.saved_per_token + found.more_per_token, names
    for rest in found.rests:
        assert rest.after in names and rest.per_token < peak
        assert set(rest.products) <= products
        peak, products = rest.per_token, set(rest.products)


def test_the_rest_of_a_gpt_begins_when_its_mlp_is_done() -> None:
    model = model_of("gpt2", activation_function="gelu", n_inner=1024)
    [mlp, *_] = activations_of(model).rests
    assert mlp.after == "mlp.c_fc.bias", "the last of the MLP, whose weight is made with it"
    assert mlp.products == ("attn.c_attn.weight", "attn.c_proj.weight") and mlp.has_attention


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "opt"])
def test_the_final_norm_takes_what_it_takes_with_values(architecture: str) -> None:
    """Its result, what it saves, and the gradient of its result."""
    model, tokens = model_of(architecture), 96
    norm, block = measured_traits(model).norm, model.spec.blocks[-1]
    assert norm is not None and norm.held_per_token <= norm.most_per_token
    model.bind(block, torch.zeros(block.num_elements, dtype=torch.bfloat16))
    leaf = torch.zeros(1, tokens, model.spec.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    packed: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() != leaf.data_ptr() and tensor.shape[:2] == (1, tokens):
            packed[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        positions = torch.arange(tokens).unsqueeze(0)
        inputs = text_inputs(torch.zeros_like(positions), positions)
        finished = last_hidden_state(model.layer_runner.finish(leaf, inputs))
    model.release(model.spec.segments[block.segment])
    saved_bytes = sum(packed.values())
    assert tokens * norm.held_per_token == pytest.approx(saved_bytes + 2 * finished.nbytes, rel=0.02)


def test_the_formula_for_a_bare_shape_is_what_a_gpt_takes() -> None:
    """GPT-2 with the fused GELU, and the same without what a config does not say."""
    model = model_of("gpt2", activation_function="gelu", n_inner=1024)
    norm, wanted_norm = measured_traits(model).norm, gpt_norm(hidden_size=256, compute_bytes=2)
    assert norm is not None
    assert wanted_norm.held_per_token == pytest.approx(norm.held_per_token, rel=0.02)
    assert wanted_norm.most_per_token == pytest.approx(norm.most_per_token, rel=0.02)
    found = asdict(activations_of(model))
    wanted = asdict(gpt_activations(num_heads=4, hidden_size=256, compute_bytes=2))
    assert {"attn.c_attn.weight": "qkv.weight", "mlp.c_fc.weight": "fc1.weight"}.keys() == set(found["saved_products"])
    assert set(wanted["saved_products"]) == {"qkv.weight", "fc1.weight"}
    for name in (
        "saved_per_token",
        "more_per_token",
        "making_per_token",
        "replay_per_token",
        "replay_held_per_token",
        "forward_per_token",
        "forward_held_per_token",
    ):
        assert wanted[name] == pytest.approx(found[name], rel=0.02), name
    names = {"mlp.c_fc.bias": "fc1.weight", "attn.c_attn.bias": "qkv.weight"}
    rests = [(names[rest["after"]], rest["per_token"]) for rest in found["rests"] if rest["after"] in names]
    assert [after for after, _ in rests] == [rest["after"] for rest in wanted["rests"]]
    assert [rest["per_token"] for rest in wanted["rests"]] == pytest.approx([size for _, size in rests], rel=0.02)
    assert {name: found[name] for name in found if name.endswith("pair")} == {
        name: wanted[name] for name in wanted if name.endswith("pair")
    }


def test_attention_keeps_no_mask_for_dropout() -> None:
    """On the CPU it would: it has no fused kernel with dropout."""
    plain, dropping = (activations_of(model_of("llama", attention_dropout=share)) for share in (0.0, 0.1))
    assert plain == dropping


class _Routing(nn.Module):
    """Computes what its input's values say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(x.sum() > 0) else 2 * x


def test_a_model_whose_values_decide_is_not_measured() -> None:
    model = model_of("llama")
    model.layer_runner.layers[0].mlp = _Routing()
    assert measured_traits(model) == model.traits
    assert model.traits.activations is None
    assert all(parameter.device.type == "meta" for parameter in model.layer_runner.layers[0].parameters())


def test_a_model_for_few_tokens_is_not_measured() -> None:
    model = model_of("gpt2", n_positions=8)
    assert measured_traits(model) == model.traits


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_experts_are_measured_in_every_dtype(architecture: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's rule for fake tensors knows products of groups in bf16 only, and logs a traceback for others."""
    config = larger_config(architecture)
    models = {
        dtype: find_blocks(build_skeleton(config, dtype=dtype, attn_implementation="sdpa"), name=architecture)
        for dtype in DTYPES
    }
    measured = {dtype: activations_of(model) for dtype, model in models.items()}
    assert measured["float16"] == measured["bfloat16"]
    found = measured["float32"]
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= {*found.saved_products}
    tokens = 96
    wanted = saved_bytes(models["float32"], tokens)
    assert tokens * found.saved_per_token + tokens**2 * found.saved_per_pair == pytest.approx(wanted, rel=0.1)
    assert capfd.readouterr() == ("", "")


def test_what_fake_tensors_cannot_run_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    model = model_of("llama")

    model.skeleton.get_submodule("model.layers.0").mlp.forward = lambda hidden: torch._scaled_mm(hidden[0], hidden[0].T)
    assert measured_traits(model).activations is None
    assert capfd.readouterr() == ("", "")


def llama_of(*, hidden: int, keys: int, mlp: int, vocab: int) -> DecoderModel:
    """A Llama on the meta device, so of any size."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=2,
        num_attention_heads=hidden // 128,
        num_key_value_heads=keys // 128,
        vocab_size=vocab,
    )
    return find_blocks(build_skeleton(config, dtype="bfloat16", attn_implementation="sdpa"), name="llama")


@pytest.mark.parametrize(
    ("hidden", "keys", "mlp", "backward"), [(4096, 1024, 14336, 1_324_000), (8192, 1024, 28672, 2_598_000)]
)
def test_the_bytes_that_a_llama_moves_are_those_counted_by_hand(
    hidden: int, keys: int, mlp: int, backward: int
) -> None:
    """bf16; the 8B and the 70B. `backward` was counted on the kernels of the model's own code, without a mask; with
    one, keys and values are repeated for each head, which takes 24 KB more for the 8B, 33 for the 70B."""
    vocab = 32064
    moved = measured_traits(llama_of(hidden=hidden, keys=keys, mlp=mlp, vocab=vocab)).moved
    assert moved is not None
    norm = hidden * ((2 + 4) + (4 + 4) + 4 + (4 + 4) + (4 + 2) + (2 + 2))  # to fp32, square, mean, scale, back, weight
    rotation = (hidden + keys) * ((2 + 2) + 2 + (2 + 2) + (2 + 2) + 6)  # by cosine; negate half; join; by sine; add
    residual, gate = 6 * hidden, mlp * ((2 + 2) + (4 + 2))
    repeated = 2 * 2 * (keys + hidden)
    counted = 2 * norm + rotation + 2 * residual + gate + repeated
    assert moved.forward_per_token == pytest.approx(counted, rel=0.01)
    assert moved.backward_per_token == pytest.approx(backward, rel=0.01)
    assert 1 <= moved.forward_per_pair <= 8 and moved.backward_per_pair == 0  # the mask, as a bias
    # Of each logit: to fp32, log-softmax, its backward, the loss's backward, back to bf16, and into a row.
    loss = vocab * ((2 + 4) + (4 + 4) + (4 + 4 + 4) + (4 + 4) + (4 + 2) + (2 + 2))
    assert loss + norm < moved.head_per_token < loss + 4 * norm


def test_layers_of_several_kinds_move_their_mean() -> None:
    """Gemma 3's layers look at a window or at the whole row; both move the same, so the mean is that of each."""
    moved = measured_traits(model_of("gemma3")).moved
    assert moved is not None and moved.forward_per_token > 0
    again = LayerTraits.from_json(json.loads(json.dumps(measured_traits(model_of("gemma3")).to_json()))).moved
    assert again == moved
