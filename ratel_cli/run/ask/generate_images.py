"""`ratel generate RUN|DIR --class N`: a diffusion transformer makes latents of noise, one block in memory at a time.

A picture is a latent as it is, its first three channels or its only one from -1 to 1, since no autoencoder is known:
models that learn on pixels give images, others what a decoder would be given, which is saved too.

Invariant: a picture follows from the weights, the seed, its class and its place among the classes; no file is replaced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ratel_cli.console import RunLog
from ratel_cli.data.latents import scheduler_of
from ratel_cli.engine.block_reader import BlockReader
from ratel_cli.engine.forward import BlockwiseForward
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.run.ask.streamed import StreamedModel, completed_for_images, open_streamed_denoiser
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs.denoiser_base import DenoiserBase
from ratel_cli.run.inputs.named_model import NamedModel

LATENTS_NAME = "latents.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """What to make, and how."""

    classes: tuple[int, ...]
    """Of each image."""
    num_steps: int
    """Of denoising."""
    guidance: float
    """How far predictions go from those without a class to those with it; 1: these alone."""
    step: int | None
    """A saved step of the run; None: the last one."""
    directory: Path
    """Where the files go."""


def generate_images(named: NamedModel, request: ImageRequest, log: RunLog) -> list[Path]:
    """Make an image of each class. Returns the files. Raises RatelError."""
    config = completed_for_images(named)
    device = compute_device(config.device)
    with (
        determinism(config.deterministic, device, notice=log.notice),
        open_context(config, log, device=device) as context,
    ):
        streamed = open_streamed_denoiser(context, named, request.step)
        number = streamed.base.config.num_classes
        wrong = [each for each in request.classes if not 0 <= each < number]
        if wrong:
            raise BadInput(f"--class {wrong[0]}: the model's classes are 0 to {number - 1}")
        files = _files(request)
        context.listen()
        latents = _denoised(context, streamed, request)
        _write(files, latents, request)
    return files


def _files(request: ImageRequest) -> list[Path]:
    names = [f"class-{each}-{place}.png" for place, each in enumerate(request.classes)]
    files = [request.directory / name for name in (*names, LATENTS_NAME)]
    for path in files:
        if os.path.lexists(path):
            raise BadInput(f"{path}: the file exists", "choose another directory with -o")
    return files


def _denoised(context: RunContext, streamed: StreamedModel[DenoiserBase], request: ImageRequest) -> torch.Tensor:
    """The latents of all classes, `[images, channels, height, width]` in fp32."""
    base, channels = streamed.base, streamed.base.config.channels
    scheduler: Any = scheduler_of(base.directory)
    scheduler.set_timesteps(request.num_steps)
    generator = torch.Generator().manual_seed(context.config.seed)
    labels = torch.tensor(request.classes)
    latents = torch.randn((len(labels), *base.config.latent_shape), generator=generator)
    is_guided = request.guidance != 1.0
    if is_guided:
        labels = torch.cat([labels, torch.full_like(labels, base.config.num_classes)])  # that stands for no class
    example = base.model.example
    dtype = example.inputs["hidden_states"].dtype
    with (
        BlockReader(
            base.model, streamed.blocks, context.pool, device=context.device, check_stop=context.stop.check
        ) as reader,
        context.log.bar("denoising", len(scheduler.timesteps)) as bar,
    ):
        forward = BlockwiseForward(base.model, reader)
        for timestep in scheduler.timesteps:
            given = torch.cat([latents, latents]) if is_guided else latents
            inputs = {
                "hidden_states": scheduler.scale_model_input(given, timestep).to(dtype),
                "timestep": timestep.expand(len(given)),
                "class_labels": labels,
            }
            found = forward.outputs(replace(example, inputs=inputs))[:, :channels].float().cpu()
            if is_guided:
                wanted, without = found.chunk(2)
                found = without + request.guidance * (wanted - without)
            latents = scheduler.step(found, timestep, latents, generator=generator).prev_sample
            bar.advance(1)
    return latents


def _write(files: Sequence[Path], latents: torch.Tensor, request: ImageRequest) -> None:
    from PIL import Image

    shown = latents[:, :3] if latents.shape[1] >= 3 else latents[:, :1]
    pixels = ((shown.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    try:
        request.directory.mkdir(parents=True, exist_ok=True)
        for path, each in zip(files, pixels, strict=False):
            values = each.permute(1, 2, 0).squeeze(-1).contiguous().numpy()
            Image.fromarray(values).save(path, format="PNG")
        save_file({"latents": latents.contiguous(), "labels": torch.tensor(request.classes)}, files[-1])
    except OSError as error:
        raise EnvironmentFailure(f"{request.directory}: cannot be written: {error.strerror}") from error
