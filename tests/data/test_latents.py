"""Latents: which samples, timesteps and noise a step gets, by rules that are written here a second time."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import save_file

from ratel_cli.data.batches.latent_files import latent_paths, open_latents
from ratel_cli.data.batches.latents import LatentSettings, NoisyLatents, scheduler_of
from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import BadInput, EnvironmentFailure

SHAPE, NUM_CLASSES = (2, 4, 4), 3
SETTINGS = LatentSettings(
    micro_batch_size=2,
    gradient_accumulation_steps=3,
    shuffle=True,
    seed=7,
    val_set_size=0,
    sample_tokens=4,
    dtype=torch.float32,
)


def _write(directory: Path, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Files of these many latents. Returns all latents and labels."""
    directory.mkdir(exist_ok=True)
    torch.manual_seed(0)
    latents = torch.randn(sum(sizes), *SHAPE)
    labels = torch.randint(NUM_CLASSES, (sum(sizes),))
    first = 0
    for number, size in enumerate(sizes):
        part = slice(first, first + size)
        save_file(
            {"latents": latents[part].clone(), "labels": labels[part].clone()}, directory / f"{number}.safetensors"
        )
        first += size
    return latents, labels


def _opened(directory: Path, settings: LatentSettings = SETTINGS, **options: Any) -> NoisyLatents:  # noqa: ANN401
    files = open_latents(latent_paths(str(directory)), latent_shape=SHAPE, num_classes=NUM_CLASSES)
    return NoisyLatents(files, settings, scheduler_of(directory), **options)


def _whole(batches: list[SampleBatch]) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([{**each.inputs, **each.targets}[name] for each in batches])
        for name in (*batches[0].inputs, "target")
    }


def test_a_step_is_what_is_promised(tmp_path: Path) -> None:
    """Each epoch has each latent once; the noise is that of the step's own seed, and is added as diffusers does."""
    latents, labels = _write(tmp_path / "set", [5, 1, 8])
    data, scheduler = _opened(tmp_path / "set"), DDPMScheduler()  # type: ignore[no-untyped-call]
    assert (data.num_samples, data.num_tokens, data.steps_per_epoch) == (14, 56, 3)
    for epoch in (0, 1):
        seen = []
        for step in range(3 * epoch, 3 * epoch + 3):
            batches = data.step(step)
            chosen = [number for each in batches for number in each.sample_ids]
            seen += chosen
            digest = hashlib.blake2b(f"7/step {step}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") // 2)
            timesteps = torch.randint(0, 1000, (len(chosen),), generator=generator)
            noise = torch.randn((len(chosen), *SHAPE), generator=generator)
            found = _whole(batches)
            assert torch.equal(found["timestep"], timesteps) and torch.equal(found["target"], noise)
            assert torch.equal(found["class_labels"], labels[chosen])
            noisy = scheduler.add_noise(latents[chosen], noise, timesteps)  # type: ignore[arg-type]
            assert torch.equal(found["hidden_states"], noisy)
        assert sorted(seen) == list(range(14))
        assert seen != list(range(14))


def test_the_split_of_a_step_changes_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "set", [13])
    data = _opened(tmp_path / "set")
    for step in (0, 2, 4):
        wanted = _whole(data.step(step))
        for size in (1, 2, 3, 6):
            split = data.split_by(size)
            assert all(torch.equal(each, wanted[name]) for name, each in _whole(split.step(step)).items())
            assert split.fingerprint == data.fingerprint
            assert [each.num_samples for each in split.step(0)] == [size] * (6 // size)
    assert [each.num_samples for each in data.step(2)] == [1]


def test_held_out_samples_have_the_same_noise_every_time(tmp_path: Path) -> None:
    _write(tmp_path / "set", [10])
    data = _opened(tmp_path / "set", replace(SETTINGS, val_set_size=4))
    first, again = _whole(list(data.eval_batches())), _whole(list(data.eval_batches()))
    assert all(torch.equal(each, again[name]) for name, each in first.items())
    assert (data.num_samples, data.num_eval_samples) == (6, 4)
    held_out = {number for each in data.eval_batches() for number in each.sample_ids}
    assert not held_out & {number for each in data.step(0) for number in each.sample_ids}
    other, _ = _write(tmp_path / "other", [3]), None
    files = open_latents(latent_paths(str(tmp_path / "other")), latent_shape=SHAPE, num_classes=NUM_CLASSES)
    apart = _opened(tmp_path / "set", eval_files=files)
    assert (apart.num_samples, apart.num_eval_samples) == (10, 3)
    assert torch.equal(_whole(list(apart.eval_batches()))["class_labels"], other[1])


def test_what_changes_a_batch_changes_the_fingerprint(tmp_path: Path) -> None:
    _write(tmp_path / "set", [6])
    data = _opened(tmp_path / "set")
    prints = {data.fingerprint}
    for changes in ({"seed": 8}, {"shuffle": False}, {"val_set_size": 1}, {"gradient_accumulation_steps": 2}):
        prints.add(_opened(tmp_path / "set", replace(SETTINGS, **changes)).fingerprint)  # type: ignore[arg-type]
    velocity: Any = DDPMScheduler(prediction_type="v_prediction")  # type: ignore[no-untyped-call]
    velocity.save_config(tmp_path / "set")
    prints.add(_opened(tmp_path / "set").fingerprint)
    (tmp_path / "set" / "scheduler_config.json").unlink()
    save_file({"latents": torch.ones(6, *SHAPE), "labels": torch.zeros(6).long()}, tmp_path / "set" / "0.safetensors")
    prints.add(_opened(tmp_path / "set").fingerprint)
    assert len(prints) == 7


def test_without_shuffling_samples_come_in_order(tmp_path: Path) -> None:
    _write(tmp_path / "set", [4, 3])
    data = _opened(tmp_path / "set", replace(SETTINGS, shuffle=False))
    assert [number for step in (0, 1) for each in data.step(step) for number in each.sample_ids] == list(range(7))


def test_a_model_may_learn_the_latent_itself(tmp_path: Path) -> None:
    latents, _ = _write(tmp_path / "set", [4])
    scheduler: Any = DDPMScheduler(prediction_type="sample")  # type: ignore[no-untyped-call]
    scheduler.save_config(tmp_path / "set")
    batches = _opened(tmp_path / "set").step(0)
    chosen = [number for each in batches for number in each.sample_ids]
    assert torch.equal(_whole(batches)["target"], latents[chosen])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"_class_name": "FlowMatchEulerDiscreteScheduler"}', "FlowMatchEulerDiscreteScheduler that learns epsilon"),
        ('{"_class_name": "DDIMScheduler", "prediction_type": "flow"}', "DDIMScheduler that learns flow"),
        ("[", "not a scheduler's configuration"),
    ],
)
def test_a_scheduler_of_another_kind_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    _write(tmp_path / "set", [4])
    (tmp_path / "set" / "scheduler_config.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        _opened(tmp_path / "set")


def test_a_file_that_is_gone_fails_by_name(tmp_path: Path) -> None:
    _write(tmp_path / "set", [4])
    data = _opened(tmp_path / "set")
    (tmp_path / "set" / "0.safetensors").unlink()
    with pytest.raises(EnvironmentFailure, match=r"0\.safetensors: cannot be read"):
        data.step(0)


def test_nothing_left_to_train_on_is_rejected(tmp_path: Path) -> None:
    _write(tmp_path / "set", [2])
    with pytest.raises(BadInput, match="leaves nothing to train on"):
        _opened(tmp_path / "set", replace(SETTINGS, val_set_size=2))
    assert np.array_equal(_opened(tmp_path / "set")._files.starts, [0, 2])
