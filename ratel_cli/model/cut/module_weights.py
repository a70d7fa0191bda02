"""The parameters that a module of the caller's own has before its state is on the drives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ratel_cli.model.cut.binding import parameter_places
from ratel_cli.model.values.away import AwayParameter


class ModuleWeights:
    """The values that a module has, for import (model/files/import_weights.py)."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))

    @property
    def num_bytes(self) -> int:
        """What they take in main memory."""
        own = {id(each): each for each in self._parameters.values() if not isinstance(each, AwayParameter)}
        return sum(each.nbytes for each in own.values() if each.device.type == "cpu")

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See WeightSource."""
        return self._parameters[name].detach().reshape(-1)[start:stop].float().cpu()

    def forget(self) -> None:
        """Give the memory of those that the module has no longer back."""
        self._parameters.clear()


@contextmanager
def as_it_was_on_failure(module: nn.Module) -> Iterator[None]:
    """A context in which a module may get other parameters and other code, which it keeps unless this raises."""
    places, hooks = parameter_places(module), dict(module._forward_pre_hooks)
    forwards = {each: vars(each).get("forward") for each in module.modules()}
    try:
        yield
    except BaseException:
        for parameter, found in places.items():
            for _, place in found:
                place.put(parameter)
        for each, forward in forwards.items():
            vars(each).pop("forward", None)
            if forward is not None:
                vars(each)["forward"] = forward
        module._forward_pre_hooks.clear()
        module._forward_pre_hooks.update(hooks)
        raise
