"""The steps of systems that keep all model states in host memory: ZeRO-Offload and MemFerry, by their schedules. Pure.

The strategies of `strategies.py` differ in what they swap, and share a schedule with states on NVMe. These two swap
nothing: a micro-batch's layer inputs stay on the GPU, and all else is recomputed. What differs is where weights and
gradients are, which is all that an `InMemorySystem` says:

    zero-offload   the weights stay on the GPU. A gradient leaves as it is made, for each micro-batch, and backward ends
                   when all are down. AdamW follows, and new weights go up while it runs (Ren et al., 2021; MemFerry,
                   sections II-B and III-A). The one-step delayed update, which computes with old weights, is off
    memferry       the weights stay in host memory. They are uploaded or read in place as `direct/search.py` plans it.
                   Gradients stay on the GPU until they are down, once a step, and that overlaps backward and AdamW
                   (MemFerry, sections III-B, IV-A to IV-C)

With F and B of `direct/timeline.py` (with weights on the GPU nothing is uploaded there), D gradients on the link, N
micro-batches, U AdamW and V the link for new weights, in seconds:

    zero-offload   F + max(B, N D) + max(U, V)
    memferry       F + max(B + U, D)

AdamW has all cores, but no more than main memory moves: states both ways, gradients, and new weights. It counts under
either cost model, since nothing hides it here. What it would take to clip gradients is left out.

Invariants: one that does not fit says what is short. A faster link, main memory or AdamW never makes one slower, as far
as MemFerry's plan is the best: with more than `EXACT_LAYERS` parameters, that is known to 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.papers.memferry_costs import WeightUse
from ratel_cli.papers.memferry_search import plan_direct
from ratel_cli.papers.memferry_timeline import timeline
from ratel_cli.papers.prefix import Point
from ratel_cli.papers.rivals import Outcome, Strategy
from ratel_cli.planning.profile.placement import AccessMode
from ratel_cli.units import format_bytes

MASTER_STATE_BYTES = 12
"""Per parameter: the fp32 master weight and both moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemorySystem:
    """A system by what it keeps where. Optimizer states are in host memory, and so is memory for all gradients."""

    strategy: Strategy
    weights: Literal["on GPU", "in host memory"]
    """Where the compute weights stay from step to step."""
    gradients: Literal["leave", "stay"]
    """What becomes of a gradient on the GPU. `leave`: it goes down as it is made, in each micro-batch. `stay`: all of
    them have memory there, and go down in the last micro-batch and while AdamW runs."""


IN_MEMORY_SYSTEMS: Final = (
    InMemorySystem(strategy="zero-offload", weights="on GPU", gradients="leave"),
    InMemorySystem(strategy="memferry", weights="in host memory", gradients="stay"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InMemoryModel:
    """One model in one step on one machine, as these schedules see it."""

    uses: Sequence[WeightUse]
    """All parameters in the order of forward, with what backward recomputes; none where the CPU computes."""
    hardware: HardwareProfile
    num_micro_batches: int
    num_trained: int
    """Parameters that AdamW updates."""
    weight_bytes: int
    """Compute weights of the model [P16]."""
    updated_bytes: int
    """The part of them that a step changes."""
    gradient_bytes: int
    """[G16]"""
    largest_gradient_bytes: int
    """The most that the gradients of one layer, or of embedding or head, take."""
    activation_bytes: int
    """On the GPU: the layers' inputs of a micro-batch, and the activations of the layer that computes."""
    recomputed_flops: int
    """FLOPs that a step recomputes."""
    gpu_bytes: int
    """GPU memory that there is for all of this."""
    host_bytes: int
    """Host memory."""

    @property
    def state_bytes(self) -> int:
        """[P32 and OS32]"""
        return MASTER_STATE_BYTES * self.num_trained

    @property
    def update_seconds(self) -> float:
        """AdamW on the CPU."""
        host = self.hardware.host
        moved_bytes = 2 * self.state_bytes + self.gradient_bytes + self.updated_bytes
        return max(
            self.num_trained / (host.adam_parameters_per_second * host.num_cores),
            moved_bytes / (host.memory_bytes_per_second or math.inf),
        )


def compare_in_memory(model: InMemoryModel) -> tuple[Outcome, ...]:
    """The outcome of each of the two systems."""
    return tuple(_outcome(system, model) for system in IN_MEMORY_SYSTEMS)


def _outcome(system: InMemorySystem, model: InMemoryModel) -> Outcome:
    link = model.hardware.link
    if link is None:
        return _failed(system, model, "there is no GPU")
    host_bytes = model.state_bytes + model.gradient_bytes
    if system.weights == "in host memory":
        host_bytes += model.weight_bytes
    if host_bytes > model.host_bytes:
        return _failed(system, model, _does_not_fit("RAM", host_bytes - model.host_bytes))
    uses, modes = _plan(system, model)
    gpu_bytes = _gpu_bytes(system, model, modes)
    if gpu_bytes > model.gpu_bytes:
        return _failed(system, model, _does_not_fit("GPU memory", gpu_bytes - model.gpu_bytes))
    return Outcome(
        strategy=system.strategy,
        why_not=None,
        point=_point(model, _seconds(system, model, link, uses, modes)),
        swapped=(),
    )


def _plan(system: InMemorySystem, model: InMemoryModel) -> tuple[Sequence[WeightUse], Sequence[AccessMode]]:
    """The parameters, with nothing to upload if they are on the GPU, and the mode of each."""
    if system.weights == "in host memory":
        return model.uses, plan_direct([use.layer for use in model.uses]).modes
    there = [replace(use, layer=replace(use.layer, upload=0.0)) for use in model.uses]
    return there, ["GFGB" for _ in there]


def _gpu_bytes(system: InMemorySystem, model: InMemoryModel, modes: Sequence[AccessMode]) -> int:
    weight_bytes = model.weight_bytes
    if system.weights == "in host memory":
        weight_bytes = sum(use.weight_bytes for use, mode in zip(model.uses, modes, strict=True) if mode != "DHA")
    gradient_bytes = model.gradient_bytes if system.gradients == "stay" else model.largest_gradient_bytes
    return model.activation_bytes + weight_bytes + gradient_bytes


def _seconds(
    system: InMemorySystem,
    model: InMemoryModel,
    link: Link,
    uses: Sequence[WeightUse],
    modes: Sequence[AccessMode],
) -> float:
    time = timeline([use.layer for use in uses], modes)
    update, down = model.update_seconds, model.gradient_bytes / link.from_gpu_bytes_per_second
    if system.weights == "on GPU":
        update = max(update, model.updated_bytes / link.to_gpu_bytes_per_second)
    if system.gradients == "leave":
        return time.forward + max(time.backward, model.num_micro_batches * down) + update
    return time.forward + max(time.backward + update, down)


def _does_not_fit(memory: str, missing_bytes: int) -> str:
    return f"the model does not fit into {memory} (short by {format_bytes(missing_bytes)})"


def _failed(system: InMemorySystem, model: InMemoryModel, why_not: str) -> Outcome:
    return Outcome(strategy=system.strategy, why_not=why_not, point=_point(model, math.inf), swapped=())


def _point(model: InMemoryModel, seconds: float) -> Point:
    """Nothing is swapped: not even the layers' inputs leave the GPU."""
    return Point(swapped_bytes=0, spilled_bytes=0, recomputed_flops=model.recomputed_flops, seconds=seconds)
