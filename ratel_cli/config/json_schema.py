"""The JSON schema of a config: what an editor needs to complete keys, to explain them, and to mark what is wrong.

It is pydantic's, with the docstrings as descriptions, and with what people write that pydantic never sees: other names
of keys and values, a bare path instead of a dataset, a section whose lines are all commented out.

The package has it as a file, `SCHEMA_FILE`, so that a config can name it without a network (`editor_line`).

Invariant: a config that loads without a notice follows the schema. Rules about several keys are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.config.describe import whole_meaning_of
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.others.aliases import ALIASES, INVERSE, SECTIONS, TOP, VALUE_ALIASES

SCHEMA_FILE = Path(__file__).with_name("run.schema.json")

JsonObject = dict[str, "JsonValue"]
JsonValue = str | int | float | bool | None | list["JsonValue"] | JsonObject
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PATH: JsonObject = {"type": "string", "minLength": 1}
_DATASET: JsonObject = {"$ref": "#/$defs/DatasetConfig"}
_DATASETS: tuple[JsonValue, ...] = (_PATH, _DATASET, {"type": "array", "items": {"anyOf": [_PATH, _DATASET]}})
_ALSO: dict[str, tuple[JsonValue, ...]] = {
    "datasets": _DATASETS,
    "test_datasets": _DATASETS,
    "storage": ({"type": "null"},),
    "limits": ({"type": "null"},),
    "storage.paths": (_PATH,),
}
"""By key: what may be written besides what pydantic takes."""
_REQUIRED: dict[str, tuple[str, ...]] = {TOP: ("base_model", "model_shape")}
"""By section, where pydantic does not know it: keys of which there must be one."""


def schema_text() -> str:
    """The schema as the text of a file."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"


def editor_line() -> str:
    """The first line of a config that Ratel writes: where editors with a YAML language server find the schema."""
    return f"# yaml-language-server: $schema={SCHEMA_FILE.resolve().as_uri()}"


def config_schema() -> JsonObject:
    """The schema, in version 2020-12 of JSON Schema."""
    made = RunConfig.model_json_schema()
    definitions = made.pop("$defs")
    sections = {
        name: _section(name, made if name == TOP else definitions[each.__name__]) for name, each in SECTIONS.items()
    }
    top = sections.pop(TOP)
    named: JsonObject = {SECTIONS[name].__name__: section for name, section in sections.items()}
    return {"$schema": _DIALECT, "title": "A run of Ratel", **top, "$defs": named}


def _section(name: str, made: JsonObject) -> JsonObject:
    """One section: pydantic's, with our words and with other names."""
    found = made["properties"]
    assert isinstance(found, dict)
    properties: JsonObject = {}
    for key in SECTIONS[name].model_fields:
        dotted = f"{name}.{key}" if name else key
        value = found[key]
        assert isinstance(value, dict)
        properties[key] = _property(value, dotted, whole_meaning_of(name, key))
    for alias, key in ALIASES.get(name, {}).items():
        ours = properties[key]
        assert isinstance(ours, dict)
        words: JsonObject = {"description": f"Another name of `{key}`. {ours['description']}", "deprecated": True}
        if alias in INVERSE:
            off = str(INVERSE[alias][False]).lower()
            words["description"] = f"`true` is `{key}: false`, and `false` is `{key}: {off}`."
            properties[alias] = {"type": "boolean", **words}
        else:
            properties[alias] = {**ours, **words}
    needed = made.get("required", [])
    assert isinstance(needed, list)
    required: list[JsonValue] = [_one_of(name, [str(key)]) for key in needed]
    required += [_one_of(name, _REQUIRED[name])] if name in _REQUIRED else []
    rules: JsonObject = {"allOf": required} if required else {}
    return {"type": "object", "additionalProperties": False, **rules, "properties": properties}


def _property(made: JsonObject, dotted: str, meaning: str) -> JsonObject:
    value: JsonObject = {key: each for key, each in made.items() if key not in ("title", "description", "default")}
    also = list(_ALSO.get(dotted, ()))
    others = VALUE_ALIASES.get(dotted)
    if others:
        also.append({"enum": list(others)})
    if also:
        value = {"anyOf": [value, *also]}
    default = made.get("default")
    words: JsonObject = {"description": meaning}
    return {**words, **value, **({} if isinstance(default, dict | list | None) else {"default": default})}


def _one_of(section: str, keys: Sequence[str]) -> JsonObject:
    """Return the rule that one of the keys is there, under any of its names."""
    names = [*keys, *(alias for alias, ours in ALIASES.get(section, {}).items() if ours in keys)]
    rules: list[JsonValue] = [{"required": [name]} for name in names]
    return {"anyOf": rules}
