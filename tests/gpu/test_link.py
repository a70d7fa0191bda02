"""What crosses the link between a GPU and main memory, what does not need to, and buffers that are given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.engine.measure.telemetry import Span
from ratel_cli.engine.steps.pinned import block_buffers, other_bytes, unit_buffers
from ratel_cli.engine.steps.state import StepOutcome
from ratel_cli.errors import Interrupted
from ratel_cli.io.buffers import PinMemory
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.profile.placement import GroupShape, Placement, Workload
from ratel_cli.planning.time.step_time import Resource
from ratel_cli.sizes import GROUP_ELEMENTS, PAGE_BYTES
from ratel_cli.units import align_up
from tests.engine.architectures import tiny_config
from tests.engine.exactness import AHEAD, assert_same_training, check_training, reference
from tests.engine.machine import random_steps
from tests.engine.swaps import EVERYTHING, PRODUCTS
from tests.engine.test_step import StopAfter
from tests.gpu.machine import GPU, NEEDS_GPU, gpu_machine
from tests.planning.steps import planned_step
from tests.reference import Recipe
from tests.simulated_gpu import is_simulated, num_stops
from tests.tiers import rotating

pytestmark = NEEDS_GPU

LEFT_BYTES = 128 << 10
"""For rows of the embedding, norms, and a buffer more where transfers overlap longer than usual."""


@pytest.mark.parametrize(
    ("gpu_units_from", "gpu_weights"), [(None, ()), (6, ()), (5, (3,)), (3, (2, 3)), (0, (1, 2, 3))]
)
@pytest.mark.parametrize("prefetch_blocks", [0, 2])
def test_what_is_resident_on_the_gpu_is_not_copied_again(
    tmp_path: Path, prefetch_blocks: int, gpu_units_from: int | None, gpu_weights: tuple[int, ...]
) -> None:
    """Three layers (blocks 1 to 3) and two micro-batches: units 0 and 1 belong to the first layer."""
    config, recipe, steps = tiny_config("llama", num_hidden_layers=3), Recipe(dtype=torch.bfloat16), random_steps(2, 2)
    placement = Placement(
        prefetch_blocks=prefetch_blocks,
        swapped=EVERYTHING,
        gpu_units_from=gpu_units_from,
        gpu_weights=frozenset(gpu_weights),
    )
    with gpu_machine(tmp_path, config, recipe, placement=placement) as ratel:
        assert_same_training(
            ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe, device=GPU.type)
        )
        spans = ratel.timeline.take().spans
    num_moved = 6 if gpu_units_from is None else gpu_units_from
    in_each_step = Counter(f"activations of block {number // 2 + 1}" for number in range(num_moved))
    assert Counter(labels(spans, "down", "activations")) == in_each_step + in_each_step
    uploads = Counter(labels(spans, "up", "activations"))
    num_tensors = max(2, uploads["activations of block 1"] // 4)  # of a unit; each has an upload of its own
    assert uploads == {name: 2 * count * num_tensors for name, count in in_each_step.items()}
    again = Counter(
        span.label.block
        for span in spans
        if span.resource == "up" and span.label.text.startswith("weights") and span.label.stage == "backward"
    )
    assert {block: again[block] for block in (1, 2, 3)} == {
        block: 0 if block in gpu_weights else 2 for block in (1, 2, 3)
    }


def labels(spans: Sequence[Span], resource: Resource, prefix: str) -> list[str]:
    return [span.label.text for span in spans if span.resource == resource and span.label.text.startswith(prefix)]


@pytest.mark.parametrize(
    ("num_micro_batches", "gradient_dtype", "holds_sums"),
    rotating([1, 3], [torch.float32, torch.bfloat16], [False, True], full_pairs=True),
)
def test_gradients_are_summed(
    tmp_path: Path, holds_sums: bool, num_micro_batches: int, gradient_dtype: torch.dtype
) -> None:
    """On the GPU, or in host memory."""
    config, recipe = tiny_config("llama_tied"), Recipe(dtype=torch.bfloat16, gradient_dtype=gradient_dtype)
    placement = replace(AHEAD, gpu_holds_sums=holds_sums)
    check_training(gpu_machine, tmp_path, config, recipe, num_micro_batches=num_micro_batches, placement=placement)


@pytest.mark.full
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_the_host_does_not_wait_for_the_gpu_between_layers(tmp_path: Path, max_grad_norm: float | None) -> None:
    """The host waits for batches, masks (transformers checks if rows are packed) and the loss. It does not wait for
    each block, neither for norms nor to learn whether they are finite."""
    if not is_simulated():
        pytest.skip("counted by the simulated GPU")
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    counts = []
    for num_layers in (2, 5):
        config = tiny_config("llama", num_hidden_layers=num_layers)
        with gpu_machine(tmp_path / str(num_layers), config, recipe, placement=AHEAD) as ratel:
            steps = random_steps(2, 3)
            ratel.train(steps[:1], recipe)
            before = num_stops()
            ratel.train(steps, recipe)
            counts.append(num_stops() - before)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_every_buffer_is_given_back(tmp_path: Path, max_grad_norm: float | None) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    placement = replace(AHEAD, swapped=EVERYTHING)
    with gpu_machine(tmp_path, tiny_config("llama_tied"), recipe, placement=placement) as ratel:
        ratel.train(random_steps(2, 2), recipe)
        assert ratel.pool.leased_bytes == 0


@pytest.mark.parametrize(("num_checks", "spilled_units"), rotating(range(6), [0, 2]))
def test_a_stop_between_blocks_gives_every_buffer_back(tmp_path: Path, num_checks: int, spilled_units: int) -> None:
    recipe = Recipe(dtype=torch.bfloat16)
    placement = Placement(prefetch_blocks=1, pending_updates=1, swapped=EVERYTHING, spilled_units=spilled_units)
    with gpu_machine(tmp_path, tiny_config("llama"), recipe, placement=placement) as ratel:
        before = ratel.weights()
        stopped = ratel.make_engine(StopAfter(num_checks))
        with pytest.raises(Interrupted):
            stopped.run(random_steps(1, 2)[0], step=0, update=1, learning_rate=1.0)
        assert ratel.pool.leased_bytes == 0
        assert all(torch.equal(before[name], after) for name, after in ratel.weights().items())
        assert ratel.train(random_steps(1, 2), recipe)[0].applied


def noting(pinned: list[int]) -> PinMemory:
    """Accepts all memory, and notes its sizes."""

    def pin(address: int, num_bytes: int) -> Callable[[], None]:
        pinned.append(num_bytes)
        return lambda: None

    return pin


def test_memory_is_not_pinned_again_in_each_step(tmp_path: Path) -> None:
    """Pinning costs as much as filling, so the pool saves leased buffers for the next step."""
    pinned: list[int] = []
    recipe, steps = Recipe(dtype=torch.bfloat16), random_steps(4, 2)
    placement = replace(AHEAD, swapped=EVERYTHING)
    with gpu_machine(tmp_path, tiny_config("llama"), recipe, placement=placement, pin=noting(pinned)) as ratel:
        ratel.train(steps[:2], recipe)
        num_pinned = len(pinned)
        assert num_pinned > 0
        ratel.train(steps, recipe)
        # Twice as many steps would pin twice as much again. Transfers may overlap a little more than they did before.
        assert len(pinned) < 2 * num_pinned


@pytest.mark.parametrize(
    ("changes", "max_grad_norm"),
    [
        ({}, None),
        ({}, 0.5),
        ({"resident_weights": frozenset(range(5)), "gpu_units_from": 4}, None),
        ({"spilled_units": 4, "gpu_holds_sums": False}, 0.5),
        ({"gpu_holds_sums": False, "prefetch_blocks": 0, "pending_updates": 0}, None),
    ],
    ids=["eager", "held", "resident", "spilled", "nothing ahead"],
)
def test_a_step_pins_nothing_of_weight_that_could_be_pinned_ahead(
    tmp_path: Path, changes: dict[str, Any], max_grad_norm: float | None
) -> None:
    """What is left to it: rows of the embedding, norms, and a buffer more where transfers overlap longer than usual."""
    num_layers, num_micro_batches = 3, 2
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    others = {"swapped": EVERYTHING, "gpu_units_from": None, "gpu_holds_sums": True}
    placement = replace(AHEAD, **{**others, **changes})
    config, pinned = tiny_config("llama", num_hidden_layers=num_layers), list[int]()
    [outcome] = _trained(tmp_path / "sizes", config, recipe, Placement(swapped=EVERYTHING))
    unit_bytes = outcome.swapped_bytes // (num_layers * num_micro_batches)
    with gpu_machine(tmp_path / "run", config, recipe, placement=placement, pin=noting(pinned)) as ratel:
        spec = ratel.model.spec
        used = replace(placement, gpu_embedding_rows=1 << 20)
        workload = Workload(micro_batch_size=2, num_micro_batches=num_micro_batches, sequence_len=12)
        step = planned_step(spec, workload, holds_gradients=max_grad_norm is not None, on_gpu=True)
        buffers = [
            *unit_buffers(used, [unit_bytes] * num_layers, num_micro_batches),
            *block_buffers(PlacedStep(step, used), spilled_segments=0),
        ]
        # As little as the step needs besides, so that nothing of what is pinned has to be given up for it.
        others = other_bytes(spec, replace(used, groups=GroupShape(elements=GROUP_ELEMENTS)))
        wanted_bytes = sum(align_up(each.num_bytes, PAGE_BYTES) * each.number for each in buffers)
        ratel.pool.limit_bytes = wanted_bytes + others + LEFT_BYTES
        ratel.pool.pin_ahead(buffers, ratel.pool.limit_bytes - others)
        ahead_bytes, layer_bytes = sum(pinned), 2 * spec.blocks[1].num_elements
        pinned.clear()
        ratel.train(random_steps(1, num_micro_batches), recipe)
        assert sum(size >= layer_bytes for size in pinned) <= 1, (pinned, buffers)
        assert ahead_bytes == wanted_bytes


def _trained(directory: Path, config: PretrainedConfig, recipe: Recipe, placement: Placement) -> list[StepOutcome]:
    with gpu_machine(directory, config, recipe, placement=placement) as ratel:
        return ratel.train(random_steps(1, 2), recipe)


@pytest.mark.full
@pytest.mark.parametrize("spilled_units", [0, 4])
def test_buffers_for_rows_of_any_width_are_reused(tmp_path: Path, spilled_units: int) -> None:
    """Samples that are not packed have another width in each step. Nothing is ahead here, so that the number of buffers
    hardly depends on what happens to overlap."""
    placement = Placement(swapped=PRODUCTS, spilled_units=spilled_units)
    most_tokens = 64

    def pins(name: str, widths: Sequence[int]) -> tuple[list[int], int]:
        """Buffers that each step pinned, and the most bytes that the pool had."""
        pinned: list[int] = []
        before_step: list[int] = []
        steps = [random_steps(1, 2, packed=False, num_tokens=width)[0] for width in widths]
        with gpu_machine(
            tmp_path / name,
            tiny_config("llama", num_hidden_layers=3),
            Recipe(dtype=torch.bfloat16),
            placement=placement,
            micro_batch_tokens=2 * most_tokens,
            pin=noting(pinned),
        ) as ratel:
            ratel.train(steps, Recipe(dtype=torch.bfloat16), before_step=lambda _: before_step.append(len(pinned)))
            return [after - before for before, after in pairwise([*before_step, len(pinned)])], ratel.pool.peak_bytes

    _, widest_bytes = pins("widest", [most_tokens] * 2)
    by_step, peak_bytes = pins("any", [40, 24, most_tokens, 8, 48, 16, 56, 32, 60, 12])
    assert sum(by_step[3:]) <= 2, by_step  # were units pinned again, there would be at least two in each step
    assert peak_bytes <= 1.05 * widest_bytes  # a gradient may leave while another is waited for
    by_step, peak_bytes = pins("growing", range(8, most_tokens + 1, 8))
    assert sum(num_pinned > 2 for num_pinned in by_step) <= 4, by_step  # at 8, 16, 24 and 40 tokens
    assert peak_bytes <= 1.05 * widest_bytes


def test_optimizer_states_are_not_pinned(tmp_path: Path) -> None:
    """They never cross the link: neither groups nor the states that stay in host memory."""
    recipe, num_layers = Recipe(dtype=torch.bfloat16), 2
    blocks = frozenset(range(num_layers + 2))
    pinned: list[int] = []
    sizes = []
    for resident in (frozenset[int](), blocks):
        placement = replace(AHEAD, resident_states=resident, resident_weights=blocks)
        pinned.clear()
        with gpu_machine(
            tmp_path / str(len(resident)),
            tiny_config("llama", num_hidden_layers=num_layers),
            recipe,
            placement=placement,
            pin=noting(pinned),
        ) as ratel:
            ratel.train(random_steps(2, 2), recipe)
            fp32_bytes = {4 * block.num_elements for block in ratel.model.spec.blocks}
        assert not fp32_bytes & set(pinned), "m and v have four bytes for each parameter"
        sizes.append(set(pinned))  # how many of a size depends on what happens to overlap
    assert sizes[0] == sizes[1]
