"""Relative paths in the config that a run has recorded: they begin in the directory where the run was started.

No file names that directory. It is the current one if `output_dir`, as the run has recorded it, leads from here to the
run. If not, it follows from the place of the run: a run that recorded `output_dir: outputs/a` and is in
`/data/outputs/a` was started in `/data`, also if all of `/data` has moved there since. If the place says nothing, paths
begin in the current directory: the output directory was renamed, or `output_dir` is absolute or leads up with `..`.

A store that was moved together with its run, and so lies beside it as before, is the run's.

Invariant: in the directory where a run was started its config has the paths as they were written. Elsewhere they are
absolute, and `as_written` turns them back, so that hashes and what is recorded do not depend on the current directory.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.store.headers import stored_id
from ratel_cli.store.lock import DATA_FILE_NAME


def located(config: RunConfig, recorded: RunConfig, directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """`config` for the current directory: what the run in `directory` has `recorded`, with `overrides`.

    The paths of overrides begin in the current directory.
    """
    base, here = _started_in(recorded, directory), Path.cwd()
    given = _words_of(overrides)
    moved = {path: there for path, there in _moved_with(recorded, directory, base).items() if str(path) not in given}
    if _is_here(base):
        return _replaced(config, moved, {}) if moved else config
    paths, texts = set(map(str, _paths(recorded))) - given, set(_texts(recorded)) - given
    return _replaced(
        config,
        {path: moved.get(path) or (base if str(path) in paths else here) / path for path in _paths(config)},
        {text: _located_text(text, base if text in texts else here) for text in _texts(config)},
    )


def _moved_with(recorded: RunConfig, directory: Path, base: Path) -> dict[Path, Path]:
    """The stores that were moved or copied together with the run: as recorded, and where they are now.

    They lie to the run's `directory` as they lay to its recorded one. Where a store is still in its place, only a copy
    of it counts.
    """
    found: dict[Path, Path] = {}
    for path in _paths(recorded):
        before = base / path
        there = Path(os.path.normpath(directory / os.path.relpath(before, base / recorded.output_dir)))
        if _place_of(there) == _place_of(before) or not os.path.isfile(there / DATA_FILE_NAME):
            continue
        if not os.path.isfile(before / DATA_FILE_NAME) or stored_id(before) == stored_id(there):
            found[path] = there
    return found


def as_written(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """The config with its paths as the run in its `output_dir` writes them, which has `recorded` its config before.

    That is as it has recorded the same path, and absolute otherwise.
    """
    directory = config.output_dir
    base, here = _started_in(recorded, directory), Path.cwd()
    if not _is_here(base):
        paths = {_place_of(base / path): path for path in _paths(recorded)}
        texts = {_place_of(_located_text(text, base)): text for text in _texts(recorded)}
        config = _replaced(
            config,
            {path: paths.get(_place_of(here / path), here / path) for path in _paths(config)},
            {text: texts.get(_place_of(text), _located_text(text, here)) for text in _texts(config)},
        )
    place, above = os.path.realpath(directory), os.path.realpath(base)
    if os.path.realpath(base / recorded.output_dir) == place:
        output_dir = recorded.output_dir
    else:
        output_dir = Path(os.path.relpath(place, above) if Path(place).is_relative_to(above) else place)
    return config.model_copy(update={"output_dir": output_dir})


def _words_of(overrides: Sequence[str]) -> set[str]:
    """What may be a path in the values of overrides, as `_paths` and `_texts` have it."""
    values = [override.partition("=")[2].strip() for override in overrides]
    words = {word for value in values for word in (value, *re.split(r"[\s,\[\]{}\"']+|:\s", value)) if word}
    return words | {str(Path(word)) for word in words}


def _started_in(recorded: RunConfig, directory: Path) -> Path:
    """Where the paths begin that the run in `directory` has recorded: of several places, the one with its store."""
    here = Path.cwd()
    if os.path.realpath(here / recorded.output_dir) == os.path.realpath(directory):
        return here
    above = [_above(place, recorded.output_dir) for place in _places(directory)]
    bases = [base for base in above if base is not None]
    for base in bases:
        if all(os.path.isfile(base / path / DATA_FILE_NAME) for path in recorded.storage.paths):
            return base
    return bases[0] if bases else here


def _places(directory: Path) -> Iterator[Path]:
    """Where the output directory is: as it was named, and without links."""
    written, place = os.path.abspath(directory), os.path.realpath(directory)
    if os.path.realpath(written) == place:  # it is not if the path leads up out of a link
        yield Path(written)
    yield Path(place)


def _above(place: Path, output_dir: Path) -> Path | None:
    """The directory from which `output_dir` leads to `place`; None if there is none, or if any does."""
    parts = Path(os.path.normpath(output_dir)).parts
    num_above = len(place.parts) - len(parts)
    if output_dir.is_absolute() or ".." in parts or place.parts[num_above:] != parts:
        return None
    base = Path(*place.parts[:num_above])
    return base if os.path.isdir(base) else None


def _place_of(path: str | Path) -> str:
    """The path without links, to compare it; what is no path stays different from all others."""
    return os.path.realpath(path) if "\0" not in str(path) else str(path)


def _is_here(base: Path) -> bool:
    return os.path.realpath(base) == os.path.realpath(os.curdir)


def _located_text(text: str, base: Path) -> str:
    """The text with `base` before it if it is a path from there; as it is if it is something else, such as a hub id."""
    path = str(base / text) if "\0" not in text else ""
    return path if os.path.lexists(path) or any(glob.iglob(path, recursive=True)) else text


def _paths(config: RunConfig) -> list[Path]:
    """The paths in the config, without `output_dir`."""
    snapshot = config.storage.snapshot
    return [*config.storage.paths, *(() if snapshot is None else (snapshot.path,))]


def _texts(config: RunConfig) -> list[str]:
    """The texts in the config that may be paths."""
    datasets = (*config.datasets, *config.test_datasets)
    texts = (config.base_model, config.chat_template_jinja, *(each.path for each in datasets))
    return [text for text in texts if text is not None]


def _replaced(config: RunConfig, paths: Mapping[Path, Path], texts: Mapping[str, str]) -> RunConfig:
    """The config with other paths and texts, wherever `_paths` and `_texts` find them."""
    storage = config.storage
    changed: dict[str, object] = {"paths": tuple(paths.get(path, path) for path in storage.paths)}
    if storage.snapshot is not None:
        path = storage.snapshot.path
        changed["snapshot"] = storage.snapshot.model_copy(update={"path": paths.get(path, path)})
    update: dict[str, object] = {"storage": storage.model_copy(update=changed)}
    for key, text in (("base_model", config.base_model), ("chat_template_jinja", config.chat_template_jinja)):
        if text is not None:
            update[key] = texts.get(text, text)
    for key, datasets in (("datasets", config.datasets), ("test_datasets", config.test_datasets)):
        update[key] = tuple(each.model_copy(update={"path": texts.get(each.path, each.path)}) for each in datasets)
    return config.model_copy(update=update)
