"""Sidecars: the files next to the weights, that is configuration, tokenizer, chat template, generation defaults.

An export copies them from its base model, so that nothing that its author wrote is lost. Only the configuration
changes, where it would be wrong for the new weights. Invariant: sidecars are never code and never weights.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import transformers
from transformers import GenerationConfig, PreTrainedModel

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.directory import trusted_file
from ratel_cli.model.export_layout import ExportLayout
from ratel_cli.model.skeleton import read_any_config
from ratel_cli.model.staging import Staging
from ratel_cli.sizes import DtypeName

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.tiktoken", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "*.model.v*", "tekken.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
GENERATION_NAME = "generation_config.json"
TEMPLATE_NAME = "chat_template.jinja"
"""Of a chat template, which a loader takes wherever it finds it."""


class Sidecars(ABC):
    """The files of an export next to its weights, but for the card."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of all that an export may have."""

    @property
    @abstractmethod
    def copied_bytes(self) -> int:
        """The space that copies take. What is written is small."""

    @abstractmethod
    def add(self, staging: Staging, layout: ExportLayout, dtype: DtypeName) -> None:
        """Put all of them into `staging`, beside weights of this layout, trained ones in `dtype`.

        Raises BadInput if a file cannot be used, EnvironmentFailure if one cannot be written.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSidecars(Sidecars):
    """Texts and copies that are known before the weights are."""

    texts: Mapping[str, str]
    """By name."""
    copies: Mapping[str, Path] = field(default_factory=dict)
    """By name: what is copied."""
    reserved: tuple[str, ...] = ()
    """Other names that a loader would read."""

    @property
    def names(self) -> list[str]:
        """See Sidecars."""
        return [*self.texts, *self.copies, *self.reserved]

    @property
    def copied_bytes(self) -> int:
        """See Sidecars."""
        return sum(path.stat().st_size for path in self.copies.values())

    def add(self, staging: Staging, layout: ExportLayout, dtype: DtypeName) -> None:  # noqa: ARG002
        """See Sidecars."""
        for name, text in self.texts.items():
            staging.write_text(name, text)
        for name, path in self.copies.items():
            staging.copy(path, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSidecars(Sidecars):
    """Those of a base model of transformers."""

    base_dir: Path
    replaced: Callable[[], Mapping[str, str]] = dict
    """By name: the text of files that the run has changed."""

    @property
    def names(self) -> list[str]:
        """See Sidecars."""
        names = dict.fromkeys(["config.json", GENERATION_NAME, TEMPLATE_NAME, *_copied_names(self.base_dir)])
        return list(names)

    @property
    def copied_bytes(self) -> int:
        """See Sidecars."""
        paths = [self.base_dir / name for name in _copied_names(self.base_dir)]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def add(self, staging: Staging, layout: ExportLayout, dtype: DtypeName) -> None:
        """See Sidecars."""
        changes = {**layout.settings, "architectures": [layout.architecture], "dtype": dtype}
        staging.write_text("config.json", _config(self.base_dir, changes))
        replaced = self.replaced()
        for name in _copied_names(self.base_dir):
            if name not in replaced:
                staging.copy(trusted_file(self.base_dir, name), name)
        for name, text in replaced.items():
            staging.write_text(name, text)
        defaults = _generation_defaults(self.base_dir)
        if isinstance(defaults, Path):
            staging.copy(defaults, GENERATION_NAME)
        elif _generates(layout.architecture):
            staging.write_text(GENERATION_NAME, defaults)


def copied_files(base_dir: Path) -> dict[str, Path]:
    """By name: what an export of any kind copies, which is all but configurations. Raises BadInput."""
    return {name: trusted_file(base_dir, name) for name in _copied_names(base_dir)}


def check_sidecars(base_dir: Path) -> None:
    """Raise BadInput if a file that an export copies cannot be used. The configuration was read before."""
    _generation_defaults(base_dir)
    for name in _copied_names(base_dir):
        if not os.access(trusted_file(base_dir, name), os.R_OK):
            raise BadInput(f"{base_dir}: file {excerpt(name)} cannot be read", "give yourself the right to read it")


def _generates(architecture: str) -> bool:
    """Whether models of this class of transformers generate text."""
    found = getattr(transformers, architecture, None)
    return not (isinstance(found, type) and issubclass(found, PreTrainedModel)) or found.can_generate()


def _generation_defaults(base_dir: Path) -> Path | str:
    """The file with the base model's defaults for generation; their text if it has none. Raises BadInput."""
    if (base_dir / GENERATION_NAME).exists():
        return trusted_file(base_dir, GENERATION_NAME)
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
    for name in ("torch_dtype", "auto_map", "quantization_config"):  # an export is never quantised
        config.pop(name, None)
    config.pop("num_labels" if "id2label" in changes else "", None)
    return json.dumps({**config, **changes}, indent=2) + "\n"
