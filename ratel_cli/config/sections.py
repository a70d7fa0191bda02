"""The sections of a run's config: a dataset, the store, the snapshot, the limits, a model's shape.

`config.schema` composes them into RunConfig. The field types for what people write, such as sizes (24GiB) and paths
(~/store), are here too.

Invariant: a validator raises only `rejection`, in words that a user reads. A rule about several keys raises
`contradictions`, so that each can be shown at its own key.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ratel_cli.units import MIB, parse_bytes

_LEAST_LIMIT_BYTES = MIB


class Section(BaseModel):
    """Base of all sections: frozen, without unknown keys, without coercion, with docstrings as help texts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Something wrong about several keys that are valid by themselves."""

    keys: tuple[str, ...]
    """The keys. The error is shown at the first of these that the user wrote."""
    message: str
    hint: str | None = None


def rejection(words: str, hint: str | None = None) -> PydanticCustomError:
    """The error that a field's validator raises. `words` complete a sentence that begins with the key."""
    return PydanticCustomError("rejected", "{words}", {"words": words, "hint": hint})


def contradictions(found: list[Contradiction]) -> PydanticCustomError:
    """The error that a section's validator raises, with all its contradictions at once."""
    return PydanticCustomError(
        "contradictions", "{words}", {"words": "; ".join(each.message for each in found), "found": tuple(found)}
    )


def _expand_home(text: str) -> str:
    if "\0" in text:
        raise rejection("must not contain a NUL character")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as exc:
        raise rejection("starts with `~`, but there is no such home directory", "write the whole path") from exc


def _to_path(value: object) -> object:
    if isinstance(value, str):
        if not value:
            raise rejection("must not be empty")
        return Path(_expand_home(value))
    if not isinstance(value, Path):
        raise rejection("must be a path")
    return value


def _to_bytes(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise rejection("must be a size like 24GiB")
    try:
        num_bytes = parse_bytes(value)
    except (ValueError, OverflowError) as exc:
        raise rejection("must be a size like 24GiB, 500MB or 1073741824") from exc
    if num_bytes < _LEAST_LIMIT_BYTES:
        number = str(value)
        hint = f"did you mean {number}GiB?" if number.isdigit() and int(number) else None
        raise rejection(f"must be at least 1MiB; {number} is {num_bytes} bytes", hint)
    return num_bytes


Directory = Annotated[Path, BeforeValidator(_to_path)]
PathOrHubId = Annotated[str, Field(min_length=1), AfterValidator(_expand_home)]
Size = Annotated[int | None, BeforeValidator(_to_bytes), "size"]
"""A text among the metadata is the type's name in docs/config.md."""
Column = Annotated[str, Field(min_length=1)]


class DatasetConfig(Section):
    """One source of training samples. Instead of a mapping, a bare path or hub id is enough."""

    path: PathOrHubId
    """A JSONL, JSON, Parquet or text file, a directory or glob pattern of such files, or a hub id."""
    type: Literal["auto", "completion", "chat_template", "alpaca", "tokens"] = "auto"
    """How a row becomes tokens. `completion`: plain text. `chat_template`: a list of messages, in the format of the
    model's chat template. `alpaca`: instruction, input and output. `tokens`: token ids. `auto`: decided by the columns
    of the first row, and printed."""
    split: str = Field(default="train", min_length=1)
    """The split of a hub dataset. Local files have no splits."""
    name: str | None = None
    """The configuration of a hub dataset that has several. Default: the dataset's own default."""
    field: Column = "text"
    """The column with the text, for `completion`."""
    field_messages: Column = "messages"
    """The column with the list of messages, for `chat_template`. Each message has a `role` and a `content`."""
    field_instruction: Column = "instruction"
    """The column with the instruction, for `alpaca`."""
    field_input: Column = "input"
    """The column with further input, for `alpaca`. It may be empty or missing."""
    field_output: Column = "output"
    """The column with the answer, for `alpaca`."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only the first N usable rows. Default: all of them."""


class SnapshotConfig(Section):
    """A second copy of the model's state on another device, made while training continues."""

    path: Directory
    """The directory of the snapshot. It takes 24 bytes per parameter (28 with `dtype: float16`): space for two
    generations of the state."""
    every: int = Field(ge=1)
    """Copy the state every N steps, in the background."""


class StorageConfig(Section):
    """Where the store with the model's state is, and how it is written."""

    paths: Annotated[tuple[Directory, ...], Field(strict=False)] = ()
    """The store's directories, one for each SSD. The state is striped over them. Default: one directory next to
    `output_dir`, with the same name and `.store`."""
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    """How files are read and written. `auto`: with io_uring, or with threads where the system does not allow it."""
    durability: Literal["step", "none"] = "step"
    """What a crash may cost. `step`: each step is committed; a crash costs at most the step that is being computed and
    the one before it. `none`: the state is written in place, which takes half the space; a crash costs the whole
    run."""
    max_tb_written: float | None = Field(default=None, gt=0)
    """Stop before more than this many TB (10^12 bytes) are written to the store; every step so far stays saved.
    Default: no limit."""
    keep_generations: int | None = Field(default=None, ge=0)
    """How many saved steps the store has space for, in addition to the two generations that a step needs. Fixed when
    the store is made. Default: `save_total_limit` if `save_steps` is set, otherwise 0."""
    snapshot: SnapshotConfig | None = None
    """A second copy of the state on another device, in case this one fails. `ratel restore` makes a store from it.
    Default: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = []
        if len(set(self.paths)) < len(self.paths):
            found.append(Contradiction(keys=("paths",), message="`paths` contains a directory twice"))
        if self.durability == "none" and self.keep_generations:
            found.append(
                Contradiction(
                    keys=("keep_generations", "durability"),
                    message="`keep_generations` needs `durability: step`; with `none` there is only one generation",
                )
            )
        if self.durability == "none" and self.snapshot is not None:
            found.append(
                Contradiction(
                    keys=("snapshot", "durability"),
                    message="`snapshot` needs `durability: step`; "
                    "with `none` there is no second generation to copy from",
                )
            )
        if found:
            raise contradictions(found)
        return self


class LimitsConfig(Section):
    """How much memory the run may use."""

    gpu_memory: Size = None
    """The most GPU memory that the run may use, such as 24GiB. Default: what is free, less a margin."""
    host_memory: Size = None
    """The most RAM that the run may use, such as 64GiB. Default: what is free, less a margin."""


class ModelShape(Section):
    """A GPT-type model described by its shape, for `ratel plan`."""

    num_layers: int = Field(ge=1)
    """Decoder layers of the model."""
    num_heads: int = Field(ge=1)
    """Attention heads in each layer. `hidden_size` must be a multiple of it."""
    hidden_size: int = Field(ge=1)
    """Width of the hidden states."""
    vocab_size: int = Field(default=50257, ge=1)
    """Tokens in the vocabulary."""
    num_parameters: int | None = Field(default=None, ge=1)
    """The number of parameters, if it differs from what the shape gives. Default: computed from the shape."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.num_heads:
            message = f"`hidden_size` ({self.hidden_size}) must be a multiple of `num_heads` ({self.num_heads})"
            raise contradictions([Contradiction(keys=("hidden_size", "num_heads"), message=message)])
        return self
