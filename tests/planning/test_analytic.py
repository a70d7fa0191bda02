"""Estimated costs of a layer, against what torch counts when a real one runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, PretrainedConfig

from ratel_cli.engine.replay.tape import Recorder, Replayer
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.cut.layer_runner import text_inputs
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.freezing import freeze
from ratel_cli.model.values.operators import TorchOperator
from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.planning.profile.analytic import analytic_profile, frozen_head_flops, head_flops, spec_from_shape
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import VOCAB_SIZE, tiny_config

ROWS, SEQUENCE_LEN = 2, 48
TOKENS = ROWS * SEQUENCE_LEN
WIDER: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 352},
    "qwen3": {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32},
    "gemma2": {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32},
    "gpt2": {"n_embd": 128, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": {"hidden_size": 128, "intermediate_size": 352},
    "mixtral": {"hidden_size": 128, "intermediate_size": 352},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 352, "head_dim": 32},
}
DENSE = ("llama", "qwen3", "gemma2", "gpt2", "phi3")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Layer:
    """The first layer of a real model on one micro-batch; `run` is its forward."""

    def __init__(self, architecture: str, *, attention: str, dtype: DtypeName = "float32") -> None:
        self.model = wider_model(architecture, attention=attention, dtype=dtype)
        torch.manual_seed(0)
        ids = torch.randint(0, VOCAB_SIZE, (ROWS, SEQUENCE_LEN))
        embedded = self.model.layer_runner.embed(text_inputs(ids, torch.arange(SEQUENCE_LEN).repeat(ROWS, 1)))
        block = self.model.spec.blocks[1]
        self.parameters = self.model.bind(block, torch.randn(block.num_elements).to(embedded.hidden.dtype) / 10)
        hidden = torch.randn(embedded.hidden.shape).to(embedded.hidden.dtype).requires_grad_()
        self.run: Callable[[], object] = lambda: self.model.layer_runner.run_layer(0, hidden, embedded.calls[0])

    def estimate(self) -> LayerProfile:
        return profile_of(self.model).profiles[0]


@pytest.mark.parametrize(
    ("unfrozen", "share"),
    [
        ((), 2.0),
        (("lm_head",), 1.0),
        (("model.norm",), 1.0),
        (("model.norm", "lm_head"), 2.0),
        (("model.layers.2",), 1.0),
        (("model.layers.2", "lm_head"), 2.0),
    ],
)
def test_what_backward_of_the_head_leaves_out(unfrozen: tuple[str, ...], share: float) -> None:
    """Of a matrix there are a gradient, and that of its input, each with the FLOPs of forward."""
    config = tiny_config("llama")
    skeleton = build_skeleton(config, dtype="float32", attn_implementation="sdpa")
    freeze(skeleton, unfrozen=unfrozen, frozen=())
    spec = find_blocks(skeleton, name="tiny").spec
    assert 2 * head_flops(spec, tokens=5) - frozen_head_flops(spec, tokens=5) == share * head_flops(spec, tokens=5)


class Counts(TorchDispatchMode):
    """FLOPs of what runs, by torch's own formulas, and what every matrix product writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.product_bytes: list[int] = []

    def __torch_dispatch__(
        self, func: TorchOperator, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        if func in PRODUCTS:
            assert isinstance(result, torch.Tensor)
            self.product_bytes.append(result.nbytes)
        return result


def wider_model(architecture: str, *, attention: str = "eager", dtype: DtypeName = "float32") -> DecoderModel:
    return model_of(tiny_config(architecture, **WIDER[architecture]), attention=attention, dtype=dtype)


def model_of(config: PretrainedConfig, *, attention: str = "eager", dtype: DtypeName = "float32") -> DecoderModel:
    config._experts_implementation = "eager"  # one product an expert; torch counts no others
    return find_blocks(build_skeleton(config, dtype=dtype, attn_implementation=attention), name="tiny")


def profile_of(model: DecoderModel) -> ModelProfile:
    rows = TOKENS // SEQUENCE_LEN
    workload = Workload(micro_batch_size=rows, num_micro_batches=1, sequence_len=SEQUENCE_LEN)
    return analytic_profile(model.spec, workload, traits=model.traits)


@pytest.mark.parametrize("architecture", WIDER)
def test_forward_flops_are_those_that_torch_counts(architecture: str) -> None:
    """Exactly, experts included: each token visits as many as the config says."""
    layer = Layer(architecture, attention="eager")
    with Counts() as counts:
        layer.run()
    assert layer.estimate().flops_forward == counts.flops


@pytest.mark.parametrize("architecture", DENSE)
def test_recomputed_flops_are_those_of_a_replay(architecture: str) -> None:
    """Exactly: the tape leaves the last product out, unless a norm follows it (gemma2)."""
    layer = Layer(architecture, attention="eager")
    recorder = Recorder(layer.parameters)
    with recorder.recording():
        layer.run()
    tape, _ = recorder.finish()
    with Counts() as counts, Replayer(tape):
        layer.run()
    found = layer.estimate()
    assert found.flops_recomputed == counts.flops
    assert (found.flops_recomputed == found.flops_forward) == (architecture == "gemma2")


@pytest.mark.parametrize("architecture", DENSE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_candidates_are_the_outputs_of_the_products(architecture: str, dtype: DtypeName) -> None:
    layer = Layer(architecture, attention="eager", dtype=dtype)
    with Counts() as counts:
        layer.run()
    found = [c.num_bytes for c in layer.estimate().candidates if c.operator != "attention"]
    if architecture != "gemma2":
        del counts.product_bytes[-1]
    assert sorted(found) == sorted(counts.product_bytes)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_bytes_are_near_what_autograd_keeps(architecture: str, dtype: DtypeName) -> None:
    layer = Layer(architecture, attention="sdpa", dtype=dtype)
    recorder = Recorder(layer.parameters)
    with recorder.recording():
        layer.run()
    found = layer.estimate()
    # Where nothing was measured. The estimate counts the layer's input, which is not a part of what is recorded.
    assert 0.8 < (found.saved_bytes - found.input_bytes) / recorder.saved_bytes < 1.3


@pytest.mark.parametrize("architecture", WIDER)
def test_candidates_fit_into_what_is_saved_and_come_by_benefit(architecture: str) -> None:
    found = profile_of(wider_model(architecture, dtype="bfloat16")).profiles[0]
    assert found.input_bytes == TOKENS * 128 * 2
    assert found.input_bytes + sum(candidate.num_bytes for candidate in found.candidates) <= found.saved_bytes
    assert sum(candidate.flops for candidate in found.candidates) == found.flops_recomputed
    benefits = [candidate.flops / candidate.num_bytes for candidate in found.candidates]
    assert benefits == sorted(benefits, reverse=True)


def test_a_gpt_has_the_papers_flops_and_benefits() -> None:
    """papers.md section 3: 13B, 32 rows of 1024. What a byte saves is equal for projection, qkv and fc1."""
    spec = spec_from_shape(name="13b", num_layers=40, hidden_size=5120, vocab_size=50257)
    profile = analytic_profile(
        spec,
        Workload(micro_batch_size=32, num_micro_batches=1, sequence_len=1024),
        traits=LayerTraits(num_heads=40, head_dim=128),
    )
    assert profile.source == "analytic"
    (layer,) = profile.profiles
    assert profile.layers == (0,) * 40
    assert 40 * layer.flops_forward + profile.flops_head == 868_984_962_416_640
    assert 40 * layer.input_bytes == 13_421_772_800
    assert [candidate.operator for candidate in layer.candidates] == ["qkv mm", "projection mm", "fc1 mm", "attention"]
    benefits = {candidate.operator: candidate.flops / candidate.num_bytes for candidate in layer.candidates}
    assert benefits["qkv mm"] == benefits["projection mm"] == benefits["fc1 mm"] == 5120
    assert layer.flops_forward - layer.flops_recomputed == 8 * 32 * 1024 * 5120**2


def test_layers_that_are_alike_share_a_profile() -> None:
    profile = profile_of(model_of(tiny_config("qwen3_moe", mlp_only_layers=[1])))
    assert profile.layers == (0, 1, 0) and len(profile.profiles) == 2
    operators = {candidate.operator for candidate in profile.profiles[0].candidates}
    assert {"mlp.experts.gate_up_proj mm", "mlp.experts.down_proj mm", "self_attn.q_proj mm"} < operators
    assert "mlp.down_proj mm" not in {candidate.operator for candidate in profile.profiles[1].candidates}


def test_nothing_is_measured() -> None:
    profile = profile_of(model_of(tiny_config("llama")))
    assert profile.embedding_seconds is None and profile.head_seconds is None
    assert profile.profiles[0].forward_seconds is None and profile.profiles[0].candidates[0].seconds is None
    assert {candidate.key for candidate in profile.profiles[0].candidates} == {""}
    assert (profile.micro_batch_tokens, profile.sequence_len) == (TOKENS, SEQUENCE_LEN)


def test_layers_without_attention_have_no_attention_to_swap() -> None:
    config = AutoConfig.for_model("falcon_mamba", hidden_size=32, num_hidden_layers=2, vocab_size=97, state_size=4)
    model = model_of(config)
    assert model.traits.num_heads == 0
    layer = profile_of(model).profiles[0]
    assert layer.candidates and "attention" not in {candidate.operator for candidate in layer.candidates}


def test_a_shape_is_the_papers_gpt() -> None:
    spec = spec_from_shape(name="13b", num_layers=40, hidden_size=5120, vocab_size=50257)
    assert spec.num_layers == 40 and spec.tied
    assert spec.segment_names == ("embedding", *(f"layer {index}" for index in range(40)), "head")
    for block in spec.blocks[1:-1]:
        assert sum(p.num_elements for p in block.parameters if len(p.shape) == 2) == 12 * 5120**2
    assert spec.blocks[0].num_parameters == 50257 * 5120


@pytest.mark.parametrize("nominal", [13 * 10**9, 13_000_000_019])
def test_a_nominal_size_is_reached_with_vectors(nominal: int) -> None:
    spec = spec_from_shape(name="13b", num_layers=40, hidden_size=5120, vocab_size=50257, num_parameters=nominal)
    assert nominal - 40 < spec.num_parameters <= nominal
    assert sum(p.num_elements for p in spec.blocks[1].parameters if len(p.shape) == 2) == 12 * 5120**2


def test_a_nominal_size_that_was_rounded_down_changes_nothing() -> None:
    shape = spec_from_shape(name="276b", num_layers=112, hidden_size=14336, vocab_size=50257)
    nominal = 276 * 10**9
    assert shape.num_parameters > nominal
    assert shape == spec_from_shape(
        name="276b", num_layers=112, hidden_size=14336, vocab_size=50257, num_parameters=nominal
    )


def test_a_depth_that_only_a_mistake_can_be() -> None:
    with pytest.raises(BadInput, match="1000000000000 layers are more than the limit of 10000"):
        spec_from_shape(name="m", num_layers=10**12, hidden_size=64, vocab_size=100)
