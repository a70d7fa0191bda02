"""Calls one block of a hooked module, with its weights there, and again in backward.

Forward computes as with a graph, but autograd saves nothing of it except the tensors that the block got. Backward
computes the block again from these, with the same random numbers, buffers, switches and settings of autocast, and
compares the results with the first ones. So gradients are those of the block's own code, bit for bit.

A tensor that several blocks get, such as the states of an encoder, has a gradient from each. Autograd adds up those of
single operators, the last one first; sums by block would be rounded elsewhere. So each block returns what it got, too,
and the next block that gets the tensor gets it from there: its gradient arrives with those of all blocks behind.

Invariant: what cannot be computed again is an error that names the block: inputs that it changes, tensors that it takes
or leaves where autograd does not see them, results that differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from ratel_cli.engine.measure.digest import digest
from ratel_cli.engine.reading.weights import SegmentWeights
from ratel_cli.engine.steps.block_calls import Computed
from ratel_cli.engine.steps.horizontal import HorizontalEngine
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.binding import ModuleAttribute

Forward = Callable[..., Any]
PassedOn = WeakIdKeyDictionary
"""By tensor: the same tensor as the last block has returned it that got it. A block that gets it next gets this one."""
_Buffer = tuple[nn.Module, str, torch.Tensor]
"""A module, the name of one of its buffers, and values."""


class _Slot(NamedTuple):
    """Stands for a tensor among the leaves of what a block gets or returns."""

    number: int
    """Among the distinct tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedBlock:
    """A block of a hooked module."""

    index: int
    """Counted from 0."""
    module: nn.Module
    forward: Forward
    """The module's own, which computes."""
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
        tensors = list({id(each): each for each in leaves if isinstance(each, torch.Tensor)}.values())
        tensors += [place.parameter for place in self.shared]
        is_trained = engine.has_trained(self.index) or any(each.requires_grad for each in tensors)
        if not (torch.is_grad_enabled() and is_trained):
            is_inference, is_graph = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            with (
                torch.inference_mode(mode=False),  # or weights that stay in memory would never have gradients
                engine.computing(self.index) as weights,
                torch.inference_mode(mode=is_inference),
                torch.set_grad_enabled(is_graph),
            ):
                return tree_map(_Apart(weights), self.forward(*arguments, **keywords))
        call = _Call(engine, self, leaves, structure, tensors)
        anchor = torch.empty(
            0, device="cpu", requires_grad=True
        )  # so that a graph is there even if no input has a gradient
        given = [passed_on.get(each, each) for each in tensors]
        outputs = _BlockFunction.apply(anchor, call, *given)  # type: ignore[no-untyped-call]
        call.node = anchor.expand_as(anchor).grad_fn.next_functions[0][0]  # type: ignore[union-attr, assignment]
        passing = iter(outputs[call.num_results :])
        for each in tensors:
            if each.requires_grad:
                passed_on[each] = next(passing)
        results = [outputs[each.number] if isinstance(each, _Slot) else each for each in call.results]
        return tree_unflatten(results, call.result_structure)


class _Apart:
    """Makes tensors that are views of a block's weights tensors of their own: the weights' memory is used again."""

    def __init__(self, weights: SegmentWeights) -> None:
        self._storages = {each.untyped_storage()._cdata for each in weights.parameters}

    def __call__(self, value: Any) -> Any:  # noqa: ANN401 (whatever a block returns)
        is_view = isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._storages
        return value.clone() if is_view else value


class _Call:
    """One call of a block, and how it is computed again."""

    node: torch.autograd.graph.Node
    """What autograd runs if it is asked for all gradients."""

    def __init__(
        self,
        engine: HorizontalEngine,
        block: HookedBlock,
        leaves: Sequence[object],
        structure: TreeSpec,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """`tensors`: the distinct ones among the leaves, and shared parameters."""
        self._engine = engine
        self._block = block
        numbers = {id(each): number for number, each in enumerate(tensors)}
        self._leaves = [
            _Slot(numbers[id(each)]) if isinstance(each, torch.Tensor) else self._without_cache(each) for each in leaves
        ]
        self._structure = structure
        self._state = engine.call(block.index)
        self._settings = _Settings(block.module)
        self._buffers: list[_Buffer] = []
        """Buffers that the block writes to, with their values before the call."""
        self._digests: list[torch.Tensor] = []
        self.results: list[object] = []
        self.result_structure: TreeSpec
        self.num_results = 0
        """The number of distinct tensors among the results."""

    def compute(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the block's forward for the first time. Returns the distinct tensors among its results."""
        try:
            return self._computed(tensors)
        except BaseException:
            self._engine.forget(self._state)
            raise

    def _computed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        versions = [each._version for each in tensors]
        before = [(module, name, buffer.clone()) for module, name, buffer in _buffers(self._block.module)]
        inputs, _ = self._inputs(tensors, is_last=False)
        with self._engine.computing(self._block.index) as weights, self._settings.applied():
            with torch.enable_grad(), saved_tensors_hooks(_drop, self._reject_use), self._sharing(inputs):
                found = self._run(inputs)
            leaves, self.result_structure = tree_flatten(found)
            known = {id(each): each for each in leaves if isinstance(each, torch.Tensor)}
            numbers = {each: number for number, each in enumerate(known)}
            self.results = [_Slot(numbers[id(each)]) if isinstance(each, torch.Tensor) else each for each in leaves]
            self.num_results = len(known)
            self._check_graph(list(known.values()), inputs, weights)
            apart = _Apart(weights)
            results = _views_again([apart(each.detach()) for each in known.values()])
        if any(each._version != version for each, version in zip(tensors, versions, strict=True)):
            raise self._rejected("changes what it gets in place", "let it compute with a copy")
        self._buffers = [
            (module, name, values)
            for module, name, values in before
            if (now := module._buffers.get(name)) is None or not _is_same(now, values)
        ]
        self._digests = list(map(digest, results))
        return results

    def differentiate(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensors that the block got, from those of its results and of the tensors passed on."""
        if not torch._C._will_engine_execute_node(self.node):
            raise BadInput(
                f"{self._name}: some gradients alone are asked for, by torch.autograd.grad or backward(inputs=...)",
                "call backward() for all of them: the parameters of a hooked module have their update there",
            )
        inputs, leaves = self._inputs(tensors, is_last=True)

        def run() -> Computed:
            with self._settings.again(), self._sharing(inputs):
                found, _ = tree_flatten(self._run(inputs))
            results = list({id(each): each for each in found if isinstance(each, torch.Tensor)}.values())
            if len(results) != self.num_results or not all(map(torch.equal, map(digest, results), self._digests)):
                raise self._rejected(
                    "computes something else when it is run again for backward",
                    "let it depend on its inputs, its weights and torch's random numbers alone, and run backward under "
                    "the same settings as forward",
                )
            results += [each for each in inputs if each.requires_grad]
            pairs = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            return Computed([result for result, _ in pairs], [gradient for _, gradient in pairs])

        with _buffers_at(self._buffers):  # until backward is over, which uses them
            self._engine.backward(self._state, run, [each for each in leaves if each.requires_grad])
        return [each.grad if each.requires_grad else None for each in leaves]

    def _inputs(
        self, tensors: Sequence[torch.Tensor], *, is_last: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the block computes with, and the leaves of its graph. Unless it `is_last`, the graph has no backward."""
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
        if not is_last:
            for each in leaves:
                if each.requires_grad:
                    each.register_hook(self._reject_use)
        with torch.enable_grad():
            return [each.view_as(each) if each.requires_grad else each for each in leaves], leaves

    def _run(self, tensors: Sequence[torch.Tensor]) -> object:
        leaves = [tensors[each.number] if isinstance(each, _Slot) else each for each in self._leaves]
        arguments, keywords = tree_unflatten(leaves, self._structure)
        results = self._block.forward(*arguments, **keywords)
        left, structure = tree_flatten((arguments, keywords))
        if structure != self._structure or any(one is not other for one, other in zip(left, leaves, strict=True)):
            raise self._rejected(
                "leaves tensors in what it gets, for blocks behind it", "let it return them, so that autograd sees them"
            )
        return results

    def _check_graph(
        self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], weights: SegmentWeights
    ) -> None:
        """Raise BadInput if the results depend on a tensor with a gradient that the block did not get."""
        own = {id(each) for each in weights.parameters}
        ends = {each.grad_fn for each in inputs if each.requires_grad}
        nodes, seen = [each.grad_fn for each in results], set[object]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or node in ends:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in own:
                raise self._rejected(
                    "uses a tensor with a gradient that it does not get as an argument",
                    "give it the tensor as an argument of its own, or in a list, a tuple or a dictionary",
                )
            nodes += [each for each, _ in node.next_functions]

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

    def _without_cache(self, value: object) -> object:
        """Nothing in the place of an empty cache of keys and values, which the block would fill twice."""
        module = sys.modules.get("transformers.cache_utils")
        if module is None or not isinstance(value, module.Cache):
            return value
        if value.get_seq_length():
            raise self._rejected("gets a cache of keys and values that has some", "compute it under torch.no_grad()")
        return None

    def _reject_use(self, _: object) -> NoReturn:
        """A backward goes through what the first run has made."""
        raise self._rejected(
            "has made a tensor that the loss uses, and does not return it",
            "let it return the tensor: what it leaves on itself, or what a hook within it takes, has no gradient",
        )

    def _rejected(self, what: str, hint: str) -> BadInput:
        return BadInput(f"{self._name} {what}; such a block cannot be hooked", hint)

    @property
    def _name(self) -> str:
        return self._engine.name_of(self._block.index)


class _Context(FunctionCtx):
    """What autograd has of a call."""

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
        ctx.mark_non_differentiable(*(each for each in results if not (each.is_floating_point() or each.is_complex())))
        return (*results, *(each for each in tensors if each.requires_grad))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.call.differentiate(ctx.saved_tensors, gradients)


class _Settings:
    """What else a block computes with, as it is when this is made: random numbers, autocast, dropout on or off."""

    def __init__(self, block: nn.Module) -> None:
        self._training = [(module, module.training) for module in block.modules()]
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
        """A context with this autocast, which holds no weights in another dtype: their memory is used again."""
        with ExitStack() as contexts:
            for name, dtype, is_enabled in self._autocast:
                if is_enabled or torch.is_autocast_enabled(name):
                    contexts.enter_context(torch.autocast(name, dtype, is_enabled, cache_enabled=False))
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with all of this once more."""
        devices = [] if self._device is None else [self._device]
        before = [(module, module.training) for module, _ in self._training]
        with torch.random.fork_rng(devices, device_type=self._types[-1] if devices else "cuda"), self.applied():
            torch.set_rng_state(self._states[0])
            if self._device is not None:
                torch.get_device_module(self._device).set_rng_state(self._states[1], self._device)
            try:
                for module, is_training in self._training:
                    module.training = is_training
                yield
            finally:
                for module, is_training in before:
                    module.training = is_training


def _views_again(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, those with one storage as views of the first of them: where the caller changes one in place,
    torch raises an error, since backward would not know of it."""
    first, found = dict[object, torch.Tensor](), list[torch.Tensor]()
    for each in tensors:
        base = first.setdefault((each.untyped_storage()._cdata, each.dtype), each)
        found.append(each if base is each else base.as_strided(each.size(), each.stride(), each.storage_offset()))
    return found


def _buffers(block: nn.Module) -> Iterator[_Buffer]:
    for module in block.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


@contextmanager
def _buffers_at(earlier: Sequence[_Buffer]) -> Iterator[None]:
    """A context in which some buffers have earlier values."""
    now = [(module, name, module._buffers[name]) for module, name, _ in earlier]
    try:
        for module, name, values in earlier:
            module._buffers[name] = values.clone()
        yield
    finally:
        for module, name, buffer in now:
            module._buffers[name] = buffer


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(digest(one), digest(other))


def _drop(_: torch.Tensor) -> None:
    """Autograd needs nothing that the first run has made: the second run makes it again."""
