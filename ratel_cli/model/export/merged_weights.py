"""The weights of a base model with an adapter added to them, as PEFT merges it.

Memory is one matrix, its adapter and their product in fp32. Invariant: the values are those of PEFT's
`merge_and_unload` on a base in the dtype of its files, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.stored_weights import StoredWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedMatrix:
    """A matrix of the base, and what is added to it: `second @ first`, scaled. Names as the store has them."""

    matrix: str
    first: str
    """`lora_A`, `[rank, inputs]`."""
    second: str
    """`lora_B`, `[outputs, rank]`."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the matrix."""
    scaling: float
    magnitudes: str | None = None
    """DoRA: the length of the sum's weights of each output, `[outputs]`; None: it is as it comes."""
    is_inputs_first: bool = False
    """Whether the matrix is `[inputs, outputs]`, as in GPT-2."""
    num_experts: int = 0
    """Matrices of a stack `[experts, ...]`: `first` has theirs one after another, and `second` by turns; 0: it is the
    matrix of a linear layer."""


class TrainedRows(NamedTuple):
    """The rows of some tokens, which an adapter trains beside a frozen matrix."""

    name: str
    """What holds them, `[tokens, width]`."""
    tokens: tuple[int, ...]
    width: int
    matrix: str
    """The matrix in the model without the adapter."""
    dtype: torch.dtype
    """The dtype of the matrix."""

    def read(self, base: WeightSource) -> torch.Tensor:
        """The rows as they are in the base, in fp32, with which training begins."""
        rows = [base.read(self.matrix, each * self.width, (each + 1) * self.width) for each in self.tokens]
        return torch.stack(rows).to(self.dtype).float()

    def put_into(self, matrix: torch.Tensor, rows: torch.Tensor) -> None:
        """Put trained rows into the matrix, as PEFT's merge does."""
        matrix.index_copy_(0, torch.tensor(self.tokens), rows.to(matrix.dtype))


class MergedWeights:
    """Reads the parameters of the base by the names that they have without an adapter."""

    def __init__(
        self,
        weights: StoredWeights,
        adapted: Mapping[str, AdaptedMatrix],
        base_matrix: Callable[[str], torch.Tensor],
    ) -> None:
        """`weights` has the adapter. `adapted`: what is added to the parameters with an adapter, by such names.
        `base_matrix`: gives a parameter as it is without an adapter, in memory of its own."""
        self._weights, self._adapted, self._base_matrix = weights, adapted, base_matrix
        self._last: tuple[str, torch.Tensor] | None = None

    def slices(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """See StoredWeights."""
        yield self.read(name, start, stop)

    def range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See StoredWeights."""
        return self.read(name, start, stop).clone()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource. In the dtype that the parameter has."""
        return self.whole(name).reshape(-1)[start:stop]

    def whole(self, name: str) -> torch.Tensor:
        """See StoredWeights. It is kept until another one is read."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._merged(name)
        return self._last[1]

    def _merged(self, name: str) -> torch.Tensor:
        matrix = self._base_matrix(name)
        if name not in self._adapted:
            return matrix
        adapted = self._adapted[name]
        first, second = self._weights.whole(adapted.first), self._weights.whole(adapted.second)
        if adapted.num_experts:
            matrix += _stack_of_products(first, second, adapted).to(matrix.dtype)
            return matrix
        product = second @ first
        added = (product.T if adapted.is_inputs_first else product) * adapted.scaling
        if adapted.magnitudes is None:
            matrix += added  # in fp32, rounded once to the matrix's dtype
            return matrix
        factors = self._weights.whole(adapted.magnitudes) / output_lengths(matrix, added, adapted)
        return ((factors if adapted.is_inputs_first else factors.unsqueeze(1)) * (matrix + added)).to(matrix.dtype)


def _stack_of_products(first: torch.Tensor, second: torch.Tensor, adapted: AdaptedMatrix) -> torch.Tensor:
    """What is added to a stack of experts, or to a single matrix."""
    if adapted.num_experts == 1:
        return second @ first * adapted.scaling
    firsts = first.reshape(adapted.num_experts, -1, first.shape[-1])
    seconds = second.reshape(second.shape[0], -1, adapted.num_experts)
    wanted = "o r e, e r i -> e i o" if adapted.is_inputs_first else "o r e, e r i -> e o i"
    return torch.einsum(wanted, seconds, firsts) * adapted.scaling


def output_lengths(matrix: torch.Tensor, added: torch.Tensor, adapted: AdaptedMatrix) -> torch.Tensor:
    """The length of the weights of each output, in the dtype of the sum (DoRA, arXiv 2402.09353, eq. 5)."""
    total = matrix + added
    lengths: torch.Tensor = torch.linalg.norm(total.T if adapted.is_inputs_first else total, dim=1)
    return lengths
