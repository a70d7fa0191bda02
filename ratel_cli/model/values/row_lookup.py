"""Lets a model's embedding look its tokens up in a matrix that has the rows of some tokens only.

While rows are bound, the embedding module gets row numbers in place of token ids, and the row number of its padding
token in place of that token. Nothing else sees row numbers: what the model's code makes of the token ids, such as
masks, stays as it is.

Row numbers are places in the sorted token ids, so tokens compare as before. Therefore the gradient of the rows has the
bits that these rows have in the gradient of the whole matrix. Torch's kernels add up the tokens of a row in an order
that depends on nothing but the places of equal ids among the ids. On the CPU that is the order of the tokens. On a GPU,
up to 3072 tokens are compared with each other; more are sorted by a stable radix sort, and each run of equal ids is
added up in parts of ten (aten/src/ATen/native/cuda, Embedding.cu and EmbeddingBackwardKernel.cu). Neither looks at the
number of rows.

Invariant: a module without bound rows works as if it had never been touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctTokens:
    """The distinct tokens that some micro-batches may look up: their ids in ascending order, `[rows]`, int64."""

    ids: torch.Tensor
    """In host memory."""
    on_device: torch.Tensor
    """On the device that computes."""

    @classmethod
    def of(cls, input_ids: Sequence[torch.Tensor], device: torch.device, *, substitutes: Sequence[int] = ()) -> Self:
        """Find the distinct tokens among token ids `[batch, tokens]` in host memory, and `substitutes`, which may be
        looked up in their place."""
        ids = torch.unique(torch.cat([*(each.reshape(-1) for each in input_ids), torch.tensor(substitutes).long()]))
        return cls(ids=ids, on_device=ids.to(device))

    def __len__(self) -> int:
        return len(self.ids)


class RowLookup:
    """The embedding module of one skeleton."""

    def __init__(self, module: nn.Module) -> None:
        self._embedding = module if isinstance(module, nn.Embedding) else None
        self._padding_id = None if self._embedding is None else self._embedding.padding_idx
        self._tokens: DistinctTokens | None = None
        module.register_forward_pre_hook(self._before_forward)

    @property
    def is_possible(self) -> bool:
        """True if the module is an embedding of torch, which reads its padding token from an attribute."""
        return self._embedding is not None

    @property
    def num_rows(self) -> int:
        """Rows of the whole matrix; 0 if the module is no embedding of torch."""
        return 0 if self._embedding is None else self._embedding.num_embeddings

    def bind(self, tokens: DistinctTokens, *, is_trial: bool = False) -> None:
        """From now on the matrix has the rows of these tokens. In a trial it need not have them, and nothing pads."""
        assert self._embedding is not None
        self._tokens = tokens
        if is_trial:
            self._embedding.padding_idx = None
        elif self._padding_id is not None:
            place = int(torch.searchsorted(tokens.ids, self._padding_id))
            is_there = place < len(tokens) and int(tokens.ids[place]) == self._padding_id
            self._embedding.padding_idx = place if is_there else None

    def unbind(self) -> None:
        """From now on the matrix has the rows of all tokens. Idempotent."""
        if self._tokens is not None and self._embedding is not None:
            self._tokens = None
            self._embedding.padding_idx = self._padding_id

    def _before_forward(self, _: nn.Module, arguments: tuple[object, ...]) -> tuple[object, ...] | None:
        """Torch's hook: returns what takes the place of the arguments, or None to leave them."""
        if self._tokens is None or not arguments or not isinstance(arguments[0], torch.Tensor):
            return None
        return torch.searchsorted(self._tokens.on_device, arguments[0]), *arguments[1:]
