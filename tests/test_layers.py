"""Imports go down only. The layers are written here once more, and every file's syntax tree is held against them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ratel_cli"
FOR_ALL = ("errors", "units", "runlog")
LAYERS: dict[str, tuple[str, ...]] = {
    "__init__": (),
    "__main__": ("cli.app",),
    "errors": (),
    "units": (),
    "runlog": (),
    "movement": (*FOR_ALL, "movement"),
    "hardware": (*FOR_ALL, "hardware", "movement", "_native"),
    "model.spec": FOR_ALL,
    "model": (*FOR_ALL, "model", "movement", "_native"),
    "planning": (*FOR_ALL, "planning", "hardware.spec", "model.spec"),
    "engine": (
        *FOR_ALL,
        "engine",
        "planning.liveness",
        "planning.placement",
        "planning.recorded",
        "model.blocks",
        "model.dispatch",
        "model.drive",
        "model.spec",
        "movement",
        "_native",
    ),
    "training": (*FOR_ALL, "training", "engine", "model", "movement"),
    "config": (*FOR_ALL, "config"),
    "cli": ("",),
}
HEAVY = ("torch", "transformers", "datasets", "numpy", "safetensors")
WITHOUT_HEAVY = (
    "errors",
    "units",
    "runlog",
    "config",
    "planning",
    "movement",
    "hardware.spec",
    "hardware.host",
    "hardware.effort",
    "hardware.drives",
    "model.spec",
    "cli.app",
    "cli.export",
    "cli.profile",
    "cli.profile_cache",
    "cli.hardware_file",
    "cli.hardware_table",
    "cli.kept_profile",
    "cli.kept_run",
    "cli.plan",
    "cli.plan_inputs",
    "cli.plan_plot",
    "cli.plan_questions",
    "cli.plan_table",
    "cli.restore",
    "cli.run_settings",
    "cli.snapshot_space",
    "cli.subject",
    "cli.verify",
    "cli.verify_table",
)
WITH_TORCH_ALL_THE_SAME = ("movement.copies", "movement.pinning")


def is_within(module: str, prefix: str) -> bool:
    return not prefix or module == prefix or module.startswith(prefix + ".")


def layer_of(module: str) -> str:
    """The longest entry of LAYERS that the module is in."""
    return max((layer for layer in LAYERS if is_within(module, layer)), key=len)


def imports(source: str, module: str) -> Iterator[str]:
    """Every module that the source imports, wherever in it; relative imports made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["ratel_cli", *module.split(".")][: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(source: str, module: str) -> list[str]:
    """What the module imports of ours and may not."""
    allowed = LAYERS[layer_of(module)]
    ours = [name.removeprefix("ratel_cli.") for name in imports(source, module) if name.startswith("ratel_cli.")]
    return [name for name in ours if not any(is_within(name, prefix) for prefix in allowed)]


def heavy_imports(source: str, module: str) -> list[str]:
    """What the module imports that costs seconds, when it is imported itself."""
    if not any(is_within(module, prefix) for prefix in WITHOUT_HEAVY) or module in WITH_TORCH_ALL_THE_SAME:
        return []
    return [name for name in imports(source, module) if name.split(".")[0] in HEAVY]


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("module", modules())
def test_imports_go_down_only(module: str) -> None:
    assert violations(modules()[module].read_text(), module) == []


@pytest.mark.parametrize("module", modules())
def test_light_modules_import_nothing_heavy(module: str) -> None:
    assert heavy_imports(modules()[module].read_text(), module) == []


@pytest.mark.parametrize("module", [module for module in modules() if not is_within(module, "config")])
def test_pydantic_stays_where_a_persons_text_comes_in(module: str) -> None:
    names = imports(modules()[module].read_text(), module)
    assert [name for name in names if name.split(".")[0] in ("pydantic", "pydantic_core")] == []


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("movement.store", "from ratel_cli.engine.step import run", ["engine.step.run"]),
        ("movement.store", "def late():\n    import ratel_cli.cli.app", ["cli.app"]),
        ("planning.costs", "from ratel_cli.hardware import spec, gpu", ["hardware.gpu"]),
        ("planning.costs", "from ratel_cli.model.spec import ModelSpec", []),
        ("planning.costs", "from ..engine import step", ["engine.step"]),
        ("errors", "from ratel_cli import units", ["units"]),
        ("training.loop", "from ratel_cli.config.schema import RunConfig", ["config.schema.RunConfig"]),
        ("engine.step", "from ratel_cli.planning.planner import search", ["planning.planner.search"]),
        ("cli.finetune", "from ratel_cli.movement.store import Store", []),
        ("config.load", "from ratel_cli.errors import BadInput\nfrom .schema import RunConfig", []),
    ],
)
def test_the_layer_test_can_fail(module: str, source: str, found: list[str]) -> None:
    assert violations(source, module) == found


def test_the_heavy_test_can_fail() -> None:
    assert heavy_imports("def late():\n    from torch import nn", "planning.costs") == ["torch.nn"]
    assert heavy_imports("import torch", "movement.copies") == []
    assert heavy_imports("import torch", "engine.step") == []
