"""What a step sends over the link to a GPU beyond activations, and how long the link takes. Pure.

Weights go up once for all micro-batches. Of an embedding that is looked up, and of its gradient, only rows move. What
the window for the next segment does not take goes up while nothing computes. Where host memory has sums of gradients,
the gradients of every micro-batch come down, and the sums go up with the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.hardware.spec import HardwareProfile, Link
from ratel_cli.planning.profile.activations import NOT_EXPOSED, ExposedUnits, OffloadedActivations
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.placement import AfterGradient, UnitsOnGpu, tensors_ahead

_BOOKED = 0.85
"""The most of the link's time that offloaded activations get."""
UNBOOKED = 1 / _BOOKED - 1
"""Link overhead per byte of offloaded activations, in bytes."""


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
    sum_bytes: int,
    hardware: HardwareProfile,
    backward_seconds: float,
    offloaded: OffloadedActivations,
    *,
    num_micro_batches: int,
) -> int:
    """Bytes of sums of layers' gradients that the GPU waits for. All of `sum_bytes` go up with the last micro-batch,
    next to its units."""
    if hardware.link is None or not sum_bytes:
        return 0
    in_time_bytes = hardware.link.to_gpu_bytes_per_second * backward_seconds / num_micro_batches
    return max(0, int(sum_bytes + offloaded.linked_bytes / num_micro_batches - in_time_bytes))
