"""Models and machines as values, for tests of what is pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from ratel_cli.hardware.spec import ComputeDevice, HardwareProfile, Host, Link, Nvme, alternating_bytes_per_second
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.activations import LargestUnit
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.sizes import DtypeName


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes that a parameter takes in the store and on the link, counted by hand."""

    dtype: DtypeName
    compute: int
    record: int
    gradient: int


BFLOAT16 = Widths("bfloat16", compute=2, record=2 + 2 + 4 + 4, gradient=2)
FLOAT32 = Widths("float32", compute=4, record=4 + 4 + 4, gradient=4)
FLOAT16 = Widths("float16", compute=2, record=2 + 4 + 4 + 4, gradient=2)
SEEDS = st.integers(0, (1 << 32) - 1)
"""For `random.Random`, which builds what a strategy would build too slowly."""
WORKLOAD = Workload(micro_batch_size=2, num_micro_batches=3, sequence_len=64)


def unit_of(num_bytes: int) -> LargestUnit:
    """Units of this size, of which autograd saves nothing."""
    return LargestUnit(num_bytes, num_bytes, num_bytes)


def gpt(
    *,
    num_layers: int = 3,
    hidden_size: int = 64,
    vocab_size: int = 512,
    tied: bool = False,
    dtype: DtypeName = "bfloat16",
) -> ModelSpec:
    """The papers' GPT: 12 h^2 in the matrices of a layer."""
    h = hidden_size
    blocks = [
        lay_out_block(
            dtype=dtype,
            index=0,
            name="embedding",
            parameters=[("wte", (vocab_size, h), True)],
            borrowers=(num_layers + 1,) if tied else (),
            is_looked_up=True,
        )
    ]
    for index in range(num_layers):
        parameters: list[tuple[str, tuple[int, ...], bool]] = [
            (f"{index}.norm1", (h,), False),
            (f"{index}.qkv", (3 * h, h), True),
            (f"{index}.out", (h, h), True),
            (f"{index}.norm2", (h,), False),
            (f"{index}.up", (4 * h, h), True),
            (f"{index}.down", (h, 4 * h), True),
        ]
        blocks.append(lay_out_block(dtype=dtype, index=index + 1, name=f"layer {index}", parameters=parameters))
    head: list[tuple[str, tuple[int, ...], bool]] = [("norm", (h,), False)]
    if not tied:
        head.append(("head", (vocab_size, h), True))
    blocks.append(lay_out_block(dtype=dtype, index=num_layers + 1, name="head", parameters=head))
    return ModelSpec(
        name="gpt",
        architecture="GPT",
        blocks=tuple(blocks),
        segment_names=("embedding", *(f"layer {index}" for index in range(num_layers)), "head"),
        dtype=dtype,
        hidden_size=h,
        vocab_size=vocab_size,
        batch_bytes=24 + 512,
    )


def machine(
    *,
    flops_per_second: float = 1e12,
    read_bytes_per_second: float = 2e9,
    write_bytes_per_second: float = 1e9,
    mixed_bytes_per_second: float | None = None,
    adam_parameters_per_second: float = 1e9,
    up_bytes_per_second: float = 1e10,
    down_bytes_per_second: float = 1e10,
    both_bytes_per_second: float | None = None,
    memory_bytes_per_second: float | None = None,
    num_cores: int | None = None,
    free_bytes: int = 1 << 40,
) -> HardwareProfile:
    """A machine of round numbers, whose drive does one thing at a time unless the arguments say otherwise.

    With `num_cores` the CPU computes, and there is no link.
    """
    one_at_a_time = alternating_bytes_per_second(read_bytes_per_second, write_bytes_per_second)
    return HardwareProfile(
        gpu=ComputeDevice(name="a device", memory_bytes=1 << 34, flops_per_second=flops_per_second),
        link=None
        if num_cores
        else Link(
            to_gpu_bytes_per_second=up_bytes_per_second,
            from_gpu_bytes_per_second=down_bytes_per_second,
            both_bytes_per_second=both_bytes_per_second or up_bytes_per_second + down_bytes_per_second,
        ),
        nvme=Nvme(
            paths=("/nvme",),
            read_bytes_per_second=read_bytes_per_second,
            write_bytes_per_second=write_bytes_per_second,
            mixed_bytes_per_second=mixed_bytes_per_second or one_at_a_time,
            shares=(1,),
            free_bytes=free_bytes,
        ),
        host=Host(
            memory_bytes=1 << 34,
            available_bytes=1 << 33,
            adam_parameters_per_second=adam_parameters_per_second,
            memory_bytes_per_second=memory_bytes_per_second,
            num_cores=num_cores or 1,
        ),
    )


def machine_by_chance(choice: random.Random) -> HardwareProfile:
    return machine(
        flops_per_second=10 ** choice.uniform(10.5, 13.5),
        read_bytes_per_second=10 ** choice.uniform(8.5, 10),
        write_bytes_per_second=10 ** choice.uniform(8.5, 10),
        mixed_bytes_per_second=10 ** choice.uniform(8.5, 10),
        adam_parameters_per_second=10 ** choice.uniform(8, 10),
        up_bytes_per_second=10 ** choice.uniform(9, 10.5),
        down_bytes_per_second=10 ** choice.uniform(9, 10.5),
        both_bytes_per_second=choice.choice([None, 10 ** choice.uniform(9, 10.5)]),
        memory_bytes_per_second=choice.choice([None, 2e10]),
        num_cores=choice.choice([None, None, 2, 8]),
    )
