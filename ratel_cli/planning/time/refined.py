"""Costs and rates as the steps of a run show them. Pure.

The profile of a model comes from one measurement, which may have been a noisy one, and the rates of drives and link
from a second of measuring. The steps after it tell, without recording every operator again, how long each block
computed and how long drives and link were busy. So each time becomes the median over the recorded step and those steps.
Operators keep their shares of their layer's forward.

Invariant: what is counted (bytes, FLOPs, candidates and their order within a layer) stays as it was recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.recorded import BlockSeconds
from ratel_cli.planning.time.step_time import StepTime

_BOUND_SHARE = 0.9
"""Drives bound a step if they are busy for this share of it, whatever else is busy."""
_BUSIEST_SHARE = 0.5
"""Drives bound a step if they are busy for this share of it, and busier than computing and the link: between their
transfers others wait for them."""
_LEAST_SHARE = 0.1
"""Below this share of a step, a transfer's rate does not matter."""
_MOST_FACTOR = 4.0
"""Rates are changed by no more than this at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """What one step under a plan shows. Seconds are of all its micro-batches."""

    seconds: float
    blocks: Mapping[int, BlockSeconds]
    nvme_seconds: float
    """Seconds for which drives read or wrote."""
    up_seconds: float
    down_seconds: float

    @property
    def computing_seconds(self) -> float:
        """Seconds for which the device computed."""
        return sum(block.forward + block.backward for block in self.blocks.values())


def refined_profile(
    profile: ModelProfile, steps: Sequence[SeenStep], *, swapped: Mapping[int, frozenset[str]], num_micro_batches: float
) -> ModelProfile:
    """A recorded profile with the times of the steps after it. `swapped` are the keys of their plan, by block.
    `num_micro_batches`: full ones with as many tokens as a step has on average."""
    assert profile.source == "recorded"
    alike: dict[int, list[int]] = {}
    for block, number in enumerate(profile.layers, start=1):
        alike.setdefault(number, []).append(block)
    head = len(profile.layers) + 1
    profiles = tuple(
        _refined_layer(layer, alike[number], steps, swapped, num_micro_batches) if number in alike else layer
        for number, layer in enumerate(profile.profiles)
    )

    def outside(block: int, recorded: float | None) -> float:
        seen = [(step.blocks[block].forward + step.blocks[block].backward) / num_micro_batches for step in steps]
        return median([recorded or 0.0, *seen])

    return replace(
        profile,
        profiles=profiles,
        embedding_seconds=outside(0, profile.embedding_seconds),
        head_seconds=outside(head, profile.head_seconds),
    )


def refined_hardware(hardware: HardwareProfile, predicted: StepTime, steps: Sequence[SeenStep]) -> HardwareProfile:
    """The machine with the rates at which its drives and link moved what `predicted` is the time of.

    Drives that did not bound the step may have been waiting: they are never taken to be slower for that.
    """
    stages = (predicted.forward, predicted.backward, predicted.update)
    seconds = median(step.seconds for step in steps)
    seen = median(step.nvme_seconds for step in steps)
    nvme, link = hardware.nvme, hardware.link
    others = (
        median(step.computing_seconds for step in steps),
        median(step.up_seconds for step in steps),
        median(step.down_seconds for step in steps),
    )
    is_bound = seen >= seconds * (_BUSIEST_SHARE if seen > max(others) else _BOUND_SHARE)
    factor = _factor(sum(stage.nvme for stage in stages), seen, seconds)
    if factor > 1.0 or is_bound:
        nvme = replace(
            nvme,
            read_bytes_per_second=factor * nvme.read_bytes_per_second,
            write_bytes_per_second=factor * nvme.write_bytes_per_second,
            mixed_bytes_per_second=factor * nvme.mixed_bytes_per_second,
        )
    if link is not None:
        up = _factor(sum(stage.up for stage in stages), median(step.up_seconds for step in steps), seconds)
        down = _factor(sum(stage.down for stage in stages), median(step.down_seconds for step in steps), seconds)
        link = replace(
            link,
            to_gpu_bytes_per_second=up * link.to_gpu_bytes_per_second,
            from_gpu_bytes_per_second=down * link.from_gpu_bytes_per_second,
            both_bytes_per_second=min(up, down) * link.both_bytes_per_second,
        )
    return replace(hardware, nvme=nvme, link=link)


def _refined_layer(
    layer: LayerProfile,
    blocks: Sequence[int],
    steps: Sequence[SeenStep],
    swapped: Mapping[int, frozenset[str]],
    num_micro_batches: float,
) -> LayerProfile:
    recorded_forward, recomputed = layer.forward_seconds or 0.0, layer.recomputed_seconds or 0.0
    seen_forward = [median(step.blocks[block].forward for block in blocks) / num_micro_batches for step in steps]
    forward = median([recorded_forward, *seen_forward])
    share = forward / recorded_forward if recorded_forward else 1.0

    def own_backward(step: SeenStep, block: int) -> float:
        """Without what is recomputed under the step's plan."""
        keys = swapped.get(block, frozenset())
        saved = sum(each.seconds or 0.0 for each in layer.candidates if each.key in keys)
        return step.blocks[block].backward / num_micro_batches - share * (recomputed - saved)

    seen_backward = [max(0.0, median(own_backward(step, block) for block in blocks)) for step in steps]
    return replace(
        layer,
        forward_seconds=forward,
        recomputed_seconds=share * recomputed,
        backward_seconds=median([layer.backward_seconds or 0.0, *seen_backward]),
        candidates=tuple(
            replace(each, seconds=None if each.seconds is None else share * each.seconds) for each in layer.candidates
        ),
    )


def _factor(predicted: float, seen: float, step_seconds: float) -> float:
    """How much faster a transfer was than predicted; 1 where that hardly matters."""
    if max(predicted, seen) < _LEAST_SHARE * step_seconds or not (predicted and seen):
        return 1.0
    return min(_MOST_FACTOR, max(1 / _MOST_FACTOR, predicted / seen))
