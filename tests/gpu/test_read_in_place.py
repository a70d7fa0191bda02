"""Weights that the GPU reads in host memory: the bits of uploads, whatever is read in place (MemFerry, section IV-B).

The simulated GPU compares what work has read in place with host memory when the host learns that the work is over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.reading.embedding_rows import EmbeddingRows
from ratel_cli.io.buffers import Lease
from ratel_cli.io.views import view
from ratel_cli.planning.profile.placement import ACCESS_MODES, AccessMode
from scripts.bench import direct
from tests.engine.exactness import AHEAD, EVERY_BLOCK, check_training
from tests.gpu.machine import NEEDS_GPU, gpu_config, gpu_machine
from tests.reference import Recipe
from tests.tiers import pairwise, thinned

pytestmark = NEEDS_GPU

CHOICES: dict[str, Callable[[str], AccessMode]] = {
    "everything": lambda _: "DHA",
    "everything in forward": lambda _: "DFGB",
    "vectors": lambda name: "DHA" if "norm" in name or "ln_" in name or name.endswith("bias") else "GFGB",
    "the embedding": lambda name: "DHA" if "embed" in name or "wte" in name else "GFGB",
    "drawn": lambda name: random.Random(f"1 {name}").choice(ACCESS_MODES),
    "drawn again": lambda name: random.Random(f"2 {name}").choice(ACCESS_MODES),
}


def modes(config: PretrainedConfig, choice: str) -> dict[str, AccessMode]:
    model = AutoModelForCausalLM.from_config(config)
    return {name: CHOICES[choice](name) for name, _ in model.named_parameters()}


def train(directory: Path, choice: str, **changes: object) -> None:
    """Two steps of a small Llama in bf16, with the bits of plain PyTorch. `changes`: of the placement."""
    config = gpu_config("llama")
    placement = replace(AHEAD, read_in_place=modes(config, choice), **changes)  # type: ignore[arg-type]
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=None)
    check_training(gpu_machine, directory, config, recipe, num_steps=2, placement=placement)


@pytest.fixture
def mapped_bytes() -> Iterator[list[int]]:
    """Of each piece that is read in place."""
    found, mapped = list[int](), GpuDevice.mapped

    def noted(device: GpuDevice, memory: memoryview) -> torch.Tensor | None:
        found.append(len(memory))
        return mapped(device, memory)

    with mock.patch.object(GpuDevice, "mapped", noted):
        yield found


@pytest.mark.parametrize(
    ("choice", "architecture", "num_micro_batches", "max_grad_norm", "dtype", "window_bytes", "rows"),
    thinned(
        pairwise(
            list(CHOICES),
            ["llama", "llama_tied", "gpt2"],
            [1, 3],
            [None, 0.5],
            [torch.bfloat16, torch.float32],
            [0, 3000, 1 << 20],
            [None, 1 << 20],
        ),
        every=3,
    ),
)
def test_it_changes_no_bit(
    tmp_path: Path,
    mapped_bytes: list[int],
    choice: str,
    architecture: str,
    num_micro_batches: int,
    max_grad_norm: float | None,
    dtype: torch.dtype,
    window_bytes: int,
    rows: int | None,
) -> None:
    config = gpu_config(architecture)
    placement = replace(AHEAD, read_in_place=modes(config, choice), gpu_window_bytes=window_bytes)
    check_training(
        gpu_machine,
        tmp_path,
        config,
        Recipe(dtype=dtype, max_grad_norm=max_grad_norm),
        num_steps=3,
        num_micro_batches=num_micro_batches,
        placement=placement,
        gpu_embedding_rows=rows,
    )
    assert mapped_bytes


@pytest.mark.parametrize("resident", [False, True])
def test_what_stays_on_the_gpu_is_uploaded_once(tmp_path: Path, mapped_bytes: list[int], resident: bool) -> None:
    resident_weights = EVERY_BLOCK if resident else frozenset()
    train(tmp_path, "everything", gpu_weights=EVERY_BLOCK, resident_weights=resident_weights)
    # The embedding's matrix and the head's, neither of which stays: of three uses, each in two steps.
    assert len(mapped_bytes) == 2 * 3


def test_it_is_over_before_the_memory_is_given_back(tmp_path: Path) -> None:
    """Whoever gets the memory next may write to it at once."""
    release = Lease.release

    def scribbling(lease: Lease) -> None:
        if lease.num_users == 1:
            view(lease.memory, torch.uint8).bitwise_not_()
        release(lease)

    with mock.patch.object(Lease, "release", scribbling):
        train(tmp_path, "everything")


def test_no_row_is_collected_by_the_host(tmp_path: Path) -> None:
    with mock.patch.object(EmbeddingRows, "gather", side_effect=AssertionError):
        train(tmp_path, "the embedding")


def test_its_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    direct.main(["--width", "64", "--tokens", "8", "--seconds", "0.001"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*found["copies"]] == ["pinned up", "pinned down", "pageable up", "pageable down"]
    assert [each["tokens"] for each in (*found["products"], *found["rows"])] == [8, 8]


def test_memory_that_is_not_registered_is_uploaded(tmp_path: Path) -> None:
    with mock.patch.object(GpuDevice, "mapped", return_value=None):
        train(tmp_path, "everything")
