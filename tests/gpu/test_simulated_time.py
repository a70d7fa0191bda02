"""In simulated time a step keeps the GPU busy: runs of the paper, scaled down, with the plan's own proportions.

`ratel plan` says for a run of the paper on its server how long each resource is busy, and where bytes lie. A model of a
few thousand times fewer parameters runs with that placement, and its rates are chosen so that each resource is busy for
the same share of a step. What the engine's timeline then shows is its schedule: what overlaps, and what the GPU waits
for. The machine's own load adds to that, so the best of several steps in the middle of a run counts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.measure.telemetry import StepTimes
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.profile.placement import AfterGradient, Placement, UnitsOnGpu
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.ask.plan_inputs import forecaster_of, setting_of
from ratel_cli.run.files.hardware_file import load_hardware
from ratel_cli.units import MIB
from scripts.bench.simulated_drives import DriveKind, SimulatedDrives
from tests.engine.architectures import tiny_config
from tests.engine.machine import Machine, random_steps
from tests.engine.swaps import PRODUCTS
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.real_time import in_real_time, of_this_try
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated
from tests.simulated_gpu.timed import Rates, Work, timed, work_so_far

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.nightly,
    pytest.mark.skipif(not is_simulated(), reason="a real GPU has its own time"),
]

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPE = Recipe(dtype=torch.bfloat16, max_grad_norm=None)
HIDDEN, INTERMEDIATE = 64, 176
LAST_OF_GPT = {"fc1.weight": "mlp.gate_proj.weight", "qkv.weight": "self_attn.q_proj.weight"}
"""Parameters after whose gradients as much of backward is left."""
GROUP_ELEMENTS = 4096
"""About twenty groups in a layer, as there."""
_BYTES_MOVED = 22
"""Of each parameter, by the optimizer: 10 read, 12 written."""
COMPUTE_SECONDS = 16.0, 48.0, 144.0, 300.0
"""Of a step: long against what Python takes for it, in later tries even on a busy machine. The GPU is idle while it
waits for Python, too: for 3 % of a step at first, for a third of it on a machine with twice as much to do as cores."""
SLOW_DRIVES_SECONDS = 12.0, 36.0, 60.0
"""Less will do: what that test looks for is several times as long as what Python takes."""
NUM_STEPS = 4
"""Of which the first reads what will be resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of the paper on its server with twelve drives, in the micro-batches that its plan likes."""

    model: str
    rows: int
    num_micro_batches: int
    num_layers: int
    """Of the scaled model."""
    tokens: int = 96
    """Of a micro-batch there: against the hidden size as in the paper's runs, so that activations and weights are,
    too."""
    overrides: tuple[str, ...] = ()
    latency_groups: float = 0.0
    """How long the host waits for a drive's answer, in times that the drives take to read and write one group."""
    architecture: str = "llama"
    """Of the scaled model."""
    memory_share: float = 0.0
    """Share of computing in which kernels only move bytes: norms, rotations, activation functions, attention's own. The
    papers' GPT has next to none."""

    def plan(self) -> tuple[ModelSpec, Plan]:
        split = f"micro_batch_size={self.rows}", f"gradient_accumulation_steps={self.num_micro_batches}"
        overrides = [*split, "max_grad_norm=null", *self.overrides]
        config = load_config(CONFIGS / f"models/gpt-{self.model}.yaml", overrides).config
        hardware = load_hardware(CONFIGS / "hardware/paper-4090-12ssd.yaml")
        forecaster = forecaster_of(config, hardware, name=self.model, log=RunLog(io.StringIO()))
        assert isinstance(forecaster, RatelForecaster)
        return forecaster.spec, forecaster.plan(setting_of(config, hardware))


OF_13B = Run(model="13b", rows=8, num_micro_batches=4, num_layers=16)
GATED = replace(OF_13B, architecture="qwen3", memory_share=0.33)
"""Norms of queries and keys, rotary embeddings and SwiGLU: on an RTX 4090, products are two thirds of the time of
Qwen3-8B's layers."""
OF_70B = Run(model="70b", rows=8, num_micro_batches=6, num_layers=12, overrides=("storage.wear=ignore",))
"""So planned, it has most of the activations on NVMe."""
OF_13B_AT_ONCE = Run(model="13b", rows=80, num_micro_batches=1, num_layers=16, tokens=1024)
"""So planned, forward waits for room for units, and they go up in two parts."""
SLOW_TO_ANSWER = replace(OF_70B, num_layers=16, overrides=(), latency_groups=2.5)
"""So planned, NVMe is busy for two thirds of backward; the drives need more than one group in flight for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step in simulated time."""

    seconds: float
    computing_seconds: float
    """How long the GPU takes for what it computed, whatever it waited for between two operators."""
    times: StepTimes

    @property
    def idle_share(self) -> float:
        return 1.0 - self.computing_seconds / self.seconds

    @property
    def exposed_share(self) -> float:
        """Share of the step in which a unit goes up and nothing is computed."""
        units = [(s.start, s.end) for s in self.times.spans if s.resource == "up" and "activations" in s.label.text]
        computing = [(s.start, s.end) for s in self.times.spans if s.resource == "compute"]
        return (_covered([*units, *computing]) - _covered(computing)) / self.seconds


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    seconds, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    return seconds


def scaled_placement(run: Run, spec: ModelSpec, placement: Placement) -> Placement:
    """The placement, for fewer and smaller layers."""
    num_layers = spec.num_layers
    units = run.num_layers * run.num_micro_batches
    share = units / (num_layers * run.num_micro_batches)
    layer_share = (4 * HIDDEN + 3 * INTERMEDIATE) * HIDDEN / spec.block_elements[1]

    def scaled(blocks: frozenset[int]) -> frozenset[int]:
        last = run.num_layers + 1
        return frozenset(index for index in range(last + 1) if round(index * (num_layers + 1) / last) in blocks)

    gpu_units_from = placement.gpu_units_from
    return replace(
        placement,
        resident_weights=scaled(placement.resident_weights),
        resident_states=scaled(placement.resident_states),
        gpu_weights=scaled(placement.gpu_weights),
        swapped=PRODUCTS,
        spilled_units=min(round(placement.spilled_units * share), units - run.num_micro_batches),
        gpu_units_from=None if gpu_units_from is None else math.ceil(gpu_units_from * share),
        gpu_window_bytes=round(placement.gpu_window_bytes * layer_share),
        gpu_leaving_bytes=round(placement.gpu_leaving_bytes * layer_share),
        deferred=scaled(placement.deferred),
        groups=replace(placement.groups, elements=GROUP_ELEMENTS),
        gpu_units=None,
    )


def scaled_units(run: Run, plan: Plan, unit_bytes: float) -> UnitsOnGpu | None:
    """What the plan gives units, for units of this size."""
    units, share = plan.placement.gpu_units, unit_bytes / plan.offloaded.largest_unit.num_bytes
    if units is None:
        return None
    moments = tuple(
        AfterGradient(LAST_OF_GPT[moment.parameter], round(share * moment.num_bytes)) for moment in units.moments[1]
    )
    return UnitsOnGpu(
        forward_bytes=round(share * units.forward_bytes),
        ahead_bytes=round(share * units.ahead_bytes),
        moments=dict.fromkeys(range(1, run.num_layers + 1), moments),
    )


def measure(directory: Path, run: Run, compute_seconds: float) -> list[Measured]:
    """Steps in the middle of a run."""
    spec, plan = run.plan()
    placement = scaled_placement(run, spec, plan.placement)
    config = tiny_config(
        run.architecture,
        num_hidden_layers=run.num_layers,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_key_value_heads=4,
        max_position_embeddings=run.tokens,
    )
    steps = random_steps(NUM_STEPS, run.num_micro_batches, packed=False, num_tokens=run.tokens // 2)

    def machine_on(name: str, queue: IoQueue) -> AbstractContextManager[Machine]:
        return gpu_machine(
            directory / name,
            config,
            RECIPE,
            placement=placement,
            queue=queue,
            activation_bytes=256 * MIB,
            group_elements=placement.groups.elements,
            groups_in_flight=placement.groups.in_flight,
        )

    with open_queue("threads", notice=pytest.fail) as queue, machine_on("untimed", queue) as ratel:
        [outcome] = ratel.train(steps[:1], RECIPE)
        unit_bytes = outcome.swapped_bytes / (run.num_layers * run.num_micro_batches)
        placement = replace(placement, gpu_units=scaled_units(run, plan, unit_bytes))
        work, moved_bytes = work_so_far(), queue.read_bytes + queue.written_bytes
        ratel.train(steps[:2], RECIPE)
        work, moved_bytes = work_so_far() - work, queue.read_bytes + queue.written_bytes - moved_bytes
    rates, drive = scaled_rates(run, plan, work, moved_bytes, compute_seconds)
    with SimulatedDrives(drive, request_bytes=MIB // 16, depth=32) as queue, machine_on("timed", queue) as ratel:
        ratel.train(steps[:1], RECIPE)
        ratel.timeline.take()
        with timed(rates):
            measured = [_measure_step(ratel, batches, number) for number, batches in enumerate(steps) if number]
            ratel.settle()
    return measured[1:]


def scaled_rates(run: Run, plan: Plan, work: Work, moved_bytes: int, compute_seconds: float) -> tuple[Rates, DriveKind]:
    """Rates at which `work` and `moved_bytes` take as long as in the plan, if computing takes `compute_seconds`."""
    stages = plan.time.forward, plan.time.backward
    scale = compute_seconds / sum(stage.compute for stage in stages)
    memory_seconds = run.memory_share * compute_seconds
    rates = Rates(
        flops_per_second=work.flops / (compute_seconds - memory_seconds),
        memory_bytes_per_second=work.memory_bytes / memory_seconds if memory_seconds else math.inf,
        up_bytes_per_second=work.up_bytes / (scale * sum(stage.up for stage in stages)),
        down_bytes_per_second=work.down_bytes / (scale * sum(stage.down for stage in stages)),
    )
    nvme_bytes_per_second = moved_bytes / (scale * sum(stage.nvme for stage in stages))
    group_seconds = GROUP_ELEMENTS * _BYTES_MOVED / nvme_bytes_per_second
    return rates, DriveKind(bytes_per_second=nvme_bytes_per_second, latency_seconds=run.latency_groups * group_seconds)


def _measure_step(ratel: Machine, batches: list[MicroBatch], number: int) -> Measured:
    before, start = work_so_far(), perf_counter()
    ratel.engine.run(batches, step=number, update=number + 1, learning_rate=1e-3, commit_previous=ratel.commit)
    ratel.decided = number + 1
    seconds = perf_counter() - start
    computing_seconds = (work_so_far() - before).computing_seconds
    return Measured(seconds=seconds, computing_seconds=computing_seconds, times=ratel.timeline.take())


@in_real_time
@pytest.mark.timeout(3600)  # of all tries
def test_drives_that_are_slow_to_answer_have_the_next_group_to_do(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With one group in flight instead of the plan's two, the GPU is idle for a quarter of the step."""
    steps = measure(tmp_path, SLOW_TO_ANSWER, of_this_try(request, SLOW_DRIVES_SECONDS))
    found = [(step.seconds, step.idle_share, step.times.stalled) for step in steps]
    assert min(step.idle_share for step in steps) <= 0.15, found


@in_real_time
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", [OF_13B, OF_70B, GATED], ids=["13b", "70b", "gated"])
def test_the_gpu_is_busy_and_units_go_up_meanwhile(tmp_path: Path, run: Run, request: pytest.FixtureRequest) -> None:
    steps = measure(tmp_path, run, of_this_try(request, COMPUTE_SECONDS))
    found = [(step.seconds, step.idle_share, step.exposed_share, step.times.stalled) for step in steps]
    assert min(step.idle_share for step in steps) <= 0.05, found
    assert min(step.exposed_share for step in steps) <= 0.01, found


@in_real_time
@pytest.mark.timeout(3600)
def test_where_two_units_do_not_fit_they_move_in_time_too(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """If what does not fit at first went up when the unit in use is done, the GPU would be idle for a third of the
    step; with memory for two units it is for as long as here."""
    steps = measure(tmp_path, OF_13B_AT_ONCE, of_this_try(request, COMPUTE_SECONDS))
    found = [(step.seconds, step.idle_share, step.exposed_share, step.times.stalled) for step in steps]
    assert min(step.idle_share for step in steps) <= 0.08, found
    assert min(step.exposed_share for step in steps) <= 0.03, found
