"""The blocks of a model that computes without training: where they come from, and how they fit into the limits.

Invariant: what is planned here stays within `limits`, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ratel_cli.engine.reading.block_reader import BlockReader, BlockSource, weights_bytes
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.gpu import gpu_limit
from ratel_cli.hardware.host import kept_bytes
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties.activations import RUNTIME_BYTES
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs.base import Base
from ratel_cli.units import format_bytes

AnyBase = TypeVar("AnyBase", bound=Base)


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
    streamed.base.model.move_to(context.device)
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
