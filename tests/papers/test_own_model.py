"""A model under Ratel's cost model as papers ask it: the equations are those of the plan, and under them no strategy is
faster than ours; the deepest model fits, and no deeper one does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.papers.own_model import OwnModel, RatelEquations
from ratel_cli.papers.rivals import compare
from ratel_cli.units import GIB, MIB
from tests.planning.forecast.test_ratel_forecast import recorded
from tests.planning.forecasters import paper_machine, ratel_forecaster, setting
from tests.planning.shapes import SEEDS, machine
from tests.tiers import examples


def by_chance(seed: int) -> RatelEquations:
    """A small model on any machine, with memory from just enough to plenty."""
    choice = random.Random(seed)

    def about(value: float) -> float:
        return value * 10 ** choice.uniform(-1, 1)

    hardware = machine(
        flops_per_second=about(1e12),
        read_bytes_per_second=about(2e9),
        write_bytes_per_second=about(1e9),
        adam_parameters_per_second=about(1e9),
    )
    rows, number = choice.randint(1, 3), choice.randint(1, 4)
    forecaster = ratel_forecaster(
        num_layers=choice.randint(1, 4),
        hidden_size=choice.choice([128, 256, 512]),
        rows=rows,
        holds_gradients=choice.random() < 0.5,
        overlap=choice.choice(["optimized", "naive", "separate"]),
    )
    if choice.random() < 0.5:
        forecaster = recorded(forecaster)
    least = forecaster.forecast(setting(hardware, rows=rows, number=number, host_limit_bytes=MIB)).prediction.host_bytes
    limit_bytes = int(least * choice.uniform(1, 3))
    asked = setting(hardware, rows=rows, number=number, host_limit_bytes=limit_bytes)
    return OwnModel(forecaster).equations(asked)


@examples(150)
@given(seed=SEEDS)
def test_ours_is_never_slower(seed: int) -> None:
    pytest.importorskip("scipy")
    ours, *others = compare(by_chance(seed))
    assert ours.strategy == "ratel"
    assert ours.why_not is None
    assert all(ours.point.seconds <= other.point.seconds for other in others)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_plan_s_swap_set_takes_the_plan_s_time(is_recorded: bool) -> None:
    """Where nothing is spilled, so that nothing is rounded to whole units."""
    forecaster, asked = ratel_forecaster(), setting(number=3)
    if is_recorded:
        forecaster = recorded(forecaster)
    plan, equations = forecaster.plan(asked), OwnModel(forecaster).equations(asked)
    assert plan.offloaded.written_bytes == 0
    most = sum(operator.flops * len(operator.blocks) for operator in equations.operators)
    saved = sum(each.flops for each in plan.swapped)
    if is_recorded:
        saved = round(sum(each.seconds or 0.0 for each in plan.swapped) * asked.hardware.gpu.flops_per_second)
    seconds = equations.seconds(
        swapped_bytes=plan.offloaded.total_bytes, spilled_bytes=0, recomputed_flops=most - saved
    )
    assert seconds == pytest.approx(plan.time.total, rel=1e-9)
    assert compare(equations)[0].point.seconds <= seconds * (1 + 1e-9)


def test_without_states_only_activations_move() -> None:
    equations = OwnModel(ratel_forecaster()).equations(setting())
    bare = equations.without_states()
    most = sum(operator.flops * len(operator.blocks) for operator in equations.operators)
    kwargs = {"swapped_bytes": 0, "spilled_bytes": 0, "recomputed_flops": most}
    assert bare.seconds(**kwargs) < equations.seconds(**kwargs)
    assert bare.operators == equations.operators
    assert bare.inter_block_bytes == equations.inter_block_bytes


NOTES_BYTES = 64 * MIB
"""More than what a step notes of some hundred layers."""


def least_memory(machine: HardwareProfile, *, holds_gradients: bool) -> tuple[int, int]:
    """Bytes of GPU and host memory in which the forecaster's model just fits, where nothing stays that can be on NVMe,
    and the GPU keeps nothing."""
    gpu_bytes = ratel_forecaster(device_limit_bytes=MIB).forecast(setting(machine)).prediction.gpu_bytes
    gpu_bytes += gpu_bytes // 24 + 1
    small = ratel_forecaster(holds_gradients=holds_gradients, device_limit_bytes=gpu_bytes)
    return gpu_bytes, small.forecast(setting(machine, host_limit_bytes=MIB)).prediction.host_bytes


@pytest.mark.parametrize("holds_gradients", [True, False])
def test_the_deepest_fits_and_a_deeper_one_does_not(holds_gradients: bool) -> None:
    machine = paper_machine()
    machine = replace(machine, nvme=replace(machine.nvme, free_bytes=20 * GIB))
    gpu_bytes, limit_bytes = least_memory(machine, holds_gradients=holds_gradients)
    asked = setting(machine, host_limit_bytes=limit_bytes + NOTES_BYTES)
    small = ratel_forecaster(holds_gradients=holds_gradients, device_limit_bytes=gpu_bytes)
    depth = OwnModel(small).deepest(asked)
    assert depth is not None
    at, beyond = (
        ratel_forecaster(
            num_layers=depth.num_layers + more, holds_gradients=holds_gradients, device_limit_bytes=gpu_bytes
        )
        for more in (0, 1)
    )
    assert at.spec.num_parameters == depth.num_parameters
    assert at.forecast(asked).fits
    if holds_gradients:
        assert not beyond.forecast(asked).fits


@pytest.mark.full
def test_memory_for_what_is_noted_of_each_layer_bounds_the_depth() -> None:
    machine = paper_machine()
    gpu_bytes, limit_bytes = least_memory(machine, holds_gradients=True)
    small = ratel_forecaster(holds_gradients=True, device_limit_bytes=gpu_bytes)
    least = OwnModel(small).deepest(setting(machine, host_limit_bytes=limit_bytes))
    assert least is not None and least.num_layers == small.spec.num_layers
    asked = setting(machine, host_limit_bytes=limit_bytes + NOTES_BYTES)
    depth = OwnModel(small).deepest(asked)
    assert depth is not None
    at, beyond = (
        ratel_forecaster(num_layers=depth.num_layers + more, holds_gradients=True, device_limit_bytes=gpu_bytes)
        for more in (0, 1)
    )
    assert at.forecast(asked).fits
    assert not beyond.forecast(asked).fits


def test_no_depth_fits_where_memory_or_space_is_short() -> None:
    machine = paper_machine()
    no_space = replace(machine, nvme=replace(machine.nvme, free_bytes=MIB))
    assert OwnModel(ratel_forecaster()).deepest(setting(no_space)) is None
    assert OwnModel(ratel_forecaster()).deepest(setting(host_limit_bytes=MIB)) is None
    assert OwnModel(ratel_forecaster(device_limit_bytes=MIB)).deepest(setting()) is None
