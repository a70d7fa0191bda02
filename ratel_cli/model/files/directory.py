"""A base model's directory: how `base_model` is resolved to it, and which of its files may be opened.

Invariant: files of a base model are opened only after `trusted_file` has checked them. So nothing outside the model's
directory is opened (except `blobs` next to it in the hub's cache), nothing but regular files, and never a pickle or
code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from ratel_cli.errors import BadInput, EnvironmentFailure, excerpt
from ratel_cli.model.files.shards import MAX_HEADER_BYTES, unique_keys

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DENOISER_WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
"""The name that diffusers has for it."""
ADAPTER_WEIGHTS_NAME, ADAPTER_CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
"""Names of the files of an adapter in PEFT's format."""

_READ_BY_TRANSFORMERS = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", "*.spm", "*.tiktoken", "*.codes", "*.tokenizer",
)  # fmt: skip
"""Configurations, and what its tokenizers are made of."""
_DOWNLOADED = ["*.safetensors", *_READ_BY_TRANSFORMERS, "LICENSE*", "NOTICE*"]
_NOT_DOWNLOADED = ["*/*", "consolidated*", "*.py"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONFIG_NAME = "config.json"
_USE_SAFETENSORS = f"use a directory, or a hub id, with {_CONFIG_NAME} and safetensors files"
_MERGE = (
    "merge the adapter into its base model and train the result: "
    "PeftModel.from_pretrained(BASE, ADAPTER).merge_and_unload().save_pretrained(NEW)"
)
_CONVERT_GGUF = (
    "use the model that it was made from; if its weights are floating-point, convert it: "
    "AutoModelForCausalLM.from_pretrained(OLD, gguf_file=NAME, dtype=...).save_pretrained(NEW)"
)
_USE_TRANSFORMERS_VERSION = "use the version for transformers, with config.json and model.safetensors or its shards"
_ADAPTER = ("adapter_config.json", "adapter_model.*")
_OTHER_DIRECTORIES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        _ADAPTER,
        "belongs to an adapter (LoRA or another of PEFT), and the model itself is not there",
        _MERGE,
    ),
    (
        ("*.gguf",),
        "is not a safetensors file but GGUF, a format for inference, whose weights are usually quantised",
        _CONVERT_GGUF,
    ),
    (
        ("model_index.json",),
        "belongs to a diffusion pipeline, whose transformer is trained on datasets of type: latents",
        "set base_model to its directory transformer",
    ),
    (
        ("consolidated*", "params.json"),
        "is in the format of the model's maker, which transformers does not read",
        _USE_TRANSFORMERS_VERSION,
    ),
)
"""What else a directory may be: files that show it, what is said of them, and a hint."""
_NUM_SAMPLED, _SAMPLED_BYTES = 256, 4096
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The safetensors files of a model. They are checked and resolved, but not yet opened."""

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    """The name of each in the model's directory."""
    listed: tuple[tuple[str, Path], ...]
    """(tensor, file) for each tensor of the index; empty for a single file."""


def resolve_base_model(
    base_model: str, *, revision: str | None = None, download: Callable[[str], str] | None = None
) -> Path:
    """The directory of the model that the config's `base_model` names; a hub model is downloaded into the hub's cache.

    `revision`: of a hub model. `download` gets a hub id and returns a directory. Raises BadInput if there is no such
    model, EnvironmentFailure if the hub cannot be reached or the files cannot be written.
    """
    if not base_model or not base_model.isprintable():
        raise BadInput(f"base_model: '{excerpt(base_model)}' is neither a directory nor a hub id")
    local = Path(base_model)
    with contextlib.suppress(RuntimeError):  # a user that does not exist
        local = local.expanduser()
    # Not by methods of Path: they raise for names that are too long.
    if os.path.isdir(local):
        if revision is not None:
            error = BadInput(
                f"revision_of_model: {excerpt(base_model)} is a directory, which has one revision", "remove the key"
            )
            error.key = ("revision_of_model",)
            raise error
        return local
    if os.path.exists(local):
        raise BadInput(
            f"base_model: {excerpt(base_model)} is a file", f"set it to the directory that contains {_CONFIG_NAME}"
        )
    if _HUB_ID.fullmatch(base_model) is None or ".." in base_model:
        raise BadInput(
            f"base_model: there is no directory {excerpt(base_model)}, and this cannot be a hub id",
            "set it to the model's directory, or to a hub id like OWNER/NAME",
        )
    return _fetch(base_model, revision, download or partial(_download, revision=revision))


def read_json_object(directory: Path, name: str) -> dict[str, object]:
    """The content of a JSON file of the model. Raises BadInput."""
    path = trusted_file(directory, name)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {excerpt(str(error))}") from error
    if not isinstance(values, dict):
        raise BadInput(f"{path}: not a JSON object")
    return values


def index_name_of(weights_name: str) -> str:
    """The name of the index beside the shards that take the place of a file of weights."""
    return f"{weights_name}.index.json"


def find_weight_files(directory: Path, *, weights_name: str = WEIGHTS_NAME) -> WeightFiles:
    """The weights that transformers would load from a directory: one file, or the shards of an index. `weights_name`:
    of the file, where it is not transformers'.

    Raises BadInput if there are none, or if a file is unsafe, missing or of another format.
    """
    index_name = index_name_of(weights_name)
    if _is_present(directory / weights_name):
        return WeightFiles(paths=(trusted_file(directory, weights_name),), names=(weights_name,), listed=())
    if not _is_present(directory / index_name):
        raise _no_weights(directory, weights_name)
    weight_map = _read_weight_map(trusted_file(directory, index_name))
    paths: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        if not name.endswith(".safetensors"):
            raise BadInput(f"{directory / index_name}: {excerpt(name)} in weight_map is not a .safetensors file")
        paths[name] = trusted_file(directory, name)
    return WeightFiles(
        paths=tuple(paths.values()),
        names=tuple(paths),
        listed=tuple((tensor, paths[name]) for tensor, name in weight_map.items()),
    )


def has_weights(directory: Path) -> bool:
    """Whether there are any, usable or not."""
    return _is_present(directory / WEIGHTS_NAME) or _is_present(directory / INDEX_NAME)


def adapter_files(directory: Path) -> list[str]:
    """The names of the files of an adapter that lie beside a model. transformers' loader of models leaves them out."""
    return sorted({path.name for pattern in _ADAPTER for path in directory.glob(pattern)})


def check_sidecars(directory: Path) -> None:
    """Check the small files before transformers reads them.

    Raises BadInput if there is no configuration, with what the directory is instead, or if transformers would open a
    file that may not be opened.
    """
    if not _is_present(directory / _CONFIG_NAME):
        raise _no_config(directory)
    for pattern in (*_READ_BY_TRANSFORMERS, "additional_chat_templates/*.jinja"):
        for path in sorted(directory.glob(pattern)):
            trusted_file(directory, str(path.relative_to(directory)))


def trusted_file(directory: Path, name: str) -> Path:
    """The real path of a file of the model. Raises BadInput, before the file is opened, if it may not be opened.

    Links may point into the model's own directory. In the hub's cache (`snapshots/REVISION`) they may also point into
    `blobs`, where the cache has the files of all revisions.
    """
    shown = f"{directory}: file {excerpt(name)}"
    parts = PurePosixPath(name).parts
    if "\0" in name or not parts or name.startswith("/") or ".." in parts:
        raise BadInput(f"{shown} is outside the model's directory")
    try:
        root = directory.resolve(strict=True)
        path = (directory / name).resolve(strict=True)
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise BadInput(f"{shown} is missing") from error
    except (OSError, RuntimeError, ValueError) as error:  # ValueError: half of a surrogate pair in the name
        raise BadInput(f"{shown} cannot be opened: {getattr(error, 'strerror', error)}") from error
    in_blobs = root.parent.name == "snapshots" and path.parent == root.parent.parent / "blobs"
    if not path.is_relative_to(root) and not in_blobs:
        raise BadInput(f"{shown} is a link to a file outside the model's directory", "copy the file into the directory")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{shown} is not a regular file")
    return path


def _is_present(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _no_config(directory: Path) -> BadInput:
    """Why a directory without a configuration is no model, as far as its files show it."""
    if _is_present(directory / "run" / "config.yaml") and _names(directory, _ADAPTER):
        return BadInput(
            f"{directory}: this is an adapter that a run has trained, without the model that it belongs to",
            f"merge it into its model with `ratel merge {directory} -o DIR`, and set base_model: DIR; or train it "
            f"further beside the same base_model, with --from {directory}",
        )
    if _is_present(directory / "run" / "config.yaml"):
        return BadInput(
            f"{directory}: no {_CONFIG_NAME}: this run has not exported a model yet",
            f"export it first: `ratel export {directory}`",
        )
    inner = sorted(path.parent.name for path in directory.glob(f"*/{_CONFIG_NAME}"))
    fact = f"{directory}: no {_CONFIG_NAME}: this is not a model's directory"
    if inner:
        return _other_directory(directory) or BadInput(fact, f"did you mean {directory / excerpt(inner[0])}?")
    return _other_directory(directory) or BadInput(fact, _USE_SAFETENSORS)


def _no_weights(directory: Path, weights_name: str) -> BadInput:
    other = _other_directory(directory)
    if other is not None:
        return other
    pickles = _names(directory, _PICKLES)
    if not pickles:
        return BadInput(
            f"{directory}: no weights: there is no {weights_name} and no {index_name_of(weights_name)}",
            "check base_model, or set random_init: true to start from random weights",
        )
    return BadInput(
        f"{directory}: {excerpt(pickles[0])} is not a safetensors file; other formats are never loaded, since they can"
        " contain code",
        "if you trust its author, convert it: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)",
    )


def _other_directory(directory: Path) -> BadInput | None:
    """What the directory is if it is no model's; None if nothing shows it."""
    for patterns, fact, hint in _OTHER_DIRECTORIES:
        names = _names(directory, patterns)
        if names:
            return BadInput(f"{directory}: {excerpt(names[0])} {fact}", hint)
    return None


def _names(directory: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted({path.name for pattern in patterns for path in directory.glob(pattern)})


def _read_weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise BadInput(
            f"{path}: an index of {path.stat().st_size} bytes is too large; the limit is {MAX_HEADER_BYTES} bytes"
        )
    try:
        index = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON: {excerpt(str(error))}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadInput(f"{path}: weight_map must map tensor names to file names")
    return weight_map


def _fetch(repository: str, revision: str | None, download: Callable[[str], str]) -> Path:
    """Download a hub model. Translates the hub's exceptions into ours."""
    from huggingface_hub import errors

    try:
        return Path(download(repository))
    except errors.GatedRepoError as error:
        raise BadInput(
            f"base_model: the hub gives {repository} only to users who have accepted its licence",
            "accept the licence on the model's page, then log in with `hf auth login`",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise BadInput(
            f"revision_of_model: the hub's {repository} has no branch, tag or commit {excerpt(str(revision))}",
            "check the spelling on the model's page",
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise BadInput(
            f"base_model: there is no directory and no hub model named {repository}",
            "check the spelling; for a private model, log in with `hf auth login`",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError) as error:
        if means_directory(repository):
            owner = repository.partition("/")[0]
            message = f"base_model: there is no directory {repository}, and the hub cannot be reached"
            raise EnvironmentFailure(message, f"check the spelling: {owner} exists here") from error
        raise EnvironmentFailure(
            f"base_model: {repository} is not in the hub's cache, and the hub cannot be reached",
            "check the network, or set base_model to a local directory",
        ) from error
    except OSError as error:
        raise EnvironmentFailure(f"base_model: {repository} cannot be downloaded: {error.strerror or error}") from error


def means_directory(name: str) -> bool:
    """Whether a name like OWNER/NAME that is no directory rather means one: there is one named OWNER."""
    return os.path.isdir(name.partition("/")[0])


def _download(repository: str, revision: str | None) -> str:
    """Download weights, configuration and tokenizer of a hub model, and nothing that could be code."""
    from huggingface_hub import snapshot_download

    return snapshot_download(repository, revision=revision, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED)


def sampled_weights_hash(directory: Path) -> str:
    """A hash of the files of weights: their names and sizes, and parts of each, evenly spread.

    It costs the same for files of any size, is that of a copy too, and is another one once the weights were trained.
    Raises as `find_weight_files`, and EnvironmentFailure if they cannot be read.
    """
    files, digest = find_weight_files(directory), hashlib.sha256()
    for name, path in zip(files.names, files.paths, strict=True):
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{len(name)} {name} {size} ".encode())
                for number in range(_NUM_SAMPLED):
                    file.seek(size * number // _NUM_SAMPLED)
                    digest.update(file.read(_SAMPLED_BYTES))
        except OSError as error:
            raise EnvironmentFailure(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def weights_bytes(directory: Path) -> int:
    """Size of all files of weights in a directory."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
