"""What one step moves over NVMe, to the byte, and what the store takes. Used by `planning.plan`. Pure.

Every block's weights are read once in forward and once in backward; its states are read and written
once. In bf16 that is 2 + 2 + 10 read and 12 written: 26 bytes per parameter of a layer (architecture.md
section 4; the paper's layout moves 30). The head is read once, since its backward follows its forward;
a tied embedding once more, for the head.

Invariant: an applied step of `engine.step` moves exactly these bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter in the store and on the wires."""

    compute: int
    """The field that the device computes with (P16)."""
    record: int
    """All fields together: 12 in bf16 and fp32, 14 in fp16."""
    gradient: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """NVMe bytes of one step."""

    forward_read_bytes: int
    """From the embedding to the last layer."""
    backward_read_bytes: int
    """The head's weights included, whose forward and backward are one."""
    written_bytes: int

    @property
    def read_bytes(self) -> int:
        return self.forward_read_bytes + self.backward_read_bytes


def step_traffic(spec: ModelSpec, state: StateBytes, *, holds_gradients: bool, spilled_blocks: int = 0) -> Traffic:
    """The traffic of one applied step.

    With held gradients the update reads the compute weights again, since backward is long over.
    `spilled_blocks` of them, the last in backward order, go to NVMe and come back.
    """
    embedding, *between, _head = spec.blocks
    forward = embedding.num_elements + sum(block.num_elements for block in between)
    every = sum(block.num_elements for block in spec.blocks)
    backward = every + (embedding.num_elements if spec.tied else 0)
    updated = state.record if holds_gradients else state.record - state.compute
    spilled_bytes = gradient_bytes(spec, state, num_blocks=spilled_blocks)
    return Traffic(
        forward_read_bytes=forward * state.compute,
        backward_read_bytes=backward * state.compute + every * updated + spilled_bytes,
        written_bytes=every * state.record + spilled_bytes,
    )


def gradient_bytes(spec: ModelSpec, state: StateBytes, *, num_blocks: int) -> int:
    """G16 of the first `num_blocks` blocks."""
    return sum(block.num_elements for block in spec.blocks[:num_blocks]) * state.gradient


def store_bytes(spec: ModelSpec, state: StateBytes, *, num_slots: int) -> int:
    """Space of the store's records; three pages of header in each file come on top."""
    return num_slots * state.record * sum(block.num_elements for block in spec.blocks)
