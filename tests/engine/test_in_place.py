"""An adapter beside a base that stays in its own files: PEFT's bits, and the bytes that the plan says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ratel_cli.planning.profile.activations import offload
from ratel_cli.sizes import DtypeName
from ratel_cli.store import base_reader
from tests.engine.architectures import tiny_config
from tests.engine.exactness import check_training
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.test_adapters import ADAPTERS, recipe_of
from tests.engine.test_step import PLACEMENTS, moved_by_last_step
from tests.planning.steps import step_traffic
from tests.tiers import rotating

LORA = ADAPTERS["all linear"]


@pytest.mark.parametrize(
    ("architecture", "dtype", "part_bytes"),
    rotating(
        ["llama", "llama_tied", "gpt2", "qwen3_moe", "mixtral", "gemma3"],
        ["bfloat16", "float32", "float16"],
        [8192, 4 << 20],
        every=2,
    ),
)
def test_adapters_are_those_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: DtypeName, part_bytes: int
) -> None:
    monkeypatch.setattr(base_reader, "PART_BYTES", part_bytes)
    recipe = recipe_of(LORA, dtype, max_grad_norm=1.0)
    placed = dict[str, object](base_directory=tmp_path / "base", chunk_elements=2048)
    check_training(machine, tmp_path, tiny_config(architecture), recipe, adapter=LORA, **placed)


@pytest.mark.parametrize(
    ("architecture", "placement"), [*(("llama", each) for each in PLACEMENTS), ("qwen3_moe", "two ahead")]
)
def test_traffic_is_the_prediction_to_the_byte(tmp_path: Path, placement: str, architecture: str) -> None:
    """With the pages around what is read of files; only the adapter's own state is written, or even in the store."""
    config, chosen = tiny_config(architecture), PLACEMENTS[placement]
    recipe = dataclasses.replace(recipe_of(LORA, "bfloat16", max_grad_norm=None), dtype=torch.bfloat16)
    before = dict[Path, bytes]()
    with machine(
        tmp_path / "store",
        config,
        recipe,
        dtype="bfloat16",
        weights=initial_weights(config),
        placement=chosen,
        adapter=LORA,
        base_directory=tmp_path / "base",
    ) as ratel:
        before |= {path: path.read_bytes() for path in (tmp_path / "base").iterdir()}
        spec = ratel.model.spec
        frozen = [block for block in spec.blocks if not block.is_trained]
        assert frozen and all(block.is_in_files for block in frozen)
        assert ratel.store.frozen_bytes < sum(block.compute_bytes for block in frozen) / 4
        unswapped = offload([0], num_micro_batches=1, spilled_units=0)
        wanted = step_traffic(spec, chosen, unswapped, holds_gradients=False)
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2, packed=False))
        assert moved == (wanted.read_bytes, wanted.written_bytes)
        if placement != "resident":
            assert wanted.forward_in_files_bytes > sum(block.compute_bytes for block in frozen) / 2
    assert {path: path.read_bytes() for path in before} == before
