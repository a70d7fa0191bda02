"""What torch hands to a dispatch mode, in types that can be checked.

`model.probe` and `engine.replay.tape` watch a model's operators below autograd; both see them as `Operator`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Schema(Protocol):
    """The part of an operator's signature that we ask about."""

    @property
    def is_mutable(self) -> bool:
        """Whether it writes to one of its arguments."""
        ...


class Operator(Protocol):
    """A torch operator overload, such as aten.mm.default."""

    @property
    def _schema(self) -> Schema: ...

    @property
    def is_view(self) -> bool:
        """Whether its result shares memory with an argument by its schema."""
        ...

    @property
    def tags(self) -> Sequence[torch.Tag]: ...

    def __call__(self, *arguments: object, **keywords: object) -> object: ...


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, which nest at most in lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [tensor for item in tree for tensor in tensors_in(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in tensors_in(item)]
    return []
