"""A model that computes without training, a block at a time: opened, and fitted into the limits.

Invariants: nothing of a run or of a model's directory is changed; what is planned here stays within `limits`, whatever
the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.block_reader import (
    BlockReader,
    BlockSource,
    FileBlocks,
    GenerationBlocks,
    SourceBlocks,
    weights_bytes,
)
from ratel_cli.engine.footprint import measured_traits
from ratel_cli.errors import BadInput, DoesNotFit
from ratel_cli.hardware.gpu import gpu_limit
from ratel_cli.hardware.host import kept_bytes
from ratel_cli.model.checkpoint import CheckpointSource, persistent_buffers
from ratel_cli.model.cut_model import AnyModel
from ratel_cli.model.denoiser import stored_dtype
from ratel_cli.model.denoiser_config import is_denoiser
from ratel_cli.model.kind import declared_task
from ratel_cli.model.skeleton import DTYPES, read_any_config, read_model_config
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.analytic import analytic_profile
from ratel_cli.planning.host_lifetimes import RUNTIME_BYTES
from ratel_cli.planning.placement import Workload
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs.base import Base
from ratel_cli.run.inputs.build_language import read_language_base
from ratel_cli.run.inputs.denoiser_base import DenoiserBase, build_denoiser_base
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.named_model import NamedModel
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.text_data import num_positions
from ratel_cli.run.train.open import OpenedRun, open_run
from ratel_cli.sizes import TASKS
from ratel_cli.units import format_bytes

AnyBase = TypeVar("AnyBase", bound=Base)
_GIVE_A_PROMPT = "give a prompt instead of --class"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedModel(Generic[AnyBase]):
    """A skeleton, and where the weights of its blocks come from."""

    base: AnyBase
    blocks: BlockSource
    name: str
    """What the weights are, for a person."""
    conversion_bytes: int
    """Host memory that reading a block takes in addition to the block."""

    @property
    def spec(self) -> ModelSpec:
        """The model's blocks."""
        return self.base.model.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """How blocks are read within the limits, and what is left."""

    reads_ahead: bool
    left_bytes: int
    """What is left on the device that computes, for what stays while a block comes and goes."""
    host_left_bytes: int
    """What is left of host memory besides."""


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
        base = run.language
        if persistent_buffers(base.model.skeleton):
            base.open_weights(context.config, context.resources)
        return _stored(run, base, step)
    _reject_step(named, step)
    base = read_language_base(context.config, context.log)
    name = f"{named.directory}, {context.config.dtype}"
    if context.config.adapter is not None:
        adapted = base.open_export(named.directory, context.resources)
        return StreamedModel(base=base, blocks=SourceBlocks(adapted), name=name, conversion_bytes=0)
    source, _ = base.open_weights(context.config, context.resources)
    assert isinstance(source, CheckpointSource)
    return StreamedModel(base=base, blocks=FileBlocks(source), name=name, conversion_bytes=source.conversion_bytes)


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
    """The run's model as it is in its store."""
    generation = run.generation(step)
    name = f"{run.context.config.output_dir}, step {generation.progress.step}"
    return StreamedModel(base=base, blocks=GenerationBlocks(generation), name=name, conversion_bytes=0)


def _reject_step(named: NamedModel, step: int | None) -> None:
    if step is not None:
        raise BadInput(f"--step {step}: {named.directory} has no saved steps; only the store of a run has them")


def layer_bytes(model: AnyModel, *, batch_size: int, num_tokens: int) -> int:
    """What a layer takes at its peak in forward, with `[batch_size, num_tokens]` tokens. No block may be bound."""
    workload = Workload(micro_batch_size=batch_size, num_micro_batches=1, sequence_len=num_tokens)
    profile = analytic_profile(model.spec, workload, traits=measured_traits(model))
    return max(layer.forward_bytes for layer in profile.profiles)


def fit_blocks(
    context: RunContext,
    streamed: StreamedModel[AnyBase],
    *,
    working_bytes: int,
    least_bytes: int,
    what: str,
    hint: str,
    data_bytes: int = 0,
) -> BlockMemory:
    """How the blocks are read so that all fits into the limits. Raises DoesNotFit.

    `working_bytes`: what computing takes, and `least_bytes`: what must stay besides, both on the device that computes.
    `data_bytes`: what stays in host memory, whatever computes. `what` and `hint` are for the error.
    """
    spec = streamed.spec
    one, two = (weights_bytes(spec, reads_ahead=ahead) for ahead in (False, True))
    on_host = context.device.type == "cpu"
    needs = {
        "process": kept_bytes(),
        "weights": one + streamed.conversion_bytes,
        "working set": RUNTIME_BYTES + (working_bytes + _packed_bytes(spec) if on_host else 0),
        "held": least_bytes if on_host else 0,
        "data": data_bytes,
    }
    left = context.host_limit_bytes - sum(needs.values())
    if left < 0:
        raise _does_not_fit("RAM", needs, context.host_limit_bytes, what, f"raise limits.host_memory{hint}")
    reads_ahead = left >= two - one
    left -= two - one if reads_ahead else 0
    if on_host:
        return BlockMemory(reads_ahead=reads_ahead, left_bytes=left + least_bytes, host_left_bytes=left)
    limit_bytes = gpu_limit(context.device, context.config.limits.gpu_memory).plannable_bytes
    needs = {"weights": one, "working set": working_bytes, "held": least_bytes}
    left_on_gpu = limit_bytes - sum(needs.values())
    if left_on_gpu < 0:
        raise _does_not_fit("GPU memory", needs, limit_bytes, what, f"raise limits.gpu_memory{hint}")
    return BlockMemory(reads_ahead=reads_ahead, left_bytes=left_on_gpu + least_bytes, host_left_bytes=left)


def largest_batch(most: int, fit: Callable[[int], BlockMemory]) -> tuple[int, BlockMemory]:
    """The largest batch that fits, at most `most`, and the memory that is left. Raises DoesNotFit if one of 1 does not.

    `fit` returns the memory that a batch of this size leaves, or raises DoesNotFit.
    """
    fitting, too_large = 0, most + 1
    memory: BlockMemory | None = None
    while too_large - fitting > 1:
        size = most if too_large == most + 1 and not fitting else (fitting + too_large) // 2
        try:
            memory = fit(size)
            fitting = size
        except DoesNotFit:
            too_large = size
    return (fitting, memory) if memory is not None else (1, fit(1))


def resident_blocks(streamed: StreamedModel[AnyBase], memory: BlockMemory) -> frozenset[int]:
    """The blocks that stay in the host memory that is left, for passes that follow each other: the first ones."""
    spec = streamed.spec
    limit_bytes = memory.host_left_bytes + weights_bytes(spec, reads_ahead=memory.reads_ahead)
    chosen: frozenset[int] = frozenset()
    for segment in spec.segments:
        more = chosen | {segment.index}
        if weights_bytes(spec, resident=more, reads_ahead=memory.reads_ahead) > limit_bytes:
            break
        chosen = more
    return chosen


def _packed_bytes(spec: ModelSpec) -> int:
    """The largest matrix once more: a product in 16 bit on the CPU may copy it into another order."""
    largest = max(each.num_elements for each in spec.parameters)
    return 0 if spec.dtype_bytes == 4 else largest * spec.dtype_bytes


def open_reader(
    context: RunContext,
    streamed: StreamedModel[AnyBase],
    memory: BlockMemory,
    *,
    resident: frozenset[int] = frozenset(),
) -> BlockReader:
    """The reader of the model's blocks; the context closes it. `resident`: blocks that stay in host memory."""
    streamed.base.model.place(context.device)
    spec = streamed.spec
    context.pool.limit_bytes = weights_bytes(spec, resident=resident, reads_ahead=memory.reads_ahead)
    return context.resources.enter_context(
        BlockReader(
            streamed.base.model,
            streamed.blocks,
            context.pool,
            device=context.device,
            resident=resident,
            reads_ahead=memory.reads_ahead,
            check_stop=context.stop.check,
        )
    )


def _does_not_fit(where: str, needs: dict[str, int], limit_bytes: int, what: str, hint: str) -> DoesNotFit:
    total_bytes = sum(needs.values())
    named = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in needs.items() if num_bytes)
    shortfall_bytes = total_bytes - limit_bytes
    return DoesNotFit(
        f"{where}: {what} needs {format_bytes(total_bytes)} ({named}), "
        f"{format_bytes(limit_bytes)} available (short by {format_bytes(shortfall_bytes)})",
        hint,
        shortfall_bytes=shortfall_bytes,
        is_gpu_memory=where != "RAM",
    )
