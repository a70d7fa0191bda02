"""Prints every text that a person can see on the command line, each with its file and line.

    python scripts/list_messages.py [--without-lines]

The list is for rereading the English, and for showing what a change did to it: save the list before and after,
`--without-lines`, and compare the two with diff. It comes from the syntax trees of `ratel_cli`; nothing is run.

Invariant: no message is missing. A text that is given to an error, a finding, the log or an option is listed with its
kind. Every other text of two words or more is listed as `text`, docstrings excepted: most are parts of messages, and a
few are not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BASE_ERROR = "RatelError"
_RAISED: Mapping[int | str, str] = {0: "error", "message": "error", 1: "hint", "hint": "hint"}
_CALLS: Mapping[str, Mapping[int | str, str]] = {
    "Interrupted": {1: "error", "message": "error"},  # the first argument is the signal's number
    "Finding": {"message": "error", "hint": "hint"},
    "Contradiction": {"message": "error", "hint": "hint"},
    "rejection": {0: "error", 1: "hint"},
    "needs": {"why": "error", "hint": "hint"},
    "excludes": {"why": "error", "hint": "hint"},
    "only_if": {"why": "warning"},
    "ignored_with": {"why": "warning"},
    "doubt": {1: "warning", 2: "hint"},
    "error": {0: "error", 1: "hint"},
    "say": {0: "line"},
    "notice": {0: "note"},
    "warn": {0: "warning"},
    "bar": {0: "bar"},
    "Argument": {"help": "help", "metavar": "help"},
    "Option": {"help": "help", "metavar": "help"},
    "Typer": {"help": "help"},
    "command": {"help": "help", "epilog": "help"},
}
"""The calls whose arguments a person reads, by name without leading underscores: which arguments, and their kind."""
_ROWS = "tuple[str, str]"
"""In the return type of a function that makes a table: what each row is and how it is."""
_TWO_WORDS = re.compile(r"[^\W\d_]{2,}.*\s|\s.*[^\W\d_]{2,}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Message:
    """One text, with the parts that are known only at run time in braces."""

    path: str
    line: int
    kind: str
    """error, hint, note, warning, line, bar, help, row or text."""
    text: str


def package_sources() -> dict[str, str]:
    """The package's Python files: path from the repository's root, and source."""
    files = sorted((ROOT / "ratel_cli").rglob("*.py"))
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


def messages_in(sources: Mapping[str, str]) -> list[Message]:
    """All messages of these files, in order. The error classes are found in them too."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    calls = {**dict.fromkeys(_error_classes(trees), _RAISED), **_CALLS}
    return sorted(message for path, tree in trees.items() for message in _FileReader(path, tree, calls).messages())


def as_line(message: Message, *, with_line_number: bool = True) -> str:
    """One line of the printed list."""
    where = f"{message.path}:{message.line}" if with_line_number else message.path
    text = message.text.replace("\n", "\\n")
    return f"{where}: {message.kind}: {text}"


def _error_classes(trees: Mapping[str, ast.Module]) -> set[str]:
    """RatelError, and everything derived from it."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = {_BASE_ERROR}
    while derived := {each.name for each in classes if found & set(map(ast.unparse, each.bases))} - found:
        found |= derived
    return found


class _FileReader:
    """Finds the messages of one file. Each text is listed once, under the first kind that is found for it."""

    def __init__(self, path: str, tree: ast.Module, calls: Mapping[str, Mapping[int | str, str]]) -> None:
        self._path = path
        self._tree = tree
        self._calls = calls
        self._seen: set[ast.AST] = set()
        self._found: list[Message] = []

    def messages(self) -> list[Message]:
        """All of them."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                self._seen.add(node.value)  # a docstring
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                self._read_calls(node, _assigned(node))
                if node.returns is not None and _ROWS in ast.unparse(node.returns):
                    self._read_rows(node)
        self._read_calls(self._tree, {})
        for node in ast.walk(self._tree):
            if isinstance(node, ast.expr) and node not in self._seen and _TWO_WORDS.search(_fixed_text(node)):
                self._take(node, "text")
        return self._found

    def _read_calls(self, within: ast.AST, assigned: Mapping[str, list[ast.expr]]) -> None:
        for call in ast.walk(within):
            if not isinstance(call, ast.Call):
                continue
            kinds = self._calls.get(_name(call.func).lstrip("_"), {})
            given: list[tuple[int | str, ast.expr]] = [*enumerate(call.args)]
            given += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
            for key, argument in given:
                for text in _alternatives(argument, assigned) if key in kinds else ():
                    self._take(text, kinds[key])

    def _read_rows(self, function: ast.FunctionDef) -> None:
        for node in ast.walk(function):
            if isinstance(node, ast.Tuple) and len(node.elts) > 1 and _is_text(node.elts[0]):
                parts = [_rendered(each) for each in node.elts]
                self._found.append(Message(path=self._path, line=node.lineno, kind="row", text="  ".join(parts)))
                self._seen.update(text for each in node.elts for text in _texts_in(each))

    def _take(self, node: ast.expr, kind: str) -> None:
        if node in self._seen or not _fixed_text(node):
            return
        self._seen.update(_texts_in(node))
        self._found.append(Message(path=self._path, line=node.lineno, kind=kind, text=_rendered(node)))


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """What the function assigns to each of its variables."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AugAssign(ast.Name(id=name), value=value):
                values.setdefault(name, []).append(value)
    return values


def _alternatives(argument: ast.expr, assigned: Mapping[str, list[ast.expr]]) -> Iterator[ast.expr]:
    """The texts that an argument may be: itself, either side of a choice, or what a variable was assigned."""
    match argument:
        case ast.IfExp(body=body, orelse=orelse):
            yield from _alternatives(body, assigned)
            yield from _alternatives(orelse, assigned)
        case ast.Name(id=name):
            yield from (value for value in assigned.get(name, []) if _is_text(value))
        case _ if _is_text(argument):
            yield argument


def _is_text(node: ast.expr) -> bool:
    """A literal text, an f-string, or a sum that contains one."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _texts_in(node: ast.expr) -> Iterator[ast.expr]:
    """The nodes whose letters `_rendered` prints. What stands in braces is not among them, and is listed by itself."""
    if not _is_text(node):
        return
    yield node
    match node:
        case ast.BinOp(left=left, right=right):
            yield from _texts_in(left)
            yield from _texts_in(right)
        case ast.JoinedStr(values=values):
            yield from (each for each in values if isinstance(each, ast.Constant))
            # A format such as ":.2f" is a JoinedStr of its own.
            yield from (
                each.format_spec for each in values if isinstance(each, ast.FormattedValue) and each.format_spec
            )


def _rendered(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.JoinedStr(values=values):
            return "".join(map(_rendered, values))
        case ast.BinOp(left=left, right=right, op=ast.Add()) if _is_text(node):
            return _rendered(left) + _rendered(right)
    return f"{{{ast.unparse(node)}}}"


def _fixed_text(node: ast.expr) -> str:
    """The letters that stand in the source."""
    return "".join(
        each.value for each in _texts_in(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def main(arguments: list[str]) -> int:
    """Print the list; the exit code."""
    if arguments not in ([], ["--without-lines"]):
        sys.stderr.write((__doc__ or "") + "\n")
        return 2
    for message in messages_in(package_sources()):
        print(as_line(message, with_line_number=not arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
