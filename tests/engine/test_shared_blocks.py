"""Blocks that several segments bind: where they are, what they move, and what their gradients take between two uses.

That training equals plain PyTorch, wherever bytes rest, is in test_carried.py and gpu/test_carried.py; that traffic is
the prediction, in test_mixed_blocks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ratel_cli.engine.reading.block_reader import BlockReader, GenerationBlocks, weights_bytes
from ratel_cli.errors import BadInput, Interrupted
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import Placement, bytes_ahead
from ratel_cli.schedule.lifetimes import partial_sum_lifetimes, weight_lifetimes
from ratel_cli.schedule.uses import Use, forward_uses, step_uses
from tests.engine.architectures import tiny_config
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.mixed import SHARING, mixed_config, mixed_recipe

MLP, PROJECTION = 7, 8
"""The shared blocks: the layers 0, 2 and 3 have the first one, the layers 1 and 3 the second."""


def sharing_spec() -> ModelSpec:
    skeleton = build_skeleton(mixed_config(SHARING), dtype="bfloat16", attn_implementation="sdpa")
    return find_blocks(skeleton, name="tiny").spec


def test_a_shared_block_belongs_to_the_first_that_binds_it() -> None:
    spec = sharing_spec()
    assert [(block.segment, block.borrowers) for block in spec.shared_blocks] == [(1, (3, 4)), (2, (4,))]
    assert [block.index for block in spec.shared_blocks] == [MLP, PROJECTION]
    assert [[block.index for block in layer.bound] for layer in spec.layers] == [
        [1, MLP], [2, PROJECTION], [3, MLP], [4, MLP, PROJECTION],
    ]  # fmt: skip
    assert [[block.index for block in layer.blocks] for layer in spec.layers] == [[1, MLP], [2, PROJECTION], [3], [4]]
    assert [[block.index for block in layer.begun] for layer in spec.layers] == [[MLP], [PROJECTION], [MLP], []]
    assert [[block.index for block in layer.unfinished] for layer in spec.layers] == [[], [], [MLP], [MLP, PROJECTION]]
    mlp, projection = (spec.blocks[index].compute_bytes for index in (MLP, PROJECTION))
    assert [layer.compute_bytes - layer.own_bytes for layer in spec.layers] == [0, 0, mlp, mlp + projection]
    assert ModelSpec.from_json(spec.to_json()) == spec
    names = [parameter.name for block in spec.blocks for parameter in block.parameters]
    assert len(names) == len(set(names)) and spec.num_parameters == sum(map(torch.numel, weights_of(SHARING).values()))


def weights_of(family: str) -> dict[str, torch.Tensor]:
    return initial_weights(mixed_config(family))


def test_a_block_is_read_once_while_one_of_its_uses_is_open() -> None:
    uses = step_uses(sharing_spec().segments)

    def read(ahead: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in uses]
        for weights in weight_lifetimes(uses, ahead=ahead):
            found[weights.first].append(weights.of.index)
        return found

    first = [0, 6]
    down, up = [first, [1, MLP], [2, PROJECTION], [3, MLP], [4, MLP, PROJECTION]], [[5, 0], [4, MLP, PROJECTION]]
    assert read(0)[:5] == down
    assert read(1)[:5] == [first, [1, MLP], [2, PROJECTION], [3, MLP], [4, PROJECTION]]
    assert read(2)[:5] == [first, [1, MLP], [2, PROJECTION], [3], [4]]
    assert read(0)[5:7] == up


def test_a_window_has_the_first_bytes_of_all_blocks(tmp_path: Path) -> None:
    """On a GPU, of the next segment: its first parameters, as many as fit, whichever block they are of."""
    recipe = mixed_recipe(SHARING, "bfloat16", max_grad_norm=None)
    config, weights = mixed_config(SHARING), weights_of(SHARING)
    last = sharing_spec().layers[-1]
    for number, window in enumerate((0, last.own_bytes, last.compute_bytes - 1, last.compute_bytes, 1 << 30)):
        directory, placement = tmp_path / str(number), Placement(gpu_window_bytes=window)
        with machine(directory, config, recipe, dtype="bfloat16", weights=weights, placement=placement) as ratel:
            reader = ratel.engine._reader
            reader.expect([Use(last, "forward")])
            [use] = reader._uses
            shares = reader._ahead_bytes(use)
            assert sum(shares) == bytes_ahead(last, window) <= window
            ends = [block.compute_bytes for block in last.bound]
            assert shares == ends if window >= last.compute_bytes else shares[0] == min(window, ends[0])


class Meter:
    """What the leases of shared blocks' gradients take, counted as they come and go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = self.number = 0
        lease, release = BufferPool.lease, Lease.release
        counted: dict[int, int] = {}

        def leased(pool: BufferPool, num_bytes: int, purpose: str, **keywords: object) -> Lease:
            found = lease(pool, num_bytes, purpose, **keywords)  # type: ignore[arg-type]
            if purpose.startswith("gradient of") and purpose.endswith("so far"):
                counted[id(found)] = num_bytes
                self.now += num_bytes
                self.number += 1
                self.peak = max(self.peak, self.now)
            return found

        def released(found: Lease) -> None:
            self.now -= counted.pop(id(found), 0)
            release(found)

        monkeypatch.setattr(BufferPool, "lease", leased)
        monkeypatch.setattr(Lease, "release", released)


@pytest.mark.parametrize("resident", [frozenset[int](), frozenset({1, 3}), frozenset(range(6))])
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_computing_without_training_has_a_resident_block_once(
    tmp_path: Path, resident: frozenset[int], reads_ahead: bool
) -> None:
    recipe = mixed_recipe(SHARING, "float32", max_grad_norm=None)
    with machine(tmp_path, mixed_config(SHARING), recipe, weights=weights_of(SHARING)) as ratel:
        spec, source = ratel.model.spec, GenerationBlocks(ratel.store.current())
        planned_bytes = weights_bytes(spec, resident=resident, reads_ahead=reads_ahead)
        with (
            BufferPool(planned_bytes) as pool,
            BlockReader(
                ratel.model, source, pool, device=torch.device("cpu"), resident=resident, reads_ahead=reads_ahead
            ) as reader,
        ):
            uses = forward_uses(spec.segments)
            for _ in range(2):
                reader.expect(uses)
                for segment in spec.segments:
                    with reader.open(segment):
                        pass
                reader.end_pass()
            there = {block.index for index in resident for block in spec.segments[index].bound}
            once = sum(spec.blocks[index].compute_bytes for index in there)
            lifetimes = weight_lifetimes(uses, ahead=int(reads_ahead))
            each_time = sum(each.of.compute_bytes for each in lifetimes if each.of.index not in there)
            assert pool.peak_bytes == planned_bytes
            assert reader.bytes_read == once + 2 * each_time


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_partial_sums_take_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_micro_batches: int
) -> None:
    """One for each micro-batch, from the last use of a block to its first one, whatever the number of uses."""
    meter = Meter(monkeypatch)
    recipe = mixed_recipe(SHARING, "bfloat16", max_grad_norm=None)
    with machine(tmp_path, mixed_config(SHARING), recipe, dtype="bfloat16", weights=weights_of(SHARING)) as ratel:
        ratel.train(random_steps(1, num_micro_batches, packed=False), recipe)
        spec = ratel.model.spec
    planned = {sums.of.index: (sums.first, sums.last) for sums in partial_sum_lifetimes(step_uses(spec.segments))}
    assert planned == {MLP: (6, 9), PROJECTION: (6, 8)}
    peak_bytes = num_micro_batches * sum(spec.blocks[index].compute_bytes for index in planned)
    assert (meter.peak, meter.now, meter.number) == (peak_bytes, 0, 2 * num_micro_batches)


def test_a_step_that_ends_between_two_uses_gives_all_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    recipe = mixed_recipe(SHARING, "bfloat16", max_grad_norm=None)

    def check_stop() -> None:
        if meter.now:
            raise Interrupted(15, "stopped")

    with machine(tmp_path, mixed_config(SHARING), recipe, dtype="bfloat16", weights=weights_of(SHARING)) as ratel:
        ratel.engine = ratel.make_engine(check_stop)
        with pytest.raises(Interrupted):
            ratel.train(random_steps(1, 2, packed=False), recipe)
        assert meter.number and not meter.now


def test_a_layer_that_shares_with_what_is_outside_is_refused() -> None:
    skeleton = build_skeleton(tiny_config("llama"), dtype="bfloat16", attn_implementation="sdpa")
    norm = skeleton.get_submodule("model.norm")
    skeleton.get_submodule("model.layers.1.input_layernorm").weight = norm.weight
    assert isinstance(norm.weight, nn.Parameter)
    with pytest.raises(BadInput, match=r"model\.norm\.weight and .* are one tensor, in a layer and outside"):
        find_blocks(skeleton, name="tiny")
