"""What one step moves over NVMe, to the byte, and what the store takes. Pure.

Every block's weights are read once in forward and once in backward; the rest of its record is read once for the update,
and the record is written once. In bf16 that is 2 + 2 + 10 bytes read and 12 written: 26 bytes per parameter of a layer
(the paper's layout moves 30). The head is read once, because its backward follows its forward; what it borrows of the
embedding is read once more. What stays in the base model's files is read with the rest of the pages that it begins and
ends in. When a block is updated changes where these bytes fall:

    in backward       the update finds the weights that backward used, reads the states, writes the record
    in next forward   the update reads the weights and passes the new ones on: forward, and the head, read nothing
    in between        the update reads the weights once more: 2 bytes on top (28)

With every commit goes the table of checksums, 8 bytes for each chunk of a field. Weights and states that stay in memory
are not read, nor are weights that are still there (planning/duties/ has every row). Spilled activations are
written in forward and read in backward, except for the last ones (planning/profile/activations.py).

Invariant: an applied step of the engine moves exactly these bytes. Those of an update in the next forward belong to the
step whose gradients it applies.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.duties import gradients
from ratel_cli.planning.duties.placed import PlacedStep
from ratel_cli.planning.profile.activations import OffloadedActivations
from ratel_cli.schedule.ledger import WorkKind
from ratel_cli.schedule.rules import ADAMW
from ratel_cli.schedule.uses import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """NVMe bytes of a step in the middle of a run, when everything that stays in memory is there."""

    forward_read_bytes: int = 0
    """Bytes read from the embedding to the last layer, those of overlapped updates included."""
    forward_written_bytes: int = 0
    backward_read_bytes: int = 0
    """Includes the head's weights, whose forward and backward are one, unless their update passes them on."""
    backward_written_bytes: int = 0
    update_read_bytes: int = 0
    """After backward, before the next forward: zero unless the optimizer is separate."""
    update_written_bytes: int = 0
    forward_in_files_bytes: int = 0
    """The part of what forward reads that lies in the base model's files."""
    backward_in_files_bytes: int = 0
    first_read_bytes: int = 0
    """Read once in a run, in addition: weights and states that stay."""

    @property
    def read_bytes(self) -> int:
        """Bytes read in the whole step."""
        return self.forward_read_bytes + self.backward_read_bytes + self.update_read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written in the whole step."""
        return self.forward_written_bytes + self.backward_written_bytes + self.update_written_bytes

    def with_offloaded(self, offloaded: OffloadedActivations) -> Traffic:
        """This traffic with the spilled activations added."""
        return replace(
            self,
            forward_written_bytes=self.forward_written_bytes + offloaded.written_bytes,
            backward_read_bytes=self.backward_read_bytes + offloaded.read_bytes,
        )


def traffic_of(placed: PlacedStep, offloaded: OffloadedActivations, *, spilled_segments: int = 0) -> Traffic:
    """What the rows of an applied step have for the drives. The gradients of the first `spilled_segments` segments go
    to NVMe in backward and come back for the update.

    Where gradients are held, every update runs in the next forward, or in between. A step that speculates that nothing
    will be clipped moves the bytes of a step without held gradients.
    """
    moved = defaultdict[tuple[WorkKind, Stage], int](int, placed.amounts)
    num_rows = placed.placement.gpu_embedding_rows
    for row in gradients.spilled(placed.step, placed.stages, num_rows, spilled_segments):
        moved[row.resource, row.stage] += row.amount
    return Traffic(
        forward_read_bytes=moved["read", "forward"],
        forward_written_bytes=moved["write", "forward"],
        backward_read_bytes=moved["read", "backward"],
        backward_written_bytes=moved["write", "backward"],
        update_read_bytes=moved["read", "update"],
        update_written_bytes=moved["write", "update"],
        forward_in_files_bytes=moved["in files", "forward"],
        backward_in_files_bytes=moved["in files", "backward"],
        first_read_bytes=sum(num_bytes for (resource, _), num_bytes in moved.items() if resource == "first read"),
    ).with_offloaded(offloaded)


def state_written_bytes(spec: ModelSpec) -> int:
    """What every step writes, whatever its placement: the records, and the table of checksums."""
    return spec.one_generation.slot.num_bytes


def unfrozen_state_bytes(spec: ModelSpec) -> int:
    """What every step would write if the frozen parameters were trained by AdamW: the measure of a drive's wear
    (planning/time/wear.py)."""
    frozen = sum(block.num_parameters for block in spec.blocks if not block.is_trained)
    return state_written_bytes(spec) + ADAMW.record(spec.dtype).num_bytes(frozen)


def store_bytes(spec: ModelSpec, *, num_slots: int) -> int:
    """Space of the store's records and checksums. Three pages of header in each file are not counted."""
    return spec.one_generation.slot_address(num_slots)
