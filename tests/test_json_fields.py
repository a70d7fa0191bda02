"""Dataclasses are read back from their own JSON, and from nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

from ratel_cli.json_fields import read_as


@dataclass(frozen=True)
class Inner:
    name: str
    size: int | None


@dataclass(frozen=True)
class Outer:
    share: float
    is_used: bool
    kind: Literal["one", "two"]
    sizes: tuple[int, ...]
    inner: Inner
    others: tuple[Inner, ...]


OUTER = Outer(0.5, False, "two", (3, 0), Inner("a", None), (Inner("b", 7),))
CONTENT: dict[str, object] = json.loads(json.dumps(asdict(OUTER)))


def test_what_was_written_is_read() -> None:
    assert read_as(Outer, CONTENT) == OUTER
    assert read_as(Outer, {**CONTENT, "format_version": 3}) == OUTER, "other keys are left alone"
    assert read_as(Inner, {"size": 7}, name="b") == Inner("b", 7), "a field that is known is not read"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": "0.5"}, "share is not a number"),
        ({"is_used": 0}, "is_used is neither true nor false"),
        ({"kind": "three"}, "kind is 'three'"),
        ({"kind": None}, "kind is not text"),
        ({"sizes": 3}, "sizes is not a list"),
        ({"sizes": [3, "0"]}, "sizes is not a whole number"),
        ({"inner": None}, "expected an object"),
        ({"inner": {"name": "a"}}, "size is missing"),
        ({"others": [{"name": 1, "size": 2}]}, "name is not text"),
        ({"others": [{"name": "b", "size": 2.5}]}, "size is not a whole number"),
    ],
)
def test_what_is_of_another_type_is_rejected(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_as(Outer, CONTENT | changes)


def test_what_is_missing_is_named() -> None:
    for key in CONTENT:
        with pytest.raises(ValueError, match=f"{key} is missing"):
            read_as(Outer, {name: value for name, value in CONTENT.items() if name != key})


@dataclass(frozen=True)
class Others:
    places: tuple[Path, ...] = ()
    shares: dict[Literal["a", "b"], float] | None = None


def test_what_has_a_default_may_be_missing() -> None:
    assert read_as(Others, {}) == Others()
    read = read_as(Others, {"places": ["x"], "shares": {"a": 1, "b": 0.5}})
    assert read == Others((Path("x"),), {"a": 1, "b": 0.5})
    for wrong, message in (
        ({"places": [1]}, "places is not text"),
        ({"shares": {"c": 1.0}}, "shares is 'c'"),
        ({"shares": {"a": "1"}}, "a is not a number"),
        ({"shares": []}, "expected an object"),
    ):
        with pytest.raises(ValueError, match=message):
            read_as(Others, wrong)
