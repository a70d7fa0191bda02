"""Every draw is a function of the seed, the step, the block and the micro-batch, and differs in each of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ratel_cli.engine.steps.state import draw_seed
from tests.engine.architectures import tiny_config
from tests.engine.machine import Machine, initial_weights, machine, random_steps
from tests.reference import Recipe, seed_of_draws

NUMBERS = st.integers(0, 2**40)


def test_the_rule_never_changes() -> None:
    """A resumed run must draw what the first one would have drawn, whatever version of Ratel began it."""
    assert draw_seed(42, step=0, block=0, micro_batch=0) == 3542620368399934404
    assert draw_seed(42, step=7, block=3, micro_batch=1) == 4273908353291446003


@given(seed=NUMBERS, step=NUMBERS, block=NUMBERS, micro_batch=NUMBERS)
def test_the_oracle_has_the_same_rule(seed: int, step: int, block: int, micro_batch: int) -> None:
    found = draw_seed(seed, step=step, block=block, micro_batch=micro_batch)
    assert found == seed_of_draws(seed, step=step, block=block, micro_batch=micro_batch)


def test_no_two_places_share_a_seed() -> None:
    places = list(itertools.product(range(6), repeat=4))
    seeds = {draw_seed(seed, step=step, block=block, micro_batch=batch) for seed, step, block, batch in places}
    assert len(seeds) == len(places)


@contextmanager
def masks_of(ratel: Machine) -> Iterator[dict[str, list[bytes]]]:
    """What every dropout module drops while this is open: by the module's name, in the order of the calls."""
    masks: defaultdict[str, list[bytes]] = defaultdict(list)
    handles = [
        module.register_forward_hook(
            lambda module, args, output, name=name: masks[name].append((output == 0).numpy().tobytes())
        )
        for name, module in ratel.model.skeleton.named_modules()
        if isinstance(module, nn.Dropout) and module.p > 0
    ]
    try:
        yield masks
    finally:
        for handle in handles:
            handle.remove()


def test_masks_differ_by_seed_step_block_and_micro_batch(tmp_path: Path) -> None:
    """GPT-2's own dropout modules, while the engine trains. Backward's masks are held by the exactness tests."""
    config = tiny_config("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.0)
    weights, num_steps, num_micro_batches = initial_weights(config), 3, 2
    [[batch]] = random_steps(1, 1)
    drawn: list[bytes] = []
    for seed in (1, 2):
        recipe = Recipe(seed=seed)
        with machine(tmp_path / str(seed), config, recipe, weights=weights) as ratel:
            for step in range(num_steps):
                with masks_of(ratel) as masks:
                    ratel.train([[batch] * num_micro_batches] * (step + 1), recipe)
                assert len(masks) == 1 + 2 * config.n_layer  # the embedding's, and each layer's two
                for of_module in masks.values():
                    drawn += of_module[:num_micro_batches]  # those of forward
    assert len(set(drawn)) == len(drawn) == 2 * num_steps * num_micro_batches * (1 + 2 * config.n_layer)
