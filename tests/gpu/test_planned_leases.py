"""Next to a GPU, too, leases of host memory take no more than the plan has at each use, purpose by purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.profile.placement import GroupShape, Placement, Workload, most_rows
from ratel_cli.schedule.ledger import Purpose
from ratel_cli.schedule.uses import step_uses
from tests.engine.architectures import tiny_config
from tests.engine.lease_meter import LeaseMeter
from tests.engine.machine import initial_weights, random_steps
from tests.engine.mixed import SHARING, mixed_config, mixed_recipe
from tests.gpu.machine import NEEDS_GPU, gpu_machine
from tests.planning.steps import most_by_use, planned_step
from tests.tiers import pairwise

pytestmark = NEEDS_GPU

NUM_STEPS = 3
METERED: tuple[tuple[Purpose, ...], ...] = (
    ("weights",),
    ("gradients", "held", "sums"),
    ("partial sums",),
    ("states",),
    ("rows",),
)
CLIPPING = {"never": None, "unclipped": 1e9, "clipped": 1e-3}


@pytest.mark.parametrize(
    ("family", "clipping", "ahead", "pending", "resident", "sums", "head", "num_micro_batches"),
    pairwise(
        ["llama", "gpt2", SHARING],
        ["never", "unclipped", "clipped"],
        [0, 1, 2],
        [0, 1, 2],
        [frozenset[int](), frozenset({0, 2})],
        [False, True],
        ["away", "lookup away", "on the GPU"],
        [1, 2, 3],
    ),
)
def test_leases_take_no_more_than_the_plan_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    clipping: str,
    ahead: int,
    pending: int,
    resident: frozenset[int],
    sums: bool,
    head: str,
    num_micro_batches: int,
) -> None:
    """`sums`, `head`: what of the sums of gradients the GPU has."""
    config = mixed_config(family) if family == SHARING else tiny_config(family)
    placement = Placement(
        prefetch_blocks=ahead,
        pending_updates=pending,
        resident_weights=resident,
        groups=GroupShape(elements=4096),
        gpu_holds_sums=sums,
        gpu_holds_head=head != "away",
        gpu_holds_lookup=head == "on the GPU",
    )
    recipe = mixed_recipe(family, "bfloat16", max_grad_norm=CLIPPING[clipping])
    steps = random_steps(NUM_STEPS, num_micro_batches, packed=False)
    workload = Workload(micro_batch_size=2, num_micro_batches=num_micro_batches, sequence_len=12)
    with gpu_machine(
        tmp_path,
        config,
        recipe,
        weights=initial_weights(config),
        placement=placement,
        gpu_embedding_rows=workload.tokens,
        group_elements=4096,
    ) as ratel:
        spec = ratel.model.spec
        staying = frozenset(block.name for block in spec.blocks if block.segment in resident)
        meter = LeaseMeter(ratel.pool, monkeypatch, num_uses=len(step_uses(spec.segments)), staying=staying)
        ratel.train(steps, recipe)
    step = planned_step(spec, workload, holds_gradients=clipping != "never", on_gpu=True, has_sums=not sums)
    placed = PlacedStep(step, replace(placement, gpu_embedding_rows=most_rows(spec, workload)))
    for purposes, most in most_by_use(placed, METERED).items():
        for number in range(NUM_STEPS):
            taken = [sum(use[purpose] for purpose in purposes) for use in meter.of_step(number)]
            pairs = enumerate(zip(taken, most, strict=True))
            over = {position: (took, has) for position, (took, has) in pairs if took > has}
            assert not over, (number, purposes)
