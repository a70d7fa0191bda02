"""The language model that a config names, before training: its skeleton, its weights, its files.

Invariant: what training cannot use is rejected by name before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.errors import BadInput, ErrorList
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.probe import special_tokens
from ratel_cli.model.export.checkpoint import CheckpointSource, install_buffers, persistent_buffers
from ratel_cli.model.export.export_layout import ExportLayout, layout_of_model
from ratel_cli.model.export.reload import load_language_model
from ratel_cli.model.export.sidecars import BaseSidecars, TokenizerFiles, check_sidecars
from ratel_cli.model.files.import_weights import WeightSource
from ratel_cli.model.files.initialise import RandomSource
from ratel_cli.model.files.new_rows import NewRows
from ratel_cli.model.files.quantised_files import quantisation_of
from ratel_cli.model.files.quantised_formats import method_of
from ratel_cli.model.files.quantised_model import packed_names
from ratel_cli.model.values.flash_attention import require_deterministic
from ratel_cli.run.inputs.base import Base, Weights
from ratel_cli.run.inputs.settings import quantised_form
from ratel_cli.run.inputs.tokenizer import RunTokenizer, read_tokenizer, tokenizer_files
from ratel_cli.run.inputs.unused_parts import unused_parts
from ratel_cli.units import counted

_NUM_TOKENS = 16
_TOKEN_STRIDE = 7919
"""A prime, so that the tokens come from the whole vocabulary. They are the same ones each time."""


@dataclass(frozen=True, kw_only=True)
class LanguageBase(Base):
    """A language model without its weights."""

    outputs, library = "logits", "transformers"
    directory: Path
    config: PretrainedConfig
    """What config.json describes: a language model, or a model with more parts."""
    attention: str
    """The attention kernel that is used."""
    model: DecoderModel
    read_tokenizer: Callable[[], RunTokenizer]
    """Reads the run's tokenizer the first time. Raises BadInput."""
    labels: tuple[str, ...] = ()
    """The names of a classifier's classes."""
    new_rows: NewRows | None = None
    """What the vocabulary has beyond that of the files."""

    def open_weights(self, config: RunConfig, resources: ExitStack) -> Weights:
        """See Base. The skeleton gets the buffers."""
        skeleton, spec = self.model.skeleton, self.model.spec
        if config.random_init:
            if self.model.has_other_parts:
                raise BadInput(
                    f"random_init: the other parts of {spec.architecture} would have no weights",
                    "set base_model to a directory with a language model's config.json, or remove random_init",
                )
            return RandomSource(skeleton, config.seed, self.model.task), self.layout(config)
        new_head = None if self.model.task == "causal_lm" else RandomSource(skeleton, config.seed, self.model.task)
        source = CheckpointSource(self.directory, skeleton, spec, new_head=new_head, new_rows=self.new_rows)
        resources.enter_context(source)
        install_buffers(skeleton, source.read_buffers())
        return source, source.layout(config.dtype)

    def layout(self, config: RunConfig) -> ExportLayout:
        """See Base."""
        return layout_of_model(self.model.skeleton, self.model.spec, config.dtype)

    def check(self, config: RunConfig, weights: Weights | None, errors: ErrorList, log: RunLog) -> None:
        """See Base. What the files have besides is reported."""
        if config.deterministic:
            errors.attempt(("attn_implementation",), lambda: require_deterministic(self.attention))
        if self.new_rows is not None:
            log.notice(
                f"the vocabulary grows to {self.new_rows.num_rows} rows; new ones are drawn (new_tokens_init: "
                f"{self.new_rows.init})"
            )
        for text in [] if weights is None else unused_parts(self.directory, weights[0]):
            log.notice(text)
        quantisation = quantisation_of(self.directory)
        if quantisation is not None and weights is not None:
            log.notice(_of_quantised_files(quantisation, config, packed=packed_names(self.model.skeleton)))
        errors.attempt(("base_model",), lambda: check_sidecars(self.directory))

    def sidecars(self, config: RunConfig) -> BaseSidecars:
        """See Base."""

        @cache
        def files() -> TokenizerFiles:  # not of the tokenizer that the run has used
            return tokenizer_files(config, self.directory, read_tokenizer(config, self.directory, self.config))

        return BaseSidecars(base_dir=self.directory, tokenizer=files)

    def open_export(self, directory: Path, resources: ExitStack) -> WeightSource:
        """See Base."""
        return resources.enter_context(CheckpointSource(directory, self.model.skeleton, self.model.spec))

    def load(self, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
        """See Base."""
        return load_language_model(directory, self.model.task, dtype=dtype, attention=self.attention)

    def tried(self, loaded: nn.Module) -> tuple[MicroBatch, torch.Tensor]:
        """See Base. The skeleton gets the buffers."""
        model = self.model
        assert isinstance(loaded, PreTrainedModel)
        install_buffers(model.skeleton, persistent_buffers(loaded))
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        num_tokens = min(_NUM_TOKENS, longest) if isinstance(longest, int) else _NUM_TOKENS
        positions = torch.arange(num_tokens).unsqueeze(0)
        # Some models look padding up in the place of an image's token, and an export names the tokenizer's padding.
        is_plain = torch.ones(model.spec.vocab_size, dtype=torch.bool)
        is_plain[special_tokens(loaded.config, model.spec.vocab_size)] = False
        plain = is_plain.nonzero().squeeze(1)
        tokens = plain[positions * _TOKEN_STRIDE % len(plain)]
        if model.task == "classification":
            # Two rows: the product of a single one with the head's matrix depends on where in memory the matrix is.
            tokens, positions = torch.cat([tokens, tokens.flip(1)]), positions.repeat(2, 1)
        batch = MicroBatch.of_tokens(tokens, positions)
        if model.task == "seq2seq":
            batch = replace(batch, decoder_ids=tokens)
        inputs = batch.inputs
        if not model.layer_runner.takes_positions:
            del inputs["position_ids"]
        with torch.no_grad():
            logits: torch.Tensor = loaded(**inputs, use_cache=False).logits
        return batch, logits


def _of_quantised_files(settings: Mapping[str, object], config: RunConfig, *, packed: Sequence[str]) -> str:
    """What becomes of a base model's quantised weights. `packed`: those that stay in the form of the files."""
    method = method_of(settings)
    if packed:
        what = "experts" if method == "mxfp4" else counted(len(packed), "layer")
        return f"the base model is quantised ({method}): {what} stay so in the store, computing in {config.dtype}"
    fact = f"the base model is quantised ({method}): its weights are dequantised when they are read"
    if quantised_form(config) is not None:
        return f"{fact}, and quantised again if they are in another format"
    hint = "; load_in_4bit or load_in_8bit would keep them small" if config.adapter is not None else ""
    return f"{fact}, to {config.dtype}; an export has the dequantised weights{hint}"
