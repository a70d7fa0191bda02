"""A key of the config in words: its type and bounds, its default, its other names, its meaning and its relations.

docs/config.md and `ratel explain` are made from these. The meaning is the docstring under the key; what it needs and
excludes are the relations in its type.

Invariant: only what the schema, the tables of aliases and those of other trainers' keys say; nothing is written down
twice.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ratel_cli.config.keys.base import Section
from ratel_cli.config.keys.relation import words_of_relations
from ratel_cli.config.keys.sections import MOST
from ratel_cli.config.keys.topics import TOPICS, topic_of
from ratel_cli.config.others.aliases import ALIASES, INVERSE, SECTIONS, VALUE_ALIASES, canonical_key
from ratel_cli.config.others.foreign import foreign_key
from ratel_cli.config.others.recorded import RecordedOutcome, outcomes_of
from ratel_cli.errors import BadInput

_PLAIN_TYPES = {"bool": "`true` or `false`", "int": "whole number", "float": "number", "str": "text", "Path": "path"}

_SECTION_NAMES = tuple(filter(None, SECTIONS))
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
_FATES = {
    "kept": "kept",
    "translated": "translated",
    "dropped": "ignored",
    "decision": "undecided",
    "refused": "impossible",
    "parts": "translated",
}
"""By what the tables call it: what becomes of a key."""
_MOST_CLOSE = 3


@dataclass(frozen=True, slots=True)
class Line:
    """A line of what `ratel explain` prints."""

    text: str
    indent: int = 2
    """Columns before what does not fit into the line."""


def overview() -> list[Line]:
    """What one can ask: the keys of each group, the sections, and words for what trainers do."""
    groups: dict[str, list[str]] = {}
    for name in SECTIONS[""].model_fields:
        if name in GROUPS:
            title = GROUPS[name]
        groups.setdefault(title, []).append(name)
    groups |= {f"in {section}": list(SECTIONS[section].model_fields) for section in _SECTION_NAMES}
    groups["words"] = [topic.words.split()[0] for topic in TOPICS]
    return [
        Line(
            "ratel explain KEY explains a key, such as learning_rate, storage or datasets.type; a key of another "
            "trainer, such as wandb_project; or a word, such as qlora."
        ),
        *(Line(f"{title}: {', '.join(names)}") for title, names in groups.items()),
    ]


def overview_json() -> dict[str, object]:
    """What `ratel explain --json` prints without a key."""
    return {"keys": all_keys(), "words": [word for topic in TOPICS for word in topic.words.split()]}


def explain(key: str) -> list[Line]:
    """What a key means, in a few lines, and what the keys of a section mean, in a line each.

    The dotted name of a key has its section. What people call something gives what Ratel has of it. Raises BadInput for
    an unknown one.
    """
    topic = None if _is_own(key) else topic_of(key)
    if topic is not None:
        state = "" if topic.is_supported else " (not supported)"
        keys = f"keys: {', '.join(topic.keys)}" if topic.keys else ""
        read = [] if topic.keys and key in topic.keys else _translations(outcomes_of(key))
        return _entry(
            f"{key}: {topic.name}{state}", *filter(None, (topic.text, *read, keys, topic.page and f"see {topic.page}"))
        )
    others = _others(key)
    if others is not None:
        return _entry(f"{key}: a key of other trainers ({others.fate})", *others.lines)
    section, name = _found(key)
    title = key if name == _last(key) else f"{key}: another name of {name}"
    words = (meaning_of(section, name), *relations_in_words(section, name))
    entry = _entry(title, ", ".join(facts_of(section, name)), *words)
    return entry + _lines_of_section(_dotted(section, name))


def explain_json(key: str) -> dict[str, object]:
    """What `ratel explain --json` prints. Raises BadInput for an unknown key.

    `fate` is null for a key of Ratel's own, and for what Ratel does; for another trainer's it says what becomes of it.
    `default` is null where
    there is none, or where the meaning says what stands for an absent value. `keys`: those of a section.
    """
    topic = None if _is_own(key) else topic_of(key)
    if topic is not None and not topic.is_supported:
        return {"key": key, "fate": "impossible", "reason": f"{topic.name}: not supported", "hint": topic.text}
    if topic is not None:
        return {"key": key, "fate": None, "meaning": topic.text.replace("`", ""), "keys": list(topic.keys)}
    others = _others(key)
    if others is not None:
        return {"key": key, "fate": others.fate, "reason": "; ".join(others.reasons), "hint": others.hint or None}
    section, name = _found(key)
    field, dotted = SECTIONS[section].model_fields[name], _dotted(section, name)
    is_plain = isinstance(field.default, str | int | float)
    return {
        "key": dotted,
        "fate": None,
        "other_names": [each for each, ours in ALIASES.get(section, {}).items() if ours == name],
        "type": describe_type(field).replace("`", ""),
        "is_required": field.default is PydanticUndefined,
        "default": field.default if is_plain else None,
        "meaning": whole_meaning_of(section, name).replace("`", ""),
        "keys": [f"{dotted}.{each}" for each in SECTIONS[dotted].model_fields] if dotted in SECTIONS else [],
    }


def _is_own(key: str) -> bool:
    """Whether it is a key of ours, of no section."""
    return canonical_key("", key) in SECTIONS[""].model_fields


def _found(key: str) -> tuple[str, str]:
    """Section and name of a key of ours. Raises BadInput if it is none."""
    section, last = _parts(key)
    if section not in SECTIONS:
        raise BadInput(f"there is no section `{section}`", _closest(key) or f"sections: {', '.join(_SECTION_NAMES)}")
    name = canonical_key(section, last)
    if name not in SECTIONS[section].model_fields:
        raise BadInput(f"there is no key or section `{key}`", _closest(key) or "docs/config.md has all keys")
    return section, name


def _parts(key: str) -> tuple[str, str]:
    """Section and name of a dotted key, without the numbers of items."""
    *sections, last = key.split(".")
    return ".".join(each for each in sections if not each.isdigit()), last


@dataclass(frozen=True, slots=True, kw_only=True)
class _Others:
    """What becomes of a key of other trainers."""

    fate: str
    reasons: tuple[str, ...]
    hint: str = ""

    @property
    def lines(self) -> list[str]:
        return [*self.reasons, *filter(None, [self.hint])]


def _others(key: str) -> _Others | None:
    """What becomes of a key of other trainers; None if it is one of ours, or nobody's. What it is read as is said of
    those that read it; else why it is not is said once."""
    section, name = _parts(key)
    if section in SECTIONS and canonical_key(section, name) in SECTIONS[section].model_fields:
        return None
    outcomes, foreign = outcomes_of(_dotted(section, name)), foreign_key(section, name)
    read = _translations(outcomes)
    if foreign is not None and not read:
        return _Others(fate=foreign.fate, reasons=(foreign.reason,), hint=foreign.hint)
    if not outcomes:
        return None
    whys = dict.fromkeys(each.words for each in outcomes if each.fate != "translated" and each.words)
    return _Others(fate="translated" if read else _FATES[next(iter(outcomes)).fate], reasons=(*read, *whys))


def _translations(outcomes: Mapping[RecordedOutcome, Sequence[str]]) -> list[str]:
    """What the outcomes of a key say of what it is read as."""
    return [f"{', '.join(tools)}: {each.words}" for each, tools in outcomes.items() if each.fate == "translated"]


def _dotted(section: str, name: str) -> str:
    return f"{section}.{name}".lstrip(".")


def _entry(title: str, *more: str) -> list[Line]:
    return [Line(title.replace("`", "")), *(Line(f"  {each}".replace("`", "")) for each in more)]


def _lines_of_section(section: str) -> list[Line]:
    """A line for each key of a section, with the first sentence of its meaning; none if it is no section."""
    if section not in SECTIONS:
        return []
    fields = SECTIONS[section].model_fields
    width = len(section) + 1 + max(map(len, fields))
    return [
        Line(""),
        *(
            Line(f"  {_dotted(section, name):<{width}}  {_first_sentence(meaning_of(section, name))}", indent=width + 4)
            for name in fields
        ),
    ]


def _first_sentence(meaning: str) -> str:
    return meaning.replace("`", "").partition(". ")[0].rstrip(".")


def _closest(key: str) -> str | None:
    """A hint with the keys that may be meant: with a similar name in this section, with this name in others, or else.

    Else: with a name like it, or with a word of their names like it. None if no key is close.
    """
    keys, last = all_keys(), _last(key)
    close = get_close_matches(key, keys, n=_MOST_CLOSE, cutoff=0.8)
    close += [each for each in keys if _last(each) == last]
    if not close:
        words = {word for each in keys for word in _last(each).split("_")}
        word = last if last in words else next(iter(get_close_matches(last, sorted(words), n=1, cutoff=0.8)), None)
        names = get_close_matches(last, sorted({_last(each) for each in keys}), n=1, cutoff=0.7)
        close = [each for each in keys if word in _last(each).split("_") or _last(each) in names]
        close = [each for each in close if each.removesuffix(_last(each)) == key.removesuffix(last)] or close
    meant = [f"`{each}`" for each in dict.fromkeys(close)][:_MOST_CLOSE]
    return f"did you mean {' or '.join(meant)}?" if meant else None


def _last(key: str) -> str:
    """The name of a key without its sections."""
    return key.rpartition(".")[2]


def all_keys() -> list[str]:
    """The dotted names of all keys."""
    return [_dotted(section, key) for section in SECTIONS for key in SECTIONS[section].model_fields]


def meaning_of(section: str, name: str) -> str:
    """The docstring under a key, on one line."""
    return " ".join((SECTIONS[section].model_fields[name].description or "").split())


def relations_in_words(section: str, name: str) -> list[str]:
    """What a key needs and excludes, and when it is ignored, a sentence each."""
    return words_of_relations(SECTIONS[section], name)


def whole_meaning_of(section: str, name: str) -> str:
    """The meaning of a key and its relations, on one line."""
    return " ".join((meaning_of(section, name), *relations_in_words(section, name)))


def facts_of(section: str, name: str) -> list[str]:
    """Type and bounds of a key, its default, and its other names."""
    field = SECTIONS[section].model_fields[name]
    return [describe_type(field), *_default(field, meaning_of(section, name)), *_also(section, name)]


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
    values = VALUE_ALIASES.get(f"{section}.{name}" if section else name, {})
    if values:
        yield "also the values " + ", ".join(f"`{alias}` (`{ours}`)" for alias, ours in values.items())


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
    if origin is dict:
        return ["mapping"]
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
            return f"at most {bound}" if bound != MOST else None
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


def changed_value(value: object) -> str:
    """A value of a key, to be compared with another one: whole numbers without a point."""
    if value is None:
        return "not set"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return describe_value(value) if isinstance(value, float) else str(value)
