"""What a row of the tables of other trainers' keys says, and the ways in which it is applied.

Rows of one key are tried from above, in the order of their table. The tables that translate come first; what remains of
a key has the fate that its row in `foreign` names.

Invariant: what a row takes out of a config is reported, and what it puts in has the place and the name that the user
wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final, Literal

from ratel_cli.config.yaml.reporting import Entries, Report, keys_of_set, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, marked, plain, show

Fate = Literal["ignored", "noted", "undecided", "impossible"]


@dataclass(frozen=True, slots=True)
class Given:
    """What a config says, by their or our keys."""

    entries: Entries
    target: Entries
    """What is made of them: the same, where ours are put beside theirs."""

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def has(self, *keys: str) -> bool:
        """Whether one of the keys has a value."""
        return any(self.value(key) is not None for key in keys)

    def value(self, *keys: str) -> Plain:
        """The value of the first of these keys that is there; None if none is."""
        entry = next(filter(None, (entry_at(self.entries, key) for key in keys)), None)
        return None if entry is None else plain(entry.value)

    def is_file(self) -> bool:
        """Whether this is the config's file: an argument `key=` is an error."""
        return any(entry.where.layer == 0 for entry in self.entries.values())

    def written(self, key: str) -> str:
        """The name that the user wrote for our key; empty if it is not there."""
        return self.entries[key].written if key in self.entries else ""


def is_text(value: Plain) -> bool:
    """For `only`: whether a value is a text."""
    return isinstance(value, str)


def absent(key: str) -> Callable[[Given], bool]:
    """A condition: this key is not there."""
    return lambda given: key not in given


@dataclass(frozen=True, slots=True)
class Code:
    """What no row can say: applied once to all entries, if one of the row's keys is there."""

    function: Callable[[Entries, Report], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignKey:
    """What becomes of a key of other trainers, or of several."""

    theirs: str
    """The keys, with blanks between. `a.b`: the key `b` in the mapping `a`. `*` ends the beginning of names."""
    how: Fate | How | Code
    ours: str = ""
    """Our key, where the way that the row is applied has none."""
    why: str | Callable[[Given], str] = ""
    hint: str = ""
    only: tuple[Plain, ...] | Callable[[Plain], bool] | None = None
    """The values that the row is about. As in the other trainers, 1 is true and 0 is false."""
    when: Callable[[Given], bool] | None = None
    """What the other keys must say."""
    over: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Keys that have no meaning then, and why."""
    harmless: tuple[Plain, ...] = ()
    """Values that change nothing, beside empty ones and the key's default there."""

    @property
    def fate(self) -> Fate:
        """What becomes of the key, for a row that names it."""
        assert isinstance(self.how, str)
        return self.how

    @property
    def reason(self) -> str:
        """Why, for a row whose reason is the same in every config."""
        assert isinstance(self.why, str)
        return self.why

    def keys_in(self, entries: Entries) -> list[str]:
        """The row's keys that are there."""
        names, starts, nested = _names(self.theirs)
        found = [key for key in nested if entry_at(entries, key) is not None]
        if starts:
            return [*found, *(key for key in entries if key in names or key.startswith(starts))]
        return [*found, *(key for key in entries if key in names)] if names & entries.keys() else found


@cache
def _names(theirs: str) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]:
    """The names of a row: whole ones, beginnings, and those in a mapping."""
    names = theirs.split()
    whole = frozenset(each for each in names if "." not in each and each[-1] != "*")
    nested = tuple(each for each in names if "." in each and each[-1] != "*")
    return whole, tuple(each[:-1] for each in names if each[-1] == "*"), nested


@dataclass(frozen=True, slots=True)
class Site:
    """A key that a row is applied to."""

    row: ForeignKey
    key: str
    entries: Entries
    report: Report
    target: Entries
    """Where ours go."""

    @property
    def entry(self) -> Entry:
        """The key's entry, which is there."""
        entry = entry_at(self.entries, self.key)
        assert entry is not None
        return entry

    @property
    def content(self) -> Plain:
        """The key's value."""
        return plain(self.entry.value)

    @property
    def given(self) -> Given:
        """What the config says."""
        return Given(self.entries, self.target)

    @property
    def why(self) -> str:
        """The row's reason for this config."""
        return self.row.why if isinstance(self.row.why, str) else self.row.why(self.given)

    def is_met(self) -> bool:
        """Whether the row is about this value, beside these other keys."""
        only, when = self.row.only, self.row.when
        is_about = only is None or (only(self.content) if callable(only) else self.content in only)
        return is_about and (when is None or when(self.given))

    def take(self) -> Entry:
        """Take the key out; a mapping around it goes with its last key."""
        entry, (outer, _, inner) = self.entry, self.key.partition(".")
        if self.key in self.entries:
            return self.entries.pop(self.key)
        around = self.entries[outer]
        kept = {key: each for key, each in around.value.entries.items() if key != inner}
        self.entries[outer] = replace(around, value=replace(around.value, content=kept))
        if not kept:
            del self.entries[outer]
        return entry


How = Callable[[Site], None]


def entry_at(entries: Entries, key: str) -> Entry | None:
    """The entry of a key, which may be in a mapping; None if it is not there."""
    outer, _, inner = key.partition(".")
    if key in entries or not inner or outer not in entries:
        return entries.get(key)
    return entries[outer].value.entries.get(inner)


def translate(rows: Sequence[ForeignKey], entries: Entries, report: Report) -> None:
    """Apply the rows to the entries of a mapping, one after another."""
    for row in rows:
        for key in row.keys_in(entries):
            site = Site(row, key, entries, report, entries)
            if entry_at(entries, key) is None or not site.is_met():
                continue
            if isinstance(row.how, Code):
                row.how.function(entries, report)
                break
            _apply(site)


def translate_in_order(rows: Sequence[ForeignKey], entries: Entries, target: Entries, report: Report) -> None:
    """Apply to each key the first row that is about it. Ours go into `target`, in the order of the keys."""
    for key, entry in entries.items():
        sites = (Site(row, key, dict(entries), report, target) for row in rows if row.keys_in({key: entry}))
        for site in sites:
            if site.is_met():
                _apply(site)
                break


def _apply(site: Site) -> None:
    for key, why in site.row.over.items():
        if key in site.entries:
            site.report.drop(site.entries.pop(key), why)
    if isinstance(site.row.how, str):
        why = site.why
        site.report.drop(site.take(), why, quietly=site.row.how == "ignored")
    else:
        assert not isinstance(site.row.how, Code)
        site.row.how(site)


# The ways in which a row is applied.

SAME: Final = "\0same"
"""In `sets`: the value that the user wrote."""
HERE: Final = ""
"""In `sets`: the key that the user wrote, which is a name for the row's `ours`."""
Value = Plain | Callable[[Given], Plain]


def sets(values: Mapping[str, Value], *, keep: bool = False, remark: Callable[[Given], str] = lambda given: "") -> How:
    """Theirs becomes these of ours. `keep`: a key of ours that is there already stays. `remark`: what is reported
    behind them."""

    def how(site: Site) -> None:
        found = _entries_of(values, site)
        words = _lines(found, site.row.ours) + remark(site.given)
        site.report.read_as(site.entry if HERE in found else site.take(), words)
        for ours, each in found.items():
            put(site.target, ours or site.key, each, keep=keep)

    return how


def adds(values: Mapping[str, Value]) -> How:
    """With theirs, which stays, these of ours have other defaults."""

    def how(site: Site) -> None:
        for ours, each in _entries_of(values, site).items():
            put(site.target, ours, each, keep=True)

    return how


def _entries_of(values: Mapping[str, Value], site: Site) -> Entries:
    """The entries with these values, at the place of theirs."""
    entry, given = site.entry, site.given
    computed = {key: value(given) if callable(value) else value for key, value in values.items()}
    return {key: entry if value == SAME else made(entry, value) for key, value in computed.items()}


def _lines(entries: Entries, here: str) -> str:
    """Our keys and values, as they are reported."""
    parts = []
    for key, entry in entries.items():
        (outer, _, inner), shown = (key or here).partition("."), show(plain(entry.value)).strip("'")
        parts.append(f"{outer}: {{{inner}: {shown}}}" if inner else f"{outer}: {shown}")
    return ", ".join(parts)


def put(entries: Entries, ours: str, entry: Entry, *, keep: bool = False) -> None:
    """Put an entry where our key belongs. `keep`: what is there already stays."""
    outer, _, inner = ours.partition(".")
    if not inner:
        entries[outer] = entries[outer] if keep and outer in entries else entry
        return
    around = entries.get(outer, replace(entry, written=""))
    content = {**around.value.entries, inner: entry}
    entries[outer] = replace(around, value=Marked(where=around.value.where, content=content))


def unpack(*ours: str) -> How:
    """The items of a list are these of ours."""

    def how(site: Site) -> None:
        entry = site.take()
        found = {key: replace(entry, value=item) for key, item in zip(ours, entry.value.items, strict=True)}
        site.report.read_as(entry, _lines(found, ""))
        site.target.update(found)

    return how


def move(site: Site) -> None:
    """The value has our name, and is reported with it."""
    entry = site.entries[site.row.ours] = site.take()
    site.report.read_as(entry, f"{site.row.ours}: {show(plain(entry.value))}")


def rename(site: Site) -> None:
    """The value, which is long, has our name."""
    entry = site.entries[site.row.ours] = site.take()
    site.report.read_as(entry, site.row.ours)


def split(site: Site) -> None:
    """A text with commas is a list."""
    entry = site.entry
    names = [name.strip() for name in str(site.content).split(",")]
    site.entries[site.key] = replace(entry, value=marked([*names], entry.value.where))
    site.report.read_as(entry, f"{site.key}: [{', '.join(names)}]")


def spread(
    *, names: Mapping[str, str] | None = None, without: str = "", more: Mapping[str, Plain] | None = None
) -> How:
    """The keys of a mapping are keys beside it, but the one that is read already. `names`: ours for them, which do not
    replace what is there. `more`: what else the mapping means by default."""

    def how(site: Site) -> None:
        entry = site.take()
        inner = {key: made(entry, value) for key, value in (more or {}).items()}
        inner |= {(names or {}).get(key, key): each for key, each in entry.value.entries.items() if key != without}
        site.report.read_as(entry, ", ".join(f"{key}: {show(plain(each.value))}" for key, each in inner.items()))
        for key, each in inner.items():
            if key in site.entries and names is None:
                site.report.drop(site.entries[key], f"`{entry.written}` has it, too")
            if key not in site.entries or names is None:
                site.entries[key] = each

    return how


def empty(site: Site) -> None:
    """An empty value is the default."""
    site.report.drop_empty(site.take())


def decide(site: Site) -> None:
    """The user must decide."""
    why = site.why
    site.report.decide(site.take(), why)


def forget(site: Site) -> None:
    """Take it out without a word: other keys have its meaning."""
    site.take()


def refuse(message: str, *, at_value: bool = False, goes_on: bool = False, without: Sequence[str] = ()) -> How:
    """An error about `ours`, or about the key. In the message `{key}` and `{value}` stand for themselves, `{text}` for
    the value without quotes, `{why}` for the reason and `{rl}` for the method. `goes_on`: the key stays; `without`:
    keys that go with it.
    """

    def how(site: Site) -> None:
        entry, value = site.entry, show(site.content)
        words = {
            "key": entry.written,
            "value": value,
            "text": site.content if isinstance(site.content, str) else value,
            "rl": site.given.value("rl"),
            "why": site.why,
        }
        where = entry.value.where if at_value else entry.where
        text = message.format(**words)
        site.report.reject(where, text, site.row.ours or entry.written, hint=site.row.hint or None)
        if not goes_on:
            site.take()
        for key in without:
            site.entries.pop(key, None)

    return how


def each_set(site: Site) -> None:
    """It is a key of each of `datasets` that has none such."""
    written = site.take()
    several = written.value.items
    entry = replace(written, value=several[0]) if len(several) == 1 else written
    for item in sets_of(site.entries):
        item.setdefault(site.row.ours, entry)
    site.report.read_as(entry, f"datasets: - {site.row.ours}: {show(plain(entry.value))}")


def sets_of(entries: Entries) -> Iterator[Entries]:
    """The keys of each of `datasets`; of what is no set, keys that nobody reads."""
    datasets = entries.get("datasets")
    for item in [] if datasets is None or not datasets.value.content else datasets.value.items or [datasets.value]:
        yield keys_of_set(item)
