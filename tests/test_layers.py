"""Three rules hold the house together, and every file's syntax tree is held against them.

1. A part imports itself and the parts below it in `PARTS`, nothing above.
2. The config and the console stop at `run`: what is below takes plain values and plain callables. (`report` may
   use neither, and pydantic, which reads a person's text, stays in `config`.)
3. What `ratel --help` or a planner loads is light: nothing that `cli` or `planning` imports when it is imported
   itself, however indirectly, costs seconds. Commands import what is heavy inside their functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ratel_cli"
PARTS = (
    "errors", "units", "sizes", "closing", "json_fields", "console", "_native", "config", "io", "store", "hardware",
    "data", "model", "planning", "engine", "training", "report", "run", "cli",
)  # fmt: skip
"""From the ground up."""
STOP_AT_RUN = ("config", "console")
LIGHT = ("cli", "planning")
HEAVY = ("torch", "transformers", "datasets", "numpy", "safetensors", "ratel_cli._native")


def part_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def imports(source: str, module: str, *, deferred: bool = True) -> Iterator[str]:
    """The modules and names that the source imports, absolute. `deferred`: also those imported inside functions."""
    for node in _statements(ast.parse(source), deferred=deferred):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["ratel_cli", *module.split(".")][: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements(tree: ast.AST, *, deferred: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not deferred and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield node
        yield from _statements(node, deferred=deferred)


def upward(source: str, module: str) -> list[str]:
    """What the module imports of ours and may not: rules 1 and 2."""
    own = part_of(module)
    wrong = []
    for name in imports(source, module):
        if not name.startswith("ratel_cli."):
            continue
        part = part_of(name.removeprefix("ratel_cli."))
        is_below = PARTS.index(part) < PARTS.index(own)
        stopped = part in STOP_AT_RUN and PARTS.index(own) < PARTS.index("run")
        if part != own and (stopped or not is_below):
            wrong.append(name.removeprefix("ratel_cli."))
    return wrong


def modules() -> dict[str, Path]:
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in paths.items() if name not in ("__init__", "__main__")}


def loaded_with(module: str, sources: dict[str, str]) -> dict[str, str]:
    """Everything that is imported when `module` is, and by which of ours."""
    found: dict[str, str] = {}
    waiting = [module]
    seen = {module}
    while waiting:
        current = waiting.pop()
        for name in imports(sources[current], current, deferred=False):
            found.setdefault(name, current)
            ours = name.removeprefix("ratel_cli.")
            for candidate in (ours, ours.rpartition(".")[0]):
                if name.startswith("ratel_cli.") and candidate in sources and candidate not in seen:
                    seen.add(candidate)
                    waiting.append(candidate)
    return found


def heavy(module: str, sources: dict[str, str]) -> list[str]:
    """What costs seconds and is loaded with the module: rule 3."""
    return [
        f"{by} imports {name}"
        for name, by in loaded_with(module, sources).items()
        if any(name == each or name.startswith(each + ".") for each in HEAVY)
    ]


def test_imports_go_down_only() -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    assert {part_of(module) for module in sources} == set(PARTS) - {"_native"}
    assert {module: wrong for module, source in sources.items() if (wrong := upward(source, module))} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    reached = {module: {name.removeprefix("ratel_cli.") for name in loaded_with(module, sources)} for module in sources}
    prefixes = {module: {name.rpartition(".")[0] for name in names} | names for module, names in reached.items()}
    assert [module for module in sources if module in prefixes[module]] == []


def test_pydantic_stays_where_a_persons_text_comes_in() -> None:
    users = {
        part_of(module)
        for module, path in modules().items()
        for name in imports(path.read_text(), module)
        if name.split(".")[0] in ("pydantic", "pydantic_core")
    }
    assert users == {"config"}


def test_commands_and_planning_load_nothing_heavy() -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    light = [module for module in sources if part_of(module) in LIGHT]
    assert {module: found for module in light if (found := heavy(module, sources))} == {}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("store.store", "from ratel_cli.engine.step import run", ["engine.step.run"]),
        ("store.store", "def late():\n    import ratel_cli.cli.app", ["cli.app"]),
        ("planning.costs", "from ratel_cli.hardware import spec", []),
        ("planning.costs", "from ratel_cli.model.spec import ModelSpec", []),
        ("planning.costs", "from ..engine import step", ["engine.step"]),
        ("errors", "from ratel_cli import units", ["units"]),
        ("training.loop", "from ratel_cli.config.schema import RunConfig", ["config.schema.RunConfig"]),
        ("report.run", "from ratel_cli.console import RunLog", ["console.RunLog"]),
        ("run.finetune", "from ratel_cli.store.store import Store", []),
        ("config.load", "from ratel_cli.errors import BadInput\nfrom .schema import RunConfig", []),
    ],
)
def test_the_layer_test_can_fail(module: str, source: str, found: list[str]) -> None:
    assert upward(source, module) == found


def test_the_heavy_test_can_fail() -> None:
    sources = {
        "cli.app": "from ratel_cli.run import find",
        "run.find": "from ratel_cli.io.views import view\ndef late():\n    import transformers",
        "io.views": "import torch",
        "cli.verify": "def late():\n    from torch import nn",
    }
    assert heavy("cli.app", sources) == ["io.views imports torch"]
    assert heavy("cli.verify", sources) == []
