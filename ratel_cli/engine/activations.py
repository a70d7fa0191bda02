"""Block inputs: the hidden states that forward leaves behind and backward starts from.

One tensor per (block, micro-batch), kept in host memory; they are always kept, since everything else
of a block can be recomputed from its input (the paper's A_interBlock). Operator outputs that a plan
swaps join them here when plans exist.
"""

from __future__ import annotations

import torch


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
