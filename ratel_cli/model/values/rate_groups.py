"""Which parameters have another learning rate than the run's: each such group is updated as blocks of its own.

Pure. A block has one learning rate, so that the update of a group of elements has one set of scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SECOND: Final = 1
ENDS: Final = 2
"""Numbers of the groups. 0 is the run's own learning rate."""
GROUP_NAMES: Final = ("", ", second matrices", ", with a rate of its own")
"""By number: what the names of their blocks end with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateGroups:
    """The groups of a model's trained parameters."""

    has_second: bool = False
    """Whether the second matrices of adapters have a rate of their own, and whatever is a vector, as in LoRA+ (PEFT's
    `create_loraplus_optimizer`)."""
    ends: frozenset[str] = frozenset()
    """Names of the matrices of embedding and head, and of what is trained whole beside an adapter, if these have a rate
    of their own. They do not decay then, as in axolotl."""

    def of(self, name: str, num_dimensions: int) -> int:
        """The number of a parameter's group."""
        if name in self.ends:
            return ENDS
        return SECOND if self.has_second and (".lora_B." in name or num_dimensions == 1) else 0


ONE_RATE: Final = RateGroups()
"""All parameters have the run's learning rate."""
