"""The plan: its parts fit together, it rejects what does not fit, and its JSON says what users were promised."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.duties.updates import checksum_bytes
from ratel_cli.planning.memory.capacity import StepMemory
from ratel_cli.planning.memory.gpu_memory import GpuMemory
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import LEAST_UNITS, ActivationPolicy, Overlap
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.plan import Plan, make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.recorded_plan import plan_json
from ratel_cli.planning.time.costs import StepCosts, compute_seconds
from ratel_cli.units import GIB, MIB
from tests.hardware.profiles import WITH_GPU
from tests.planning.profiles import candidate, estimated, layer, model
from tests.planning.shapes import WORKLOAD, gpt, machine, unit_of
from tests.planning.steps import planned_step, step_traffic

SPEC = gpt(num_layers=6, hidden_size=1024, vocab_size=1000)
PROFILE = estimated(SPEC)
ELEMENTS = [block.num_elements for block in SPEC.blocks]
TABLE = checksum_bytes(SPEC)
INPUT_BYTES = WORKLOAD.tokens * 1024 * 2 * 6
GRADIENTS = [WORKLOAD.tokens * SPEC.hidden_size, *ELEMENTS[1:]]
"""Of the embedding, a row for each token leaves the GPU."""
ROOMY, TIGHT = 8 * GIB, 532 * MIB
"""Under the second, some gradients are held in memory and some are not."""


def plan(
    *,
    limit_bytes: int = GIB,
    profile: ModelProfile = PROFILE,
    hardware: HardwareProfile | None = None,
    **decisions: object,
) -> Plan:
    usual = Decisions(holds_gradients=False, num_slots=2, host_limit_bytes=limit_bytes)
    return make_plan(
        Problem(
            spec=SPEC,
            workload=WORKLOAD,
            profile=profile,
            hardware=hardware or machine(),
            decisions=replace(usual, **decisions),  # type: ignore[arg-type]
            process_bytes=200 * MIB,
        )
    )


@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
@pytest.mark.parametrize("holds_gradients", [False, True])
@pytest.mark.parametrize("limit_bytes", [TIGHT, GIB, ROOMY])
def test_all_parts_are_those_of_its_placement(overlap: Overlap, holds_gradients: bool, limit_bytes: int) -> None:
    made = plan(overlap=overlap, holds_gradients=holds_gradients, limit_bytes=limit_bytes)
    step = planned_step(SPEC, holds_gradients=holds_gradients, overlap=overlap, on_gpu=True, has_sums=False)
    steps = StepMemory(step, process_bytes=200 * MIB, gpu=GpuMemory(SPEC, WORKLOAD, PROFILE))
    memory, spilled_segments = steps.fit(made.placement, made.offloaded, limit_bytes=limit_bytes)
    assert (made.memory, made.spilled_segments) == (memory, spilled_segments)
    assert made.memory.total <= limit_bytes
    assert made.traffic == step_traffic(
        SPEC,
        made.placement,
        made.offloaded,
        holds_gradients=holds_gradients,
        spilled_segments=spilled_segments,
        overlap=overlap,
    )
    profile = PROFILE.profiles[0]
    assert made.flops_forward == 3 * (6 * profile.flops_forward + PROFILE.flops_head)
    assert made.flops_recomputed == 3 * (6 * profile.flops_recomputed - made.swap.flops)
    assert made.time == StepCosts(
        step=step, hardware=machine(), compute=compute_seconds(PROFILE, WORKLOAD, machine())
    ).time(made.placement, made.traffic, made.offloaded, not_recomputed_seconds=3 * made.swap.flops / 1e12)


def test_without_held_gradients_nothing_is_spilled() -> None:
    made = plan(limit_bytes=TIGHT)
    assert (made.spilled_segments, made.spilled_bytes, made.memory.held_gradients) == (0, 0, 0)
    assert made.held_in_memory_bytes is None
    assert made.nvme_bytes == 2 * (12 * sum(ELEMENTS) + TABLE) + made.offloaded.written_bytes


def test_held_gradients_that_fit_have_no_limit() -> None:
    made = plan(holds_gradients=True)
    assert made.held_in_memory_bytes is None
    assert made.memory.held_gradients == 2 * sum(GRADIENTS)


@pytest.mark.parametrize(("holds_gradients", "overlap"), [(True, "optimized"), (False, "separate")])
def test_the_limit_on_held_gradients_is_what_stays_in_memory(holds_gradients: bool, overlap: Overlap) -> None:
    made = plan(holds_gradients=holds_gradients, overlap=overlap, limit_bytes=516 * MIB, num_slots=3)
    assert 0 < made.spilled_segments < len(ELEMENTS)
    assert made.spilled_bytes == 2 * sum(GRADIENTS[: made.spilled_segments])
    assert made.held_in_memory_bytes == 2 * sum(GRADIENTS[made.spilled_segments :])
    assert made.nvme_bytes == 3 * (12 * sum(ELEMENTS) + TABLE) + made.spilled_bytes + made.offloaded.written_bytes
    assert (made.placement.resident_weights, made.placement.resident_states) == (frozenset(), frozenset())


def test_one_slot_is_written_in_place_and_never_before_all_gradients_are_there() -> None:
    made = plan(holds_gradients=True, num_slots=1, limit_bytes=ROOMY)
    assert made.decisions.overwrites
    assert made.placement.deferred == frozenset()
    assert (made.traffic.backward_written_bytes, made.time.backward.optimizer) == (0, 0)
    assert not plan().decisions.overwrites
    with pytest.raises(AssertionError, match="cannot be taken back"):
        plan(num_slots=1)


def test_what_is_swapped_is_listed_by_benefit_and_adds_up() -> None:
    made = plan(limit_bytes=ROOMY, activations="swap_all")
    assert [(each.operator, each.blocks) for each in made.swapped] == [
        (item.operator, 6) for item in PROFILE.profiles[0].candidates
    ]
    assert [each.benefit for each in made.swapped] == sorted((each.benefit for each in made.swapped), reverse=True)
    assert sum(each.bytes for each in made.swapped) + INPUT_BYTES == made.swappable_bytes == made.offloaded.total_bytes
    assert sum(each.flops for each in made.swapped) == 3 * made.swap.flops
    assert {each.seconds for each in made.swapped} == {None}
    assert (made.flops_recomputed, made.case) == (0, 2)


def test_part_of_an_operators_layers_may_be_swapped() -> None:
    made = plan(limit_bytes=ROOMY, activations=0.4)
    assert 0 < made.swapped[-1].blocks < 6
    assert sum(each.bytes for each in made.swapped) == 3 * made.swap.num_bytes
    assert (made.case, plan(activations="recompute").case) == (3, 1)


def test_measured_seconds_are_told() -> None:
    timed = replace(
        layer(candidate(operator="mlp mm", num_bytes=100, flops=1000, seconds=0.5)),
        forward_seconds=1.0,
        recomputed_seconds=0.5,
        backward_seconds=2.0,
    )
    profile = replace(model(timed, layers=(0,) * 6), source="recorded")
    made = plan(limit_bytes=ROOMY, profile=profile)
    (swapped,) = made.swapped
    assert (swapped.operator, swapped.seconds, swapped.benefit) == ("mlp mm", 3 * 6 * 0.5, 10.0)
    assert made.time.forward.compute + made.time.backward.compute == pytest.approx(3 * 6 * 3.0)


def test_the_curve_is_told_in_order() -> None:
    made = plan(limit_bytes=ROOMY)
    sizes = [num_bytes for num_bytes, _ in made.curve]
    assert sizes[0] == INPUT_BYTES == made.inter_block_bytes
    assert sizes == sorted(sizes)
    assert sizes[-1] == made.swappable_bytes
    assert (made.offloaded.total_bytes, made.time.total) in made.curve


@pytest.mark.parametrize("activations", ["auto", "keep", "recompute"])
def test_what_does_not_fit_has_no_plan(activations: ActivationPolicy) -> None:
    with pytest.raises(DoesNotFit, match="RAM: a step needs"):
        plan(limit_bytes=200 * MIB, activations=activations)


def test_what_the_device_has_no_room_for_has_no_plan() -> None:
    unit_bytes = PROFILE.profiles[0].input_bytes
    needed = GpuMemory(SPEC, WORKLOAD, PROFILE).needed_bytes(unit_of(unit_bytes), units=LEAST_UNITS)
    assert plan(device_limit_bytes=needed).memory.device == needed
    with pytest.raises(DoesNotFit, match="GPU memory: one block and its working set need"):
        plan(device_limit_bytes=needed - 1)


@pytest.mark.full
@pytest.mark.parametrize("activations", ["auto", "recompute", "swap_all"])
def test_what_a_gpu_has_to_spare_keeps_the_last_layers(activations: ActivationPolicy) -> None:
    """More GPU memory keeps more of them: never more than fit, never slower, and with less host memory."""
    least: ActivationPolicy = "recompute" if activations == "auto" else activations
    needed = plan(hardware=WITH_GPU, activations=least).memory.device
    before, kept = None, set()
    for spare_bytes in range(0, 300 * MIB, 5 * MIB):
        made = plan(hardware=WITH_GPU, activations=activations, device_limit_bytes=needed + spare_bytes)
        placement = made.placement
        assert made.memory.device <= needed + spare_bytes
        assert placement.gpu_units_from is not None
        if placement.gpu_weights:
            assert placement.gpu_units_from == 1, "units first, all but the one that always goes"
            assert max(placement.gpu_weights) == 6 and len(placement.gpu_weights) == 7 - min(placement.gpu_weights)
        if before is not None and activations != "auto":
            assert made.time.total <= before.time.total
            assert made.memory.activations <= before.memory.activations
            assert made.offloaded.gpu_bytes >= before.offloaded.gpu_bytes
        before = made
        kept.add((placement.gpu_units_from, len(placement.gpu_weights)))
    assert before is not None
    assert before.placement.gpu_weights == frozenset(range(1, 7))
    assert 0 < before.memory.activations == before.offloaded.linked_bytes == before.offloaded.largest_unit.num_bytes
    assert len(kept) > 7


def test_json_has_the_promised_keys() -> None:
    made = plan(holds_gradients=True, limit_bytes=TIGHT)
    found = json.loads(json.dumps(plan_json(made), allow_nan=False))
    assert found["format_version"] == 1
    assert found["model"] == {
        "name": "gpt",
        "num_parameters": SPEC.num_parameters,
        "num_trained_parameters": SPEC.num_parameters,
        "num_blocks": 8,
        "flops_forward": made.flops_forward,
        "flops_backward": 2 * made.flops_forward,
    }
    stages = ("forward", "backward", "update")
    summary = {"forward_seconds", "backward_seconds", "step_seconds", "unclipped_seconds", "bottleneck", "case"}
    assert set(found["time"]) == {*stages, *summary}
    resources = {"compute", "up", "down", "nvme", "optimizer", "network", "memory"}
    assert all(set(found["time"][stage]) == resources for stage in stages)
    assert found["time"]["case"] == made.case
    assert found["time"]["step_seconds"] == made.time.total
    assert found["time"]["forward_seconds"] + found["time"]["backward_seconds"] == pytest.approx(made.time.total)
    assert found["traffic"] == {
        "nvme_read_bytes": made.traffic.read_bytes,
        "nvme_written_bytes": made.traffic.written_bytes,
        "nvme_first_read_bytes": 0,
        "network_sent_bytes": 0,
        "network_received_bytes": 0,
    }
    memory = found["memory"]
    assert (memory["host_bytes"], memory["nvme_bytes"]) == (made.memory.total, made.nvme_bytes)
    assert (memory["fits"], memory["shortfall_bytes"]) == (True, 0)
    assert memory["spilled_gradient_bytes"] == made.spilled_bytes
    assert found["wear"]["tb_written_per_step"] == made.traffic.written_bytes / 1e12
    throughput = found["throughput"]
    assert throughput["tokens_per_second"] == WORKLOAD.tokens / made.time.total
    assert throughput["tflops_model"] == pytest.approx(3 * made.flops_forward / made.time.total / 1e12)
    assert throughput["tflops_hardware"] > throughput["tflops_model"]
    operators = plan_json(plan(limit_bytes=ROOMY, activations="swap_all"))["activations"]
    assert isinstance(operators, dict)
    assert {"operator", "blocks", "bytes", "flops", "benefit"} <= set(operators["swap_set"][0])
    assert found["activations"] | {"swap_set": []} == {
        "total_bytes": made.swappable_bytes,
        "inter_block_bytes": INPUT_BYTES,
        "swapped_bytes": made.offloaded.total_bytes,
        "swapped_to_nvme_bytes": made.offloaded.written_bytes,
        "kept_on_gpu_bytes": 0,
        "swap_set": [],
        "recompute_flops": made.flops_recomputed,
        "source": "analytic",
    }
    assert found["curve"] == [{"swapped_bytes": size, "step_seconds": seconds} for size, seconds in made.curve]
    assert found["cost_model"] == "ratel"


def test_json_lists_what_stays_in_order() -> None:
    made = plan(limit_bytes=ROOMY)
    found = json.loads(json.dumps(plan_json(made)))
    assert found["placement"] == {
        "prefetch_blocks": 2,
        "pending_updates": 4,
        "resident_weights": list(range(8)),
        "resident_states": list(range(8)),
        "spilled_units": 0,
        "kept_from": None,
        "kept_weights": [],
        "embedding_rows": WORKLOAD.tokens,
        "read_in_place": {"wte": "DHA"},
        "window_bytes": 2 * max(ELEMENTS),
        "forward_units_bytes": None,
        "units_ahead_bytes": None,
        "leaving_bytes": 0,
        "holds_sums": True,
        "holds_tied": False,
        "holds_head": True,
        "deferred": sorted(made.placement.deferred),
        "group_elements": 2 << 20,
        "groups_in_flight": 2,
    }
    assert found["activations"]["swapped_bytes"] == made.memory.activations > 0
    assert found["traffic"]["nvme_first_read_bytes"] == made.memory.resident == 12 * sum(ELEMENTS)


def test_a_step_that_is_not_clipped_takes_the_time_of_a_run_without_clipping() -> None:
    clipped, free = (
        plan(holds_gradients=holds, activations="recompute", limit_bytes=1088 * MIB) for holds in (True, False)
    )
    assert clipped.placement == free.placement
    assert clipped.unclipped_seconds == free.time.total < 0.99 * clipped.time.total
    assert free.unclipped_seconds is None
    assert plan_json(clipped)["throughput"] == {
        "tokens_per_second": clipped.tokens_per_second,
        "tflops_model": clipped.tflops_model,
        "tflops_hardware": clipped.tflops_hardware,
        "unclipped_tokens_per_second": free.tokens_per_second,
        "unclipped_tflops_model": free.tflops_model,
    }
    rates = plan_json(free)["throughput"]
    assert isinstance(rates, dict) and rates["unclipped_tokens_per_second"] is None


def test_where_no_block_is_updated_before_the_norm_is_known_all_steps_take_the_same_time() -> None:
    assert plan(holds_gradients=True, overlap="separate").unclipped_seconds is None
    assert plan(holds_gradients=True, num_slots=1).unclipped_seconds is None


@pytest.mark.parametrize("limit_bytes", [700 * MIB, ROOMY], ids=["weights resident", "all resident"])
def test_updates_in_vain_are_written_twice_and_what_was_resident_is_read_again(limit_bytes: int) -> None:
    clipped = plan(holds_gradients=True, activations="recompute", limit_bytes=limit_bytes)
    free = plan(activations="recompute", limit_bytes=limit_bytes)
    costs, placement = clipped.speculation, replace(clipped.placement, deferred=frozenset())
    assert costs is not None
    bare = replace(placement, resident_weights=frozenset(), resident_states=frozenset())
    times = [
        StepCosts(
            step=planned_step(SPEC, holds_gradients=holds_gradients, on_gpu=True),
            hardware=machine(),
            compute=compute_seconds(PROFILE, WORKLOAD, machine()),
        ).time(each, step_traffic(SPEC, each, clipped.offloaded, holds_gradients=holds_gradients), clipped.offloaded)
        for each, holds_gradients in ((placement, True), (placement, False), (bare, True))
    ]
    assert costs.deferred_seconds == clipped.time.total == times[0].total
    assert costs.unclipped_seconds == times[1].total
    late, again = times[1].backward.total - times[0].backward.total, times[2].forward.total - times[0].forward.total
    assert late > 0.0
    assert again > 0.0
    assert costs.vain_seconds == late + again
    assert costs.vain_wear == 12 * sum(ELEMENTS) / clipped.traffic.written_bytes
    assert costs.time_per_wear == 0.0, "wear is ignored where nothing is said about it"
    assert free.speculation is None
