"""From the dialects of other trainers to ours: keys renamed, shorthands spelled out, strangers refused.

Called by `config.load` for the file and by `config.overrides` for each argument, on the marked tree,
so that every note and error has its place.

Invariant: afterwards a mapping has only keys of its section, each at most once, under our names;
everything that was dropped has a finding.
"""

from __future__ import annotations

from dataclasses import replace

from ratel_cli.config.aliases import INVERSE, SECTIONS, TOP, VALUE_ALIASES, canonical_key, explain_unknown, section_in
from ratel_cli.config.yaml_marks import Entry, Finding, Marked


class Dialect:
    """Translates marked trees in place and collects what there is to say."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        self.notices: list[Finding] = []
        self.doubtful: set[tuple[str, ...]] = set()
        """Keys that some finding is about already: their absence proves nothing."""

    def translate(self, section: str, marked: Marked) -> None:
        """Translate one section, whatever its value turned out to be."""
        if section == "datasets":
            self._spread(marked)
            for item in marked.content if isinstance(marked.content, list) else ():
                self._translate_mapping(section, item)
        elif section in ("storage", "limits") and marked.content is None:
            marked.content = {}  # a section with every line of it commented out
        else:
            self._translate_mapping(section, marked)

    def translate_item(self, item: Marked) -> None:
        """Translate one dataset, a mapping or a bare path."""
        self._spread_item(item)
        self._translate_mapping("datasets", item)

    def translate_part(self, section: str, mapping: Marked) -> None:
        """Translate some keys of a section (of one dataset, where that is the section)."""
        self._translate_mapping(section, mapping)

    def _spread(self, marked: Marked) -> None:
        if isinstance(marked.content, str | dict):
            marked.content = [replace(marked)]
        for item in marked.content if isinstance(marked.content, list) else ():
            self._spread_item(item)

    def _spread_item(self, item: Marked) -> None:
        if isinstance(item.content, str):
            item.content = {"path": Entry(where=item.where, written="path", value=replace(item))}

    def _translate_mapping(self, section: str, marked: Marked) -> None:
        if not isinstance(marked.content, dict):
            return
        translated: dict[str, Entry] = {}
        for written, entry in marked.content.items():
            key = canonical_key(section, written)
            if key not in SECTIONS[section].model_fields:
                self._refuse_unknown(section, entry)
            elif key in translated:
                message = f"`{written}` and `{translated[key].written}` are both given and mean the same"
                self._find(Finding(where=entry.where, message=message, hint=f"keep `{key}`"), section, key)
            elif self._translate_entry(section, key, entry):
                translated[key] = entry
        marked.content = translated

    def _translate_entry(self, section: str, key: str, entry: Entry) -> bool:
        """Whether the entry can stay."""
        value = entry.value
        if entry.written in INVERSE:
            if not isinstance(value.content, bool):
                message = f"`{entry.written}` must be true or false"
                self._find(Finding(where=entry.where, message=message), section, key)
                return False
            turned = not value.content
            said = f"`{entry.written}: {str(value.content).lower()}` is read as `{key}: {str(turned).lower()}`"
            self._note(entry, said)
            value.content = turned
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

    def _refuse_unknown(self, section: str, entry: Entry) -> None:
        unknown = explain_unknown(section, entry.written)
        finding = Finding(where=entry.where, message=unknown.message, hint=unknown.hint)
        self._find(finding, section, unknown.meant or entry.written)

    def _find(self, finding: Finding, section: str, key: str) -> None:
        self.findings.append(finding)
        self.doubtful.add((*filter(None, section.split(".")), key))

    def _note(self, entry: Entry, message: str) -> None:
        self.notices.append(Finding(where=entry.where, message=message))
