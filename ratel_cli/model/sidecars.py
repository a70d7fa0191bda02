"""Sidecars: the files next to the weights, that is configuration, tokenizer, chat template, generation defaults, card.

An export copies them from the base model, so that nothing that its author wrote is lost. Only the configuration
changes, where it would be wrong for the new weights. Invariant: sidecars are never code and never weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers import GenerationConfig, PreTrainedModel

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.card import CARD_NAME, PICTURE_NAME, Card, card_text
from ratel_cli.model.directory import trusted_file
from ratel_cli.model.skeleton import read_any_config
from ratel_cli.model.spec import ModelSpec
from ratel_cli.model.staging import Staging
from ratel_cli.sizes import DtypeName
from ratel_cli.units import MIB

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.tiktoken", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
_GENERATION_NAME = "generation_config.json"
_WRITTEN_BYTES = 2 * MIB
"""Space for the sidecars that are not copied: configuration, card and curves, all below 1 MiB together."""


def sidecar_names(base_dir: Path) -> list[str]:
    """The names of all sidecars that `add_sidecars` may write."""
    return ["config.json", CARD_NAME, PICTURE_NAME, _GENERATION_NAME, *_copied_names(base_dir)]


def sidecar_bytes(base_dir: Path) -> int:
    """The space that all sidecars take."""
    paths = [base_dir / name for name in _copied_names(base_dir)]
    return sum(path.stat().st_size for path in paths if path.is_file()) + _WRITTEN_BYTES


def check_sidecars(base_dir: Path) -> None:
    """Raise BadInput if a file that an export copies cannot be used. The configuration was read before."""
    _generation_defaults(base_dir)
    for name in _copied_names(base_dir):
        if not os.access(trusted_file(base_dir, name), os.R_OK):
            raise BadInput(f"{base_dir}: file {excerpt(name)} cannot be read", "give yourself the right to read it")


def add_sidecars(
    staging: Staging,
    *,
    base_dir: Path,
    spec: ModelSpec,
    architecture: str,
    settings: Mapping[str, object],
    dtype: DtypeName,
    card: Card,
    num_updates: int,
    replaced: Mapping[str, str],
) -> None:
    """Put all sidecars into `staging`.

    `architecture`: the class that loads the weights. `settings`: what config.json says besides.
    `replaced`: by name, the text of files that the run has changed.

    Raises BadInput if a file of the base model cannot be used, EnvironmentFailure if one cannot be written.
    """
    staging.write_text("config.json", _config(base_dir, {**settings, "architectures": [architecture], "dtype": dtype}))
    staging.write_text(CARD_NAME, card_text(card, spec, dtype=dtype, num_updates=num_updates))
    if card.picture is not None:
        staging.write_bytes(PICTURE_NAME, card.picture)
    for name in _copied_names(base_dir):
        if name not in replaced:
            staging.copy(trusted_file(base_dir, name), name)
    for name, text in replaced.items():
        staging.write_text(name, text)
    defaults = _generation_defaults(base_dir)
    if isinstance(defaults, Path):
        staging.copy(defaults, _GENERATION_NAME)
    elif _generates(architecture):
        staging.write_text(_GENERATION_NAME, defaults)


def _generates(architecture: str) -> bool:
    """Whether models of this class of transformers generate text."""
    found = getattr(transformers, architecture, None)
    return not (isinstance(found, type) and issubclass(found, PreTrainedModel)) or found.can_generate()


def _generation_defaults(base_dir: Path) -> Path | str:
    """The file with the base model's defaults for generation; their text if it has none. Raises BadInput."""
    if (base_dir / _GENERATION_NAME).exists():
        return trusted_file(base_dir, _GENERATION_NAME)
    return GenerationConfig.from_model_config(read_any_config(base_dir)).to_json_string()


def _copied_names(base_dir: Path) -> list[str]:
    paths = [path for pattern in _COPIED for path in sorted(base_dir.glob(pattern)) if not path.is_dir()]
    return [str(path.relative_to(base_dir)) for path in paths]


def _config(base_dir: Path, changes: Mapping[str, object]) -> str:
    """The base model's configuration with some changes and without references to code."""
    path = trusted_file(base_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not valid JSON: {excerpt(str(error))}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path}: not a JSON object")
    for name in ("torch_dtype", "auto_map"):
        config.pop(name, None)
    config.pop("num_labels" if "id2label" in changes else "", None)
    return json.dumps({**config, **changes}, indent=2) + "\n"
