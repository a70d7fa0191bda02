"""The order in which outputs are swapped, and the least of its prefixes, against trying them all."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given

from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.swap import SwapOrder
from tests.planning.profiles import by_chance, candidate, layer, model
from tests.planning.shapes import SEEDS
from tests.tiers import examples


def swapped(order: SwapOrder, num_outputs: int) -> set[tuple[int, str]]:
    return {(block, key) for block, keys in order.keys(num_outputs).items() for key in keys}


@examples(60)
@given(seed=SEEDS)
def test_a_prefix_more_is_one_output_more(seed: int) -> None:
    choice = random.Random(seed)
    profile = by_chance(choice, num_layers=choice.randint(1, 6))
    order = SwapOrder(profile)
    of_layer = [profile.profiles[number] for number in profile.layers]
    known = [{item.key: item for item in each.candidates} for each in of_layer]
    assert order.num_outputs == sum(len(items) for items in known)
    assert order.boundaries[0] == 0
    assert order.boundaries[-1] == order.num_outputs
    before: set[tuple[int, str]] = set()
    for num_outputs in range(order.num_outputs + 1):
        now = swapped(order, num_outputs)
        assert now >= before
        assert len(now) == num_outputs
        taken = [known[block - 1][key] for block, key in now]
        swap = order.prefix(num_outputs)
        assert swap.num_outputs == num_outputs
        assert swap.num_bytes == sum(item.num_bytes for item in taken)
        assert swap.flops == sum(item.flops for item in taken)
        assert order.unit_bytes(num_outputs) == [
            each.input_bytes + sum(known[at][key].num_bytes for block, key in now if block == at + 1)
            for at, each in enumerate(of_layer)
        ]
        before = now


def test_what_saves_most_for_a_byte_comes_first_and_the_last_layers_before_the_others() -> None:
    profile = model(
        layer(candidate(key="a", flops=40, num_bytes=10), candidate(key="b", flops=10, num_bytes=10)),
        layer(candidate(key="c", flops=60, num_bytes=20)),
        layers=(0, 1, 0),
    )
    order = SwapOrder(profile)
    taken = [swapped(order, number + 1) - swapped(order, number) for number in range(order.num_outputs)]
    assert taken == [{(3, "a")}, {(1, "a")}, {(2, "c")}, {(3, "b")}, {(1, "b")}]
    assert order.boundaries == (0, 2, 3, 5)


def test_measured_seconds_count_before_flops() -> None:
    slow = candidate(key="norm", flops=0, seconds=0.5, num_bytes=10)
    fast = candidate(key="mm", flops=10**9, seconds=0.1, num_bytes=10)
    order = SwapOrder(model(layer(slow, fast)))
    assert [group.candidate.key for group in order.groups] == ["norm", "mm"]
    assert order.prefix(2).seconds == pytest.approx(0.6)


def test_a_layers_candidates_stay_in_their_order() -> None:
    """The second saves more because the first is swapped: it does not come before it."""
    profile = model(
        layer(candidate(key="first", flops=1), candidate(key="second", flops=3)),
        layer(candidate(key="other", flops=2)),
        layers=(0, 1),
    )
    assert [group.candidate.key for group in SwapOrder(profile).groups] == ["other", "first", "second"]


def test_a_model_with_nothing_to_swap() -> None:
    order = SwapOrder(model(layer(input_bytes=7), layers=(0, 0)))
    assert (order.num_outputs, order.boundaries, order.unit_bytes(0)) == (0, (0,), [7, 7])
    assert order.least(lambda num_outputs: 1.0 + num_outputs) == 0
    assert order.reaching(5) == 0


def test_a_profile_that_no_layer_has_is_left_out() -> None:
    order = SwapOrder(model(layer(candidate(key="a")), layer(candidate(key="b")), layers=(1,)))
    assert [group.candidate.key for group in order.groups] == ["b"]


@examples(30)
@given(seed=SEEDS)
def test_the_shortest_prefix_that_reaches_so_many_bytes(seed: int) -> None:
    choice = random.Random(seed)
    order = SwapOrder(by_chance(choice, num_layers=choice.randint(1, 5)))
    sizes = [order.prefix(number).num_bytes for number in range(order.num_outputs + 1)]
    for num_bytes in {0, 1, sizes[-1], sizes[-1] + 1, *(choice.randint(0, sizes[-1]) for _ in range(10))}:
        reaching = [number for number, size in enumerate(sizes) if size >= num_bytes]
        assert order.reaching(num_bytes) == (reaching[0] if reaching else order.num_outputs)


def step_of_chance(choice: random.Random, order: SwapOrder, profile: ModelProfile) -> Callable[[int], float]:
    """Forward moves what is swapped down, backward brings it back; what does not fit in memory goes to a drive."""
    all_bytes = order.prefix(order.num_outputs).num_bytes + 1
    available_bytes = choice.uniform(-0.2, 1.2) * all_bytes
    limit_bytes = choice.choice([math.inf, choice.uniform(0, 1.2) * all_bytes])
    recomputed = sum(profile.profiles[number].flops_recomputed for number in profile.layers)
    flops_per_second = recomputed * 10 ** choice.uniform(-1, 1) + 1
    link, drive = (all_bytes * 10 ** choice.uniform(-1.5, 1.5) for _ in range(2))
    forward, weights = (choice.uniform(0, 1) for _ in range(2))

    def seconds(num_outputs: int) -> float:
        swap = order.prefix(num_outputs)
        if swap.num_bytes > limit_bytes:
            return math.inf
        spilled_bytes = max(0, swap.num_bytes - available_bytes)
        transfers = max(weights + swap.num_bytes / link, weights + spilled_bytes / drive)
        return max(forward, transfers) + max((recomputed - swap.flops) / flops_per_second, transfers)

    return seconds


def least_of_chance(seed: int) -> tuple[SwapOrder, int]:
    """The least prefix of a model and a machine, compared with trying all."""
    choice = random.Random(seed)
    profile = by_chance(choice, num_layers=choice.randint(1, 9))
    order = SwapOrder(profile)
    seconds = step_of_chance(choice, order, profile)
    every = [seconds(number) for number in range(order.num_outputs + 1)]
    found = order.least(seconds)
    assert every[found] == pytest.approx(min(every), rel=1e-12)
    # Of prefixes that are as good the shortest; a last digit does not count.
    assert found <= next(number for number, each in enumerate(every) if each <= min(every))
    return order, found


@examples(1000)
@given(seed=SEEDS)
def test_the_least_is_the_least_of_all_prefixes(seed: int) -> None:
    least_of_chance(seed)


def test_models_of_chance_have_their_least_inside_a_group_too() -> None:
    """Else the test above would prove little."""
    found = [least_of_chance(seed) for seed in range(100)]
    assert sum(least not in order.boundaries for order, least in found) > 5


@pytest.mark.parametrize("best", [0, 1, 399, 417, 511, 799, 800])
def test_the_least_of_many_layers_is_found_in_few_attempts(best: int) -> None:
    one, other = candidate(key="a", flops=2), candidate(key="b", flops=1)
    order = SwapOrder(model(layer(one, other), layers=(0,) * 400))
    tried = set()

    def seconds(num_outputs: int) -> float:
        tried.add(num_outputs)
        return abs(num_outputs - best)

    assert order.least(seconds) == best
    assert len(tried) < 60
