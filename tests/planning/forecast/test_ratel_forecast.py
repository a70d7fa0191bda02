"""Forecasts of Ratel's own cost model: equal to plans, and there even of what does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.hardware.spec import margin_bytes
from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster, host_limit_bytes
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.search.head_chunk import best_chunk, with_chunk
from ratel_cli.planning.search.plan import make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.recorded_plan import plan_json
from ratel_cli.units import GIB, MIB
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU
from tests.planning.forecasters import paper_machine, ratel_forecaster, setting


def test_a_forecast_is_the_plan_of_a_run() -> None:
    forecaster, asked = ratel_forecaster(), setting(num_steps=10)
    memory_bytes = asked.hardware.gpu.memory_bytes
    problem = Problem(
        spec=forecaster.spec,
        workload=asked.workload,
        profile=forecaster.profile,
        hardware=asked.hardware,
        decisions=replace(
            forecaster.decisions,
            host_limit_bytes=64 * GIB,
            device_limit_bytes=memory_bytes - margin_bytes(memory_bytes),
        ),
        process_bytes=forecaster.process_bytes,
    )
    chunked = with_chunk(problem.spec, problem.workload, best_chunk(problem))
    plan = make_plan(replace(problem, workload=chunked))
    forecast = forecaster.forecast(asked)
    assert forecast.fits
    assert forecast.prediction.time.total == plan.time.total
    assert forecast.prediction.bottleneck == plan.time.bottleneck
    assert (forecast.prediction.traffic.read_bytes, forecast.prediction.traffic.written_bytes) == (
        plan.traffic.read_bytes,
        plan.traffic.written_bytes,
    )
    assert (forecast.prediction.swapped, forecast.prediction.curve) == (plan.swapped, plan.curve)
    assert forecast.prediction.offloaded.gpu_bytes == plan.offloaded.gpu_bytes > 0
    predicted, planned = forecast.to_json(), plan_json(plan)
    assert predicted["activations"] == planned["activations"]
    assert predicted["throughput"] == planned["throughput"]
    assert predicted["model"] == planned["model"]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_run_that_does_not_clip_holds_no_gradients_unless_it_writes_in_place(num_slots: int) -> None:
    forecaster, asked = ratel_forecaster(), setting()
    forecaster = replace(forecaster, decisions=replace(forecaster.decisions, num_slots=num_slots))
    free = replace(forecaster, decisions=replace(forecaster.decisions, holds_gradients=False))
    clipped, unclipped = (forecaster.plan(replace(asked, clips=clips)) for clips in (True, False))
    assert unclipped == (clipped if num_slots == 1 else free.plan(asked))
    assert (unclipped.time.total < clipped.time.total) == (num_slots == 2)


def test_the_run_is_its_steps() -> None:
    forecaster, machine = ratel_forecaster(), replace(WITH_GPU, nvme=replace(WITH_GPU.nvme, endurance_tb_written=2.0))
    forecast = forecaster.forecast(setting(machine, num_steps=10))
    assert forecast.run_seconds == 10 * forecast.prediction.time.total
    assert forecast.run_tb_written == pytest.approx(forecast.prediction.traffic.written_bytes / 1e11)
    assert forecast.endurance_share == pytest.approx(forecast.prediction.traffic.written_bytes / 2e11)
    num_steps = 2e12 / forecast.prediction.traffic.written_bytes
    assert forecast.drive_seconds == pytest.approx(num_steps * forecast.prediction.time.total)
    unknown = forecaster.forecast(setting(machine))
    assert (unknown.run_seconds, unknown.run_tb_written, unknown.endurance_share) == (None, None, None)
    assert unknown.drive_seconds is None or unknown.setting.hardware.nvme.endurance_tb_written is not None


def test_the_limit_is_the_user_s_or_what_is_free_less_a_margin() -> None:
    assert host_limit_bytes(setting(host_limit_bytes=GIB)) == GIB
    assert host_limit_bytes(setting(WITH_GPU, host_limit_bytes=None)) == 100 * GIB - 128 * GIB // 20
    full = replace(WITH_GPU, host=replace(WITH_GPU.host, available_bytes=0))
    assert host_limit_bytes(setting(full, host_limit_bytes=None)) == 0, "a machine with nothing free"


@pytest.mark.parametrize("holds_gradients", [True, False])
def test_too_little_ram_is_told_to_the_byte(holds_gradients: bool) -> None:
    forecaster = ratel_forecaster(holds_gradients=holds_gradients)
    short = forecaster.forecast(setting(host_limit_bytes=GIB // 2))
    [tier] = short.shortfalls
    assert (tier.name, short.fits) == ("RAM", False)
    assert "limits.host_memory" in tier.remedy
    assert not forecaster.forecast(setting(host_limit_bytes=tier.need_bytes - 1)).fits
    assert forecaster.forecast(setting(host_limit_bytes=tier.need_bytes)).fits


def test_too_little_space_is_told() -> None:
    machine = paper_machine()
    forecast = ratel_forecaster().forecast(setting(replace(machine, nvme=replace(machine.nvme, free_bytes=MIB))))
    [tier] = forecast.shortfalls
    assert (tier.name, tier.shortfall_bytes) == ("NVMe", forecast.prediction.nvme_bytes - MIB)
    assert "storage.paths" in tier.remedy


def test_a_gpu_has_its_own_memory_and_a_cpu_only_a_budget() -> None:
    [gpu, *_] = ratel_forecaster().forecast(setting()).tiers
    assert (gpu.name, gpu.have_bytes) == ("GPU", 24 * GIB - 24 * GIB // 20)
    [gpu, *_] = ratel_forecaster(device_limit_bytes=MIB).forecast(setting()).tiers
    assert gpu.have_bytes == MIB - MIB // 25, "torch's allocator needs the rest"
    assert gpu.shortfall_bytes == gpu.need_bytes - gpu.have_bytes
    names = [tier.name for tier in ratel_forecaster().forecast(setting(WITHOUT_GPU)).tiers]
    assert names == ["RAM", "NVMe"]
    limited = ratel_forecaster(device_limit_bytes=MIB).forecast(setting(WITHOUT_GPU))
    assert limited.shortfalls[0].name == "GPU"


def test_a_larger_micro_batch_is_as_if_estimated_anew() -> None:
    """And where times were recorded they grow with the rows."""
    forecaster = ratel_forecaster(rows=4)
    asked = setting(rows=8)
    traits = LayerTraits(num_heads=8, head_dim=128)
    anew = analytic_profile(forecaster.spec, asked.workload, traits=traits)
    assert forecaster.forecast(asked) == replace(forecaster, profile=anew).forecast(asked)
    timed = recorded(forecaster)
    once, twice = (timed.forecast(setting(rows=rows)) for rows in (4, 8))
    assert twice.prediction.time.forward.compute == pytest.approx(2 * once.prediction.time.forward.compute)
    assert twice.prediction.source == "recorded"


def recorded(forecaster: RatelForecaster) -> RatelForecaster:
    """With times, as if they had been recorded on a device of 1 TFLOP/s."""
    profile = forecaster.profile
    layers = tuple(
        replace(
            layer,
            forward_seconds=layer.flops_forward / 1e12,
            recomputed_seconds=layer.flops_recomputed / 1e12,
            backward_seconds=layer.flops_forward / 5e11,
            candidates=tuple(replace(each, seconds=each.flops / 1e12) for each in layer.candidates),
        )
        for layer in profile.profiles
    )
    timed = replace(profile, source="recorded", profiles=layers, embedding_seconds=0.0, head_seconds=0.01)
    return replace(forecaster, profile=timed)


def test_the_optimizer_after_backward_counts_as_backward() -> None:
    forecaster, asked = ratel_forecaster(overlap="separate"), setting()
    plan, forecast = forecaster.plan(asked), forecaster.forecast(asked)
    assert forecast.prediction.time.backward.optimizer == plan.time.update.optimizer > 0
    assert forecast.prediction.time.backward.total == plan.time.backward.total + plan.time.update.total
    assert forecast.prediction.time.total == pytest.approx(plan.time.total, rel=1e-12)
