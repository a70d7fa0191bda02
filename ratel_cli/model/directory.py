"""Where a base model lies: a hub id or a directory, and which of its files may be opened.

`run.inputs` resolves `base_model` here; `model.checkpoint` and `model.export_weights` open files only
through `trusted_file`. Invariant: nothing outside the model's directory (or, for the hub's cache, the
`blobs` beside it) is ever opened, nothing but a regular file is, and pickles and code never are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.model.shards import MAX_HEADER_BYTES, escaped, unique_keys

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*"]
_NOT_DOWNLOADED = ["*/*", "consolidated*", "*.py"]
_OPENED_BY_TRANSFORMERS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "additional_chat_templates/*.jinja")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_FOREIGN_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The safetensors files of a model, checked and resolved but not yet opened."""

    paths: tuple[Path, ...]
    listed: tuple[tuple[str, Path], ...]
    """Which file holds each tensor, by the index; empty for a single file."""


def resolve_base_model(base_model: str, *, download: Callable[[str], str] | None = None) -> Path:
    """The directory of a local model, or of a hub model after downloading it.

    Raises BadInput when there is no such model, EnvironmentFailure when the hub cannot be reached.
    """
    if not base_model or not base_model.isprintable():
        raise BadInput(f"base_model: {escaped(base_model)!r} is neither a directory nor a hub id")
    local = Path(base_model)
    with contextlib.suppress(RuntimeError):  # a user that does not exist
        local = local.expanduser()
    # Not by methods of Path: they raise for names that are too long.
    if os.path.isdir(local):
        return local
    if os.path.exists(local):
        raise BadInput(f"base_model: {escaped(base_model)} is a file", "give the directory that holds config.json")
    if _HUB_ID.fullmatch(base_model) is None or ".." in base_model:
        raise BadInput(f"base_model: there is no directory {escaped(base_model)}, and it is not a hub id either")
    return _fetch(base_model, download or _download)


def find_weight_files(directory: Path) -> WeightFiles:
    """What transformers would load from here: one file, or the shards that the index names."""
    if _is_present(directory / WEIGHTS_NAME):
        return WeightFiles(paths=(trusted_file(directory, WEIGHTS_NAME),), listed=())
    if not _is_present(directory / INDEX_NAME):
        raise _no_weights(directory)
    weight_map = _read_weight_map(trusted_file(directory, INDEX_NAME))
    paths: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        if not name.endswith(".safetensors"):
            raise BadInput(f"{directory / INDEX_NAME}: {escaped(name)} is not a safetensors file")
        paths[name] = trusted_file(directory, name)
    return WeightFiles(
        paths=tuple(paths.values()), listed=tuple((tensor, paths[name]) for tensor, name in weight_map.items())
    )


def check_companions(directory: Path) -> None:
    """Raise BadInput if a file that transformers would open by itself is none that may be opened."""
    for pattern in _OPENED_BY_TRANSFORMERS:
        for path in sorted(directory.glob(pattern)):
            trusted_file(directory, str(path.relative_to(directory)))


def trusted_file(directory: Path, name: str) -> Path:
    """The real path of a file of the model. Raises BadInput, before any open, unless it is one.

    Links may point into the model's own directory; in the hub's cache (`snapshots/REVISION`) also into
    `blobs`, where the cache keeps the files of every revision.
    """
    shown = f"{directory}: file {escaped(name)}"
    parts = PurePosixPath(name).parts
    if "\0" in name or not parts or name.startswith("/") or ".." in parts:
        raise BadInput(f"{shown} is not inside the model's directory")
    try:
        root = directory.resolve(strict=True)
        path = (directory / name).resolve(strict=True)
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise BadInput(f"{shown} is missing") from error
    except (OSError, RuntimeError, ValueError) as error:  # a ValueError: half characters cannot be in a file name
        raise BadInput(f"{shown} cannot be reached: {getattr(error, 'strerror', error)}") from error
    in_blobs = root.parent.name == "snapshots" and path.parent == root.parent.parent / "blobs"
    if not path.is_relative_to(root) and not in_blobs:
        raise BadInput(f"{shown} is a link that leaves the model's directory", "put the file itself there")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{shown} is not a regular file")
    return path


def _is_present(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _no_weights(directory: Path) -> BadInput:
    foreign = sorted({path.name for pattern in _FOREIGN_WEIGHTS for path in directory.glob(pattern)})
    if not foreign:
        return BadInput(
            f"{directory}: no {WEIGHTS_NAME} and no {INDEX_NAME}",
            "set random_init: true to start from the config's initialiser",
        )
    return BadInput(
        f"{directory}: {escaped(foreign[0])} is not safetensors, and other formats are never loaded: they can run code",
        "convert it once, where you trust its author: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)",
    )


def _read_weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise BadInput(f"{path}: {path.stat().st_size} bytes are too many for an index")
    try:
        index = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be parsed: {escaped(str(error))}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadInput(f"{path}: weight_map must map tensor names to file names")
    return weight_map


def _fetch(repository: str, download: Callable[[str], str]) -> Path:
    """Download a hub model, telling the hub's failures in our words."""
    from huggingface_hub import errors

    try:
        return Path(download(repository))
    except errors.GatedRepoError as error:
        raise BadInput(
            f"base_model: {repository} asks for its licence to be accepted",
            "accept it on the model's page, then log in with `hf auth login`",
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise BadInput(f"base_model: there is no directory and no hub model named {repository}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError) as error:
        raise EnvironmentFailure(
            f"base_model: {repository} is not in the cache and the hub cannot be reached",
            "check the network, or give a local directory",
        ) from error
    except OSError as error:
        raise EnvironmentFailure(f"base_model: {repository} cannot be downloaded: {error.strerror or error}") from error


def _download(repository: str) -> str:
    """Weights, configuration and tokenizer of a hub model; nothing that could be code."""
    from huggingface_hub import snapshot_download

    return snapshot_download(repository, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED)
