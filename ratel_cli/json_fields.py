"""Typed access to JSON that Ratel wrote earlier and that anything may have happened to since, and the hash of JSON.

Invariant: a reader gets a value of the type that it asked for, or a ValueError that names the key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Read = TypeVar("_Read")


def hash_of(value: object) -> str:
    """The SHA-256 of a value that JSON can express, in hexadecimal digits. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class JsonFields:
    """The fields of one JSON object. Raises ValueError if `values` is no object."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, Mapping):
            raise ValueError("expected an object")
        self._values: Mapping[str, object] = values

    def value(self, key: str) -> object:
        """The value as it is. Raises ValueError if the key is missing."""
        if key not in self._values:
            raise ValueError(f"{key} is missing")
        return self._values[key]

    def names(self) -> list[str]:
        """The keys, in their order."""
        return list(self._values)

    def integer(self, key: str) -> int:
        """A whole number of any sign."""
        return checked_integer(self.value(key), key)

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        return [checked_integer(item, key) for item in self.items(key)]

    def number(self, key: str) -> float:
        """A whole or fractional number."""
        return _checked_number(self.value(key), key)

    def optional_number(self, key: str) -> float | None:
        """A number, or None where the field holds null."""
        return None if self.value(key) is None else self.number(key)

    def text(self, key: str) -> str:
        """A string."""
        return checked_text(self.value(key), key)

    def flag(self, key: str) -> bool:
        """True or false."""
        return _checked_flag(self.value(key), key)

    def fields(self, key: str) -> JsonFields:
        """The object under this key."""
        return JsonFields(self.value(key))

    def items(self, key: str) -> list[object]:
        """A list of anything."""
        return checked_list(self.value(key), key)


def read_as(kind: type[_Read], content: object, **known: object) -> _Read:
    """The dataclass of which `dataclasses.asdict` made `content`: each field has a value of the type that it declares.
    A field with a default may be missing, other keys are ignored; `known` are fields that are not read. The key of a
    field is its name, or the `place` in its metadata, as `time.step_seconds` is in the object `time`. Raises
    ValueError."""
    fields, hints, found = JsonFields(content), _hints(kind), dict(known)  # type: ignore[arg-type]
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        section, _, key = each.metadata.get("place", each.name).rpartition(".")
        place = fields.fields(section) if section else fields
        if each.name not in known and (each.default is dataclasses.MISSING or key in place.names()):
            found[each.name] = _checked(hints[each.name], place.value(key), key)
    return kind(**found)


def read_file_as(kind: type[_Read], path: Path) -> _Read | None:
    """The dataclass that `read_as` finds in a file; None if there is none, or it cannot be read."""
    try:
        return read_as(kind, json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return None


@cache
def _hints(kind: object) -> dict[str, object]:
    return get_type_hints(kind)


def _checked(kind: object, value: object, name: str) -> object:
    """`value` if it is of the declared type, lists as tuples. Raises ValueError that calls it `name`."""
    arguments = get_args(kind)
    match get_origin(kind) or kind:
        case origin if origin is Union or origin is UnionType:
            present = next(each for each in arguments if each is not type(None))
            return None if value is None else _checked(present, value, name)
        case origin if origin is Literal:
            if checked_text(value, name) not in arguments:
                raise ValueError(f"{name} is {value!r}")
            return value
        case origin if origin is tuple:
            return tuple(_checked(arguments[0], item, name) for item in checked_list(value, name))
        case origin if origin is dict:
            (key, item), inner = arguments, JsonFields(value)
            return {_checked(key, each, name): _checked(item, inner.value(each), each) for each in inner.names()}
        case origin if isinstance(origin, type) and dataclasses.is_dataclass(origin):
            return read_as(origin, value)
        case origin:
            return _SCALARS[origin](value, name)


def _checked_number(value: object, name: str) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"{name} is not a number")
    return value


def _checked_flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is neither true nor false")
    return value


def checked_integer(value: object, name: str) -> int:
    """`value` if it is a whole number. Raises ValueError that calls it `name`."""
    if not isinstance(value, int):
        raise ValueError(f"{name} is not a whole number")
    return value


def checked_text(value: object, name: str) -> str:
    """`value` if it is a string. Raises ValueError that calls it `name`."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")
    return value


def checked_list(value: object, name: str) -> list[object]:
    """`value` as a list, if it is a list or a tuple. Raises ValueError that calls it `name`."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is not a list")
    return list(value)


_SCALARS: dict[object, Callable[[object, str], object]] = {
    int: checked_integer,
    float: _checked_number,
    str: checked_text,
    bool: _checked_flag,
    Path: lambda value, name: Path(checked_text(value, name)),
}
