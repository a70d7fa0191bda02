"""An engine takes over from another one between two steps: with other bytes in memory, and the same bits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ratel_cli.planning.profile.placement import Placement
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD, EVERY_BLOCK, assert_same_training, reference
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.swaps import ChosenEverywhere
from tests.reference import Recipe
from tests.tiers import pairwise

PLANS: tuple[tuple[Placement, int | None], ...] = (
    (Placement(), None),
    (Placement(prefetch_blocks=1, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK), None),
    (Placement(prefetch_blocks=1, pending_updates=1, swapped=ChosenEverywhere(0.5), spilled_units=3), 0),
    (Placement(prefetch_blocks=2, pending_updates=2, resident_weights=frozenset({0, 2})), 3000),
    (Placement(prefetch_blocks=1, resident_weights=EVERY_BLOCK, resident_states=frozenset({1, 2})), None),
    (AHEAD, 0),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "max_grad_norm", "architecture", "in_place"),
    pairwise(range(3), [None, 1e9, 0.5], ["llama", "llama_tied"], [False, True]),
)
def test_another_plan_before_every_step_changes_no_bit(
    tmp_path: Path, first: int, max_grad_norm: float | None, architecture: str, in_place: bool
) -> None:
    config, steps = tiny_config(architecture), random_steps(6, 2)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    with machine(
        tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config), in_place=in_place
    ) as ratel:

        def follow_another(step: int) -> None:
            placement, held_in_memory_bytes = PLANS[(first + step * (1 + first)) % len(PLANS)]
            ratel.follow(placement, held_in_memory_bytes=held_in_memory_bytes)

        outcomes = ratel.train(steps, recipe, before_step=follow_another)
        assert_same_training(outcomes, ratel.weights(), reference(config, steps, recipe))


@pytest.mark.parametrize("max_grad_norm", [None, 1e9, 1e-3], ids=["unlimited", "unclipped", "clipped"])
def test_what_is_resident_is_read_once_whatever_plans_follow(tmp_path: Path, max_grad_norm: float | None) -> None:
    """The recorded step fills the memory; the steps after it read nothing, and none ends with updates in a row."""
    config, steps = tiny_config("llama"), random_steps(4, 1)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    everything = Placement(prefetch_blocks=1, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        before, updated = ratel.queue.read_bytes, []

        def follow_another(step: int) -> None:
            updated.append(ratel.queue.written_bytes)
            ratel.follow(
                everything
                if step % 2 == 0
                else Placement(
                    prefetch_blocks=2, pending_updates=1, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK
                )
            )

        ratel.train(steps, recipe, before_step=follow_another)
        sizes = [block.record_bytes for block in ratel.model.spec.blocks]
        read_bytes = ratel.queue.read_bytes - before
        if max_grad_norm == 1e-3:  # the first step speculates: what it has updated in vain by then is read again
            assert sum(sizes) <= read_bytes < 1.5 * sum(sizes)
        else:
            assert read_bytes == sum(sizes)
        assert (updated[1] == updated[0]) == (max_grad_norm == 1e-3), "a deferred update is overlapped with forward"


def test_what_no_longer_stays_is_released(tmp_path: Path) -> None:
    config, steps = tiny_config("llama"), random_steps(2, 1)
    recipe = Recipe(dtype=torch.bfloat16)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        ratel.follow(Placement(prefetch_blocks=1, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK))
        ratel.train(steps[:1], recipe)
        full = ratel.pool.leased_bytes
        ratel.follow(Placement(prefetch_blocks=1, resident_weights=frozenset({1})))
        assert 0 < ratel.pool.leased_bytes < full / 4
        ratel.train(steps, recipe)
        ratel.engine.close()
        assert ratel.pool.leased_bytes == 0


def test_states_that_stay_are_read_while_nothing_is_updated(tmp_path: Path) -> None:
    """Before the first deferred update begins, drives have time. Every byte is read once all the same."""
    config, steps = tiny_config("llama"), random_steps(3, 1)
    recipe = Recipe(dtype=torch.bfloat16)
    everything = Placement(prefetch_blocks=1, resident_weights=EVERY_BLOCK, resident_states=EVERY_BLOCK)
    with machine(
        tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config), hold=True, placement=everything
    ) as ratel:
        sizes = [block.record_bytes for block in ratel.model.spec.blocks]
        filled: list[bool] = []

        def wait_until_filled(step: int) -> None:
            until = time.monotonic() + (30 if step == 1 else 0)
            while ratel.queue.read_bytes < sum(sizes) and time.monotonic() < until:
                time.sleep(0.01)
            filled.append(ratel.queue.read_bytes == sum(sizes))

        outcomes = ratel.train(steps, recipe, before_step=wait_until_filled)
        assert filled == [False, True, True]
        assert ratel.queue.read_bytes == sum(sizes)
        assert_same_training(outcomes, ratel.weights(), reference(config, steps, recipe))
