"""A model as values: its blocks (`ratel_cli/schedule/blocks.py`), and what its layers and their activations take.

Pure: nothing here imports torch, so that a plan can be made on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Self

from ratel_cli.errors import BadInput
from ratel_cli.json_fields import JsonFields, read_as
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec, block_from_json
from ratel_cli.schedule.rules import rules_by_name
from ratel_cli.schedule.segments import Segment, first_trained, segments_of
from ratel_cli.schedule.slices import slices_of
from ratel_cli.sizes import VALUE_BYTES, DtypeName, WeightDtype
from ratel_cli.store.layout import Geometry, RankSlice, StoredBlock

FORMAT_VERSION = 10
TOKEN_BYTES = 24
"""Bytes of a token, its target and its position."""
ROTARY_BYTES = 512
"""Tables for one token and heads of 128 elements in 16 bit."""
MAX_LAYERS = 10_000
"""More layers in a config are a mistake. The deepest models have some hundred; each takes milliseconds to build."""

_BEFORE_THE_LAYER = re.compile(r"(.*?\.)?\d+\.")
_NEVER_DECAYS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All blocks of a model."""

    name: str
    architecture: str
    """The class in transformers."""
    blocks: tuple[BlockSpec, ...]
    """In the order of the store. What is trained in the model's dtype comes first, in the order of forward."""
    segment_names: tuple[str, ...]
    """In the order of forward."""
    dtype: DtypeName
    """Dtype of hidden states, and of the blocks that need no other one."""
    hidden_size: int
    """Elements of the hidden states of one token."""
    vocab_size: int
    sample_tokens: int = 0
    """Tokens of a sample, each with its hidden state, if all samples have as many: those of an image, say. 0: samples
    are text of any length."""
    carried_bytes: int = 0
    """Bytes, for one token, of what layers get besides: from the embedding, and from layers below."""
    batch_bytes: int = TOKEN_BYTES
    """Bytes, for one token, of a micro-batch, and of what the code before the layers makes of it besides the above."""
    loss_bytes: int = 0
    """Bytes, for one token, of outputs and what the loss makes of them; 0: those of the cross-entropy of logits."""
    looks_up_rows: bool = True
    """Whether the model's code before the layers reads nothing of the embedding's matrix but the rows of tokens."""
    substitutes: tuple[int, ...] = ()
    """Tokens that this code may look up in the place of others, such as padding in that of an image's token."""

    def __hash__(self) -> int:
        """Hash only what is cheap to hash: searches ask for what follows from a spec thousands of times."""
        return hash((self.name, self.architecture, self.hidden_size, self.vocab_size, len(self.blocks)))

    @cached_property
    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The parameters of all blocks, in the order of the store."""
        return tuple(parameter for block in self.blocks for parameter in block.parameters)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; a tied embedding counts once. Of quantised ones, those of their matrices."""
        return sum(block.num_parameters for block in self.blocks)

    @property
    def num_trained(self) -> int:
        """The part of these that are trained."""
        return sum(block.num_parameters for block in self.blocks if block.is_trained)

    @cached_property
    def block_elements(self) -> tuple[int, ...]:
        """Length of each block's flat array, padding included."""
        return tuple(block.num_elements for block in self.blocks)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of all blocks that have gradients, padding included."""
        return sum(segment.trained_elements for segment in self.segments)

    @cached_property
    def update_work(self) -> float:
        """Elements of all updates, as many as AdamW updates in the same time."""
        return sum(segment.update_work for segment in self.segments)

    @cached_property
    def record_bytes(self) -> int:
        """Size of all records."""
        return sum(block.record_bytes for block in self.blocks)

    @cached_property
    def update_bytes(self) -> int:
        """What updating all blocks moves in main memory."""
        return sum(block.update_bytes for block in self.blocks)

    @cached_property
    def stored_blocks(self) -> tuple[StoredBlock, ...]:
        """The blocks as the store sees them."""
        return tuple(block.stored for block in self.blocks)

    @cached_property
    def one_generation(self) -> Geometry:
        """The shape of a store with one generation of the model, in one file."""
        return Geometry(blocks=self.stored_blocks, num_slots=1, shares=(1,))

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one value of a hidden state."""
        return VALUE_BYTES[self.dtype]

    @property
    def passed_bytes(self) -> int:
        """Bytes, for one token, that wait between two layers, gradients left out."""
        return self.hidden_size * self.dtype_bytes + self.carried_bytes

    @property
    def lookup_block(self) -> BlockSpec | None:
        """The block that begins with the embedding's matrix, whose rows tokens are looked up in; None if no tokens
        are."""
        return next((block for block in self.blocks if block.is_looked_up), None)

    @property
    def tied(self) -> bool:
        """Whether the head uses that matrix, too."""
        return bool(self.lent.blocks)

    @cached_property
    def lent(self) -> Segment:
        """What the head borrows of the embedding, as a segment: the block of that matrix, or nothing."""
        return Segment(tuple(block for segment in self.segments[-1:] for block in segment.borrowed_lookups))

    @property
    def num_rows(self) -> int:
        """Rows of that matrix; 0 without one."""
        return self.lookup_block.parameters[0].shape[0] if self.lookup_block is not None else 0

    @property
    def embedding_width(self) -> int:
        """Elements of a row of that matrix; 0 without one."""
        return self.lookup_block.parameters[0].shape[-1] if self.lookup_block is not None else 0

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of forward: embedding, layers, head."""
        return tuple(segments_of(self.blocks, self.segment_names))

    @cached_property
    def shared_blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks whose gradients are added up from segment to segment, for each micro-batch."""
        return tuple(block for block in self.blocks if block.has_partial_sums)

    @cached_property
    def first_trained(self) -> int:
        """The index of the segment at which backward ends: nothing below is trained."""
        return first_trained(self.segments)

    def has_backward(self, segment: Segment) -> bool:
        """Whether backward reaches it."""
        return segment.index >= self.first_trained

    def passes_on(self, segment: Segment) -> bool:
        """Whether backward goes on below it, so that its input has a gradient."""
        return segment.index > self.first_trained

    @property
    def embedding(self) -> Segment:
        """What runs before the layers."""
        return self.segments[0]

    @property
    def layers(self) -> tuple[Segment, ...]:
        """The decoder layers, without embedding and head."""
        return self.segments[1:-1]

    @property
    def head(self) -> Segment:
        """What runs behind the layers."""
        return self.segments[-1]

    def is_layer(self, segment: Segment) -> bool:
        """Whether it is between embedding and head."""
        return 0 < segment.index < len(self.segment_names) - 1

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    def sliced(self, rank_slice: RankSlice) -> ModelSpec:
        """What one rank stores and updates of the model. One rank alone has the model."""
        if rank_slice.size == 1:
            return self
        return replace(self, blocks=slices_of(self.blocks, rank_slice))

    def with_gradients(self, dtype: DtypeName) -> Self:
        """The model with gradients that leave the device, and are held, in `dtype`; those of blocks that need another
        dtype than the model's stay as they are."""
        blocks = (replace(block, gradient_dtype=self.dtype_of(block, dtype)) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def in_files(self, file_bytes: Mapping[int, int]) -> Self:
        """The model with some blocks in the base model's files; by index, what is read there of each."""
        placed = (replace(block, file_bytes=file_bytes.get(block.index)) for block in self.blocks)
        return replace(self, blocks=tuple(placed))

    @property
    def frozen_names(self) -> frozenset[str]:
        """The names of the parameters that no step changes."""
        return frozenset(each.name for block in self.blocks if not block.is_trained for each in block.parameters)

    def dtype_of(self, block: BlockSpec, dtype: DtypeName) -> WeightDtype:
        """What a block has instead, where the model's own dtype becomes `dtype`."""
        return dtype if block.dtype == self.dtype else block.dtype

    def exported_dtypes(self, dtype: DtypeName) -> dict[str, WeightDtype]:
        """By name of the parameter, the dtype of an export in `dtype`; what needs another dtype than the model's has
        it there too."""
        return {each.name: self.dtype_of(block, dtype) for block in self.blocks for each in block.parameters}

    def to_json(self) -> dict[str, object]:
        """The content of `run/model.json`."""
        blocks = [{**asdict(block), "rule": block.rule.name} for block in self.blocks]
        return {
            "format_version": FORMAT_VERSION,
            "num_parameters": self.num_parameters,
            **asdict(self),
            "blocks": blocks,
        }

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The spec from the content that `to_json` made. Raises ValueError.

        Blocks are laid out again from names and shapes. If the layout differs, other code made the content.
        """
        fields = JsonFields(content)
        if fields.integer("format_version") != FORMAT_VERSION:
            raise ValueError("made by another version")
        rules, items = rules_by_name(), enumerate(fields.items("blocks"))
        blocks = tuple(block_from_json(item, index, rules) for index, item in items)
        return read_as(cls, content, blocks=blocks)


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
    """Peak while the gradient of a weight is made, next to what is saved."""
    making_per_pair: int
    replay_per_token: int
    """What recomputing takes at its peak, before backward: what is saved by then, and what is made on the way."""
    replay_per_pair: int
    replay_held_per_token: int
    """Peak of recomputing if all that autograd saves were there from the beginning, as swapped outputs are."""
    replay_held_per_pair: int
    forward_per_token: int
    """What forward takes at its peak, when nothing is saved: the layer's output and what is made on the way."""
    forward_per_pair: int
    forward_held_per_token: int
    """Peak of forward if the results of all products, and of attention, stayed to the end, as swapped outputs do."""
    forward_held_per_pair: int
    rests: tuple[RestOfBackward, ...]
    """Where backward begins to take less, in its order. Empty where kinds of layers differ."""
    saved_products: tuple[str, ...]
    """Names, within a layer, of the matrices whose products autograd saves."""
    of_samples: tuple[str, ...] = ()
    """Names, within a layer, of matrices that something of a whole sample is multiplied by, such as a condition: once,
    however many tokens it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormActivations:
    """What the final norm takes for a token, in bytes. Its input is left out."""

    held_per_token: int
    """Bytes between the norm's forward and its backward, while the head runs: its result, what autograd saves, and room
    for the gradient of its result."""
    most_per_token: int
    """At the peak of forward or backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedBytes:
    """Bytes that the operators other than products read and write: norms, activations, rotations, residuals.

    They take as long as the memory of the device takes to move them. Layers count with their mean over all layers. A
    pair is as in `LayerActivations`.
    """

    forward_per_token: int
    """Bytes that the forward of one layer moves, for each token."""
    forward_per_pair: int
    backward_per_token: int
    """Without the forward that backward runs again."""
    backward_per_pair: int
    head_per_token: int
    """Bytes that the head moves: the final norm, the passes of the loss over the logits, and the backward of both."""


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
    """Activations of a layer, as measured on the skeleton (engine/steps/footprint.py), or as calculated for a model
    shape (planning/profile/analytic.py); None if they are not known."""
    norm: NormActivations | None = None
    """Activations of the final norm, measured or calculated likewise; None if they are not known."""
    moved: MovedBytes | None = None
    """Bytes that the operators other than products move, in all layers and the head, as measured; None if they were
    not."""

    def to_json(self) -> dict[str, object]:
        """The content for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object) -> Self:
        """The traits from the content that `to_json` made. Raises ValueError."""
        return read_as(cls, content)


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


def check_depth(num_layers: int) -> None:
    """Raise BadInput if there are more layers than any model has, before memory is spent on each of them."""
    if num_layers > MAX_LAYERS:
        raise BadInput(f"{num_layers} layers are more than the limit of {MAX_LAYERS}")
