"""Predicted times as values: the seconds of each resource in one stage and in one step. Pure.

Every cost model gives these: Ratel's own (planning/time/costs.py) and the paper's (papers/ratel.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal, get_args

Resource = Literal["compute", "up", "down", "nvme read", "nvme write", "optimizer", "network"]
"""What a step keeps busy, predicted and measured."""
RESOURCES: tuple[Resource, ...] = get_args(Resource)
Bottleneck = Literal[Resource, "memory"]
"""The resource that is busy longest. "memory" is main memory, which is predicted but not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds for which each resource is busy in one stage of a step, and seconds of the stage as a whole."""

    compute: float
    up: float
    """The link from host memory to the GPU."""
    down: float
    """The link from the GPU to host memory."""
    nvme_read: float
    nvme_write: float
    """While both directions run, half of the time counts for each: together they are the time that NVMe is busy."""
    optimizer: float = 0.0
    network: float = 0.0
    """What several ranks send each other; both directions at once."""
    memory: float = 0.0
    """What moves through main memory; 0 where the cost model leaves it out."""
    total: float

    @property
    def nvme(self) -> float:
        """Seconds for which NVMe is busy."""
        return self.nvme_read + self.nvme_write

    def to_json(self) -> dict[str, float]:
        """The resources, under the keys of plan.json and `ratel plan --json`."""
        return {
            "compute": self.compute,
            "up": self.up,
            "down": self.down,
            "nvme": self.nvme,
            "optimizer": self.optimizer,
            "network": self.network,
            "memory": self.memory,
        }


_NAMES = tuple(each.name for each in fields(StageTime))


def weighted_sum(parts: Iterable[tuple[float, StageTime]]) -> StageTime:
    """The stage that consists of `parts`, one after another: (weight, time) pairs."""
    parts = list(parts)
    if len(parts) == 1 and parts[0][0] == 1:
        return parts[0][1]
    return StageTime(**{name: sum(weight * getattr(time, name) for weight, time in parts) for name in _NAMES})


_NO_TIME = StageTime(compute=0.0, up=0.0, down=0.0, nvme_read=0.0, nvme_write=0.0, total=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one step, whose stages follow each other."""

    forward: StageTime
    """Time from the embedding to the last layer, overlapped with deferred updates."""
    backward: StageTime
    """Head and backward, overlapped with the other updates."""
    update: StageTime = _NO_TIME
    """After backward; no time unless the optimizer is separate."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.forward.total + self.backward.total + self.update.total

    @property
    def with_update_in_backward(self) -> StepTime:
        """This time with a separate optimizer counted as the end of backward."""
        return StepTime(forward=self.forward, backward=weighted_sum(((1.0, self.backward), (1.0, self.update))))

    @property
    def bottleneck(self) -> Bottleneck:
        """The resource that is busy longest; for NVMe, the direction that takes more of its time."""
        stages = (self.forward, self.backward, self.update)
        read, write = sum(stage.nvme_read for stage in stages), sum(stage.nvme_write for stage in stages)
        busy: dict[Bottleneck, float] = {
            "compute": sum(stage.compute for stage in stages),
            "up": sum(stage.up for stage in stages),
            "down": sum(stage.down for stage in stages),
            "nvme read" if read >= write else "nvme write": read + write,
            "optimizer": sum(stage.optimizer for stage in stages),
            "network": sum(stage.network for stage in stages),
            "memory": sum(stage.memory for stage in stages),
        }
        return max(busy, key=lambda name: busy[name])
