"""What a model's layers cost, estimated from the shapes of their parameters where no step was recorded. Pure.

Every matrix product leaves its output, 2 FLOPs per matrix element and token: what a byte of it saves is, for the
papers' fc2, qkv, projection and fc1, as 4 : 1 : 1 : 1. Attention is one operator of 4 b s^2 h over the whole
row, masked or not (papers.md section 2). What is computed element by element has no FLOPs to save.

The last product of a layer is dead work: nothing that backward needs depends on it, so it is never recomputed,
and no candidate (papers.md section 2, fault 5). It is alive where a norm or the router's weights are applied to
it. Left out: where attention and MLP run side by side, attention's last product is dead too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ratel_cli.model.spec import BlockSpec, ModelSpec, ParameterSpec
from ratel_cli.planning.activations import block_activation_bytes
from ratel_cli.planning.costs import head_flops
from ratel_cli.planning.estimate.shapes import LayerTraits
from ratel_cli.planning.model_profile import LayerProfile, ModelProfile, SwapCandidate
from ratel_cli.planning.workload import StateBytes

_INPUTS_FIRST = {("GPT2LMHeadModel", 2), ("GptOssForCausalLM", 3)}
"""Architecture and dimensions of matrices whose shape is (inputs, outputs); all others have the outputs first."""
_NORMS_OF_THE_LAST = ("post_feedforward_layernorm.weight", "post_mlp_layernorm.weight")
_LOGSUMEXP_BYTES = 4
_BEFORE_THE_LAYER = re.compile(r"(.*?\.)?\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One matrix product."""

    name: str
    inputs: int
    outputs: int
    times: int
    """For each token: of a stack of experts, those that it visits."""
    is_stacked: bool


def analytic_profile(
    spec: ModelSpec, state: StateBytes, *, traits: LayerTraits, micro_batch_tokens: int, sequence_len: int
) -> ModelProfile:
    """The profile of one micro-batch, without seconds."""
    profiles: list[LayerProfile] = []
    known: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    layers = []
    for block in spec.blocks[1:-1]:
        shapes = tuple((_name_in_layer(parameter), parameter.shape) for parameter in block.parameters)
        if shapes not in known:
            known[shapes] = len(profiles)
            profiles.append(
                _layer_profile(spec, block, state, traits=traits, tokens=micro_batch_tokens, sequence_len=sequence_len)
            )
        layers.append(known[shapes])
    return ModelProfile(
        source="analytic",
        profiles=tuple(profiles),
        layers=tuple(layers),
        micro_batch_tokens=micro_batch_tokens,
        sequence_len=sequence_len,
        flops_head=head_flops(spec, tokens=micro_batch_tokens),
    )


def _layer_profile(
    spec: ModelSpec, block: BlockSpec, state: StateBytes, *, traits: LayerTraits, tokens: int, sequence_len: int
) -> LayerProfile:
    products = _products(spec, block, traits)
    dead = _dead(spec, block, products)
    heads_width = traits.num_heads * traits.head_dim
    attention = SwapCandidate(
        operator="attention",
        key="",
        num_bytes=tokens * (heads_width * state.compute + traits.num_heads * _LOGSUMEXP_BYTES),
        flops=4 * tokens * sequence_len * heads_width,
    )
    candidates = [attention, *(_candidate(product, state, tokens) for product in products if product is not dead)]
    flops_recomputed = sum(candidate.flops for candidate in candidates)
    return LayerProfile(
        input_bytes=tokens * spec.hidden_size * state.compute,
        saved_bytes=block_activation_bytes(spec, block, state, tokens=tokens),
        flops_forward=flops_recomputed + (_flops(dead, tokens) if dead else 0),
        flops_recomputed=flops_recomputed,
        candidates=tuple(sorted(candidates, key=lambda candidate: -candidate.flops / candidate.num_bytes)),
    )


def _products(spec: ModelSpec, block: BlockSpec, traits: LayerTraits) -> list[_Product]:
    products = []
    for parameter in block.parameters:
        if len(parameter.shape) < 2 or not parameter.decay:
            continue
        *stack, outputs, inputs = parameter.shape
        if (spec.architecture, len(parameter.shape)) in _INPUTS_FIRST:
            inputs, outputs = outputs, inputs
        products.append(
            _Product(
                name=_name_in_layer(parameter).removesuffix(".weight"),
                inputs=inputs,
                outputs=outputs,
                times=traits.active_experts if stack else 1,
                is_stacked=bool(stack),
            )
        )
    return products


def _dead(spec: ModelSpec, block: BlockSpec, products: list[_Product]) -> _Product | None:
    """The product whose output is only added to the residual, if there is one."""
    if any(_name_in_layer(parameter) in _NORMS_OF_THE_LAST for parameter in block.parameters):
        return None
    last = next((product for product in reversed(products) if product.outputs == spec.hidden_size), None)
    return None if last is None or last.is_stacked else last


def _candidate(product: _Product, state: StateBytes, tokens: int) -> SwapCandidate:
    return SwapCandidate(
        operator=f"{product.name} mm",
        key="",
        num_bytes=tokens * product.times * product.outputs * state.compute,
        flops=_flops(product, tokens),
    )


def _flops(product: _Product, tokens: int) -> int:
    return 2 * tokens * product.times * product.inputs * product.outputs


def _name_in_layer(parameter: ParameterSpec) -> str:
    """`self_attn.q_proj.weight` for `model.layers.3.self_attn.q_proj.weight`."""
    return _BEFORE_THE_LAYER.sub("", parameter.name, count=1)
