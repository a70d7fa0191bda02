"""Sidecars: the files next to the weights, that is configuration, tokenizer, chat template, generation defaults.

An export copies them from its base model, so that nothing that its author wrote is lost. Only the configuration
changes, where it would be wrong for the new weights. Invariant: sidecars are never code and never weights.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import transformers
from transformers import GenerationConfig, PreTrainedModel

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.export.export_layout import ExportLayout
from ratel_cli.model.export.staging import Staging
from ratel_cli.model.files.directory import ADAPTER_CONFIG_NAME, read_json_object, trusted_file
from ratel_cli.model.files.kind import text_config
from ratel_cli.model.files.skeleton import read_any_config
from ratel_cli.model.values.special_tokens import SpecialTokens
from ratel_cli.sizes import DtypeName

VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tekken.json",
    "*vocab.json", "vocab-*.json", "vocab.txt", "dict.txt", "merges.txt", "bpe.codes", "byte_maps.json", "emoji.json",
    "normalizer.json", "word_pronunciation.json", "word_shape.json", "prophetnet.tokenizer", "tokenizer.model",
    "tokenizer.model.v*", "sentencepiece*.model", "sp*.model", "*.spm", "*.tiktoken",
)  # fmt: skip
"""Files of tokenizers, of whatever class."""
_COPIED = (
    *VOCABULARY_FILES, "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "*processor_config.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
_LEFT_OUT = frozenset({"torch_dtype", "auto_map", "quantization_config", "compression_config"})
"""Keys that are left out of a configuration and its parts: an export is never quantised."""
GENERATION_NAME = "generation_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
"""Name of the file of a chat template, which a loader takes wherever it finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What an export has of a run's tokenizer."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """By name: of the files that the run has changed."""
    names: tuple[str, ...] = ()
    """Names of the files that a tokenizer of its class is made of."""
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    """Named by the model's configurations, too."""


class Sidecars(ABC):
    """The files of an export next to its weights, but for the card."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The names of all sidecars that an export may have."""

    @property
    @abstractmethod
    def copied_bytes(self) -> int:
        """The space that copies take. What is written is small."""

    @abstractmethod
    def add(self, staging: Staging, layout: ExportLayout) -> None:
        """Put all of them into `staging`, beside weights of this layout.

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

    def add(self, staging: Staging, layout: ExportLayout) -> None:  # noqa: ARG002
        """See Sidecars."""
        for name, text in self.texts.items():
            staging.write_text(name, text)
        for name, path in self.copies.items():
            staging.copy(path, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSidecars(Sidecars):
    """The sidecars of a base model of transformers."""

    _configurations: ClassVar[tuple[str, ...]] = ("config.json", GENERATION_NAME)
    base_dir: Path
    tokenizer: Callable[[], TokenizerFiles] = TokenizerFiles
    """Makes the files of the run's tokenizer. May raise BadInput."""

    @property
    def names(self) -> list[str]:
        """See Sidecars."""
        copied = _copied_names(self.base_dir)
        return list(dict.fromkeys([*self._configurations, TOKENIZER_CONFIG_NAME, TEMPLATE_NAME, *copied]))

    @property
    def copied_bytes(self) -> int:
        """See Sidecars."""
        paths = [self.base_dir / name for name in _copied_names(self.base_dir)]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def add(self, staging: Staging, layout: ExportLayout) -> None:
        """See Sidecars."""
        files = self.tokenizer()
        self._configure(staging, layout, files.special_tokens)
        for name in _copied_names(self.base_dir, more=files.names):
            if name not in files.texts:
                staging.copy(trusted_file(self.base_dir, name), name)
        for name, text in files.texts.items():
            staging.write_text(name, text)

    def _configure(self, staging: Staging, layout: ExportLayout, tokens: SpecialTokens) -> None:
        """Write the configuration of the model, and its defaults for generation if it generates."""
        model_config = read_any_config(self.base_dir)
        text = text_config(model_config)
        defaults = generation_defaults(self.base_dir) if _generates(layout.architecture) else None
        of_text, of_generation = tokens.aligned(text.to_dict(), defaults)
        config = _cleaned(read_json_object(self.base_dir, "config.json"), layout.dtype)
        config.pop("num_labels" if "id2label" in layout.settings else "", None)
        places = (key for key in model_config.sub_configs if getattr(model_config, key, None) is text)
        part = config.get(next(places, ""))
        (part if isinstance(part, dict) else config).update(of_text)
        if layout.num_rows not in (None, getattr(text, "vocab_size", None)):
            (part if isinstance(part, dict) else config)["vocab_size"] = layout.num_rows
        config |= {**layout.settings, "architectures": [layout.architecture], "dtype": layout.dtype}
        staging.write_text("config.json", json.dumps(config, indent=2) + "\n")
        has_file = (self.base_dir / GENERATION_NAME).exists()
        if defaults is not None and (of_generation or not has_file):
            staging.write_text(GENERATION_NAME, json.dumps({**defaults, **of_generation}, indent=2) + "\n")
        elif has_file:
            staging.copy(trusted_file(self.base_dir, GENERATION_NAME), GENERATION_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSidecars(BaseSidecars):
    """The sidecars of an adapter: the base model's tokenizer, and a configuration of its own."""

    _configurations = (ADAPTER_CONFIG_NAME,)
    config_text: str

    def _configure(self, staging: Staging, layout: ExportLayout, tokens: SpecialTokens) -> None:  # noqa: ARG002
        staging.write_text(ADAPTER_CONFIG_NAME, self.config_text)


def check_sidecars(base_dir: Path) -> None:
    """Raise BadInput if a file that an export copies cannot be used. The configuration was read before."""
    generation_defaults(base_dir)
    for name in _copied_names(base_dir):
        if not os.access(trusted_file(base_dir, name), os.R_OK):
            raise BadInput(f"{base_dir}: file {excerpt(name)} cannot be read", "give yourself the right to read it")


def _generates(architecture: str) -> bool:
    """Whether models of this class of transformers generate text."""
    found = getattr(transformers, architecture, None)
    return not (isinstance(found, type) and issubclass(found, PreTrainedModel)) or found.can_generate()


def generation_defaults(base_dir: Path) -> dict[str, object]:
    """The base model's defaults for generation, which transformers makes if it has no file of them. Raises BadInput."""
    if (base_dir / GENERATION_NAME).exists():
        return read_json_object(base_dir, GENERATION_NAME)
    made: dict[str, object] = json.loads(GenerationConfig.from_model_config(read_any_config(base_dir)).to_json_string())
    return made


def _copied_names(base_dir: Path, *, more: Iterable[str] = ()) -> list[str]:
    """`more`: names of files besides those that tokenizers are known to have."""
    paths = [path for pattern in _COPIED for path in sorted(base_dir.glob(pattern))]
    paths += [base_dir / name for name in more if os.path.lexists(base_dir / name)]
    return list(dict.fromkeys(str(path.relative_to(base_dir)) for path in paths if not path.is_dir()))


def _cleaned(config: Mapping[str, object], dtype: DtypeName) -> dict[str, object]:
    """A configuration whose parts have the data type of the whole, under its present name."""
    kept = {
        key: _cleaned(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _LEFT_OUT
    }
    return kept | {"dtype": dtype} if "torch_dtype" in config or "dtype" in config else kept
