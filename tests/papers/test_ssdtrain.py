"""The recompute-offload-keep curve: its ends are plans, and the plan is a point of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.papers.own_model import OwnModel
from ratel_cli.papers.ssdtrain import RokPoint, RokStrategy, rok_curve
from ratel_cli.planning.forecast.forecast import Forecast, Setting
from ratel_cli.planning.profile.placement import ActivationPolicy
from ratel_cli.units import GIB
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU
from tests.papers.paper_profiles import paper_forecaster
from tests.planning.forecasters import paper_machine, ratel_forecaster, setting
from tests.tiers import sample

Case = tuple[str, HardwareProfile, int, int]
CASES: list[Case] = [
    ("ratel", WITH_GPU, 4, 64),
    ("ratel", WITH_GPU, 16, 4),
    ("ratel", WITHOUT_GPU, 4, 64),
    ("ratel", WITHOUT_GPU, 16, 3),
    ("ratel", paper_machine(), 16, 4),
    ("paper", paper_machine(), 32, 64),
    ("paper", paper_machine(), 8, 256),
    ("paper", paper_machine(), 48, 1024),
]
"""Cost model, machine, rows of a micro-batch, and GiB of host memory."""


def curve_of(name: str, asked: Setting) -> tuple[Forecast, tuple[RokPoint, ...]]:
    """The plan and the curve."""
    if name == "paper":
        forecast = paper_forecaster().forecast(asked)
        return forecast, rok_curve(paper_forecaster().with_activations, forecast)
    forecaster = ratel_forecaster(rows=asked.workload.micro_batch_size)
    forecast = forecaster.forecast(asked)
    return forecast, rok_curve(OwnModel(forecaster).with_activations, forecast)


def forced(name: str, asked: Setting, activations: ActivationPolicy) -> Forecast:
    """What a config with this choice gets."""
    if name == "paper":
        return replace(paper_forecaster(), activations=activations).forecast(asked)
    return ratel_forecaster(rows=asked.workload.micro_batch_size, activations=activations).forecast(asked)


def named(points: tuple[RokPoint, ...], strategy: RokStrategy) -> RokPoint:
    [found] = [each for each in points if each.strategy == strategy]
    return found


@pytest.mark.parametrize("case", sample(CASES, every=5))
def test_the_curve(case: Case) -> None:
    name, machine, rows, host = case
    asked = setting(machine, rows=rows, host_limit_bytes=host * GIB)
    forecast, points = curve_of(name, asked)
    shares = [each.swap_coefficient for each in points]
    assert shares == sorted(shares) and (shares[0], shares[-1]) == (0.0, 1.0)

    ends: tuple[tuple[RokStrategy, ActivationPolicy], ...] = (
        ("recompute", "recompute"),
        ("offload", "swap_all"),
        ("keep", "keep"),
    )
    for strategy, activations in ends:
        plan, point = forced(name, asked, activations), named(points, strategy)
        assert point.seconds == plan.prediction.time.total
        assert (point.host_bytes + point.nvme_bytes > 0) == (plan.prediction.offloaded.linked_bytes > 0)
        assert point.recomputed_flops == plan.prediction.flops_recomputed
        assert (point.shortfall_bytes == 0) == plan.fits
    recompute, offload, keep = (named(points, each) for each, _ in ends)
    assert (recompute.swap_coefficient, offload.swap_coefficient, keep.swap_coefficient) == (0.0, 1.0, 1.0)
    # What costs no FLOPs to run again is swapped last, so that nothing is recomputed a little before the end.
    assert recompute.recomputed_flops > offload.recomputed_flops == keep.recomputed_flops == 0
    assert keep.nvme_bytes == 0

    planned = named(points, "planned")
    prediction = forecast.prediction
    swapped_bytes = prediction.offloaded.total_bytes - prediction.inter_block_bytes
    assert planned.swap_coefficient == swapped_bytes / (prediction.swappable_bytes - prediction.inter_block_bytes)
    assert planned.tokens_per_second == prediction.tokens_per_second

    curve = [each for each in points if each.strategy != "keep"]
    slowest = min(recompute.tokens_per_second, offload.tokens_per_second)
    assert all(each.tokens_per_second >= 0.99 * slowest for each in curve)
    assert all(each.gpu_bytes <= forecast.prediction.gpu_bytes or each.shortfall_bytes for each in curve)
    flops = [each.recomputed_flops for each in curve]
    assert flops == sorted(flops, reverse=True)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_a_point_of_the_plan_s_share_is_the_plan(case: Case) -> None:
    """Forced to swap what the plan swaps, a plan is as fast, within what counts as equal."""
    name, machine, rows, host = case
    asked = setting(machine, rows=rows, host_limit_bytes=host * GIB)
    planned = named(curve_of(name, asked)[1], "planned")
    again = forced(name, asked, planned.swap_coefficient)
    assert again.prediction.time.total == pytest.approx(planned.seconds, rel=0.005)


@pytest.mark.full
def test_memory_decides_where_all_of_it_goes() -> None:
    """With little host memory, what is offloaded goes to NVMe, and keeping does not fit."""
    asked = setting(WITHOUT_GPU, rows=16, host_limit_bytes=4 * GIB)
    ample = replace(asked, host_limit_bytes=64 * GIB)
    little, much = (curve_of("ratel", each)[1] for each in (asked, ample))
    assert named(little, "offload").nvme_bytes > 0 == named(much, "offload").nvme_bytes
    assert named(little, "keep").shortfall_bytes > 0 == named(much, "keep").shortfall_bytes
    kept, offloaded = named(much, "keep"), named(much, "offload")
    assert replace(kept, strategy="offload") == offloaded


def test_the_paper_s_model_holds_34_bytes_of_a_layer() -> None:
    """By hand: 40 layers of 32 x 1024 tokens of 5120; 34 b s h is one layer's, and 32 of 34 is what inputs are not."""
    _, points = curve_of("paper", setting(rows=32, host_limit_bytes=None))
    tokens_times_width = 32 * 1024 * 5120
    assert {each.gpu_bytes for each in points} == {34 * tokens_times_width}
    assert named(points, "recompute").nvme_bytes == 40 * 2 * tokens_times_width
    assert named(points, "offload").nvme_bytes == 40 * 34 * tokens_times_width
    assert named(points, "keep").host_bytes == named(points, "keep").shortfall_bytes == 40 * 34 * tokens_times_width
