"""From the configs of other trainers to ours: renames keys, spells out shorthands, rejects unknown keys.

It works on the marked tree, so that every note and every error has its place.

Invariant: afterwards a mapping has only keys of its section, each at most once and under our name. Everything that was
dropped has a finding.
"""

from __future__ import annotations

from dataclasses import replace

from ratel_cli.config.aliases import INVERSE, SECTIONS, TOP, VALUE_ALIASES, canonical_key, explain_unknown, section_in
from ratel_cli.config.yaml_marks import Entry, Finding, Marked


class Dialect:
    """Translates marked trees in place, and collects the findings and notices."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        self.notices: list[Finding] = []
        self.doubtful: set[tuple[str, ...]] = set()
        """Keys that a finding is about. If such a key is absent, that is no further finding."""

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

    def _spread_item(self, item: Marked) -> None:
        if isinstance(item.content, str):
            item.content = {"path": Entry(where=item.where, written="path", value=replace(item))}

    def translate_keys(self, section: str, marked: Marked) -> None:
        """Translate some keys of a section; for the section `datasets`, the keys of one dataset."""
        if not isinstance(marked.content, dict):
            return
        translated: dict[str, Entry] = {}
        for written, entry in marked.content.items():
            key = canonical_key(section, written)
            if key not in SECTIONS[section].model_fields:
                self._reject_unknown(section, entry)
            elif key in translated:
                message = f"`{written}` and `{translated[key].written}` are both set and mean the same"
                self._find(Finding(where=entry.where, message=message, hint=f"keep only `{key}`"), section, key)
            elif self._translate_entry(section, key, entry):
                translated[key] = entry
        marked.content = translated

    def _translate_entry(self, section: str, key: str, entry: Entry) -> bool:
        """Translate one entry. False if it must be dropped."""
        value = entry.value
        if entry.written in INVERSE:
            if not isinstance(value.content, bool):
                message = f"`{entry.written}` must be true or false"
                self._find(Finding(where=entry.where, message=message), section, key)
                return False
            inverted = not value.content
            written, read = (str(each).lower() for each in (value.content, inverted))
            self._note(entry, f"`{entry.written}: {written}` is read as `{key}: {read}`")
            value.content = inverted
        elif entry.written != key:
            self._note(entry, f"`{entry.written}` is read as `{key}`")
        ours = VALUE_ALIASES.get(key, {}) if section == TOP else {}
        if isinstance(value.content, str) and value.content in ours:
            self._note(entry, f"`{entry.written}: {value.content}` is read as `{ours[value.content]}`")
            value.content = ours[value.content]
        if section == "storage" and key == "paths" and isinstance(value.content, str):
            value.content = [replace(value)]
        if section_in(section, key) in SECTIONS:
            self.translate(section_in(section, key), value)
        return True

    def _reject_unknown(self, section: str, entry: Entry) -> None:
        finding, meant = explain_unknown(section, entry.written, entry.where)
        self._find(finding, section, meant or entry.written)

    def _find(self, finding: Finding, section: str, key: str) -> None:
        self.findings.append(finding)
        self.doubtful.add((*filter(None, section.split(".")), key))

    def _note(self, entry: Entry, message: str) -> None:
        self.notices.append(Finding(where=entry.where, message=message))
