"""The plan: its parts fit together, it refuses what does not fit, and its JSON says what users were promised."""

from __future__ import annotations

import json

import pytest

from ratel_cli.errors import DoesNotFit
from ratel_cli.planning.capacity import host_memory
from ratel_cli.planning.costs import forward_flops, layer_flops
from ratel_cli.planning.plan import Decisions, Plan, make_plan
from ratel_cli.planning.traffic import step_traffic
from ratel_cli.units import GIB, MIB
from tests.planning.shapes import BFLOAT16, WORKLOAD, gpt, machine

SPEC = gpt(num_layers=6, hidden_size=1024, vocab_size=1000)


def plan(*, limit_bytes: int = GIB, holds_gradients: bool = False, num_slots: int = 2) -> Plan:
    decisions = Decisions(holds_gradients=holds_gradients, num_slots=num_slots, host_limit_bytes=limit_bytes)
    return make_plan(SPEC, BFLOAT16, WORKLOAD, decisions, machine(), process_bytes=200 * MIB)


def tight() -> int:
    """A limit under which some gradients are held in memory and some are not."""
    roomy, none = plan(holds_gradients=True), plan()
    return (roomy.memory.total + none.memory.total) // 2


def test_without_held_gradients_nothing_is_spilled() -> None:
    made = plan()
    assert (made.spilled_blocks, made.spilled_bytes, made.memory.held_gradients) == (0, 0, 0)
    assert made.held_in_memory_bytes is None
    assert made.nvme_bytes == 2 * 12 * sum(block.num_elements for block in SPEC.blocks)
    assert made.traffic == step_traffic(SPEC, BFLOAT16, holds_gradients=False)
    assert (made.flops_forward, made.flops_recomputed) == (forward_flops(SPEC, WORKLOAD), layer_flops(SPEC, WORKLOAD))


def test_held_gradients_that_fit_have_no_limit() -> None:
    made = plan(holds_gradients=True)
    assert made.held_in_memory_bytes is None
    assert made.memory.held_gradients == 2 * sum(block.num_elements for block in SPEC.blocks)


def test_the_limit_on_held_gradients_is_what_stays_in_memory() -> None:
    made = plan(holds_gradients=True, limit_bytes=tight(), num_slots=3)
    spilled = SPEC.blocks[: made.spilled_blocks]
    assert 0 < made.spilled_blocks < len(SPEC.blocks)
    assert made.spilled_bytes == 2 * sum(block.num_elements for block in spilled)
    assert made.held_in_memory_bytes == 2 * sum(block.num_elements for block in SPEC.blocks[made.spilled_blocks :])
    assert made.nvme_bytes == 3 * 12 * sum(block.num_elements for block in SPEC.blocks) + made.spilled_bytes
    assert made.traffic == step_traffic(SPEC, BFLOAT16, holds_gradients=True, spilled_blocks=made.spilled_blocks)
    assert made.memory.total <= tight()
    expected = host_memory(SPEC, BFLOAT16, WORKLOAD, holds_gradients=True, process_bytes=200 * MIB, limit_bytes=tight())
    assert (made.memory, made.spilled_blocks) == expected


def test_what_does_not_fit_has_no_plan() -> None:
    with pytest.raises(DoesNotFit, match="host memory: need"):
        plan(limit_bytes=200 * MIB)


def test_json_has_the_promised_keys() -> None:
    made = plan(holds_gradients=True, limit_bytes=tight())
    found = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert found["format_version"] == 1
    assert found["model"] == {
        "name": "gpt",
        "num_parameters": SPEC.num_parameters,
        "num_blocks": 8,
        "flops_forward": made.flops_forward,
    }
    assert set(found["time"]) == {
        "forward",
        "backward",
        "forward_seconds",
        "backward_seconds",
        "step_seconds",
        "bottleneck",
    }
    assert found["time"]["step_seconds"] == made.time.total
    assert sum(found["time"]["forward"].values()) == pytest.approx(found["time"]["forward_seconds"])
    assert sum(found["time"]["backward"].values()) == pytest.approx(found["time"]["backward_seconds"])
    assert found["traffic"] == {
        "nvme_read_bytes": made.traffic.read_bytes,
        "nvme_written_bytes": made.traffic.written_bytes,
    }
    memory = found["memory"]
    assert (memory["host_bytes"], memory["nvme_bytes"]) == (made.memory.total, made.nvme_bytes)
    assert (memory["fits"], memory["shortfall_bytes"]) == (True, 0)
    assert found["wear"]["tb_written_per_step"] == made.traffic.written_bytes / 1e12
    throughput = found["throughput"]
    assert throughput["tokens_per_second"] == WORKLOAD.tokens / made.time.total
    assert throughput["tflops_model"] == pytest.approx(3 * made.flops_forward / made.time.total / 1e12)
    assert throughput["tflops_hardware"] > throughput["tflops_model"]
    assert found["activations"]["recompute_flops"] == made.flops_recomputed
