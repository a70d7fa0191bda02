"""Modules that compute with quantised matrices: linear layers, and modules that have stacks of matrices.

Invariant: no autograd graph has the matrix that is computed with, nor its bytes: a backward takes the bytes that are
bound to the module then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from ratel_cli.model.files.quantised import QuantisedLayout, dequantised, quantise
from ratel_cli.sizes import StoredForm


class Quantised(nn.Module):
    """A module with quantised parameters: flat arrays of bytes, which never have a gradient."""

    dtype: torch.dtype
    """Dtype that the module computes in."""

    @property
    def layouts(self) -> Mapping[str, QuantisedLayout]:
        """By the name of a parameter."""
        raise NotImplementedError

    def values(self, name: str) -> torch.Tensor:
        """The matrix or stack as it is bound now. What stands in for it in a trial is one already."""
        weight = self._parameters[name]
        assert weight is not None
        return dequantised(weight, self.layouts[name], self.dtype) if weight.dtype == torch.uint8 else weight

    def _noting(self, made: Mapping[str, torch.Tensor]) -> AbstractContextManager[object]:
        """A context in which autograd gets a note of how it would see one of these, and asks for it again. What else it
        saves goes to whoever asked for that: torch has no way to say so, and asks the innermost alone."""
        names = {each.untyped_storage()._cdata: name for name, each in made.items()}
        top: Callable[[bool], tuple[Callable[..., object], Callable[..., torch.Tensor]] | None]
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # noqa: B009 (its stub is wrong)
        hooks = top(False)
        keep: Callable[..., object] = hooks[0] if hooks else _itself
        give: Callable[..., torch.Tensor] = hooks[1] if hooks else _itself

        def note(saved: torch.Tensor) -> object:
            name = names.get(saved.untyped_storage()._cdata)
            if name is None:
                return keep(saved)
            return _Seen(name, saved.size(), saved.stride(), int(saved.storage_offset()))

        def again(noted: object) -> torch.Tensor:
            return self._again(noted) if isinstance(noted, _Seen) else give(noted)

        return torch.autograd.graph.saved_tensors_hooks(note, again)

    def _again(self, noted: _Seen) -> torch.Tensor:
        layout, weight = self.layouts[noted.name], self._parameters[noted.name]
        assert weight is not None
        if weight.dtype == torch.uint8 and layout.num_stacked:
            of_matrix = layout.num_elements // layout.num_stacked
            first, last = noted.matrices(of_matrix)
            part = layout.of_matrices(weight, first, last) if last - first < layout.num_stacked else None
            if part is not None:
                found = dequantised(*part, self.dtype)
                return found.as_strided(noted.size, noted.stride, noted.offset - first * of_matrix)
        return self.values(noted.name).as_strided(noted.size, noted.stride, noted.offset)


class QuantisedLinear(Quantised, nn.Linear):
    """A linear layer whose weight is quantised."""

    def __init__(self, layout: QuantisedLayout, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        """A layer without its weight. `dtype`: that it computes in."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = layout.columns, layout.rows
        self.layout, self.dtype = layout, dtype
        self.weight = nn.Parameter(torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def layouts(self) -> Mapping[str, QuantisedLayout]:
        """See Quantised."""
        return {"weight": self.layout}

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        """The layer's output."""
        matrix = self.values("weight")
        with self._noting({"weight": matrix}):
            return nn.functional.linear(input, matrix, self.bias)


class QuantisedExperts(Quantised):
    """What the class of a module becomes whose stacks of matrices are quantised: `quantise_experts`."""

    stacks: Mapping[str, QuantisedLayout]

    @property
    def layouts(self) -> Mapping[str, QuantisedLayout]:
        """See Quantised."""
        return self.stacks

    def forward(self, *arguments: object, **options: object) -> object:
        """What the module's own code computes with the stacks. All of them exist meanwhile."""
        bound = {name: self._parameters[name] for name in self.stacks}
        made = {name: self.values(name) for name in self.stacks}
        self._parameters.update(made)  # type: ignore[arg-type]
        try:
            with self._noting(made):
                return super().forward(*arguments, **options)
        finally:
            self._parameters.update(bound)


def quantise_experts(module: nn.Module, names: Sequence[str], form: StoredForm) -> None:
    """Let these stacks of a module be quantised, with their values if they are not on the meta device; in MXFP4 they
    are zeros then."""
    stacks = dict[str, QuantisedLayout]()
    for name in names:
        values = module.get_parameter(name)
        stacks[name] = layout = QuantisedLayout.of(form, values.shape)
        if values.is_meta or form == "mxfp4" or form == "int4":  # which only files have
            data = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=values.device)
        else:
            data = quantise(values.detach(), form)
        module.dtype = values.dtype  # type: ignore[assignment]
        module._parameters[name] = nn.Parameter(data, requires_grad=False)
    module.__class__ = _quantised_class(type(module))
    module.stacks = stacks  # type: ignore[assignment]


def _quantised_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _CLASSES:
        _CLASSES[plain] = type(f"Quantised{plain.__name__}", (QuantisedExperts, plain), {})
    return _CLASSES[plain]


_CLASSES: Final[dict[type[nn.Module], type[nn.Module]]] = {}
"""By the class of a module that was not quantised."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """How autograd sees a module's matrix, such as transposed, or one of a stack."""

    name: str
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def matrices(self, num_elements: int) -> tuple[int, int]:
        """The first of the matrices of this size that it has elements of, and the one behind the last."""
        if 0 in self.size:
            return 0, 0
        last = self.offset + sum((number - 1) * step for number, step in zip(self.size, self.stride, strict=True))
        return self.offset // num_elements, last // num_elements + 1


def _itself(saved: torch.Tensor) -> torch.Tensor:
    return saved
