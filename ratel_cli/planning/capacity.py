"""Will it fit: host memory at the peak of a step, and which held gradients there is room for.

Used by `planning.plan`. An estimate from shapes, made before anything is written; a step's buffers are
leased within the same limit, so an estimate that is too low shows as a clear error and never as a
killed process. Pure.

A step is followed through its stages in the order in which gradients arrive: head, layers downwards,
embedding, and the update of what was held. Each needs memory of its own, beside what stays all along
and the gradients held so far. Invariant: the split between memory and NVMe is the one that keeps the
most gradients in memory without any stage passing the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ratel_cli.errors import DoesNotFit
from ratel_cli.model.spec import BlockSpec, ModelSpec, ParameterSpec
from ratel_cli.planning.traffic import StateBytes
from ratel_cli.units import MIB, format_bytes

_RUNTIME_BYTES = 64 * MIB
"""What torch takes at its first step, kernels' code above all (11 to 17 MiB for a model of next to nothing), and
what an import leaves in the heap (up to 30 MiB). With it, models of 1M to 85M parameters in bf16 stayed 2 to 33 %
below the estimate, process not counted (2-core Xeon, 2026-11)."""
_CHUNK_LOGITS_BYTES = 64 * MIB
_LOGITS_COPIES = 4
"""Logits in fp32 and in the compute dtype, their softmax and their gradient (engine.loss)."""
_GROUP_ELEMENTS = 1 << 21
"""Of the optimizer (engine.adamw)."""
_ACTIVE_EXPERTS = 8
"""Of a stack of experts, those that a token visits: the most that models in use choose."""
_WIDTHS_OF_VECTORS = 10
"""Norms, residuals, rotations and attention, in hidden sizes per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of one step."""

    micro_batch_size: int
    num_micro_batches: int
    sequence_len: int

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_size * self.sequence_len

    @property
    def tokens(self) -> int:
        """Tokens of a full step."""
        return self.micro_batch_tokens * self.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Bytes of host memory, by what they are for at the stage of a step that takes most."""

    process: int
    """What the process takes before training: Python, torch, the skeleton."""
    block_inputs: int
    """Hidden states and masks of all micro-batches."""
    block: int
    """Weights, gradients and optimizer states."""
    working_set: int
    """Activations of one layer and one micro-batch, or one chunk of logits; and torch's own."""
    held_gradients: int
    """All that are kept in memory. Where the peak comes before the last of them, it does not hold them all."""
    total: int


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one stage takes by itself, and how many blocks' gradients came before it."""

    num_arrived: int
    block: int
    working_set: int


def host_memory(
    spec: ModelSpec,
    state: StateBytes,
    workload: Workload,
    *,
    holds_gradients: bool,
    process_bytes: int,
    limit_bytes: int,
) -> tuple[HostMemory, int]:
    """What a step needs, and how many blocks' held gradients must go to NVMe. Raises DoesNotFit.

    Those are the first blocks, whose gradients come last.
    """
    stages = _stages(spec, state, workload)
    always = process_bytes + _input_bytes(spec, state, workload)
    arriving = [block.num_elements * state.gradient for block in reversed(spec.blocks)] if holds_gradients else []

    def needed(num_in_memory: int) -> HostMemory:
        def total(stage: _Stage) -> int:
            held = sum(arriving[: min(stage.num_arrived, num_in_memory)])
            return always + stage.block + stage.working_set + held

        peak = max(stages, key=total)
        return HostMemory(
            process=process_bytes,
            block_inputs=always - process_bytes,
            block=peak.block,
            working_set=peak.working_set,
            held_gradients=sum(arriving[:num_in_memory]),
            total=total(peak),
        )

    for num_in_memory in range(len(arriving), -1, -1):
        memory = needed(num_in_memory)
        if memory.total <= limit_bytes:
            return memory, len(arriving) - num_in_memory
    raise _does_not_fit(memory, limit_bytes)


def _stages(spec: ModelSpec, state: StateBytes, workload: Workload) -> list[_Stage]:
    """In order of the arrival of gradients; then the update of held ones, block by block."""
    tokens = workload.micro_batch_tokens
    embedding, head = spec.blocks[0], spec.blocks[-1]
    # The head's part of a tied embedding's gradient waits, in fp32, for the embedding's own.
    # So do, in the compute dtype, its rows of the step's distinct tokens, once for each micro-batch.
    tied_sum = 4 * embedding.num_elements if spec.tied else 0
    if spec.tied:
        distinct = min(workload.tokens, spec.vocab_size)
        tied_sum += workload.num_micro_batches * distinct * spec.hidden_size * state.compute
    chunk_tokens = min(tokens, max(16, _CHUNK_LOGITS_BYTES // (4 * spec.vocab_size)))
    tied_part = 4 * embedding.num_elements if spec.tied and chunk_tokens < tokens else 0
    logits = _LOGITS_COPIES * 4 * chunk_tokens * spec.vocab_size + _layer_bytes(spec, head, state, tokens)
    head_weights = head.num_elements + (embedding.num_elements if spec.tied else 0)
    stages = [
        _Stage(
            0,
            max(
                # The chunks' gradients of a tied weight are added up in fp32 before they become one.
                head_weights * state.compute * 2 + 4 * head.num_elements + tied_sum + tied_part,
                _handing_over(head, state, sum_bytes=4) + tied_sum,
            ),
            _RUNTIME_BYTES + logits,
        )
    ]
    for num_arrived, block in enumerate(reversed(spec.blocks[:-1]), start=1):
        is_summed = workload.num_micro_batches > 1 or (spec.tied and block is embedding)
        sum_bytes = 4 if is_summed else state.gradient
        computing = block.num_elements * (2 * state.compute + sum_bytes)
        others_sum = 0 if block is embedding else tied_sum
        stages.append(
            _Stage(
                num_arrived,
                max(computing, _handing_over(block, state, sum_bytes=sum_bytes)) + others_sum,
                _RUNTIME_BYTES + _layer_bytes(spec, block, state, tokens),
            )
        )
    fetched = max(block.num_elements for block in spec.blocks) * state.gradient
    stages.append(_Stage(len(spec.blocks), fetched + state.record * _GROUP_ELEMENTS, _RUNTIME_BYTES))
    return stages


def _handing_over(block: BlockSpec, state: StateBytes, *, sum_bytes: int) -> int:
    """Weights, the sum, its rounding and one parameter's norm; then, in place of the norm, the update's group."""
    rounded = state.gradient if sum_bytes != state.gradient else 0
    norm = 4 * max((parameter.num_elements for parameter in block.parameters), default=0)
    group = state.record * min(block.num_elements, _GROUP_ELEMENTS)
    return block.num_elements * (state.compute + sum_bytes + rounded) + max(norm, group)


def _layer_bytes(spec: ModelSpec, block: BlockSpec, state: StateBytes, tokens: int) -> int:
    """Every matrix leaves one output and its gradient for each token, and there are vectors of the hidden size."""
    width = sum(_output_width(parameter) for parameter in block.parameters if block.kind == "layer")
    return 2 * tokens * (width + _WIDTHS_OF_VECTORS * spec.hidden_size) * state.compute


def _output_width(parameter: ParameterSpec) -> int:
    *stacked, rows, columns = (1, 0, 0, *parameter.shape) if len(parameter.shape) < 2 else (1, *parameter.shape)
    return min(math.prod(stacked), _ACTIVE_EXPERTS) * max(rows, columns)


def _input_bytes(spec: ModelSpec, state: StateBytes, workload: Workload) -> int:
    """Each layer's input, the current hidden states and their gradients; a mask for every row."""
    hidden = (spec.num_layers + 2) * workload.tokens * spec.hidden_size * state.compute
    return hidden + workload.tokens * workload.sequence_len


def _does_not_fit(memory: HostMemory, limit_bytes: int) -> DoesNotFit:
    shortfall_bytes = memory.total - limit_bytes
    return DoesNotFit(
        f"host memory: need {format_bytes(memory.total)} "
        f"(process {format_bytes(memory.process)}, block inputs {format_bytes(memory.block_inputs)}, "
        f"one block {format_bytes(memory.block)}, working set {format_bytes(memory.working_set)}), "
        f"have {format_bytes(limit_bytes)}: {format_bytes(shortfall_bytes)} too few",
        "raise limits.host_memory, or lower micro_batch_size, gradient_accumulation_steps or sequence_len",
        shortfall_bytes=shortfall_bytes,
    )
