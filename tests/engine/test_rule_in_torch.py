"""A rule in plain torch, with a value for each row and each column of a matrix, trains the bits of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.planning.profile.placement import Placement
from ratel_cli.schedule.rules import CHOICES
from ratel_cli.schedule.slices import fullest_slice, ranges_in
from ratel_cli.sizes import BLOCK_ALIGNMENT, CHUNK_ELEMENTS, DtypeName
from ratel_cli.store.layout import RankSlice
from tests import factored
from tests.engine.architectures import larger_config
from tests.engine.exactness import AHEAD, check_training
from tests.engine.machine import initial_weights, machine, random_steps
from tests.engine.test_optimizers import WAYS
from tests.engine.test_step import NOTHING_SPILLED, moved_by_last_step
from tests.planning.steps import step_traffic
from tests.reference import Recipe
from tests.tiers import rotating, sample

RECIPE = Recipe(optimizer="factored", learning_rate=0.01, weight_decay=0.1)


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHOICES, "factored", factored.CHOICE)


@pytest.mark.parametrize(
    ("dtype", "architecture", "max_grad_norm"),
    rotating(["bfloat16", "float32", "float16"], ["llama_tied", "gpt2", "gpt_oss"], [None, 0.5]),
)
def test_it_trains_the_bits_of_pytorch(
    tmp_path: Path, dtype: DtypeName, architecture: str, max_grad_norm: float | None
) -> None:
    recipe = replace(RECIPE, dtype=getattr(torch, dtype), max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, larger_config(architecture), recipe, num_steps=3)


@pytest.mark.parametrize("way", sample(list(WAYS), every=4))
def test_where_states_rest_and_when_updates_run_changes_no_bit(tmp_path: Path, way: str) -> None:
    recipe = replace(RECIPE, dtype=torch.bfloat16, max_grad_norm=0.5)
    check_training(machine, tmp_path, larger_config("llama_tied"), recipe, num_steps=3, **WAYS[way])


def test_weights_without_a_master_are_rounded_stochastically(tmp_path: Path) -> None:
    recipe = replace(RECIPE, dtype=torch.bfloat16, bf16_master="stochastic")
    check_training(machine, tmp_path, larger_config("llama"), recipe, num_steps=3)


def test_blocks_of_several_groups_and_chunks(tmp_path: Path) -> None:
    """A matrix of several groups is one, and a field of its rows one chunk; vectors are cut."""
    config = larger_config("llama", vocab_size=(3 * CHUNK_ELEMENTS + 20_000) // larger_config("llama").hidden_size)
    check_training(
        machine,
        tmp_path,
        config,
        replace(RECIPE, dtype=torch.bfloat16),
        placement=AHEAD,
        group_elements=BLOCK_ALIGNMENT,
        chunk_elements=CHUNK_ELEMENTS,
    )


def test_its_fields_and_what_a_step_moves(tmp_path: Path) -> None:
    """To the byte as predicted; rows and columns take a page each here."""
    config, recipe = larger_config("llama"), replace(RECIPE, dtype=torch.bfloat16)
    with machine(tmp_path, config, recipe, dtype="bfloat16", weights=initial_weights(config)) as ratel:
        spec = ratel.model.spec
        moved = moved_by_last_step(ratel, recipe, random_steps(3, 2))
        wanted = step_traffic(spec, Placement(), NOTHING_SPILLED, holds_gradients=False)
    assert moved == (wanted.read_bytes, wanted.written_bytes)
    for block in spec.blocks:
        is_stack = len(block.parameters[0].shape) > 1
        assert block.rule is (factored.OF_STACKS if is_stack else factored.OF_VECTORS)
        if is_stack:
            [parameter], number = block.parameters, block.num_elements
            sizes = {field.name: field.num_values(number) for field in block.record.fields}
            assert (sizes["rows"], sizes["columns"]) == parameter.shape
            assert block.record_bytes == 4 * number + max(number // 8, 4096) + 2 * 4096, block.name


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_matrix_is_one_ranks(tmp_path: Path, num_ranks: int) -> None:
    config = larger_config("llama")
    with machine(tmp_path, config, RECIPE, dtype="float32", weights=initial_weights(config)) as ratel:
        spec = ratel.model.spec
    owners = [0] * num_ranks
    for block in spec.blocks:
        ranges = ranges_in(block, num_ranks)
        assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), block.num_elements]
        if block.rule.takes_whole:
            [owner] = [rank for rank, (start, stop) in enumerate(ranges) if start < stop]
            owners[owner] += 1
            assert spec.sliced(RankSlice(owner, num_ranks)).blocks[block.index].parameters == block.parameters
    assert max(owners) - min(owners) <= 1
    of_ranks = [spec.sliced(RankSlice(rank, num_ranks)).record_bytes for rank in range(num_ranks)]
    assert spec.sliced(fullest_slice(spec.blocks, num_ranks)).record_bytes == max(of_ranks)
