"""The paper's machines and models, read from the shipped files, and random ones; for tests of the paper's equations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from hypothesis import strategies as st

from ratel_cli.papers.paper_forecast import PaperForecaster
from ratel_cli.papers.prefix import SwappableOperator
from ratel_cli.papers.ratel import PaperEquations, PaperHardware, PaperShape
from ratel_cli.units import MIB

CONFIGS = Path(__file__).parents[2] / "configs"


def paper_hardware(name: str = "paper-4090-12ssd") -> PaperHardware:
    """From `configs/hardware`; the optimizer's computing left out, as the paper does."""
    read = yaml.safe_load((CONFIGS / "hardware" / f"{name}.yaml").read_text())
    return PaperHardware(
        flops_per_second=read["gpu"]["flops_per_second"],
        link_bytes_per_second=read["link"]["from_gpu_bytes_per_second"],
        read_bytes_per_second=read["nvme"]["read_bytes_per_second"],
        write_bytes_per_second=read["nvme"]["write_bytes_per_second"],
        available_bytes=read["host"]["activation_bytes"],
    )


def paper_shape(name: str, *, batch_size: int) -> PaperShape:
    """From `configs/models`."""
    read = yaml.safe_load((CONFIGS / "models" / f"{name}.yaml").read_text())
    return PaperShape(**read["model_shape"], sequence_len=read["sequence_len"], batch_size=batch_size)


def paper_forecaster(name: str = "gpt-13b", *, gpu_limit_bytes: int | None = None) -> PaperForecaster:
    return PaperForecaster(name=name, shape=paper_shape(name, batch_size=1), gpu_limit_bytes=gpu_limit_bytes)


def paper_equations(
    name: str = "gpt-13b", *, batch_size: int, hardware: str = "paper-4090-12ssd", available_bytes: int = 0
) -> PaperEquations:
    """A model of Table IV on the paper's server."""
    machine = replace(paper_hardware(hardware), available_bytes=available_bytes)
    return PaperEquations(shape=paper_shape(name, batch_size=batch_size), hardware=machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Any operators at all, under the paper's equations."""

    operators: tuple[SwappableOperator, ...]
    inter_block_bytes: int
    equations: PaperEquations

    @property
    def available_bytes(self) -> int:
        return self.equations.available_bytes

    def seconds(self, *, swapped_bytes: int, spilled_bytes: int, recomputed_flops: int) -> float:
        return self.equations.seconds(
            swapped_bytes=swapped_bytes, spilled_bytes=spilled_bytes, recomputed_flops=recomputed_flops
        )

    def without_states(self) -> Graph:
        return replace(self, equations=self.equations.without_states())


def rates(least: float, greatest: float) -> st.SearchStrategy[float]:
    return st.floats(least, greatest, allow_nan=False)


MACHINES = st.builds(
    PaperHardware,
    flops_per_second=rates(1e12, 4e14),
    link_bytes_per_second=rates(5e9, 6e10),
    read_bytes_per_second=rates(1e9, 4e10),
    write_bytes_per_second=rates(5e8, 3e10),
    available_bytes=st.integers(0, 1 << 32),
)
SHAPES = st.builds(
    PaperShape,
    num_layers=st.integers(1, 4),
    num_heads=st.just(8),
    hidden_size=st.sampled_from([64, 256, 512, 1024, 2048]),
    vocab_size=st.integers(1, 60_000),
    num_parameters=st.integers(0, 1 << 30),
    batch_size=st.integers(1, 64),
    sequence_len=st.sampled_from([128, 1024, 4096]),
)
EQUATIONS = st.builds(PaperEquations, shape=SHAPES, hardware=MACHINES)


@st.composite
def graphs(draw: st.DrawFn, *, most_operators: int = 6, equal_bytes: bool = False) -> Graph:
    """Operators of one block each, whose transfers and FLOPs take times alike."""
    shared = draw(st.integers(1, 30)) if equal_bytes else None
    operators = tuple(
        SwappableOperator(
            name=f"operator {number}",
            blocks=(0,),
            num_bytes=(shared or draw(st.integers(1, 30))) * MIB,
            flops=draw(st.integers(0, 30)) << 33,
        )
        for number in range(draw(st.integers(1, most_operators)))
    )
    shape = PaperShape(
        num_layers=1,
        num_heads=1,
        hidden_size=512,
        vocab_size=1000,
        num_parameters=draw(st.integers(0, 10_000_000)),
        batch_size=draw(st.integers(1, 100)),
        sequence_len=512,
    )
    machine = replace(
        draw(MACHINES),
        flops_per_second=draw(rates(1e12, 4e13)),
        available_bytes=draw(st.integers(0, 150)) * MIB,
    )
    return Graph(
        operators=operators,
        inter_block_bytes=draw(st.integers(0, 30)) * MIB,
        equations=PaperEquations(shape=shape, hardware=machine),
    )
