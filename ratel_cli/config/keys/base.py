"""What all sections of a config share: how strict they are, and the errors that their validators raise.

Invariant: a validator raises only `rejection`, in words that a user reads. A rule about several keys raises
`contradictions`, so that each can be shown at its own key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, without coercion, with docstrings as help texts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


_AnySection = TypeVar("_AnySection", bound=Section)


def without_defaults(section: _AnySection | None) -> _AnySection | None:
    """None for a section that says nothing but its defaults, so that a run is the same with and without it."""
    return None if section is None or section == type(section)() else section


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Something wrong about several keys that are valid by themselves."""

    keys: tuple[str, ...]
    """The keys. The error is shown at the first of these that the user wrote."""
    message: str
    hint: str | None = None
    within: tuple[str | int, ...] = ()
    """The key inside the value of the first of `keys` at which the error is shown instead."""


def rejection(words: str, hint: str | None = None) -> PydanticCustomError:
    """The error that a field's validator raises. `words` complete a sentence that begins with the key."""
    return PydanticCustomError("rejected", "{words}", {"words": words, "hint": hint})


def contradictions(found: list[Contradiction]) -> PydanticCustomError:
    """The error that a section's validator raises, with all its contradictions at once."""
    return PydanticCustomError(
        "contradictions", "{words}", {"words": "; ".join(each.message for each in found), "found": tuple(found)}
    )
