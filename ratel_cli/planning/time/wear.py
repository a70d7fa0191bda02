"""What a step may write to NVMe to save time: the rule of `storage.wear`, and what it trades. Pure.

A step writes the model's state, whatever the plan. All else that it writes is excess: spilled activations, and held
gradients for which there is no memory. The rule is one number that the search makes small, the cost of a step:

    ignore      its seconds
    balanced    its seconds, and for each percent that the excess adds to the state half a percent of the seconds of the
                step that writes the least; frozen parameters count as if they were trained
    save        its excess, and among equals its seconds

What a drive may wear is a matter of the model's size, not of how little a rule stores: an adapter's state is next to
nothing, and measured by it alone any activation would be too much, in runs that write less than any full one.

The price of a byte is the same in all of a search, so the cost is as convex over prefixes and levels as the time and
the excess are. With more memory the step that writes the least is faster, so that a byte gets cheaper, and no step gets
slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, Literal, NamedTuple

WearPolicy = Literal["save", "balanced", "ignore"]
"""What may be written in addition to the state. `save`: only what the run cannot do without. `balanced`: where a
percent of written bytes buys half a percent of time. `ignore`: whatever saves time."""
TIME_PER_WEAR: Final = 0.5
"""A percent more bytes written must gain this many percent of time."""


class Cost(NamedTuple):
    """What the search makes small: the first number, and among equals the second."""

    excess_bytes: float
    """0 unless the rule counts them first."""
    seconds: float
    """Seconds of a step, with the price of written bytes."""

    def is_within(self, factor: float, other: Cost) -> bool:
        """Whether this is at most `factor` times the other's time, and writes no more where that counts first."""
        return self.excess_bytes <= other.excess_bytes and self.seconds <= factor * other.seconds

    def gain_over(self, other: Cost) -> float:
        """Seconds that this saves; infinite if bytes count first and it writes fewer or more."""
        if self.excess_bytes != other.excess_bytes:
            return inf if self.excess_bytes < other.excess_bytes else -inf
        return other.seconds - self.seconds


NO_CHOICE = Cost(inf, inf)
"""The cost of what does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How time and written bytes become one cost."""

    excess_first: bool = False
    seconds_per_byte: float = 0.0
    """The price of a byte in excess of the state."""

    def cost(self, seconds: float, excess_bytes: int) -> Cost:
        """The cost of a step that takes `seconds` and writes `excess_bytes` in addition to the state."""
        return Cost(excess_bytes if self.excess_first else 0, seconds + self.seconds_per_byte * excess_bytes)

    @property
    def counts_bytes(self) -> bool:
        """Whether written bytes matter at all."""
        return self.excess_first or self.seconds_per_byte > 0


TIME_ALONE = Objective()
BYTES_FIRST = Objective(excess_first=True)


def balanced(*, least_written_seconds: float, unfrozen_state_bytes: int) -> Objective:
    """The objective of `balanced`. The seconds are those of the step that writes the least, the bytes those of the
    state if no parameter were frozen."""
    return Objective(seconds_per_byte=TIME_PER_WEAR * least_written_seconds / max(1, unfrozen_state_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class WearTrade:
    """What a plan's rule chose among, per step."""

    policy: WearPolicy
    state_written_bytes: int
    """Written by any step."""
    seconds: float
    written_bytes: int
    """Bytes that a step of the plan writes."""
    save_seconds: float
    save_written_bytes: int
    """Bytes that a step of the plan with `save` writes."""
    ignore_seconds: float
    ignore_written_bytes: int
    """Bytes that a step of the plan with `ignore` writes."""

    def to_json(self) -> dict[str, object]:
        """Keys of `wear` in plan.json and `ratel plan --json`."""
        return {
            "policy": self.policy,
            "state_tb_per_step": self.state_written_bytes / 1e12,
            "save": {"step_seconds": self.save_seconds, "tb_written_per_step": self.save_written_bytes / 1e12},
            "ignore": {"step_seconds": self.ignore_seconds, "tb_written_per_step": self.ignore_written_bytes / 1e12},
        }
