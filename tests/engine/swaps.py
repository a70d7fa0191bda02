"""Random swap sets for tests, without a list of the model's operators."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Self


class Chosen(frozenset[str]):
    """Contains about `share` of all possible keys."""

    def __new__(cls, share: float, seed: int) -> Self:
        chosen = super().__new__(cls)
        chosen.share, chosen.seed = share, seed
        return chosen

    share: float
    seed: int

    def __contains__(self, key: object) -> bool:
        return zlib.crc32(f"{self.seed} {key}".encode()) < self.share * 2**32


class _Products(frozenset[str]):
    """Every product of matrices with weights."""

    def __contains__(self, key: object) -> bool:
        return "mm" in str(key) and "bmm" not in str(key)


class ChosenEverywhere(Mapping[int, frozenset[str]]):
    """A different random set for each block."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self._share = share
        self._seed = seed

    def __getitem__(self, block: int) -> frozenset[str]:
        return Chosen(self._share, 1000 * self._seed + block)

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


EVERYTHING = ChosenEverywhere(1.0)


class _ProductsEverywhere(ChosenEverywhere):
    def __getitem__(self, block: int) -> frozenset[str]:
        return _Products()


PRODUCTS = _ProductsEverywhere(1.0)
"""What the plan of a long run offloads. Its size grows with the number of tokens, as attention's scores do not."""
