"""What a model costs, from the shapes of its parameters alone: for a plan before any step was recorded. Pure.

Every matrix product leaves its output and takes 2 FLOPs per matrix element and token. What a byte of its output saves
is, for the papers' fc2, qkv, projection and fc1, as 4 : 1 : 1 : 1. Attention is one operator of 4 b s^2 h FLOPs over
the whole row, masked or not. Operators that compute element by element have no FLOPs to save.

The last product of a layer is dead work: nothing that backward needs depends on it, so it is never recomputed and is
no candidate for swapping. It is alive where a norm or the router's weights are applied to its output. One case is left
out: where attention and MLP run next to each other, the last product of attention is dead too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.model.spec import (
    BlockKind,
    BlockSpec,
    LayerTraits,
    ModelSpec,
    check_depth,
    decays,
    lay_out_block,
    name_in_layer,
)
from ratel_cli.planning.activations import block_activation_bytes, input_bytes
from ratel_cli.planning.model_profile import LayerProfile, ModelProfile, SwapCandidate
from ratel_cli.planning.placement import StateBytes, Workload

_NORMS_OF_THE_LAST = ("post_feedforward_layernorm.weight", "post_mlp_layernorm.weight")
_LOGSUMEXP_BYTES = 4
"""Per token and head: attention saves the logarithm of its normaliser in fp32."""


def spec_from_shape(
    *, name: str, num_layers: int, hidden_size: int, vocab_size: int, num_parameters: int | None = None
) -> ModelSpec:
    """The papers' GPT: 12 h^2 elements in the matrices of a layer, and a head that is tied to the embedding.

    A nominal `num_parameters` that is larger than the shape's own count adds vectors to the layers: these are moved
    and updated and cost no FLOPs. One that is smaller was rounded down, and the shape's count holds. Raises BadInput
    for a depth that only a mistake can be.
    """
    check_depth(num_layers)
    h = hidden_size
    layer: list[tuple[str, tuple[int, ...]]] = [
        ("norm1.weight", (h,)),
        ("qkv.weight", (3 * h, h)),
        ("projection.weight", (h, h)),
        ("norm2.weight", (h,)),
        ("fc1.weight", (4 * h, h)),
        ("fc2.weight", (h, 4 * h)),
    ]
    counted = num_layers * (12 * h**2 + 2 * h) + vocab_size * h + h
    unlisted = ((num_parameters or 0) - counted) // num_layers
    if unlisted > 0:
        layer.append(("unlisted", (unlisted,)))
    groups: list[tuple[BlockKind, str, list[tuple[str, tuple[int, ...]]]]] = [
        ("embedding", "embedding", [("embedding.weight", (vocab_size, h))]),
        *(
            ("layer", f"layer {index}", [(f"layers.{index}.{parameter}", shape) for parameter, shape in layer])
            for index in range(num_layers)
        ),
        ("head", "head", [("norm.weight", (h,))]),
    ]
    return ModelSpec(
        name=name,
        architecture="GPT",
        blocks=tuple(
            lay_out_block(
                index=index,
                kind=kind,
                name=block_name,
                parameters=[(parameter, shape, decays(parameter, len(shape))) for parameter, shape in parameters],
            )
            for index, (kind, block_name, parameters) in enumerate(groups)
        ),
        tied=True,
        hidden_size=h,
        vocab_size=vocab_size,
    )


def head_flops(spec: ModelSpec, *, tokens: int) -> int:
    """FLOPs of the head in forward. The head is never recomputed."""
    matrices = sum(each.num_elements for each in spec.blocks[-1].parameters if len(each.shape) > 1)
    if spec.tied:
        matrices += spec.vocab_size * spec.hidden_size
    return 2 * tokens * matrices


def analytic_profile(spec: ModelSpec, state: StateBytes, workload: Workload, *, traits: LayerTraits) -> ModelProfile:
    """The profile of one micro-batch, without seconds. Layers whose parameters have equal shapes share a profile."""
    profiles: list[LayerProfile] = []
    known: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    layers = []
    for block in spec.blocks[1:-1]:
        shapes = tuple((name_in_layer(parameter.name), parameter.shape) for parameter in block.parameters)
        if shapes not in known:
            known[shapes] = len(profiles)
            profiles.append(_layer_profile(spec, block, state, workload, traits))
        layers.append(known[shapes])
    return ModelProfile(
        source="analytic",
        profiles=tuple(profiles),
        layers=tuple(layers),
        micro_batch_tokens=workload.micro_batch_tokens,
        sequence_len=workload.sequence_len,
        flops_head=head_flops(spec, tokens=workload.micro_batch_tokens),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One matrix product."""

    name: str
    inputs: int
    outputs: int
    times: int
    """How often a token passes through it: 1, or the number of experts that it visits in a stack."""
    is_stacked: bool


def _layer_profile(
    spec: ModelSpec, block: BlockSpec, state: StateBytes, workload: Workload, traits: LayerTraits
) -> LayerProfile:
    tokens = workload.micro_batch_tokens
    products = _products(block, traits)
    dead = _dead(spec, block, products)
    candidates = [_product_candidate(product, state, tokens) for product in products if product is not dead]
    if traits.num_heads:
        candidates.insert(0, _attention_candidate(traits, state, tokens=tokens, sequence_len=workload.sequence_len))
    flops_recomputed = sum(candidate.flops for candidate in candidates)
    return LayerProfile(
        input_bytes=input_bytes(spec, state, tokens=tokens),
        saved_bytes=block_activation_bytes(spec, block, state, tokens=tokens),
        flops_forward=flops_recomputed + (_flops(dead, tokens) if dead else 0),
        flops_recomputed=flops_recomputed,
        candidates=tuple(sorted(candidates, key=lambda candidate: -candidate.flops / candidate.num_bytes)),
    )


def _products(block: BlockSpec, traits: LayerTraits) -> list[_Product]:
    products = []
    for parameter in block.parameters:
        if len(parameter.shape) < 2 or not parameter.decay:
            continue
        *stack, outputs, inputs = parameter.shape
        if name_in_layer(parameter.name) in traits.inputs_first:
            inputs, outputs = outputs, inputs
        products.append(
            _Product(
                name=name_in_layer(parameter.name).removesuffix(".weight"),
                inputs=inputs,
                outputs=outputs,
                times=traits.active_experts if stack else 1,
                is_stacked=bool(stack),
            )
        )
    return products


def _dead(spec: ModelSpec, block: BlockSpec, products: list[_Product]) -> _Product | None:
    """The product whose output is only added to the residual, if there is one."""
    if any(name_in_layer(parameter.name) in _NORMS_OF_THE_LAST for parameter in block.parameters):
        return None
    last = next((product for product in reversed(products) if product.outputs == spec.hidden_size), None)
    return None if last is None or last.is_stacked else last


def _attention_candidate(traits: LayerTraits, state: StateBytes, *, tokens: int, sequence_len: int) -> SwapCandidate:
    heads_width = traits.num_heads * traits.head_dim
    return SwapCandidate(
        operator="attention",
        key="",
        num_bytes=tokens * (heads_width * state.compute + traits.num_heads * _LOGSUMEXP_BYTES),
        flops=4 * tokens * sequence_len * heads_width,
    )


def _product_candidate(product: _Product, state: StateBytes, tokens: int) -> SwapCandidate:
    return SwapCandidate(
        operator=f"{product.name} mm",
        key="",
        num_bytes=tokens * product.times * product.outputs * state.compute,
        flops=_flops(product, tokens),
    )


def _flops(product: _Product, tokens: int) -> int:
    return 2 * tokens * product.times * product.inputs * product.outputs
