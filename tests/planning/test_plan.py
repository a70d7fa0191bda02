"""The plan: its parts fit together, it refuses what does not fit, and its JSON says what users were promised."""

from __future__ import annotations

import json

import pytest

from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.capacity import host_memory
from ratel_cli.planning.choose import Activations
from ratel_cli.planning.costs import forward_flops, overlapped_step, recomputed_flops
from ratel_cli.planning.placement import Overlap, Placement
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.traffic import step_traffic
from ratel_cli.units import GIB, MIB
from tests.planning.shapes import BFLOAT16, WORKLOAD, gpt, machine

SPEC = gpt(num_layers=6, hidden_size=1024, vocab_size=1000)
ELEMENTS = [block.num_elements for block in SPEC.blocks]
ROOMY, TIGHT = 8 * GIB, 500 * MIB
"""Under the second, some gradients are held in memory and some are not."""


def plan(
    *,
    limit_bytes: int = GIB,
    holds_gradients: bool = False,
    num_slots: int = 2,
    activations: Activations = "auto",
    overlap: Overlap = "optimized",
) -> Plan:
    decisions = Decisions(
        holds_gradients=holds_gradients,
        num_slots=num_slots,
        host_limit_bytes=limit_bytes,
        activations=activations,
        overlap=overlap,
    )
    return make_plan(SPEC, BFLOAT16, WORKLOAD, decisions, machine(), process_bytes=200 * MIB)


@pytest.mark.parametrize("overlap", ["optimized", "naive", "separate"])
@pytest.mark.parametrize("holds_gradients", [False, True])
@pytest.mark.parametrize("limit_bytes", [TIGHT, GIB, ROOMY])
def test_all_parts_are_those_of_its_placement(overlap: Overlap, holds_gradients: bool, limit_bytes: int) -> None:
    made = plan(overlap=overlap, holds_gradients=holds_gradients, limit_bytes=limit_bytes)
    memory, spilled_blocks = host_memory(
        SPEC,
        BFLOAT16,
        WORKLOAD,
        made.placement,
        holds_gradients=holds_gradients,
        process_bytes=200 * MIB,
        limit_bytes=limit_bytes,
        overlap=overlap,
    )
    assert (made.memory, made.spilled_blocks) == (memory, spilled_blocks)
    assert made.memory.total <= limit_bytes
    assert made.traffic == step_traffic(
        SPEC,
        BFLOAT16,
        made.placement,
        holds_gradients=holds_gradients,
        spilled_blocks=spilled_blocks,
        overlap=overlap,
    )
    assert made.flops_forward == forward_flops(SPEC, WORKLOAD)
    assert made.flops_recomputed == recomputed_flops(SPEC, BFLOAT16, WORKLOAD, made.placement)
    assert made.time == overlapped_step(
        SPEC,
        WORKLOAD,
        made.placement,
        made.traffic,
        machine(),
        flops_recomputed=made.flops_recomputed,
        holds_gradients=holds_gradients,
        overlap=overlap,
    )


def test_without_held_gradients_nothing_is_spilled() -> None:
    made = plan(limit_bytes=TIGHT)
    assert (made.spilled_blocks, made.spilled_bytes, made.memory.held_gradients) == (0, 0, 0)
    assert made.held_in_memory_bytes is None
    assert made.nvme_bytes == 2 * 12 * sum(ELEMENTS)


def test_held_gradients_that_fit_have_no_limit() -> None:
    made = plan(holds_gradients=True)
    assert made.held_in_memory_bytes is None
    assert made.memory.held_gradients == 2 * sum(ELEMENTS)


@pytest.mark.parametrize(("holds_gradients", "overlap"), [(True, "optimized"), (False, "separate")])
def test_the_limit_on_held_gradients_is_what_stays_in_memory(holds_gradients: bool, overlap: Overlap) -> None:
    made = plan(holds_gradients=holds_gradients, overlap=overlap, limit_bytes=TIGHT, num_slots=3)
    assert 0 < made.spilled_blocks < len(ELEMENTS)
    assert made.spilled_bytes == 2 * sum(ELEMENTS[: made.spilled_blocks])
    assert made.held_in_memory_bytes == 2 * sum(ELEMENTS[made.spilled_blocks :])
    assert made.nvme_bytes == 3 * 12 * sum(ELEMENTS) + made.spilled_bytes
    assert made.placement == Placement(
        prefetch_blocks=made.placement.prefetch_blocks, pending_updates=made.placement.pending_updates
    )


def test_one_slot_is_written_in_place_and_never_before_all_gradients_are_there() -> None:
    made = plan(holds_gradients=True, num_slots=1, limit_bytes=ROOMY)
    assert made.decisions.in_place
    assert made.placement.deferred == frozenset()
    assert (made.traffic.backward_written_bytes, made.time.backward.optimizer) == (0, 0)
    assert not plan().decisions.in_place
    with pytest.raises(AssertionError, match="cannot be taken back"):
        plan(num_slots=1)


def test_with_room_nothing_is_recomputed_unless_told_so() -> None:
    assert plan(limit_bytes=ROOMY).flops_recomputed == 0
    assert plan(limit_bytes=ROOMY, activations="recompute").flops_recomputed > 0


@pytest.mark.parametrize("activations", ["auto", "keep", "recompute"])
def test_what_does_not_fit_has_no_plan(activations: Activations) -> None:
    with pytest.raises(DoesNotFit, match="host memory: need"):
        plan(limit_bytes=200 * MIB, activations=activations)


def test_json_has_the_promised_keys() -> None:
    made = plan(holds_gradients=True, limit_bytes=TIGHT)
    found = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert found["format_version"] == 1
    assert found["model"] == {
        "name": "gpt",
        "num_parameters": SPEC.num_parameters,
        "num_blocks": 8,
        "flops_forward": made.flops_forward,
    }
    stages = ("forward", "backward", "update")
    assert set(found["time"]) == {*stages, "forward_seconds", "backward_seconds", "step_seconds", "bottleneck"}
    assert all(set(found["time"][stage]) == {"compute", "nvme", "optimizer"} for stage in stages)
    assert found["time"]["step_seconds"] == made.time.total
    assert found["time"]["forward_seconds"] + found["time"]["backward_seconds"] == pytest.approx(made.time.total)
    assert found["traffic"] == {
        "nvme_read_bytes": made.traffic.read_bytes,
        "nvme_written_bytes": made.traffic.written_bytes,
        "nvme_first_read_bytes": 0,
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
    assert found["activations"]["recompute_flops"] == made.flops_recomputed


def test_json_lists_what_stays_in_order() -> None:
    made = plan(limit_bytes=ROOMY)
    found = json.loads(json.dumps(made.to_json()))
    assert found["placement"] == {
        "prefetch_blocks": 2,
        "pending_updates": 2,
        "resident_weights": list(range(8)),
        "resident_states": list(range(8)),
        "activation_bytes": made.placement.activation_bytes,
        "deferred": sorted(made.placement.deferred),
    }
    assert found["activations"]["kept_bytes"] == made.placement.activation_bytes == made.memory.activations > 0
    assert found["traffic"]["nvme_first_read_bytes"] == made.memory.resident == 12 * sum(ELEMENTS)
