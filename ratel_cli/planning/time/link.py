"""What a step sends over the link to a GPU beyond activations, and how long the link takes. Pure.

Weights go up once for all micro-batches. Of an embedding that is looked up, and of its gradient, only rows move. What
the window for the next segment does not take goes up while nothing computes. Where host memory has sums of gradients,
the gradients of every micro-batch come down, and the sums go up with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.activations import NOT_EXPOSED, ExposedUnits, OffloadedActivations
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.placement import (
    AfterGradient,
    Placement,
    UnitsOnGpu,
    bytes_ahead,
    looked_up,
    tensors_ahead,
)
from ratel_cli.schedule.lifetimes import upload_lifetimes
from ratel_cli.schedule.uses import Stage, step_uses

_BOOKED = 0.85
"""The most of the link's time that offloaded activations get."""
UNBOOKED = 1 / _BOOKED - 1
"""Link overhead per byte of offloaded activations, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSumTraffic:
    """What sums of gradients in host memory move (engine/optimizer/host_sums.py)."""

    up_bytes: int
    """Sums."""
    down_bytes: int
    """Gradients of all micro-batches but the last."""
    num_added: int
    """Parameters that are added, once for each addition."""
    added_bytes: int
    """What the additions read and write in main memory."""
    exposed_bytes: int = 0
    """The part of both directions while which nothing computes."""


NO_SUMS = HostSumTraffic(up_bytes=0, down_bytes=0, num_added=0, added_bytes=0)


def link_seconds(link: Link, *, up_bytes: float, down_bytes: float) -> float:
    """The seconds that the link takes for both directions, which run at once.

    Each direction has its rate, and both together have one. That of both together is not taken to be lower than that of
    one, whatever was measured.
    """
    both_rate = max(link.both_bytes_per_second, link.to_gpu_bytes_per_second, link.from_gpu_bytes_per_second)
    return max(
        up_bytes / link.to_gpu_bytes_per_second,
        down_bytes / link.from_gpu_bytes_per_second,
        (up_bytes + down_bytes) / both_rate,
    )


def exposed_weight_bytes(spec: ModelSpec, placement: Placement) -> tuple[int, int]:
    """Weights that do not fit into the window for the next segment, and wait until the one before is done.

    Those of forward, and those of backward with the head.
    """
    return _uploaded_bytes(spec, placement.gpu_weights, placement.gpu_embedding_rows, placement.gpu_window_bytes)


def uploaded_bytes(spec: ModelSpec, placement: Placement) -> tuple[int, int]:
    """Weights that go up in forward, and in backward with the head."""
    return _uploaded_bytes(spec, placement.gpu_weights, placement.gpu_embedding_rows, 0)


@lru_cache(maxsize=1024)
def _uploaded_bytes(
    spec: ModelSpec, staying: frozenset[int], num_rows: int | None, window_bytes: int
) -> tuple[int, int]:
    """Return the weights that go up in forward, and in backward with the head, less what of each use goes up in the
    window. A search asks for the same at every level."""
    if not spec.segments:
        return 0, 0
    embedding, uses = looked_up(spec, num_rows), step_uses(spec.segments)
    moved: dict[Stage, int] = {"forward": 0, "backward": 0}
    for upload in upload_lifetimes(uses, staying=staying):
        segment = upload.of if upload.of.index else embedding
        moved[uses[upload.first].stage] += segment.compute_bytes - bytes_ahead(segment, window_bytes)
    return moved["forward"], moved["backward"]


def host_sums(spec: ModelSpec, placement: Placement, *, num_micro_batches: int) -> HostSumTraffic:
    is_summed = num_micro_batches > 1 and not placement.gpu_holds_sums
    layers = spec.layers if is_summed else ()
    elements = sum(layer.trained_elements for layer in layers)
    compute_bytes = sum(layer.updated_bytes for layer in layers)
    number = num_micro_batches - 1
    return HostSumTraffic(
        up_bytes=4 * elements,
        down_bytes=number * compute_bytes,
        num_added=number * elements,
        added_bytes=number * (compute_bytes + 4 * elements) + (number - 1) * 4 * elements,
    )


def head_sums(spec: ModelSpec, placement: Placement, *, num_chunks: int) -> HostSumTraffic:
    """Return what the sums of the head's gradients move, beyond what moves where the GPU has them. `num_chunks`: those
    of the whole step.

    A chunk's gradient leaves before the next one is made, and the rounded sum comes back for its norm: computing waits.
    """
    if placement.gpu_holds_head or not spec.segments:
        return NO_SUMS
    summed = spec.lent if spec.tied else spec.head
    down_bytes, up_bytes = num_chunks * summed.updated_bytes, summed.gradient_bytes
    return HostSumTraffic(
        up_bytes=up_bytes,
        down_bytes=down_bytes - up_bytes,  # the sum is where it is needed
        num_added=num_chunks * summed.trained_elements,
        added_bytes=down_bytes + num_chunks * 2 * summed.sum_bytes,
        exposed_bytes=up_bytes + down_bytes,
    )


def exposed_units(
    num_swapped: Sequence[int],
    profile: ModelProfile,
    units: UnitsOnGpu,
    hardware: HardwareProfile,
    *,
    num_micro_batches: int,
    units_from: int,
) -> ExposedUnits:
    """What of a step's units moves while nothing computes.

    `num_swapped`: for each layer, how many of its candidates are swapped. Units from `units_from` on do not move.
    """
    known: dict[tuple[int, int], ExposedUnits] = {}
    down_bytes = up_bytes = 0
    for layer, key in enumerate(zip(profile.layers, num_swapped, strict=True)):
        if key not in known:
            known[key] = _exposed_unit(profile.profiles[key[0]], key[1], units, units.moments[layer + 1], hardware)
        num_moved = min(num_micro_batches, max(0, units_from - layer * num_micro_batches))
        down_bytes += num_moved * known[key].down_bytes
        up_bytes += num_moved * known[key].up_bytes
    return ExposedUnits(down_bytes, up_bytes)


def _exposed_unit(
    costs: LayerProfile,
    num_swapped: int,
    units: UnitsOnGpu,
    moments: Sequence[AfterGradient],
    hardware: HardwareProfile,
) -> ExposedUnits:
    """What of one unit moves while nothing computes, if the units next to it are alike.

    All its outputs are there at the earliest when forward has computed the FLOPs behind them.
    """
    link, swapped = hardware.link, costs.candidates[:num_swapped]
    if link is None:
        return NOT_EXPOSED
    forward_seconds, backward_seconds = costs.forward_seconds, costs.backward_seconds
    if forward_seconds is None or backward_seconds is None:
        forward_seconds = costs.flops_forward / hardware.gpu.flops_per_second
        backward_seconds = costs.flops_backward / hardware.gpu.flops_per_second
    tensor_bytes = [costs.input_bytes, *(candidate.num_bytes for candidate in swapped)]
    made_share = sum(candidate.flops for candidate in swapped) / max(1, costs.flops_forward)
    rest_shares = {rest.after: min(1.0, rest.flops / max(1, costs.flops_backward)) for rest in costs.rests}
    return ExposedUnits(
        down_bytes=waited_unit_bytes(
            sum(tensor_bytes),
            units.forward_bytes,
            made_share * forward_seconds,
            bytes_per_second=link.from_gpu_bytes_per_second,
        ),
        up_bytes=exposed_unit_bytes(
            tensor_bytes,
            [units.ahead_bytes, *(moment.num_bytes for moment in moments)],
            [rest_shares[moment.parameter] * backward_seconds for moment in moments],
            bytes_per_second=link.to_gpu_bytes_per_second,
        ),
    )


def waited_unit_bytes(unit_bytes: int, most_bytes: int, made_seconds: float, *, bytes_per_second: float) -> int:
    """What of a unit forward waits for, because it has `most_bytes` for it and for the unit that it makes.

    That one has as many bytes, all of them `made_seconds` after the layer's forward has begun.
    """
    return max(0, int(2 * unit_bytes - most_bytes - made_seconds * bytes_per_second))


def exposed_unit_bytes(
    tensor_bytes: Sequence[int],
    ahead_bytes: Sequence[int],
    rest_seconds: Sequence[float],
    *,
    bytes_per_second: float,
) -> int:
    """Return the bytes of a unit whose upload cannot be hidden, because its tensors do not fit next to the unit in use
    earlier.

    `ahead_bytes`: what they may take from the beginning of that unit's backward, and from each moment on at which they
    may take more. `rest_seconds`: the time from each of these moments to the end of backward.
    """
    taken: list[int] = []
    exposed = 0.0
    for most_bytes, left_seconds in zip(ahead_bytes, (*rest_seconds, 0.0), strict=True):
        taken += tensors_ahead(tensor_bytes, most_bytes, taken=taken)
        later_bytes = sum(tensor_bytes) - sum(tensor_bytes[number] for number in taken)
        exposed = max(exposed, later_bytes - bytes_per_second * left_seconds)
    return int(exposed)


def late_bytes(
    sums: HostSumTraffic,
    hardware: HardwareProfile,
    backward_seconds: float,
    offloaded: OffloadedActivations,
    *,
    num_micro_batches: int,
) -> int:
    """Bytes of sums that the GPU waits for. All go up with the last micro-batch, next to its units."""
    if hardware.link is None or not sums.up_bytes:
        return 0
    in_time_bytes = hardware.link.to_gpu_bytes_per_second * backward_seconds / num_micro_batches
    return max(0, int(sums.up_bytes + offloaded.linked_bytes / num_micro_batches - in_time_bytes))
