"""What other systems would swap, under the paper's equations; ours is never slower."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given

from ratel_cli.commands import install_extras
from ratel_cli.papers.prefix import Equations, SwappableOperator, search
from ratel_cli.papers.ratel import PaperEquations
from ratel_cli.papers.rivals import Outcome, Strategy, compare, flash_neuron_parameters
from ratel_cli.units import GIB, MIB
from tests.papers.paper_profiles import EQUATIONS, Graph, graphs, paper_equations
from tests.tiers import examples

HOST_ALONE: tuple[Strategy, ...] = ("static", "host-only", "capuchin", "checkmate")
thousand = examples(1000)


@pytest.fixture(scope="module", autouse=True)
def scipy_is_there() -> None:
    pytest.importorskip("scipy")


def outcomes(equations: Equations) -> dict[Strategy, Outcome]:
    return {outcome.strategy: outcome for outcome in compare(equations)}


def assert_ours_is_never_slower(equations: Equations) -> None:
    ours, *others = compare(equations)
    assert ours.strategy == "ratel"
    assert ours.why_not is None
    assert all(ours.point.seconds <= outcome.point.seconds for outcome in others)


@given(equations=EQUATIONS)
@thousand
def test_ours_is_never_slower_on_any_machine_with_any_shape(equations: PaperEquations) -> None:
    assert_ours_is_never_slower(equations)


@given(graph=graphs())
@thousand
def test_ours_is_never_slower_on_any_graph(graph: Graph) -> None:
    assert_ours_is_never_slower(graph)


@given(equations=EQUATIONS)
@examples(300)
def test_a_strategy_takes_the_time_of_what_it_swaps(equations: PaperEquations) -> None:
    inputs_alone, *_, everything = search(equations).points
    for outcome in compare(equations):
        point = outcome.point
        assert inputs_alone.swapped_bytes <= point.swapped_bytes <= everything.swapped_bytes
        assert everything.recomputed_flops <= point.recomputed_flops <= inputs_alone.recomputed_flops
        assert point.seconds == equations.seconds(
            swapped_bytes=point.swapped_bytes,
            spilled_bytes=point.spilled_bytes,
            recomputed_flops=point.recomputed_flops,
        )


def test_ours_stands_first_and_all_are_there() -> None:
    names = [outcome.strategy for outcome in compare(paper_equations(batch_size=32))]
    assert names == ["ratel", *HOST_ALONE, "fuyou", "g10"]


def test_ours_is_the_least_prefix() -> None:
    equations = paper_equations(batch_size=32)
    found = search(equations)
    assert outcomes(equations)["ratel"].point == found.points[found.least()]


def test_whole_elements_may_pack_better_than_any_prefix() -> None:
    """The greatest benefit does not fit in main memory, the next one does; drives are slow."""
    equations = paper_equations("gpt-6b", batch_size=1, available_bytes=5 * MIB)
    slow = replace(equations, hardware=replace(equations.hardware, flops_per_second=1e12, write_bytes_per_second=1e3))
    graph = Graph(
        operators=(
            SwappableOperator(name="large", blocks=(0,), num_bytes=10 * MIB, flops=40 << 40),
            SwappableOperator(name="small", blocks=(0,), num_bytes=5 * MIB, flops=10 << 40),
        ),
        inter_block_bytes=0,
        equations=slow.without_states(),
    )
    found = outcomes(graph)
    assert found["ratel"].point.swapped_bytes == 5 * MIB
    assert found["ratel"].point == found["checkmate"].point
    assert search(graph).least() == 0


def test_static_swaps_exactly_2_bshl_to_main_memory() -> None:
    outcome = outcomes(paper_equations(batch_size=32, available_bytes=14 * 10**9))["static"]
    assert outcome.point.swapped_bytes == 2 * 32 * 1024 * 5120 * 40
    assert outcome.point.spilled_bytes == 0


def test_capuchin_forgets_that_weights_use_the_link_too() -> None:
    """A small batch and fast drives: backward waits for the link."""
    equations = paper_equations(batch_size=4, available_bytes=100 * 10**9)
    fast_drives = replace(equations.hardware, read_bytes_per_second=1e12, write_bytes_per_second=1e12)
    found = outcomes(replace(equations, hardware=fast_drives))
    assert found["capuchin"].point.swapped_bytes > found["ratel"].point.swapped_bytes
    assert found["capuchin"].point.seconds > 1.05 * found["ratel"].point.seconds


def test_host_only_stops_where_main_memory_is_full() -> None:
    equations = paper_equations(batch_size=64, available_bytes=60 * 10**9)
    found = outcomes(equations)
    assert found["host-only"].point.spilled_bytes == 0
    assert 50 * 10**9 < found["host-only"].point.swapped_bytes <= 60 * 10**9
    assert found["ratel"].point.spilled_bytes > 0
    assert found["ratel"].point.seconds < found["host-only"].point.seconds


@pytest.mark.parametrize("strategy", HOST_ALONE)
def test_block_inputs_that_main_memory_cannot_hold_fail_what_never_uses_nvme(strategy: Strategy) -> None:
    equations = paper_equations(batch_size=32, available_bytes=13_421_772_800 - GIB)
    outcome = outcomes(equations)[strategy]
    assert outcome.why_not == "the layers' inputs do not fit into RAM (short by 1.00 GiB)"
    assert outcome.point.spilled_bytes == GIB
    assert outcome.point.swapped_bytes == equations.inter_block_bytes
    enough = replace(equations, hardware=replace(equations.hardware, available_bytes=13_421_772_800))
    assert outcomes(enough)[strategy].why_not is None


def test_g10_recomputes_nothing_and_swaps_all_to_nvme() -> None:
    equations = paper_equations(batch_size=32, available_bytes=10**12)
    point = outcomes(equations)["g10"].point
    assert point.recomputed_flops == 0
    assert point.swapped_bytes == point.spilled_bytes == equations.shape.activation_bytes


def test_fuyou_chooses_as_if_main_memory_held_nothing() -> None:
    full = paper_equations(batch_size=32, hardware="paper-4090-2ssd", available_bytes=10**12)
    empty = replace(full, hardware=replace(full.hardware, available_bytes=0))
    fuyou = outcomes(full)["fuyou"]
    assert fuyou.point.swapped_bytes == outcomes(empty)["ratel"].point.swapped_bytes
    assert fuyou.point.spilled_bytes == 0


def test_checkmate_fills_main_memory_with_what_saves_most() -> None:
    equations = paper_equations(batch_size=32, available_bytes=30 * 10**9)
    point = outcomes(equations)["checkmate"].point
    assert point.spilled_bytes == 0
    assert point.recomputed_flops <= outcomes(equations)["host-only"].point.recomputed_flops


def test_checkmate_without_scipy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    found = outcomes(paper_equations(batch_size=32, available_bytes=30 * 10**9))
    assert found["checkmate"].why_not == f"its solver needs scipy: {install_extras('compare')}"
    assert [name for name, outcome in found.items() if outcome.why_not] == ["checkmate"]


def test_flash_neuron_on_24_gib() -> None:
    """The paper measured 1.55 B."""
    assert flash_neuron_parameters(24 * GIB) == 1_610_612_736
