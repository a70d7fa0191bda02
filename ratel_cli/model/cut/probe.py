"""Runs a skeleton on eight tokens to learn what no attribute says.

Of a module that takes no text it only learns which parameters are used where. Of a language model it answers three
questions. Which parameters outside the layers are used before the first layer, and which after the
last? Does the code before the layers read nothing of the embedding's matrix but the rows of its tokens? Do the masks
that the model builds from position ids separate packed samples? Invariant: parameters are placeholders,
and an operator that reads one is not executed: only the shape of its result is computed. So a 100B model takes as long
as a small one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import PretrainedConfig

from ratel_cli.errors import BadInput, first_line
from ratel_cli.model.cut.layer_runner import CANNOT_RUN, Inputs, LayerRunner, last_hidden_state, text_inputs
from ratel_cli.model.values.carried import Embedded, LayerCall, tensors_of
from ratel_cli.model.values.operators import OperatorMode, TorchOperator, tensors_in
from ratel_cli.model.values.row_lookup import DistinctTokens, RowLookup

SAMPLE_TOKENS = 8
"""Tokens of two packed samples, together."""
_TOKEN_KEYS = ("_id", "_ids", "_index")
"""Endings of keys whose values are tokens, in a configuration and its parts."""
_POSITIONS = 1 << 24
"""More positions than any model was trained with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Names of the parameters outside the layers, by the place where the model uses them."""

    before: frozenset[str]
    """Used before the first layer."""
    after: frozenset[str]
    """What the logits depend on after the last layer. A parameter may be in both."""
    looks_up_rows: bool
    """Whether the code before the layers reads nothing of the embedding's matrix but the rows of tokens."""
    substitutes: tuple[int, ...]
    """Tokens that this code looks up in the place of others; none if it reads more than rows."""


def probe_usage(
    layer_runner: LayerRunner, parameters: Mapping[str, torch.nn.Parameter], embedding: str, lookup: RowLookup
) -> tuple[Usage, Embedded]:
    """Run two packed samples and note which of `parameters`, given by name, each part of the model reads.

    `embedding`: the name of the embedding's matrix, and `lookup` its module. Also returns the result of the part before
    the layers. Raises BadInput if the model cannot be streamed.
    """
    inputs = packed_sample()
    names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
    with _training(parameters.values()), _UsageWatch(names, embedding) as watch:
        layer_runner.find_layer_output(inputs)
        layer_runner.learn_state(map(partial(_repeated, inputs), (1, 3, 1), (0, _POSITIONS, 0)))
        looked_up = _looked_up(layer_runner, lookup, watch, inputs) if lookup.is_possible else None
        watch.before.clear()
        with _calling(layer_runner, lambda index: watch.enter_layers()):
            embedded = layer_runner.embed(inputs)
            watch.leave_layers()
            finished = layer_runner.finish(torch.zeros_like(embedded.hidden), inputs)
            logits = _logits(layer_runner, finished)
        reject_between_layers(layer_runner, embedded, inputs)
    if SAMPLE_TOKENS not in embedded.hidden.shape[1:3]:
        raise BadInput(
            f"{type(layer_runner.model).__name__}: its layers get other tokens than the model; such models cannot be"
            " streamed"
        )
    after = _used_for(logits, parameters)
    handed = {each.untyped_storage()._cdata for call in embedded.calls for each in call.tensors}
    usage = Usage(
        before=frozenset(watch.before).union(name for storage, name in names.items() if storage in handed),
        after=after,
        looks_up_rows=looked_up is not None,
        substitutes=tuple(sorted(looked_up or ())),
    )
    return usage, embedded


class ModuleUsage(NamedTuple):
    """What a module that takes no text does around its layers."""

    before: frozenset[str]
    """Names of the parameters that are used before the last layer, outside of the layers."""
    after: frozenset[str]
    """Names of the parameters that are used behind the layers. A parameter may be in `before`, too, and be a layer's
    besides."""
    passing: frozenset[str]
    """Names of the parameters that only what is before the layers reads, and on which the output depends in another way
    than through the layers."""
    embedded: Embedded
    """What is before the layers."""
    outputs: list[torch.Tensor]
    """What the module returns."""


def probe_module(
    layer_runner: LayerRunner, parameters: Mapping[str, torch.nn.Parameter], inputs: Inputs
) -> ModuleUsage:
    """Run a module and note which of its `parameters`, given by name, the code around its layers reads. All of them are
    placeholders, those of layers too. Raises BadInput if the module cannot be streamed."""
    names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
    last = len(layer_runner.layers) - 1

    def at_layer(index: int) -> None:
        if index == last:
            watch.enter_layers()

    with _training(parameters.values()), _UsageWatch(names, "") as watch:
        layer_runner.find_layer_output(inputs)
        layer_runner.learn_state((inputs, inputs))
        watch.before.clear()
        embedded, before = layer_runner.embed(inputs), frozenset(watch.before)
        with _calling(layer_runner, at_layer):
            outputs = tensors_of(layer_runner.finish(torch.zeros_like(embedded.hidden), inputs))
        after = frozenset(watch.after)
        extras = (each for of_layer in embedded.extras for each in of_layer if each is not None)
        if watch.read_after & {each.untyped_storage()._cdata for each in extras}:
            raise BadInput(
                f"{type(layer_runner.model).__name__}: the code after its layers uses more of them than hidden states;"
                " such models cannot be streamed"
            )
        reached = frozenset[str]().union(*(_used_for(each, parameters) for each in outputs))
        reject_between_layers(layer_runner, embedded, inputs)
    handed = {each.untyped_storage()._cdata for call in embedded.calls for each in call.tensors}
    before = before.union(name for storage, name in names.items() if storage in handed)
    return ModuleUsage(before, after, reached - after, embedded, outputs)


@contextlib.contextmanager
def _calling(layer_runner: LayerRunner, at_layer: Callable[[int], None]) -> Iterator[None]:
    """A context in which this is called with the index of each layer that the owner reaches."""
    before, layer_runner.at_layer = layer_runner.at_layer, at_layer
    try:
        yield
    finally:
        layer_runner.at_layer = before


def _logits(layer_runner: LayerRunner, finished: object) -> torch.Tensor:
    try:
        return layer_runner.logits(finished, last_hidden_state(finished))
    except CANNOT_RUN as error:
        raise BadInput(
            f"{type(layer_runner.model).__name__}: it cannot run on text alone ({type(error).__name__}:"
            f" {first_line(error)}); such models cannot be streamed"
        ) from error


def packed_sample() -> dict[str, torch.Tensor]:
    """Two samples of text in a row."""
    positions = torch.arange(SAMPLE_TOKENS // 2).repeat(2).unsqueeze(0)
    return text_inputs(torch.zeros_like(positions), positions)


def _repeated(inputs: Inputs, number: int, first: int) -> Inputs:
    """A row of text again and again, with other positions: `first` is added to them."""
    return text_inputs(inputs["input_ids"].repeat(1, number), inputs["position_ids"].repeat(1, number) + first)


def reject_between_layers(layer_runner: LayerRunner, embedded: Embedded, inputs: Inputs) -> None:
    """Raise BadInput if what a layer gets besides hidden states depends on the output of a layer below, or is the first
    hidden states: their gradients would be added in another order. `embedded`: what `inputs` give."""
    mark = torch.ones((), requires_grad=True)
    with layer_runner.marking(mark):
        marked = layer_runner.embed(inputs)
    for call, other in zip(embedded.calls, marked.calls, strict=True):
        for tensor, with_mark in zip(call.tensors, other.tensors, strict=True):
            is_same = tensor is with_mark or torch.equal(tensor, with_mark)  # a parameter itself has no values here
            if _used_for(with_mark, {"mark": mark}) or not is_same:
                raise layer_runner.code_between_layers()
    if any(each is embedded.hidden for each in embedded.carried):
        raise BadInput(
            f"{type(layer_runner.model).__name__}: its layers receive the first hidden states besides their own; such"
            " models cannot be streamed"
        )


def _used_for(result: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of the parameters that autograd would reach from `result`.

    Code around the owner may embed the tokens before it calls the owner, which ignores them after the layers.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    reached: set[str] = set()
    seen: set[object] = set()
    nodes = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            reached.add(name)
        nodes.extend(function for function, _ in node.next_functions)
    return frozenset(reached)


@contextlib.contextmanager
def _training(parameters: Collection[torch.nn.Parameter]) -> Iterator[None]:
    """A context in which the placeholders are trained, as the weights in a step are: what is computed from them needs
    a gradient, and a layer must get nothing of that kind but its hidden states."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _looked_up(
    layer_runner: LayerRunner,
    lookup: RowLookup,
    watch: _UsageWatch,
    inputs: Inputs,
) -> set[int] | None:
    """Tokens that are looked up in the place of others, if the matrix is only read by lookups in rows that `lookup` has
    chosen, one for each token; else None.

    Rows have other numbers than ids: whoever reads a token's row has asked `lookup`. Tokens that the configuration
    names are tried next to an ordinary one: some models look another one up in the place of an image's.
    """
    config, num_rows = layer_runner.model.config, lookup.num_rows
    assert isinstance(config, PretrainedConfig)
    ids = torch.arange(-num_rows, num_rows)
    substitutes = set[int]()
    for token in (0, *special_tokens(config, num_rows)):
        watch.looked_up_rows.clear()
        lookup.bind(DistinctTokens(ids=ids, on_device=ids), is_trial=True)
        try:
            layer_runner.embed({**inputs, "input_ids": torch.full_like(inputs["input_ids"], token)})
        finally:
            lookup.unbind()
        if len(watch.looked_up_rows) != 1:
            return None
        [row] = watch.looked_up_rows
        if row is None or row < num_rows:
            return None
        substitutes |= {row - num_rows} - {token}
    return substitutes


def special_tokens(config: PretrainedConfig, vocab_size: int) -> list[int]:
    """The tokens that a configuration names, in any of its parts: they may mean padding, or an image."""

    def found(values: object, key: str) -> Iterator[int]:
        if isinstance(values, dict):
            for name, value in values.items():
                yield from found(value, str(name))
        elif isinstance(values, list):
            for value in values:
                yield from found(value, key)
        elif isinstance(values, int) and not isinstance(values, bool) and key.endswith(_TOKEN_KEYS):
            yield values

    return sorted({token for token in found(config.to_dict(), "") if 0 <= token < vocab_size})


def separates_samples(calls: Sequence[LayerCall]) -> bool:
    """Whether every layer got a mask `[.., 2n, 2n]` in which the second sample of `n` tokens cannot see the first."""
    return all(any(_separates(leaf) for leaf in call.tensors) for call in calls)


def _separates(mask: object) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[-2:] != (SAMPLE_TOKENS, SAMPLE_TOKENS):
        return False
    across = mask[..., SAMPLE_TOKENS // 2 :, : SAMPLE_TOKENS // 2]
    return bool((~across).all() if mask.dtype == torch.bool else (across <= -1e4).all())


class _UsageWatch(OperatorMode):
    """Notes which placeholders are read. Operators that read one return zeros of the right shape."""

    def __init__(self, names: Mapping[int, str], embedding: str) -> None:
        super().__init__()
        self._names = names
        self._embedding = embedding
        self.looked_up_rows: set[int | None] = set()
        """Rows of the embedding's matrix that were looked up; None stands for any other use of it."""
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.read_after: set[int] = set()
        """Storages of all tensors that are read after the layers."""
        self._is_before = True

    def enter_layers(self) -> None:
        """Note no parameters from here on: the owner works on the output of its layers."""
        self._is_before = False

    def leave_layers(self) -> None:
        """Note them again: the owner computes its embedding again."""
        self._is_before = True

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        tensors = tensors_in((args, kwargs))
        touched = {self._names[key] for tensor in tensors if (key := tensor.untyped_storage()._cdata) in self._names}
        (self.before if self._is_before else self.after).update(touched)
        if not self._is_before:
            self.read_after.update(tensor.untyped_storage()._cdata for tensor in tensors)
        if self._embedding in touched:
            self._note_lookup(func, args)
        if not touched or func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        shaped = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        return tree_map(_zeros, shaped)

    def _note_lookup(self, func: TorchOperator, args: tuple[object, ...]) -> None:
        rows = args[1] if func is torch.ops.aten.embedding.default else None
        self.looked_up_rows.update([None] if not isinstance(rows, torch.Tensor) else map(int, rows.unique()))


def _to_meta(leaf: object) -> object:
    if isinstance(leaf, torch.device):  # on which the result would be
        return torch.device("meta")
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _zeros(leaf: object) -> object:
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
