"""Lists the keys of other trainers' configs, and compares them with the tables of `ratel_cli/config/fates`.

    python -m scripts.foreign_keys TOOL SOURCE [--list]

TOOL is one of the tables; SOURCE is a directory with its sources, or, for TRL and transformers, with their packages.
Without `--list` it prints the keys that only one side has, and fails if there are any. `--list` prints each key with
its default and the file that has it.

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
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ratel_cli.config.others.recorded import TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of another trainer's config."""

    name: str
    """With the key that it is inside of, and a dot between."""
    default: str
    """The source text of its default; empty if there is none, or the tool computes it. With strokes between, if its
    classes differ."""
    kind: str
    """The source text of its type; empty if it has none."""
    file: str


_CLASSES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "axolotl": {
        "": ("AxolotlInputConfig", "*Args"),
        "datasets": (
            "SFTDataset", "DPODataset", "KTODataset", "PretrainingDataset", "StepwiseSupervisedDataset",
            "SyntheticDataset",
        ),
    },
    "LLaMA-Factory": {"": ("*Arguments",)},
    "LLaMA-Factory v1": {"": ("*Arguments",)},
    "TRL": {
        "": (
            "ModelConfig", "ScriptArguments", "DatasetMixtureConfig", "SFTConfig", "DPOConfig", "KTOConfig",
            "CPOConfig", "ORPOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig", "DistillationConfig",
        ),
        "datasets": ("DatasetConfig",),
    },
    "transformers": {"": ("TrainingArguments", "Seq2SeqTrainingArguments")},
}  # fmt: skip
"""By tool and section: the classes whose fields are keys; `*` stands for any beginning."""
_FILES: Mapping[str, Sequence[str]] = {
    "axolotl": ("src/axolotl/utils/schemas/*.py", "src/axolotl/integrations/*/args.py"),
    "LLaMA-Factory": ("src/llamafactory/hparams/*_args.py",),
    "LLaMA-Factory v1": ("src/llamafactory/v1/config/*_args.py",),
    "TRL": (
        "trl/trainer/*_config.py", "trl/experimental/cpo/*_config.py", "trl/experimental/orpo/*_config.py",
        "trl/scripts/utils.py",
    ),
    "transformers": ("transformers/training_args.py", "transformers/training_args_seq2seq.py"),
}  # fmt: skip
"""By tool: the files that have these classes. LLaMA-Factory's and TRL's have the keys of transformers, too."""


def keys_of(tool: str, source: Path) -> list[Key]:
    """The keys of a tool's configs, each once, in the order of their names."""
    found: dict[str, Key] = {}
    for key in _keys_of_recipes(source) if tool == "torchtune" else _keys_of_classes(tool, source):
        other = found.setdefault(key.name, key)
        if key.default not in other.default.split(" | "):  # classes may differ
            found[key.name] = replace(other, default=f"{other.default} | {key.default}".strip(" |"))
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
                for key in _fields(node, file, classes):
                    yield replace(key, name=f"{section}.{key.name}") if section else key


def _fields(node: ast.ClassDef, file: str, classes: Sequence[tuple[ast.ClassDef, str]]) -> Iterator[Key]:
    """The fields of a class, then those of its bases."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            kind = ast.unparse(each.annotation)
            if each.target.id.startswith("_") or "ClassVar" in kind or each.target.id == "model_config":
                continue
            for name in (each.target.id, *_aliases(each.value)):
                yield Key(name=name, default=_default(each.value), kind=kind, file=file)
    for base in node.bases:
        name = ast.unparse(base).rpartition(".")[2]
        for other, place in classes:
            if other.name == name and other is not node:
                yield from _fields(other, place, classes)


def _aliases(value: ast.expr | None) -> Iterator[str]:
    """Other names that a config may have for a field."""
    for word in value.keywords if isinstance(value, ast.Call) else ():
        if word.arg in ("alias", "validation_alias"):
            names = word.value.args if isinstance(word.value, ast.Call) else [word.value]
            yield from (name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str))


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
            yield Key(name=name, default="", kind="", file=path.relative_to(source).as_posix())
    for path in sorted(source.glob("recipes/*.py")):
        text = path.read_text()
        for match in re.finditer(r"\bcfg\.(?:get\(\s*\"(\w+)\"(?:,\s*(?:default=)?([^)]*))?\)|([a-z]\w*))", text):
            name, default = match[1] or match[3], (match[2] or "").strip()
            if name not in ("get", "pop", "keys"):
                yield Key(name=name, default=default, kind="", file=path.relative_to(source).as_posix())


def _dotted(content: object, prefix: str = "") -> Iterator[str]:
    """The names of the leaves of nested mappings. A set in a list counts as the only one."""
    for each in content if isinstance(content, list) else [content]:
        if isinstance(each, dict) and each:
            for key, value in each.items():
                yield from _dotted(value, f"{prefix}.{key}" if prefix else key)
        elif prefix:
            yield prefix


def table_path(tool: str) -> Path:
    """The file with a tool's table."""
    return TABLES / f"{tool.replace(' ', '-')}.tsv"


def table_of(tool: str) -> list[dict[str, str]]:
    """The rows of a tool's table."""
    with table_path(tool).open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=[*_FILES, "torchtune"])
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
