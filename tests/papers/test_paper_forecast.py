"""Forecasts by the paper's equations: its own figures, under the keys that all forecasts have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.errors import BadInput
from ratel_cli.papers.ratel import need
from ratel_cli.units import GIB, MIB
from tests.hardware.profiles import WITHOUT_GPU
from tests.papers.paper_profiles import paper_forecaster
from tests.planning.forecasters import paper_machine, ratel_forecaster, setting


def test_13b_as_the_paper_plans_it() -> None:
    forecast = paper_forecaster().forecast(setting(rows=32, host_limit_bytes=None))
    assert forecast.fits
    assert forecast.prediction.inter_block_bytes == 13_421_772_800
    assert forecast.prediction.swappable_bytes == 228_170_137_600
    assert forecast.prediction.flops_forward == 868_984_962_416_640
    assert forecast.prediction.time.total == pytest.approx(19.32, rel=0.005)
    assert forecast.prediction.offloaded.total_bytes == pytest.approx(33.6e9, rel=0.1)
    assert forecast.prediction.tflops_model == pytest.approx(135, rel=0.03)
    assert (forecast.prediction.case, forecast.prediction.swapped[0].operator) == (3, "fc2")
    assert forecast.prediction.traffic.written_bytes == 14 * 13_000_000_000 + forecast.prediction.offloaded.total_bytes
    assert forecast.prediction.curve[0][0] == forecast.prediction.inter_block_bytes
    assert (forecast.prediction.offloaded.total_bytes, forecast.prediction.time.total) in forecast.prediction.curve


def test_all_rows_of_a_step_are_one_batch() -> None:
    once, split = (
        paper_forecaster().forecast(setting(rows=rows, number=32 // rows, host_limit_bytes=None)) for rows in (32, 4)
    )
    assert split.tiers == once.tiers
    assert replace(split.prediction, workload=once.prediction.workload) == once.prediction


def test_a_limit_leaves_to_activations_what_buffers_do_not_take() -> None:
    forecaster = paper_forecaster()
    asked = setting(rows=32, host_limit_bytes=64 * GIB)
    shape = forecaster.equations(asked).shape
    assert forecaster.equations(asked).hardware.available_bytes == 64 * GIB - need(shape).host_bytes
    assert forecaster.equations(setting(host_limit_bytes=MIB)).hardware.available_bytes == 0
    forecast = forecaster.forecast(asked)
    available_bytes = 64 * GIB - need(shape).host_bytes
    assert (
        forecast.prediction.offloaded.written_bytes == forecast.prediction.offloaded.total_bytes - available_bytes > 0
    )


@pytest.mark.parametrize(
    ("tier", "gpu", "host", "space"), [("GPU", 1, 999, 9999), ("RAM", 99, 1, 9999), ("NVMe", 99, 999, 1)]
)
def test_the_tier_that_is_too_small_is_named(tier: str, gpu: int, host: int, space: int) -> None:
    machine = paper_machine()
    machine = replace(machine, nvme=replace(machine.nvme, free_bytes=space * GIB))
    forecaster = paper_forecaster(gpu_limit_bytes=gpu * GIB)
    forecast = forecaster.forecast(setting(machine, rows=32, host_limit_bytes=host * GIB))
    assert [each.name for each in forecast.shortfalls] == [tier]
    assert forecast.prediction.time.total > 0


def test_without_a_link_there_are_no_equations() -> None:
    with pytest.raises(BadInput, match="no `link`") as raised:
        paper_forecaster().forecast(setting(WITHOUT_GPU))
    assert raised.value.hint is not None
    assert "--hardware" in raised.value.hint


def test_the_deepest_is_that_of_the_capacity_rules() -> None:
    asked = setting(rows=1, host_limit_bytes=None)
    forecaster = paper_forecaster("gpt-70b")
    depth = forecaster.deepest(asked)
    [gpu, host, nvme] = forecaster.forecast(asked).tiers
    assert depth is not None
    assert depth.num_layers > 80
    assert gpu.have_bytes == 24 * GIB
    machine = paper_machine()
    nothing = replace(machine, nvme=replace(machine.nvme, free_bytes=MIB))
    assert forecaster.deepest(setting(nothing)) is None
    assert (host.have_bytes, nvme.have_bytes) == (machine.host.memory_bytes, machine.nvme.free_bytes)


def keys(content: object) -> object:
    """The tree of keys, of lists the first item's."""
    if isinstance(content, dict):
        return {key: keys(value) for key, value in content.items()}
    return [keys(content[0])] if isinstance(content, list) and content else None


def test_both_cost_models_tell_the_same_keys() -> None:
    ours = ratel_forecaster().forecast(setting(number=8))
    theirs = paper_forecaster().forecast(setting(rows=32))
    assert ours.prediction.swapped
    assert theirs.prediction.swapped
    assert keys(ours.to_json()) == keys(theirs.to_json())
