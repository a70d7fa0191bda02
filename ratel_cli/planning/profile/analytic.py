"""What a model costs, from the shapes of its parameters alone: for a plan before any step was recorded. Pure.

Every matrix product leaves its output and takes 2 FLOPs per matrix element and token. What a byte of its output saves
is, for the papers' fc2, qkv, projection and fc1, as 4 : 1 : 1 : 1. Attention is one operator of 4 b s^2 h FLOPs over
the whole row, masked or not. Operators that compute element by element have no FLOPs to save. What they move in the
device's memory is counted where the skeleton shows it (`LayerTraits.moved`); the papers' GPT has few of them.

The last product of a layer is dead work: nothing that backward needs depends on it, so it is never recomputed and is
no candidate for swapping. It is alive where a norm or the router's weights are applied to its output. One case is left
out: where attention and MLP run next to each other, the last product of attention is dead too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ratel_cli.model.values.spec import (
    ROTARY_BYTES,
    TOKEN_BYTES,
    LayerActivations,
    LayerTraits,
    ModelSpec,
    NormActivations,
    RestOfBackward,
    check_depth,
    decays,
    is_matrix,
    name_in_layer,
)
from ratel_cli.planning.profile.activations import (
    head_chunk_tokens,
    input_bytes,
    output_width,
    segment_activation_bytes,
)
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile, RestCosts, SwapCandidate
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.schedule.rules import ALL_ADAMW, ParameterKind, Rule, RuleChoice
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import DtypeName

_NORMS_OF_THE_LAST = ("post_feedforward_layernorm.weight", "post_mlp_layernorm.weight")
_LOGSUMEXP_BYTES = 4
"""Per token and head: attention saves the logarithm of its normaliser in fp32."""
_NORM_STATISTICS_BYTES = 8
"""Per token: a norm saves mean and inverse deviation in fp32."""

_Parameter = tuple[str, tuple[int, ...]]
"""Name and shape."""
_Segment = tuple[str, list[_Parameter]]
"""Name and parameters."""


def spec_from_shape(
    *,
    name: str,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    num_parameters: int | None = None,
    dtype: DtypeName = "bfloat16",
    gradient_dtype: DtypeName | None = None,
    rules: RuleChoice = ALL_ADAMW,
) -> ModelSpec:
    """The papers' GPT: 12 h^2 elements in the matrices of a layer, and a head that is tied to the embedding.

    A nominal `num_parameters` that is larger than the shape's own count adds vectors to the layers: these are moved
    and updated and cost no FLOPs. One that is smaller was rounded down, and the shape's count holds. Raises BadInput
    for a depth that only a mistake can be.
    """
    check_depth(num_layers)
    segments = _gpt_segments(num_layers, hidden_size, vocab_size, num_parameters or 0)
    return ModelSpec(
        name=name,
        architecture="GPT",
        blocks=tuple(
            lay_out_block(
                index=index,
                segment=block.segment,
                name=block.name_in(segments[block.segment][0], dtype, is_main=block.rule == rules.main),
                parameters=[(parameter, shape, decays(parameter)) for parameter, shape in block.parameters],
                dtype=dtype,
                gradient_dtype=gradient_dtype,
                rule=block.rule,
                borrowers=() if block.segment else (num_layers + 1,),
                is_looked_up=not block.segment,
            )
            for index, block in enumerate(_cut_by_rule(segments, rules))
        ),
        segment_names=tuple(segment for segment, _ in segments),
        dtype=dtype,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        batch_bytes=TOKEN_BYTES + ROTARY_BYTES,
    )


class _Cut(NamedTuple):
    """What becomes a block: parameters of a segment that are updated by one rule."""

    segment: int
    rule: Rule
    parameters: Sequence[_Parameter]

    def name_in(self, segment_name: str, dtype: DtypeName, *, is_main: bool) -> str:
        """Return the block's name in a real model (model/cut/binding.py). `is_main`: its rule is the main one."""
        if is_main or not self.segment:
            return segment_name
        if self.rule.stands_alone:
            return f"{segment_name}, {self.parameters[0][0]}"
        return f"{segment_name}, by {self.rule.title} in {dtype}"


def _gpt_segments(num_layers: int, hidden_size: int, vocab_size: int, num_parameters: int) -> list[_Segment]:
    """The segments of the papers' GPT, with what a nominal `num_parameters` has beyond them."""
    h = hidden_size
    layer: list[_Parameter] = [
        ("norm1.weight", (h,)),
        ("qkv.weight", (3 * h, h)),
        ("projection.weight", (h, h)),
        ("norm2.weight", (h,)),
        ("fc1.weight", (4 * h, h)),
        ("fc2.weight", (h, 4 * h)),
    ]
    counted = num_layers * (12 * h**2 + 2 * h) + vocab_size * h + h
    unlisted = (num_parameters - counted) // num_layers
    if unlisted > 0:
        layer.append(("unlisted", (unlisted,)))
    return [
        ("embedding", [("embedding.weight", (vocab_size, h))]),
        *(
            (f"layer {index}", [(f"layers.{index}.{parameter}", shape) for parameter, shape in layer])
            for index in range(num_layers)
        ),
        ("head", [("norm.weight", (h,))]),
    ]


def _cut_by_rule(segments: Sequence[_Segment], rules: RuleChoice) -> list[_Cut]:
    """The blocks in the order of a real model's (model/cut/binding.py): a segment's parameters by rule, each matrix for
    itself where a rule takes matrices; those by other rules than the main one last."""
    cut = list[_Cut]()
    for number, (_, parameters) in enumerate(segments):
        is_in_layer = 0 < number < len(segments) - 1
        by_rule = defaultdict[Rule, list[_Parameter]](list)
        for parameter in parameters:
            by_rule[rules.of(ParameterKind(parameter[1], not number, is_in_layer))].append(parameter)
        for rule, chosen in by_rule.items():
            blocks = [[each] for each in chosen] if rule.stands_alone else [chosen]
            cut.extend(_Cut(number, rule, each) for each in blocks)
    return sorted(cut, key=lambda block: block.segment > 0 and block.rule != rules.main)


def gpt_activations(*, num_heads: int, hidden_size: int, compute_bytes: int) -> LayerActivations:
    """What the activations of the papers' GPT layer take, as PyTorch trains it: fused norms, GELU and attention.

    In elements of the hidden size, autograd saves the results of two norms, query, key and value, attention's result,
    the residual after it, and the input and the result of GELU: 2 + 3 + 1 + 1 + 4 + 4. Backward is at its peak in
    `fc2`: it has the layer's output, and makes the gradient of GELU's result. (In 16 bit the papers count 17 elements:
    two dropouts and the layer's input too, and no residual.) Forward is at its peak where GELU's input and result,
    attention's output, the residual and the result of a norm exist. The
    backward of attention adds up the gradient of the queries in fp32.
    """
    hidden_bytes = hidden_size * compute_bytes
    return LayerActivations(
        saved_per_token=15 * hidden_bytes + num_heads * _LOGSUMEXP_BYTES + 2 * _NORM_STATISTICS_BYTES,
        saved_per_pair=compute_bytes,
        more_per_token=5 * hidden_bytes,
        more_per_pair=0,
        making_per_token=5 * hidden_bytes,
        making_per_pair=0,
        replay_per_token=18 * hidden_bytes + num_heads * _LOGSUMEXP_BYTES + 2 * _NORM_STATISTICS_BYTES,
        replay_per_pair=compute_bytes,
        replay_held_per_token=18 * hidden_bytes + num_heads * _LOGSUMEXP_BYTES + 2 * _NORM_STATISTICS_BYTES,
        replay_held_per_pair=compute_bytes,
        forward_per_token=11 * hidden_bytes,
        forward_per_pair=compute_bytes,
        forward_held_per_token=16 * hidden_bytes + num_heads * _LOGSUMEXP_BYTES,
        forward_held_per_pair=compute_bytes,
        rests=(
            RestOfBackward(
                after="fc1.weight",
                per_token=11 * hidden_bytes
                + num_heads * _LOGSUMEXP_BYTES
                + 2 * _NORM_STATISTICS_BYTES
                + 4 * hidden_size,
                per_pair=compute_bytes,
                products=("projection.weight", "qkv.weight"),
                has_attention=True,
            ),
            RestOfBackward(
                after="qkv.weight",
                per_token=4 * hidden_bytes + _NORM_STATISTICS_BYTES,
                per_pair=0,
                products=(),
                has_attention=False,
            ),
        ),
        saved_products=("qkv.weight", "fc1.weight"),
    )


def gpt_norm(*, hidden_size: int, compute_bytes: int) -> NormActivations:
    """What the final norm of the papers' GPT takes: its result and the gradients of its result and its input; in
    forward, the row that is embedded again. A fused norm saves two numbers for each token."""
    hidden_bytes = hidden_size * compute_bytes
    return NormActivations(held_per_token=2 * hidden_bytes, most_per_token=4 * hidden_bytes)


def head_flops(spec: ModelSpec, *, tokens: int) -> int:
    """FLOPs of the head in forward. The head is never recomputed."""
    return 2 * tokens * sum(each.num_computed for each in spec.head.parameters if len(each.computed_shape) > 1)


def frozen_head_flops(spec: ModelSpec, *, tokens: int) -> int:
    """What backward leaves out of twice that: gradients of frozen matrices, and of hidden states if nothing before the
    last matrix is trained."""
    trained = {parameter.name for block in spec.head.bound if block.is_trained for parameter in block.parameters}
    matrices = [each for each in spec.head.parameters if len(each.computed_shape) > 1]
    frozen = sum(each.num_computed for each in matrices if each.name not in trained)
    # What is trained before the last matrix needs the gradient of that one's input.
    ends = not spec.passes_on(spec.head) and trained <= {each.name for each in matrices[-1:]}
    return 2 * tokens * (frozen + (sum(each.num_computed for each in matrices) if ends else 0))


def head_sum_bytes(spec: ModelSpec, workload: Workload) -> int:
    """Bytes of the device's memory that a step reads and writes to add up the head's gradients, chunk by chunk.

    Each chunk of tokens makes gradients of all of the head, in the compute dtype, and adds them to fp32 sums.
    """
    made = Segment(spec.head.bound)
    return num_head_chunks(spec, workload) * (made.updated_bytes + 2 * made.sum_bytes)


def num_head_chunks(spec: ModelSpec, workload: Workload) -> int:
    """Chunks of tokens that the head computes with in a step."""
    return workload.num_micro_batches * math.ceil(workload.micro_batch_tokens / head_chunk_tokens(spec, workload))


def analytic_profile(spec: ModelSpec, workload: Workload, *, traits: LayerTraits) -> ModelProfile:
    """The profile of one micro-batch, without seconds. Layers whose parameters have equal shapes share a profile.

    Bytes are those of full rows. FLOPs are those of as many tokens in rows as long as the data's.
    """
    profiles: list[LayerProfile] = []
    known: dict[object, int] = {}
    layers = []
    for layer in spec.layers:
        has_backward = spec.has_backward(layer)
        shapes = ((name_in_layer(parameter.name), parameter.computed_shape) for parameter in layer.parameters)
        kind = has_backward, layer.block_kinds, *shapes
        if kind not in known:
            known[kind] = len(profiles)
            profile = _layer_profile(spec, layer, workload, traits)
            profiles.append(profile if has_backward else profile.forward_only())
        layers.append(known[kind])
    tokens, norm = workload.micro_batch_tokens, traits.norm
    if norm is None:
        vectors_bytes = segment_activation_bytes(spec, spec.head, tokens=1)
        norm = NormActivations(held_per_token=vectors_bytes // 2, most_per_token=vectors_bytes)
    return ModelProfile(
        source="analytic",
        profiles=tuple(profiles),
        layers=tuple(layers),
        micro_batch_tokens=workload.micro_batch_tokens,
        sequence_len=workload.sequence_len,
        flops_head=head_flops(spec, tokens=workload.micro_batch_tokens),
        norm_held_bytes=tokens * norm.held_per_token,
        norm_bytes=tokens * norm.most_per_token,
        frozen_head_flops=frozen_head_flops(spec, tokens=tokens),
        head_moved_bytes=tokens * traits.moved.head_per_token if traits.moved else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One matrix product."""

    parameter: str
    """Name of its matrix within the layer."""
    inputs: int
    outputs: int
    times: int
    """How often a token passes through it: 1, or the number of experts that it visits in a stack."""
    is_stacked: bool


def _layer_profile(spec: ModelSpec, layer: Segment, workload: Workload, traits: LayerTraits) -> LayerProfile:
    tokens = workload.micro_batch_tokens
    products = _products(layer, traits)
    dead = _dead(spec, layer, products)
    found = traits.activations or _activations(spec, layer)
    candidates = [
        _product_candidate(product, spec.dtype_bytes, tokens, is_saved=product.parameter in found.saved_products)
        for product in products
        if product is not dead
    ]
    if traits.num_heads:
        candidates.insert(
            0, _attention_candidate(traits, spec.dtype_bytes, tokens=tokens, sequence_len=workload.mean.sequence_len)
        )
    flops_recomputed = sum(candidate.flops for candidate in candidates)
    frozen = {name_in_layer(each.name) for block in layer.bound if not block.is_trained for each in block.parameters}
    pairs, met_pairs = tokens * workload.sequence_len, tokens * workload.mean.sequence_len
    saved_bytes = tokens * found.saved_per_token + pairs * found.saved_per_pair
    unit_bytes, moved = input_bytes(spec, tokens=tokens), traits.moved
    expanded_bytes = sum(
        each.num_elements + each.num_computed * spec.dtype_bytes
        for each in layer.parameters
        if each.quantised_shape is not None
    )  # read and written by a kernel that does so in one pass, in forward, again to recompute it, and in backward
    return LayerProfile(
        input_bytes=unit_bytes,
        saved_bytes=unit_bytes + saved_bytes,
        forward_bytes=tokens * found.forward_per_token + pairs * found.forward_per_pair,
        forward_held_bytes=tokens * found.forward_held_per_token + pairs * found.forward_held_per_pair,
        backward_bytes=saved_bytes + tokens * found.more_per_token + pairs * found.more_per_pair,
        making_bytes=saved_bytes + tokens * found.making_per_token + pairs * found.making_per_pair,
        replay_bytes=tokens * found.replay_per_token + pairs * found.replay_per_pair,
        replay_held_bytes=tokens * found.replay_held_per_token + pairs * found.replay_held_per_pair,
        flops_forward=flops_recomputed + (_flops(dead, tokens) if dead else 0),
        flops_recomputed=flops_recomputed,
        candidates=tuple(sorted(candidates, key=lambda candidate: -candidate.flops / candidate.num_bytes)),
        rests=tuple(
            RestCosts(
                after=rest.after,
                num_bytes=tokens * rest.per_token + pairs * rest.per_pair,
                flops=2
                * _flops_of_rest(rest, products, traits, tokens=tokens, sequence_len=workload.mean.sequence_len),
            )
            for rest in found.rests
        ),
        frozen_flops=sum(_flops(product, tokens) for product in products if product.parameter in frozen),
        forward_moved_bytes=expanded_bytes
        + (tokens * moved.forward_per_token + met_pairs * moved.forward_per_pair if moved else 0),
        backward_moved_bytes=expanded_bytes
        + (tokens * moved.backward_per_token + met_pairs * moved.backward_per_pair if moved else 0),
    )


def _flops_of_rest(
    rest: RestOfBackward, products: list[_Product], traits: LayerTraits, *, tokens: int, sequence_len: int
) -> int:
    """FLOPs in forward of what the rest of backward differentiates."""
    flops = sum(_flops(product, tokens) for product in products if product.parameter in rest.products)
    return flops + (_attention_flops(traits, tokens, sequence_len) if rest.has_attention else 0)


def _attention_flops(traits: LayerTraits, tokens: int, sequence_len: int) -> int:
    return 4 * tokens * sequence_len * traits.num_heads * traits.head_dim


def _activations(spec: ModelSpec, layer: Segment) -> LayerActivations:
    """An estimate of what nothing has measured: that of a Llama, whose vectors are in fp32 at times."""
    saved, compute_bytes = segment_activation_bytes(spec, layer, tokens=1), spec.dtype_bytes
    made = 2 * max((output_width(parameter) for parameter in layer.parameters), default=0) * compute_bytes
    more = spec.hidden_size * compute_bytes + made
    return LayerActivations(
        saved_per_token=saved,
        saved_per_pair=compute_bytes,
        more_per_token=more,
        more_per_pair=0,
        making_per_token=more,
        making_per_pair=0,
        replay_per_token=saved + more,
        replay_per_pair=compute_bytes,
        replay_held_per_token=2 * saved,
        replay_held_per_pair=compute_bytes,
        forward_per_token=saved,
        forward_per_pair=compute_bytes,
        forward_held_per_token=2 * saved,
        forward_held_per_pair=compute_bytes,
        rests=(),
        saved_products=(),
    )


def _products(layer: Segment, traits: LayerTraits) -> list[_Product]:
    products = []
    for parameter in layer.parameters:
        of_samples = traits.activations.of_samples if traits.activations else ()
        if not is_matrix(parameter.name, len(parameter.computed_shape)) or name_in_layer(parameter.name) in of_samples:
            continue
        *stack, outputs, inputs = parameter.computed_shape
        if name_in_layer(parameter.name) in traits.inputs_first:
            inputs, outputs = outputs, inputs
        products.append(
            _Product(
                parameter=name_in_layer(parameter.name),
                inputs=inputs,
                outputs=outputs,
                times=traits.active_experts if stack else 1,
                is_stacked=bool(stack),
            )
        )
    return products


def _dead(spec: ModelSpec, layer: Segment, products: list[_Product]) -> _Product | None:
    """The product whose output is only added to the residual, if there is one."""
    if any(name_in_layer(parameter.name) in _NORMS_OF_THE_LAST for parameter in layer.parameters):
        return None
    last = next((product for product in reversed(products) if product.outputs == spec.hidden_size), None)
    return None if last is None or last.is_stacked else last


def _attention_candidate(traits: LayerTraits, compute_bytes: int, *, tokens: int, sequence_len: int) -> SwapCandidate:
    heads_width = traits.num_heads * traits.head_dim
    num_bytes = tokens * (heads_width * compute_bytes + traits.num_heads * _LOGSUMEXP_BYTES)
    return SwapCandidate(
        operator="attention",
        key="",
        num_bytes=num_bytes,
        flops=_attention_flops(traits, tokens, sequence_len),
        saved_bytes=num_bytes,
        held_bytes=num_bytes,
    )


def _product_candidate(product: _Product, compute_bytes: int, tokens: int, *, is_saved: bool) -> SwapCandidate:
    num_bytes = tokens * product.times * product.outputs * compute_bytes
    return SwapCandidate(
        operator=f"{product.parameter.removesuffix('.weight')} mm",
        key="",
        num_bytes=num_bytes,
        flops=_flops(product, tokens),
        saved_bytes=num_bytes if is_saved else 0,
        held_bytes=num_bytes,
    )


def _flops(product: _Product, tokens: int) -> int:
    return 2 * tokens * product.times * product.inputs * product.outputs
