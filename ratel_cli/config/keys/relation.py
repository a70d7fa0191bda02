"""What a key asks of other keys: the words for it, and the check.

A relation stands with its key, among the metadata of the field's type. It is an error (`needs`, `excludes`), or what a
run only warns of: that it ignores the key (`only_if`, `ignored_with`), or that a value can hardly be meant (`doubt`).

Invariant: a relation is data. The check, docs/config.md, the JSON schema and `ratel explain` read the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from ratel_cli.config.keys.base import Contradiction, Section

Value = str | int | bool
Kind = Literal["needs", "excludes", "only_if", "ignored_with", "doubt"]
ANY_TEXT = "*"
_LISTS = ("datasets", "test_datasets")
"""Keys of these are named without their section: each item has its own."""
_ERRORS: tuple[Kind, ...] = ("needs", "excludes")
_ABSENT: tuple[Kind, ...] = ("needs", "only_if")
"""Those that ask for another key; the others are about one that is there."""
_VERBS: Mapping[Kind, str] = {
    "needs": "needs {}",
    "excludes": "excludes {}",
    "only_if": "is ignored without {}",
    "ignored_with": "is ignored with {}",
    "doubt": "{} gets a warning",
}


@dataclass(frozen=True, slots=True)
class Is:
    """That a key is set, or that it has one of some values."""

    key: str
    """A key of the same section, or a dotted one: of a section in it, or of any of a list of sections."""
    values: tuple[Value, ...] = ()
    """A `*` in a text stands for anything. Empty: the key is set."""
    is_not: bool = False
    """It is otherwise."""

    def holds(self, config: Section) -> bool:
        """Whether it is so."""
        return self.is_not != bool(self.meant(config))

    def meant(self, config: Section) -> list[object]:
        """The values in the config that it is about."""
        if not self.values:
            return [getattr(config, self.key)] if _is_set(config, self.key) else []
        return [value for value in _values(config, self.key) if _is_one_of(value, self.values)]

    def state(self, config: Section) -> str:
        """How the key is."""
        value = getattr(config, self.key)
        if not self.values and _is_set(config, self.key):
            return f"`{self.key}` is set"
        is_empty = value is None or value is False or value == ()
        return f"`{self.key}` is {'not set' if is_empty else _shown(value)}"

    def __str__(self) -> str:
        return _named(self.key, self.values)


@dataclass(frozen=True, slots=True)
class Beyond:
    """That a number is more than another one, or less."""

    key: str
    bound: float | str
    """A number, or the key that has it."""
    is_below: bool = False

    def holds(self, config: Section) -> bool:
        """Whether both are there, and it is so."""
        value, bound = getattr(config, self.key), self._bound(config)
        return value is not None and bound is not None and bool(value < bound if self.is_below else value > bound)

    def state(self, config: Section) -> str:
        """The numbers."""
        found = f"`{self.key}` is {_shown(getattr(config, self.key))}"
        other = f", but `{self.bound}` is {_shown(self._bound(config))}" if isinstance(self.bound, str) else ""
        return found + other

    def _bound(self, config: Section) -> float | None:
        bound: float | None = getattr(config, self.bound) if isinstance(self.bound, str) else self.bound
        return bound

    def __str__(self) -> str:
        bound = f"`{self.bound}`" if isinstance(self.bound, str) else _shown(self.bound)
        return f"`{self.key}` {'below' if self.is_below else 'above'} {bound}"


Condition = Is | Beyond
Guards = tuple[tuple[Is, ...], ...]
"""Where a relation counts: one condition of each tuple holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What a key that is set asks of others."""

    kind: Kind
    others: tuple[Condition, ...]
    """One of them is needed, or none may hold."""
    why: str = ""
    hint: str | None = None
    of: tuple[Value, ...] = ()
    """The key's values that it is about. Empty: whatever the key is set to."""
    but: tuple[Value, ...] = ()
    """Values that it is not about."""
    when: Guards = ()
    at: tuple[str, ...] = ()
    """Keys at which the error is shown, before the key itself."""

    @property
    def is_error(self) -> bool:
        """Whether a run does not begin."""
        return self.kind in _ERRORS

    def found(self, key: str, config: Section) -> Contradiction | None:
        """What is wrong; None if there is nothing."""
        holding = [each for each in self.others if each.holds(config)]
        if bool(holding) == (self.kind in _ABSENT) or not self._counts(key, config):
            return None
        about = (holding or self.others)[0]
        others = (each.key for each in holding or self.others if self.is_error and "." not in each.key)
        keys = tuple(dict.fromkeys((*self.at, key, *others)))
        return Contradiction(keys=keys, message=self._message(key, about, config), hint=self.hint)

    def _counts(self, key: str, config: Section) -> bool:
        value, default = getattr(config, key), type(config).model_fields[key].default
        if self.is_error:
            is_meant = _is_set(config, key)
        else:
            is_meant = self.kind == "doubt" or (key in config.model_fields_set and (bool(self.of) or value != default))
        is_meant = is_meant and not _is_one_of(value, self.but) and (not self.of or _is_one_of(value, self.of))
        return is_meant and all(any(each.holds(config) for each in several) for several in self.when)

    def _message(self, key: str, about: Condition, config: Section) -> str:
        why = f": {self.why}" if self.why else ""
        if self.kind == "doubt":
            return about.state(config) + why
        if not self.is_error:
            return f"`{key}` is ignored: {self.why or about.state(config)}"
        of_value = self.of and ANY_TEXT not in self.of
        subject = _named(key, (getattr(config, key),)) if of_value else f"`{key}`"
        values = about.values if isinstance(about, Is) else ()
        if self.kind == "needs":
            state = f"; {about.state(config)}" if values and "." not in about.key else ""
            return f"{subject} needs {_listed(map(str, self.others))}{why or state}"
        if isinstance(about, Is) and values:
            [value, *_] = about.meant(config)
            return f"{subject} is not for {_named(about.key, (value,))}{why}"
        return f"{about} and {subject} are both set{why}"

    def words(self) -> str:
        """The relation as a sentence about the key."""
        verb = _VERBS[self.kind].format(_listed(map(str, self.others)))
        if self.kind == "doubt":
            return self._sentence(verb)
        if self.of or self.but:
            values = "a text" if ANY_TEXT in self.of else _listed(f"`{_shown(each)}`" for each in self.of or self.but)
            return self._sentence(f"{values if self.of else f'any value but {values}'} {verb}")
        return self._sentence(f"it {verb}" if self.when else verb.removeprefix("is "))

    def words_for(self, key: str, other: str) -> str | None:
        """The relation as a sentence about another key that it excludes; None if it does not."""
        about = next((each for each in self.others if isinstance(each, Is) and each.key == other), None)
        if self.kind != "excludes" or about is None:
            return None
        subject = _listed(f"`{_shown(each)}`" for each in about.values) + " " if about.values else ""
        named = f"a text in `{key}`" if ANY_TEXT in self.of else _named(key, self.of)
        named += f" other than {_listed(f'`{_shown(each)}`' for each in self.but)}" if self.but else ""
        return self._sentence(f"{subject or ('it ' if self.when else '')}excludes {named}")

    def is_about(self, other: str) -> bool:
        """Whether it is about this key alone."""
        return {each.key for each in self.others} == {other}

    def _sentence(self, words: str) -> str:
        guards = [f"{'without' if each[0].is_not else 'with'} {_listed(map(str, each))}" for each in self.when]
        lead = f"{_listed(guards, 'and')}, " if guards else ""
        text = lead + words + (f": {self.why}" if self.why else "") + "."
        return text[0].upper() + text[1:]


def has(key: str, *values: Value) -> Is:
    """The condition that a key is set, or has one of these values."""
    return Is(key, values)


def unless(key: str, *values: Value) -> Is:
    """The condition that a key is not set, or has none of these values."""
    return Is(key, values, is_not=True)


def needs(
    *others: str | Is,
    why: str = "",
    hint: str | None = None,
    of: tuple[Value, ...] = (),
    but: tuple[Value, ...] = (),
    when: Guards = (),
) -> Relation:
    """Error: the key is set without any of the others."""
    return Relation(kind="needs", others=_conditions(others), why=why, hint=hint, of=of, but=but, when=when)


def excludes(
    *others: str | Is,
    why: str = "",
    hint: str = "remove one of them",
    of: tuple[Value, ...] = (),
    but: tuple[Value, ...] = (),
    when: Guards = (),
    at: tuple[str, ...] = (),
) -> Relation:
    """Error: the key and one of the others are set."""
    several = _conditions(others)
    return Relation(kind="excludes", others=several, why=why, hint=hint, of=of, but=but, when=when, at=at)


def only_if(*others: str | Is, why: str = "", when: Guards = ()) -> Relation:
    """Warning: the key is ignored, because none of the others is set."""
    return Relation(kind="only_if", others=_conditions(others), why=why, when=when)


def ignored_with(*others: str | Is, why: str = "", of: tuple[Value, ...] = ()) -> Relation:
    """Warning: the key is ignored, because one of the others is set."""
    return Relation(kind="ignored_with", others=_conditions(others), why=why, of=of)


def doubt(condition: Condition, why: str, hint: str | None = None, *, when: Guards = ()) -> Relation:
    """Warning: a value of the key can hardly be meant."""
    return Relation(kind="doubt", others=(condition,), why=why, hint=hint, when=when)


@cache
def relations_of(section: type[Section]) -> Mapping[str, tuple[Relation, ...]]:
    """The relations of a section's keys, by key."""
    found = {
        key: tuple(each for each in field.metadata if isinstance(each, Relation))
        for key, field in section.model_fields.items()
    }
    return {key: several for key, several in found.items() if several}


def words_of_relations(section: type[Section], key: str) -> list[str]:
    """What a key needs and excludes, and when it is ignored: a sentence each."""
    own = [each.words() for each in relations_of(section).get(key, ())]
    excluded = (
        each.words_for(other, key)
        for other, several in relations_of(section).items()
        for each in several
        if other != key
    )
    return list(dict.fromkeys(filter(None, (*own, *excluded))))


def keys_ignored(section: type[Section], kind: Kind, other: str) -> tuple[str, ...]:
    """The keys that are always ignored without another one (`only_if`), or with it (`ignored_with`)."""
    return tuple(
        key
        for key, several in relations_of(section).items()
        if any(each.kind == kind and not each.of and not each.when and each.is_about(other) for each in several)
    )


def broken(config: Section) -> list[Contradiction]:
    """What is wrong about several keys, by the relations that are errors."""
    return list(_found(config, are_errors=True))


def doubtful_keys(config: Section) -> list[Contradiction]:
    """Keys that the user set and that this run ignores, and values that can hardly be meant, each with the reason."""
    return list(_found(config, are_errors=False))


def _found(config: Section, *, are_errors: bool) -> Iterator[Contradiction]:
    for key, several in relations_of(type(config)).items():
        for relation in several:
            if relation.is_error == are_errors and (found := relation.found(key, config)) is not None:
                yield found


def _conditions(others: tuple[str | Is, ...]) -> tuple[Is, ...]:
    return tuple(Is(each) if isinstance(each, str) else each for each in others)


def _is_set(config: Section, key: str) -> bool:
    """Whether a key is neither empty nor zero. Where nothing is the default, zero is a value like others."""
    value = getattr(config, key)
    return bool(value) or (type(config).model_fields[key].default is None and value == 0)


def _values(config: Section, key: str) -> tuple[object, ...]:
    """The value of a key; those of a dotted one in a list of sections."""
    section, _, name = key.rpartition(".")
    found = getattr(config, section) if section else config
    return tuple(getattr(each, name) for each in (found if isinstance(found, tuple) else (found,)))


def _is_one_of(value: object, values: tuple[Value, ...]) -> bool:
    texts = (each for each in values if isinstance(each, str))
    return value in values or (isinstance(value, str) and any(fnmatchcase(value, each) for each in texts))


def _named(key: str, values: Iterable[object]) -> str:
    """A key with its values as a person would write it."""
    section, _, last = key.rpartition(".")
    of_item, name = ("datasets of ", last) if section in _LISTS else ("", key)
    first, *others = [*map(_shown, values)] or [""]
    return of_item + _listed([f"`{name}: {first}`" if first else f"`{name}`", *(f"`{each}`" for each in others)])


def _listed(words: Iterable[str], conjunction: str = "or") -> str:
    *others, last = words
    return f" {conjunction} ".join(filter(None, (", ".join(others), last)))


def _shown(value: object) -> str:
    """A value in words, as a person writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value).replace(ANY_TEXT, "…")
