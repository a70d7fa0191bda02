"""The `key=value` arguments of the command line, applied to the file's tree.

Keys are dotted (`storage.engine`, `datasets.0.path`). Values are YAML scalars or flow lists. The first `=` separates
key and value. The keys of the file must have our names already.

Invariant: a later argument wins over an earlier one and over the file. An argument also replaces a key of the file that
decides the same thing (`max_steps` and `num_epochs`).
"""

from __future__ import annotations

from ratel_cli.config.dialect import Dialect
from ratel_cli.config.others.aliases import SECTIONS, TOP, canonical_key, explain_unknown
from ratel_cli.config.yaml.yaml_marks import Entry, Finding, Marked, Where, read_value, shorten

_EITHER_OR = (
    ("warmup_steps", "warmup_ratio"),
    ("num_epochs", "max_steps"),
    ("base_model", "model_shape"),
    ("save_steps", "saves_per_epoch"),
    ("eval_steps", "evals_per_epoch"),
)
_FORM = "write key=value, for example learning_rate=1e-4"


def is_override(argument: str) -> bool:
    """Whether an argument looks like `key=value`: what is before the sign could be a key, perhaps with dashes."""
    key, equals, _ = argument.partition("=")
    return bool(equals) and all(part.isidentifier() or part.isdigit() for part in key.replace("-", "_").split("."))


def apply_override(root: Marked, argument: str, number: int, dialect: Dialect) -> None:
    """Apply one argument to the tree; `number` is its position, from 1. Whatever is wrong with it becomes a finding."""
    where = Where(layer=number, line=0, column=0, origin=f"argument {shorten(argument, 80)}")
    key, equals, text = argument.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        dialect.findings.append(Finding(where=where, message="not a `key=value` argument", hint=_FORM))
        return
    value = read_value(text, where, dialect.findings)
    target = _target(root, steps[:-1], where, dialect)
    if value is None or target is None:
        return
    section, mapping = target
    if section == "datasets" and isinstance(mapping.content, list):
        item = _item(mapping, steps[-1], where, dialect)
        if item is not None:
            item.where, item.content = value.where, value.content
            dialect.translate_item(item)
        return
    small = Marked(where=where, content={steps[-1]: Entry(where=where, written=steps[-1], value=value)})
    dialect.translate_keys(section, small)
    mapping.entries.update(small.entries)
    if section == TOP:
        for name, entry in small.entries.items():
            _displace(mapping, name, entry, dialect)


def _target(root: Marked, steps: list[str], where: Where, dialect: Dialect) -> tuple[str, Marked] | None:
    """The section and the node that the last part of a dotted key belongs to; None if there is none, with a finding."""
    if not steps:
        return TOP, root
    section = canonical_key(TOP, steps[0])
    if section not in SECTIONS:
        if section in SECTIONS[TOP].model_fields:
            finding = Finding(where=where, message=f"`{section}` has no keys")
        else:
            finding, _ = explain_unknown(TOP, steps[0], where)
        dialect.findings.append(finding)
        return None
    empty = Marked(where=where, content={})
    entry = root.entries.setdefault(section, Entry(where=where, written=section, value=empty))
    if entry.value.content is None:
        entry.value = empty
    if section == "datasets":
        return _dataset_target(entry.value, steps[1:], where, dialect)
    return _nested_target(section, entry.value, steps[1:], where, dialect)


def _nested_target(
    section: str, mapping: Marked, steps: list[str], where: Where, dialect: Dialect
) -> tuple[str, Marked] | None:
    """Go from a section into the sections inside it."""
    names = [".".join((section, *steps[:depth])) for depth in range(1, len(steps) + 1)]
    for name in names:
        if name not in SECTIONS:
            dialect.findings.append(Finding(where=where, message=f"`{name}` has no keys"))
            return None
    for step in steps:
        if isinstance(mapping.content, dict):
            empty = Marked(where=where, content={})
            entry = mapping.content.setdefault(step, Entry(where=where, written=step, value=empty))
            if entry.value.content is None:
                entry.value = empty
            mapping = entry.value
    return [section, *names][-1], mapping


def _dataset_target(datasets: Marked, steps: list[str], where: Where, dialect: Dialect) -> tuple[str, Marked] | None:
    if not steps:
        return "datasets", datasets
    item = _item(datasets, steps[0], where, dialect)
    if item is None:
        return None
    if len(steps) > 1:
        message = f"`datasets.{steps[0]}.{steps[1]}` has no keys"
        dialect.findings.append(Finding(where=where, message=message))
        return None
    return "datasets", item


def _item(datasets: Marked, step: str, where: Where, dialect: Dialect) -> Marked | None:
    items = datasets.items
    if not (step.isascii() and step.isdigit()):
        message = f"`{step}` is not the number of a dataset"
        hint = "datasets are numbered from 0: datasets.0.path=a.jsonl"
        dialect.findings.append(Finding(where=where, message=message, hint=hint))
        return None
    if len(step) > 6 or int(step) >= len(items):
        message = f"there is no dataset {shorten(step).strip(chr(39))}; the config has {len(items)}, numbered from 0"
        dialect.findings.append(Finding(where=where, message=message))
        return None
    return items[int(step)]


def _displace(root: Marked, name: str, entry: Entry, dialect: Dialect) -> None:
    """Drop a key of the file that decides the same thing, with a notice."""
    if entry.value.content is None:
        return
    for group in _EITHER_OR:
        for other in group if name in group else ():
            if other != name and other in root.entries and root.entries[other].where.layer == 0:
                displaced = root.entries.pop(other)
                if displaced.value.content is not None:
                    message = f"replaces `{displaced.written}` in the file"
                    dialect.notices.append(Finding(where=entry.where, message=message))
