"""Activations: the working set of what computes. Rows of the ledger. Pure.

Units are counted next to the rows (planning/profile/activations.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ratel_cli.planning.duties.gradients import made_bytes
from ratel_cli.planning.duties.step import PlannedStep
from ratel_cli.planning.profile.activations import (
    expanded_bytes,
    head_chunk_tokens,
    logits_bytes,
    passing_bytes,
    segment_activation_bytes,
)
from ratel_cli.planning.profile.gpu_gradients import shared_bytes
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.schedule.ledger import BACKWARD, REPLAY, RUN, Holding, at, end_of, held
from ratel_cli.units import MIB

RUNTIME_BYTES: Final = 128 * MIB
"""What torch takes at its first step, above all kernels' code (11 to 17 MiB for a model of next to nothing), what
imports leave in the heap (up to 30 MiB), what the trial of the layers keeps (18 MiB), and the gaps between what it
frees. With 135M parameters in bf16 and a plan that fills a limit of 1.1 GiB it was 109 MiB (2-core EPYC, 2026-11)."""

_ROW_BYTES = 16
"""Bytes of the distinct ids and of the index, for one token."""


def working(step: PlannedStep) -> Iterator[Holding]:
    """Torch's own memory; and where a CPU computes, the activations of a use, twice in backward, what is made of its
    weights, and hidden states of all micro-batches."""
    yield from held("runtime", -1, RUNTIME_BYTES, 0, step.cycle - 1)
    if step.on_gpu:
        return
    spec, workload = step.spec, step.workload
    logits = logits_bytes(spec, head_chunk_tokens(spec, workload))
    yield from held("activations", step.head, logits, step.head, step.head)
    for position, use in enumerate(step.uses):
        times = 1 if use.stage == "forward" else 2
        num_bytes = times * segment_activation_bytes(spec, use.segment, tokens=workload.micro_batch_tokens)
        num_bytes += expanded_bytes(spec, use.segment)
        yield from held("activations", use.segment.index, num_bytes, position, position)


def hidden(step: PlannedStep) -> Iterator[Holding]:
    """Hidden states between two layers, their gradients, and masks, where a CPU computes."""
    if not step.on_gpu:
        workload = step.workload
        num_bytes = passing_bytes(step.spec, tokens=workload.tokens, sequence_len=workload.sequence_len)
        yield from held("hidden states", -1, num_bytes, 0, step.cycle - 1)


def passing_on_gpu(step: PlannedStep) -> Iterator[Holding]:
    """What is on a GPU all the time: hidden states or their gradients, what is carried besides, and its gradients; a
    mask, what a micro-batch has itself, and the rows of its tokens."""
    spec, workload, end = step.spec, step.workload, end_of(step.turn - 1)
    passed_bytes = workload.tokens * (spec.passed_bytes + spec.carried_bytes)
    batch_bytes = workload.tokens * (workload.sequence_len + spec.batch_bytes + _ROW_BYTES)
    yield Holding("gpu", "hidden states", -1, passed_bytes, 0, end)
    yield Holding("gpu", "batch", -1, batch_bytes, 0, end)


def layers_on_gpu(step: PlannedStep, profile: ModelProfile, keeps_swapped: bool) -> Iterator[Holding]:
    """Activations and gradients of layers, without units. `keeps_swapped`: with the results of all products in forward
    and all that autograd saves when it recomputes, whether they are swapped or not."""
    for position, use in enumerate(step.uses):
        segment = use.segment
        if not step.spec.is_layer(segment):
            continue
        costs, index = profile.profiles[profile.layers[segment.index - 1]], segment.index
        if use.stage == "forward":
            num_bytes = costs.forward_held_bytes if keeps_swapped else costs.forward_bytes
            yield Holding("gpu", "activations", index, num_bytes, at(position, RUN), end_of(position, RUN))
            continue
        num_bytes = costs.replay_held_bytes if keeps_swapped else costs.replay_bytes
        yield Holding("gpu", "activations", index, num_bytes, at(position, REPLAY), end_of(position, REPLAY))
        begins, ends = at(position, BACKWARD), end_of(position, BACKWARD)
        if step.is_summed:  # what the micro-batch before takes on to segments below is leaving
            leaving_bytes = sum(block.compute_bytes for block in segment.unfinished)
            yield Holding("gpu", "partial sums", index, leaving_bytes, at(position), end_of(position))
        peak_bytes = backward_bytes(costs, made_bytes(segment, is_summed=step.is_summed))
        yield Holding("gpu", "activations", index, peak_bytes, begins, ends)
        yield Holding("gpu", "partial sums", index, shared_bytes(segment), begins, ends)


def backward_bytes(costs: LayerProfile, gradient_bytes: int) -> int:
    """The peak of a layer's backward, next to its input. `gradient_bytes`: one parameter's gradient."""
    return max(costs.backward_bytes, costs.making_bytes + gradient_bytes)
