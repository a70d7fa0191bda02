"""`storage.max_tb_written`: the limit on what is written to a store, and the last step that it allows. Pure.

Making a store writes all of it once. The import of the weights, or the copy of another run's step, writes a generation,
and so does every step.

Invariant: the step at which a run ends is the one that its opening statement and `ratel plan` have named.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.units import format_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class WearLimit:
    """The limit for one store."""

    max_bytes: int
    """The most that may be written to it."""
    store_bytes: int
    """What making it writes: the size of all its files, and once more what is frozen, at the import."""
    slot_bytes: int
    """The size of a generation."""
    first_step: int
    """The step that the store was made with: 0, or the step of another run that this one started from."""
    num_sharing: int = 1
    """The ranks that share the drives, and the limit that the user has set."""

    @property
    def last_step(self) -> int:
        """The last step that may be done; `first_step` or less if none may."""
        return self.first_step + (self.max_bytes - self.store_bytes) // self.slot_bytes - 1

    def written_bytes(self, step: int) -> int:
        """What has been written after `step`."""
        return written_bytes(step - self.first_step, store_bytes=self.store_bytes, slot_bytes=self.slot_bytes)

    def warning(self, num_steps: int, *, done: int | None = None) -> str | None:
        """What the user should know before a run of `num_steps` begins; None if the limit allows all of them.

        `done`: the step that the run goes on after; None: it begins.
        """
        if num_steps <= self.last_step:
            return None
        ends = f"ends the run after step {self.last_step} of {num_steps}"
        if done is not None and self.last_step <= done > self.first_step:
            ends = f"allows no step after step {done} of {num_steps}"
        elif self.last_step <= self.first_step:
            ends = "allows not even one step"
        first, each, total = map(
            format_traffic, (self.written_bytes(self.first_step), self.slot_bytes, self.written_bytes(num_steps))
        )
        of_each = f" for each of {self.num_sharing} ranks" if self.num_sharing > 1 else ""
        num_left = num_steps - self.first_step
        steps = "the step" if num_left == 1 else f"each of the {num_left} steps"
        return (
            f"storage.max_tb_written ({format_traffic(self.max_bytes)}{of_each}) {ends}: "
            f"making the store writes {first} and {steps} {each}, {total} in all"
        )


def written_bytes(num_steps: int, *, store_bytes: int, slot_bytes: int) -> int:
    """What a run has written to its store after its first `num_steps` steps. A generation takes `slot_bytes`."""
    return store_bytes + (1 + num_steps) * slot_bytes
