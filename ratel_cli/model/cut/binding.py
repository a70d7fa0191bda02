"""Parameters and their places in a module tree, where a block's weights are bound: as views of one flat array."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from ratel_cli.model.files.quantised import QuantisedLayout
from ratel_cli.model.files.quantised_modules import Quantised
from ratel_cli.model.values.rate_groups import ENDS, GROUP_NAMES, ONE_RATE, RateGroups
from ratel_cli.model.values.spec import decays
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec, lay_out_block
from ratel_cli.schedule.rules import ALL_ADAMW, FROZEN, ParameterKind, Rule, RuleChoice
from ratel_cli.sizes import DtypeName, WeightDtype

_NAMES_OF_DTYPES: dict[torch.dtype, WeightDtype] = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.uint8: "uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleAttribute:
    """An attribute of a module that holds a parameter: one place in the module tree."""

    module: nn.Module
    attribute: str

    @property
    def parameter(self) -> torch.Tensor:
        """What it holds."""
        found = self.module._parameters[self.attribute]
        assert found is not None
        return found

    def put(self, parameter: torch.Tensor) -> None:
        """Let it hold a parameter, or what stands for it in a graph."""
        # Assigning through _parameters costs 1 us; setattr on a module costs 20.
        self.module._parameters[self.attribute] = parameter  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParameter:
    """One parameter and its places in the module tree."""

    name: str
    places: tuple[ModuleAttribute, ...]
    unbound: nn.Parameter
    """What stands in its places while no weights are bound."""
    decay: bool
    """Whether weight decay applies."""
    is_trained: bool
    """False if the model's own code has frozen it."""

    @property
    def dtype(self) -> WeightDtype:
        """What it computes in; of a quantised one, bytes."""
        return _NAMES_OF_DTYPES[self.unbound.dtype] if self._layout is None else "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.unbound.shape) if self._layout is None else (self._layout.num_bytes,)

    @property
    def is_embedding(self) -> bool:
        """Whether it is looked up; the head may be the same matrix."""
        return any(isinstance(place.module, nn.Embedding) for place in self.places)

    @property
    def quantised_shape(self) -> tuple[int, ...] | None:
        """The shape of the matrix or stack that it holds, quantised; None: it is none of these."""
        return None if self._layout is None else self._layout.shape

    @property
    def computed_shape(self) -> tuple[int, ...]:
        """The shape of what the model's code computes with."""
        return self.quantised_shape or self.shape

    def without_values(self) -> torch.Tensor:
        """What the model's code computes with, on the meta device: of a quantised parameter, its matrix."""
        module = self.places[0].module
        dtype = module.dtype if self._layout is not None and isinstance(module, Quantised) else self.unbound.dtype
        return torch.empty(self.computed_shape, dtype=dtype, device="meta")

    @property
    def _layout(self) -> QuantisedLayout | None:
        """Where the parts of a quantised one lie."""
        place = self.places[0]
        return place.module.layouts.get(place.attribute) if isinstance(place.module, Quantised) else None

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter into its places."""
        for place in self.places:
            place.put(parameter)

    def unbind(self) -> None:
        """Put the unbound parameter into every place."""
        self.put(self.unbound)


def parameter_places(root: nn.Module) -> dict[nn.Parameter, list[tuple[str, ModuleAttribute]]]:
    """The places of each parameter, with its name there, in the order of the module tree. The first name is its own."""
    found: dict[nn.Parameter, list[tuple[str, ModuleAttribute]]] = {}
    for module_name, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                place = ModuleAttribute(module=module, attribute=attribute)
                found.setdefault(parameter, []).append((f"{module_name}.{attribute}".lstrip("."), place))
    return found


def placed_parameters(
    root: nn.Module, layers: Sequence[nn.Module]
) -> Iterator[tuple[PlacedParameter, dict[str, set[int]]]]:
    """All parameters, in the order of the module tree, each with the layers that have it under each of its names: none
    outside of them. Each stands in its own places."""
    layers_of = defaultdict[int, set[int]](set)
    for index, layer in enumerate(layers):
        for module in layer.modules():
            layers_of[id(module)].add(index)
    norms = [module for module in root.modules() if isinstance(module, nn.LayerNorm)]
    in_norms = {id(parameter) for norm in norms for parameter in norm.parameters()}
    for parameter, places in parameter_places(root).items():
        name = places[0][0]
        placed = PlacedParameter(
            name=name,
            places=tuple(place for _, place in places),
            unbound=parameter,
            decay=decays(name, is_in_layer_norm=id(parameter) in in_norms),
            is_trained=parameter.requires_grad,
        )
        yield placed, {each: layers_of[id(place.module)] for each, place in places}


def bound_views(block: BlockSpec, parts: Sequence[torch.Tensor], *, num_rows: int | None = None) -> list[torch.Tensor]:
    """Views of a block's flat array, each in its parameter's shape, in the order of the block. `parts` are that array,
    `[block.num_elements]` in all; each begins where a parameter begins.

    `num_rows`: the first part has this many rows of the first parameter, and the others begin with the second one.
    """
    starts = list(accumulate(map(len, parts), initial=0))
    shapes = [parameter.shape for parameter in block.parameters]
    if num_rows is not None:
        shapes[0] = (num_rows, *shapes[0][1:])
        ends = [*(parameter.start for parameter in block.parameters[1:2]), block.num_elements]
        starts = [0, *accumulate(map(len, parts[1:]), initial=ends[0])]
    assert starts[-1] == block.num_elements

    def view(parameter: ParameterSpec, shape: tuple[int, ...]) -> torch.Tensor:
        number = min(bisect_right(starts, parameter.start), len(parts)) - 1
        start = parameter.start - starts[number]
        # `data` has a version of its own: PEFT sets parameters of experts anew, to themselves, after others were saved.
        return parts[number][start : start + math.prod(shape)].view(shape).data

    return [view(parameter, shape) for parameter, shape in zip(block.parameters, shapes, strict=True)]


class CutBlock(NamedTuple):
    """The parameters of one block, before it is laid out."""

    segment: int
    name: str
    dtype: WeightDtype
    rule: Rule
    borrowers: tuple[int, ...]
    rate: int
    parameters: tuple[PlacedParameter, ...]


def cut_into_blocks(
    segments: Sequence[tuple[str, Sequence[PlacedParameter]]],
    dtype: DtypeName,
    rates: RateGroups = ONE_RATE,
    rules: RuleChoice = ALL_ADAMW,
) -> list[CutBlock]:
    """The blocks of segments, given as (name, parameters): of each segment first what is trained by the main rule in
    the model's dtype; behind all of these what is in another one, or has another rule, or is frozen, or borrowed by
    other segments, or has a learning rate of its own, and each matrix that its rule needs as a whole.

    A parameter that several segments have is given for each of them, and belongs to the first. Blocks that are alike
    lie one after another then, and the store's manifest describes them together.
    """
    users = defaultdict[str, list[int]](list)
    for index, (_, parameters) in enumerate(segments):
        for each in parameters:
            users[each.name].append(index)
    firsts, others = list[CutBlock](), list[CutBlock]()

    def rule_of(parameter: PlacedParameter, segment: int) -> Rule:
        if not parameter.is_trained:
            return FROZEN
        is_in_layer = 0 < segment < len(segments) - 1
        is_weight = is_in_layer and parameter.name.endswith(".weight")
        return rules.of(ParameterKind(parameter.shape, parameter.is_embedding, is_weight))

    for index, (name, parameters) in enumerate(segments):
        of_segment = [each for each in parameters if users[each.name][0] == index]
        kinds = [
            (
                each.dtype,
                rule_of(each, index),
                tuple(users[each.name][1:]),
                rates.of(each.name, len(each.shape)) if each.is_trained else 0,
                each.name if rule_of(each, index).stands_alone else "",
            )
            for each in of_segment
        ]
        # An embedding's begins with the matrix.
        own = (dtype, rules.main, (), 0, "") if index or not kinds else kinds[0]
        for of_block in dict.fromkeys(kinds):
            chosen = tuple(each for each, found in zip(of_segment, kinds, strict=True) if found == of_block)
            if of_block == own:
                firsts.append(CutBlock(index, name, *own[:4], chosen))
            elif of_block[4]:
                others.append(CutBlock(index, f"{name}, {of_block[4]}", *of_block[:4], chosen))
            else:
                rule = of_block[1]
                how = "frozen" if rule is FROZEN else "in" if rule == own[1] else f"by {rule.title} in"
                what = f"{name}, {how} {of_block[0]}"
                shared = ", shared" if of_block[2] else ", not shared" if own[2] else ""
                others.append(CutBlock(index, what + shared + GROUP_NAMES[of_block[3]], *of_block[:4], chosen))
    return [*firsts, *others]


def laid_out(
    cut: Iterable[CutBlock], *, dtype: DtypeName, gradient_dtype: DtypeName | None, looked_up: PlacedParameter | None
) -> tuple[BlockSpec, ...]:
    """The blocks as values. `gradient_dtype`: in which gradients leave the device, of blocks in the model's `dtype`;
    None: in each block's own. `looked_up`: the matrix in whose rows tokens are looked up."""
    return tuple(
        replace(
            lay_out_block(
                index=index,
                segment=each.segment,
                name=each.name,
                parameters=[
                    (placed.name, placed.shape, placed.decay and each.rate != ENDS) for placed in each.parameters
                ],
                dtype=each.dtype,
                gradient_dtype=gradient_dtype if each.dtype == dtype else None,
                rule=each.rule,
                borrowers=each.borrowers,
                is_looked_up=looked_up is not None and looked_up in each.parameters,
                quantised={
                    placed.name: placed.quantised_shape
                    for placed in each.parameters
                    if placed.quantised_shape is not None
                },
            ),
            rate=each.rate,
        )
        for index, each in enumerate(cut)
    )
