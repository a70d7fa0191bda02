"""The configuration of a diffusion transformer of diffusers, as it lies in a directory.

Pure: nothing here imports torch, so that a plan knows a sample's tokens before the model is built.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ratel_cli.commands import command
from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.values.spec import check_depth

CLASS_NAME = "DiTTransformer2DModel"
"""The class whose models can be trained: a transformer on patches of latents, with classes as conditions."""
_CONFIG_NAME = "config.json"
_MOST_BYTES = 1 << 20
_SIZES = ("in_channels", "sample_size", "patch_size", "num_layers", "num_attention_heads", "attention_head_dim",
          "num_embeds_ada_norm")  # fmt: skip
_DEFAULTS = {
    "in_channels": 4, "sample_size": 32, "patch_size": 2, "num_layers": 28, "num_attention_heads": 16,
    "attention_head_dim": 72, "num_embeds_ada_norm": 1000,
}  # fmt: skip
"""Sizes that the class has where config.json does not give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserConfig:
    """A diffusion transformer's sizes."""

    values: Mapping[str, object]
    """All of config.json."""
    channels: int
    """Channels of a latent, which is `[channels, size, size]`."""
    size: int
    patch_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_classes: int

    @property
    def sample_tokens(self) -> int:
        """Tokens of a latent: its patches."""
        per_side: int = self.size // self.patch_size
        return per_side * per_side

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """The shape of one latent."""
        return self.channels, self.size, self.size


def read_denoiser_config(directory: Path) -> DenoiserConfig:
    """The configuration in a directory. Raises BadInput if there is none, or it describes another model."""
    path = directory / _CONFIG_NAME
    if (directory / "model_index.json").is_file():
        raise BadInput(
            f"{directory} is a diffusion pipeline; only its transformer can be trained",
            f"set base_model to {directory / 'transformer'}",
        )
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadInput(f"{path}: too large for a configuration")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read: {error.strerror}", "use a directory of diffusers' save_pretrained"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {excerpt(str(error))}") from error
    found = values.get("_class_name") if isinstance(values, dict) else None
    if found != CLASS_NAME:
        what = f"{excerpt(str(found))} of diffusers" if found else "no model of diffusers"
        raise BadInput(
            f"{path}: {what}; datasets of type: latents train a {CLASS_NAME}",
            f"use a directory that {CLASS_NAME}.save_pretrained has written",
        )
    sizes = {name: values.get(name, _DEFAULTS[name]) for name in _SIZES}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise BadInput(f"{path}: {name} is {excerpt(str(size))}; it must be a number from 1 on")
    check_depth(sizes["num_layers"])
    if sizes["sample_size"] % sizes["patch_size"]:
        raise BadInput(f"{path}: sample_size {sizes['sample_size']} is no multiple of patch_size {sizes['patch_size']}")
    return DenoiserConfig(
        values=values,
        channels=sizes["in_channels"],
        size=sizes["sample_size"],
        patch_size=sizes["patch_size"],
        num_layers=sizes["num_layers"],
        num_heads=sizes["num_attention_heads"],
        head_dim=sizes["attention_head_dim"],
        num_classes=sizes["num_embeds_ada_norm"],
    )


def is_denoiser(directory: Path) -> bool:
    """Whether a directory has a model of diffusers."""
    return diffusers_class(directory) is not None


def diffusers_class(directory: Path) -> str | None:
    """The class of the model of diffusers in a directory; None if there is none."""
    try:
        values = json.loads((directory / _CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return str(values["_class_name"]) if isinstance(values, dict) and "_class_name" in values else None


def reject_denoiser(directory: Path) -> None:
    """Raise BadInput if a directory that should have a language model has one of diffusers."""
    found = diffusers_class(directory)
    if found is None:
        return
    raise BadInput(
        f"{directory} has no language model: its config.json is that of a {excerpt(found)} of diffusers",
        f"it trains on datasets of type: latents; {command('generate', directory, '--class', 'N', '-o', 'IMAGES')} "
        "shows what it makes"
        if found == CLASS_NAME
        else f"use a model of transformers; of diffusers, a {CLASS_NAME} trains on datasets of type: latents",
    )
