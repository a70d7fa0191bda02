"""The classes of a classifier: their names in configurations, in those that are read and in those that are exported.

Invariant: what an export names is what the run has learned, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from transformers import PretrainedConfig

from ratel_cli.errors import BadInput
from ratel_cli.model.files.kind import declared_task

_ONE_CLASS: Literal["single_label_classification"] = "single_label_classification"


def classes_of(config: PretrainedConfig, labels: Sequence[str] | None) -> tuple[str, ...]:
    """The names of a classifier's classes: `labels`, else those of the model that `config` describes, which must be a
    classifier then. Raises BadInput."""
    if labels is not None:
        return tuple(labels)
    if declared_task(config) != "classification":
        raise BadInput(
            "the classes are not known: the base model is no classifier",
            "name them in the dataset, in order: `labels: [negative, positive]`",
        )
    names = cast(Mapping[int, str], config.id2label)
    return tuple(str(names[index]) for index in range(len(names)))


def name_classes(config: PretrainedConfig, labels: Sequence[str]) -> None:
    """Let a configuration describe a classifier of these classes, of which a row has one."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = _ONE_CLASS


def class_settings(config: PretrainedConfig) -> dict[str, object]:
    """What config.json says of the classes of a classifier; nothing for other models."""
    if config.problem_type != _ONE_CLASS:
        return {}
    names = {str(index): label for index, label in (config.id2label or {}).items()}
    return {"id2label": names, "label2id": config.label2id, "problem_type": _ONE_CLASS}
