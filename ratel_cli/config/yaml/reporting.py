"""What the translations of other trainers' keys share: the entries that they rewrite, and whom they tell.

Invariant: an entry that a translation makes keeps the place of the key that the user wrote, and its name. A mapping
that is made around it has no name, as nobody wrote it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, Where, marked

Entries = dict[str, Entry]


class Report(Protocol):
    """What the translations report to."""

    def read_as(self, entry: Entry, ours: str) -> None:
        """The entry is read as these lines of ours."""

    def drop(self, entry: Entry, reason: str, *, quietly: bool = True) -> None:
        """The entry changes nothing, for this reason."""

    def decide(self, entry: Entry, reason: str) -> None:
        """The entry changes what is trained, and the user must decide about it."""

    def drop_empty(self, entry: Entry) -> None:
        """The entry, of one of our keys, has no value, so that key has its default."""

    def reject(self, where: Where, message: str, key: str, *, hint: str | None = None) -> None:
        """What stands there is wrong; `key` is our name for it."""


def keys_of_set(item: Marked) -> Entries:
    """The keys of a set, of which a bare path becomes one; none of what is no set."""
    if isinstance(item.content, str):
        item.content = {"path": Entry(where=item.where, written="path", value=replace(item))}
    return item.entries


def made(entry: Entry, value: Plain) -> Entry:
    """The entry with another value, at the same place."""
    return replace(entry, value=marked(value, entry.value.where))
