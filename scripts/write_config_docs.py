"""Writes docs/config.md: every key of a run's config, from the docstrings of `config/schema.py` and the alias tables.

    python -m scripts.write_config_docs

`tests/test_docs.py` fails while the file differs from what this module would write. Only the introduction and the
titles of the groups stand here; types, bounds, defaults, meanings and aliases come from the schema itself.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ratel_cli.config.aliases import ALIASES, FOREIGN, FOREIGN_PREFIXES, INVERSE, SECTIONS, TOP, VALUE_ALIASES
from ratel_cli.config.sections import Section

DESTINATION = Path(__file__).parents[1] / "docs" / "config.md"
COMMAND = "python -m scripts.write_config_docs"

GROUPS: Mapping[str, str] = {
    "base_model": "Model",
    "datasets": "Data",
    "micro_batch_size": "Batch and length",
    "learning_rate": "Optimizer",
    "dtype": "Computing",
    "storage": "Storage and memory",
    "output_dir": "Output, saving and evaluation",
}
"""The title of each group of top-level keys, by the group's first key."""

SECTION_TITLES: Mapping[str, str] = {
    TOP: "",
    "datasets": "Each item of `datasets`",
    "storage": "In `storage`",
    "storage.snapshot": "In `storage.snapshot`",
    "limits": "In `limits`",
    "model_shape": "In `model_shape`",
}

INTRODUCTION = f"""\
# Configuration

<!-- Generated from ratel_cli/config/schema.py. Do not edit; run: {COMMAND} -->

A run is described by one YAML file. Every key has a default except `base_model` and `datasets`, so this is a whole
config:

```yaml
base_model: Qwen/Qwen3-8B
datasets: train.jsonl
```

* **On the command line**, `key=value` arguments override the file: `learning_rate=1e-5`, `storage.engine=threads`,
  `datasets.0.path=other.jsonl`, `storage.paths=[/mnt/a,/mnt/b]`. Values are YAML; the first `=` divides.
* **Names** are axolotl's where axolotl has one. Names of other trainers are accepted with a notice; they are listed
  below each key as "also".
* **Unknown keys are errors**, each with file, line, column and the nearest known key. All errors of a config are
  reported at once. Keys of other trainers that mean something Ratel does not do are [listed below](#rejected-keys)
  with the reason.
* **Sizes** are numbers of bytes or texts such as `24GiB`, `500MB`. `1e-5` is a number, as in YAML 1.2.

The config with every default filled in is written to `run/config.yaml` of the output directory.
"""

REJECTED = """\
## Rejected keys

These keys of other trainers are rejected with the reason and what to do instead. `…` stands for any ending.

| key | why | what to do |
|---|---|---|
"""


_PLAIN_TYPES = {"bool": "`true` or `false`", "int": "whole number", "float": "number", "str": "text", "Path": "path"}


def main() -> None:
    """Write the file."""
    DESTINATION.write_text(config_page(), encoding="utf-8")
    print(f"wrote {DESTINATION}")


def config_page() -> str:
    """The whole content of docs/config.md."""
    assert GROUPS.keys() <= SECTIONS[TOP].model_fields.keys(), "a group begins with a key that does not exist"
    parts = [INTRODUCTION]
    for section in sorted(SECTIONS, key=list(SECTION_TITLES).index):
        if section != TOP:
            parts.append(f"## {SECTION_TITLES[section]}\n")
        for name, field in SECTIONS[section].model_fields.items():
            if section == TOP and name in GROUPS:
                parts.append(f"## {GROUPS[name]}\n")
            parts.append(_entry(section, name, field))
    parts.append(REJECTED + "\n".join(_rejected_rows()) + "\n")
    return "\n".join(parts)


def _entry(section: str, name: str, field: FieldInfo) -> str:
    """One key: its heading, a line of facts, and its meaning."""
    key = f"{section}.{name}" if section else name
    meaning = " ".join((field.description or "").split())
    facts = [describe_type(field), *_default(field, meaning), *_also(section, name)]
    return f"### `{key}`\n\n{' · '.join(facts)}\n\n{meaning}\n"


def _default(field: FieldInfo, meaning: str) -> Iterator[str]:
    """Nothing where the meaning says what stands for an absent value."""
    if field.default is PydanticUndefined:
        yield "required"
    elif field.default is None or field.default == () or isinstance(field.default, Section | Path):
        explained = isinstance(field.default, Section) or re.search(r"Default:|Required\.", meaning)
        yield from () if explained else ("not set by default",)
    else:
        yield f"default `{describe_value(field.default)}`"


def _also(section: str, name: str) -> Iterator[str]:
    """The other names of a key, and of its values."""
    names = [
        f"`{alias}`" + (" (inverse)" if alias in INVERSE else "")
        for alias, ours in ALIASES.get(section, {}).items()
        if ours == name
    ]
    if names:
        yield f"also {', '.join(names)}"
    values = VALUE_ALIASES.get(name, {}) if section == TOP else {}
    if values:
        yield "also the values " + ", ".join(f"`{alias}` (`{ours}`)" for alias, ours in values.items())


def _rejected_rows() -> Iterator[str]:
    """One row for each reason."""
    keys: dict[tuple[str, str], list[str]] = {}
    for key, reason in FOREIGN.items():
        keys.setdefault(reason, []).append(f"`{key}`")
    for prefix, reason in FOREIGN_PREFIXES.items():
        keys.setdefault(reason, []).append(f"`{prefix}…`")
    for (why, instead), names in keys.items():
        yield f"| {', '.join(names)} | {why} | {instead} |"


def describe_type(field: FieldInfo) -> str:
    """A field's type and bounds, in the words of a person's YAML."""
    for extra in field.metadata:
        if isinstance(extra, str):
            return extra
    *others, last = _type_words(field.annotation)
    if type(None) in get_args(field.annotation) and field.default is not None:
        others, last = [*others, last], "`null`"
    words = " or ".join(filter(None, (", ".join(others), last)))
    bounds = [bound for extra in field.metadata if (bound := _bound(extra))]
    return ", ".join([words, *bounds])


def _type_words(annotation: object) -> Iterable[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_words(arguments[0])
    if origin is Literal:
        return [f"`{choice}`" for choice in arguments]
    if origin in (Union, types.UnionType):
        return [words for each in arguments if each is not type(None) for words in _type_words(each)]
    if origin is tuple:
        return [f"list of {words}s" for words in _type_words(arguments[0])]
    assert isinstance(annotation, type)
    if issubclass(annotation, Section):
        return ["mapping"]
    return [_PLAIN_TYPES[annotation.__name__]]


def _bound(constraint: object) -> str | None:
    match constraint:
        case Ge(ge=0):
            return "not negative"
        case Ge(ge=bound):
            return f"at least {bound}"
        case Gt(gt=bound):
            return f"more than {bound}"
        case Le(le=bound):
            return f"at most {bound}"
        case Lt(lt=9223372036854775808):
            return "below 2^63"
        case Lt(lt=bound):
            return f"below {bound}"
        case _:
            return None


def describe_value(value: object) -> str:
    """A default as it would be written in YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        mantissa, _, exponent = f"{value:g}".partition("e")
        return f"{mantissa}e{int(exponent)}" if exponent else str(value)
    return str(value)


if __name__ == "__main__":
    main()
