"""How the tensors of a checkpoint become the parameters of a skeleton, and how parameters become these tensors again.

transformers renames, stacks, splits and transposes weights on the way from a file to a module. For example, the experts
of a mixture are many tensors in most files and one parameter in the module. Invariant: the table of conversions, and
the reverse of each, is that of transformers, so Ratel knows no model family. Only the order is ours: all names are
resolved first, and each conversion runs alone, when one of its results is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

CONVERSION_ERRORS = (RuntimeError, ValueError, IndexError, AttributeError, KeyError, TypeError)
"""What a converter raises if the tensors that it gets do not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor of the files that is converted."""

    pattern: str
    """The pattern of the converter that it matches."""
    name: str
    """Its name in the files."""
    stem: str
    """Its name after all renamings, before the conversion."""


@dataclass(slots=True, kw_only=True)
class Conversion:
    """One run of a converter: from several tensors of the files to one or more tensors of the model."""

    converter: WeightConverter
    first_target: str
    sources: list[Source] = field(default_factory=list)
    """In the order that the converter needs."""

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self.sources]

    def run(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The converted tensors, by their names in the model. All sources are in memory together.

        `read` returns a tensor of the files by its name. Raises what the converter raises if the sources do not fit.
        """
        inputs = [(source.pattern, source.name) for source in self.sources]
        return _run(self.converter, model, self.first_target, inputs, read)


@dataclass(slots=True, kw_only=True)
class Reversal:
    """The way back of one conversion: from parameters of the model to the tensors of the files."""

    converter: WeightConverter
    first_result: str
    parameters: Sequence[tuple[str, str]]
    """(pattern of the converter, name in the model), in the order that the converter needs."""
    file_names: Mapping[str, str]
    """The name in the files of each of the converter's results."""

    def run(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors by their names in the files. All parameters are in memory together.

        `read` returns a parameter by its name in the model. Raises what the converter raises.
        """
        results = _run(self.converter, model, self.first_result, self.parameters, read)
        return {self.file_names[name]: values for name, values in results.items()}

    def views(self, model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors by their names in the files, from meta `parameters`; no data is moved.

        Where the converter only splits or transposes, they are views of the parameters.
        """
        try:
            with _WithoutCopies():  # type: ignore[no-untyped-call]
                return self.run(model, lambda name: parameters[name])
        except CONVERSION_ERRORS:  # no view has the elements in the order that the converter needs
            return self.run(model, lambda name: parameters[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """The place in the model of every tensor of a checkpoint."""

    direct: Mapping[str, str]
    """Name in the model -> name in the file, for tensors that need no conversion."""
    conversions: tuple[Conversion, ...]
    unexpected: tuple[tuple[str, str], ...]
    """(name in the file, name after renaming) of tensors that the model does not have."""
    doubled: tuple[tuple[str, str], ...]
    """Pairs of names in the files that have the same place in the model."""


def plan_renaming(model: PreTrainedModel, names: Iterable[str]) -> Renaming:
    """Find the place of every tensor, by the rules of transformers' own loader and in its order."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix

    direct: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unexpected: list[tuple[str, str]] = []
    doubled: list[tuple[str, str]] = []
    for name in sorted(names, key=dot_natural_key):
        stem = apply_renamings(name, renamings)
        target, pattern = rename_source_key(stem, [], converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unexpected.append((name, target))
        elif pattern is None:
            if target in direct:
                doubled.append((direct[target], name))
            direct.setdefault(target, name)
        else:
            conversion = conversions.get(target)
            if conversion is None:
                conversion = Conversion(converter=deepcopy(by_pattern[pattern]), first_target=target)
                conversions[target] = conversion
            conversion.sources.append(Source(pattern=pattern, name=name, stem=stem))
    return Renaming(
        direct=direct, conversions=tuple(conversions.values()), unexpected=tuple(unexpected), doubled=tuple(doubled)
    )


def targets_of(
    conversion: Conversion, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a conversion's results in the model, found on meta tensors; `shapes` are the sources'.

    Raises one of CONVERSION_ERRORS if the sources do not fit.
    """
    results = conversion.run(model, lambda name: torch.empty(shapes[name], dtype=torch.float32, device="meta"))
    return {name: tuple(values.shape) for name, values in results.items()}


def saved_names(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that `save_pretrained` writes of a model that was loaded from no files."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {name for name, _ in (*model.named_parameters(), *model.named_buffers())} - ignored
    state = {
        name: torch.empty(values.shape, device="meta") for name, values in model.state_dict().items() if name in kept
    }
    try:
        saved = revert_weight_conversion(model, dict(state))
    except (NotImplementedError, *CONVERSION_ERRORS):
        saved = state
    return {name: tuple(values.shape) for name, values in saved.items()}


def twins(model: PreTrainedModel) -> dict[str, list[str]]:
    """For every parameter name all names of the same tensor, including itself."""
    names_of: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[id(parameter)].append(name)
    return {name: names for names in names_of.values() for name in names}


def reverse(
    conversion: Conversion, model: PreTrainedModel, targets: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
) -> Reversal | None:
    """The way back of a conversion whose results are the model's `targets`; None if transformers has none.

    `shapes` are those of the sources in the files. The way back is tried on meta tensors: it must lead to just these.
    """
    try:
        converter = cast(WeightConverter, conversion.converter.reverse_transform())
        renamed = {name: converter.rename_source_key(name) for name in sorted(targets, key=dot_natural_key)}
        parameters = [(pattern, name) for name, (_, pattern) in renamed.items() if pattern is not None]
        reversal = Reversal(
            converter=converter,
            first_result=next(iter(renamed.values()))[0],
            parameters=parameters,
            file_names=_AllNames(conversion.sources, model.base_model_prefix),
        )
        state = model.state_dict()
        results = reversal.run(model, lambda name: torch.empty(state[name].shape, device="meta"))
    except (NotImplementedError, *CONVERSION_ERRORS):
        return None
    wanted = {name: shapes[name] for name in conversion.source_names}
    is_whole = len(parameters) == len(renamed) and {name: tuple(each.shape) for name, each in results.items()} == wanted
    return reversal if is_whole else None


class _AllNames(dict[str, str]):
    """Names in the files by their stems, with and without the prefix of the base model."""

    def __init__(self, sources: Iterable[Source], prefix: str) -> None:
        super().__init__()
        for source in sources:
            self[source.stem] = source.name
            self.setdefault(f"{prefix}.{source.stem}", source.name)
            self.setdefault(source.stem.removeprefix(f"{prefix}."), source.name)


class _WithoutCopies(TorchDispatchMode):
    """A context in which `contiguous` returns the view that it gets, so that it shows where its elements lie."""

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def _run(
    converter: WeightConverter,
    model: PreTrainedModel,
    name: str,
    inputs: Iterable[tuple[str, str]],
    read: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The converter's results. `inputs`: (pattern, name) of each tensor; only the converter holds what was read."""
    for pattern, source in inputs:
        # A tensor may take the place of a future of it: transformers does the same when it saves.
        converter.add_tensor(name, source, pattern, read(source))  # type: ignore[arg-type]
    with torch.no_grad():
        converted = converter.convert(name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
