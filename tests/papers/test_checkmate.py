"""The mixed-integer program against brute force, on graphs of up to ten operators."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.papers.prefix import SwappableOperator
from ratel_cli.papers.rivals import store_within
from tests.tiers import examples

pytest.importorskip("scipy")


def saved_flops(stored: tuple[SwappableOperator, ...]) -> int:
    return sum(operator.flops * len(operator.blocks) for operator in stored)


def stored_bytes(stored: tuple[SwappableOperator, ...]) -> int:
    return sum(operator.num_bytes * len(operator.blocks) for operator in stored)


def brute_force(operators: list[SwappableOperator], available_bytes: int) -> int:
    """The most FLOPs that may be saved."""
    best = 0
    for counts in product(*(range(len(operator.blocks) + 1) for operator in operators)):
        pairs = list(zip(operators, counts, strict=True))
        if sum(operator.num_bytes * count for operator, count in pairs) <= available_bytes:
            best = max(best, sum(operator.flops * count for operator, count in pairs))
    return best


def operators_of(*sizes: tuple[int, int, int]) -> list[SwappableOperator]:
    """Each is bytes, FLOPs and the number of blocks."""
    return [
        SwappableOperator(name=f"operator {number}", blocks=tuple(range(num_blocks)), num_bytes=num_bytes, flops=flops)
        for number, (num_bytes, flops, num_blocks) in enumerate(sizes)
    ]


SIZES = st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.just(1))
ALIKE = st.tuples(st.integers(1, 100), st.integers(0, 100), st.integers(1, 4))


@given(sizes=st.lists(SIZES, max_size=10) | st.lists(ALIKE, max_size=4), share=st.floats(0, 1), unit=st.integers(0, 30))
@examples(300)
def test_it_is_exact(sizes: list[tuple[int, int, int]], share: float, unit: int) -> None:
    operators = operators_of(*((num_bytes << unit, flops << 30, blocks) for num_bytes, flops, blocks in sizes))
    available_bytes = int(share * stored_bytes(tuple(operators)))
    stored = store_within(operators, available_bytes=available_bytes)
    assert stored_bytes(stored) <= available_bytes
    assert saved_flops(stored) == brute_force(operators, available_bytes)


def test_it_packs_what_a_greedy_order_would_not() -> None:
    """6 + 6 bytes save more than the 7 with the greatest benefit, which would leave no memory for a 6."""
    stored = store_within(operators_of((7, 14, 1), (6, 9, 2)), available_bytes=12)
    assert [(operator.name, operator.blocks) for operator in stored] == [("operator 1", (0, 1))]


def test_with_memory_for_all_it_stores_all_that_costs_flops() -> None:
    operators = operators_of((7, 14, 3), (6, 0, 2), (5, 1, 1))
    assert store_within(operators, available_bytes=10**15) == (operators[0], operators[2])


def test_without_room_it_stores_nothing() -> None:
    assert store_within(operators_of((7, 14, 3)), available_bytes=0) == ()
    assert store_within(operators_of((7, 0, 3)), available_bytes=100) == ()
    assert store_within([], available_bytes=100) == ()
