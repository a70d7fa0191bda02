"""What one micro-batch carries from use to use of a step next to its hidden states.

The code before the layers may compute more than hidden states from its parameters: an input for every layer, a bias by
position. A layer may leave tensors for those above it in a mapping that the owner hands to all of them, such as keys
and values that several layers share; or return something that the owner hands on. Autograd would follow all of it, but
a step runs each use by itself. So what a later use reads is a leaf: it collects its readers' gradients, and backward of
the use that made it begins with their sum too.

Invariant: gradients are added as autograd adds them: those of later uses first, then each use's own, one by one, in the
tensor's dtype. So an earlier sum goes into a use's backward as a root, which autograd adds to before all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

Argument: TypeAlias = (
    "torch.Tensor | str | int | float | bool | tuple[Argument, ...] | list[Argument]"
    " | MutableMapping[object, Argument] | None"
)
Contents: TypeAlias = "dict[object, Argument]"
LayerOutput: TypeAlias = "tuple[torch.Tensor, tuple[Argument, ...]]"
"""The hidden states behind a layer, and what it returns besides for later layers: as many as its `extras`."""
RunLayer: TypeAlias = "Callable[[LayerCall], LayerOutput]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """All arguments of a layer except its hidden states: masks, rotary tables, positions."""

    arguments: tuple[Argument, ...]
    keywords: dict[str, Argument]

    def changed(self, change: Callable[[torch.Tensor], Argument]) -> LayerCall:
        """The call with other tensors. Mappings stay: layers may share them."""
        arguments = (changed(each, change) for each in self.arguments)
        keywords = {name: changed(each, change) for name, each in self.keywords.items()}
        return LayerCall(arguments=tuple(arguments), keywords=keywords)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors, those in mappings included."""
        return [*tensors_of(self.arguments), *tensors_of(self.keywords)]

    @property
    def mappings(self) -> list[MutableMapping[object, Argument]]:
        """The mappings among the arguments, in which layers may leave something."""
        found = (*_mappings(self.arguments), *_mappings(tuple(self.keywords.values())))
        return list({id(each): each for each in found}.values())


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """The result of the owner's code before its first layer."""

    hidden: torch.Tensor
    """The first hidden states; `[batch, tokens, hidden_size]` in most models."""
    calls: tuple[LayerCall, ...]
    """The arguments of each layer, in order."""
    extras: tuple[tuple[torch.Tensor | None, ...], ...]
    """By layer: what stands among the arguments of later layers for each value that it returns besides hidden states;
    None for one that no layer gets."""
    second: torch.Tensor | None = None
    """The first hidden states of a second stack, which has looked its own tokens up; None if there is none."""

    @cached_property
    def carried(self) -> tuple[torch.Tensor, ...]:
        """The layers' arguments that have a gradient, in the order of their first use."""
        return tuple({id(each): each for call in self.calls for each in call.tensors if each.requires_grad}.values())

    @cached_property
    def mappings(self) -> tuple[MutableMapping[object, Argument], ...]:
        """The mappings that layers get."""
        return tuple({id(each): each for call in self.calls for each in call.mappings}.values())

    @cached_property
    def links_layers(self) -> bool:
        """Whether a layer may read what layers below have left or returned."""
        return bool(self.mappings) or any(each is not None for extras in self.extras for each in extras)


class Roots(NamedTuple):
    """What a use's backward has besides its hidden states."""

    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor]
    """Gradient of each tensor: the sum of what later uses have added."""
    inputs: list[torch.Tensor]
    """Leaves that get a gradient."""

    def gradients_of(self, root: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of parameters through one root, which is a root no longer."""
        place = next((place for place, each in enumerate(self.tensors) if each is root), None)
        if place is None:
            return [None for _ in parameters]
        tensor, gradient = self.tensors.pop(place), self.gradients.pop(place)
        return list(torch.autograd.grad(tensor, parameters, gradient, allow_unused=True))


class Carried:
    """What one micro-batch carries. Its layers, counted from 0, run forward in order, and backward in reverse."""

    def __init__(self, embedded: Embedded) -> None:
        self.links_layers = embedded.links_layers
        leaves = {id(each): _leaf(each) for each in embedded.carried}
        self._of_embedding = tuple(leaves.values())

        def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
            return leaves.get(id(tensor), tensor)

        self.calls = tuple(call.changed(leaf_of) for call in embedded.calls)
        """The arguments of each layer, but for what layers below it return."""
        self._mappings = embedded.mappings
        for mapping in self._mappings:
            for key, value in mapping.items():
                mapping[key] = changed(value, leaf_of)
        self._before: dict[int, list[Contents]] = {}
        """By layer: the contents of the mappings when it began."""
        self._place_of_extra = {
            id(extra): (layer, place)
            for layer, extras in enumerate(embedded.extras)
            for place, extra in enumerate(extras)
            if extra is not None
        }
        self._extras: dict[int, tuple[Argument, ...]] = {}
        """By layer: what it has returned besides hidden states, as later layers get it."""

    def cost_key(self, index: int) -> tuple[object, ...]:
        """Equal for layers, counted from 0, that cost the same if they are of one kind: they get the same tensors, or
        alike parts of them."""
        call = self.calls[index]
        tensors = (
            "extra" if id(each) in self._place_of_extra else (each.untyped_storage()._cdata, each.shape)
            for each in call.tensors
        )
        return (*tensors, *map(id, call.mappings))

    @property
    def from_layers(self) -> list[torch.Tensor]:
        """What layers have left and returned for later ones."""
        return [each for value in (*self._mappings, *self._extras.values()) for each in tensors_of(value)]

    def forward(self, index: int, run: RunLayer, *, has_backward: bool = False) -> torch.Tensor:
        """Run a layer on its arguments, and return its output. `has_backward`: `replay` will come.

        What it leaves for later layers becomes leaves, without the layer's graph.
        """
        before = self._contents()
        try:
            output, extras = run(self._call(index))
        except BaseException:
            self._restore(before)  # it may be run again
            raise
        for mapping, was in zip(self._mappings, before, strict=True):
            for key in _set_since(was, mapping):
                mapping[key] = changed(mapping[key], _leaf)
        if self._place_of_extra:
            self._extras[index] = tuple(changed(each, _leaf) for each in extras)
        if has_backward:
            self._before[index] = before
        return output

    def signature(self, index: int) -> object:
        """What of a layer's arguments may decide which operators it runs: see `signature_of`."""
        call = self._call(index)
        return signature_of((call.arguments, call.keywords))

    def replay(self, index: int, run: RunLayer) -> tuple[torch.Tensor, Roots]:
        """Run a layer once more, for its backward. Returns its output and what else its backward begins with."""
        after, before = self._contents(), self._before.pop(index)
        returned = self._extras.pop(index, ())
        self._restore(before)
        call = self._call(index)
        output, extras = run(call)
        roots = Roots([], [], [])
        for made, leaf in zip(tensors_of(extras), tensors_of(returned), strict=True):
            _add_root(roots, made, leaf)
        for was, left, mapping in zip(before, after, self._mappings, strict=True):
            for key in _set_since(was, mapping):
                for made, leaf in zip(tensors_of(mapping[key]), tensors_of(left[key]), strict=True):
                    _add_root(roots, made, leaf)
        self._restore(before)
        for leaf in (*call.tensors, *(each for contents in before for each in tensors_of(contents))):
            if leaf.requires_grad and all(leaf is not each for each in roots.inputs):
                roots.inputs.append(leaf)
                _add_root(roots, leaf, leaf)
        return output, roots

    def root_embedding(self, embedded: Embedded) -> Roots:
        """What the embedding's backward begins with besides, after all layers. `embedded`: its second run."""
        roots = Roots([], [], [])
        for made, leaf in zip(embedded.carried, self._of_embedding, strict=True):
            _add_root(roots, made, leaf)
        return roots

    def _call(self, index: int) -> LayerCall:
        def returned(tensor: torch.Tensor) -> Argument:
            found = self._place_of_extra.get(id(tensor))
            return tensor if found is None else self._extras[found[0]][found[1]]

        return self.calls[index].changed(returned) if self._place_of_extra else self.calls[index]

    def _contents(self) -> list[Contents]:
        return [dict(mapping) for mapping in self._mappings]

    def _restore(self, contents: Sequence[Contents]) -> None:
        for mapping, wanted in zip(self._mappings, contents, strict=True):
            mapping.clear()
            mapping.update(wanted)


def _set_since(before: Contents, mapping: Mapping[object, Argument]) -> list[object]:
    """The keys of a mapping whose values are not those of before."""
    return [key for key, value in mapping.items() if key not in before or before[key] is not value]


def _add_root(roots: Roots, tensor: torch.Tensor, leaf: torch.Tensor) -> None:
    """Let backward begin with `tensor` too, if the leaf that stood for it has a gradient; the leaf has none then."""
    if leaf.grad is not None:
        roots.tensors.append(tensor)
        roots.gradients.append(leaf.grad)
        leaf.grad = None


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def changed(tree: Argument, change: Callable[[torch.Tensor], Argument]) -> Argument:
    """A value with other tensors. Mappings stay: layers may share them."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple | list):
        items = (changed(item, change) for item in tree)
        return tuple(items) if isinstance(tree, tuple) else list(items)
    return tree


def signature_of(tree: object) -> object:
    """A value with the shape, strides, dtype and `requires_grad` of each tensor in its place, to be compared."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype, tree.requires_grad
    if isinstance(tree, Mapping):
        return tuple((key, signature_of(value)) for key, value in tree.items())
    return tuple(map(signature_of, tree)) if isinstance(tree, tuple | list) else tree


def tensors_of(tree: object) -> list[torch.Tensor]:
    """All tensors in a value, those in mappings included."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    return [tensor for item in tree for tensor in tensors_of(item)] if isinstance(tree, tuple | list) else []


def _mappings(items: Iterable[object]) -> list[MutableMapping[object, Argument]]:
    found = []
    for item in items:
        if isinstance(item, MutableMapping):
            found.append(item)
        elif isinstance(item, tuple | list):
            found += _mappings(item)
    return found
