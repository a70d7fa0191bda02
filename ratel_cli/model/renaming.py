"""How the tensors of a checkpoint become the parameters of a skeleton.

transformers renames, stacks, splits and transposes weights on the way from a file to a module (the
experts of a mixture, for one, are many tensors in older files and one parameter in the module). Its
own table of conversions decides here too, so that no family is known to Ratel; only the driving is
ours: names and shapes are worked out beforehand on meta tensors, and each conversion is run alone,
when its parameters are asked for. `model.checkpoint` is the only caller.
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
    """One run of a converter: several tensors of the files in, one or more of the model out."""

    converter: WeightConverter
    first_target: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(pattern of the converter, name in the file), in the converter's order."""

    @property
    def source_names(self) -> list[str]:
        return [name for _, name in self.sources]

    def run(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The converted tensors by the model's names. Every source is alive at once."""
        for pattern, name in self.sources:
            # Tensors themselves are as good as futures of them: so does transformers when it saves.
            self.converter.add_tensor(self.first_target, name, pattern, read(name))  # type: ignore[arg-type]
        converted = self.converter.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """Every tensor of a checkpoint, sorted by what must be done with it."""

    direct: Mapping[str, str]
    """Name in the model -> name in the file, for tensors that are taken as they are."""
    conversions: tuple[Conversion, ...]
    unexpected: tuple[tuple[str, str], ...]
    """(name in the file, name it would have in the model) of tensors that the model has no place for."""
    doubled: tuple[tuple[str, str], ...]
    """Pairs of names in the files that claim the same place."""


def plan_renaming(model: PreTrainedModel, names: Iterable[str]) -> Renaming:
    """Find the place of every tensor by the rules, and in the order, of transformers' own loader."""
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
        direct=direct,
        conversions=tuple(conversions.values()),
        unexpected=tuple(unexpected),
        doubled=tuple(doubled),
    )
