"""How the tensors of a checkpoint become the parameters of a skeleton.

transformers renames, stacks, splits and transposes weights on the way from a file to a module. For example, the experts
of a mixture are many tensors in older files and one parameter in the module. Invariant: the table of conversions is
that of transformers, so Ratel knows no model family. Only the order is ours: all names are resolved first, and each
conversion runs alone, when one of its parameters is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


@dataclass(slots=True, kw_only=True)
class Conversion:
    """One run of a converter: from several tensors of the files to one or more tensors of the model."""

    converter: WeightConverter
    first_target: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(pattern of the converter, name in the file), in the order that the converter needs."""

    @property
    def source_names(self) -> list[str]:
        return [name for _, name in self.sources]

    def run(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The converted tensors, by their names in the model. All sources are in memory together.

        `read` returns a tensor of the files by its name. Raises what the converter raises if the sources do not fit.
        """
        for pattern, name in self.sources:
            # A tensor may take the place of a future of it: transformers does the same when it saves.
            self.converter.add_tensor(self.first_target, name, pattern, read(name))  # type: ignore[arg-type]
        converted = self.converter.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


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
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
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
            conversion.sources.append((pattern, name))
    return Renaming(
        direct=direct, conversions=tuple(conversions.values()), unexpected=tuple(unexpected), doubled=tuple(doubled)
    )
