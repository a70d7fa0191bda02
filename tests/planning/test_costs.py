"""FLOPs against the papers' closed form, and the stages of a step against their parts."""

from __future__ import annotations

import random

import pytest

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.spec import ModelSpec, lay_out_block
from ratel_cli.planning.activations import all_activation_bytes
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.costs import (
    StageTime,
    StepTime,
    forward_flops,
    layer_flops,
    nvme_seconds,
    overlapped_step,
    recomputed_flops,
)
from ratel_cli.planning.placement import Overlap, Placement
from ratel_cli.planning.traffic import step_traffic
from tests.planning.shapes import BFLOAT16, WORKLOAD, gpt, machine

SPEC = gpt()
DEEP = Placement(prefetch_blocks=2, pending_updates=2)
SLOW = ("flops_per_second", "read_bytes_per_second", "write_bytes_per_second", "adam_parameters_per_second")


def machine_with(slow: str, rate: float) -> HardwareProfile:
    """Where everything but `slow` takes next to no time."""
    flops, read, write, adam = (rate if name == slow else 1e12 for name in SLOW)
    return machine(
        flops_per_second=flops,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        adam_parameters_per_second=adam,
    )


def adam_rate(slow: str) -> float:
    return 1e6 if slow == "adam_parameters_per_second" else 1e12


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("num_layers", "h", "vocab_size", "b", "n", "s"),
    [(1, 64, 512, 1, 1, 1), (3, 96, 333, 2, 5, 77), (40, 5120, 50257, 8, 4, 1024)],
)
def test_forward_of_a_gpt(num_layers: int, h: int, vocab_size: int, b: int, n: int, s: int, tied: bool) -> None:
    """papers.md section 2: L (24 b s h^2 + 4 b s^2 h) + 2 b s h V, b being all sequences of the step."""
    spec = gpt(num_layers=num_layers, hidden_size=h, vocab_size=vocab_size, tied=tied)
    workload = Workload(micro_batch_size=b, num_micro_batches=n, sequence_len=s)
    sequences = b * n
    layers = num_layers * (24 * sequences * s * h**2 + 4 * sequences * s**2 * h)
    assert layer_flops(spec, workload) == layers
    assert forward_flops(spec, workload) == layers + 2 * sequences * s * h * vocab_size


def test_the_papers_13b_at_batch_32() -> None:
    """papers.md section 3: exact."""
    spec = gpt(num_layers=40, hidden_size=5120, vocab_size=50257)
    workload = Workload(micro_batch_size=32, num_micro_batches=1, sequence_len=1024)
    assert forward_flops(spec, workload) == 868_984_962_416_640


def test_stacks_of_matrices_count_whole() -> None:
    stack = lay_out_block(index=1, kind="layer", name="layer", parameters=[("experts", (4, 8, 16), True)])
    plain = gpt(num_layers=1)
    spec = ModelSpec(
        name="moe",
        architecture="MoE",
        blocks=(plain.blocks[0], stack, plain.blocks[2]),
        tied=False,
        hidden_size=16,
        vocab_size=512,
    )
    workload = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=10)
    assert layer_flops(spec, workload) == 10 * (2 * 4 * 8 * 16 + 4 * 10 * 16)


@pytest.mark.parametrize(("share", "left"), [(0, 1), (0.25, 0.75), (1, 0), (7, 0)])
def test_kept_activations_are_not_recomputed(share: float, left: float) -> None:
    spec = gpt(num_layers=4)
    kept_bytes = int(share * all_activation_bytes(spec, BFLOAT16, tokens=WORKLOAD.tokens))
    placement = Placement(activation_bytes=kept_bytes, resident_weights=frozenset({1, 2, 3, 4}))
    assert recomputed_flops(spec, BFLOAT16, WORKLOAD, placement) == left * layer_flops(spec, WORKLOAD)


def test_activations_of_a_block_are_kept_only_with_its_weights() -> None:
    spec = gpt(num_layers=4)
    for resident, left in ((set(), 4), ({0, 5}, 4), ({0, 3}, 3), ({1, 2, 3, 4}, 0)):
        placement = Placement(activation_bytes=1 << 40, resident_weights=frozenset(resident))
        assert recomputed_flops(spec, BFLOAT16, WORKLOAD, placement) == left * layer_flops(spec, WORKLOAD) // 4


def step_time(
    hardware: HardwareProfile,
    *,
    placement: Placement = DEEP,
    holds_gradients: bool = False,
    overlap: Overlap = "optimized",
) -> StepTime:
    traffic = step_traffic(SPEC, BFLOAT16, placement, holds_gradients=holds_gradients, overlap=overlap)
    return overlapped_step(
        SPEC,
        WORKLOAD,
        placement,
        traffic,
        hardware,
        flops_recomputed=layer_flops(SPEC, WORKLOAD),
        holds_gradients=holds_gradients,
        overlap=overlap,
    )


@pytest.mark.parametrize(
    ("read", "written", "mixed", "seconds"),
    [
        (0, 0, 2.0, 0),
        (12, 0, 2.0, 12 / 3),
        (0, 12, 2.0, 12 / 2),
        (12, 12, 2.0, 24 / 2),
        (12, 12, 2.4, 12 / 3 + 12 / 2),  # the harmonic mean: one at a time
        (12, 12, 4.0, 12 / 2),  # both at full speed: the slower decides
        (12, 12, 99.0, 12 / 2),  # nothing is faster beside something else
        (18, 12, 4.0, 24 / 4 + 6 / 3),
        (12, 18, 4.0, 24 / 4 + 6 / 2),
    ],
)
def test_nvme_takes_both_at_the_mixed_rate_and_the_rest_alone(
    read: int, written: int, mixed: float, seconds: float
) -> None:
    nvme = machine(read_bytes_per_second=3, write_bytes_per_second=2, mixed_bytes_per_second=mixed).nvme
    assert sum(nvme_seconds(nvme, read, written)) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("seed", range(50))
def test_moving_more_never_takes_less(seed: int) -> None:
    choice = random.Random(seed)
    nvme = machine(
        read_bytes_per_second=choice.uniform(1, 9),
        write_bytes_per_second=choice.uniform(1, 9),
        mixed_bytes_per_second=choice.uniform(1, 30),
    ).nvme
    read, written = choice.randint(0, 99), choice.randint(0, 99)
    seconds = sum(nvme_seconds(nvme, read, written)) * (1 - 1e-12)
    assert sum(nvme_seconds(nvme, read + choice.randint(1, 50), written)) >= seconds
    assert sum(nvme_seconds(nvme, read, written + choice.randint(1, 50))) >= seconds


def test_every_resource_has_its_work() -> None:
    traffic = step_traffic(SPEC, BFLOAT16, DEEP, holds_gradients=False)
    time = step_time(machine())
    layers, whole = layer_flops(SPEC, WORKLOAD), forward_flops(SPEC, WORKLOAD)
    # The head is not computed again: its forward and backward are one.
    assert time.forward.compute + time.backward.compute == pytest.approx((3 * whole + layers) / 1e12, rel=1e-12)
    nvme = traffic.read_bytes / 2e9 + traffic.written_bytes / 1e9
    assert time.forward.nvme + time.backward.nvme == pytest.approx(nvme, rel=1e-12)
    assert time.backward.optimizer == SPEC.num_parameters / 1e9
    assert (time.forward.nvme_write, time.forward.optimizer) == (0, 0)
    assert time.update == StageTime(compute=0, nvme_read=0, nvme_write=0, optimizer=0, total=0)
    assert time.total == time.forward.total + time.backward.total


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("holds_gradients", [False, True])
def test_in_each_stage_the_slowest_resource_decides(slow: str, holds_gradients: bool) -> None:
    time = step_time(machine_with(slow, 1e6), holds_gradients=holds_gradients)
    for stage in (time.forward, time.backward):
        assert stage.total == max(stage.compute, stage.nvme, stage.optimizer)
    assert time.forward.optimizer == (SPEC.num_parameters / adam_rate(slow) if holds_gradients else 0)


@pytest.mark.parametrize("slow", SLOW)
def test_naive_updates_are_a_sum_beneath_computing(slow: str) -> None:
    hardware = machine_with(slow, 1e6)
    optimized, naive = step_time(hardware), step_time(hardware, overlap="naive")
    backward = naive.backward
    assert backward.total == max(backward.compute, backward.nvme_read + backward.optimizer + backward.nvme_write)
    traffic = step_traffic(SPEC, BFLOAT16, DEEP, holds_gradients=False)
    assert backward.nvme_read == traffic.backward_read_bytes / hardware.nvme.read_bytes_per_second
    assert backward.nvme_write == traffic.backward_written_bytes / hardware.nvme.write_bytes_per_second
    assert naive.total >= optimized.total


@pytest.mark.parametrize("slow", SLOW)
def test_a_separate_update_comes_on_top(slow: str) -> None:
    hardware = machine_with(slow, 1e6)
    time = step_time(hardware, overlap="separate", placement=Placement(prefetch_blocks=2))
    assert time.update.total == max(time.update.nvme, time.update.optimizer) > 0
    assert (time.update.compute, time.forward.optimizer, time.backward.optimizer) == (0, 0, 0)
    assert time.backward.total == max(time.backward.compute, time.backward.nvme)
    assert time.total == time.forward.total + time.backward.total + time.update.total
    assert time.total >= step_time(hardware).total


@pytest.mark.parametrize("overlap", ["optimized", "naive"])
def test_what_does_not_run_ahead_stands_in_the_way(overlap: Overlap) -> None:
    time = step_time(machine(), placement=Placement(), overlap=overlap)
    update = time.backward.nvme + time.backward.optimizer if overlap == "naive" else time.backward.nvme
    assert time.backward.total == pytest.approx(time.backward.compute + update)
    assert time.forward.total == time.forward.compute + time.forward.nvme
    without_pending = step_time(machine(), placement=Placement(prefetch_blocks=1), overlap=overlap)
    assert without_pending.forward.total == max(time.forward.compute, time.forward.nvme)
    assert without_pending.backward.total > without_pending.backward.compute
    held = step_time(machine(), placement=Placement(prefetch_blocks=1), overlap=overlap, holds_gradients=True)
    assert held.backward.total == max(held.backward.compute, held.backward.nvme)


@pytest.mark.parametrize(
    ("slow", "bottleneck"),
    [
        ("flops_per_second", "compute"),
        ("read_bytes_per_second", "nvme read"),
        ("write_bytes_per_second", "nvme write"),
        ("adam_parameters_per_second", "optimizer"),
    ],
)
def test_each_resource_can_be_the_bottleneck(slow: str, bottleneck: str) -> None:
    assert step_time(machine_with(slow, 1e3)).bottleneck == bottleneck


def test_both_directions_count_together_against_the_others() -> None:
    def stage(**seconds: float) -> StageTime:
        return StageTime(**{"compute": 0, "nvme_read": 0, "nvme_write": 0, "optimizer": 0, "total": 0} | seconds)

    time = StepTime(forward=stage(compute=3, nvme_read=2), backward=stage(nvme_write=2.5), update=stage(optimizer=4))
    assert time.bottleneck == "nvme write"


@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
def test_rates_twice_as_high_halve_the_time(overlap: Overlap) -> None:
    once = step_time(machine(), overlap=overlap)
    twice = step_time(
        machine(
            flops_per_second=2e12,
            read_bytes_per_second=4e9,
            write_bytes_per_second=2e9,
            adam_parameters_per_second=2e9,
        ),
        overlap=overlap,
    )
    assert once.total == pytest.approx(2 * twice.total, rel=1e-12)
