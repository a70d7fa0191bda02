"""In simulated time: weights in the window go up while the GPU computes, the others while it waits, as planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.planning.profile.placement import bytes_ahead, looked_up
from tests.engine.exactness import AHEAD, EVERY_BLOCK
from tests.engine.machine import Machine, initial_weights_of_zeros
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.gpu.test_memory import RECIPE, batches_of, config_of, distinct_tokens
from tests.real_time import in_real_time, of_this_try
from tests.simulated_gpu import is_simulated
from tests.simulated_gpu.timed import Rates, timed, work_so_far

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.nightly,
    pytest.mark.skipif(not is_simulated(), reason="a real GPU has its own time"),
]

NUM_LAYERS = 4
UPLOAD_SECONDS = 0.05, 0.25
"""Of a layer's weights: long against what Python takes for a layer, in the second try even on a busy machine."""
COMPUTE_UPLOADS = 40
"""A step computes as long as so many uploads, so that a layer computes for longer than it is uploaded."""


def stalled_seconds(directory: Path, window_bytes: int, upload_seconds: float) -> tuple[float, float]:
    """How long computing waits for uploads in a step, and how long the weights outside the window take to go up.

    The first upload of a step, which no block comes before, is left out on both sides.
    """
    placement = replace(
        AHEAD,
        resident_weights=EVERY_BLOCK,
        resident_states=EVERY_BLOCK,
        gpu_units_from=0,
        gpu_window_bytes=window_bytes,
        gpu_holds_sums=True,
    )
    batches = distinct_tokens(batches_of(1, rows=1, tokens=32))

    def step(ratel: Machine, number: int) -> None:
        ratel.engine.run(batches, step=number, update=number + 1, learning_rate=1e-3, commit_previous=ratel.commit)
        ratel.decided = number + 1

    weights = initial_weights_of_zeros()
    with gpu_machine(
        directory, config_of(num_layers=NUM_LAYERS), RECIPE, weights=weights, placement=placement
    ) as ratel:
        step(ratel, 0)
        before = work_so_far()
        step(ratel, 1)
        flops = (work_so_far() - before).flops
        layer_bytes = 2 * ratel.model.spec.blocks[1].num_elements
        rates = Rates(
            flops_per_second=flops / (COMPUTE_UPLOADS * upload_seconds),
            up_bytes_per_second=layer_bytes / upload_seconds,
            down_bytes_per_second=1e12,
        )
        segments = [looked_up(ratel.model.spec, 32), *ratel.model.spec.segments[1:]]
        waiting = [segment.compute_bytes - bytes_ahead(segment, window_bytes) for segment in segments]
        ratel.timeline.take()
        with timed(rates):
            step(ratel, 2)
            ratel.settle()
        stalled = ratel.timeline.take().stalled["up"]
    # The embedding's first use is the first of the step, which no block comes before.
    return stalled, (2 * sum(waiting[1:-1]) + waiting[0] + waiting[-1]) / rates.up_bytes_per_second


@in_real_time
def test_computing_waits_for_what_the_window_does_not_take(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """With the whole next block ahead it waits for the first rows, and for the head, which a layer does not cover."""
    upload_seconds = of_this_try(request, UPLOAD_SECONDS)
    whole, nothing = stalled_seconds(tmp_path / "whole", 1 << 30, upload_seconds)
    assert nothing == 0.0
    assert whole <= 7 * upload_seconds
    for window_bytes in (0, 500_000):
        stalled, expected = stalled_seconds(tmp_path / str(window_bytes), window_bytes, upload_seconds)
        assert stalled - whole == pytest.approx(expected, rel=0.3)
