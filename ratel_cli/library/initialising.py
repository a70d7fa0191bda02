"""Builds modules that are larger than memory: parameters go to drives as they are made.

A module's parameters are there when it becomes a part of another one: its own code has made and initialised them by
then. They go to a file on the drives, and what stands for them loads them when other code computes with them, such as
an initialiser that goes through the whole model. Some stay loaded until others need the memory.

Invariant: a parameter has the values that it would have in memory, whatever code has written to it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import default_limit_bytes, return_large_buffers
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.queue import IoQueue, depth_for, open_queue
from ratel_cli.io.scratch import GrowingScratch, ScratchPlace
from ratel_cli.io.views import view
from ratel_cli.library.limits import Limits
from ratel_cli.library.settings import WarningLog, caller_config
from ratel_cli.model.values.away import AwayParameter, share_hooks
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import MIB, align_up

_LEAST_BYTES = MIB
"""Smaller parameters stay in memory until the module is hooked."""
_SPACE_BYTES = 1024 * MIB
"""Space on the drives that is taken at once; more for a larger parameter."""
_LOADED_SHARE = 4
"""Loaded parameters may take this part of the memory limit; at least one is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitSettings:
    """What `hook` takes over from the `init` around it."""

    storage: tuple[Path, ...]
    limits: Limits | None
    unload: Callable[[], None]
    """Give the memory of loaded parameters back."""


INIT: ContextVar[InitSettings | None] = ContextVar("ratel.init", default=None)


def storage_of(
    storage: Sequence[str | Path] | None, limits: Limits | None, *, asked_by: str
) -> tuple[Sequence[str | Path], Limits | None]:
    """Where the training state of a module goes, and its limits: as given, or those of the `init` around the call.
    Raises BadInput if neither says where."""
    if storage is not None:
        return storage, limits
    around = INIT.get()
    if around is None:
        raise BadInput(
            f"{asked_by} needs storage: directories for the training state", "storage=['/mnt/a'], for instance"
        )
    return around.storage, limits or around.limits


@contextmanager
def init(storage: Sequence[str | Path], *, limits: Limits | None = None) -> Iterator[None]:
    """A context in which modules may be larger than memory while they are built.

    `storage`: directories, one on each drive, also those of `hook` inside, which sends the parameters on to the
    training state. A module that is not hooked has its parameters in memory afterwards, as usual. Raises RatelError.
    """
    config = caller_config({"base_model": "module"}, storage, limits or Limits(), {})
    return_large_buffers()
    paths = config.storage.paths
    with ExitStack() as opened:
        queue = opened.enter_context(
            open_queue(config.storage.engine, notice=WarningLog().notice, depth=depth_for(len(paths)))
        )
        pool = opened.enter_context(BufferPool(None))
        limit_bytes = config.limits.host_memory or default_limit_bytes()
        parameters = opened.enter_context(_Evicted(paths, queue, pool, loaded_bytes=limit_bytes // _LOADED_SHARE))
        token = INIT.set(InitSettings(storage=tuple(paths), limits=limits, unload=parameters.unload))
        opened.callback(INIT.reset, token)
        opened.callback(register_module_module_registration_hook(parameters.evict_of).remove)
        opened.callback(register_module_parameter_registration_hook(parameters.evict_loaded).remove)  # type: ignore[arg-type]
        yield
        parameters.restore()


class EvictedParameter(AwayParameter):
    """Stands for a parameter of a module that is being built. Code that computes with it gets its values."""

    home: _Evicted
    num_bytes: int
    place: ScratchPlace

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """What the function gives, with the values of all such parameters."""
        if func == torch.Tensor.data.__set__ and args[0] is self:  # type: ignore[attr-defined]
            self.home.assign(self, args[1])
            return None
        used = [each for each in tree_leaves((args, kwargs)) if isinstance(each, EvictedParameter)]
        values = {id(each): each.home.load(each, beside=used) for each in used}
        stands_for = {id(values[id(each)]): each for each in used}
        args, kwargs = tree_map(lambda leaf: values.get(id(leaf), leaf), (args, dict(kwargs)))
        result = func(*args, **kwargs)
        return tree_map(lambda leaf: stands_for.get(id(leaf), leaf), result)


class _Loaded(NamedTuple):
    """A parameter that is in memory for a while."""

    lease: Lease
    values: torch.Tensor
    num_users: int
    """Users of the parameter's storage as long as nobody else has a view of it."""


class _Evicted(Closing):
    """The parameters that are on the drives, and those of them that are loaded."""

    def __init__(self, paths: Sequence[Path], queue: IoQueue, pool: BufferPool, *, loaded_bytes: int) -> None:
        self._pool = pool
        self._space = GrowingScratch(paths, queue, step_bytes=_SPACE_BYTES)
        self._loaded_bytes = loaded_bytes
        self._loaded: OrderedDict[EvictedParameter, _Loaded] = OrderedDict()
        """The one that was used last is the last one."""
        self._made: dict[int, tuple[weakref.ref[nn.Parameter], EvictedParameter]] = {}
        """By the `id` of a parameter: what stands for it."""
        self._modules: dict[int, nn.Module] = {}
        """All that have been made, and that may have such parameters."""

    def evict_of(self, parent: nn.Module, _: str, module: nn.Module | None) -> None:
        """Evict the parameters of a module that becomes a part of `parent`."""
        self._modules[id(parent)] = parent
        if module is None:
            return
        self._modules[id(module)] = module
        for attribute, parameter in module._parameters.items():
            known = self._made.get(id(parameter))
            if known is not None and known[0]() is parameter:
                module._parameters[attribute] = known[1]  # another module has it, too
            elif parameter is not None and _is_evicted(parameter):
                made = self._evicted(parameter, f"{type(module).__name__}.{attribute}")
                module._parameters[attribute] = made

    def evict_loaded(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Evict a parameter that takes the place of one without memory: a checkpoint is being loaded. Returns what
        stands in the module then; None: the parameter."""
        before = module._parameters.get(name)
        if before is None or parameter is None or not before.is_meta or not _is_evicted(parameter):
            return None
        self._modules[id(module)] = module
        return self._evicted(parameter, f"{type(module).__name__}.{name}")

    def load(self, parameter: EvictedParameter, *, beside: Sequence[EvictedParameter] = ()) -> torch.Tensor:
        """Its values, which may be written to. Those of the parameters `beside` it stay."""
        found = self._loaded.pop(parameter, None)
        if found is None:
            size = parameter.num_bytes
            self._make_room(size, beside=beside)
            lease = self._pool.lease(align_up(size, PAGE_BYTES), "parameter", crosses_link=False)
            place = parameter.place
            place.scratch.read_sealed(place.offset, lease.memory, parameter.parameter_name).wait()
            values = view(lease.memory[:size], parameter.dtype).view(parameter.shape)
            found = _Loaded(lease, values, _num_users(values))
        self._loaded[parameter] = found
        return found.values

    def assign(self, parameter: EvictedParameter, values: torch.Tensor) -> None:
        """Let it have other values, perhaps in another shape."""
        found = self._loaded.pop(parameter, None)
        if found is not None:
            found.lease.release()
        self._space.give_back(parameter.place)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = torch.zeros((), dtype=values.dtype).expand(values.shape)
        self._write(parameter, values.detach())

    def restore(self) -> None:
        """Let the parameters that stand in modules be in memory."""
        restored: dict[EvictedParameter, nn.Parameter] = {}
        for module in self._modules.values():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, EvictedParameter):
                    if parameter not in restored:
                        values = self.load(parameter).clone()
                        restored[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                        share_hooks(parameter, restored[parameter])
                    module._parameters[name] = restored[parameter]

    def unload(self) -> None:
        """Write all loaded parameters back."""
        self._make_room(self._loaded_bytes)

    def close(self) -> None:
        """Forget all values. Idempotent."""
        while self._loaded:
            self._loaded.popitem()[1].lease.release()
        self._space.close()

    def _evicted(self, parameter: nn.Parameter, name: str) -> EvictedParameter:
        made = EvictedParameter.made(parameter, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)  # such as transformers' mark that it is initialised
        made.parameter_name, made.home = name, self
        share_hooks(parameter, made)
        self._write(made, parameter.detach())
        self._made[id(parameter)] = weakref.ref(parameter), made
        return made

    def _write(self, parameter: EvictedParameter, values: torch.Tensor) -> None:
        """Give a parameter its place, and write its values there."""
        parameter.num_bytes, parameter.place = values.nbytes, self._space.take(values.nbytes)
        self._make_room(values.nbytes)
        with self._pool.lease(align_up(values.nbytes, PAGE_BYTES), "parameter", crosses_link=False) as lease:
            view(lease.memory[: values.nbytes], values.dtype).copy_(values.reshape(-1))
            parameter.place.scratch.write_sealed(parameter.place.offset, lease.memory).wait()
        self._pool.trim()

    def _make_room(self, num_bytes: int, *, beside: Sequence[EvictedParameter] = ()) -> None:
        """Write loaded parameters back, the one that was used first before others, until there is memory. Those that
        somebody has a view of stay."""
        most_bytes, stay = self._loaded_bytes - num_bytes, set(map(id, beside))
        taken = sum(each.values.nbytes for each in self._loaded.values())
        for parameter, loaded in list(self._loaded.items()):
            if taken <= most_bytes:
                break
            if id(parameter) in stay or _num_users(loaded.values) > loaded.num_users:
                continue
            taken -= loaded.values.nbytes
            del self._loaded[parameter]
            parameter.place.scratch.write_sealed(parameter.place.offset, loaded.lease.memory).wait()
            loaded.lease.release()
        self._pool.trim()


def _num_users(values: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(values.untyped_storage()._cdata)


def _is_evicted(parameter: nn.Parameter) -> bool:
    """Whether a parameter goes to the drives."""
    is_away = isinstance(parameter, EvictedParameter)
    return not is_away and parameter.device.type == "cpu" and parameter.nbytes >= _LEAST_BYTES
