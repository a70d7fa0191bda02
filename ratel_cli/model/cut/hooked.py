"""A module of any kind, cut into blocks: children of it that compute one after another, and what is outside of these.

Blocks are found where a module lists its layers, in a ModuleList or a Sequential, or are named. The weights of a block
are bound while it computes. What is outside stays bound: the caller's code may use it at any time.

Invariant: a parameter that code of two blocks has, or code of a block and code outside, is outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ratel_cli.errors import BadInput
from ratel_cli.json_fields import hash_of
from ratel_cli.model.cut.binding import (
    ModuleAttribute,
    PlacedParameter,
    bound_views,
    cut_into_blocks,
    laid_out,
    parameter_places,
)
from ratel_cli.model.files.skeleton import NAMES_OF_DTYPES
from ratel_cli.model.values.away import AwayParameter, share_hooks
from ratel_cli.model.values.row_lookup import DistinctTokens
from ratel_cli.model.values.spec import ModelSpec, check_depth
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import DtypeName

_LISTS = (nn.ModuleList, nn.Sequential)


class HookedModule:
    """A module whose blocks are known. Bind those of one segment at a time; segment 0 is what is outside of blocks."""

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module], *, outside: Sequence[str]) -> None:
        """`blocks`: by their names in `module`. `outside`: names of modules within them that other code uses, too.

        Raises BadInput if their parameters cannot be trained.
        """
        self.module = module
        self.blocks = dict(blocks)
        check_depth(len(self.blocks))
        placed_outside, placed = _placed_parameters(module, self.blocks, outside)
        everything = [*placed_outside, *(each for own in placed for each in own)]
        check_parameters(everything)
        self.parameter_names = tuple(name for name, _ in module.named_parameters())
        segments = [("outside", placed_outside), *zip(self.blocks, placed, strict=True), ("end", [])]
        dtype = main_dtype(everything)
        cut = cut_into_blocks(segments, dtype)
        self.spec = ModelSpec(
            name=type(module).__name__,
            architecture=type(module).__name__,
            blocks=laid_out(cut, dtype=dtype, gradient_dtype=None, looked_up=None),
            segment_names=tuple(name for name, _ in segments),
            dtype=dtype,
            hidden_size=1,
            vocab_size=1,
        )
        self._parameters = tuple(each.parameters for each in cut)

    def send_away(self, device: torch.device) -> None:
        """Let the drives alone have the weights of the blocks. What is outside of them has no values before `bind`.
        `device`: where they compute."""
        self._parameters = tuple(
            tuple(_away(each, device) if block.segment else _in_memory(each, device) for each in placed)
            for block, placed in zip(self.spec.blocks, self._parameters, strict=True)
        )
        for placed in self._parameters:
            for each in placed:
                each.unbind()
        self._hooked = self._names_and_ids()

    @property
    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by name: the parameters that optimizers and callers see."""
        return ((each.name, each.unbound) for placed in self._parameters for each in placed if each.is_trained)

    def shared_by(self, block: nn.Module) -> tuple[ModuleAttribute, ...]:
        """Where a block has trained parameters that are outside of the blocks: each at its first place."""
        inside = {id(each) for each in block.modules()}
        places = [
            [place for place in each.places if id(place.module) in inside]
            for index, placed in enumerate(self._parameters)
            if self.spec.blocks[index].segment == 0 and self.spec.blocks[index].is_trained
            for each in placed
        ]
        return tuple(place for own in places for place in own)

    def leave(self) -> None:
        """The training state is being closed: let what is outside of the blocks have memory of its own."""
        for placed in self._parameters:
            for each in placed:
                if isinstance(each.unbound, AwayParameter):
                    each.unbound.is_closed = True
                else:
                    each.unbound.data = each.unbound.data.clone()

    def check(self) -> None:
        """Raise BadInput if the module has other parameters than when it was hooked, or trains others."""
        changed = dict(self._names_and_ids() ^ self._hooked)
        if changed:
            name, known = min(changed), dict(self._hooked)
            how = "replaced or removed" if name in known else "made"
            raise BadInput(f"{name!r} was {how} after ratel.hook", "hook the module in its last form")
        for _, parameter in self.trained:
            # Torch tells no subclass of `set_`.
            if isinstance(parameter, AwayParameter) and parameter._version:
                raise parameter.used()
        self.check_flags()

    def _names_and_ids(self) -> set[tuple[str, int]]:
        return {(name, id(each)) for name, each in self.module.named_parameters(remove_duplicate=False)}

    def check_flags(self, index: int | None = None) -> None:
        """Raise BadInput if a parameter is trained, or is not, other than when the module was hooked. `index`: of the
        block that is looked at, counted from 0; None: all parameters are."""
        for block, placed in zip(self.spec.blocks, self._parameters, strict=True):
            if index is None or block.segment == index + 1:
                for each in placed:
                    if each.unbound.requires_grad != each.is_trained:
                        raise BadInput(
                            f"requires_grad of {each.name} was changed after ratel.hook", "set it before, once for all"
                        )

    def decay_by(self, decays: Mapping[str, bool]) -> None:
        """Set for each trained parameter, by name, whether weight decay applies."""
        self.spec = replace(
            self.spec,
            blocks=tuple(
                replace(block, parameters=tuple(replace(p, decay=decays.get(p.name, False)) for p in block.parameters))
                for block in self.spec.blocks
            ),
        )

    def move_to(self, device: torch.device) -> None:
        """Move the buffers."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def bind(
        self, block: BlockSpec, *parts: torch.Tensor, tokens: DistinctTokens | None = None
    ) -> tuple[nn.Parameter, ...]:
        """See `Program`. What is outside of blocks stays the same parameter, with other values."""
        assert tokens is None
        parameters = list[nn.Parameter]()
        for placed, values in zip(self._parameters[block.index], bound_views(block, parts), strict=True):
            if block.segment == 0:
                placed.unbound.data = values
                parameters.append(placed.unbound)
            elif any(place.parameter is not placed.unbound for place in placed.places):
                raise BadInput(
                    f"{placed.name} was replaced, by torch.func.functional_call for instance: its values are those of "
                    "the training state"
                )
            else:
                parameters.append(nn.Parameter(values, requires_grad=block.is_trained))
                share_hooks(placed.unbound, parameters[-1])
                placed.put(parameters[-1])
        return tuple(parameters)

    def release(self, segment: Segment) -> None:
        """See `Program`. What is outside of blocks stays."""
        if segment.index:
            for block in segment.bound:
                for placed in self._parameters[block.index]:
                    placed.unbind()


def identity_of(spec: ModelSpec) -> str:
    """A hash of what a module's state has: the name, shape, dtype and place of each parameter."""
    blocks = [
        (each.dtype, each.rule.name, [(p.name, p.shape, p.start) for p in each.parameters]) for each in spec.blocks
    ]
    return hash_of([spec.architecture, blocks])


def find_module_blocks(module: nn.Module, named: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The blocks by their names. `named`: names of lists of them, or of blocks; None: the outermost lists of modules
    with parameters. Raises BadInput if there are none."""
    if named is None:
        found = dict(_listed(module, ""))
        if len(found) < 2:
            raise BadInput(
                f"{type(module).__name__} has no list of blocks: no ModuleList or Sequential of two modules with "
                "parameters",
                "name its blocks: blocks=['encoder', 'decoder'], for instance",
            )
        return found
    found = {}
    for name in [named] if isinstance(named, str) else named:
        try:
            chosen = module.get_submodule(name)
        except AttributeError as error:
            names = ", ".join(child for child, _ in module.named_children())
            raise BadInput(f"blocks: {type(module).__name__} has no module {name!r}", f"it has {names}") from error
        found |= dict(_children(chosen, name)) if isinstance(chosen, _LISTS) else {name: chosen}
    without = next((name for name, each in found.items() if not _has_parameters(each)), None)
    if not found or without is not None:
        raise BadInput(f"blocks: {without or named} has no parameters")
    within = next((name for name in found for other in found if name.startswith(f"{other}.")), None)
    if within is not None:
        raise BadInput(f"blocks: {within} is within another one")
    return found


def _listed(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of the outermost lists."""
    children = list(_children(module, name)) if isinstance(module, _LISTS) else []
    if len(children) >= 2:
        yield from children
        return
    for child_name, child in module.named_children():
        yield from _listed(child, f"{name}.{child_name}".lstrip("."))


def _children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        if _has_parameters(child):
            yield f"{name}.{child_name}".lstrip("."), child


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _placed_parameters(
    module: nn.Module, blocks: Mapping[str, nn.Module], outside: Sequence[str]
) -> tuple[list[PlacedParameter], list[list[PlacedParameter]]]:
    """The parameters outside of the blocks, and those of each block, in the order of the module tree."""
    homes = defaultdict[int, set[int | None]](set)
    for index, block in enumerate(blocks.values()):
        for each in block.modules():
            homes[id(each)].add(index)
    for name in outside:
        try:
            chosen = module.get_submodule(name)
        except AttributeError as error:
            raise BadInput(f"outside: {type(module).__name__} has no module {name!r}") from error
        for each in chosen.modules():
            homes[id(each)].add(None)
    placed_outside: list[PlacedParameter] = []
    inside: list[list[PlacedParameter]] = [[] for _ in blocks]
    for parameter, places in parameter_places(module).items():
        [*users] = {home for _, place in places for home in homes.get(id(place.module), {None})}
        placed = PlacedParameter(
            name=places[0][0],
            places=tuple(place for _, place in places),
            unbound=parameter,
            decay=True,
            is_trained=parameter.requires_grad,
        )
        (placed_outside if len(users) > 1 or users[0] is None else inside[users[0]]).append(placed)
    return placed_outside, inside


def _in_memory(placed: PlacedParameter, device: torch.device) -> PlacedParameter:
    before = placed.unbound
    if before.device == device and not isinstance(before, AwayParameter):
        return placed
    values = torch.empty(0, dtype=before.dtype, device=device)
    made = nn.Parameter(values, requires_grad=placed.is_trained)
    share_hooks(before, made)
    return replace(placed, unbound=made)


def _away(placed: PlacedParameter, device: torch.device) -> PlacedParameter:
    away = AwayParameter.made(placed.unbound, device, requires_grad=placed.is_trained)
    away.parameter_name = placed.name
    share_hooks(placed.unbound, away)
    return replace(placed, unbound=away)


def own_dtype(module: nn.Module) -> DtypeName:
    """The dtype of most elements of a module's parameters. Raises BadInput if it has none, or others."""
    placed, _ = _placed_parameters(module, {}, ())
    check_parameters(placed)
    if not placed:
        raise BadInput(f"{type(module).__name__} has no parameters")
    return main_dtype(placed)


def main_dtype(parameters: Sequence[PlacedParameter]) -> DtypeName:
    """The dtype of most elements."""
    sizes = defaultdict[DtypeName, int](int)
    for each in parameters:
        sizes[NAMES_OF_DTYPES[each.unbound.dtype]] += each.unbound.numel()
    return max(sizes, key=sizes.__getitem__)


def check_parameters(parameters: Sequence[PlacedParameter]) -> None:
    """Raise BadInput if a module's parameters cannot be trained."""
    for each in parameters:
        if each.unbound.grad is not None:
            raise BadInput(f"{each.name} has a gradient already", "call zero_grad() before")
        if each.unbound.is_meta:
            raise BadInput(f"{each.name} has no values: it is on the meta device", "build the module elsewhere")
        if each.unbound.dtype not in (torch.float32, torch.bfloat16):
            raise BadInput(f"{each.name} is {each.unbound.dtype}; only float32 and bfloat16 can be trained")
        if not each.unbound.numel():
            raise BadInput(f"{each.name} has no elements")
