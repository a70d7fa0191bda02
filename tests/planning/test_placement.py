"""The order of uses, and which of them find their weights in memory, against a reader that is walked by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.placement import Placement, blocks_read, step_schedule, tensors_ahead, window_bytes
from tests.planning.shapes import gpt


def order(spec: ModelSpec) -> list[tuple[int, str]]:
    return [(use.segment.index, use.stage) for use in step_schedule(spec)]


def walk(uses: list[list[int]], prefetch_blocks: int) -> list[list[int]]:
    """For each use, which of its blocks it reads: open one after another, issue what comes, share what is there."""
    read: dict[int, list[int]] = {}
    users: Counter[int] = Counter()
    for position, blocks in enumerate(uses):
        for coming in range(position, min(len(uses), position + 1 + prefetch_blocks)):
            if coming not in read:
                read[coming] = [block for block in uses[coming] if not users[block]]
                users.update(uses[coming])
        users.subtract(blocks)
    return [read[position] for position in range(len(uses))]


def test_forward_head_backward() -> None:
    assert order(gpt(num_layers=2)) == [
        (0, "forward"),
        (1, "forward"),
        (2, "forward"),
        (3, "backward"),
        (2, "backward"),
        (1, "backward"),
        (0, "backward"),
    ]


def test_a_tied_embedding_is_used_with_the_head() -> None:
    uses = step_schedule(gpt(num_layers=1, tied=True))
    assert [[block.index for block in use.segment.bound] for use in uses] == [[0], [1], [2, 0], [1], [0]]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("prefetch_blocks", range(7))
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_still_open_is_shared(num_layers: int, prefetch_blocks: int, tied: bool) -> None:
    spec = gpt(num_layers=num_layers, tied=tied)
    uses, placement = step_schedule(spec), Placement(prefetch_blocks=prefetch_blocks)
    reads = walk([[block.index for block in use.segment.bound] for use in uses], prefetch_blocks)
    found = (blocks_read(uses, position, placement) for position in range(len(uses)))
    assert [[block.index for block in blocks] for blocks in found] == reads


def test_with_two_blocks_ahead_the_last_layer_is_read_once() -> None:
    uses = step_schedule(gpt(num_layers=3))
    assert [bool(blocks_read(uses, 5, Placement(prefetch_blocks=ahead))) for ahead in (0, 1, 2)] == [True, True, False]


def test_what_is_resident_is_never_read() -> None:
    uses = step_schedule(gpt(num_layers=3))
    placement = Placement(resident_weights=frozenset({0, 4}))
    read = [use.segment.index for position, use in enumerate(uses) if blocks_read(uses, position, placement)]
    assert read == [1, 2, 3, 3, 2, 1]


def test_a_window_holds_each_block_once_and_no_resident_one() -> None:
    spec = gpt(num_layers=3)
    uses, (embedding, layer, _, _, head) = step_schedule(spec), [block.num_elements for block in spec.blocks]

    def window(position: int, ahead: int, resident: frozenset[int] = frozenset()) -> int:
        return window_bytes(uses, position, Placement(prefetch_blocks=ahead, resident_weights=resident))

    assert window(0, 0) == 2 * embedding
    assert window(0, 2) == 2 * (embedding + 2 * layer)
    assert window(3, 2) == 2 * (layer + head)
    assert window(3, 2, frozenset({3})) == 2 * head
    assert window(4, 2) == 2 * (head + 2 * layer)
    assert window(8, 2) == 0 + window(8, 0)


@pytest.mark.parametrize(
    ("most_bytes", "taken", "wanted"),
    [
        (0, (), []),
        (2, (), []),
        (3, (), [0]),
        (4, (), [0]),
        (9, (), [2]),
        (12, (), [2, 0]),
        (15, (), [2, 1]),
        (18, (), [2, 1, 0]),
        (1 << 40, (), [2, 1, 0]),
        (15, (2, 0), []),
        (18, (2, 0), [1]),
        (1, (2,), []),
    ],
)
def test_the_largest_tensors_that_fit_go_up_first(most_bytes: int, taken: Sequence[int], wanted: list[int]) -> None:
    assert tensors_ahead([3, 6, 9], most_bytes, taken=taken) == wanted


def test_tensors_of_one_size_go_up_in_their_order() -> None:
    assert tensors_ahead([2, 2, 2], 4) == [0, 1]
