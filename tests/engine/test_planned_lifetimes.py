"""While a use of a step is open, leases take no more than the plan has there, purpose by purpose, however late updates
are written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PretrainedConfig

from ratel_cli.engine.optimizer.groups import Group, GroupWork
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.profile.placement import GroupShape, Overlap, Placement, Workload
from ratel_cli.schedule.ledger import Purpose
from ratel_cli.schedule.uses import step_uses
from tests.engine.architectures import tiny_config
from tests.engine.lease_meter import LeaseMeter
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.mixed import SHARING, mixed_config, mixed_recipe
from tests.engine.test_frozen_parts import names_of
from tests.planning.steps import most_by_use, planned_step
from tests.tiers import pairwise

NUM_STEPS, NUM_MICRO_BATCHES = 3, 2
LATE_SECONDS = 0.005
"""For so long after its write a group keeps its buffers, and with the last one a block keeps its weights."""
METERED: tuple[tuple[Purpose, ...], ...] = (
    ("weights",),
    ("gradients", "held", "sums"),
    ("partial sums",),
    ("states",),
)
CLIPPING = {"never": None, "unclipped": 1e9, "clipped": 1e-3}


def planned(
    spec: ModelSpec, placement: Placement, workload: Workload, *, holds_gradients: bool, overlap: Overlap
) -> dict[tuple[Purpose, ...], list[int]]:
    step = planned_step(spec, workload, holds_gradients=holds_gradients, overlap=overlap)
    return most_by_use(PlacedStep(step, placement), METERED)


@pytest.fixture
def late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = GroupWork.finish

    def finish_late(work: GroupWork, group: Group) -> None:
        time.sleep(LATE_SECONDS)
        finish(work, group)

    monkeypatch.setattr(GroupWork, "finish", finish_late)


@pytest.mark.usefixtures("late_writes")
@pytest.mark.parametrize(
    ("family", "optimizer", "part", "clipping", "ahead", "pending", "in_flight", "resident", "defers", "overlap"),
    pairwise(
        ["llama", "gpt2", SHARING],
        ["adamw", "muon"],
        [None, "the last layer", "attention", "the middle"],
        ["never", "unclipped", "clipped"],
        [0, 1, 2],
        [0, 1, 3],
        [1, 2],
        [frozenset[int](), frozenset({0, 2})],
        [False, True],
        ["optimized", "separate"],
    ),
)
def test_leases_take_no_more_than_the_plan_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    optimizer: str,
    part: str | None,
    clipping: str,
    ahead: int,
    pending: int,
    in_flight: int,
    resident: frozenset[int],
    defers: bool,
    overlap: Overlap,
) -> None:
    pending = 0 if overlap == "separate" else pending
    config: PretrainedConfig = mixed_config(family) if family == SHARING else tiny_config(family)
    # Groups are whole pages of every field, of bits too.
    groups = GroupShape(elements=4096 if optimizer == "adamw" else 8 * 4096, in_flight=in_flight)
    placement = Placement(prefetch_blocks=ahead, pending_updates=pending, resident_weights=resident, groups=groups)
    if defers and clipping == "never" and overlap != "separate":  # the head and the last two layers
        placement = replace(
            placement, deferred=frozenset(range(config.num_hidden_layers - 1, config.num_hidden_layers + 2))
        )
    recipe = replace(mixed_recipe(family, "bfloat16", max_grad_norm=CLIPPING[clipping]), optimizer=optimizer)
    if part is not None:
        recipe = replace(recipe, unfrozen=names_of(config, part))
    steps = random_steps(NUM_STEPS, NUM_MICRO_BATCHES, packed=False)
    with machine(
        tmp_path,
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        placement=placement,
        group_elements=groups.elements,
        groups_in_flight=in_flight,
        overlap=overlap,
    ) as ratel:
        spec = ratel.model.spec
        staying = frozenset(block.name for block in spec.blocks if block.segment in resident)
        meter = LeaseMeter(ratel.pool, monkeypatch, num_uses=len(step_uses(spec.segments)), staying=staying)
        ratel.train(steps, recipe)
    workload = Workload(micro_batch_size=2, num_micro_batches=NUM_MICRO_BATCHES, sequence_len=12)
    wanted = planned(spec, placement, workload, holds_gradients=clipping != "never", overlap=overlap)
    for number in range(NUM_STEPS):
        uses = meter.of_step(number)
        for purposes, most in wanted.items():
            taken = [sum(use[purpose] for purpose in purposes) for use in uses]
            pairs = enumerate(zip(taken, most, strict=True))
            over = {position: (took, has) for position, (took, has) in pairs if took > has}
            assert not over, (number, purposes)
