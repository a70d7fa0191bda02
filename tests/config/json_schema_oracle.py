"""Whether a value follows a JSON schema: the keywords of version 2020-12 that describe a config.

An independent reading of the standard. A keyword that is not known here is an error, so nothing goes unchecked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

Json = object
Object = Mapping[str, Json]
Check = Callable[[object, Json, Object, Object, str], Iterator[str]]

WORDS = {"$schema", "$defs", "title", "description", "default", "deprecated"}
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": (int, float),
    "null": type(None),
}


def violations(value: object, schema: Object, root: Object, at: str = "") -> Iterator[str]:
    """What in the value does not follow the schema; `at` is the path to it."""
    for keyword, rule in schema.items():
        if keyword in WORDS:
            continue
        yield from _CHECKS[keyword](value, rule, schema, root, at)


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[name])  # type: ignore[arg-type]


def _type(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    if not _is(value, rule):
        yield f"{at}: must be {rule}"


def _ref(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    yield from violations(value, root["$defs"][rule.removeprefix("#/$defs/")], root, at)


def _any_of(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    found = [list(violations(value, each, root, at)) for each in rule]
    if all(found):
        yield f"{at}: none of {[each[0] for each in found]}"


def _all_of(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    for each in rule:
        yield from violations(value, each, root, at)


def _enum(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    if not any(type(value) is type(each) and value == each for each in rule):
        yield f"{at}: not one of {rule}"


def _const(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    yield from _enum(value, [rule], schema, root, at)


def _bound(holds: Callable[[float, float], bool]) -> Check:
    def check(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
        if _is(value, "number") and not holds(value, rule):
            yield f"{at}: out of bounds"

    return check


def _pattern(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    if isinstance(value, str) and not re.search(rule, value):
        yield f"{at}: does not match {rule}"


def _min_length(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    if isinstance(value, str) and len(value) < rule:
        yield f"{at}: too short"


def _required(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{at}: {key} is missing" for key in rule if key not in value)


def _properties(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    for key, each in value.items() if isinstance(value, dict) else ():
        if key in rule:
            yield from violations(each, rule[key], root, f"{at}.{key}")


def _additional(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    for key, each in value.items() if isinstance(value, dict) else ():
        if key in schema.get("properties", {}):
            continue
        if rule is False:
            yield f"{at}.{key}: unknown"
        elif isinstance(rule, dict):
            yield from violations(each, rule, root, f"{at}.{key}")


def _names(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    for key in value if isinstance(value, dict) else ():
        yield from violations(key, rule, root, f"{at}.{key}")


def _items(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    for number, each in enumerate(value) if isinstance(value, list) else ():
        yield from violations(each, rule, root, f"{at}.{number}")


def _min_items(value: object, rule: Json, schema: Object, root: Object, at: str) -> Iterator[str]:
    if isinstance(value, list) and len(value) < rule:
        yield f"{at}: fewer than {rule} items"


_CHECKS = {
    "type": _type,
    "$ref": _ref,
    "anyOf": _any_of,
    "allOf": _all_of,
    "enum": _enum,
    "const": _const,
    "minimum": _bound(lambda value, rule: value >= rule),
    "maximum": _bound(lambda value, rule: value <= rule),
    "exclusiveMinimum": _bound(lambda value, rule: value > rule),
    "exclusiveMaximum": _bound(lambda value, rule: value < rule),
    "pattern": _pattern,
    "minLength": _min_length,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "items": _items,
    "minItems": _min_items,
}
