"""The engine asks of a device no more than it promises: behind a link that is always late, it gives the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from ratel_cli.engine.device import About, HostDevice, open_device
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.errors import Interrupted
from ratel_cli.model.spec import ModelSpec
from ratel_cli.movement.buffers import BufferPool, Lease
from ratel_cli.planning.placement import Placement
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.engine.lagging_device import LaggingDevice, open_lagging_device
from tests.engine.machine import attention_of, initial_weights, machine, random_steps
from tests.engine.swaps import EVERYTHING, ChosenEverywhere
from tests.engine.test_exactness import AHEAD, PLACEMENTS, assert_same_training, reference
from tests.engine.test_step import StopAfter
from tests.reference import Recipe

ABOUT = About(label="bytes", block=3, stage="backward")


@pytest.fixture
def lease() -> Iterator[Lease]:
    with BufferPool(None) as pool, pool.lease(8, "test") as lease:
        lease.memory[:] = bytes(range(8))
        yield lease


def test_the_host_copies_nothing(lease: Lease) -> None:
    timeline = Timeline()
    with open_device(torch.device("cpu"), timeline) as device:
        arrival = device.upload(lease.memory, device.reserve(8), ABOUT)
        values = arrival.open()
        arrival.wait()
        lease.memory[0] = 42
        assert values.tolist() == [42, 1, 2, 3, 4, 5, 6, 7]
        device.collect()
    assert timeline.take().spans == ()


def test_the_host_has_done_what_it_was_told(lease: Lease) -> None:
    timeline = Timeline()
    device = HostDevice(timeline)
    departure = device.download([(torch.tensor([9, 8], dtype=torch.uint8), lease.memory[2:4])], ABOUT)
    assert departure.done
    departure.wait()
    before = device.mark()
    with device.refusing(), device.computing(ABOUT):
        pass
    after = device.mark()
    assert lease.memory.tolist() == [0, 1, 9, 8, 4, 5, 6, 7]
    down, compute = timeline.take().spans
    assert (down.resource, compute.resource) == ("down", "compute")
    assert {(span.label, span.block, span.stage) for span in (down, compute)} == {("bytes", 3, "backward")}
    assert before() <= compute.start <= compute.end <= after()


def test_the_lagging_device_notices_who_does_not_wait(lease: Lease) -> None:
    device = LaggingDevice(Timeline())
    arrival = device.upload(lease.memory, device.reserve(8), ABOUT)
    lease.memory[0] = 42
    with pytest.raises(AssertionError, match="host memory changed"):
        arrival.wait()
    tensor = torch.tensor([9, 8], dtype=torch.uint8)
    departure = device.download([(tensor, lease.memory[2:4])], ABOUT)
    assert not departure.done and lease.memory[2:4].tolist() != [9, 8]
    tensor.zero_()
    with pytest.raises(AssertionError, match="overwritten before it had left"):
        departure.wait()


def test_what_leaves_may_come_back_before_it_has_arrived(lease: Lease) -> None:
    device = LaggingDevice(Timeline())
    departure = device.download([(torch.full((8,), 5, dtype=torch.uint8), lease.memory)], ABOUT)
    arrival = device.upload(lease.memory, device.reserve(8), ABOUT, after=departure)
    assert arrival.open().tolist() == [5] * 8


def assert_same_behind_a_link(
    directory: Path,
    config: PretrainedConfig,
    recipe: Recipe,
    *,
    num_steps: int = 2,
    num_micro_batches: int = 2,
    devices: Callable[[Timeline], AbstractContextManager[LaggingDevice]] = open_lagging_device,
    **options: object,
) -> ModelSpec:
    """In bf16, against plain PyTorch. Returns what was trained."""
    with machine(
        directory,
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        devices=devices,
        **options,  # type: ignore[arg-type]
    ) as ratel:
        steps = random_steps(num_steps, num_micro_batches, packed=ratel.model.packs)
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))
    return ratel.model.spec


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_what_stays_and_what_runs_ahead_changes_no_bit_behind_a_link(
    tmp_path: Path, architecture: str, max_grad_norm: float | None, placement: str
) -> None:
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
    assert_same_behind_a_link(tmp_path, tiny_config(architecture), recipe, num_steps=4, **PLACEMENTS[placement])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("share", "spilled_units"), [(1.0, 0), (0.5, 4), (0.2, 99)])
def test_swapping_changes_no_bit_behind_a_link(
    tmp_path: Path, architecture: str, share: float, spilled_units: int
) -> None:
    config = tiny_config(architecture)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=0.5, attn_implementation=attention_of(config))
    placement = replace(AHEAD, swapped=ChosenEverywhere(share, 7), spilled_units=spilled_units)
    assert_same_behind_a_link(tmp_path, config, recipe, placement=placement)


@pytest.mark.parametrize(("kept_from", "kept_weights"), [(None, ()), (6, ()), (5, (3,)), (3, (2, 3)), (0, (1, 2, 3))])
@pytest.mark.parametrize("prefetch_blocks", [0, 2])
def test_what_is_kept_goes_neither_down_nor_up_again(
    tmp_path: Path, prefetch_blocks: int, kept_from: int | None, kept_weights: tuple[int, ...]
) -> None:
    """Three layers and two micro-batches: units 0 and 1 are the first layer's, blocks 1 to 3 are layers."""
    config, recipe = tiny_config("llama", num_hidden_layers=3), Recipe(dtype=torch.bfloat16)
    placement = Placement(
        prefetch_blocks=prefetch_blocks,
        swapped=EVERYTHING,
        kept_from=kept_from,
        kept_weights=frozenset(kept_weights),
    )
    devices: list[LaggingDevice] = []

    @contextmanager
    def watched(timeline: Timeline) -> Iterator[LaggingDevice]:
        with open_lagging_device(timeline) as device:
            devices.append(device)
            yield device

    spec = assert_same_behind_a_link(tmp_path, config, recipe, placement=placement, devices=watched)
    [device] = devices
    num_moved = 6 if kept_from is None else kept_from
    in_each_step = Counter(f"activations of block {number // 2 + 1}" for number in range(num_moved))

    def of_activations(abouts: Sequence[About]) -> Counter[str]:
        return Counter(about.label for about in abouts if about.label.startswith("activations"))

    assert of_activations(device.went_down) == of_activations(device.went_up) == in_each_step + in_each_step
    layers = {block.name: block.index for block in spec.blocks[1:-1]}
    again = [
        layers[about.label.removeprefix("weights of ")]
        for about in device.went_up
        if about.stage == "backward" and about.label.removeprefix("weights of ") in layers
    ]
    assert Counter(again) == Counter({number: 2 for number in (1, 2, 3) if number not in kept_weights})


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_sums_are_made_on_the_device(tmp_path: Path, num_micro_batches: int, gradient_dtype: torch.dtype) -> None:
    recipe = Recipe(dtype=torch.bfloat16, gradient_dtype=gradient_dtype)
    assert_same_behind_a_link(tmp_path, tiny_config("llama_tied"), recipe, num_micro_batches=num_micro_batches)


def test_every_buffer_is_given_back_behind_a_link(tmp_path: Path) -> None:
    config = tiny_config("llama_tied")
    for max_grad_norm in (None, 0.5):
        recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=max_grad_norm)
        with machine(
            tmp_path / str(max_grad_norm),
            config,
            recipe,
            dtype="bfloat16",
            weights=initial_weights(config),
            placement=replace(AHEAD, swapped=EVERYTHING),
            devices=open_lagging_device,
        ) as ratel:
            ratel.train(random_steps(2, 2), recipe)
            assert ratel.pool.leased_bytes == 0


@pytest.mark.parametrize("spilled_units", [0, 2])
@pytest.mark.parametrize("asked", range(6))
def test_a_stop_between_blocks_gives_every_buffer_back_behind_a_link(
    tmp_path: Path, asked: int, spilled_units: int
) -> None:
    config = tiny_config("llama")
    recipe = Recipe()
    placement = Placement(prefetch_blocks=1, pending_updates=1, swapped=EVERYTHING, spilled_units=spilled_units)
    with machine(
        tmp_path, config, recipe, weights=initial_weights(config), placement=placement, devices=open_lagging_device
    ) as ratel:
        before = ratel.weights()
        stopped = ratel.make_engine(StopAfter(asked))
        with pytest.raises(Interrupted):
            stopped.run(random_steps(1, 2)[0], step=0, update=1, learning_rate=1.0)
        assert ratel.pool.leased_bytes == 0
        assert all(torch.equal(before[name], after) for name, after in ratel.weights().items())
        assert ratel.train(random_steps(1, 2), recipe)[0].applied


def test_evaluation_is_the_same_behind_a_link(tmp_path: Path) -> None:
    config = tiny_config("gpt2")
    [batches] = random_steps(1, 3)
    sums = []
    for devices in (open_lagging_device, lambda timeline: open_device(torch.device("cpu"), timeline)):
        with machine(
            tmp_path / str(len(sums)), config, Recipe(), weights=initial_weights(config), devices=devices
        ) as ratel:
            sums.append(ratel.engine.evaluate(batches))
    assert sums[0] == sums[1]


def test_memory_is_not_made_anew_in_each_step_behind_a_link(tmp_path: Path) -> None:
    """Pinning costs as much as filling: what was leased once is kept for the next step."""
    made = []

    def pin(address: int, num_bytes: int) -> None:
        made.append(num_bytes)

    config = tiny_config("llama")
    recipe = Recipe(dtype=torch.bfloat16)
    steps = random_steps(4, 2)
    with machine(
        tmp_path,
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        placement=replace(AHEAD, swapped=EVERYTHING),
        devices=open_lagging_device,
        pin=pin,
    ) as ratel:
        ratel.train(steps[:2], recipe)
        num_made = len(made)
        assert num_made > 0
        ratel.train(steps, recipe)
        assert len(made) <= num_made + 2  # transfers may once overlap more than they did before
