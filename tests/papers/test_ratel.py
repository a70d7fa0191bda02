"""The paper's cost model: its exact numbers, its bands, and each term of its equations in turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.papers.prefix import Point, search
from ratel_cli.papers.ratel import PaperEquations, PaperHardware, PaperShape
from ratel_cli.planning.time.step_time import StepTime
from tests.papers.paper_profiles import CONFIGS, paper_equations, paper_hardware, paper_shape

THP, LINK, READ, WRITE = 164e12, 22.6e9, 32.7e9, 24.5e9
STATES, WEIGHTS = 14 * 13e9, 2 * 13e9


def planned(equations: PaperEquations) -> Point:
    found = search(equations)
    return found.points[found.least()]


def model_flops_per_second(equations: PaperEquations) -> float:
    """As the paper counts: 3 FLOP_f a step, recomputation left out."""
    return 3 * equations.shape.flops_forward / planned(equations).seconds


def test_accounting_of_13b_at_batch_32_is_exact() -> None:
    shape = paper_shape("gpt-13b", batch_size=32)
    assert shape.inter_block_bytes == 13_421_772_800
    assert shape.activation_bytes == 228_170_137_600
    assert shape.flops_forward == 868_984_962_416_640


@pytest.mark.parametrize("path", sorted((CONFIGS / "models").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_block_keeps_34_bsh_and_its_operators_add_up(path: Path) -> None:
    shape = paper_shape(path.stem, batch_size=3)
    b, s, h, num_layers = 3, 1024, shape.hidden_size, shape.num_layers
    names = [operator.name for operator in shape.operators]
    assert names == ["ln1", "qkv", "attention", "projection", "ln2", "fc1", "gelu", "fc2"]
    assert [operator.num_bytes // (b * s * h) for operator in shape.operators] == [2, 6, 2, 2, 2, 8, 8, 2]
    assert all(operator.blocks == tuple(range(num_layers)) for operator in shape.operators)
    one_block = shape.inter_block_bytes // num_layers + sum(operator.num_bytes for operator in shape.operators)
    assert one_block == 34 * b * s * h
    assert shape.activation_bytes == num_layers * one_block
    flops = sum(operator.flops for operator in shape.operators)
    assert flops == 24 * b * s * h**2 + 4 * b * s**2 * h
    assert shape.flops_forward == num_layers * flops + 2 * b * s * h * shape.vocab_size


def test_benefits_of_fc2_qkv_projection_fc1_are_4_1_1_1() -> None:
    """Fuyou's Table 2, with h^2 for its h^3."""
    benefits = {operator.name: operator.benefit for operator in paper_shape("gpt-13b", batch_size=32).operators}
    unit = benefits["projection"]
    assert [benefits[name] / unit for name in ("fc2", "qkv", "projection", "fc1")] == [4, 1, 1, 1]


def test_terms_of_block_inputs_only_with_algorithm_1s_full_recomputation() -> None:
    """Its line 4 sets FLOP_r to FLOP_f, the head included; `search` leaves the head out."""
    equations = paper_equations(batch_size=32)
    shape = equations.shape
    inputs = shape.inter_block_bytes
    time = equations.time(swapped_bytes=inputs, spilled_bytes=inputs, recomputed_flops=shape.flops_forward)
    forward, backward = time.forward, time.backward
    compute = 868_984_962_416_640 / THP
    assert (forward.compute, forward.down, forward.up, forward.nvme) == pytest.approx(
        (compute, inputs / LINK, WEIGHTS / LINK, WEIGHTS / READ + inputs / WRITE), rel=1e-9
    )
    assert (backward.compute, backward.down, backward.up, backward.nvme) == pytest.approx(
        (3 * compute, WEIGHTS / LINK, (WEIGHTS + inputs) / LINK, (STATES + inputs) / READ + STATES / WRITE), rel=1e-9
    )
    assert time.total == pytest.approx(4 * compute, rel=1e-9)
    printed = (forward.compute, forward.down, forward.up, forward.nvme)
    assert [round(term, 4) for term in printed] == [5.2987, 0.5939, 1.1504, 1.3429]
    printed = (backward.compute, backward.down, backward.up, backward.nvme)
    assert printed == pytest.approx((15.896, 1.1504, 1.7443, 13.405), abs=5e-4)
    assert round(time.total, 4) == 21.1948


def test_the_head_is_never_recomputed() -> None:
    equations = paper_equations(batch_size=32)
    head = 2 * 32 * 1024 * 5120 * 50257
    block_inputs_only = search(equations).points[0]
    assert block_inputs_only.swapped_bytes == equations.inter_block_bytes
    assert block_inputs_only.recomputed_flops == equations.shape.flops_forward - head
    assert block_inputs_only.seconds == pytest.approx((4 * equations.shape.flops_forward - head) / THP, rel=1e-12)


def test_planned_step_of_13b_at_batch_32() -> None:
    equations = paper_equations(batch_size=32)
    point = planned(equations)
    assert point.seconds == pytest.approx(19.32, rel=0.005)
    assert point.swapped_bytes == pytest.approx(33.6e9, rel=0.1)
    assert point.recomputed_flops / (2 * equations.shape.flops_forward) == pytest.approx(0.32, abs=0.015)


@pytest.mark.parametrize(("batch_size", "tera"), [(32, 135), (64, 156)])
def test_throughput_of_13b(batch_size: int, tera: int) -> None:
    assert model_flops_per_second(paper_equations(batch_size=batch_size)) == pytest.approx(tera * 1e12, rel=0.03)


def test_throughput_of_175b_at_batch_16() -> None:
    assert model_flops_per_second(paper_equations("gpt-175b", batch_size=16)) == pytest.approx(87e12, rel=0.08)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 12, 16, 20, 24])
def test_up_to_batch_24_swapping_never_helps(batch_size: int) -> None:
    found = search(paper_equations(batch_size=batch_size))
    assert (found.case, found.least()) == (1, 0)


@pytest.mark.parametrize("batch_size", [36, 40, 48, 56, 60, 64])
def test_from_batch_36_the_optimum_is_interior(batch_size: int) -> None:
    found = search(paper_equations(batch_size=batch_size))
    assert found.case == 3
    assert 0 < found.least() < len(found.points) - 1


@pytest.mark.parametrize("batch_size", [8, 16, 24, 32])
def test_135b_gains_from_1_to_3_ssds_and_little_from_6_to_12(batch_size: int) -> None:
    seconds = {
        count: planned(paper_equations("gpt-135b", batch_size=batch_size, hardware=f"paper-4090-{count}ssd")).seconds
        for count in (1, 3, 6, 12)
    }
    assert seconds[1] / seconds[3] >= 2.5
    assert seconds[6] / seconds[12] <= 1.15


def test_memory_to_spare_takes_no_time_from_nvme() -> None:
    """Eq. 3 as printed would make the spilled bytes negative, and the step 5.26 s."""
    point = planned(paper_equations(batch_size=8, available_bytes=300 * 10**9))
    assert point.spilled_bytes == 0
    assert point.seconds == pytest.approx(14.32, abs=0.005)


TINY = PaperShape(
    num_layers=2, num_heads=2, hidden_size=64, vocab_size=100, num_parameters=1000, batch_size=2, sequence_len=32
)
FAST = PaperHardware(
    flops_per_second=1e15,
    link_bytes_per_second=1e15,
    read_bytes_per_second=1e15,
    write_bytes_per_second=1e15,
    available_bytes=0,
)


def tiny_time(hardware: PaperHardware, *, swapped_bytes: int = 5000, spilled_bytes: int = 3000) -> StepTime:
    equations = PaperEquations(shape=TINY, hardware=hardware)
    return equations.time(swapped_bytes=swapped_bytes, spilled_bytes=spilled_bytes, recomputed_flops=7000)


def test_computing_can_decide() -> None:
    time = tiny_time(replace(FAST, flops_per_second=10.0))
    assert time.forward.total == TINY.flops_forward / 10
    assert time.backward.total == (2 * TINY.flops_forward + 7000) / 10
    assert time.bottleneck == "compute"


@pytest.mark.parametrize(("swapped_bytes", "forward_bytes", "bottleneck"), [(5000, 5000, "up"), (100, 2000, "up")])
def test_the_link_can_decide(swapped_bytes: int, forward_bytes: int, bottleneck: str) -> None:
    """Down: activations in forward, gradients in backward. Up: weights, and in backward activations with them."""
    time = tiny_time(replace(FAST, link_bytes_per_second=10.0), swapped_bytes=swapped_bytes)
    assert (time.forward.down, time.forward.up) == (swapped_bytes / 10, 200)
    assert (time.backward.down, time.backward.up) == (200, (2000 + swapped_bytes) / 10)
    assert time.forward.total == forward_bytes / 10
    assert time.backward.total == (2000 + swapped_bytes) / 10
    assert time.bottleneck == bottleneck


def test_reading_can_decide() -> None:
    time = tiny_time(replace(FAST, read_bytes_per_second=10.0))
    assert time.forward.total == pytest.approx(2000 / 10)
    assert time.backward.total == pytest.approx((14_000 + 3000) / 10)
    assert time.bottleneck == "nvme read"


def test_writing_can_decide() -> None:
    time = tiny_time(replace(FAST, write_bytes_per_second=10.0))
    assert time.forward.total == pytest.approx(3000 / 10)
    assert time.backward.total == pytest.approx(14_000 / 10)
    assert time.bottleneck == "nvme write"


def test_reads_and_writes_of_nvme_follow_each_other() -> None:
    """Where everything takes the same time alone, the two directions together take twice that."""
    time = tiny_time(replace(FAST, read_bytes_per_second=17.0, write_bytes_per_second=14.0))
    assert time.backward.nvme_read == time.backward.nvme_write == 1000
    assert time.backward.total == time.backward.nvme == 2000


def test_without_states_only_activations_move() -> None:
    equations = PaperEquations(shape=TINY, hardware=replace(FAST, available_bytes=77)).without_states()
    time = equations.time(swapped_bytes=5000, spilled_bytes=0, recomputed_flops=7000)
    assert (time.forward.up, time.forward.nvme, time.backward.down, time.backward.nvme) == (0, 0, 0, 0)
    assert time.forward.down == time.backward.up == 5000 / 1e15
    assert time.forward.compute == TINY.flops_forward / 1e15
    assert time.backward.optimizer == 0
    assert equations.available_bytes == 77


def test_rates_of_the_written_profiles() -> None:
    """6.5 and 3.4 GB/s a drive, until the server gives no more."""
    for gpu in ("4090", "3090", "4080"):
        for count in (1, 2, 3, 6, 12):
            hardware = paper_hardware(f"paper-{gpu}-{count}ssd")
            assert hardware.read_bytes_per_second == min(6.5e9 * count, READ)
            assert hardware.write_bytes_per_second == min(3.4e9 * count, WRITE)
    hardware = paper_hardware()
    assert (hardware.flops_per_second, hardware.link_bytes_per_second, hardware.available_bytes) == (THP, LINK, 0)
    assert paper_hardware("a100-80g-12ssd").read_bytes_per_second == READ
