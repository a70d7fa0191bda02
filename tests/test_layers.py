"""Four rules hold the house together, and every file's syntax tree is held against them.

1. A part imports itself and the parts below it in `PARTS`, nothing above; so do the wings of a part in `WINGS`. No
   modules import each other in a circle, imports inside functions included. `papers` is a room that few may enter.
2. The config and the console stop at `run`: what is below takes plain values and plain callables. pydantic, which
   reads a person's text, stays in `config`.
3. What `ratel --help` or a planner loads is light: nothing that `cli` or `planning` imports when it is imported
   itself, however indirectly, costs seconds. Commands import what is heavy inside their functions.
4. What is shaped like a decoder stops at `model` and `run`: the planner takes a `ModelSpec`, the engine a `Program`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ratel_cli"
PARTS = (
    "errors", "units", "sizes", "dataset_keys", "closing", "json_fields", "commands", "neighbours", "openmp",
    "progress", "input_files", "console", "_native", "config", "io", "store", "schedule",
    "hardware", "data", "model", "planning", "engine", "training", "papers", "report", "run", "library", "cli",
)  # fmt: skip
"""From the ground up."""
WINGS = {
    "config": ("yaml", "keys", "others"),
    "data": ("files", "samples", "text", "pairs", "sources", "batches"),
    "model": ("values", "files", "cut", "export"),
    "planning": ("profile", "duties", "time", "memory", "search", "forecast"),
    "engine": ("measure", "device", "reading", "cache"),
    "report": ("words", "page"),
    "run": ("context", "files", "inputs", "train", "ask", "start"),
}
"""Of parts that have any, from the ground up. What else is in the part is above them."""
STOP_AT_RUN = ("config", "console")
ASK_PAPERS = ("papers", "report", "run.ask", "cli")
"""What may import `papers`: the question side of a plan. Training knows nothing of them."""
DECODERS = tuple(f"model.cut.{name}" for name in ("decoder", "find_blocks", "layer_runner", "around_layers", "probe"))
WITHOUT_DECODERS = ("schedule", "planning", "engine", "training", "papers")
IN_CONFIG = ("pydantic", "pydantic_core")
LIGHT = ("cli", "planning", "papers")
HEAVY = ("torch", "transformers", "datasets", "numpy", "pandas", "pyarrow", "safetensors", "ratel_cli._native")
"""Modules that take long to import, as in `sys.modules`."""


def part_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def wing_of(module: str) -> int:
    """The place of a module among the wings of its part."""
    part, _, rest = module.partition(".")
    wings, wing = WINGS.get(part, ()), rest.partition(".")[0]
    return wings.index(wing) if wing in wings else len(wings)


@cache
def imports(source: str, module: str, *, deferred: bool = True) -> tuple[str, ...]:
    """The modules and names that the source imports, absolute. `deferred`: also those imported inside functions."""
    return tuple(_imported(_parsed(source), module, deferred=deferred))


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _imported(tree: ast.AST, module: str, *, deferred: bool) -> Iterator[str]:
    for node in _statements(tree, deferred=deferred):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["ratel_cli", *module.split(".")][: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements(tree: ast.AST, *, deferred: bool) -> Iterator[ast.stmt]:
    """All statements of a module. Expressions hold none, so they are not walked. `deferred`: also those that do not run
    when it is loaded, which are in functions, or there for a type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) or (not deferred and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        if not deferred and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from _statements(node, deferred=deferred)


def names_of_two(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The public classes whose name another class has, too, with the modules of each."""
    homes: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in _parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def forbidden(source: str, module: str) -> list[str]:
    """What the module imports and may not: rules 1, 2 and 4, without circles."""
    own = part_of(module)
    wrong = []
    for name in imports(source, module):
        if name.split(".")[0] in IN_CONFIG and own != "config":
            wrong.append(name)
        if not name.startswith("ratel_cli."):
            continue
        part = part_of(name.removeprefix("ratel_cli."))
        is_decoder = name.removeprefix("ratel_cli.").startswith(DECODERS) and own in WITHOUT_DECODERS
        is_below = PARTS.index(part) < PARTS.index(own)
        stopped = part in STOP_AT_RUN and PARTS.index(own) < PARTS.index("run")
        is_in_wing_above = part == own and wing_of(name.removeprefix("ratel_cli.")) > wing_of(module)
        asks_not = part == "papers" and not f"{module}.".startswith(tuple(f"{each}." for each in ASK_PAPERS))
        if is_decoder or is_in_wing_above or asks_not or (part != own and (stopped or not is_below)):
            wrong.append(name.removeprefix("ratel_cli."))
    return wrong


def ours(name: str, sources: Mapping[str, str]) -> str | None:
    """The module of ours that an imported name is, or belongs to; None if it is not ours."""
    if not name.startswith("ratel_cli."):
        return None
    name = name.removeprefix("ratel_cli.")
    return next((each for each in (name, name.rpartition(".")[0]) if each in sources), None)


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other in a circle, imports inside functions included; empty if there are none."""
    graph = {
        module: {found for name in imports(source, module) if (found := ours(name, sources)) is not None}
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@cache
def product() -> dict[str, str]:
    """The source of every module of the product."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path.read_text() for name, path in paths.items() if name not in ("__init__", "__main__")}


def loaded_with(module: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Everything that is imported when `module` is, and by which of ours."""
    found: dict[str, str] = {}
    waiting = [module]
    seen = {module}
    while waiting:
        current = waiting.pop()
        for name in imports(sources[current], current, deferred=False):
            found.setdefault(name, current)
            imported = ours(name, sources)
            if imported is not None and imported not in seen:
                seen.add(imported)
                waiting.append(imported)
    return found


def heavy(module: str, sources: Mapping[str, str]) -> list[str]:
    """What costs seconds and is loaded with the module: rule 3."""
    return [
        f"{by} imports {name}"
        for name, by in loaded_with(module, sources).items()
        if any(name == each or name.startswith(each + ".") for each in HEAVY)
    ]


def test_imports_go_down_and_stop_where_they_must() -> None:
    assert {part_of(module) for module in product()} == set(PARTS) - {"_native"}
    assert {module: wrong for module, source in product().items() if (wrong := forbidden(source, module))} == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(product()) == []


def test_commands_and_planning_load_nothing_heavy() -> None:
    light = [module for module in product() if part_of(module) in LIGHT]
    assert {module: found for module in light if (found := heavy(module, product()))} == {}


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("store.store", "from ratel_cli.engine.steps.step import run", ["engine.steps.step.run"]),
        ("store.store", "def late():\n    import ratel_cli.cli.app", ["cli.app"]),
        ("planning.time.costs", "from ratel_cli.hardware import spec", []),
        ("planning.time.costs", "from ratel_cli.model.values.spec import ModelSpec", []),
        ("planning.time.costs", "from ...engine import step", ["engine.step"]),
        (
            "engine.steps.step",
            "from ratel_cli.model.cut.decoder import DecoderModel",
            ["model.cut.decoder.DecoderModel"],
        ),
        ("errors", "from ratel_cli import units", ["units"]),
        ("planning.forecast.forecast", "from ratel_cli.papers.ratel import need", ["papers.ratel.need"]),
        ("run.train.planner", "from ratel_cli.papers.ratel import need", ["papers.ratel.need"]),
        ("run.ask.plan_questions", "from ratel_cli.papers.ratel import need", []),
        ("training.loop", "from ratel_cli.config.keys.schema import RunConfig", ["config.keys.schema.RunConfig"]),
        ("report.words.run", "from ratel_cli.console import RunLog", ["console.RunLog"]),
        ("run.train.finetune", "from ratel_cli.store.store import Store", []),
        ("run.train.finetune", "from ratel_cli.run.inputs.inputs import Inputs", []),
        ("run.inputs.inputs", "from ratel_cli.run.train.store import find", ["run.train.store.find"]),
        ("run.context", "from ratel_cli.run.files import output", ["run.files.output"]),
        ("config.load", "from ratel_cli.errors import BadInput\nfrom .keys.schema import RunConfig", []),
        ("config.keys.schema", "from pydantic import BaseModel", []),
        ("run.inputs.settings", "def late():\n    if late:\n        import pydantic_core", ["pydantic_core"]),
    ],
)
def test_the_layer_test_can_fail(module: str, source: str, found: list[str]) -> None:
    assert forbidden(source, module) == found


def test_the_test_of_circles_can_fail() -> None:
    sources = {
        "io.queue": "from ratel_cli.io import lanes\nfrom ratel_cli.io.views import view",
        "io.lanes": "class Lane:\n    def open(self):\n        from ratel_cli.io.queue import Queue",
        "io.views": "import io.queue",
    }
    assert set(circle(sources)) == {"io.queue", "io.lanes"}
    assert circle(sources | {"io.lanes": ""}) == []


def test_the_heavy_test_can_fail() -> None:
    sources = {
        "cli.app": "from ratel_cli.run import find",
        "run.find": "from ratel_cli.io.views import view\ndef late():\n    import transformers",
        "io.views": "import torch",
        "cli.verify": "def late():\n    from torch import nn\nif TYPE_CHECKING:\n    import torch",
    }
    assert heavy("cli.app", sources) == ["io.views imports torch"]
    assert heavy("cli.verify", sources) == []


def test_a_name_means_one_thing() -> None:
    assert names_of_two(product()) == {}


def test_two_classes_of_one_name_are_found() -> None:
    sources = {"io.a": "class Place:\n    x = 1\n", "run.b": "class Place:\n    y = 1\n\nclass Other:\n    z = 1\n"}
    assert names_of_two(sources) == {"Place": ["io.a", "run.b"]}
