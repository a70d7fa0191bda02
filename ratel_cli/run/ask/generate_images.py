"""`ratel generate RUN|DIR --class N`: a diffusion transformer makes latents of noise, one block in memory at a time.

A picture is a latent as it is, its first three channels or its only one from -1 to 1, since no autoencoder is known:
models that learn on pixels give images, others what a decoder would be given, which is saved too.

Invariant: a picture follows from the weights, the seed, its class and its place among the classes; no file is replaced.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ratel_cli.console import RunLog
from ratel_cli.data.batches.latents import scheduler_of
from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.engine.steps.forward import BlockwiseForward
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.planning.profile.activations import logits_bytes
from ratel_cli.run.ask.streamed import completed_for_images, open_streamed_denoiser
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs.denoiser_base import DenoiserBase
from ratel_cli.run.inputs.named_model import NamedModel
from ratel_cli.run.inputs.streamed_blocks import (
    BlockMemory,
    StreamedModel,
    fit_blocks,
    largest_batch,
    layer_bytes,
    open_reader,
    resident_blocks,
)
from ratel_cli.units import counted

LATENTS_NAME = "latents.safetensors"
_LATENT_COPIES = 10
"""Copies of all latents in fp32, with what the model predicts and what the scheduler makes of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """What to make, and how."""

    classes: tuple[int, ...]
    """Class of each image."""
    num_steps: int
    """Steps of denoising."""
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
        files, scheduler = _files(request), _scheduler(streamed, request)
        context.listen()
        latents = _denoised(context, streamed, scheduler, request)
        _write(files, latents, request)
    return files


def _files(request: ImageRequest) -> list[Path]:
    names = [f"class-{each}-{place}.png" for place, each in enumerate(request.classes)]
    files = [request.directory / name for name in (*names, LATENTS_NAME)]
    for path in files:
        if os.path.lexists(path):
            raise BadInput(f"{path}: the file exists", "choose another directory with -o")
    return files


def _scheduler(streamed: StreamedModel[DenoiserBase], request: ImageRequest) -> Any:  # noqa: ANN401 (no types)
    """The model's scheduler, with its timesteps. Raises BadInput."""
    scheduler = scheduler_of(streamed.base.directory)
    most = scheduler.config.num_train_timesteps
    if request.num_steps > most:
        raise BadInput(f"--denoising-steps {request.num_steps}: the model's scheduler has {counted(most, 'timestep')}")
    scheduler.set_timesteps(request.num_steps)
    return scheduler


def _denoised(
    context: RunContext,
    streamed: StreamedModel[DenoiserBase],
    scheduler: Any,  # noqa: ANN401 (diffusers has no types)
    request: ImageRequest,
) -> torch.Tensor:
    """The latents of all classes, `[images, channels, height, width]` in fp32.

    All draws are made for all images at once, so that they do not depend on the batches.
    """
    size, memory = _fit(context, streamed, request)
    generator = torch.Generator().manual_seed(context.config.seed)
    labels = torch.tensor(request.classes)
    latents = torch.randn((len(labels), *streamed.base.config.latent_shape), generator=generator)
    timesteps = scheduler.timesteps
    reader = open_reader(context, streamed, memory, resident=resident_blocks(streamed, memory))
    with (
        reader.device.translate_errors(),
        context.bar("denoising", len(timesteps) * -(-len(labels) // size)) as advance,
    ):
        forward = BlockwiseForward(streamed.base.model, reader)
        for timestep in timesteps:
            found = []
            for given, classes in zip(latents.split(size), labels.split(size), strict=True):
                scaled = scheduler.scale_model_input(given, timestep)
                found.append(_predicted(forward, streamed.base, scaled, timestep, classes, request.guidance))
                advance(1)
            latents = scheduler.step(torch.cat(found), timestep, latents, generator=generator).prev_sample
    return latents


def _predicted(
    forward: BlockwiseForward[SampleBatch],
    base: DenoiserBase,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    labels: torch.Tensor,
    guidance: float,
) -> torch.Tensor:
    """What the model predicts of `[images, channels, height, width]` with their labels, in fp32 and in host memory."""
    is_guided, example = guidance != 1.0, base.model.example
    if is_guided:
        latents = torch.cat([latents, latents])
        labels = torch.cat([labels, torch.full_like(labels, base.config.num_classes)])  # that stands for no class
    inputs = {
        "hidden_states": latents.to(example.inputs["hidden_states"].dtype),
        "timestep": timestep.expand(len(latents)),
        "class_labels": labels,
    }
    found = forward.outputs(replace(example, inputs=inputs))[:, : base.config.channels].float().cpu()
    if not is_guided:
        return found
    wanted, without = found.chunk(2)
    return without + guidance * (wanted - without)


def _fit(context: RunContext, streamed: StreamedModel[DenoiserBase], request: ImageRequest) -> tuple[int, BlockMemory]:
    """How many images are computed at once, and the memory that is left. Raises DoesNotFit if a single one does not."""
    spec, config, is_guided = streamed.spec, streamed.base.config, request.guidance != 1.0

    def fit(size: int) -> BlockMemory:
        num_samples = 2 * size if is_guided else size
        num_tokens = num_samples * config.sample_tokens
        layer = layer_bytes(streamed.base.model, batch_size=num_samples, num_tokens=config.sample_tokens)
        hidden_bytes = num_tokens * spec.passed_bytes
        return fit_blocks(
            context,
            streamed,
            working_bytes=max(layer, logits_bytes(spec, num_tokens) + 3 * hidden_bytes),
            least_bytes=hidden_bytes,
            data_bytes=_LATENT_COPIES * 4 * len(request.classes) * math.prod(config.latent_shape),
            what=f"denoising {counted(size, 'image')}",
            hint=", or leave out --guidance" if is_guided else "",
        )

    return largest_batch(len(request.classes), fit)


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
