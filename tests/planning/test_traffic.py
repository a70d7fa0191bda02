"""What a step moves over NVMe, against sums written by hand."""

from __future__ import annotations

import pytest

from ratel_cli.planning.traffic import StateBytes, gradient_bytes, step_traffic, store_bytes
from tests.planning.shapes import BFLOAT16, FLOAT16, FLOAT32, gpt

# Elements of the blocks, with the gaps: 512 * 64, then 12 * 64^2 + 2 * 64 up to a multiple of 2048, then 513 * 64.
EMBEDDING, LAYER, HEAD = 32768, 51200, 34816


def test_the_blocks_are_what_the_sums_assume() -> None:
    assert [block.num_elements for block in gpt().blocks] == [EMBEDDING, LAYER, LAYER, LAYER, HEAD]


@pytest.mark.parametrize(
    ("state", "layer", "head"),
    [(BFLOAT16, 26, 24), (FLOAT32, 4 + 4 + 8 + 12, 4 + 8 + 12), (FLOAT16, 2 + 2 + 12 + 14, 2 + 12 + 14)],
)
def test_bytes_per_parameter(state: StateBytes, layer: int, head: int) -> None:
    traffic = step_traffic(gpt(), state, holds_gradients=False)
    assert traffic.read_bytes + traffic.written_bytes == layer * (EMBEDDING + 3 * LAYER) + head * HEAD
    assert traffic.written_bytes == state.record * (EMBEDDING + 3 * LAYER + HEAD)
    assert traffic.forward_read_bytes == state.compute * (EMBEDDING + 3 * LAYER)


@pytest.mark.parametrize("num_layers", [1, 2, 17])
def test_a_layer_more_is_26_bytes_for_each_of_its_parameters(num_layers: int) -> None:
    def moved(spec_layers: int) -> int:
        traffic = step_traffic(gpt(num_layers=spec_layers), BFLOAT16, holds_gradients=False)
        return traffic.read_bytes + traffic.written_bytes

    assert moved(num_layers + 1) - moved(num_layers) == 26 * LAYER


def test_a_tied_embedding_is_read_for_the_head_too() -> None:
    spec = gpt(tied=True)
    traffic = step_traffic(spec, BFLOAT16, holds_gradients=False)
    norm = spec.blocks[-1].num_elements
    assert traffic.read_bytes + traffic.written_bytes == 28 * EMBEDDING + 26 * 3 * LAYER + 24 * norm


def test_held_gradients_cost_a_read_of_the_weights() -> None:
    spec = gpt()
    held, eager = (step_traffic(spec, BFLOAT16, holds_gradients=holds) for holds in (True, False))
    assert held.read_bytes - eager.read_bytes == 2 * (EMBEDDING + 3 * LAYER + HEAD)
    assert held.written_bytes == eager.written_bytes


@pytest.mark.parametrize(
    ("num_blocks", "elements"),
    [(0, 0), (1, EMBEDDING), (2, EMBEDDING + LAYER), (5, EMBEDDING + 3 * LAYER + HEAD)],
)
def test_spilled_gradients_go_and_come_back(num_blocks: int, elements: int) -> None:
    spec = gpt()
    spilled = step_traffic(spec, BFLOAT16, holds_gradients=True, spilled_blocks=num_blocks)
    none = step_traffic(spec, BFLOAT16, holds_gradients=True)
    assert gradient_bytes(spec, BFLOAT16, num_blocks=num_blocks) == 2 * elements
    assert spilled.read_bytes - none.read_bytes == spilled.written_bytes - none.written_bytes == 2 * elements


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_store_holds_every_record_in_every_slot(num_slots: int) -> None:
    assert store_bytes(gpt(), FLOAT16, num_slots=num_slots) == num_slots * 14 * (EMBEDDING + 3 * LAYER + HEAD)
