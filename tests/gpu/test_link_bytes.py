"""What crosses the link in a step is what the plan counts: weights, units, gradients, and sums in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.planning.profile.activations import offload
from ratel_cli.planning.profile.placement import Placement, Workload, most_rows
from ratel_cli.planning.time.costs import ComputeSeconds, StepCosts
from ratel_cli.planning.time.traffic import Traffic
from ratel_cli.units import KIB
from tests.engine.exactness import AHEAD
from tests.engine.machine import Machine, initial_weights_of_zeros
from tests.engine.swaps import EVERYTHING
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.gpu.test_memory import RECIPE, batches_of, config_of, distinct_tokens
from tests.planning.shapes import machine as machine_of
from tests.planning.steps import planned_step
from tests.simulated_gpu import is_simulated
from tests.simulated_gpu.timed import work_so_far
from tests.tiers import rotating

pytestmark = NEEDS_GPU

ROWS, TOKENS = 2, 64
HEADS = {"on the GPU": None, "in host memory": None, "in host memory, in chunks": 50}
"""Where the sums of the head's gradients are, and the tokens of a chunk."""
SMALL_BYTES = 64 * KIB
"""For each micro-batch: token ids and masks. The plan leaves them out, as it does padding, norms and losses."""


def planned_bytes(ratel: Machine, placement: Placement, workload: Workload, *, unit_bytes: int) -> tuple[float, float]:
    """Up and down: the seconds of a link of 1 byte per second."""
    time = StepCosts(
        step=planned_step(ratel.model.spec, workload, on_gpu=True),
        hardware=machine_of(up_bytes_per_second=1.0, down_bytes_per_second=1.0),
        compute=ComputeSeconds(forward=0.0, backward=0.0, head=0.0, is_measured=False),
    ).time(
        replace(placement, gpu_embedding_rows=most_rows(ratel.model.spec, workload)),
        Traffic(),
        offload(
            [unit_bytes] * ratel.model.spec.num_layers,
            num_micro_batches=workload.num_micro_batches,
            spilled_units=placement.spilled_units,
            gpu_units_from=placement.gpu_units_from,
        ),
    )
    return time.forward.up + time.backward.up, time.forward.down + time.backward.down


@pytest.mark.parametrize(
    ("num_micro_batches", "holds_sums", "kept_layers", "swaps", "window_bytes", "tied", "head"),
    rotating(
        [1, 3], [False, True], [0, 2], [False, True], [0, 400_000, 1 << 30], [False, True], list(HEADS), full_pairs=True
    ),
)
def test_a_step_moves_what_was_planned(
    tmp_path: Path,
    num_micro_batches: int,
    holds_sums: bool,
    kept_layers: int,
    swaps: bool,
    window_bytes: int,
    tied: bool,
    head: str,
) -> None:
    if not is_simulated():
        pytest.skip("counted by the simulated GPU")
    placement = replace(
        AHEAD,
        gpu_units_from=max(1, (4 - kept_layers) * num_micro_batches),
        gpu_weights=frozenset(range(5 - kept_layers, 5)),
        gpu_window_bytes=window_bytes,
        gpu_holds_sums=holds_sums,
        gpu_holds_head=head == "on the GPU",
        swapped=EVERYTHING if swaps else {},
    )
    config, recipe = config_of(num_layers=4, tied=tied), replace(RECIPE, chunk_tokens=HEADS[head])
    with gpu_machine(tmp_path, config, recipe, weights=initial_weights_of_zeros(), placement=placement) as ratel:
        batches = distinct_tokens(batches_of(num_micro_batches, rows=ROWS, tokens=TOKENS))
        before = work_so_far()
        [outcome] = ratel.train([batches], recipe)
        moved = work_so_far() - before
        workload = Workload(
            micro_batch_size=ROWS,
            num_micro_batches=num_micro_batches,
            sequence_len=TOKENS,
            chunk_tokens=recipe.chunk_tokens,
        )
        unit_bytes = outcome.swapped_bytes // (4 * num_micro_batches)
        up_bytes, down_bytes = planned_bytes(ratel, placement, workload, unit_bytes=unit_bytes)
    small_bytes = num_micro_batches * SMALL_BYTES
    assert abs(moved.up_bytes - up_bytes) <= small_bytes
    assert abs(moved.down_bytes - down_bytes) <= small_bytes
