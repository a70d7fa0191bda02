"""What forward leaves behind, against the papers' shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.model.spec import lay_out_block
from ratel_cli.planning.activations import all_activation_bytes, block_activation_bytes, block_input_bytes
from ratel_cli.planning.traffic import StateBytes
from tests.planning.shapes import BFLOAT16, FLOAT32, gpt


@pytest.mark.parametrize(("state", "bytes_per_element"), [(BFLOAT16, 2), (FLOAT32, 4)])
@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_a_gpt_leaves_24_elements_per_token_and_hidden_size(
    state: StateBytes, bytes_per_element: int, tokens: int
) -> None:
    """qkv 3, projection 1, fc1 4, fc2 4, and 12 for all vectors; the papers count 17."""
    spec = gpt(num_layers=5, hidden_size=96)
    one = 24 * 96 * tokens * bytes_per_element
    assert block_activation_bytes(spec, spec.blocks[1], state, tokens=tokens) == one
    assert all_activation_bytes(spec, state, tokens=tokens) == 5 * one


def test_embedding_and_head_leave_vectors_alone() -> None:
    spec = gpt(hidden_size=96)
    for block in (spec.blocks[0], spec.blocks[-1]):
        assert block_activation_bytes(spec, block, BFLOAT16, tokens=7) == 12 * 96 * 7 * 2


def test_of_many_experts_only_those_count_that_a_token_visits() -> None:
    def left(num_experts: int) -> int:
        layer = lay_out_block(
            index=1, kind="layer", name="layer", parameters=[("experts", (num_experts, 2048, 512), True)]
        )
        plain = gpt(num_layers=1, hidden_size=512, vocab_size=16)
        spec = replace(plain, blocks=(plain.blocks[0], layer, plain.blocks[2]))
        return all_activation_bytes(spec, BFLOAT16, tokens=512)

    assert left(8) == left(128) > left(4)


def test_block_inputs_are_one_for_each_layer_and_two_on_the_way() -> None:
    found = block_input_bytes(gpt(num_layers=4), BFLOAT16, tokens=300, sequence_len=100)
    assert found == 6 * 300 * 64 * 2 + 300 * 100
