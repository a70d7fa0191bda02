"""Offloads what autograd saves, of any module: for models that fit, with activations that do not.

No training state and no optimizer of Ratel's is involved. It works with hooked modules, too: of these autograd saves
the inputs of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ratel_cli.engine.cache.saved_tensors import CacheCounts
from ratel_cli.engine.cache.saved_transfers import SavedTransfers
from ratel_cli.engine.cache.tensor_cache import TensorCache
from ratel_cli.engine.reading.pass_schedule import PassSchedule, PassUnit
from ratel_cli.engine.reading.resident_buffers import ResidentBuffers
from ratel_cli.engine.steps.build import open_device
from ratel_cli.errors import BadInput
from ratel_cli.io.scratch import GrowingScratch
from ratel_cli.library.limits import Limits
from ratel_cli.library.settings import WarningLog, caller_config
from ratel_cli.model.cut.hooked import find_module_blocks
from ratel_cli.run.context import open_context
from ratel_cli.units import MIB, format_bytes, parse_bytes

_SPACE_BYTES = 256 * MIB
"""Space on the drives that is taken at once."""
_BUFFER_BYTES, _BUFFER_SHARE = 256 * MIB, 8
"""Buffers that are not given: this much, and what a block saves, up to such a part of host memory."""
_IS_OPEN: ContextVar[bool] = ContextVar("ratel.offload_activations", default=False)
"""Autograd has one place to save to: of two contexts, the outer one would get nothing."""


@contextmanager
def offload_activations(
    module: nn.Module,
    *,
    storage: Sequence[str | Path],
    amount: int | Literal["auto", "all"] = "auto",
    blocks: str | Sequence[str] | None = None,
    least_bytes: int = MIB,
    buffer_bytes: int | None = None,
    host_memory: int | str = 0,
    schedule: Sequence[PassUnit] | None = None,
    limits: Limits | None = None,
) -> Iterator[CacheCounts]:
    """A context in which what autograd saves in the module's forward goes to the drives until backward needs it.

    Forward and backward belong inside; gradients have the same bits as without. `storage`: directories, one on each
    drive. `amount`: bytes of one forward that go; "auto": what the drives write and the link moves while forward
    computes, found in the first one; "all": all but the last block's. `blocks`: as of `ratel.hook`. Tensors below
    `least_bytes` stay, weights do, too. `buffer_bytes`: host memory for what is being written, and as much for what is
    read ahead; on a GPU also GPU memory for what leaves, and for what is uploaded ahead; None: 256 MiB, or what a block
    saves if that is more (four blocks with "auto" on a GPU). `host_memory`: as bytes or as a text such as "4GiB", what
    goes stays there while there is space, and is not written; no more is taken than the first step needs. `schedule`:
    the forwards and backwards of a step in their order, so that a backward's reads begin before it does: [("forward",
    0), ("forward", 1), ("backward", 0), ("backward", 1)].
    Gives counts of what was moved (SSDTrain, section III). Raises RatelError.
    """
    if _IS_OPEN.get():
        raise BadInput("offload_activations is open for another module", "give it a module that has both")
    names = find_module_blocks(module, blocks)
    is_number = isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0
    if not is_number and amount not in ("auto", "all"):
        raise BadInput(f"amount must be a number of bytes, 'auto' or 'all', not {amount!r}")
    if (buffer_bytes is not None and buffer_bytes <= 0) or least_bytes < 0:
        raise BadInput("buffer_bytes must be above 0, and least_bytes not below")
    resident_bytes = _parsed(host_memory)
    units = None if schedule is None else PassSchedule(schedule)
    device = next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    config = caller_config({"base_model": type(module).__name__}, storage, limits or Limits(), {})
    with ExitStack() as opened:
        context = opened.enter_context(open_context(config, WarningLog(), device=device))
        space = opened.enter_context(GrowingScratch(config.storage.paths, context.queue, step_bytes=_SPACE_BYTES))
        if resident_bytes > context.host_limit_bytes:
            available = format_bytes(context.host_limit_bytes)
            raise BadInput(f"host_memory is {format_bytes(resident_bytes)}, but {available} of RAM may be used")
        resident = opened.enter_context(ResidentBuffers(context.pool, resident_bytes)) if resident_bytes else None
        engine_device = opened.enter_context(open_device(device, None))
        weights = _Weights(module)
        first_bytes, most_bytes = _BUFFER_BYTES, (context.host_limit_bytes - resident_bytes) // _BUFFER_SHARE
        if buffer_bytes is not None:
            first_bytes = most_bytes = buffer_bytes
        transfers = SavedTransfers(context.pool, space, engine_device, buffer_bytes=first_bytes, resident=resident)
        cache = opened.enter_context(
            TensorCache(
                transfers,
                stays=weights.has,
                least_bytes=least_bytes,
                most_bytes=amount if isinstance(amount, int) else None,
                finds_most=amount == "auto",
                most_buffer_bytes=most_bytes,
                schedule=units,
            )
        )
        *others, last = names.values()

        def begin(*_: object) -> None:
            weights.update()
            cache.begin_pass()

        opened.callback(module.register_forward_pre_hook(begin).remove)
        opened.callback(module.register_forward_hook(lambda *_: cache.end_pass(), always_call=True).remove)
        for block in (*others, last):
            is_last = block is last
            opened.callback(
                block.register_forward_pre_hook(lambda *_, is_last=is_last: cache.begin_scope(is_last=is_last)).remove
            )
        token = _IS_OPEN.set(True)
        opened.callback(_IS_OPEN.reset, token)
        with cache.saving():
            yield cache.counts


def _parsed(host_memory: int | str) -> int:
    try:
        num_bytes = host_memory if isinstance(host_memory, int) else parse_bytes(host_memory)
    except ValueError as exc:
        raise BadInput(f"host_memory: {exc}") from exc
    if isinstance(host_memory, bool) or num_bytes < 0:
        raise BadInput(f"host_memory must be a number of bytes, or a text such as '4GiB', not {host_memory!r}")
    return num_bytes


class _Weights:
    """The storages of a module's parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._storages: set[int] = set()

    def update(self) -> None:
        """Look at what they are now."""
        with torch._C.DisableTorchFunctionSubclass():  # a hooked module does not give the storages of its parameters
            self._storages = {
                each.untyped_storage()._cdata for each in (*self._module.parameters(), *self._module.buffers())
            }

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a weight, or a view of one."""
        return tensor.untyped_storage()._cdata in self._storages
