"""Attributes, buffers and parts of modules, kept as they are through a call of the model's code.

Some models change themselves when they run: rotary tables that are scaled to the longest row so far, for instance. Then
a row's result depends on the rows before it, and on whether a run was resumed. Here each call begins with the state
that the model was built with, so that a step is a function of its rows alone, and each row's result is that of plain
PyTorch on a model that has not run yet.

An attribute that a call replaces or adds is put back. A tensor that it writes to can only be put back if it was copied
before, so trials find these tensors (`is_learning`). Invariant: no change goes unnoticed. A call that writes to any
other tensor raises BadInput.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ratel_cli.errors import BadInput

_ABSENT = object()
_Place: TypeAlias = "tuple[int, str]"
"""The number of a module's attributes, buffers or parts in `ModuleState._values`, and the key there."""


class ModuleState:
    """The state of some modules."""

    def __init__(self, modules: Mapping[str, nn.Module], *, model_name: str) -> None:
        """`modules`: by their names in the model. `model_name` stands in errors."""
        self._model_name = model_name
        self._values: list[tuple[str, dict[str, Any]]] = [
            (name, values)
            for name, module in modules.items()
            for values in (vars(module), module._buffers, module._modules)
        ]
        self._copied: set[_Place] = set()
        """Tensors that calls write to."""
        self.is_learning = False
        """Whether a tensor that a call writes to is noted, to be copied from now on, and not an error."""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A context after which the state is what it was. Raises BadInput if it cannot be put back."""
        before = [dict(values) for _, values in self._values]
        versions = _versions(before)
        copied = versions.keys() if self.is_learning else self._copied
        copies = {place: _at(place, before).clone() for place in copied}
        try:
            yield
        finally:
            for place in self._changed(before):
                self._put_back(place, before)
            written = [place for place, version in versions.items() if _at(place, before)._version != version]
            for place in copies.keys() & written:
                _at(place, before).copy_(copies[place])
                self._copied.add(place)
        for place in written:
            if place not in self._copied:
                raise BadInput(
                    f"{self._model_name}: its code changes {self._name(place)} whenever it runs, so a step would depend"
                    " on the steps before it; such models cannot be trained exactly"
                )

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context that must leave the state as it is. Raises BadInput if it does not."""
        before = [dict(values) for _, values in self._values]
        yield
        for place in self._changed(before):
            raise BadInput(
                f"{self._model_name}: its code sets {self._name(place)} before its layers run; such models cannot be"
                " streamed"
            )

    def _changed(self, before: list[dict[str, object]]) -> list[_Place]:
        """Where there is another object than before."""
        return [
            (number, key)
            for number, ((_, values), old) in enumerate(zip(self._values, before, strict=True))
            if len(values) != len(old) or any(old.get(key, _ABSENT) is not value for key, value in values.items())
            for key in {**old, **values}
            if old.get(key, _ABSENT) is not values.get(key, _ABSENT)
        ]

    def _put_back(self, place: _Place, before: list[dict[str, object]]) -> None:
        number, key = place
        values, old = self._values[number][1], before[number]
        if key in old:
            values[key] = old[key]
        else:
            del values[key]

    def _name(self, place: _Place) -> str:
        return f"{self._values[place[0]][0]}.{place[1]}".lstrip(".")


def _versions(values: list[dict[str, object]]) -> dict[_Place, int]:
    """How often each tensor was written to."""
    return {
        (number, key): value._version
        for number, each in enumerate(values)
        for key, value in each.items()
        if isinstance(value, torch.Tensor)
    }


def _at(place: _Place, values: list[dict[str, object]]) -> torch.Tensor:
    tensor = values[place[0]][place[1]]
    assert isinstance(tensor, torch.Tensor)
    return tensor
