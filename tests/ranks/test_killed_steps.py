"""Commits of all ranks, killed at every moment at which one of them makes something durable or meets the others.

Ranks are threads. One ends before or after the n-th such moment; the others get no more answers, and end. Then all
start again, go on from a step that each of them has, and get the bits of an undisturbed run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ratel_cli.engine.ranks.commits import resume_together
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.adapter_settings import AdapterSettings
from tests.engine.architectures import tiny_config
from tests.engine.machine import adapted, initial_weights, machine, random_steps
from tests.ranks.moments import KillingBarrier, KillingChannel, Moments
from tests.ranks.threads import Killed, together
from tests.reference import Recipe
from tests.tiers import rotating, sample

CONFIG, RECIPE, NUM_STEPS = tiny_config("llama", num_hidden_layers=1), Recipe(learning_rate=0.1), 3
PREPARED = tempfile.TemporaryDirectory()
NUM_GROUPS = 12
Weights = dict[str, torch.Tensor]


ADAPTERS = {"all weights": None, "lora": AdapterSettings(rank=16, alpha=8)}
"""What is trained. The adapter is large enough that each rank has a part of it."""


@cache
def model_of(rank: int, what: str) -> tuple[DecoderModel, Weights]:
    """Each rank binds weights to modules of its own. And how an adapter begins."""
    skeleton = build_skeleton(CONFIG, dtype="float32", attn_implementation="sdpa")
    adapter = ADAPTERS[what]
    drawn = {} if adapter is None else dict(adapted(skeleton, adapter, None, seed=RECIPE.seed))
    return find_blocks(skeleton, name=f"rank {rank}", gradient_dtype="float32"), drawn


def run(ranks: Ranks, directory: Path, moments: Moments, *, what: str, is_new: bool) -> tuple[int, Weights]:
    """Train to the end. Returns the step that it went on from, and what the rank has of the weights then."""
    whole, size = random_steps(NUM_STEPS, ranks.size, packed=False), 1
    steps = [step[ranks.rank * size :][:size] for step in whole]
    model, drawn = model_of(ranks.rank, what)
    watched = replace(ranks, control=KillingChannel(ranks.control, moments))
    with machine(
        directory / f"rank{ranks.rank}",
        CONFIG,
        RECIPE,
        weights={**initial_weights(CONFIG), **drawn} if is_new else None,
        model=model,
        barrier=None if is_new else KillingBarrier(moments),
        ranks=watched,
    ) as ratel:
        if is_new:
            return 0, {}
        resume_together(ratel.store, watched, ratel.pool)
        first = ratel.store.progress.step
        ratel.train(steps, RECIPE)
        return first, ratel.weights()


@cache
def prepared(size: int, what: str) -> Path:
    """A directory with the new stores of as many ranks. Tests get copies."""
    initial_weights(CONFIG)  # what transformers builds is for one thread
    for rank in range(size):
        model_of(rank, what)
    directory = Path(PREPARED.name) / what / str(size)
    for found in together(size, lambda ranks: run(ranks, directory, Moments(), what=what, is_new=True)):
        assert found == (0, {})
    return directory


def begin(size: int, directory: Path, what: str) -> Path:
    shutil.copytree(prepared(size, what), directory)
    return directory


def go_on(size: int, directory: Path, moments: Sequence[Moments], what: str) -> list[Any]:
    return together(size, lambda ranks: run(ranks, directory, moments[ranks.rank], what=what, is_new=False))


Undisturbed = Callable[[int, str], tuple[list[Weights], int]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """For a number of ranks and what they train: the weights at the end, and how many moments a rank has."""

    @cache
    def trained(size: int, what: str) -> tuple[list[Weights], int]:
        directory = begin(size, tmp_path_factory.mktemp("undisturbed") / "stores", what)
        moments = [Moments() for _ in range(size)]
        found = go_on(size, directory, moments, what)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        assert [first for first, _ in found] == [0] * size
        return [weights for _, weights in found], len(moments[0].seen)

    return trained


def same(found: Sequence[Weights], wanted: Sequence[Weights]) -> bool:
    return all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        for ours, theirs in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("group", sample(range(NUM_GROUPS), every=NUM_GROUPS))
@pytest.mark.parametrize(("size", "what"), rotating([2, 3], list(ADAPTERS), every=2, full_rotation=True))
def test_no_step_is_lost_at_any_moment(
    tmp_path: Path, undisturbed: Undisturbed, size: int, what: str, group: int
) -> None:
    wanted, num_moments = undisturbed(size, what)
    cases = [(rank, at, after) for at in range(num_moments) for rank in range(size) for after in (False, True)]
    for number, (rank, at, after) in enumerate(cases[group::NUM_GROUPS]):
        directory = begin(size, tmp_path / str(number), what)
        moments = [Moments(kill_at=at if each == rank else None, after=after) for each in range(size)]
        ended = go_on(size, directory, moments, what)
        if isinstance(ended[rank], Killed):
            assert all(isinstance(each, EnvironmentFailure | Killed | tuple) for each in ended), ended
        published = [each.seen.count("publish") for each in moments]
        found = go_on(size, directory, [Moments() for _ in range(size)], what)
        assert all(isinstance(each, tuple) for each in found), found
        firsts = {first for first, _ in found}
        assert len(firsts) == 1, "all go on from one step"
        assert firsts.pop() >= min(published) - 1, "and none that all had published is lost"
        assert same([weights for _, weights in found], wanted), (rank, at, after)
