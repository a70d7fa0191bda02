"""The weights of a base model with an adapter added to them, as PEFT merges it.

Memory is one matrix, its adapter and their product in fp32. Invariant: the values are those of PEFT's
`merge_and_unload` on a base in the same dtype, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ratel_cli.model.stored_weights import StoredWeights


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
    """Of the matrix."""
    scaling: float
    magnitudes: str | None = None
    """DoRA: the length of the sum's weights of each output, `[outputs]`; None: it is as it comes."""
    is_inputs_first: bool = False
    """Whether the matrix is `[inputs, outputs]`, as in GPT-2."""
    num_experts: int = 0
    """Of a stack `[experts, ...]`, whose matrices `first` has one after another, and `second` by turns; 0: it is the
    matrix of a linear layer."""


class MergedWeights:
    """Reads the parameters of the base by the names that they have without an adapter."""

    def __init__(
        self,
        weights: StoredWeights,
        stored_names: Mapping[str, str],
        adapted: Mapping[str, AdaptedMatrix],
        base_matrices: Mapping[str, Callable[[StoredWeights], torch.Tensor]] = MappingProxyType({}),
    ) -> None:
        """`stored_names`: of all parameters, and `adapted` of those with an adapter, by their names without it.
        `base_matrices`: by such a name, what makes the matrix of a quantised base, in memory of its own, to which the
        adapter is added if it has one."""
        self._weights, self._stored_names, self._adapted = weights, stored_names, adapted
        self._base_matrices = base_matrices
        self._last: tuple[str, torch.Tensor] | None = None

    def slices(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        """See StoredWeights."""
        if self._is_made(name):
            yield self.whole(name).reshape(-1)[start:stop]
        else:
            yield from self._weights.slices(self._stored_names[name], start, stop)

    def range(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See StoredWeights."""
        if self._is_made(name):
            return self.whole(name).reshape(-1)[start:stop].clone()
        return self._weights.range(self._stored_names[name], start, stop)

    def whole(self, name: str) -> torch.Tensor:
        """See StoredWeights. That of an adapted matrix is kept until another one is read."""
        if not self._is_made(name):
            return self._weights.whole(self._stored_names[name])
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = name, self._merged(name)
        return self._last[1]

    def _is_made(self, name: str) -> bool:
        return name in self._adapted or name in self._base_matrices

    def _merged(self, name: str) -> torch.Tensor:
        make = self._base_matrices.get(name)
        matrix = self._weights.whole(self._adapted[name].matrix) if make is None else make(self._weights)
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
