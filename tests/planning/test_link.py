"""What of units the link moves while nothing computes, against a link that is followed from tensor to tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.planning.duties.step import ONE_TOKEN
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.activations import NOT_EXPOSED, ExposedUnits, offload
from ratel_cli.planning.profile.placement import LEAST_UNITS, Placement, UnitsOnGpu
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.swap import SwapOrder
from ratel_cli.planning.time.costs import ComputeSeconds, StepCosts
from ratel_cli.planning.time.link import exposed_unit_bytes, exposed_units, waited_unit_bytes
from ratel_cli.planning.time.traffic import Traffic
from tests.planning.profiles import by_chance
from tests.planning.shapes import SEEDS, WORKLOAD, gpt, machine
from tests.planning.steps import planned_step
from tests.tiers import examples

LINK_RATE = 1e10
"""Of `machine`, in bytes per second and direction."""


def late_seconds(tensors: Sequence[int], most: Sequence[int], moments: Sequence[float], end: float) -> float:
    """How long a link of one byte a second still brings the unit up after `end`. It may take `most[0]` from the
    beginning, `most[1]` from the first of `moments` on, and all of it from `end` on."""
    waiting, taken, now = sorted(tensors, reverse=True), 0, 0.0
    for moment, most_bytes in zip((0.0, *moments, end), (*most, sum(tensors)), strict=True):
        now = max(now, moment)
        for tensor in tuple(waiting):
            if taken + tensor <= most_bytes:
                waiting.remove(tensor)
                taken += tensor
                now += tensor
    return max(0.0, now - end)


@examples(300)
@given(seed=SEEDS)
def test_a_unit_is_as_late_as_on_a_link_that_is_followed(seed: int) -> None:
    choice = random.Random(seed)
    tensors = [choice.randint(1, 50) for _ in range(choice.randint(1, 5))]
    most = sorted(choice.randint(0, sum(tensors)) for _ in range(choice.randint(1, 4)))
    rests = sorted((choice.uniform(0, 60) for _ in most[1:]), reverse=True)
    end = sum(tensors) + 60.0  # what may go up at once is up before the first moment
    found = exposed_unit_bytes(tensors, most, rests, bytes_per_second=1.0)
    assert found == int(late_seconds(tensors, most, [end - rest for rest in rests], end))


@pytest.mark.parametrize(
    ("most_bytes", "made_seconds", "waited"),
    [(200, 0.0, 0), (199, 0.0, 1), (100, 0.0, 100), (100, 4.0, 60), (140, 6.0, 0), (100, 1e9, 0)],
)
def test_forward_waits_for_what_has_not_gone_down_when_the_next_unit_is_there(
    most_bytes: int, made_seconds: float, waited: int
) -> None:
    assert waited_unit_bytes(100, most_bytes, made_seconds, bytes_per_second=10.0) == waited


@pytest.mark.parametrize("prefetch_blocks", [0, 1])
def test_what_moves_while_nothing_computes_takes_its_time(prefetch_blocks: int) -> None:
    """Forward waits for what goes down, backward for what goes up."""
    hardware = machine(flops_per_second=1.0)
    assert hardware.link is not None
    both = [
        StepCosts(
            step=planned_step(gpt(), ONE_TOKEN, holds_gradients=True, on_gpu=True),
            hardware=hardware,
            compute=ComputeSeconds(forward=100.0, backward=200.0, head=1.0, is_measured=False),
        ).time(
            Placement(prefetch_blocks=prefetch_blocks, pending_updates=1, gpu_window_bytes=1 << 40),
            Traffic(),
            offload([1000] * 3, num_micro_batches=1, spilled_units=0, exposed=exposed),
        )
        for exposed in (ExposedUnits(10**9, 10**10), NOT_EXPOSED)
    ]
    waits, none = ((each.forward.total, each.backward.total) for each in both)
    assert waits[0] - none[0] == pytest.approx(10**9 / hardware.link.from_gpu_bytes_per_second, rel=1e-6)
    assert waits[1] - none[1] == pytest.approx(10**10 / hardware.link.to_gpu_bytes_per_second, rel=1e-6)


@examples(100)
@given(seed=SEEDS)
def test_a_step_counts_every_unit_that_moves_in_parts(seed: int) -> None:
    """Unit by unit, each with its own layer's tensors, times and moments."""
    choice = random.Random(seed)
    of = tight_problem(choice)
    for num_outputs in {0, of.order.num_outputs, choice.randint(0, of.order.num_outputs)}:
        placement = of.evaluate(Placement(), num_outputs=num_outputs).placement
        if placement.gpu_units is None:
            assert of.offload(num_outputs).exposed == NOT_EXPOSED
            continue
        swapped, down, up = of.order.keys(num_outputs), 0, 0
        for number in range(placement.gpu_units_from or 0):
            layer = number // of.workload.num_micro_batches
            costs = of.profile.profiles[of.profile.layers[layer]]
            candidates = [each for each in costs.candidates if each.key in swapped.get(layer + 1, ())]
            tensors = [costs.input_bytes, *(each.num_bytes for each in candidates)]
            seconds = costs.flops_forward / of.hardware.gpu.flops_per_second
            made_seconds = seconds * sum(each.flops for each in candidates) / max(1, costs.flops_forward)
            down += max(0, int(2 * sum(tensors) - placement.gpu_units.forward_bytes - made_seconds * LINK_RATE))
            moments = placement.gpu_units.moments[layer + 1]
            rests = {rest.after: rest.flops / max(1, 2 * costs.flops_forward) * 2 * seconds for rest in costs.rests}
            up += exposed_unit_bytes(
                tensors,
                [placement.gpu_units.ahead_bytes, *(moment.num_bytes for moment in moments)],
                [rests[moment.parameter] for moment in moments],
                bytes_per_second=LINK_RATE,
            )
        assert of.offload(num_outputs).exposed == (down, up)


def tight_problem(choice: random.Random) -> Problem:
    """Layers of one or two kinds, on a GPU that may not have memory for two units."""
    spec = gpt(num_layers=choice.randint(1, 5), hidden_size=256, vocab_size=2000)
    workload = replace(WORKLOAD, num_micro_batches=choice.choice([1, 3]))
    profile = by_chance(choice, num_layers=spec.num_layers, most_kib=10_000, most_flops=10**10)
    memory, order = GpuMemory(spec, workload, profile), SwapOrder(profile)
    largest = order.largest_unit(order.num_outputs)
    least, most = memory.needed_bytes(largest, units=LEAST_UNITS), memory.needed_bytes(largest, window_bytes=1 << 40)
    return Problem(
        spec=spec,
        workload=workload,
        profile=profile,
        hardware=machine(flops_per_second=1e12),
        decisions=Decisions(
            holds_gradients=False, num_slots=2, host_limit_bytes=1 << 40, device_limit_bytes=choice.randint(least, most)
        ),
        process_bytes=0,
    )


def test_two_layers_of_a_kind_may_differ_in_what_is_swapped() -> None:
    choice = random.Random(7)
    profile = by_chance(choice, num_layers=6)
    order = SwapOrder(profile)
    for num_outputs in range(order.num_outputs + 1):
        for layer, number in enumerate(order.swapped_in_layers(num_outputs)):
            costs = profile.profiles[profile.layers[layer]]
            taken = costs.candidates[:number]
            assert {each.key for each in taken} == order.keys(num_outputs).get(layer + 1, frozenset())
            sizes = costs.input_bytes + sum(each.num_bytes for each in taken)
            assert sizes == order.unit_bytes(num_outputs)[layer]


def test_units_that_stay_on_the_gpu_do_not_move() -> None:
    """The others go up when the one before is done: here nothing of them may do so earlier."""
    profile = by_chance(random.Random(3), num_layers=3)
    numbers = [len(profile.profiles[kind].candidates) for kind in profile.layers]
    units = UnitsOnGpu(forward_bytes=0, ahead_bytes=0, moments=dict.fromkeys((1, 2, 3), ()))
    sizes = SwapOrder(profile).unit_bytes(sum(numbers))
    for units_from in range(7):
        found = exposed_units(numbers, profile, units, machine(), num_micro_batches=2, units_from=units_from)
        assert found.up_bytes == sum(sizes[number // 2] for number in range(units_from))
