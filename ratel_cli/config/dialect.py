"""From the configs of other trainers to ours: renames keys, spells out shorthands, rejects unknown keys.

It works on the marked tree, so that every note and every error has its place.

Invariant: afterwards a mapping has only keys of its section, each at most once and under our name. Everything that was
dropped has an outcome with its reason, and what Ratel cannot do has a finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.config.describe import describe_value
from ratel_cli.config.others.aliases import (
    ALIASES,
    INVERSE,
    SECTIONS,
    TOP,
    VALUE_ALIASES,
    VALUE_NOTES,
    canonical_key,
    explain_unknown,
    is_dataset_type,
    section_in,
)
from ratel_cli.config.others.foreign import fate_of, foreign_key
from ratel_cli.config.others.their_datasets import each_file, translate_dataset
from ratel_cli.config.others.translations import translate_top_level
from ratel_cli.config.yaml.reporting import keys_of_set
from ratel_cli.config.yaml.yaml_marks import Entry, Finding, Marked, Where, plain, show

_OTHER_DEFAULTS: Mapping[str, str] = {
    "output_dir": "outputs/ and the name of the config file",
    "micro_batch_size": "1, or what `tokens_per_step` leaves to the plan",
    "gradient_accumulation_steps": "1, or what `tokens_per_step` leaves to the plan",
    "warmup_ratio": "0.03, or 0 if `warmup_steps` is set",
}
"""Defaults that follow from other keys."""

Fate = Literal["kept", "translated", "ignored", "noted", "undecided", "impossible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOutcome:
    """What became of one key that a user wrote."""

    where: Where
    written: str
    """The key with its section: `datasets.split`."""
    value: str
    """The value, shortened."""
    fate: Fate
    ours: str = ""
    """What it is read as."""
    reason: str = ""


class Dialect:
    """Translates marked trees in place, and collects the findings, the notices and what became of each key."""

    def __init__(self, findings: list[Finding], *, forgiving: bool = False) -> None:
        """A forgiving dialect drops what Ratel does not know or leaves undecided; otherwise that is an error."""
        self.findings = findings
        self.notices: list[Finding] = []
        self.outcomes: list[KeyOutcome] = []
        self.doubtful: set[tuple[str, ...]] = set()
        """Keys that a finding is about. If such a key is absent, that is no further finding."""
        self._forgiving = forgiving
        self._recorded: set[tuple[Where, str]] = set()
        self._read: dict[Where, list[tuple[str, str, str]]] = {}
        """By place: what is written there, what it is read as, and a remark."""
        self._empty: dict[Where, tuple[str, str]] = {}
        """By place: an empty key, and its default."""
        self._section = TOP

    def translate(self, section: str, marked: Marked) -> None:
        """Translate one section, whatever its value is."""
        if section == "datasets":
            self._spread(marked)
            for item in marked.content if isinstance(marked.content, list) else ():
                self.translate_keys(section, item)
        elif section in ("storage", "limits") and marked.content is None:
            marked.content = {}  # a section whose lines are all commented out
        else:
            self.translate_keys(section, marked)

    def translate_item(self, item: Marked) -> None:
        """Translate one dataset: a mapping or a bare path."""
        self._spread_item(item)
        self.translate_keys("datasets", item)

    def _spread(self, marked: Marked) -> None:
        if isinstance(marked.content, str | dict):
            marked.content = [replace(marked)]
        for item in marked.content if isinstance(marked.content, list) else ():
            self._spread_item(item)
        if isinstance(marked.content, list):
            marked.content = [each for item in marked.content for each in each_file(item)]

    def _spread_item(self, item: Marked) -> None:
        keys_of_set(item)

    def translate_keys(self, section: str, marked: Marked) -> None:
        """Translate some keys of a section; for the section `datasets`, the keys of one dataset."""
        if not isinstance(marked.content, dict):
            return
        self._section = section
        if section == TOP:
            translate_top_level(marked.content, self)
        elif section == "datasets":
            translate_dataset(marked.content, self)
        translated: dict[str, Entry] = {}
        for written, entry in marked.content.items():
            self._section = section
            key = canonical_key(section, written)
            if key not in SECTIONS[section].model_fields:
                self._drop_foreign(section, entry, written)
            elif key in translated:
                message = f"`{written}` and `{translated[key].written}` are both set and mean the same"
                self._find(Finding(where=entry.where, message=message, hint=f"keep only `{key}`"), section, key)
            elif self._translate_entry(section, key, entry, written):
                translated[key] = entry
        marked.content = translated

    def finish(self) -> None:
        """Add the notices: one for all keys that have our names or values, one for those that are empty, and one for
        those that are ignored."""
        for layer in sorted({where.layer for where in (*self._read, *self._empty)}):
            read = {where: pairs for where, pairs in self._read.items() if where.layer == layer}
            self._notice_of_readings(read)
            self._notice_of_empty({where: words for where, words in self._empty.items() if where.layer == layer})
        quiet: dict[str, Where] = {}
        loud: dict[str, dict[str, Where]] = {}
        for outcome in self.outcomes:
            if outcome.fate == "ignored":
                quiet.setdefault(outcome.written, outcome.where)
            elif outcome.fate in ("noted", "undecided"):
                loud.setdefault(outcome.reason, {}).setdefault(outcome.written, outcome.where)
        sentences = []
        if quiet:
            sentences.append(f"{_names(quiet)} {'has' if len(quiet) == 1 else 'have'} no effect here")
        for reason, places in loud.items():
            sentences.append(f"{_names(places)} {'is' if len(places) == 1 else 'are'} ignored: {reason}")
        if sentences:
            where = min([*quiet.values(), *(where for places in loud.values() for where in places.values())])
            self.notices.append(Finding(where=where, message=". ".join(sentences)))

    def _notice_of_readings(self, read: Mapping[Where, list[tuple[str, str, str]]]) -> None:
        pairs = [pair for _, pairs in sorted(read.items()) for pair in pairs]
        if pairs:
            (written, ours, remark), *more = pairs
            message = f"`{written}` is read as `{ours}`{remark}"
            message += "".join(f", `{written}` as `{ours}`{remark}" for written, ours, remark in more)
            self.notices.append(Finding(where=min(read), message=message))

    def _notice_of_empty(self, empty: Mapping[Where, tuple[str, str]]) -> None:
        names = ", ".join(f"`{written}`" for written, _ in empty.values())
        defaults = ", ".join(default for _, default in empty.values())
        if empty:
            words = "is empty, so its default is used" if len(empty) == 1 else "are empty, so their defaults are used"
            self.notices.append(Finding(where=min(empty), message=f"{names} {words}: {defaults}"))

    def read_as(self, entry: Entry, ours: str) -> None:
        """Report that the entry is read as these lines of ours."""
        value = _shown(entry.value)
        is_same = ours == f"{entry.written}: {value}"
        self._record(entry, "kept" if is_same else "translated", ours="" if is_same else ours)
        self._note(entry, f"{self._named(entry)}: {value}", ours)

    def drop(self, entry: Entry, reason: str, *, quietly: bool = True) -> None:
        """Report that the entry changes nothing, for this reason."""
        self._record(entry, "ignored" if quietly else "noted", reason=reason)

    def decide(self, entry: Entry, reason: str) -> None:
        """Report that the entry changes what is trained, and that the user must decide about it."""
        self._record(entry, "undecided", reason=reason)

    def drop_empty(self, entry: Entry) -> None:
        """Report that the entry, of one of our keys, has no value, and the default that the key has instead."""
        if self._forgiving:  # the default is the other trainer's
            self._record(entry, "ignored", reason="it is empty, so its default is used")
            return
        key = canonical_key(TOP, entry.written)
        value = _OTHER_DEFAULTS.get(key) or f"`{key}: {describe_value(SECTIONS[TOP].model_fields[key].default)}`"
        self._empty[entry.where] = (entry.written, value)

    def reject(self, where: Where, message: str, key: str, *, hint: str | None = None) -> None:
        """Report that what stands there is wrong; `key` is our name for it."""
        self._find(Finding(where=where, message=message, hint=hint), TOP, key)

    def _translate_entry(self, section: str, key: str, entry: Entry, name: str) -> bool:
        """Translate one entry that has this name: what the user wrote, or ours for what was made of it. False if it
        must be dropped."""
        value = entry.value
        was = _shown(value)
        if name in INVERSE:
            if not isinstance(value.content, bool):
                message = f"`{name}` must be true or false"
                self._find(Finding(where=entry.where, message=message), section, key)
                return False
            inverted = INVERSE[name][value.content]
            written, read = (str(each).lower() for each in (value.content, inverted))
            self._note(entry, f"{name}: {written}", f"{key}: {read}")
            self._record(entry, "translated", ours=f"{key}: {read}", value=was)
            value.content = inverted
        ours = VALUE_ALIASES.get(f"{section}.{key}" if section else key, {})
        is_alias = name != key and name in ALIASES.get(section, {}) and name not in INVERSE
        is_translated = isinstance(value.content, str) and value.content in ours
        if is_translated:
            assert isinstance(value.content, str)
            remark = f" ({VALUE_NOTES[value.content]})" if value.content in VALUE_NOTES else ""
            theirs, value.content = value.content, ours[value.content]
            self._note(entry, f"{name}: {theirs}", f"{key}: {value.content}" if is_alias else value.content, remark)
        elif is_alias:
            self._note(entry, name, key)
        if section == "datasets" and key == "type" and self._forgiving and not is_dataset_type(value.content):
            self._record(entry, "undecided", reason="Ratel has no such form; the columns of the first row decide")
            return False
        if name not in INVERSE:
            note = VALUE_NOTES.get(was, "") if is_translated else ""
            self._record_read(entry, key, value=was, changed=is_alias or is_translated, note=note)
        if section == "storage" and key == "paths" and isinstance(value.content, str):
            value.content = [replace(value)]
        inner = "datasets" if key == "test_datasets" else section_in(section, key)
        if inner in SECTIONS:
            self.translate(inner, value)
        return True

    def _record_read(self, entry: Entry, key: str, *, value: str, changed: bool, note: str) -> None:
        """Record an entry that is read: kept as it was written, or translated. `note`: what is different here."""
        if changed:
            self._record(entry, "translated", ours=f"{key}: {_shown(entry.value)}", value=value, reason=note)
        elif entry.written == key:
            self._record(entry, "kept")

    def _drop_foreign(self, section: str, entry: Entry, name: str) -> None:
        """Drop a key of this name that is not one of ours: silently if it changes nothing, else with a finding."""
        foreign = foreign_key(section, name)
        fate: Fate = "undecided" if foreign is None else fate_of(section, name, entry.value)
        reason = "Ratel has no such key" if foreign is None else foreign.reason
        if foreign is None and self._forgiving and entry.value.content is None:
            fate, reason = "ignored", "it is empty"
        elif foreign is not None and fate != foreign.fate:  # what the key does with other values is no reason
            reason = "with this value it changes nothing" if plain(entry.value) else "it is off or empty"
        if fate in ("ignored", "noted"):
            self._record(entry, fate, reason=reason)
        elif fate == "undecided" and self._forgiving:
            self._record(entry, "undecided", reason=reason)
        else:
            finding, meant = explain_unknown(section, name, entry.where, entry.value)
            self._record(entry, "impossible", reason=reason)
            self._find(finding, section, meant or name)

    def _find(self, finding: Finding, section: str, key: str) -> None:
        self.findings.append(finding)
        self.doubtful.add((*filter(None, section.split(".")), key))

    def _note(self, entry: Entry, written: str, ours: str, remark: str = "") -> None:
        """Note for the notice about readings what is written and what it is read as."""
        self._read.setdefault(entry.where, []).append((written, ours, remark))

    def _named(self, entry: Entry) -> str:
        return f"{self._section}.{entry.written}" if self._section else entry.written

    def _record(self, entry: Entry, fate: Fate, *, ours: str = "", reason: str = "", value: str | None = None) -> None:
        """Record what became of an entry, once. What no user wrote has no outcome."""
        written = self._named(entry)
        if not entry.written or (fate in ("kept", "translated") and (entry.where, written) in self._recorded):
            return
        self._recorded.add((entry.where, written))
        shown = _shown(entry.value) if value is None else value
        outcome = KeyOutcome(where=entry.where, written=written, value=shown, fate=fate, ours=ours, reason=reason)
        self.outcomes.append(outcome)


def _names(places: Mapping[str, Where]) -> str:
    return ", ".join(f"`{name}`" for name in places)


def _shown(value: Marked) -> str:
    return "" if value.content is None else show(plain(value)).strip("'")
