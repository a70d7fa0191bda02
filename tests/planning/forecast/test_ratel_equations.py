"""Ratel's cost model as equations: those of the plan, and under them no strategy is faster than ours."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from ratel_cli.planning.forecast.ratel_equations import RatelEquations
from ratel_cli.planning.papers.strategies import compare
from ratel_cli.units import MIB
from tests.planning.forecast.test_ratel_forecast import recorded
from tests.planning.forecasters import ratel_forecaster, setting
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
    equations = forecaster.equations(setting(hardware, rows=rows, number=number, host_limit_bytes=limit_bytes))
    assert isinstance(equations, RatelEquations)
    return equations


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
    plan, equations = forecaster.plan(asked), forecaster.equations(asked)
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
    equations = ratel_forecaster().equations(setting())
    bare = equations.without_states()
    most = sum(operator.flops * len(operator.blocks) for operator in equations.operators)
    kwargs = {"swapped_bytes": 0, "spilled_bytes": 0, "recomputed_flops": most}
    assert bare.seconds(**kwargs) < equations.seconds(**kwargs)
    assert bare.operators == equations.operators
    assert bare.inter_block_bytes == equations.inter_block_bytes
