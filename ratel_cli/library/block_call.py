"""Calls one block of a hooked module, with its weights there, and again in backward.

Forward runs without a graph; autograd keeps only the tensors that the block got. Backward computes the block again from
these, with the same random numbers and the same settings of autocast, and puts back what the second run changed of its
buffers. So gradients are those of the block's own code, bit for bit.

Invariant: what cannot be computed again is rejected, with the block's name: inputs that the block changes, tensors that
it leaves in its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from ratel_cli.engine.horizontal import Computed, HorizontalEngine
from ratel_cli.errors import BadInput
from ratel_cli.model.binding import ModuleAttribute

Forward = Callable[..., Any]
PassedOn = WeakIdKeyDictionary
"""By tensor: the same tensor as the last block has returned it that got it. A block that gets it next gets this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedBlock:
    """A block of a hooked module."""

    index: int
    """Counted from 0."""
    module: nn.Module
    forward: Forward
    """Its own."""
    shared: tuple[ModuleAttribute, ...]
    """Where it has trained parameters that are outside of the blocks, because other code uses them, too."""

    def call(
        self,
        engine: HorizontalEngine,
        arguments: tuple[object, ...],
        keywords: Mapping[str, object],
        passed_on: PassedOn,
    ) -> object:
        """What it computes. Raises RatelError, and what the block raises."""
        leaves, structure = tree_flatten((arguments, dict(keywords)))
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        tensors += [place.parameter for place in self.shared]
        is_trained = engine.has_trained(self.index) or any(each.requires_grad for each in tensors)
        if not (torch.is_grad_enabled() and is_trained):
            with engine.computing(self.index):
                return self.forward(*arguments, **keywords)
        # A cache of keys and values would get them once more when the block is computed again.
        call = _Call(engine, self, [None if _is_cache(each) else each for each in leaves], structure)
        anchor = torch.empty(0, requires_grad=True)  # so that a graph is there even if no input has a gradient
        given = [passed_on.get(each, each) for each in tensors]
        outputs = iter(_BlockFunction.apply(anchor, call, *given))  # type: ignore[no-untyped-call]
        results = [next(outputs) if each is _TENSOR else each for each in call.results]
        for each in tensors:
            if each.requires_grad:
                passed_on[each] = next(outputs)
        return tree_unflatten(results, call.result_structure)


_TENSOR = object()
"""Among the leaves of what a block gets or returns: a tensor, which autograd has."""


class _Call:
    """One call of a block, and how it is computed again."""

    def __init__(
        self, engine: HorizontalEngine, block: HookedBlock, leaves: Sequence[object], structure: TreeSpec
    ) -> None:
        self._engine = engine
        self._block = block
        self._leaves = [_TENSOR if isinstance(each, torch.Tensor) else each for each in leaves]
        self._structure = structure
        self._state = engine.call(block.index)
        self._settings = _Settings()
        self.results: list[object] = []
        self.result_structure: TreeSpec

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the block's forward for the first time. Returns the tensors among its results."""
        try:
            return self._computed(tensors)
        except BaseException:
            self._engine.forget(self._state)
            raise

    def _computed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        versions = [each._version for each in tensors]
        with self._engine.computing(self._block.index), self._settings.applied():
            results = self._run(tensors)
        if any(each._version != version for each, version in zip(tensors, versions, strict=True)):
            raise self._rejected("changes what it gets in place", "let it compute with a copy")
        leaves, self.result_structure = tree_flatten(results)
        self.results = [_TENSOR if isinstance(each, torch.Tensor) else each for each in leaves]
        return [each for each in leaves if isinstance(each, torch.Tensor)]

    def differentiate(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensors that the block got, from those of the tensors among its results."""
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
        with torch.enable_grad():
            inputs = [each.view_as(each) if each.requires_grad else each for each in leaves]

        def run() -> Computed:
            with self._settings.again(), self._sharing(inputs):
                found, _ = tree_flatten(self._run(inputs))
            results = [each for each in found if isinstance(each, torch.Tensor)]
            results += [each for each in inputs if each.requires_grad]
            if len(results) != len(gradients):
                raise self._rejected("returns other tensors when it is computed again", "let it always return the same")
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            return Computed([result for result, _ in pairs], [gradient for _, gradient in pairs])

        with _buffers_kept(self._block.module):  # until backward is over, which uses them
            self._engine.backward(self._state, run, [each for each in leaves if each.requires_grad])
        return [each.grad if each.requires_grad else None for each in leaves]

    def _run(self, tensors: Sequence[torch.Tensor]) -> object:
        given = iter(tensors)
        leaves = [next(given) if each is _TENSOR else each for each in self._leaves]
        arguments, keywords = tree_unflatten(leaves, self._structure)
        results = self._block.forward(*arguments, **keywords)
        left, structure = tree_flatten((arguments, keywords))
        if structure != self._structure or any(one is not other for one, other in zip(left, leaves, strict=True)):
            raise self._rejected(
                "leaves tensors in what it gets, for blocks behind it", "let it return them, so that autograd sees them"
            )
        return results

    @contextmanager
    def _sharing(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """A context in which parameters from outside of the blocks are the last of the inputs."""
        shared = self._block.shared
        before = [place.parameter for place in shared]
        try:
            for place, tensor in zip(shared, inputs[len(inputs) - len(shared) :], strict=True):
                place.put(tensor)
            yield
        finally:
            for place, parameter in zip(shared, before, strict=True):
                place.put(parameter)

    def _rejected(self, what: str, hint: str) -> BadInput:
        return BadInput(f"{self._engine.name_of(self._block.index)} {what}; such a block cannot be hooked", hint)


class _Context(FunctionCtx):
    """What autograd keeps of a call."""

    call: _Call
    saved_tensors: tuple[torch.Tensor, ...]


class _BlockFunction(torch.autograd.Function):
    """A call as autograd sees it."""

    @staticmethod
    def forward(ctx: _Context, _: torch.Tensor, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = call.compute(tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each in results if not each.is_floating_point()))
        return (*results, *(each for each in tensors if each.requires_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.call.differentiate(ctx.saved_tensors, gradients)


class _Settings:
    """What else a block computes with: random numbers and autocast, as they are when this is made."""

    def __init__(self) -> None:
        self._types = ["cpu"]
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._device: torch.device | None = None
        if accelerator is not None:
            self._types.append(accelerator.type)
            self._device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        self._autocast = [
            (name, torch.get_autocast_dtype(name), torch.is_autocast_enabled(name)) for name in self._types
        ]
        self._states = [torch.get_rng_state()]
        if self._device is not None:
            self._states.append(torch.get_device_module(self._device).get_rng_state(self._device))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context with this autocast, which keeps no weights in another dtype: their memory is used again."""
        with ExitStack() as contexts:
            for name, dtype, is_enabled in self._autocast:
                if is_enabled or torch.is_autocast_enabled(name):
                    contexts.enter_context(torch.autocast(name, dtype, is_enabled, cache_enabled=False))
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with this autocast and the same random numbers once more."""
        devices = [] if self._device is None else [self._device]
        with torch.random.fork_rng(devices, device_type=self._types[-1] if devices else "cuda"), self.applied():
            torch.set_rng_state(self._states[0])
            if self._device is not None:
                torch.get_device_module(self._device).set_rng_state(self._states[1], self._device)
            yield


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """A context after which buffers are what they were. All are copied: of the statistics of a batch norm, torch does
    not count who writes to them."""
    kept = [
        (module, name, buffer, buffer.clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copied in kept:
                module._buffers[name] = buffer.copy_(copied)


def _is_cache(value: object) -> bool:
    """Whether it is a cache of transformers, which blocks fill."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)
