"""A layer of several blocks: parameters in fp32 within a 16-bit model, and parameters that its own code has frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.planning.profile.activations import offload
from ratel_cli.sizes import DtypeName
from tests.engine.exactness import PLACEMENTS, check_training
from tests.engine.machine import attention_of, initial_weights, machine, random_steps
from tests.engine.mixed import BOTH, IN_FP32, MIXED, SHARING, TIED_AND_FROZEN, mixed_config, mixed_recipe
from tests.engine.test_step import PLACEMENTS as AHEAD_AND_RESIDENT
from tests.engine.test_step import moved_by_last_step
from tests.planning.steps import step_traffic
from tests.tiers import rotating


@pytest.mark.parametrize(
    ("family", "dtype", "max_grad_norm"),
    rotating(MIXED, ["bfloat16", "float16", "float32"], [None, 0.5], every=2, full_rotation=True),
)
def test_equals_plain_pytorch(tmp_path: Path, family: str, dtype: DtypeName, max_grad_norm: float | None) -> None:
    recipe = mixed_recipe(family, dtype, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, mixed_config(family), recipe, num_steps=3)


@pytest.mark.parametrize(
    ("placement", "family", "max_grad_norm"),
    rotating(list(PLACEMENTS), MIXED, [None, 0.5], every=12, full_rotation=True),
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, family: str, max_grad_norm: float | None) -> None:
    recipe = mixed_recipe(family, "bfloat16", max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, mixed_config(family), recipe, **PLACEMENTS[placement])


@pytest.mark.parametrize(
    ("placement", "family", "max_grad_norm"),
    rotating(list(AHEAD_AND_RESIDENT), [SHARING, *MIXED], [None, 1e-3], every=3, full_rotation=True),
)
def test_traffic_is_the_prediction_to_the_byte(
    tmp_path: Path, placement: str, family: str, max_grad_norm: float | None
) -> None:
    config = mixed_config(family)
    recipe = mixed_recipe(family, "bfloat16", max_grad_norm=max_grad_norm)
    chosen = AHEAD_AND_RESIDENT[placement]
    with machine(
        tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config), placement=chosen
    ) as ratel:
        wanted = step_traffic(
            ratel.model.spec,
            chosen,
            offload([0], num_micro_batches=1, spilled_units=0),
            holds_gradients=max_grad_norm is not None,
        )
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2, packed=False))
        assert moved == (wanted.read_bytes, wanted.written_bytes)
        assert ratel.pool.leased_bytes == sum(
            segment.own_bytes * (segment.index in chosen.resident_weights)
            + segment.state_bytes * (segment.index in chosen.resident_states)
            for segment in ratel.model.spec.segments
        )


def test_what_is_frozen_is_written_once_and_never_changes(tmp_path: Path) -> None:
    config, recipe = mixed_config(BOTH), mixed_recipe(BOTH, "bfloat16", max_grad_norm=None)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        frozen = [block for block in ratel.model.spec.blocks if not block.is_trained]
        names = {each.name for block in frozen for each in block.parameters}
        assert len(names) == 3  # of the layers that have experts
        assert ratel.store.frozen_bytes >= sum(block.compute_bytes for block in frozen) > 0
        before = ratel.weights()
        written_bytes = ratel.queue.written_bytes
        ratel.train(random_steps(1, 1, packed=False), recipe)
        after = ratel.weights()
        changed = {name for name, values in before.items() if not torch.equal(values, after[name])}
        assert changed == before.keys() - names
        assert ratel.queue.written_bytes - written_bytes < ratel.store.slot_bytes + ratel.store.frozen_bytes


def test_blocks_that_are_alike_lie_next_to_each_other() -> None:
    """So that the manifest of a model of a hundred layers stays small."""
    config = mixed_config(BOTH)
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation=attention_of(config))
    spec = find_blocks(skeleton, name="tiny").spec
    firsts, others = spec.blocks[: len(spec.segments)], spec.blocks[len(spec.segments) :]
    assert [block.segment for block in firsts] == [0, 1, 2, 3, 4, 5]
    assert {(block.dtype, block.is_trained) for block in firsts} == {("bfloat16", True)}
    assert [(block.segment, block.dtype, block.is_trained) for block in others] == [
        (segment, "float32", is_trained) for segment in (2, 3, 4) for is_trained in (True, False)
    ]
    assert [block.name for block in others[:2]] == ["layer 1, in float32", "layer 1, frozen float32"]


def test_the_embedding_of_a_model_may_have_a_frozen_part() -> None:
    config = mixed_config(TIED_AND_FROZEN)
    skeleton = build_skeleton(config, dtype="bfloat16", attn_implementation=attention_of(config))
    embedding = find_blocks(skeleton, name="tiny").spec.embedding
    assert [block.is_trained for block in embedding.blocks] == [True, False]
    assert embedding.sum_bytes == 4 * embedding.blocks[0].num_elements


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_parameters_in_fp32_are_not_rounded(dtype: DtypeName) -> None:
    config = mixed_config(IN_FP32)
    skeleton = build_skeleton(config, dtype=dtype, attn_implementation=attention_of(config))
    spec = find_blocks(skeleton, name="tiny").spec
    for each in (spec, spec.with_gradients(dtype)):
        assert {block.gradient_dtype for block in each.blocks if block.dtype == "float32"} == {"float32"}
