"""What a step is asked for, and the decision where its bytes lie: `Workload`, `Placement`. Pure.

`planning/search/choose.py` decides on a placement from limits and measured rates; the engine follows it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import BlockSpec, with_rows
from ratel_cli.schedule.segments import Segment
from ratel_cli.schedule.uses import Stage
from ratel_cli.sizes import GROUP_ELEMENTS, Filling

AccessMode = Literal["GFGB", "DHA", "DFGB"]
"""How a GPU gets weights (MemFerry): it is sent them for forward and for backward, or reads them in host memory in
both, or in forward alone."""
ACCESS_MODES: Final[tuple[AccessMode, ...]] = ("GFGB", "DHA", "DFGB")

Overlap = Literal["optimized", "naive", "separate"]
"""How the optimizer runs. `optimized`: overlapped with computing, and the transfers of one group overlapped with the
update of another. `naive`: overlapped with computing, one transfer or update at a time. `separate`: between backward
and the next forward."""
ActivationPolicy = Literal["auto", "keep", "recompute", "swap_all", "static"] | float
"""Which operator outputs stay available from forward to backward. `auto`: as the plan finds best. `keep`: all, in
memory. `recompute` and `static`: none. `swap_all`: all. A number: this share of their bytes. Layers' inputs are always
offloaded."""
SPILL_WINDOW_UNITS = 3
"""Buffers for spilled units: one is in use, one is transferred, one waits so that the drive does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of one full step."""

    micro_batch_size: int
    """Rows of a micro-batch."""
    num_micro_batches: int
    sequence_len: int
    """Tokens of a row."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once, at most; None: as many as have 64 MiB of logits."""
    filling: Filling | None = None
    """What of it the steps of the data have, from which times follow; memory is that of a full step. None: all of
    it."""

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.micro_batch_size * self.sequence_len

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.micro_batch_tokens * self.num_micro_batches

    @property
    def full_micro_batches(self) -> float:
        """Full micro-batches that have as many tokens as a step of the data, padding included."""
        return self.num_micro_batches if self.filling is None else self.num_micro_batches * self.filling.computed

    @property
    def computed_tokens(self) -> float:
        """These tokens."""
        return self.full_micro_batches * self.micro_batch_tokens

    @property
    def data_tokens(self) -> float:
        """Tokens of samples in a step of the data."""
        return self.tokens if self.filling is None else self.tokens * self.filling.tokens

    @property
    def mean(self) -> Workload:
        """A step of the data, in whole micro-batches and tokens."""
        if self.filling is None:
            return self
        number = max(1, round(self.num_micro_batches * self.filling.micro_batches))
        width = self.full_micro_batches * self.sequence_len / number
        return replace(self, num_micro_batches=number, sequence_len=max(1, round(width)), filling=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """How the optimizer walks through a block (engine/optimizer/pipeline.py)."""

    elements: int = GROUP_ELEMENTS
    """Parameters that it reads, updates and writes as one group."""
    in_flight: int = 1
    """Groups that are read while one is updated, and groups that are written meanwhile."""

    @property
    def num_buffers(self) -> int:
        """Groups that have buffers at once."""
        return 2 * self.in_flight + 1

    def buffer_bytes(self, blocks: Sequence[BlockSpec]) -> int:
        """Host memory of these buffers, for any group of these blocks, and of what torch computes an update in."""
        groups = max(block.record.num_bytes(block.group_elements(self.elements)) for block in blocks)
        return self.num_buffers * groups + max(block.update_buffer_bytes(self.elements) for block in blocks)


class AfterGradient(NamedTuple):
    """A moment in the backward of a layer."""

    parameter: str
    """Name within the layer of the parameter whose gradient has been made."""
    num_bytes: int
    """What the tensors of the next unit may take in GPU memory from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsOnGpu:
    """What units may take in GPU memory where two whole ones do not fit.

    Of the next unit in backward, the largest tensors that fit go up while one is in use, the others when it is done.
    """

    forward_bytes: int
    """Outputs of the unit that forward makes, and tensors of the one before until their downloads have ended."""
    ahead_bytes: int
    """Tensors of the next unit in backward, while the one in use is recomputed and backward is at its peak."""
    moments: Mapping[int, tuple[AfterGradient, ...]] = field(default_factory=dict)
    """By block: what they may take later in its backward, in the order in which that grows."""


LEAST_UNITS: Final = UnitsOnGpu(forward_bytes=0, ahead_bytes=0)
"""The placement of units that needs least memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where bytes lie and how far transfers run ahead.

    The default takes the least memory: nothing is resident and nothing runs ahead.

    Units are what one layer offloads for one micro-batch, counted in forward order: layer by layer, and within a layer
    micro-batch by micro-batch.
    """

    prefetch_blocks: int = 0
    """Compute weights are read up to this many segments ahead of the one that computes."""
    pending_updates: int = 0
    """Up to this many segments may wait for their update to be written while the next one computes."""
    resident_weights: frozenset[int] = frozenset()
    """Segments whose compute weights stay in host memory: read in the first step only."""
    resident_states: frozenset[int] = frozenset()
    """Segments whose optimizer states stay in host memory: read in the first step only."""
    swapped: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """By segment: keys (engine/replay/tape.py) of the operators whose outputs are offloaded in forward and fetched in
    backward. All others are recomputed from the layer's input, which is always offloaded."""
    spilled_units: int = 0
    """The first units go to NVMe; their turn in backward comes last. The others stay in host memory or on the GPU."""
    gpu_units_from: int | None = None
    """Units from this one on stay in the GPU's memory; backward begins with them. None: no unit does."""
    gpu_weights: frozenset[int] = frozenset()
    """Layers whose compute weights stay in the GPU's memory from forward to backward: the last ones."""
    gpu_embedding_rows: int | None = None
    """To look up tokens, a GPU gets their rows instead of the embedding's matrix: this many at most, the tokens of a
    full step. None: it gets the matrix."""
    read_in_place: Mapping[str, AccessMode] = field(default_factory=dict)
    """How a GPU gets parameters that are not uploaded for each use, by name: DHA reads host memory in forward and in
    backward, DFGB in forward alone. Of a matrix whose rows go up, it reads the rows and nothing else."""
    gpu_window_bytes: int = 0
    """GPU memory for weights of the next segment while one computes: for its first parameters, as many as fit."""
    gpu_units: UnitsOnGpu | None = None
    """What units may take in GPU memory on their way down and up. None: room for two units of any size."""
    gpu_leaving_bytes: int = 0
    """GPU memory for gradients until their downloads have ended. Each segment takes at least what its largest parameter
    needs."""
    gpu_holds_sums: bool = False
    """Whether the GPU holds the sums of a layer's gradients over several micro-batches; otherwise host memory does."""
    gpu_holds_lookup: bool = False
    """Whether the GPU holds a tied head's gradient until the embedding's is there; otherwise host memory does."""
    gpu_holds_head: bool = True
    """Whether the GPU holds the sums of the head's gradients over the chunks of tokens; otherwise host memory does."""
    adamw_threads: int = 1
    """Threads that update one group of parameters together."""
    groups: GroupShape = GroupShape()
    """What the optimizer reads, updates and writes at once."""
    deferred: frozenset[int] = frozenset()
    """Segments whose update waits for the next step's forward even when nothing has to be clipped."""

    def update_stage(self, index: int, *, holds_gradients: bool, overlap: Overlap) -> Stage:
        """The stage in which segment `index` is updated. Unless that is `backward`, its gradient is held until then.

        `holds_gradients`: nothing is updated before the last gradient is there.
        """
        return update_stage(is_deferred=index in self.deferred, holds_gradients=holds_gradients, overlap=overlap)


def update_stage(*, is_deferred: bool, holds_gradients: bool, overlap: Overlap) -> Stage:
    """The stage in which a segment is updated; see `Placement.update_stage`."""
    if overlap == "separate":
        return "update"
    return "forward" if holds_gradients or is_deferred else "backward"


def most_rows(spec: ModelSpec, workload: Workload) -> int | None:
    """The placement's `gpu_embedding_rows`: None if the model's code reads more than rows, or may need all."""
    most = num_looked_up(spec, workload.tokens)
    return most if spec.looks_up_rows and most < spec.num_rows else None


def num_looked_up(spec: ModelSpec, num_tokens: int) -> int:
    """The most rows of the embedding's matrix that are looked up for this many tokens."""
    return num_tokens + len(spec.substitutes)


def looked_up(spec: ModelSpec, num_rows: int | None) -> Segment:
    """The embedding as a GPU gets it to look up tokens: with this many rows of its matrix; None is all."""
    if num_rows is None:
        return spec.embedding
    blocks = (with_rows(block, num_rows) if block.is_looked_up else block for block in spec.embedding.blocks)
    return replace(spec.embedding, blocks=tuple(blocks))


@lru_cache(maxsize=256)
def gradient_bytes(spec: ModelSpec, num_rows: int | None) -> tuple[int, ...]:
    """Size of each segment's gradients as they are downloaded and held. A head that borrows the matrix gives every row
    a gradient."""
    sizes = [segment.gradient_bytes for segment in spec.segments]
    if sizes and num_rows is not None and not spec.tied:
        sizes[:1] = [looked_up(spec, num_rows).gradient_bytes]
    return tuple(sizes)


def bytes_ahead(segment: Segment, window_bytes: int) -> int:
    """Weights of a segment that go up while the one before computes: its first parameters, as many as fit."""
    number = bisect_right(segment.cuts, window_bytes)
    return segment.cuts[number - 1]


def tensors_ahead(num_bytes: Sequence[int], most_bytes: int, *, taken: Collection[int] = ()) -> list[int]:
    """Which tensors of these sizes go up in `most_bytes`: the largest that fits, then the next. `taken` have done so
    before."""
    left_bytes = most_bytes - sum(num_bytes[number] for number in taken)
    found = []
    for number in sorted(range(len(num_bytes)), key=lambda number: -num_bytes[number]):
        if number not in taken and num_bytes[number] <= left_bytes:
            found.append(number)
            left_bytes -= num_bytes[number]
    return found
