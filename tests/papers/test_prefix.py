"""The search for the swap set, against brute force over prefixes and over all subsets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from time import process_time

import pytest
from hypothesis import given

from ratel_cli.papers.prefix import Equations, Point, SwappableOperator, search
from ratel_cli.papers.ratel import PaperEquations, PaperHardware, PaperShape
from tests.papers.paper_profiles import EQUATIONS, Graph, graphs, paper_equations
from tests.real_time import in_real_time
from tests.tiers import examples

thousand = examples(1000)


def elements(equations: Equations) -> list[tuple[str, int, int, int]]:
    """Name, block, bytes and FLOPs of each that may be swapped."""
    return [
        (operator.name, block, operator.num_bytes, operator.flops)
        for operator in equations.operators
        for block in operator.blocks
    ]


def seconds_with(equations: Equations, chosen: list[tuple[str, int, int, int]]) -> float:
    """Of a step that swaps the chosen elements, all summed anew."""
    swapped_bytes = equations.inter_block_bytes + sum(num_bytes for _, _, num_bytes, _ in chosen)
    recomputed = [element for element in elements(equations) if element not in chosen]
    return equations.seconds(
        swapped_bytes=swapped_bytes,
        spilled_bytes=max(0, swapped_bytes - equations.available_bytes),
        recomputed_flops=sum(flops for _, _, _, flops in recomputed),
    )


def subsets(equations: Equations) -> Iterator[list[tuple[str, int, int, int]]]:
    every = elements(equations)
    for size in range(len(every) + 1):
        for subset in combinations(every, size):
            yield list(subset)


def least_of_subsets(equations: Equations) -> float:
    return min(seconds_with(equations, subset) for subset in subsets(equations))


def planned(equations: Equations) -> Point:
    found = search(equations)
    return found.points[found.least()]


@given(equations=EQUATIONS)
@examples(300)
def test_the_search_finds_the_least_of_all_prefixes(equations: PaperEquations) -> None:
    order = sorted(elements(equations), key=lambda element: -element[3] / element[2])
    brute = [seconds_with(equations, order[:count]) for count in range(len(order) + 1)]
    found = search(equations)
    assert [point.seconds for point in found.points] == brute
    assert found.least() == brute.index(min(brute))
    taken = {(operator.name, block) for operator in found.swapped(found.least()) for block in operator.blocks}
    assert taken == {(name, block) for name, block, _, _ in order[: found.least()]}


@given(graph=graphs(equal_bytes=True))
@thousand
def test_among_elements_of_one_size_no_subset_is_faster(graph: Graph) -> None:
    assert planned(graph).seconds == least_of_subsets(graph)


@given(graph=graphs())
@thousand
def test_no_subset_is_faster_by_more_than_one_element(graph: Graph) -> None:
    """The optimum with elements split is no slower than any subset. A prefix computes at most one element more."""
    best = least_of_subsets(graph)
    one_element = max(operator.flops for operator in graph.operators) / graph.equations.hardware.flops_per_second
    assert best <= planned(graph).seconds <= (best + one_element) * (1 + 1e-12)


@given(graph=graphs())
@thousand
def test_each_element_saves_its_benefit_per_byte(graph: Graph) -> None:
    """Eq. 7 and 8."""
    found = search(graph)
    for operator, before, after in zip(found.operators, found.points, found.points[1:], strict=False):
        saved = before.recomputed_flops - after.recomputed_flops
        assert saved / (after.swapped_bytes - before.swapped_bytes) == operator.benefit
    assert found.points[-1].recomputed_flops == 0
    benefits = [operator.benefit for operator in found.operators]
    assert benefits == sorted(benefits, reverse=True)


def test_equal_benefits_keep_forward_order_and_outputs_without_flops_come_last() -> None:
    names = [operator.name for operator in search(paper_equations(batch_size=32)).operators]
    assert names == ["fc2", "qkv", "projection", "fc1", "attention", "ln1", "ln2", "gelu"]


def test_a_set_names_the_blocks_in_which_each_operator_is_swapped() -> None:
    found = search(paper_equations(batch_size=32))
    assert found.swapped(0) == ()
    fc2, qkv = found.swapped(43)
    assert (fc2.name, fc2.blocks) == ("fc2", tuple(range(40)))
    assert (qkv.name, qkv.blocks) == ("qkv", (0, 1, 2))
    assert found.swapped(320) == found.operators


def test_a_limit_keeps_the_set_small_but_never_without_the_inputs() -> None:
    found = search(paper_equations(batch_size=64))
    inputs = found.points[0].swapped_bytes
    assert found.points[found.least()].swapped_bytes > 2 * inputs
    assert found.least(limit_bytes=2 * inputs) == 40
    assert found.least(limit_bytes=0) == 0


def tiny(*, flops: int = 10, num_bytes: int = 1, hardware: PaperHardware) -> Graph:
    operators = (
        SwappableOperator(name="product", blocks=(0, 1), num_bytes=num_bytes, flops=flops),
        SwappableOperator(name="norm", blocks=(0, 1), num_bytes=num_bytes, flops=0),
    )
    shape = PaperShape(
        num_layers=2, num_heads=1, hidden_size=1, vocab_size=1, num_parameters=0, batch_size=1, sequence_len=1
    )
    return Graph(
        operators=operators,
        inter_block_bytes=4,
        equations=PaperEquations(shape=shape, hardware=hardware),
    )


def machine(*, flops_per_second: float = 1.0, link_bytes_per_second: float = 1.0) -> PaperHardware:
    return PaperHardware(
        flops_per_second=flops_per_second,
        link_bytes_per_second=link_bytes_per_second,
        read_bytes_per_second=1e9,
        write_bytes_per_second=1e9,
        available_bytes=100,
    )


@pytest.mark.parametrize(
    ("hardware", "case", "least"),
    [
        (machine(flops_per_second=1e9), 1, 0),
        (machine(link_bytes_per_second=1e9), 2, 2),
        (machine(flops_per_second=29.0), 3, 1),
    ],
)
def test_the_three_cases(hardware: PaperHardware, case: int, least: int) -> None:
    """Case 2 swaps all that costs FLOPs; what costs none never makes a step faster."""
    found = search(tiny(flops=40, hardware=hardware))
    assert (found.case, found.least()) == (case, least)


def test_among_equals_the_fewest_are_swapped() -> None:
    assert search(tiny(flops=0, hardware=machine(link_bytes_per_second=1e9))).least() == 0


def test_another_room_in_main_memory_may_be_assumed() -> None:
    equations = paper_equations(batch_size=8, available_bytes=10**15)
    assert all(point.spilled_bytes == 0 for point in search(equations).points)
    assert all(point.spilled_bytes == point.swapped_bytes for point in search(equations, available_bytes=0).points)


@pytest.mark.nightly
@in_real_time
def test_a_thousand_elements_are_searched_in_under_50_ms() -> None:
    operators = tuple(
        SwappableOperator(name=f"operator {n}", blocks=tuple(range(100)), num_bytes=1000 + n, flops=n << 30)
        for n in range(10)
    )
    graph = Graph(operators=operators, inter_block_bytes=1 << 30, equations=paper_equations(batch_size=32))
    taken = []
    for _ in range(5):
        started = process_time()
        search(graph).least()
        taken.append(process_time() - started)
    assert min(taken) < 0.05
