"""What forward leaves behind for backward: every block's input, and whole autograd graphs where there is room.

Inputs are one tensor per (block, micro-batch), kept in host memory; they are always kept, since everything
else of a block can be recomputed from them (the paper's A_interBlock). Operator outputs that a plan
swaps join them here when plans exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ratel_cli.planning.placement import Placement


class BlockInputs:
    """Inputs of blocks, each put once in forward and taken once in backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def put(self, block: int, micro_batch: int, hidden: torch.Tensor) -> None:
        """Keep `hidden` [batch, tokens, hidden_size] in host memory."""
        self._kept[block, micro_batch] = hidden.detach().to("cpu")

    def take(self, block: int, micro_batch: int) -> torch.Tensor:
        """Give the tensor back on the compute device, as a fresh leaf that wants a gradient."""
        return self._kept.pop((block, micro_batch)).to(self._device).requires_grad_()


class _Tokens(Protocol):
    @property
    def input_ids(self) -> torch.Tensor: ...


class Keeping:
    """Which blocks' activations are kept instead of being recomputed: as many as the placement has room for.

    What a block takes is known once it has been recorded, so the first step recomputes everything. Only
    blocks whose weights are resident are kept: their graphs refer to them from forward to backward.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._bytes_per_token: dict[int, float] = {}

    def learn(self, saved_bytes: Mapping[int, int], batches: Sequence[_Tokens]) -> None:
        """Take in what autograd would have kept of the blocks recorded in a step."""
        tokens = _num_tokens(batches)
        for block, num_bytes in saved_bytes.items():
            self._bytes_per_token[block] = max(num_bytes / tokens, self._bytes_per_token.get(block, 0.0))

    def blocks(self, batches: Sequence[_Tokens]) -> frozenset[int]:
        """The blocks to keep in a step with these micro-batches: from the last one downwards, which is freed first."""
        room_bytes, tokens = float(self._placement.activation_bytes), _num_tokens(batches)
        kept = []
        for block in sorted(self._placement.resident_weights & self._bytes_per_token.keys(), reverse=True):
            room_bytes -= self._bytes_per_token[block] * tokens
            if room_bytes < 0:
                break
            kept.append(block)
        return frozenset(kept)


def _num_tokens(batches: Sequence[_Tokens]) -> int:
    return sum(batch.input_ids.numel() for batch in batches)
