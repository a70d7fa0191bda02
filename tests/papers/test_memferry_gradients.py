"""Which gradients stay on the GPU, against every subset."""

from __future__ import annotations

import random

import pytest

from ratel_cli.papers import memferry
from ratel_cli.papers.memferry import GradientFront, OffloadedGradient
from tests.papers.memferry_oracle import knapsack

RESERVES = (0.0, 0.1, 0.25, 0.3, 0.5, 0.77, 0.9, 1.0)


def random_gradients(draw: random.Random, count: int, *, most_bytes: int) -> list[OffloadedGradient]:
    """Some of which take no longer if they are offloaded."""
    return [
        OffloadedGradient(
            num_bytes=draw.randint(1, most_bytes), backward=draw.uniform(0, 3), direct_backward=draw.uniform(2, 5)
        )
        for _ in range(count)
    ]


def test_no_other_subset_saves_more() -> None:
    draw = random.Random(1)
    for _ in range(40):
        items = random_gradients(draw, draw.randint(0, 9), most_bytes=draw.choice([6, 1000, 10**9]))
        front, total = GradientFront(items), sum(each.num_bytes for each in items)
        all_offloaded = sum(each.direct_backward for each in items)
        all_kept = sum(each.backward for each in items)
        for reserve in RESERVES:
            kept = front.kept(reserve)
            saved = [each.direct_backward - each.backward for each in items]
            sizes = [each.num_bytes for each in items]
            best = knapsack(sizes, saved, int(reserve * total))
            assert kept.added_seconds == pytest.approx(max(0.0, all_offloaded - best - all_kept), abs=1e-9)
            assert kept.kept_bytes <= reserve * total
            assert knapsack(sizes, saved, kept.kept_bytes) == pytest.approx(best), "these bytes are enough"
            assert not kept.kept_bytes or knapsack(sizes, saved, kept.kept_bytes - 1) < best, "and no fewer are"


def test_more_memory_is_never_slower() -> None:
    front = GradientFront(random_gradients(random.Random(2), 60, most_bytes=10**9))
    seconds = [front.kept(step / 500).added_seconds for step in range(501)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[250] > seconds[500]


def test_steps_without_number_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer steps than there are sums the bytes stay within the limit, and little time is lost."""
    items = random_gradients(random.Random(3), 40, most_bytes=10**6)
    exact, total = GradientFront(items), sum(each.num_bytes for each in items)
    all_kept = sum(each.backward for each in items)
    monkeypatch.setattr(memferry, "_MOST_STEPS", 300)
    divided = GradientFront(items)
    before = float("inf")
    for reserve in (step / 100 for step in range(101)):
        kept, seconds = divided.kept(reserve), all_kept + divided.kept(reserve).added_seconds
        assert kept.kept_bytes <= reserve * total
        least = all_kept + exact.kept(reserve).added_seconds
        assert least * (1 - 1e-9) <= seconds <= min(before, 1.02 * least)
        before = seconds
    assert divided.kept(1.0).added_seconds == pytest.approx(exact.kept(1.0).added_seconds)
