"""Watching the operators that torch runs below autograd.

A subclass of `OperatorMode` sees every operator while it is entered, and decides what becomes of it: it may run the
operator, run it on other tensors, or return a result without running anything. Invariant: everything that torch hands
over has a checked type here, so that no subclass needs `Any`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorArgument(Protocol):
    """One argument in an operator's signature."""

    @property
    def name(self) -> str: ...


class OperatorSchema(Protocol):
    """The part of an operator's signature that we read."""

    @property
    def arguments(self) -> Sequence[OperatorArgument]: ...

    @property
    def is_mutable(self) -> bool:
        """Whether the operator writes to one of its arguments."""


class TorchOperator(Protocol):
    """A torch operator overload, such as aten.mm.default."""

    @property
    def _schema(self) -> OperatorSchema: ...

    @property
    def is_view(self) -> bool:
        """Whether the result shares memory with an argument, by the operator's schema."""

    @property
    def tags(self) -> Sequence[torch.Tag]: ...

    def __call__(self, *arguments: object, **keywords: object) -> object: ...


class OperatorMode(TorchDispatchMode):
    """A context inside which `intercept` takes the place of every torch operator of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the result of `func(*args, **kwargs)`, or what takes its place. Operators run here are not seen."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: TorchOperator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self.intercept(func, args, kwargs or {})


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors in an operator's arguments or results, which nest in lists, tuples and dicts only."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [tensor for item in tree for tensor in tensors_in(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in tensors_in(item)]
    return []
