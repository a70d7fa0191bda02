"""What is decoded of a record: masters and moments, by every rule."""

from __future__ import annotations

import pytest
import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.values.records import RecordBuffers, decode_state, encode_record, state_fields_for, state_keys
from ratel_cli.schedule.rules import W32, rules_by_name
from ratel_cli.sizes import DTYPE_NAMES, VALUE_BYTES
from tests.kernels.rules import restored, signed_map, unsigned_map

TRAINED = [name for name, rule in rules_by_name().items() if not rule.is_frozen]
KEYS = {"adamw": 3, "adamw_8bit": 3, "lion": 2, "sgd": 1, "sgd_momentum": 2, "muon": 2}
"""The master and the moments."""


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", TRAINED)
def test_a_new_record_has_the_master_and_moments_of_zero(name: str, dtype: str) -> None:
    """And zeros behind its last value, in buffers that others have used."""
    record, number = rules_by_name()[name].record(DTYPE_NAMES[dtype]), 2048 + 100
    fields = tuple(dict.fromkeys((W32, *record.fields)))
    master = torch.randn(number, generator=torch.Generator().manual_seed(1))
    with BufferPool(None) as pool, RecordBuffers(pool, fields, number, "test") as buffers:
        for field in fields:
            buffers.memory(field, number)[:] = b"\xa5" * field.num_bytes(number)
        tensors = buffers.tensors(fields, number)
        tensors[W32.name].copy_(master)
        encode_record(record, tensors)
        buffers.clear_ends(record.fields, number)
        used = {each.name: each.num_values(number) * VALUE_BYTES[each.dtype] for each in record.fields}
        ends = [bytes(buffers.memory(each, number))[used[each.name] :] for each in record.fields]
        assert not any(map(any, ends))
        decoded = tuple(dict.fromkeys((*state_fields_for(record), W32)))
        state = decode_state(record, buffers.tensors(decoded, number))
        assert tuple(state) == state_keys(record) and len(state) == KEYS[name.removesuffix("_stochastic")]
        has_master = dtype != "bfloat16" or not name.endswith("_stochastic")
        assert torch.equal(state.pop("weight"), master if has_master else master.bfloat16().float())
        assert not any(values.any() for values in state.values())


def test_moments_in_8_bit_are_their_values_times_the_scales_of_their_units() -> None:
    record, number, generator = rules_by_name()["adamw_8bit"].record("float32"), 1000, torch.Generator().manual_seed(2)
    fields = {"w32": torch.randn(number), "m_scale": torch.rand(4), "v_scale": torch.rand(4)}
    fields |= {each: torch.randint(256, (number,), generator=generator, dtype=torch.uint8) for each in ("m8", "v8")}
    state = decode_state(record, fields)
    assert torch.equal(state["exp_avg"], restored(fields["m8"], fields["m_scale"], signed_map()))
    assert torch.equal(state["exp_avg_sq"], restored(fields["v8"], fields["v_scale"], unsigned_map()))
