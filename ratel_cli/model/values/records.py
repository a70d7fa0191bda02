"""Records as tensors: from master weights to the fields that a block keeps, and back.

Invariants: in the compute dtype of a block its weights are those of the record, bit for bit; in any other dtype they
are the master weights, rounded once, which in bf16 may be these weights. A trained block's master weights survive
encoding and decoding exactly, and its moments are those that its rule computes with, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch

from ratel_cli import _native
from ratel_cli.closing import Closing
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.tickets import join
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.schedule.rules import (
    HI16,
    LO16,
    M8,
    M32,
    M_SCALE,
    TIE8,
    UNIT_8BIT,
    V8,
    V32,
    V_SCALE,
    W32,
    WEIGHT_FIELDS,
)
from ratel_cli.sizes import WeightDtype
from ratel_cli.store.joined import Readable
from ratel_cli.store.layout import Field, Record

Fields = Mapping[str, torch.Tensor]
"""By name: values of the same elements, one-dimensional."""
_ZERO_OF_M = 127
"""The code of zero in the map for m; in that for v it is 0."""
_EIGHT_BIT = ((M8, M_SCALE, "exp_avg", True), (V8, V_SCALE, "exp_avg_sq", False))
"""Moments in 8 bit: codes, their scales, what torch calls the moment, and whether it has a sign."""
_NAMES = {M32: "exp_avg", M8: "exp_avg", V32: "exp_avg_sq", V8: "exp_avg_sq"}
"""What torch calls moments. Others have the names of their fields."""


class RecordBuffers(Closing):
    """Host memory for some elements of every field of these records, and for their master weights."""

    def __init__(self, pool: BufferPool, fields: Iterable[Field], num_elements: int, purpose: str) -> None:
        """`num_elements` at a time. Raises DoesNotFit if the pool has no memory for them."""
        with ExitStack() as leased:
            self._memories = {
                field: leased.enter_context(
                    pool.lease(field.num_bytes(num_elements), f"{purpose}, {field.name}", crosses_link=False)
                ).memory
                for field in dict.fromkeys(fields)
            }
            self._resources = leased.pop_all()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._memories = {}
        self._resources.close()

    def memory(self, field: Field, num_elements: int, start: int = 0) -> memoryview:
        """The memory of a field for this many elements from `start` on."""
        return self._memories[field][: field.num_bytes(num_elements, start)]

    def read(self, generation: Readable, block: int, fields: Iterable[Field], start: int, stop: int) -> None:
        """Read elements [start, stop) of these fields of a block, whole chunks. Raises IntegrityFailure."""
        parts = ((field.name, self.memory(field, stop - start, start)) for field in fields)
        join([generation.read(block, name, start, stop, memory) for name, memory in parts]).wait()

    def tensors(self, fields: Iterable[Field], num_elements: int) -> dict[str, torch.Tensor]:
        """The first elements of these fields, by name."""
        return {
            field.name: view(self._memories[field], VALUE_DTYPES[field.dtype])[: field.num_values(num_elements)]
            for field in fields
        }

    def clear_ends(self, fields: Iterable[Field], num_elements: int) -> None:
        """Fill with zeros what is left of the last page behind the first elements of these fields."""
        for field in fields:
            values = view(self.memory(field, num_elements), VALUE_DTYPES[field.dtype])
            values[field.num_values(num_elements) :].zero_()


def fields_for(record: Record, dtype: WeightDtype) -> tuple[Field, ...]:
    """The fields to read for weights in `dtype`: the compute weights if they have it, else the master weights."""
    if record.compute_field.dtype == dtype:
        return (record.compute_field,)
    if HI16 in record.fields:
        return (HI16, LO16, TIE8 if TIE8 in record.fields else V32)
    return (W32,) if W32 in record.fields else (record.compute_field,)


def decode_weights(read: tuple[Field, ...], fields: Fields, dtype: WeightDtype) -> torch.Tensor:
    """The weights in `dtype`, `[elements]`, from the fields that `fields_for` names. Two halves are joined in `w32`."""
    if len(read) == 1:
        return fields[read[0].name].to(VALUE_DTYPES[dtype])
    master = fields[W32.name]
    hi16, lo16, ties = (fields[each.name] for each in read)
    join = _native.join_bfloat16 if V32 in read else _native.join_tied_bfloat16
    join(hi16, lo16, ties, master)
    return master.to(VALUE_DTYPES[dtype])


def state_fields_for(record: Record) -> tuple[Field, ...]:
    """The fields to read for all that training has of a block: fp32 master weights and moments; of a frozen block its
    weights."""
    moments = (field for field in record.fields if field not in WEIGHT_FIELDS)
    return tuple(dict.fromkeys((*fields_for(record, "float32"), *moments)))


def state_keys(record: Record) -> tuple[str, ...]:
    """What `decode_state` gives of a block with this record."""
    return ("weight", *(_NAMES.get(each, each.name) for each in _moments(record)))


def decode_state(record: Record, fields: Fields) -> dict[str, torch.Tensor]:
    """Decode the training state from the fields that `state_fields_for` names, by torch's names: `weight`, and the
    moments that the block's rule has, such as `exp_avg` and `exp_avg_sq`, each fp32 `[elements]`. Two halves are joined
    in `w32`. The mean of gradients is called so even if the rule is SGD."""
    state = {"weight": decode_weights(fields_for(record, "float32"), fields, "float32")}
    for field, key in zip(_moments(record), state_keys(record)[1:], strict=True):
        state[key] = fields[field.name].abs() if field == V32 else fields[field.name]
    for codes, scales, key, signed in _EIGHT_BIT:
        if codes in record.fields:
            values = torch.tensor(_native.dynamic_map(signed=signed), dtype=torch.float32)[fields[codes.name].int()]
            state[key] = values * fields[scales.name].repeat_interleave(UNIT_8BIT)[: len(values)]
    return state


def encode_record(record: Record, fields: Fields) -> None:
    """Fill the record's fields from the master weights in `w32`. Moments begin at zero.

    Every field is filled here: buffers are reused, so another's bytes would go to the store with a valid checksum.
    """
    for field in record.fields:
        if field == M8:
            fields[field.name].fill_(_ZERO_OF_M)
        elif field != record.compute_field and field not in WEIGHT_FIELDS:
            fields[field.name].zero_()
    encode_weights(record, fields)


def encode_weights(record: Record, fields: Fields) -> None:
    """Fill the record's weights from the master weights in `w32`, rounded to the nearest where there is no master."""
    master = fields[W32.name]
    if HI16 in record.fields:
        not_numbers = master.isnan()
        if not_numbers.any():  # as other bits, the rounding of some of them is zero, and nobody would notice
            master[not_numbers] = torch.nan
        split = _native.split_tied_bfloat16 if TIE8 in record.fields else _native.split_bfloat16
        hi16, lo16, ties = (fields[each.name] for each in fields_for(record, "float32"))
        split(master, hi16, lo16, ties)
    elif record.compute_field != W32:
        fields[record.compute_field.name].copy_(master)


def _moments(record: Record) -> list[Field]:
    """The fields of a record that are moments, scales left out."""
    return [each for each in record.state_fields if each not in (*WEIGHT_FIELDS, M_SCALE, V_SCALE)]
