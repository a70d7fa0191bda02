"""The size of the head's chunks: against planning every size, by card, on the CPU, and where nothing fits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.forecast.forecast import Setting
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.memory.capacity import check_device_memory
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.placement import LEAST_UNITS, Workload
from ratel_cli.planning.search.choose import Choice, weigh
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.head_chunk import best_chunk, with_chunk
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.split import best_split
from ratel_cli.run.ask.plan_inputs import forecaster_of, setting_of
from ratel_cli.run.files.hardware_file import load_hardware
from ratel_cli.units import GIB, MIB
from tests.planning.profiles import estimated
from tests.planning.shapes import SEEDS, gpt, machine, unit_of
from tests.tiers import examples

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = [64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, 1024 * MIB]
ALLOWANCE = 1.005
"""Of the search for one plan (choose.py)."""


def problem_by_chance(choice: random.Random) -> Problem:
    """Small models whose logits are up to some GiB, on a GPU that has just enough memory, or more."""
    spec = gpt(
        num_layers=choice.randint(1, 4),
        hidden_size=choice.choice([256, 1024]),
        vocab_size=choice.choice([30_000, 200_000]),
        tied=choice.random() < 0.5,
    )
    workload = Workload(
        micro_batch_size=choice.randint(1, 8),
        num_micro_batches=choice.choice([1, 3]),
        sequence_len=choice.choice([128, 1024]),
    )
    profile = estimated(spec, workload)
    inputs_bytes = profile.profiles[0].input_bytes
    least_bytes = GpuMemory(spec, workload, profile).needed_bytes(unit_of(inputs_bytes), units=LEAST_UNITS)
    hardware = machine(
        flops_per_second=10 ** choice.uniform(11, 14),
        read_bytes_per_second=10 ** choice.uniform(8.5, 10),
        write_bytes_per_second=10 ** choice.uniform(8.5, 10),
        up_bytes_per_second=10 ** choice.uniform(9, 10.5),
        down_bytes_per_second=10 ** choice.uniform(9, 10.5),
    )
    gpu = replace(hardware.gpu, memory_bytes_per_second=choice.choice([None, 10 ** choice.uniform(10, 12)]))
    return Problem(
        spec=spec,
        workload=workload,
        profile=profile,
        hardware=replace(hardware, gpu=gpu),
        decisions=Decisions(
            device_limit_bytes=choice.choice([None, least_bytes + choice.randint(-MIB, 4 * GIB)]),
            holds_gradients=choice.random() < 0.4,
            num_slots=2,
            host_limit_bytes=choice.choice([64 * GIB, choice.randint(GIB, 16 * GIB)]),
            wear=choice.choice(["ignore", "save", "balanced"]),
        ),
        process_bytes=0,
    )


def sized(problem: Problem, chunk_bytes: int) -> Problem:
    return replace(problem, workload=with_chunk(problem.spec, problem.workload, chunk_bytes))


def planned(problem: Problem) -> Choice | DoesNotFit:
    try:
        choice = weigh(problem)
        check_device_memory(choice.best.memory, problem.decisions.device_limit_bytes)
    except DoesNotFit as failure:
        return failure
    return choice


@pytest.mark.full
@examples(40)
@given(seed=SEEDS)
def test_no_size_is_better(seed: int) -> None:
    """All five are planned. Of those as good the largest is taken; but of two that make the same chunks, the smaller
    one, since the bits are the same."""
    problem = problem_by_chance(random.Random(seed))
    found = best_chunk(problem)
    tried = {size: planned(sized(problem, size)) for size in SIZES}
    fitting = {size: each.best for size, each in tried.items() if isinstance(each, Choice)}
    if not fitting:
        shortfalls = {size: each.shortfall_bytes for size, each in tried.items() if isinstance(each, DoesNotFit)}
        assert shortfalls[found] == min(shortfalls.values())
        return
    assert found in fitting
    seconds = {size: each.time.total for size, each in fitting.items()}
    if problem.decisions.wear == "save":
        least = min(each.traffic.written_bytes for each in fitting.values())
        assert fitting[found].traffic.written_bytes == least, "never more is written for larger chunks"
        seconds = {size: each for size, each in seconds.items() if fitting[size].traffic.written_bytes == least}
    if problem.decisions.wear == "balanced":
        save_seconds = min(each.sparing.time.total for each in tried.values() if isinstance(each, Choice))
        price = 0.5 * save_seconds / problem.unfrozen_state_bytes
        seconds = {size: each.time.total + price * each.traffic.written_bytes for size, each in fitting.items()}
        assert seconds[found] <= ALLOWANCE * min(seconds.values()), "what is written has its price"
        return
    assert seconds[found] <= ALLOWANCE * min(seconds.values())
    tokens = {size: min(size // (4 * problem.spec.vocab_size), problem.workload.micro_batch_tokens) for size in SIZES}
    assert all(seconds[size] > seconds[found] for size in seconds if tokens[size] > tokens[found])
    assert found == min(size for size in SIZES if tokens[size] == tokens[found])


def test_where_nothing_else_changes_the_chunk_is_the_largest() -> None:
    problem = sized(problem_by_chance(random.Random(0)), 64 * MIB)
    workload = Workload(micro_batch_size=8, num_micro_batches=1, sequence_len=4096)
    problem = replace(problem, workload=workload, profile=estimated(problem.spec, workload))
    roomy = replace(problem.decisions, device_limit_bytes=None, host_limit_bytes=1 << 40)
    assert best_chunk(replace(problem, decisions=roomy)) == GIB


def test_on_the_cpu_it_is_always_64_mib() -> None:
    problem = problem_by_chance(random.Random(0))
    on_cpu = replace(problem, hardware=machine(num_cores=4, flops_per_second=1e9))
    assert best_chunk(on_cpu) == best_chunk(sized(on_cpu, GIB)) == 64 * MIB


def paper_13b(gib: int) -> tuple[RatelForecaster, Setting]:
    """On the paper's server with a GPU of this size."""
    config = load_config(CONFIGS / "models" / "gpt-13b.yaml", [f"limits.gpu_memory={gib}GiB"]).config
    hardware = load_hardware(CONFIGS / "hardware" / "paper-4090-12ssd.yaml")
    forecaster = forecaster_of(config, hardware, name="13b", log=RunLog())
    assert isinstance(forecaster, RatelForecaster)
    return forecaster, setting_of(config, hardware)


@pytest.mark.parametrize(
    ("gib", "least"),
    [
        pytest.param(8, 64 * MIB, marks=pytest.mark.nightly),
        pytest.param(12, 64 * MIB, marks=pytest.mark.full),
        (24, 512 * MIB),
        pytest.param(48, GIB, marks=pytest.mark.full),
    ],
)
def test_chunks_grow_with_the_card(gib: int, least: int) -> None:
    """13B, 32 rows of 1024 tokens in the fastest split that fits. Ten bytes per parameter of the head and chunk at
    1008 GB/s are 0.25 s with chunks of 64 MiB."""
    forecaster, setting = paper_13b(gib)
    step = replace(setting.workload, micro_batch_size=32)
    split = best_split(step, lambda each: forecaster.forecast(replace(setting, workload=each)).split_rate)
    setting = replace(setting, workload=split.workload)
    found = forecaster.chunk_bytes(setting)
    assert found >= least
    plan, small = (forecaster.plan(replace(setting, chunk_bytes=each)) for each in (found, 64 * MIB))
    assert plan.workload.chunk_tokens == found // (4 * 50257)
    assert plan == forecaster.plan(setting), "which the plan chooses by itself"
    assert plan.time.total <= small.time.total
    if gib >= 24:
        assert 0.15 < small.time.backward.compute - plan.time.backward.compute < 0.35


@pytest.mark.full
def test_a_recorded_step_does_not_change_what_a_new_run_would_choose() -> None:
    """The first start knows only shapes, even if the operators were measured before."""
    forecaster, setting = paper_13b(24)
    setting = replace(setting, workload=replace(setting.workload, micro_batch_size=16, num_micro_batches=2))
    recorded = replace(forecaster, profile=replace(forecaster.profile, norm_held_bytes=512 * MIB))  # of one row
    assert recorded.chunk_bytes(setting) == forecaster.chunk_bytes(setting)
    assert replace(recorded, estimate=None).chunk_bytes(setting) != forecaster.chunk_bytes(setting)
    assert forecaster.chunk_bytes(replace(setting, chunk_bytes=7 * MIB)) == 7 * MIB
