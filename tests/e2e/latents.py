"""A tiny diffusion transformer, latents with classes, and the same training in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import load_file, save_file
from transformers import Trainer

from ratel_cli.config.load import load_config
from ratel_cli.data.batches.latent_files import latent_paths, open_latents
from ratel_cli.data.batches.latents import LatentSettings, NoisyLatents, scheduler_of
from ratel_cli.data.samples.sample_batch import SampleBatch
from tests.e2e.runs import DTYPES, Config
from tests.reference import Recipe, Trained, seed_of_draws, train_module

NUM_CLASSES, SHAPE = 5, (4, 8, 8)
TOKENS = 16


def save_denoiser(directory: Path, *, out_channels: int = 8, head_dim: int = 16, seed: int = 3) -> Path:
    """As many outputs as it has inputs, and as many variances, which have no loss."""
    torch.manual_seed(seed)
    model: Any = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=head_dim,
        in_channels=SHAPE[0],
        out_channels=out_channels,
        num_layers=3,
        sample_size=SHAPE[1],
        patch_size=2,
        num_embeds_ada_norm=NUM_CLASSES,
        norm_num_groups=1,
    )
    model.save_pretrained(directory)
    return directory


def write_latents(path: Path, *, number: int = 30, seed: int = 0) -> Path:
    """A latent of each class, and noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % NUM_CLASSES
    classes = torch.randn(NUM_CLASSES, *SHAPE, generator=generator)
    latents = classes[labels] + 0.1 * torch.randn(number, *SHAPE, generator=generator)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latents": latents, "labels": labels}, path)
    return path


def latents_of(config: Config) -> NoisyLatents:
    """The data of a config, as its run has it."""
    settings = load_config(config).config
    size, number = settings.known_split
    assert settings.base_model is not None
    paths = [path for each in settings.datasets for path in latent_paths(each.path)]
    return NoisyLatents(
        open_latents(paths, latent_shape=SHAPE, num_classes=NUM_CLASSES),
        LatentSettings(
            micro_batch_size=size,
            gradient_accumulation_steps=number,
            shuffle=settings.shuffle,
            seed=settings.seed,
            val_set_size=settings.val_set_size,
            sample_tokens=TOKENS,
            dtype=DTYPES[settings.dtype],
        ),
        scheduler_of(Path(settings.base_model)),
    )


def denoised_by_pytorch(
    base: Path, weights: dict[str, torch.Tensor], steps: Sequence[Sequence[SampleBatch]], recipe: Recipe
) -> Trained:
    """What plain PyTorch makes of these weights on the batches of a run. A part of the classes is dropped by draws,
    which are seeded as is promised: before each block, and behind the last one."""
    model: Any = DiTTransformer2DModel.from_pretrained(base, torch_dtype=recipe.dtype)
    model.train()
    blocks, place = list(model.transformer_blocks), [0, 0]

    def seeding(block: int) -> Callable[..., None]:
        def seed(*_: object) -> None:
            torch.manual_seed(seed_of_draws(recipe.seed, step=place[0], block=block, micro_batch=place[1]))

        return seed

    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(seeding(index + 1))
    blocks[-1].register_forward_hook(seeding(len(blocks) + 1))
    places = {id(batch): (step, number) for step, of_step in enumerate(steps) for number, batch in enumerate(of_step)}

    def loss_sum(batch: SampleBatch) -> torch.Tensor:
        place[:] = places[id(batch)]
        predicted = model(**batch.inputs).sample[:, : SHAPE[0]]
        return (predicted.float() - batch.targets["target"]).square().mean(dim=(1, 2, 3)).sum()

    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    return train_module(model, loss_sum, weights, steps, recipe, decayed=decayed)


def exported_denoiser(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of an export."""
    return load_file(directory / "diffusion_pytorch_model.safetensors")
