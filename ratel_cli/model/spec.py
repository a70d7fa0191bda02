"""A model as values: its blocks, their parameters, and the place of each parameter in its block.

Pure: nothing here imports torch, so that a plan can be made on any machine.

Invariants: a block's parameters lie one after another in one flat array of `num_elements` elements. Every parameter
starts on a multiple of `PARAMETER_ALIGNMENT` elements. That is 256 bytes in 16 bit, the most that kernels look at when
they choose a path; so they take the same path as for torch's own tensors, and give the same bits. The length of the
array is a multiple of `BLOCK_ALIGNMENT` elements, a page of 4 KiB in 16 bit, so that every field of a record in the
store starts on a page. Elements in gaps are zero.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Literal, Self, get_args

from ratel_cli.errors import BadInput
from ratel_cli.json_fields import JsonFields, checked_integer
from ratel_cli.sizes import BLOCK_ALIGNMENT, PARAMETER_ALIGNMENT
from ratel_cli.units import align_up

FORMAT_VERSION = 1
MAX_LAYERS = 10_000
"""More layers in a config are a mistake. The deepest models have some hundred; each takes milliseconds to build."""

BlockKind = Literal["embedding", "layer", "head"]
_BEFORE_THE_LAYER = re.compile(r"(.*?\.)?\d+\.")
_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One trainable tensor: its Hugging Face name and its place in the block's flat array."""

    name: str
    shape: tuple[int, ...]
    start: int
    """The index of its first element in the flat array."""
    decay: bool
    """Whether weight decay applies; see `decays`."""

    @property
    def num_elements(self) -> int:
        """Elements of the tensor, without padding."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The index after its last element in the flat array."""
        return self.start + self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """The unit of streaming: the embedding, one decoder layer, or the head."""

    index: int
    kind: BlockKind
    name: str
    parameters: tuple[ParameterSpec, ...]
    num_elements: int
    """Length of the flat array: all parameters, and the padding between and after them."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(parameter.num_elements for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All blocks of a model."""

    name: str
    architecture: str
    """The class in transformers."""
    blocks: tuple[BlockSpec, ...]
    """In forward order: embedding, layers, head."""
    tied: bool
    """Whether the head uses the embedding's weight, which then belongs to the embedding block only."""
    hidden_size: int
    vocab_size: int
    looks_up_rows: bool = True
    """Whether the model's code before the layers reads nothing of the embedding's matrix but the rows of its tokens."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied embedding counts once."""
        return sum(block.num_parameters for block in self.blocks)

    @cached_property
    def block_elements(self) -> tuple[int, ...]:
        """Length of each block's flat array, padding included."""
        return tuple(block.num_elements for block in self.blocks)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without embedding and head."""
        return sum(block.kind == "layer" for block in self.blocks)

    def to_json(self) -> dict[str, object]:
        """The content of `run/model.json`."""
        return {"format_version": FORMAT_VERSION, "num_parameters": self.num_parameters, **asdict(self)}

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The spec from the content that `to_json` made. Raises ValueError.

        Blocks are laid out again from names and shapes. If the layout differs, other code made the content.
        """
        fields = JsonFields(content)
        if fields.integer("format_version") != FORMAT_VERSION:
            raise ValueError("made by another version")
        return cls(
            name=fields.text("name"),
            architecture=fields.text("architecture"),
            blocks=tuple(_block(item, index) for index, item in enumerate(fields.items("blocks"))),
            tied=fields.flag("tied"),
            hidden_size=fields.integer("hidden_size"),
            vocab_size=fields.integer("vocab_size"),
            looks_up_rows=fields.flag("looks_up_rows"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOfBackward:
    """Backward of a layer from the gradient of one parameter on. Sizes as in `LayerActivations`."""

    after: str
    """The parameter's name within the layer."""
    per_token: int
    """What backward takes at most from then on: what is still saved, the layer's output, gradients of activations."""
    per_pair: int
    products: tuple[str, ...]
    """Names of the matrices whose gradients are made from then on."""
    has_attention: bool
    """Whether the backward of attention runs from then on."""

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The values from a part of what `LayerTraits.to_json` made. Raises ValueError."""
        fields = JsonFields(content)
        return cls(
            after=fields.text("after"),
            per_token=fields.integer("per_token"),
            per_pair=fields.integer("per_pair"),
            products=tuple(fields.texts("products")),
            has_attention=fields.flag("has_attention"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """What the activations of a layer take, in bytes. Its input, its weights and their gradients are left out.

    A pair is a token and a position of its row: masks and scores of attention have an element for each.
    """

    saved_per_token: int
    """What autograd saves."""
    saved_per_pair: int
    more_per_token: int
    """What backward takes at its peak next to what is saved: the layer's output, and gradients of activations."""
    more_per_pair: int
    making_per_token: int
    """The same while the gradient of a weight is made."""
    making_per_pair: int
    replay_per_token: int
    """What recomputing takes at its peak, before backward: what is saved by then, and what is made on the way."""
    replay_per_pair: int
    replay_held_per_token: int
    """The same if all that autograd saves were there from the beginning, as swapped outputs are."""
    replay_held_per_pair: int
    forward_per_token: int
    """What forward takes at its peak, when nothing is saved: the layer's output and what is made on the way."""
    forward_per_pair: int
    forward_held_per_token: int
    """The same if the results of all products, and of attention, stayed to the end, as swapped outputs do."""
    forward_held_per_pair: int
    rests: tuple[RestOfBackward, ...]
    """Where backward begins to take less, in its order. Empty where kinds of layers differ."""
    saved_products: tuple[str, ...]
    """Names, within a layer, of the matrices whose products autograd saves."""

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The values from the content that `LayerTraits.to_json` made. Raises ValueError."""
        fields = JsonFields(content)
        return cls(
            saved_per_token=fields.integer("saved_per_token"),
            saved_per_pair=fields.integer("saved_per_pair"),
            more_per_token=fields.integer("more_per_token"),
            more_per_pair=fields.integer("more_per_pair"),
            making_per_token=fields.integer("making_per_token"),
            making_per_pair=fields.integer("making_per_pair"),
            replay_per_token=fields.integer("replay_per_token"),
            replay_per_pair=fields.integer("replay_per_pair"),
            replay_held_per_token=fields.integer("replay_held_per_token"),
            replay_held_per_pair=fields.integer("replay_held_per_pair"),
            forward_per_token=fields.integer("forward_per_token"),
            forward_per_pair=fields.integer("forward_per_pair"),
            forward_held_per_token=fields.integer("forward_held_per_token"),
            forward_held_per_pair=fields.integer("forward_held_per_pair"),
            rests=tuple(map(RestOfBackward.from_json, fields.items("rests"))),
            saved_products=tuple(fields.texts("saved_products")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NormActivations:
    """What the final norm takes for a token, in bytes. Its input is left out."""

    held_per_token: int
    """Between its forward and its backward, while the head runs: its result, what autograd saves, and room for the
    gradient of its result."""
    most_per_token: int
    """At the peak of forward or backward."""

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The values from a part of what `LayerTraits.to_json` made. Raises ValueError."""
        fields = JsonFields(content)
        return cls(held_per_token=fields.integer("held_per_token"), most_per_token=fields.integer("most_per_token"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """Bytes that the operators other than products read and write: norms, activations, rotations, residuals.

    They take as long as the memory of the device takes to move them. Layers count with their mean over all layers. A
    pair is as in `LayerActivations`.
    """

    forward_per_token: int
    """Of one layer."""
    forward_per_pair: int
    backward_per_token: int
    """Without the forward that backward runs again."""
    backward_per_pair: int
    head_per_token: int
    """Of the final norm, the passes of the loss over the logits, and the backward of both."""

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The values from a part of what `LayerTraits.to_json` made. Raises ValueError."""
        values = JsonFields(content)
        return cls(**{each.name: values.integer(each.name) for each in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """Facts about a model's layers that the shapes of their parameters do not show."""

    num_heads: int
    """Number of attention heads; 0 if the layers have no attention."""
    head_dim: int
    active_experts: int = 1
    """Number of experts that compute each token."""
    inputs_first: tuple[str, ...] = ()
    """Names, within a layer, of matrices `[inputs, outputs]`. All other matrices are `[outputs, inputs]`."""
    activations: LayerActivations | None = None
    """As measured on the skeleton (model/footprint.py); None if they were not."""
    norm: NormActivations | None = None
    """So for the final norm."""
    moved: MovedBytes | None = None
    """So for all layers and the head."""

    def to_json(self) -> dict[str, object]:
        """The content for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The traits from the content that `to_json` made. Raises ValueError."""
        fields = JsonFields(content)
        activations, norm, moved = (fields.value(name) for name in ("activations", "norm", "moved"))
        return cls(
            num_heads=fields.integer("num_heads"),
            head_dim=fields.integer("head_dim"),
            active_experts=fields.integer("active_experts"),
            inputs_first=tuple(fields.texts("inputs_first")),
            activations=None if activations is None else LayerActivations.from_json(activations),
            norm=None if norm is None else NormActivations.from_json(norm),
            moved=None if moved is None else MovedBytes.from_json(moved),
        )


def decays(name: str, *, is_in_layer_norm: bool = False) -> bool:
    """Whether weight decay applies to a parameter, by the rule of transformers' Trainer (5.23): not within a torch
    LayerNorm, and not if a part of its name says that it is a bias or a norm. Its shape does not matter."""
    return not is_in_layer_norm and _NEVER_DECAYS.search(name.lower()) is None


def is_matrix(name: str, num_dimensions: int) -> bool:
    """Whether a parameter is taken for a matrix, or a stack of matrices, that activations are multiplied by: it has two
    dimensions or more, and is no bias and no weight of a norm."""
    module = ".".join(name.rsplit(".", 2)[-2:]).lower()
    return num_dimensions >= 2 and not module.endswith("bias") and "norm" not in module


def name_in_layer(parameter_name: str) -> str:
    """`self_attn.q_proj.weight` for `model.layers.3.self_attn.q_proj.weight`."""
    return _BEFORE_THE_LAYER.sub("", parameter_name, count=1)


def lay_out_block(
    *, index: int, kind: BlockKind, name: str, parameters: list[tuple[str, tuple[int, ...], bool]]
) -> BlockSpec:
    """Place parameters, given as (name, shape, decay), one after another, aligned as the invariant above says."""
    placed: list[ParameterSpec] = []
    position = 0
    for parameter_name, shape, decay in parameters:
        placed.append(ParameterSpec(name=parameter_name, shape=shape, start=position, decay=decay))
        position = align_up(placed[-1].stop, PARAMETER_ALIGNMENT)
    return BlockSpec(
        index=index, kind=kind, name=name, parameters=tuple(placed), num_elements=align_up(position, BLOCK_ALIGNMENT)
    )


@lru_cache(maxsize=64)
def with_rows(block: BlockSpec, num_rows: int) -> BlockSpec:
    """The block with this many rows of its first parameter, laid out anew. What is left of an embedding that is looked
    up by rows."""
    (first, *others), rows = block.parameters, (num_rows, *block.parameters[0].shape[1:])
    return lay_out_block(
        index=block.index,
        kind=block.kind,
        name=block.name,
        parameters=[(first.name, rows, first.decay), *((each.name, each.shape, each.decay) for each in others)],
    )


def check_depth(num_layers: int) -> None:
    """Raise BadInput if there are more layers than any model has, before memory is spent on each of them."""
    if num_layers > MAX_LAYERS:
        raise BadInput(f"{num_layers} layers are more than the limit of {MAX_LAYERS}")


def _block(content: object, index: int) -> BlockSpec:
    fields = JsonFields(content)
    kinds: dict[str, BlockKind] = {kind: kind for kind in get_args(BlockKind)}
    if fields.integer("index") != index or fields.text("kind") not in kinds:
        raise ValueError(f"block {index} is not described")
    parameters = [JsonFields(item) for item in fields.items("parameters")]
    block = lay_out_block(
        index=index,
        kind=kinds[fields.text("kind")],
        name=fields.text("name"),
        parameters=[(each.text("name"), _shape(each), each.flag("decay")) for each in parameters],
    )
    starts = [each.integer("start") for each in parameters]
    if starts != [each.start for each in block.parameters] or fields.integer("num_elements") != block.num_elements:
        raise ValueError(f"block {index} has another layout")
    return block


def _shape(fields: JsonFields) -> tuple[int, ...]:
    shape = tuple(checked_integer(size, "shape") for size in fields.items("shape"))
    if min(shape, default=0) < 0:
        raise ValueError("shape is negative")
    return shape
