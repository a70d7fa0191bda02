"""Blocks, the unit of storing: flat arrays of parameters, with one dtype and one rule. Pure.

Invariants: a block's parameters lie one after another in one flat array of `num_elements` elements. Every parameter
starts on a multiple of `PARAMETER_ALIGNMENT` elements, and of what its rule updates as one. The former is 256 bytes in
16 bit, the most that kernels look at when they choose a path; so they take the same path as for torch's own tensors,
and give the same bits. The length of the array is a multiple of `BLOCK_ALIGNMENT` elements, a page of 4 KiB in 16 bit,
so that every field of a record in the store starts on a page. Of bytes, both are twice as many. Elements in gaps are
zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

from ratel_cli.json_fields import JsonFields, read_as
from ratel_cli.schedule.rules import ADAMW, P16, Rule
from ratel_cli.schedule.updates import Directed
from ratel_cli.sizes import BLOCK_ALIGNMENT, PARAMETER_ALIGNMENT, VALUE_BYTES, WeightDtype
from ratel_cli.store.layout import Record, StoredBlock
from ratel_cli.units import align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One tensor: its Hugging Face name and its place in the block's flat array."""

    name: str
    shape: tuple[int, ...]
    start: int
    """The index of its first element in the flat array."""
    decay: bool
    """Whether weight decay applies; see `decays`."""
    first: int = 0
    """The index of its first element here in the flattened tensor: not 0 in a rank's slice (schedule/slices.py)."""
    quantised_shape: tuple[int, ...] | None = None
    """The shape of the matrix that its bytes hold, quantised (model/files/quantised.py); None: it is none of these."""

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """The shape of what the model's code computes with."""
        return self.shape if self.quantised_shape is None else self.quantised_shape

    @property
    def num_computed(self) -> int:
        """Elements of what the model's code computes with: what people count as parameters."""
        return math.prod(self.computed_shape)

    @property
    def num_elements(self) -> int:
        """Elements of the tensor, without padding."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """The index after its last element in the flat array."""
        return self.start + self.num_elements


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """What a segment needs of one dtype and one rule (`ratel_cli/schedule/segments.py`)."""

    index: int
    segment: int
    """The index of the segment that it belongs to."""
    name: str
    parameters: tuple[ParameterSpec, ...]
    num_elements: int
    """Length of the flat array: all parameters, and the padding between and after them."""
    dtype: WeightDtype
    """What the device computes with, or the bytes of quantised matrices that it expands for that."""
    gradient_dtype: WeightDtype
    """Dtype of the gradient as it leaves the device and is held (G16)."""
    rule: Rule = ADAMW
    """How the parameters change in a step."""
    borrowers: tuple[int, ...] = ()
    """Indices of segments behind its own that bind it too. Its gradient is complete behind its own one's backward."""
    is_looked_up: bool = False
    """Whether it begins with a matrix in whose rows its own segment looks tokens up."""
    rate: int = 0
    """Which of a step's learning rates it has: the run's, 0, or that of a group (model/values/rate_groups.py)."""
    file_bytes: int | None = None
    """What is read of the base model's files where the block stays there (model/files/in_place.py): its weights, and
    the rest of the pages that these begin and end in. None: it lies in the store, as all do that are trained."""

    @property
    def users(self) -> tuple[int, ...]:
        """Indices of all segments that bind it."""
        return (self.segment, *self.borrowers)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding; of quantised ones, those of their matrices."""
        return sum(parameter.num_computed for parameter in self.parameters)

    @property
    def num_stored(self) -> int:
        """Elements of all parameters as the store has them, without padding."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @cached_property
    def record(self) -> Record:
        """The fields that the store has of the block."""
        return self.rule.record(self.dtype, self.parameters[0].shape if self.parameters else None)

    @property
    def stored(self) -> StoredBlock:
        """The block as the store sees it."""
        return StoredBlock(self.num_elements, self.record, self.rule.is_frozen, self.is_in_files)

    @property
    def is_in_files(self) -> bool:
        """Whether it stays in the base model's files."""
        return self.file_bytes is not None

    @cached_property
    def dtype_bytes(self) -> int:
        """Bytes of one compute weight."""
        return VALUE_BYTES[self.dtype]

    @cached_property
    def gradient_dtype_bytes(self) -> int:
        """Bytes of one value of the gradient as it leaves the device."""
        return VALUE_BYTES[self.gradient_dtype]

    @property
    def is_trained(self) -> bool:
        """Whether the parameters have gradients, and change."""
        return not self.rule.is_frozen

    @property
    def has_partial_sums(self) -> bool:
        """Whether its gradient is added up from segment to segment, whole, for each micro-batch. Of what tokens are
        looked up in, only rows are (engine/optimizer/lookup_sum.py)."""
        return self.is_trained and bool(self.borrowers) and not self.is_looked_up

    @cached_property
    def rounds_stochastically(self) -> bool:
        """Whether there is no fp32 master: updates are rounded to the weights that the device computes with."""
        return P16 in self.record.fields

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: in fp16."""
        return self.dtype == "float16"

    @cached_property
    def compute_bytes(self) -> int:
        """Size of the weights that the device computes with (P16)."""
        return self.num_elements * self.dtype_bytes

    @property
    def read_bytes(self) -> int:
        """What reading the weights takes of the drive."""
        return self.compute_bytes if self.file_bytes is None else self.file_bytes

    @cached_property
    def record_bytes(self) -> int:
        """Size of all fields in a generation: what an update writes. A frozen block has none of its own there."""
        return self.record.num_bytes(self.num_elements) if self.is_trained else 0

    @cached_property
    def state_bytes(self) -> int:
        """Size of the fields that only the update reads."""
        return self.record.state_bytes(self.num_elements)

    @cached_property
    def gradient_bytes(self) -> int:
        """Size of the gradient as it leaves the device and is held."""
        return self.num_elements * self.gradient_dtype_bytes if self.is_trained else 0

    @property
    def update_work(self) -> float:
        """Elements of the update, as many as AdamW updates in the same time."""
        return self.num_elements * self.rule.relative_time if self.is_trained else 0

    @cached_property
    def update_bytes(self) -> int:
        """What the update moves in main memory: it reads and writes the record, and reads the gradient."""
        return 2 * self.record_bytes + self.gradient_bytes

    def group_elements(self, at_most: int) -> int:
        """Elements that the optimizer updates as one group: `at_most`, or all of what it needs as a whole."""
        return self.num_elements if self.rule.takes_whole else min(at_most, self.num_elements)

    def update_buffer_bytes(self, at_most: int) -> int:
        """Host memory that torch has for the update of a group (`group_elements`)."""
        update = self.rule.update
        return 0 if update is None else update.buffer_bytes(self.group_elements(at_most))

    def host_working_bytes(self, at_most: int, *, on_gpu: bool) -> int:
        """What torch takes besides in host memory. `on_gpu`: the model is on a GPU."""
        update = self.rule.update
        if update is None or not self.parameters or (on_gpu and isinstance(update, Directed)):
            return 0
        shape = self.parameters[0].shape if self.rule.stands_alone else (self.group_elements(at_most),)
        return update.working_bytes(shape, is_in_fp32=True)

    @property
    def gpu_working_bytes(self) -> int:
        """What torch takes for an update on a GPU, where the model is on one."""
        if self._directed is None:
            return 0
        return self.crossing_bytes + self._directed.working_bytes(self.parameters[0].shape, is_in_fp32=False)

    @cached_property
    def update_flops(self) -> int:
        """FLOPs of an update's matrix products, on the device that the model is on."""
        return 0 if self._directed is None else self._directed.flops(self.parameters[0].shape)

    @property
    def crossing_bytes(self) -> int:
        """Bytes that go to the device for these products, and as many come back."""
        return 0 if self._directed is None else self._directed.buffer_bytes(self.num_elements)

    @property
    def _directed(self) -> Directed | None:
        """What makes a direction of the block's matrix; None where a rank has nothing of it."""
        return self.rule.update if isinstance(self.rule.update, Directed) and self.parameters else None


def lay_out_block(
    *,
    index: int,
    segment: int | None = None,
    name: str,
    parameters: list[tuple[str, tuple[int, ...], bool]],
    dtype: WeightDtype,
    gradient_dtype: WeightDtype | None = None,
    rule: Rule = ADAMW,
    borrowers: tuple[int, ...] = (),
    is_looked_up: bool = False,
    quantised: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> BlockSpec:
    """Place parameters, given as (name, shape, decay), one after another, aligned as the invariant above says.

    `segment` None: `index`. `gradient_dtype` None: gradients leave the device in `dtype`. `quantised`: the shapes of
    matrices that parameters hold, by name.
    """
    placed: list[ParameterSpec] = []
    position = 0
    for parameter_name, shape, decay in parameters:
        held = quantised.get(parameter_name)
        placed.append(
            ParameterSpec(name=parameter_name, shape=shape, start=position, decay=decay, quantised_shape=held)
        )
        alignment = math.lcm(PARAMETER_ALIGNMENT * values_per_element(dtype), rule.unit_elements)
        position = align_up(placed[-1].stop, alignment)
    return BlockSpec(
        index=index,
        segment=index if segment is None else segment,
        name=name,
        parameters=tuple(placed),
        num_elements=align_up(position, BLOCK_ALIGNMENT * values_per_element(dtype)),
        dtype=dtype,
        gradient_dtype=gradient_dtype or dtype,
        rule=rule,
        borrowers=borrowers,
        is_looked_up=is_looked_up,
    )


def values_per_element(dtype: WeightDtype) -> int:
    """How many values take the space of one in 16 bit; 1 if they take more."""
    return max(1, 2 // VALUE_BYTES[dtype])


@lru_cache(maxsize=64)
def with_rows(block: BlockSpec, num_rows: int) -> BlockSpec:
    """The block with this many rows of its first parameter, laid out anew. What is left of an embedding that is looked
    up by rows."""
    (first, *others), rows = block.parameters, (num_rows, *block.parameters[0].shape[1:])
    laid_out = lay_out_block(
        index=block.index,
        segment=block.segment,
        name=block.name,
        parameters=[(first.name, rows, first.decay), *((each.name, each.shape, each.decay) for each in others)],
        dtype=block.dtype,
        gradient_dtype=block.gradient_dtype,
        rule=block.rule,
        is_looked_up=True,
    )
    return replace(laid_out, rate=block.rate)


def block_from_json(content: object, index: int, rules: Mapping[str, Rule]) -> BlockSpec:
    """The block from a part of what `ModelSpec.to_json` made. `rules`: all, by name. Raises ValueError.

    It is laid out again from names and shapes. If the layout differs, other code made the content.
    """
    rule = JsonFields(content).text("rule")
    if rule not in rules:
        raise ValueError(f"block {index} is not described")
    found = read_as(BlockSpec, content, rule=rules[rule])
    if any(size < 0 for parameter in found.parameters for size in parameter.shape):
        raise ValueError("shape is negative")
    names = ("segment", "name", "dtype", "gradient_dtype", "rule", "borrowers", "is_looked_up")
    laid_out = lay_out_block(
        index=index,
        parameters=[(each.name, each.shape, each.decay) for each in found.parameters],
        quantised={each.name: each.quantised_shape for each in found.parameters if each.quantised_shape is not None},
        **{name: getattr(found, name) for name in names},
    )
    block = replace(laid_out, rate=found.rate, file_bytes=found.file_bytes)
    if found != block or {*JsonFields(content).names()} != {each.name for each in fields(BlockSpec)}:
        raise ValueError(f"block {index} has another layout")
    return block
