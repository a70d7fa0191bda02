"""Functions and files keep a size that can be read, and each list of exceptions only becomes shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .test_layers import product

MOST_LINES, MOST_PARAMETERS, MOST_FILE_LINES = 90, 10, 450
LONG_FILES = {
    "config.keys.schema",
    "config.others.foreign",
    "data.text.chat_child",
    "model.export.checkpoint",
    "store.store",
}
"""Files of one subject that is longer. Six at most."""
DOORS = {"library.opening.open_model"}
"""What users call with keywords, as they call a command with options."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[tuple[str, Function]]:
    """The functions and methods of a module, each with its name after those that it lies in."""

    def walk(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield ".".join((*outer, child.name)), child
            is_named = isinstance(child, Function | ast.ClassDef)
            yield from walk(child, (*outer, child.name) if is_named else outer)

    yield from walk(ast.parse(source), ())


def num_parameters(function: Function) -> int:
    """The parameters that a caller gives."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return sum(each.arg not in ("self", "cls") for each in every)


def is_command(function: Function) -> bool:
    """Whether the parameters are the options of a command."""
    calls = [each.func for each in function.decorator_list if isinstance(each, ast.Call)]
    return any(isinstance(each, ast.Attribute) and each.attr == "command" for each in calls)


def too_long(source: str) -> list[str]:
    return [name for name, each in functions(source) if (each.end_lineno or 0) - each.lineno + 1 > MOST_LINES]


def too_wide(source: str) -> list[str]:
    return [name for name, each in functions(source) if num_parameters(each) > MOST_PARAMETERS and not is_command(each)]


def test_no_function_is_longer_than_what_one_sees_at_once() -> None:
    assert not {f"{module}.{name}" for module, source in product().items() for name in too_long(source)}


def test_no_function_has_more_parameters_than_one_can_tell_apart() -> None:
    """What belongs together is a value."""
    assert {f"{module}.{name}" for module, source in product().items() for name in too_wide(source)} == DOORS


def test_few_files_have_more_than_450_lines() -> None:
    """A file of two subjects is two files."""
    found = {module for module, source in product().items() if len(source.splitlines()) > MOST_FILE_LINES}
    assert found == LONG_FILES and len(LONG_FILES) <= 7


def test_what_is_counted() -> None:
    """Methods and functions in functions are counted, `self` and the options of commands are not."""
    names = [f"a{number}" for number in range(11)]
    wide = f"def {{}}({', '.join(names[:5])}, *, {', '.join(f'{name}=0' for name in names[5:])}): ..."
    source = f"class A:\n    def f(self, {', '.join(names[:10])}): ...\n    {wide.format('g')}\n"
    source += f"@app.command('x')\n{wide.format('h')}\ndef outer(*a):\n    {wide.format('inner')}\n"
    assert too_wide(source) == ["A.g", "outer.inner"]
    lines = "\n".join("    pass" for _ in range(90))
    assert too_long(f"def f():\n{lines}\ndef g():\n{lines[9:]}\n") == ["f"]
