"""One whole step: its traffic to the byte, memory given back, steps abandoned that are not finite, stops."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.optimizer.gradients import first_not_finite
from ratel_cli.engine.replay.tape import Recorder
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.errors import BadInput, Interrupted
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.updates import checksum_bytes
from ratel_cli.planning.profile.activations import offload
from ratel_cli.planning.profile.placement import Placement
from ratel_cli.sizes import DtypeName
from tests.engine.architectures import tiny_config
from tests.engine.machine import Machine, initial_weights, machine, progress_at, random_steps
from tests.engine.swaps import EVERYTHING
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import rotating

NOTHING_SPILLED = offload([0], num_micro_batches=1, spilled_units=0)
GRADIENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def spilled_segments(spec: ModelSpec, gradient_bytes: int, held_in_memory_bytes: int) -> int:
    """By brute force: gradients arrive last block first; the first that does not fit is spilled, and all after it."""
    held = 0
    for position, block in enumerate(reversed(spec.blocks)):
        held += block.num_elements * gradient_bytes
        if held > held_in_memory_bytes:
            return len(spec.blocks) - position
    return 0


def moved_by_last_step(ratel: Machine, recipe: Recipe, steps: Sequence[Sequence[MicroBatch]]) -> tuple[int, int]:
    """NVMe bytes (read, written) from the last decision but one to the last, after all overlapped work has ended."""
    read, written = 0, 0
    for step, batches in enumerate(steps):
        ratel.engine.run(
            batches,
            step=step,
            update=step + 1,
            learning_rate=recipe.learning_rate,
            loss_scale=recipe.loss_scale,
            commit_previous=ratel.commit,
        )
        ratel.decided = step + 1
        if step == len(steps) - 2:
            read, written = moved_when_quiet(ratel)
    moved = moved_when_quiet(ratel)
    ratel.settle()
    return moved[0] - read, moved[1] - written


def moved_when_quiet(ratel: Machine) -> tuple[int, int]:
    """NVMe bytes (read, written), once updates that can be are written, and nothing has changed for a while."""
    ratel.engine._updates._pipeline.wait_unfinished(at_most=0)
    before, num_quiet = (-1, -1), 0
    while num_quiet < 5:  # gradients that are held on the drives: a thread may stall for longer than one of these waits
        time.sleep(0.02)
        is_quiet = before == (before := (ratel.queue.read_bytes, ratel.queue.written_bytes))
        num_quiet = num_quiet + 1 if is_quiet else 0
    return before


UPDATES: dict[str, tuple[DtypeName, float | None, int | None]] = {
    "float32": ("float32", None, None),
    "bfloat16": ("bfloat16", None, None),
    "bfloat16, clipped": ("bfloat16", 1e-3, None),
    "bfloat16, clipped, some on disk": ("bfloat16", 1e-3, 40_000),
    "float16, clipped, all on disk": ("float16", 1e-3, 0),
}
"""Compute dtype, limit of the gradient's norm, and bytes of gradients that may be held in memory."""
AHEAD = Placement(prefetch_blocks=2, pending_updates=2, resident_weights=frozenset((0,)))
PLACEMENTS = {
    "nothing ahead": Placement(),
    "one ahead": replace(AHEAD, prefetch_blocks=1, pending_updates=1),
    "two ahead": AHEAD,
    "five ahead": replace(AHEAD, prefetch_blocks=5),
    "resident": replace(
        AHEAD,
        resident_weights=frozenset((0, 1, 2, 3)),
        resident_states=frozenset((0, 2)),
        swapped=EVERYTHING,
    ),
    "deferred": replace(AHEAD, deferred=frozenset((2, 3))),
}


@pytest.mark.parametrize(
    ("placement_name", "update", "architecture"),
    rotating(list(PLACEMENTS), list(UPDATES), ["llama", "llama_tied"], full_rotation=True),
)
def test_traffic_is_the_prediction_to_the_byte(
    tmp_path: Path, placement_name: str, update: str, architecture: str
) -> None:
    placement = PLACEMENTS[placement_name]
    dtype, max_grad_norm, held_in_memory_bytes = UPDATES[update]
    config = tiny_config(architecture)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm)
    with machine(
        tmp_path,
        config,
        recipe,
        dtype=dtype,
        weights=initial_weights(config),
        held_in_memory_bytes=held_in_memory_bytes,
        placement=placement,
    ) as ratel:
        last = moved_by_last_step(ratel, recipe, random_steps(3, 2))
        limit = held_in_memory_bytes
        wanted = step_traffic(
            ratel.model.spec,
            placement,
            NOTHING_SPILLED,
            holds_gradients=max_grad_norm is not None,
            spilled_segments=0 if limit is None else spilled_segments(ratel.model.spec, GRADIENT_BYTES[dtype], limit),
        )
        assert last == (wanted.read_bytes, wanted.written_bytes)


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3])
def test_a_layer_moves_26_bytes_per_parameter_in_bf16(tmp_path: Path, max_grad_norm: float | None) -> None:
    """For each element of the layers, gaps included, with and without clipping. The head's weights are read once."""
    config = tiny_config("llama")
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        read, written = moved_by_last_step(ratel, recipe, random_steps(3, 2))
        *others, head = (block.num_elements for block in ratel.model.spec.blocks)
        checksums = checksum_bytes(ratel.model.spec)
        assert read + written == 26 * sum(others) + 24 * head + checksums


def test_every_buffer_is_given_back(tmp_path: Path) -> None:
    config = tiny_config("llama_tied")
    for max_grad_norm in (None, 0.5):
        recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
        with machine(
            tmp_path / str(max_grad_norm), config, recipe, dtype="bfloat16", weights=initial_weights(config)
        ) as ratel:
            ratel.train(random_steps(2, 2), recipe)
            assert ratel.pool.leased_bytes == 0


def poisoned(ratel: Machine, value: float) -> None:
    """Overwrite one weight of layer 1, so that its gradient overflows."""
    spec = ratel.model.spec
    ratel.store.begin_step()
    for block in spec.blocks:
        for field in block.record.fields:
            with ratel.pool.lease(field.num_bytes(block.num_elements), "test") as lease:
                ratel.store.current().read(block.index, field.name, 0, block.num_elements, lease.memory).wait()
                if block.index == 2 and field.name == "w32":
                    torch.frombuffer(lease.memory, dtype=torch.float32)[0] = value
                ratel.store.shadow().write(block.index, field.name, 0, block.num_elements, lease.memory).wait()
    ratel.store.commit(progress_at(0))


def bits(outcome: StepOutcome) -> tuple[bytes, str | None]:
    return struct.pack("<dd", outcome.loss, outcome.grad_norm), outcome.first_not_finite


@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_a_step_that_is_not_finite_leaves_the_store_as_it_was(tmp_path: Path, hold: bool, value: float) -> None:
    config = tiny_config("llama")
    recipe = Recipe()
    with machine(tmp_path, config, recipe, weights=initial_weights(config), hold=hold) as ratel:
        poisoned(ratel, value)
        before = ratel.weights()
        [outcome] = ratel.train(random_steps(1, 2), recipe)
        assert not outcome.applied
        assert (outcome.first_not_finite == "the loss") == (not math.isfinite(outcome.loss))
        [again] = ratel.train(random_steps(1, 2), recipe)
        assert bits(again) == bits(outcome)
        after = ratel.weights()
        assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
        assert ratel.pool.leased_bytes == 0
        assert ratel.store.progress.step == 0


def test_an_overflow_in_fp16_is_skipped_and_a_smaller_scale_is_not(tmp_path: Path) -> None:
    config = tiny_config("llama")
    recipe = Recipe(dtype=torch.float16, loss_scale=2.0**24)
    with machine(tmp_path, config, recipe, dtype="float16", weights=initial_weights(config)) as ratel:
        [outcome] = ratel.train(random_steps(1, 1), recipe)
        assert not outcome.applied
        assert outcome.first_not_finite in ratel.model.parameter_names
        [outcome] = ratel.train(random_steps(1, 1), replace(recipe, loss_scale=256.0))
        assert outcome.applied
        assert outcome.first_not_finite is None


def test_the_first_gradient_in_the_models_order_is_named(tmp_path: Path) -> None:
    config = tiny_config("llama")
    recipe = Recipe()
    with machine(tmp_path, config, recipe, weights=initial_weights(config)) as ratel:
        [outcome] = ratel.train(random_steps(1, 1), recipe)
        assert outcome.first_not_finite is None
        names = ratel.model.parameter_names
    not_finite = dict.fromkeys((names[-1], names[5], names[7]), (math.nan,))  # in another order
    assert first_not_finite(dict.fromkeys(names, (1.0,)) | not_finite, names) == names[5]


def assert_undisturbed(
    directory: Path,
    config: PretrainedConfig,
    recipe: Recipe,
    steps: list[list[MicroBatch]],
    found: list[tuple[bytes, str | None]],
    weights: dict[str, torch.Tensor],
) -> None:
    """Steps and weights must be those of an undisturbed run."""
    with machine(directory / "undisturbed", config, recipe, weights=initial_weights(config)) as ratel:
        assert [bits(outcome) for outcome in ratel.train(steps, recipe)] == found
        wanted = ratel.weights()
    assert all(torch.equal(weights[name].view(torch.int32), wanted[name].view(torch.int32)) for name in wanted)


def test_a_step_that_runs_again_reads_resident_weights_again(tmp_path: Path) -> None:
    """A resident weight is damaged in memory. The second run reads it again and is right."""
    config = tiny_config("llama")
    recipe = Recipe(max_grad_norm=0.5)
    placement = Placement(prefetch_blocks=2, pending_updates=2, resident_weights=frozenset(range(5)))
    steps = random_steps(2, 2)
    with machine(tmp_path, config, recipe, weights=initial_weights(config), placement=placement) as ratel:
        [first] = ratel.train(steps[:1], recipe)
        torch.frombuffer(ratel.engine._updates._resident._weights[2].memory, dtype=torch.float32)[0] = math.nan
        [bad] = ratel.train(steps, recipe)
        assert not bad.applied
        [second] = ratel.train(steps, recipe)
        assert_undisturbed(tmp_path, config, recipe, steps, [bits(first), bits(second)], ratel.weights())


def test_in_place_a_decided_step_without_writes_is_abandoned(tmp_path: Path) -> None:
    config = tiny_config("llama")
    recipe = Recipe()
    steps = random_steps(2, 1)
    with machine(tmp_path, config, recipe, weights=initial_weights(config), in_place=True) as ratel:
        [first] = ratel.train(steps[:1], recipe)
        outcome = ratel.engine.run(steps[1], step=1, update=2, learning_rate=recipe.learning_rate)
        assert outcome.applied
    with machine(tmp_path, config, recipe) as ratel:
        assert ratel.store.progress.step == 1
        [again] = ratel.train(steps, recipe)
        assert_undisturbed(tmp_path, config, recipe, steps, [bits(first), bits(again)], ratel.weights())


class StopAfter:
    """Asks to stop after `num_checks` checks."""

    def __init__(self, num_checks: int) -> None:
        self._left = num_checks

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Interrupted(2, "stop")


@pytest.mark.parametrize("num_checks", range(6))
def test_a_stop_between_blocks_abandons_the_step(tmp_path: Path, num_checks: int) -> None:
    config = tiny_config("llama")
    recipe = Recipe()
    with machine(tmp_path, config, recipe, weights=initial_weights(config)) as ratel:
        before = ratel.weights()
        stopped = ratel.make_engine(StopAfter(num_checks))
        with pytest.raises(Interrupted):
            stopped.run(random_steps(1, 1)[0], step=0, update=1, learning_rate=1.0)
        after = ratel.weights()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert ratel.train(random_steps(1, 1), recipe)[0].applied


def test_evaluation_is_the_plain_loss_and_changes_nothing(tmp_path: Path) -> None:
    config = tiny_config("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    steps = random_steps(1, 3)
    quiet = tiny_config("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    recipe = Recipe()
    with machine(tmp_path / "a", config, recipe, weights=initial_weights(config)) as ratel:
        read, written = ratel.queue.read_bytes, ratel.queue.written_bytes
        total = ratel.engine.evaluate(steps[0]).loss
        assert ratel.queue.written_bytes == written
        assert ratel.queue.read_bytes > read
    with machine(tmp_path / "b", quiet, recipe, weights=initial_weights(config)) as ratel:
        [outcome] = ratel.train(steps, recipe)
    assert total / sum(batch.num_targets for batch in steps[0]) == outcome.loss


def test_a_parameter_without_a_gradient_in_some_steps_is_rejected(tmp_path: Path) -> None:
    config = tiny_config("llama")
    recipe = Recipe()
    with machine(tmp_path, config, recipe, weights=initial_weights(config)) as ratel:
        before = ratel.weights()
        block = ratel.model.spec.blocks[2]
        # As if the first step had left the block's first parameter without a gradient.
        ratel.engine._updates._presence[block.index] = (False, *[True] * (len(block.parameters) - 1))
        with pytest.raises(BadInput, match=f"{block.parameters[0].name} gets a gradient in some steps"):
            ratel.train(random_steps(1, 1), recipe)
        assert ratel.pool.leased_bytes == 0
        after = ratel.weights()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("architecture", "repeats"), [("llama", True), ("qwen3_moe", False)])
def test_units_that_are_alike_are_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, repeats: bool
) -> None:
    """In all steps, as long as rows have the same tokens. Routers may take another course each time."""
    finish, recorded = Recorder.finish, list[int]()

    def counted(recorder: Recorder) -> object:
        recorded.append(1)
        return finish(recorder)

    monkeypatch.setattr(Recorder, "finish", counted)
    config, recipe = tiny_config(architecture), Recipe()
    steps = [*random_steps(2, 3, packed=False), *random_steps(1, 3, num_tokens=7, packed=False)]
    with machine(tmp_path, config, recipe, weights=initial_weights(config)) as ratel:
        layers = ratel.model.spec.num_layers
        for step, batches in enumerate(steps):
            recorded.clear()
            ratel.engine.run(batches, step=step, update=step + 1, learning_rate=1e-3, commit_previous=ratel.commit)
            ratel.decided = step + 1
            assert len(recorded) == ((layers, 0, layers)[step] if repeats else 3 * layers)
        ratel.settle()
