"""What one step moves over NVMe, to the byte, and what the store takes. Pure.

Every block's weights are read once in forward and once in backward; the rest of its record is read once for the update,
and the record is written once. In bf16 that is 2 + 2 + 10 bytes read and 12 written: 26 bytes per parameter of a layer
(the paper's layout moves 30). The head is read once, because its backward follows its forward; a tied embedding is read
once more, for the head. When a block is updated changes where these bytes fall:

    in backward       the update finds the weights that backward used, reads the states, writes the record
    in next forward   the update reads the weights and passes the new ones on: forward, and the head, read nothing
    in between        the update reads the weights once more: 2 bytes on top (28)

With every commit goes the table of checksums, 8 bytes for each chunk of a field. Weights and states that stay in memory
are not read, nor are weights that are still there (the block schedule, planning/placement.py). Spilled activations are
written in forward and read in backward, except for the last ones (planning/activations.py).

Invariant: an applied step of the engine moves exactly these bytes. Those of an update in the next forward belong to the
step whose gradients it applies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.activations import OffloadedActivations
from ratel_cli.planning.placement import (
    Overlap,
    Placement,
    Stage,
    StateBytes,
    block_schedule,
    gradient_elements,
    needs_read,
)
from ratel_cli.sizes import CHECKSUM_BYTES, CHUNK_ELEMENTS, PAGE_BYTES
from ratel_cli.units import align_up


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


def step_traffic(
    spec: ModelSpec,
    state: StateBytes,
    placement: Placement,
    offloaded: OffloadedActivations,
    *,
    holds_gradients: bool,
    spilled_blocks: int = 0,
    overlap: Overlap = "optimized",
) -> Traffic:
    """The traffic of one applied step.

    With `holds_gradients` every update runs in the next forward (or in between). The gradients of the first
    `spilled_blocks` blocks go to NVMe in backward and come back for the update. A step that speculates that nothing
    will be clipped moves the bytes of a step without held gradients.
    """
    read: dict[Stage, int] = {"forward": 0, "backward": 0, "update": 0}
    written: dict[Stage, int] = {"forward": 0, "backward": 0, "update": 0}
    first_bytes = 0
    held_elements = gradient_elements(spec, placement.gpu_embedding_rows)
    for block in spec.blocks:
        stage = placement.update_stage(block.index, holds_gradients=holds_gradients, overlap=overlap)
        weight_bytes = block.num_elements * state.compute
        state_bytes = block.num_elements * (state.record - state.compute)
        if block.index in placement.resident_weights:
            first_bytes += weight_bytes
        elif stage == "update":
            read[stage] += weight_bytes
        if block.index in placement.resident_states:
            first_bytes += state_bytes
        else:
            read[stage] += state_bytes
        written[stage] += block.num_elements * state.record
        if block.index < spilled_blocks:
            written["backward"] += held_elements[block.index] * state.gradient
            read[stage] += held_elements[block.index] * state.gradient
    head, schedule = spec.blocks[-1], block_schedule(spec)
    head_stage = placement.update_stage(head.index, holds_gradients=holds_gradients, overlap=overlap)
    for position, use in enumerate(schedule):
        if needs_read(schedule, position, placement):
            is_passed_on = use.block is head and head_stage == "forward"
            read["forward" if is_passed_on else use.stage] += use.block.num_elements * state.compute
    written["forward"] += checksum_bytes(spec, state)  # a step is committed while the next one's forward runs
    return Traffic(
        forward_read_bytes=read["forward"],
        forward_written_bytes=written["forward"],
        backward_read_bytes=read["backward"],
        backward_written_bytes=written["backward"],
        update_read_bytes=read["update"],
        update_written_bytes=written["update"],
        first_read_bytes=first_bytes,
    ).with_offloaded(offloaded)


def state_written_bytes(spec: ModelSpec, state: StateBytes) -> int:
    """What every step writes, whatever its placement: the records, and the table of checksums."""
    return state.record * sum(spec.block_elements) + checksum_bytes(spec, state)


def gradient_bytes(spec: ModelSpec, state: StateBytes, placement: Placement, *, num_blocks: int) -> int:
    """Held gradients (G16) of the first `num_blocks` blocks."""
    return sum(gradient_elements(spec, placement.gpu_embedding_rows)[:num_blocks]) * state.gradient


def store_bytes(spec: ModelSpec, state: StateBytes, *, num_slots: int) -> int:
    """Space of the store's records and checksums. Three pages of header in each file are not counted."""
    records_bytes = state.record * sum(spec.block_elements)
    return num_slots * (records_bytes + checksum_bytes(spec, state))


def checksum_bytes(spec: ModelSpec, state: StateBytes) -> int:
    """The checksum table of one generation, in whole pages: an entry for each chunk, and one for the table itself."""
    num_chunks = sum(-(-block.num_elements // CHUNK_ELEMENTS) for block in spec.blocks)
    return align_up(CHECKSUM_BYTES * (1 + state.num_fields * num_chunks), PAGE_BYTES)
