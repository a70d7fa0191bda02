"""Lists the keys of other trainers' configs, and compares them with the tables of `ratel_cli/config/fates`.

    python -m scripts.foreign_keys TOOL SOURCE [--list]

TOOL is axolotl, LLaMA-Factory, TRL or torchtune; SOURCE is a directory with its sources, or with the packages `trl` and
`transformers`. Without `--list` it prints the keys that only one side has, and fails if there are any. `--list` prints
each key with its default and the file that has it.

Invariant: nothing of another tool is imported. The keys come from the syntax trees of its argument classes; those of
torchtune, which has none, from its recipes and the configs that it ships. A class counts with its bases.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

TABLES = Path(__file__).parents[1] / "ratel_cli" / "config" / "fates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of another trainer's config."""

    name: str
    """With the key that it is inside of, and a dot between."""
    default: str
    """The source text of its default; empty if there is none, or the tool computes it."""
    file: str


_CLASSES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "axolotl": {
        "": ("AxolotlInputConfig", "AxolotlConfigWCapabilities", "*Args"),
        "datasets": (
            "SFTDataset", "DPODataset", "KTODataset", "PretrainingDataset", "StepwiseSupervisedDataset",
            "SyntheticDataset",
        ),
    },
    "LLaMA-Factory": {
        "": (
            "ModelArguments", "DataArguments", "FinetuningArguments", "GeneratingArguments", "TrainingArguments",
            "SampleArguments", "MegatronBridgeArguments",
        ),
    },
    "TRL": {
        "": (
            "TrainingArguments", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "SFTConfig", "DPOConfig",
            "KTOConfig", "CPOConfig", "ORPOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig",
        ),
        "datasets": ("DatasetConfig",),
    },
}  # fmt: skip
"""By tool and section: the classes whose fields are keys; `*` stands for any beginning."""
_FILES: Mapping[str, Sequence[str]] = {
    "axolotl": ("src/axolotl/utils/schemas/*.py", "src/axolotl/integrations/*/args.py"),
    "LLaMA-Factory": ("src/llamafactory/hparams/*_args.py", "src/llamafactory/v1/config/*_args.py"),
    "TRL": (
        "transformers/training_args.py", "trl/trainer/*_config.py", "trl/experimental/[cko][ptr]*o/*_config.py",
        "trl/scripts/utils.py",
    ),
}  # fmt: skip
"""By tool: the files that have these classes."""


def keys_of(tool: str, source: Path) -> list[Key]:
    """The keys of a tool's configs, each once, in the order of their names."""
    found: dict[str, Key] = {}
    for key in _keys_of_recipes(source) if tool == "torchtune" else _keys_of_classes(tool, source):
        found.setdefault(key.name, key)
    return [found[name] for name in sorted(found)]


def _keys_of_classes(tool: str, source: Path) -> Iterator[Key]:
    classes: list[tuple[ast.ClassDef, str]] = []
    for pattern in _FILES[tool]:
        for path in sorted(source.glob(pattern)):
            tree = ast.parse(path.read_text())
            name = path.relative_to(source).as_posix()
            classes += [(node, name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for section, wanted in _CLASSES[tool].items():
        for node, file in classes:
            if any(node.name == each or (each[:1] == "*" and node.name.endswith(each[1:])) for each in wanted):
                for name, default, place in _fields(node, file, classes):
                    yield Key(name=f"{section}.{name}" if section else name, default=default, file=place)


def _fields(
    node: ast.ClassDef, file: str, classes: Sequence[tuple[ast.ClassDef, str]]
) -> Iterator[tuple[str, str, str]]:
    """The fields of a class, then those of its bases: each with its default and its file."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            is_private = each.target.id.startswith("_") or "ClassVar" in ast.unparse(each.annotation)
            if not is_private and each.target.id != "model_config":
                yield each.target.id, _default(each.value), file
    for base in node.bases:
        name = ast.unparse(base).rpartition(".")[2]
        for other, place in classes:
            if other.name == name and other is not node:
                yield from _fields(other, place, classes)


def _default(value: ast.expr | None) -> str:
    """The source text of a field's default."""
    if not isinstance(value, ast.Call):
        return "" if value is None else ast.unparse(value)
    named = {word.arg: word.value for word in value.keywords}
    for name in ("default", "default_factory"):
        if name in named:
            text = ast.unparse(named[name])
            return {"list": "[]", "dict": "{}"}.get(text, text.removeprefix("lambda: "))
    return ast.unparse(value.args[0]) if value.args and ast.unparse(value.args[0]) != "..." else ""


def _keys_of_recipes(source: Path) -> Iterator[Key]:
    """What torchtune's recipes read of a config, and what the configs that it ships have."""
    for path in sorted(source.glob("recipes/configs/**/*.yaml")):
        for name in _dotted(yaml.safe_load(path.read_text())):
            yield Key(name=name, default="", file=path.relative_to(source).as_posix())
    for path in sorted(source.glob("recipes/*.py")):
        text = path.read_text()
        for match in re.finditer(r"\bcfg\.(?:get\(\s*\"(\w+)\"(?:,\s*(?:default=)?([^)]*))?\)|([a-z]\w*))", text):
            name, default = match[1] or match[3], (match[2] or "").strip()
            if name not in ("get", "pop", "keys"):
                yield Key(name=name, default=default, file=path.relative_to(source).as_posix())


def _dotted(content: object, prefix: str = "") -> Iterator[str]:
    """The names of the leaves of nested mappings. A set in a list counts as the only one."""
    for each in content if isinstance(content, list) else [content]:
        if isinstance(each, dict) and each:
            for key, value in each.items():
                yield from _dotted(value, f"{prefix}.{key}" if prefix else key)
        elif prefix:
            yield prefix


def table_of(tool: str) -> list[Mapping[str, str]]:
    """The rows of a tool's table."""
    with (TABLES / f"{tool}.tsv").open() as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["axolotl", "LLaMA-Factory", "TRL", "torchtune"])
    parser.add_argument("source", type=Path)
    parser.add_argument("--list", action="store_true", help="print the keys, with default and file")
    arguments = parser.parse_args()
    keys = keys_of(arguments.tool, arguments.source)
    if arguments.list:
        for key in keys:
            print(f"{key.name}\t{key.default}\t{key.file}")
        return 0
    rows = {row["key"] for row in table_of(arguments.tool)}
    missing = [key for key in keys if key.name not in rows]
    gone = sorted(rows - {key.name for key in keys})
    for key in missing:
        print(f"no row: {key.name} ({key.file})")
    for name in gone:
        print(f"only in the table: {name}")
    print(f"{arguments.tool}: {len(keys)} keys, {len(missing)} without a row, {len(gone)} rows without a key")
    return int(bool(missing or gone))


if __name__ == "__main__":
    sys.exit(main())
