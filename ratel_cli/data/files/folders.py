"""Finds which files of a directory are the rows of a split: those that `datasets` reads.

A README's `configs` name them, or the names of files and directories do, such as `train-0.jsonl` and `test/`, or what
`save_to_disk` of `datasets` wrote beside them.
Invariants: files that are not read are named in a notice, and a split that is not there is an error. Nothing outside
the directory is read, whatever a README names, and nothing is fetched.
"""

from __future__ import annotations

import glob
import json
import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import yaml

from ratel_cli.errors import BadInput, excerpt, printable

_MOST_CARD_BYTES = 8 << 20
_SPLITS, _STATE = "dataset_dict.json", "state.json"
_METADATA = re.compile(r"\s*---\s*\n(.*?)\n---(?:\s|\Z)", re.DOTALL)
_OF_SHARD = re.compile(r"(?:.*/)?(.+)-[0-9]{5}-of-[0-9]{5}")


def files_of_split(
    root: Path, files: Collection[Path], *, split: str, name: str | None, notice: Callable[[str], None]
) -> list[Path]:
    """Find the data files below a directory that belong to a split, in the order in which `datasets` reads them.

    `name`: the configuration of the README; None: its default one. Raises BadInput if there is no such split.
    """
    label, card = printable(str(root)), root / "README.md"
    try:
        folder, patterns = _of_card(card, name)
        below = {
            path.relative_to(root / folder).as_posix(): path for path in files if path.is_relative_to(root / folder)
        }
        splits = _matching(sorted(below), patterns) if patterns else _by_names(sorted(below))
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        raise BadInput(
            f"{printable(str(card))}: its `configs` cannot be read: {excerpt(str(error), 100)}",
            hint="write them as `datasets` reads them, or name the files in `path` by a pattern",
        ) from error
    _check_split(label, split, splits)
    chosen = [below[each] for each in splits[split]]
    if unread := sorted({*files} - {*chosen}):
        names = excerpt(", ".join(str(path.relative_to(root)) for path in unread))
        notice(f"{label}: split {split!r} has {len(chosen)} of {len(files)} files; these are not read: {names}")
    return chosen


def is_saved(root: Path) -> bool:
    """Whether a directory has a dataset that `save_to_disk` of `datasets` wrote, or several as splits."""
    return (root / _SPLITS).is_file() or ((root / _STATE).is_file() and (root / "dataset_info.json").is_file())


def saved_files(root: Path, *, split: str) -> list[Path]:
    """The files of such a dataset in their order, those of a split if it has several. Raises BadInput.

    One that has no splits is what the default split stands for.
    """
    described, known = root / _STATE, ["train"]
    try:
        if (root / _SPLITS).is_file():
            described, known = root / split / _STATE, json.loads((root / _SPLITS).read_bytes())["splits"]
        _check_split(printable(str(root)), split, known)
        names = [each["filename"] for each in json.loads(described.read_bytes())["_data_files"]]
        if not all(Path(each).name == each for each in names):
            raise ValueError("it names files elsewhere")
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise BadInput(f"{printable(str(described))}: cannot be read: {excerpt(str(error), 100)}") from error
    return [described.with_name(each) for each in names]


def _check_split(label: str, split: str, splits: Collection[str]) -> None:
    """Raise BadInput if a directory has no such split."""
    if split not in splits:
        raise BadInput(
            f"{label}: there is no split {split!r}; it has: {excerpt(', '.join(splits) or 'no split')}",
            hint=f"set `split` to one of these, or name the files in `path` by a pattern: {label}/**/*.ENDING",
        )


def _of_card(card: Path, name: str | None) -> tuple[str, Mapping[str, Sequence[str]]]:
    """The directory and the patterns by split that a README gives to a configuration; both empty if it gives none.

    Raises BadInput if there is no such configuration, and many other errors if the README is malformed.
    """
    found = _METADATA.match(card.read_bytes()[:_MOST_CARD_BYTES].decode("utf-8-sig") if card.is_file() else "")
    # The base loader makes texts, lists and mappings, and merges none: what it makes is as small as the text.
    listed = (yaml.load(found[1], yaml.BaseLoader) or {}).get("configs") or () if found else ()
    configs = {each["config_name"]: each for each in listed}
    if not configs and name in (None, "default"):
        return "", {}
    marked = (each for each in configs if each == "default" or configs[each].get("default", "").lower() == "true")
    defaults = iter(configs if len(configs) == 1 else marked)
    wanted = next(defaults, None) if name is None else name
    if wanted not in configs:
        raise BadInput(
            f"{printable(str(card.parent))}: "
            + (
                "its README has several configurations and no default"
                if wanted is None
                else f"it has no configuration {wanted!r}"
            ),
            hint=f"set `name` of the dataset to one of: {excerpt(', '.join(configs) or 'default')}",
        )
    patterns: dict[str, list[str]] = {}
    data_files = configs[wanted].get("data_files") or ()
    for each in (data_files,) if isinstance(data_files, str) else data_files:
        split, paths = ("train", each) if isinstance(each, str) else (each["split"], each["path"])
        patterns.setdefault(split, []).extend(map(posixpath.normpath, (paths,) if isinstance(paths, str) else paths))
    return configs[wanted].get("data_dir") or "", patterns


def _by_names(names: Collection[str]) -> dict[str, list[str]]:
    """The files of each split by the patterns that `datasets` tries one after another, the last of which matches all.

    Of each split these are the files of one kind, the most frequent one: others may have the same rows, or none.
    """
    from datasets.data_files import ALL_DEFAULT_PATTERNS, SPLIT_PATTERN_SHARDED  # type: ignore[import-untyped]
    from datasets.load import infer_module_for_data_files_list as kind_of  # type: ignore[import-untyped]

    shards = _matching(names, {"": [SPLIT_PATTERN_SHARDED.replace("{split}", "*")]}).get("", ())
    of_shards = sorted({found[1] for found in map(_OF_SHARD.match, shards) if found})
    sharded = {each: [SPLIT_PATTERN_SHARDED.replace("{split}", glob.escape(each))] for each in of_shards}
    splits = next((found for each in (sharded, *ALL_DEFAULT_PATTERNS) if (found := _matching(names, each))), {})
    kinds = {split: kind_of(found)[0] for split, found in splits.items()}
    return {split: [each for each in found if kind_of([each])[0] == kinds[split]] for split, found in splits.items()}


def _matching(names: Collection[str], patterns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """By split: the names that match its patterns, one pattern after another. Splits without any are left out."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    regexes = {str(split): [re.compile(glob_translate(each)) for each in found] for split, found in patterns.items()}
    splits = {
        split: dict.fromkeys(name for regex in of_split for name in filter(regex.match, names))
        for split, of_split in regexes.items()
    }
    return {split: list(found) for split, found in splits.items() if found}
