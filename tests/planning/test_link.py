"""What of units the link moves while nothing computes, against a link that is followed from tensor to tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given

from ratel_cli.planning.activations import NOT_EXPOSED, ExposedUnits, offload
from ratel_cli.planning.costs import ComputeSeconds, overlapped_step
from ratel_cli.planning.link import exposed_unit_bytes, waited_unit_bytes
from ratel_cli.planning.placement import Placement
from ratel_cli.planning.traffic import Traffic
from tests.planning.shapes import BFLOAT16, SEEDS, gpt, machine
from tests.tiers import examples


def late_seconds(tensors: Sequence[int], most: Sequence[int], moments: Sequence[float], end: float) -> float:
    """How long a link of one byte a second still brings the unit up after `end`. It may take `most[0]` from the
    beginning, `most[1]` from the first of `moments` on, and all of it from `end` on."""
    waiting, taken, now = sorted(tensors, reverse=True), 0, 0.0
    for moment, most_bytes in zip((0.0, *moments, end), (*most, sum(tensors)), strict=True):
        now = max(now, moment)
        for tensor in tuple(waiting):
            if taken + tensor <= most_bytes:
                waiting.remove(tensor)
                taken += tensor
                now += tensor
    return max(0.0, now - end)


@examples(300)
@given(seed=SEEDS)
def test_a_unit_is_as_late_as_on_a_link_that_is_followed(seed: int) -> None:
    choice = random.Random(seed)
    tensors = [choice.randint(1, 50) for _ in range(choice.randint(1, 5))]
    most = sorted(choice.randint(0, sum(tensors)) for _ in range(choice.randint(1, 4)))
    rests = sorted((choice.uniform(0, 60) for _ in most[1:]), reverse=True)
    end = sum(tensors) + 60.0  # what may go up at once is up before the first moment
    found = exposed_unit_bytes(tensors, most, rests, bytes_per_second=1.0)
    assert found == int(late_seconds(tensors, most, [end - rest for rest in rests], end))


@pytest.mark.parametrize(
    ("most_bytes", "made_seconds", "waited"),
    [(200, 0.0, 0), (199, 0.0, 1), (100, 0.0, 100), (100, 4.0, 60), (140, 6.0, 0), (100, 1e9, 0)],
)
def test_forward_waits_for_what_has_not_gone_down_when_the_next_unit_is_there(
    most_bytes: int, made_seconds: float, waited: int
) -> None:
    assert waited_unit_bytes(100, most_bytes, made_seconds, bytes_per_second=10.0) == waited


@pytest.mark.parametrize("prefetch_blocks", [0, 1])
def test_what_moves_while_nothing_computes_takes_its_time(prefetch_blocks: int) -> None:
    """Forward waits for what goes down, backward for what goes up."""
    hardware = machine(flops_per_second=1.0)
    assert hardware.link is not None
    both = [
        overlapped_step(
            gpt(),
            BFLOAT16,
            Placement(prefetch_blocks=prefetch_blocks, pending_updates=1, gpu_window_bytes=1 << 40),
            Traffic(),
            hardware,
            compute=ComputeSeconds(forward=100.0, backward=200.0, head=1.0, is_measured=False),
            offloaded=offload([1000] * 3, num_micro_batches=1, spilled_units=0, exposed=exposed),
            not_recomputed_seconds=0.0,
            holds_gradients=True,
        )
        for exposed in (ExposedUnits(10**9, 10**10), NOT_EXPOSED)
    ]
    waits, none = ((each.forward.total, each.backward.total) for each in both)
    assert waits[0] - none[0] == pytest.approx(10**9 / hardware.link.from_gpu_bytes_per_second, rel=1e-6)
    assert waits[1] - none[1] == pytest.approx(10**10 / hardware.link.to_gpu_bytes_per_second, rel=1e-6)
