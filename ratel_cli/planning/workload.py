"""What a run asks of a machine: how many tokens a step has, and how many bytes a parameter takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The shape of one step."""

    micro_batch_size: int
    num_micro_batches: int
    sequence_len: int

    @property
    def micro_batch_tokens(self) -> int:
        return self.micro_batch_size * self.sequence_len

    @property
    def tokens(self) -> int:
        """Tokens of a full step."""
        return self.micro_batch_tokens * self.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter in the store and on the wires."""

    compute: int
    """The field that the device computes with (P16)."""
    record: int
    """All fields together: 12 in bf16 and fp32, 14 in fp16."""
    num_fields: int
    """4, 3 and 4; each chunk of each has a checksum."""
    gradient: int
