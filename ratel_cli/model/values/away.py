"""What stands in a module for a parameter whose weights are on the drives, and for its gradient.

It has the shape, the dtype, the device and the settings of a parameter, so that optimizers, counts and `requires_grad`
work. Whoever computes with it gets an error that names the parameter, and no zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ratel_cli.errors import BadInput

ASKED = frozenset(
    {"__get__", "__set__", "__delete__", "__len__", "dim", "size", "stride", "numel", "nelement", "type"}
    | {"element_size", "is_floating_point", "is_complex", "requires_grad_", "has_names", "is_contiguous"}
    | {"_has_compatible_shallow_copy_type", "register_hook", "register_post_accumulate_grad_hook"}
)
"""Functions that ask about a tensor, or set what is not its values."""
_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that have its values."""
_MOVES = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16"})
"""Functions that change nothing where a tensor is on the device, and has the dtype, that they are for."""


def asks(func: Callable[..., Any]) -> bool:
    """Whether a function asks about a tensor, or sets what is not its values."""
    name = getattr(func, "__name__", "")
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
    return name in ASKED and attribute not in _VALUES


class AwayTensor(torch.Tensor):
    """Has no values: they are on the drives."""

    @classmethod
    def made(cls, like: torch.Tensor, device: torch.device | None = None, *, requires_grad: bool = False) -> Self:
        """One with a tensor's shape and dtype, in the memory of one element on `device`; None: where the tensor is."""
        with torch._C.DisableTorchFunctionSubclass():
            values = torch.zeros((), dtype=like.dtype, device=device or like.device).expand(like.shape)
            found: Self = torch.Tensor._make_subclass(cls, values, requires_grad)
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if asks(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, AwayTensor)]
        return next((each for each in found if isinstance(each, AwayGradient)), found[0]).compute(func, args, kwargs)

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """What a function gives that computes with it and others. Raises BadInput, but where it only asks for what is
        there: to be moved to where it is."""
        first = args[0] if args else None
        if func == torch.Tensor.data.__set__ and args[1] is first:  # type: ignore[attr-defined]
            return None
        if getattr(func, "__name__", "") in _MOVES and isinstance(first, AwayTensor):
            there = torch.empty((0,) * first.dim(), dtype=first.dtype, device=first.device)
            if func(there, *args[1:], **kwargs) is there:
                return first
            raise BadInput("a hooked module stays where it is, and in its dtype", "move it before ratel.hook")
        raise self.used()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.used().message})"

    def used(self) -> BadInput:
        """The error for whoever computes with it."""
        raise NotImplementedError


class AwayParameter(AwayTensor, nn.Parameter):
    """Stands for a parameter that is on the drives."""

    parameter_name: str
    is_closed: bool = False
    """Whether the module is not hooked any more."""

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise self.used()

    def used(self) -> BadInput:
        """See AwayTensor."""
        if self.is_closed:
            return BadInput(
                f"the hooked module is closed, and {self.parameter_name} is in its training state",
                "hook it again with the same storage",
            )
        return BadInput(
            f"{self.parameter_name} is on the drives: it is there only while its own block computes",
            "if code outside of the block uses it, name its module in outside=[...] of ratel.hook; to read it, save "
            "the model",
        )


def hooks_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The hooks that a parameter has, by the attribute of torch that holds them."""
    with torch._C.DisableTorchFunctionSubclass():
        found = {name: getattr(parameter, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    return {name: hooks for name, hooks in found.items() if hooks}


def share_hooks(before: nn.Parameter, parameter: nn.Parameter) -> None:
    """Let a parameter that takes another one's place have its hooks, and keep sharing them when a handle removes
    one."""
    with torch._C.DisableTorchFunctionSubclass():
        for name, hooks in hooks_of(before).items():
            setattr(parameter, name, hooks)


class AwayGradient(AwayTensor):
    """Stands for a gradient that is with the update. It has a norm, and no values: to clip them is an error."""

    norm_of_step: float | torch.Tensor | None = None
    """Its 2-norm in the last step that has ended."""

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """See AwayTensor. Also answers what `torch.nn.utils.clip_grad_norm_` asks for where it does not clip."""
        if args and args[0] is self and self.norm_of_step is not None:
            if func is torch.linalg.vector_norm and not kwargs and args[1:] == (2.0,):
                return torch.as_tensor(self.norm_of_step, device=self.device)
            if func is torch.Tensor.mul_ and float(args[1]) == 1.0:
                return self
        return super().compute(func, args, kwargs)

    def used(self) -> BadInput:
        """See AwayTensor."""
        return BadInput(
            "the gradients of a hooked module are with its update, not in .grad",
            "clip them with max_grad_norm of ratel.AdamW; its step() is the only one that updates the weights",
        )
