"""`ratel eval` and `ratel generate` on a GPU: within its limit, and with what the CPU finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.latents import save_denoiser
from tests.e2e.runs import assert_rejected, ratel, save_base, write_rows
from tests.gpu.machine import NEEDS_GPU
from tests.simulated_gpu import is_simulated

pytestmark = NEEDS_GPU

ON_GPU = f"device={'auto' if is_simulated() else 'cuda'}"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base", hidden_size=128, tied=request.param)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.mark.full
def test_the_loss_is_that_of_the_cpu(base: Path, rows: Path) -> None:
    losses = []
    for device in ("device=cpu", ON_GPU):
        ended = ratel("eval", base, rows, device, "--json")
        assert ended.code == 0, ended.stderr
        losses.append(json.loads(ended.stdout)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_too_little_gpu_memory(base: Path, rows: Path) -> None:
    ended = ratel("eval", base, rows, ON_GPU, "micro_batch_size=512", "limits.gpu_memory=1MiB")
    assert_rejected(ended, 3, "GPU memory: evaluating needs", "short by")
    assert "hint: raise limits.gpu_memory, or lower micro_batch_size or sequence_len" in ended.stderr


@pytest.mark.full
def test_the_texts_are_those_of_the_cpu(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Which number is 3?\n4\n")
    found = []
    for device in ("device=cpu", ON_GPU):
        ended = ratel("generate", base, "--prompts", path, device, "--max-new-tokens", 5, "--json")
        assert ended.code == 0, ended.stderr
        found.append([each["token_ids"] for each in json.loads(ended.stdout)["completions"]])
    assert found[1] == found[0]


def test_the_images_are_those_of_the_cpu(tmp_path: Path) -> None:
    denoiser, found = save_denoiser(tmp_path / "dit"), []
    for name, device in (("cpu", "device=cpu"), ("gpu", ON_GPU)):
        options = ("--class", 4, "--class", 0, "--denoising-steps", 3, "--guidance", 2, "-o", tmp_path / name)
        ended = ratel("generate", denoiser, device, *options)
        assert ended.code == 0, ended.stderr
        found.append(load_file(tmp_path / name / "latents.safetensors")["latents"])
    assert torch.allclose(found[1], found[0], rtol=1e-3, atol=1e-3)


def test_too_little_gpu_memory_for_an_image(tmp_path: Path) -> None:
    denoiser = save_denoiser(tmp_path / "dit", head_dim=64)
    options = ("--class", 4, "--denoising-steps", 2, "-o", tmp_path / "images")
    ended = ratel("generate", denoiser, ON_GPU, "limits.gpu_memory=1MiB", *options)
    assert_rejected(ended, 3, "GPU memory: denoising 1 image needs", "short by")
    assert not (tmp_path / "images").exists()
