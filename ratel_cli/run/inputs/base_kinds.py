"""The base model of a config, of whatever kind it is, and the data that it is trained on.

The kind follows from the type of the datasets. Invariant: what differs between the kinds is asked for here, or is a
method of `Base`.
"""

from __future__ import annotations

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import ErrorList
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.run.inputs.base import Base, ReadData
from ratel_cli.run.inputs.build_language import build_language_base, read_language_base
from ratel_cli.run.inputs.denoiser_base import DenoiserBase, build_denoiser_base, find_latents, load_latents
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.text_data import find_texts, prepare_texts


def read_base(config: RunConfig, log: RunLog) -> Base:
    """The config's base model, of whatever kind it is. Raises BadInput, EnvironmentFailure."""
    return build_denoiser_base(config) if config.task == "denoising" else read_language_base(config, log)


def build_model(config: RunConfig) -> AnyModel:
    """The config's model, without weights. Raises BadInput."""
    return build_denoiser_base(config).model if config.task == "denoising" else build_language_base(config).model


def prepare_data(config: RunConfig, base: Base, errors: ErrorList, log: RunLog) -> ReadData | None:
    """Check what the model's data is read with; what is wrong goes to `errors`. Returns what reads it, if it can."""
    if isinstance(base, DenoiserBase):
        return lambda resources, dry_run: load_latents(config, base, log)
    assert isinstance(base, LanguageBase)
    return prepare_texts(config, base, errors, log)


def find_data(
    config: RunConfig, errors: ErrorList, log: RunLog, *, reads_rows: bool = False, knows_types: bool = True
) -> None:
    """Find the files of all datasets. What is wrong goes to `errors`.

    `reads_rows`: also what is wrong with local rows whatever the tokenizer is, and with `knows_types` by their types.
    """
    if config.task == "denoising":
        find_latents(config, errors)
    else:
        find_texts(config, errors, log, reads_rows=reads_rows, knows_types=knows_types)
