"""The order of uses, and how long what they need stays, against a pass that is walked by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import lay_out_block
from ratel_cli.schedule.lifetimes import overlap, partial_sum_lifetimes, upload_lifetimes, weight_lifetimes
from ratel_cli.schedule.uses import Use, forward_uses, step_uses
from tests.planning.shapes import gpt
from tests.tiers import examples


def sharing() -> ModelSpec:
    """Four layers, of which the first and the last two share a block, and the second and the last another one."""
    spec = gpt(num_layers=4)
    shared = [
        lay_out_block(
            index=len(spec.blocks) + number,
            segment=1 + number,
            name=f"shared {number}",
            parameters=[(f"shared.{number}", (64, 32 + number), True)],
            dtype="bfloat16",
            borrowers=borrowers,
        )
        for number, borrowers in enumerate([(3, 4), (4,)])
    ]
    return replace(spec, blocks=(*spec.blocks, *shared))


SPECS = (gpt(num_layers=1), gpt(num_layers=2, tied=True), gpt(num_layers=5), gpt(num_layers=5, tied=True), sharing())


class Walk:
    """A pass that opens one use after another, issues what comes, and shares what is there."""

    def __init__(self, uses: Sequence[Use], ahead: int) -> None:
        issued: dict[int, list[int]] = {}
        users: Counter[int] = Counter()
        sizes = {block.index: block.compute_bytes for use in uses for block in use.segment.bound}
        self.there: list[int] = []
        """Bytes while each use is open."""
        for position, use in enumerate(uses):
            for coming in range(position, min(len(uses), position + 1 + ahead)):
                if coming not in issued:
                    needed = [block.index for block in uses[coming].segment.bound]
                    issued[coming] = [block for block in needed if not users[block]]
                    users.update(needed)
            self.there.append(sum(sizes[block] for block, number in users.items() if number))
            users.subtract([block.index for block in use.segment.bound])
        self.read = [issued[position] for position in range(len(uses))]
        """Blocks that each use reads."""
        assert not any(users.values())


def read_by(uses: Sequence[Use], ahead: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in uses]
    for weights in weight_lifetimes(uses, ahead=ahead):
        found[weights.first].append(weights.of.index)
    return found


def bytes_there(uses: Sequence[Use], ahead: int) -> list[int]:
    taken = ((each.of.compute_bytes, each.issued, each.last) for each in weight_lifetimes(uses, ahead=ahead))
    return overlap(taken, len(uses))


def test_forward_head_backward() -> None:
    assert [(use.segment.index, use.stage) for use in step_uses(gpt(num_layers=2).segments)] == [
        (0, "forward"),
        (1, "forward"),
        (2, "forward"),
        (3, "backward"),
        (2, "backward"),
        (1, "backward"),
        (0, "backward"),
    ]


def test_tokens_are_looked_up_in_the_embedding_alone() -> None:
    uses = step_uses(gpt(num_layers=1, tied=True).segments)
    assert [use.looks_up for use in uses] == [True, False, False, False, True]
    assert [[block.index for block in use.segment.bound] for use in uses] == [[0], [1], [2, 0], [1], [0]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{len(spec.blocks)} blocks")
@pytest.mark.parametrize("ahead", range(7))
def test_weights_are_read_and_stay_as_a_walk_has_them(spec: ModelSpec, ahead: int) -> None:
    for uses in (step_uses(spec.segments), forward_uses(spec.segments)):
        walked = Walk(uses, ahead)
        assert read_by(uses, ahead) == walked.read
        assert bytes_there(uses, ahead) == walked.there


def test_with_two_segments_ahead_the_last_layer_is_read_once() -> None:
    uses = step_uses(gpt(num_layers=3).segments)
    assert [bool(read_by(uses, ahead)[5]) for ahead in (0, 1, 2)] == [True, True, False]


def test_each_lifetime_is_issued_so_far_ahead_and_ends_with_its_last_use() -> None:
    uses = step_uses(sharing().segments)
    for weights in weight_lifetimes(uses, ahead=2):
        users = [position for position, use in enumerate(uses) if weights.of in use.segment.bound]
        own = [position for position in users if weights.first <= position <= weights.last]
        assert weights.issued == weights.first - 2
        assert own[0] == weights.first and own[-1] == weights.last
        assert all(later - earlier <= 2 for earlier, later in pairwise(own))


@pytest.mark.parametrize("staying", [(), (3,), (1, 2, 3)])
def test_what_stays_on_a_gpu_goes_up_once(staying: Collection[int]) -> None:
    uses = step_uses(gpt(num_layers=3).segments)
    assert [(each.of.index, each.first, each.last) for each in upload_lifetimes(uses, staying=staying)] == sorted(
        [
            (use.segment.index, position, 8 - position if use.segment.index in staying else position)
            for position, use in enumerate(uses)
            if not (use.segment.index in staying and position > 4)
        ],
        key=lambda found: found[1],
    )


def test_the_gradient_of_a_shared_block_stays_from_its_last_segment_to_its_first() -> None:
    spec = sharing()
    uses = step_uses(spec.segments)
    last = len(uses) - 1
    found = {each.of.index: (each.first, each.last) for each in partial_sum_lifetimes(uses)}
    assert found == {
        block.index: (last - max(block.users), last - min(block.users))
        for block in spec.blocks
        if block.has_partial_sums
    }
    assert len(found) == 2
    assert not partial_sum_lifetimes(forward_uses(spec.segments))


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 9), st.integers(-3, 9)), max_size=8), st.integers(0, 6))
def test_an_overlap_is_what_is_counted_position_by_position(taken: list[tuple[int, int, int]], number: int) -> None:
    counted = [sum(size for size, first, last in taken if first <= position <= last) for position in range(number)]
    assert overlap(random.Random(0).sample(taken, len(taken)), number) == counted
