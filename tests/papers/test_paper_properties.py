"""What holds for every profile: of 1000 random machines and shapes each, and of 1000 random graphs of operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.papers.prefix import Equations, Search, search
from ratel_cli.papers.ratel import PaperEquations
from tests.papers.paper_profiles import EQUATIONS, Graph, graphs
from tests.tiers import examples

ROUNDING = 1e-12
thousand = examples(1000)


def planned_seconds(equations: Equations) -> float:
    found = search(equations)
    return found.points[found.least()].seconds


def assert_convex(found: Search) -> None:
    for before, here, after in zip(found.points, found.points[1:], found.points[2:], strict=False):
        down = (here.seconds - before.seconds) * (after.swapped_bytes - here.swapped_bytes)
        up = (after.seconds - here.seconds) * (here.swapped_bytes - before.swapped_bytes)
        assert up - down >= -ROUNDING * here.seconds * (after.swapped_bytes - before.swapped_bytes)


@given(equations=EQUATIONS)
@thousand
def test_time_is_convex_over_the_prefixes_of_the_papers_shapes(equations: PaperEquations) -> None:
    assert_convex(search(equations))


@given(graph=graphs(most_operators=12))
@thousand
def test_time_is_convex_over_the_prefixes_of_any_graph(graph: Graph) -> None:
    assert_convex(search(graph))


@pytest.mark.parametrize(
    "rate", ["flops_per_second", "link_bytes_per_second", "read_bytes_per_second", "write_bytes_per_second"]
)
@given(equations=EQUATIONS, factor=st.floats(1, 100))
@thousand
def test_time_never_rises_with_a_rate(rate: str, equations: PaperEquations, factor: float) -> None:
    faster = replace(equations.hardware, **{rate: factor * getattr(equations.hardware, rate)})
    assert planned_seconds(replace(equations, hardware=faster)) <= planned_seconds(equations)


@given(equations=EQUATIONS, more_bytes=st.integers(0, 1 << 34))
@thousand
def test_time_never_rises_with_main_memory(equations: PaperEquations, more_bytes: int) -> None:
    larger = replace(equations.hardware, available_bytes=equations.hardware.available_bytes + more_bytes)
    assert planned_seconds(replace(equations, hardware=larger)) <= planned_seconds(equations)


@given(equations=EQUATIONS, factor=st.floats(0.01, 100))
@thousand
def test_all_rates_times_k_divide_the_time_by_k(equations: PaperEquations, factor: float) -> None:
    once = equations.hardware
    scaled = replace(
        once,
        flops_per_second=factor * once.flops_per_second,
        link_bytes_per_second=factor * once.link_bytes_per_second,
        read_bytes_per_second=factor * once.read_bytes_per_second,
        write_bytes_per_second=factor * once.write_bytes_per_second,
    )
    expected = planned_seconds(equations) / factor
    assert planned_seconds(replace(equations, hardware=scaled)) == pytest.approx(expected, rel=1e-12)


@given(equations=EQUATIONS)
@thousand
def test_block_inputs_are_always_in_the_set(equations: PaperEquations) -> None:
    found = search(equations)
    inputs = equations.inter_block_bytes
    for count in (0, found.least(), len(found.points) - 1):
        others = sum(operator.num_bytes * len(operator.blocks) for operator in found.swapped(count))
        assert found.points[count].swapped_bytes == inputs + others


@given(equations=EQUATIONS)
@thousand
def test_main_memory_is_filled_before_nvme(equations: PaperEquations) -> None:
    for point in search(equations).points:
        in_memory = point.swapped_bytes - point.spilled_bytes
        assert in_memory == min(point.swapped_bytes, equations.available_bytes)
