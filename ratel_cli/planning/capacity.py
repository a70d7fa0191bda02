"""Will it fit: host memory at the peak of a step, and which held gradients there is room for.

Used by `planning.choose`. An estimate from shapes, made before anything is written; a step's buffers are
leased within the same limit, so an estimate that is too low shows as a clear error and never as a
killed process. Pure.

What is offloaded for backward (planning/activations.py) is counted as if it were there all along. Where a GPU computes,
activations and sums of gradients are in its memory (planning/gpu_memory.py), and only what goes up or comes down here.
A step is followed through its stages: forward, block by block, with deferred updates beneath it; then in
the order in which gradients arrive: head, layers downwards, embedding; then what is left to update. Each
needs memory of its own, beside what stays all along and the gradients held so far. Invariant: the split
between memory and NVMe is the one that keeps the most gradients in memory without any stage passing the
limit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.spec import BlockSpec, ModelSpec
from ratel_cli.planning.activations import (
    OffloadedActivations,
    block_activation_bytes,
    head_chunk_tokens,
    logits_bytes,
    passing_bytes,
    tied_bytes,
)
from ratel_cli.planning.gpu_memory import gpu_memory_bytes, weight_bytes_of
from ratel_cli.planning.placement import Overlap, Placement, Stage, StateBytes, Workload, block_schedule, window_bytes
from ratel_cli.sizes import GROUP_ELEMENTS
from ratel_cli.units import MIB, format_bytes

_RUNTIME_BYTES = 64 * MIB
"""What torch takes at its first step, kernels' code above all (11 to 17 MiB for a model of next to nothing), and
what an import leaves in the heap (up to 30 MiB). With it, models of 1M to 85M parameters in bf16 stayed 2 to 33 %
below the estimate, process not counted (2-core Xeon, 2026-11, before anything overlapped)."""
_NUM_GROUPS = 3
"""Of the optimizer (engine.optimizer.pipeline): one is read, one updated, one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of host memory, by what they are for at the stage of a step that takes most."""

    process: int
    """What the process takes before training: Python, torch, the skeleton."""
    hidden_states: int
    """Those between two layers, their gradients, and masks, of all micro-batches."""
    activations: int
    """Offloaded in forward for backward: layers' inputs and swapped outputs, and buffers for those that go to NVMe."""
    resident: int
    """Weights and optimizer states that stay from step to step."""
    block: int
    """Weights, gradients and optimizer states that pass through: of the block that computes, and of its neighbours."""
    working_set: int
    """Activations of one layer and one micro-batch, or one chunk of logits; and torch's own."""
    held_gradients: int
    """All that are kept in memory. Where the peak comes before the last of them, it does not hold them all."""
    device: int
    """What the compute device takes at its peak: of a GPU's memory; where the CPU computes, of this: weights that pass
    through, gradients and the working set."""
    total: int


def host_memory(
    spec: ModelSpec,
    state: StateBytes,
    workload: Workload,
    placement: Placement,
    offloaded: OffloadedActivations,
    *,
    holds_gradients: bool,
    process_bytes: int,
    limit_bytes: int,
    overlap: Overlap = "optimized",
    on_gpu: bool = False,
) -> tuple[HostMemory, int]:
    """What a step needs, and how many blocks' held gradients must go to NVMe. Raises DoesNotFit.

    Those are the first blocks, whose gradients come last. Only where all are held can any go there: what
    `placement.deferred` holds is to stay in memory.
    """
    updates = [
        placement.update_stage(block.index, holds_gradients=holds_gradients, overlap=overlap) for block in spec.blocks
    ]
    stages = _Step(spec, state, workload, placement, updates, on_gpu=on_gpu).stages()
    resident_bytes = _resident_bytes(spec, state, placement)
    hidden_bytes = passing_bytes(spec, state, tokens=workload.tokens, sequence_len=workload.sequence_len)
    gpu_bytes = 0
    if on_gpu:
        hidden_bytes = 0
        gpu_bytes = gpu_memory_bytes(spec, state, workload, largest_unit_bytes=offloaded.largest_unit_bytes)
        gpu_bytes += offloaded.gpu_bytes + weight_bytes_of(spec, state, placement.gpu_weights)
    always = process_bytes + hidden_bytes + resident_bytes + offloaded.memory_bytes
    arriving = [
        0 if stage == "backward" else block.num_elements * state.gradient
        for block, stage in zip(reversed(spec.blocks), reversed(updates), strict=True)
    ]
    held_bytes = list(accumulate(arriving, initial=0))

    def needed(num_in_memory: int) -> HostMemory:
        def total(stage: _Stage) -> int:
            return always + stage.block + stage.working_set + held_bytes[min(stage.num_held, num_in_memory)]

        peak = max(stages, key=total)
        return HostMemory(
            process=process_bytes,
            hidden_states=hidden_bytes,
            activations=offloaded.memory_bytes,
            resident=resident_bytes,
            block=peak.block,
            working_set=peak.working_set,
            held_gradients=held_bytes[num_in_memory],
            device=gpu_bytes or max(stage.block + stage.working_set for stage in stages),
            total=total(peak),
        )

    num_blocks = len(spec.blocks)
    fewest = 0 if holds_gradients or overlap == "separate" else num_blocks
    choices = range(fewest, num_blocks + 1)
    num_fitting = bisect_right(choices, limit_bytes, key=lambda num_in_memory: needed(num_in_memory).total)
    if not num_fitting:
        raise _does_not_fit(needed(fewest), limit_bytes)
    num_in_memory = choices[num_fitting - 1]
    return needed(num_in_memory), num_blocks - num_in_memory


def check_device_memory(memory: HostMemory, limit_bytes: int | None) -> None:
    """Raise DoesNotFit if the compute device needs more than the limit."""
    if limit_bytes is None or memory.device <= limit_bytes:
        return
    shortfall_bytes = memory.device - limit_bytes
    raise DoesNotFit(
        f"gpu memory: need {format_bytes(memory.device)} for one block and its working set, "
        f"have {format_bytes(limit_bytes)}: {format_bytes(shortfall_bytes)} too few",
        "raise limits.gpu_memory, or lower micro_batch_size or sequence_len",
        shortfall_bytes=shortfall_bytes,
        is_gpu_memory=True,
    )


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one stage takes by itself, and how many blocks' gradients are held beside it, in order of arrival."""

    num_held: int
    block: int
    working_set: int


class _Step:
    """The stages of one step. A gradient that a stage has in its hands counts there, and not as held."""

    def __init__(
        self,
        spec: ModelSpec,
        state: StateBytes,
        workload: Workload,
        placement: Placement,
        updates: Sequence[Stage],
        *,
        on_gpu: bool,
    ) -> None:
        self._spec = spec
        self._state = state
        self._workload = workload
        self._placement = placement
        self._updates = updates
        self._on_gpu = on_gpu
        self._uses = block_schedule(spec)
        tokens = workload.micro_batch_tokens
        self._activation_bytes = [
            0 if on_gpu else block_activation_bytes(spec, block, state, tokens=tokens) for block in spec.blocks
        ]
        largest = max(block.num_elements for block in spec.blocks)
        self._group_bytes = _NUM_GROUPS * state.record * min(GROUP_ELEMENTS, largest)
        self._tied_bytes = 0 if on_gpu else tied_bytes(spec, state, workload)

    def stages(self) -> list[_Stage]:
        num_blocks = len(self._spec.blocks)
        stages = [self._forward(position) for position in range(num_blocks - 1)]
        stages.append(self._head())
        stages.extend(self._backward(num_arrived) for num_arrived in range(1, num_blocks))
        if self._updates[0] == "update":
            stages.extend(self._separate_update(block) for block in self._spec.blocks)
        else:
            stages.append(self._turn())
        if set(self._updates) == {"forward"}:
            stages.extend(self._speculating(position) for position in range(num_blocks))
        return stages

    def _forward(self, position: int) -> _Stage:
        """One block, the window before it, and deferred updates of both."""
        is_deferred = "forward" in self._updates
        coming = self._spec.blocks[position : position + 1 + self._placement.prefetch_blocks]
        in_hand = sum(block.num_elements for block in coming if self._updates[block.index] == "forward")
        activations = self._activation_bytes[position]
        return _Stage(
            num_held=max(0, len(self._spec.blocks) - position - len(coming)) if is_deferred else 0,
            block=self._window(position) + in_hand * self._state.gradient + (self._group_bytes if is_deferred else 0),
            working_set=_RUNTIME_BYTES + activations,
        )

    def _head(self) -> _Stage:
        spec, state, tokens = self._spec, self._state, self._workload.micro_batch_tokens
        embedding, head = spec.blocks[0], spec.blocks[-1]
        # The chunks' gradients of a tied weight are added up in fp32 before they become one.
        tied_part = 4 * embedding.num_elements if spec.tied and head_chunk_tokens(spec, tokens=tokens) < tokens else 0
        multiplied = head.num_elements + (embedding.num_elements if spec.tied else 0)
        computing = multiplied * state.compute + 4 * head.num_elements + tied_part
        logits = 0 if self._on_gpu else logits_bytes(spec, tokens=tokens)
        return _Stage(
            num_held=0,
            block=self._window(len(spec.blocks) - 1, num_open=2 if spec.tied else 1)
            + self._tied_bytes
            + self._gradient(head, computing, sum_bytes=4)
            + self._groups_beneath_backward(),
            working_set=_RUNTIME_BYTES + logits + 2 * self._activation_bytes[head.index],
        )

    def _backward(self, num_arrived: int) -> _Stage:
        """One block, the window after it, and the updates of those before it that are not written yet."""
        spec, state = self._spec, self._state
        block = spec.blocks[-1 - num_arrived]
        arrived = spec.blocks[len(spec.blocks) - num_arrived :]
        pending = arrived[: self._placement.pending_updates]
        is_embedding = num_arrived == len(spec.blocks) - 1
        is_summed = self._workload.num_micro_batches > 1 or (spec.tied and is_embedding)
        sum_bytes = 4 if is_summed else state.gradient
        computing = block.num_elements * (state.compute + sum_bytes)
        return _Stage(
            num_held=num_arrived - len(pending),
            block=self._window(len(self._uses) - len(spec.blocks) + num_arrived)
            + (0 if is_embedding else self._tied_bytes)
            + self._gradient(block, computing, sum_bytes=sum_bytes)
            + self._pending(pending)
            + self._groups_beneath_backward(),
            working_set=_RUNTIME_BYTES + 2 * self._activation_bytes[block.index],
        )

    def _turn(self) -> _Stage:
        """Backward is over: the last updates end while the next forward's weights are read."""
        pending = self._spec.blocks[: self._placement.pending_updates]
        return _Stage(
            num_held=len(self._spec.blocks) - len(pending),
            block=self._window(0) + self._pending(pending) + self._group_bytes,
            working_set=_RUNTIME_BYTES,
        )

    def _speculating(self, position: int) -> _Stage:
        """Forward, up to the opening of the head, beside all gradients of a step that rightly did not wait to clip."""
        block = self._spec.blocks[position]
        is_head = position == len(self._spec.blocks) - 1
        return _Stage(
            num_held=len(self._spec.blocks),
            block=self._window(position)
            + (4 * block.num_elements + self._tied_bytes if is_head and not self._on_gpu else 0),
            working_set=_RUNTIME_BYTES + self._activation_bytes[block.index],
        )

    def _separate_update(self, block: BlockSpec) -> _Stage:
        """Groups bring the weights with them; a gradient comes back whole."""
        return _Stage(
            num_held=len(self._spec.blocks) - 1 - block.index,
            block=block.num_elements * self._state.gradient + self._group_bytes,
            working_set=_RUNTIME_BYTES,
        )

    def _window(self, position: int, *, num_open: int = 1) -> int:
        return window_bytes(self._uses, position, self._placement, compute_bytes=self._state.compute, num_open=num_open)

    def _pending(self, blocks: Sequence[BlockSpec]) -> int:
        """Gradients, and the weights that are updated and written where they lie."""
        resident = self._placement.resident_weights
        weights = sum(block.num_elements for block in blocks if block.index not in resident) * self._state.compute
        return weights + sum(block.num_elements for block in blocks) * self._state.gradient

    def _groups_beneath_backward(self) -> int:
        """Where all gradients are held, the engine may still speculate that nothing will be clipped."""
        return 0 if self._updates[0] == "update" else self._group_bytes

    def _gradient(self, block: BlockSpec, computing: int, *, sum_bytes: int) -> int:
        """What making it takes, or handing it over: the sum, its rounding and one parameter's norm."""
        if self._on_gpu:
            return block.num_elements * self._state.gradient
        rounded = self._state.gradient if sum_bytes != self._state.gradient else 0
        norm = 4 * max((parameter.num_elements for parameter in block.parameters), default=0)
        return max(computing, block.num_elements * (sum_bytes + rounded) + norm)


def _resident_bytes(spec: ModelSpec, state: StateBytes, placement: Placement) -> int:
    weights = sum(spec.blocks[index].num_elements for index in placement.resident_weights)
    states = sum(spec.blocks[index].num_elements for index in placement.resident_states)
    return weights * state.compute + states * (state.record - state.compute)


def _does_not_fit(memory: HostMemory, limit_bytes: int) -> DoesNotFit:
    shortfall_bytes = memory.total - limit_bytes
    parts = {
        "process": memory.process,
        "hidden states": memory.hidden_states,
        "activations": memory.activations,
        "resident": memory.resident,
        "one block": memory.block,
        "working set": memory.working_set,
    }
    named = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
    hint = "raise limits.host_memory, or lower micro_batch_size, gradient_accumulation_steps or sequence_len"
    return DoesNotFit(
        f"host memory: need {format_bytes(memory.total)} ({named}), "
        f"have {format_bytes(limit_bytes)}: {format_bytes(shortfall_bytes)} too few",
        hint,
        shortfall_bytes=shortfall_bytes,
    )
