"""A model that computes without training, a block at a time: opened from its run or its directory.

Invariant: nothing of a run or of a model's directory is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.reading.block_reader import (
    FileBlocks,
    GenerationBlocks,
    SourceBlocks,
)
from ratel_cli.errors import BadInput
from ratel_cli.model.export.checkpoint import CheckpointSource, persistent_buffers
from ratel_cli.model.export.denoiser import stored_dtype
from ratel_cli.model.files.denoiser_config import is_denoiser
from ratel_cli.model.files.kind import declared_task
from ratel_cli.model.files.skeleton import DTYPES, read_any_config, read_model_config
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs.build_language import read_language_base
from ratel_cli.run.inputs.denoiser_base import DenoiserBase, build_denoiser_base
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.named_model import NamedModel
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.streamed_blocks import AnyBase, StreamedModel
from ratel_cli.run.inputs.text_data import num_positions
from ratel_cli.run.train.open import OpenedRun, open_run
from ratel_cli.sizes import TASKS, MergeBase

_MERGING_BYTES = 12
"""Bytes for each element of a matrix that is being merged: the matrix, what is added to it, and their sum, in fp32."""
_GIVE_A_PROMPT = "give a prompt instead of --class"


def completed(named: NamedModel) -> RunConfig:
    """The config, where it is a directory's: with the data type and the length that its config.json names.

    Keys of the command line stay. Raises BadInput if the directory has no model that can be read.
    """
    if named.directory is None or named.given is None:
        return named.config
    update: dict[str, object] = {}
    task = declared_task(read_any_config(named.directory))
    if task != "causal_lm" and "datasets.0.type" not in named.given:
        [rows] = named.config.datasets
        kind = next(name for name, each in TASKS.items() if each == task)
        update["datasets"] = (rows.model_copy(update={"type": kind}),)
    model_config = read_model_config(named.directory, named.config.model_copy(update=update).task)
    dtype = next((name for name, each in DTYPES.items() if each == getattr(model_config, "dtype", None)), None)
    if dtype is not None and "dtype" not in named.given:
        update["dtype"] = dtype
    longest = num_positions(model_config.get_text_config())
    if longest is not None and "sequence_len" not in named.given:
        update["sequence_len"] = max(2, min(longest, named.config.sequence_len))
    return named.config.model_copy(update=update)


def completed_for_images(named: NamedModel) -> RunConfig:
    """The config, where it is a directory's: for latents, with the data type that its files have.

    A data type of the command line stays. Raises BadInput if the directory has no diffusion transformer.
    """
    if named.directory is None or named.given is None:
        return named.config
    if not is_denoiser(named.directory):
        raise BadInput(f"{named.directory} makes no images: it has no model of diffusers", _GIVE_A_PROMPT)
    [rows] = named.config.datasets
    update: dict[str, object] = {"datasets": (rows.model_copy(update={"type": "latents"}),)}
    dtype = None if named.config.random_init else stored_dtype(named.directory)
    if dtype is not None and "dtype" not in named.given:
        update["dtype"] = dtype
    return named.config.model_copy(update=update)


def open_streamed(context: RunContext, named: NamedModel, step: int | None) -> StreamedModel[LanguageBase]:
    """Open the language model; the context closes it. `step`: a saved step of the run; None: the last one.

    Raises BadInput if there are no such weights.
    """
    if named.directory is None:
        run = open_run(context)
        return _stored(run, run.language, step)
    _reject_step(named, step)
    base = read_language_base(context.config, context.log)
    name = f"{named.directory}, {context.config.dtype}"
    if context.config.adapter is not None:
        adapted = base.open_export(named.directory, context.resources)
        return StreamedModel(base=base, blocks=SourceBlocks(adapted), name=name, conversion_bytes=0)
    source, _ = base.open_weights(context.config, context.resources)
    assert isinstance(source, CheckpointSource)
    return StreamedModel(base=base, blocks=FileBlocks(source), name=name, conversion_bytes=source.conversion_bytes)


def open_merged(context: RunContext, step: int) -> Iterator[StreamedModel[LanguageBase]]:
    """The run's model with its adapter beside the quantised base; and what `ratel merge` makes of it."""
    from ratel_cli.run.inputs.adapted_base import AdaptedBase  # with PEFT, which other runs do not need

    run, config, resources = open_run(context), context.config, context.resources
    yield replace(_stored(run, run.language, step), name="the adapter beside the quantised base")
    assert isinstance(run.base, AdaptedBase)
    generation = run.generation(step)
    for into in get_args(MergeBase):
        base, source, merged = run.base.open_merged(
            config, generation, resources, into=into, progress=context.stop.check
        )
        yield StreamedModel(
            base=base,
            blocks=SourceBlocks(merged),
            name=f"merged, --base {into}",
            conversion_bytes=source.conversion_bytes
            + _MERGING_BYTES * max(each.num_elements for each in base.model.spec.parameters),
        )


def open_streamed_denoiser(context: RunContext, named: NamedModel, step: int | None) -> StreamedModel[DenoiserBase]:
    """Like `open_streamed`, for a diffusion transformer."""
    if named.directory is None:
        run = open_run(context)
        if not isinstance(run.base, DenoiserBase):
            raise BadInput(f"{run.base.model.spec.architecture} makes no images", _GIVE_A_PROMPT)
        return _stored(run, run.base, step)
    _reject_step(named, step)
    if context.config.task != "denoising":
        raise BadInput(f"{named.directory} makes no images: it is a language model", _GIVE_A_PROMPT)
    prepare_process()
    base = build_denoiser_base(context.config)
    source, _ = base.open_weights(context.config, context.resources)
    name = f"{named.directory}, {context.config.dtype}"
    return StreamedModel(base=base, blocks=SourceBlocks(source), name=name, conversion_bytes=0)


def _stored(run: OpenedRun, base: AnyBase, step: int | None) -> StreamedModel[AnyBase]:
    """The run's model as it is in its store. A skeleton gets the buffers."""
    if isinstance(base, LanguageBase) and persistent_buffers(base.model.skeleton):
        base.open_weights(run.context.config, run.context.resources)
    generation = run.generation(step)
    name = f"{run.context.config.output_dir}, step {generation.progress.step}"
    return StreamedModel(base=base, blocks=GenerationBlocks(generation), name=name, conversion_bytes=0)


def _reject_step(named: NamedModel, step: int | None) -> None:
    if step is not None:
        raise BadInput(f"--step {step}: {named.directory} has no saved steps; only the store of a run has them")
