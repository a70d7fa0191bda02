"""How long drives last that activations are written to, and how much that is (SSDTrain, sections III-D and IV-C). Pure.

The ratings of drives are for random writes, each of which makes the drive itself write more (its write amplification);
tensors are long and written in order. And who needs bytes for seconds needs no drive that holds them for years: cells
that are worn hold them for less time, but long enough.
"""

from __future__ import annotations

from dataclasses import dataclass

RATED_AMPLIFICATION = 2.5
"""Write amplification of the random writes that drives are rated with (section II-D)."""
RETENTION_OF_A_DAY = 86.0
"""How often a cell can be written, by the rating, if it must hold bytes for a day instead of three years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWrites:
    """What a step writes to the drives, and how long it takes."""

    num_bytes: float
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate at which they must be written: half of a step is forward."""
        return self.num_bytes / (self.seconds / 2)

    def drive_seconds(
        self,
        rated_bytes: float,
        *,
        rated_amplification: float = RATED_AMPLIFICATION,
        amplification: float = 1.0,
        retention: float = 1.0,
    ) -> float:
        """How long drives last that are rated for `rated_bytes` in all: life = endurance · t_step / what a step writes.

        `amplification`: of these writes. `retention`: how many times as often cells can be written as rated.
        """
        endurance_bytes = rated_bytes * rated_amplification / amplification * retention
        return endurance_bytes * self.seconds / self.num_bytes


def layer_activation_bytes(*, num_layers: int, batch_size: int, sequence_len: int, width: int) -> int:
    """What SSDTrain's own estimate says it offloads of a BERT in 16 bit, on one of two GPUs that share its tensors:
    `(20 L + 3) b s h` (Table III)."""
    return (20 * num_layers + 3) * batch_size * sequence_len * width
