"""YAML text as a tree in which every key and value has its place.

PyYAML parses the text, but YAML 1.1 surprises people, so the meaning of its nodes is decided here: `1e-4` is a number,
`yes` and `2024-01-01` are text, a key that appears twice is an error, and tags give plain values only.

Invariant: the tree is finite and small for every text (the expansion of aliases is bounded), and BadInput is the only
exception that leaves this module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import yaml

from ratel_cli.errors import BadInput
from ratel_cli.units import KIB

MAX_TEXT_BYTES = 256 * KIB
MAX_NODES = 10_000
"""Values in a text, counted after its aliases are expanded."""
MAX_DEPTH = 20
_MAX_DIGITS = 300
"""A longer number is rejected."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Where:
    """A place in a file, or an argument of the command line. Findings are reported in the order of their places."""

    layer: int
    """0 for the file, N for the Nth argument."""
    line: int
    """Counted from 1; 0 for an argument."""
    column: int
    """Counted from 1; 0 for an argument."""
    origin: str
    """The file's name, or the argument."""

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}:{self.column}" if self.line else self.origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An error or a notice at one place."""

    where: Where
    message: str
    hint: str | None = None

    def as_error(self, others: tuple[BadInput, ...] = ()) -> BadInput:
        """The finding as an error, which may carry others."""
        return BadInput(f"{self.where}: {self.message}", self.hint, others=others)


def raise_all(findings: list[Finding]) -> None:
    """Raise the first of the findings, by place, as a BadInput that carries the others. No findings: do nothing."""
    if findings:
        first, *others = sorted(findings, key=lambda finding: finding.where)
        raise first.as_error(tuple(other.as_error() for other in others))


@dataclass(slots=True, kw_only=True)
class Marked:
    """A value and its place. It can be changed: aliases and overrides replace values."""

    where: Where
    content: Scalar | list[Marked] | dict[str, Entry]

    @property
    def entries(self) -> dict[str, Entry]:
        """The keys of a mapping; none of another value. What is put into them is in the mapping."""
        return self.content if isinstance(self.content, dict) else {}

    @property
    def items(self) -> list[Marked]:
        """The items of a list; none of another value."""
        return self.content if isinstance(self.content, list) else []


@dataclass(slots=True, kw_only=True)
class Entry:
    """A key of a mapping as the user wrote it, its place, and its value."""

    where: Where
    written: str
    value: Marked


Plain = Scalar | list["Plain"] | dict[str, "Plain"]


def plain(marked: Marked) -> Plain:
    """The value without its places."""
    if isinstance(marked.content, dict):
        return {key: plain(entry.value) for key, entry in marked.content.items()}
    if isinstance(marked.content, list):
        return [plain(item) for item in marked.content]
    return marked.content


Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]
_RESOLVERS: Resolvers = {}


class ConfigLoader(yaml.SafeLoader):
    """Resolves plain scalars much as YAML 1.2 does."""

    yaml_implicit_resolvers = _RESOLVERS


_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER_STARTS = list("-+.0123456789")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = rf"[-+]?{_DIGITS}|0x[0-9a-fA-F]+|0o[0-7]+"
_FLOAT = rf"[-+]?(?:\.[0-9]+|{_DIGITS}\.?[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
for _name, _pattern, _starts in (
    ("bool", "|".join(_BOOLS), list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", _INT, _NUMBER_STARTS),
    ("float", _FLOAT, _NUMBER_STARTS),
):
    ConfigLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _starts)


def marked(value: Plain, where: Where) -> Marked:
    """A value as a tree whose parts all have this place."""
    if isinstance(value, dict):
        content = {key: Entry(where=where, written=key, value=marked(each, where)) for key, each in value.items()}
        return Marked(where=where, content=content)
    if isinstance(value, list):
        return Marked(where=where, content=[marked(each, where) for each in value])
    return Marked(where=where, content=value)


def read_text(text: str, origin: str, findings: list[Finding]) -> Marked:
    """The tree of a file's text. Raises BadInput if the text cannot be parsed; other errors become findings."""
    start = Where(layer=0, line=1, column=1, origin=origin)
    try:
        node = _compose(text, start)
        if node is None:
            raise _Unreadable(Finding(where=start, message="the file is empty"))
        return _Converter(start, findings).convert(node, depth=0)
    except _Unreadable as exc:
        raise exc.finding.as_error() from exc


def read_value(text: str, where: Where, findings: list[Finding]) -> Marked | None:
    """The value of an argument: a scalar, a flow list or a flow mapping. None if it is not YAML, with a finding."""
    text = text.strip()
    try:
        if text[:1] in ("[", "{", '"', "'"):
            node = _compose(text, where)
            assert node is not None
        else:
            found = yaml.reader.Reader.NON_PRINTABLE.search(text)
            if found is not None:
                raise _unprintable(text, found.start(), where)
            node = yaml.ScalarNode(_plain_tag(text), text)
        return _Converter(where, findings).convert(node, depth=0)
    except _Unreadable as exc:
        findings.append(exc.finding)
        return None


class _Unreadable(Exception):
    """The rest of the text cannot be read. Never leaves this module."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class _Converter:
    """Turns PyYAML's nodes, which are a graph if there are aliases, into a bounded tree."""

    def __init__(self, start: Where, findings: list[Finding]) -> None:
        self._start = start
        self._findings = findings
        self._num_nodes = 0

    def convert(self, node: yaml.Node, *, depth: int) -> Marked:
        where = self._where(node)
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            hint = "this happens when an alias (`*name`) of a large value is used many times"
            raise _Unreadable(Finding(where=where, message=f"more than {MAX_NODES} values", hint=hint))
        if depth > MAX_DEPTH:
            raise _Unreadable(Finding(where=where, message=f"nested more than {MAX_DEPTH} levels deep"))
        if isinstance(node, yaml.ScalarNode):
            return Marked(where=where, content=self._scalar(node, where))
        kind = "seq" if isinstance(node, yaml.SequenceNode) else "map"
        if node.tag != _TAG + kind:
            self._reject_tag(node, where)
        if isinstance(node, yaml.SequenceNode):
            return Marked(where=where, content=[self.convert(item, depth=depth + 1) for item in node.value])
        assert isinstance(node, yaml.MappingNode)
        return Marked(where=where, content=self._mapping(node, depth=depth))

    def _mapping(self, node: yaml.MappingNode, *, depth: int) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            where = self._where(key_node)
            value = self.convert(value_node, depth=depth + 1)
            key = self._scalar(key_node, where) if isinstance(key_node, yaml.ScalarNode) else None
            if type(key) is int:
                key = str(key)  # the id of a token
            if not isinstance(key, str):
                self._findings.append(Finding(where=where, message="a key must be text"))
            elif key in entries:
                first = entries[key].where
                seen = f" (first on line {first.line})" if first.line else ""
                self._findings.append(Finding(where=where, message=f"`{key}` appears twice{seen}"))
            else:
                entries[key] = Entry(where=where, written=key, value=value)
        return entries

    def _scalar(self, node: yaml.ScalarNode, where: Where) -> Scalar:
        text = str(node.value)
        try:
            text.encode()
            return _construct(node.tag, text)
        except UnicodeEncodeError:
            self._findings.append(Finding(where=where, message="contains half of a surrogate pair"))
        except ValueError:
            kind = node.tag.removeprefix(_TAG)
            self._findings.append(Finding(where=where, message=f"{shorten(text)} cannot be read as {kind}"))
        except KeyError:
            self._reject_tag(node, where)
        return None

    def _reject_tag(self, node: yaml.Node, where: Where) -> None:
        tag = node.tag.replace(_TAG, "!!")
        hint = "write the value without a tag"
        self._findings.append(Finding(where=where, message=f"the tag {shorten(tag)} is not allowed here", hint=hint))

    def _where(self, node: yaml.Node) -> Where:
        if not self._start.line:
            return self._start
        mark = node.start_mark
        return replace(self._start, line=mark.line + 1, column=mark.column + 1)


def shorten(text: str, limit: int = 60) -> str:
    """The text in quotes, cut if it is longer than `limit` characters."""
    return f"'{text}'" if len(text) <= limit else f"'{text[: limit - 3]}...'"


def show(value: object) -> str:
    """A value in a message."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return shorten(str(value)).strip("'")


def _construct(tag: str, text: str) -> Scalar:
    """The value of a scalar. Raises KeyError for an unknown tag, ValueError for a text that does not fit the tag."""
    kind = tag.removeprefix(_TAG)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        if text not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text]
    if len(text) > _MAX_DIGITS:
        raise ValueError(text)
    if kind == "int":
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if kind == "float":
        sign, _, name = text.rpartition(".")
        return float(sign + name) if name.lower() in ("inf", "nan") else float(text)
    raise KeyError(tag)


def _plain_tag(text: str) -> str:
    for tag, pattern in _RESOLVERS.get(text[:1], []):
        if pattern.match(text):
            return tag
    return _TAG + "str"


def _compose(text: str, start: Where) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=ConfigLoader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        where = replace(start, line=mark.line + 1, column=mark.column + 1) if mark and start.line else start
        message, hint = _explain(exc.problem or exc.context or "")
        raise _Unreadable(Finding(where=where, message=f"not valid YAML: {message}", hint=hint)) from exc
    except yaml.reader.ReaderError as exc:
        raise _unprintable(text, exc.position, start) from exc
    except RecursionError as exc:
        raise _Unreadable(Finding(where=start, message=f"nested more than {MAX_DEPTH} levels deep")) from exc
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        # PyYAML lets errors of chr() and int() through, for escapes such as "\UFFFFFFFF".
        raise _Unreadable(Finding(where=start, message="not valid YAML: an escape or number is out of range")) from exc


def _unprintable(text: str, position: int, start: Where) -> _Unreadable:
    before = text[:position]
    line = before.count("\n") + 1
    where = replace(start, line=line, column=position - before.rfind("\n")) if start.line else start
    message = f"the character U+{ord(text[position]):04X} is not allowed in YAML"
    return _Unreadable(Finding(where=where, message=message))


_EXPLANATIONS: tuple[tuple[str, str, str], ...] = (
    ("'\\t'", "a tab where only spaces are allowed", "indent with spaces"),
    (
        "mapping values are not allowed",
        "unexpected `:`",
        "put quotes around text that contains `: `, and check the indentation",
    ),
    ("unexpected end of stream", "the text ends too early", "close every quote and bracket"),
    ("<stream end>", "the text ends too early", "close every quote and bracket"),
    (
        "<block end>",
        "this line does not fit the indentation of the lines above",
        "start all keys of one level in the same column",
    ),
    ("could not find expected ':'", "a line without `:`", "write `key: value`"),
    ("second occurrence", "an anchor (`&name`) that was used before", "use a different name for each anchor"),
    ("but found another document", "a second document (`---`)", "keep one document in the file"),
)


def _explain(problem: str) -> tuple[str, str | None]:
    """The message and the hint for a syntax error, given PyYAML's words for it."""
    for sign, message, hint in _EXPLANATIONS:
        if sign in problem:
            return message, hint
    return problem.replace("\n", " "), None
