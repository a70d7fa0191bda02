"""The nested parts of a run's config: one dataset, the store, the limits, a model's shape.

`config.schema` composes them into RunConfig; nobody else reads them but through it. Here, too, are
the field types that accept a person's way of writing: sizes such as 24GiB, `~` in paths.

Invariant: a validator reports in the words a user reads, through `refuse`, and only ever with that;
rules that span several keys are told as Contradictions, so that each can be shown at its own key.
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
    """A frozen part of the config: unknown keys refused, nothing coerced, docstrings as help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Keys that are fine alone and not together. Shown at the first of ``keys``."""

    keys: tuple[str, ...]
    message: str
    hint: str | None = None


def refuse(words: str, hint: str | None = None) -> PydanticCustomError:
    """The error that a field's validator raises; ``words`` continue "`key` ..."."""
    return PydanticCustomError("refused", "{words}", {"words": words, "hint": hint})


def refuse_together(found: list[Contradiction]) -> PydanticCustomError:
    """The error that a model's validator raises for all its contradictions at once."""
    return PydanticCustomError(
        "contradictions", "{words}", {"words": "; ".join(each.message for each in found), "found": tuple(found)}
    )


def _expand_home(text: str) -> str:
    if "\0" in text:
        raise refuse("must not contain a NUL character")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError as exc:
        raise refuse("starts with `~`, but there is no such home directory", "write the whole path") from exc


def _to_path(value: object) -> object:
    if isinstance(value, str):
        if not value:
            raise refuse("must not be empty")
        return Path(_expand_home(value))
    if not isinstance(value, Path):
        raise refuse("must be a path")
    return value


def _to_bytes(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise refuse("must be a size like 24GiB")
    try:
        num_bytes = parse_bytes(value)
    except (ValueError, OverflowError) as exc:
        raise refuse("must be a size like 24GiB, 500MB or 1073741824") from exc
    if num_bytes < _LEAST_LIMIT_BYTES:
        number = str(value)
        hint = f"did you mean {number}GiB?" if number.isdigit() and int(number) else None
        raise refuse(f"must be at least 1MiB; {number} is {num_bytes} bytes", hint)
    return num_bytes


Directory = Annotated[Path, BeforeValidator(_to_path)]
PathOrHubId = Annotated[str, Field(min_length=1), AfterValidator(_expand_home)]
Size = Annotated[int | None, BeforeValidator(_to_bytes), "size"]
"""A text among the metadata is the type's name in docs/config.md."""
Column = Annotated[str, Field(min_length=1)]


class DatasetConfig(Section):
    """One source of training samples."""

    path: PathOrHubId
    """A JSONL, JSON, parquet or text file, a directory or glob pattern of such files, or a hub id."""
    type: Literal["auto", "completion", "chat_template", "alpaca", "tokens"] = "auto"
    """How a row becomes tokens. `auto` decides by the columns of the first row and prints its decision."""
    split: str = Field(default="train", min_length=1)
    """The split of a hub dataset. Local files have no splits."""
    name: str | None = None
    """The configuration of a hub dataset, if it has several."""
    field: Column = "text"
    """`completion`: the column of the text."""
    field_messages: Column = "messages"
    """`chat_template`: the column of the messages, each with `role` and `content`."""
    field_instruction: Column = "instruction"
    """`alpaca`: the column of the instruction."""
    field_input: Column = "input"
    """`alpaca`: the column of further input. It may be empty or missing."""
    field_output: Column = "output"
    """`alpaca`: the column of the answer."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only the first N usable rows. Default: all of them."""


class SnapshotConfig(Section):
    """A second copy of the model's state, on another device, made beneath training."""

    path: Directory
    """The directory of the snapshot, on another device. It takes 24 bytes per parameter, 28 with `dtype: float16`."""
    every: int = Field(ge=1)
    """Copy the state every N steps, in the background."""


class StorageConfig(Section):
    """Where the model's state lies on NVMe, and how it is kept."""

    paths: Annotated[tuple[Directory, ...], Field(strict=False)] = ()
    """The directories of the store, one per SSD. Data is striped over them. Default: `<output_dir>.store`."""
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    """How files are read and written. `auto` is `io_uring`, or `threads` where the kernel refuses it."""
    durability: Literal["step", "none"] = "step"
    """`step`: each step is committed, and a crash costs at most the step in flight and the one before it. `none`: the
    state is updated in place, in half the space, and a crash loses the run."""
    max_tb_written: float | None = Field(default=None, gt=0)
    """End the run cleanly before more than this many TB (10^12 bytes) are written to the store. Default: no limit."""
    keep_generations: int | None = Field(default=None, ge=0)
    """Room in the store for saved steps, in addition to the two generations that every run needs.
    Default: `save_total_limit` if `save_steps` is set, else 0."""
    snapshot: SnapshotConfig | None = None
    """A second copy of the state on another device, for `ratel restore`. Default: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = []
        if len(set(self.paths)) < len(self.paths):
            found.append(Contradiction(keys=("paths",), message="`paths` names a directory twice"))
        if self.durability == "none" and self.keep_generations:
            found.append(
                Contradiction(
                    keys=("keep_generations", "durability"),
                    message="`keep_generations` needs `durability: step`; in place there is only one generation",
                )
            )
        if self.durability == "none" and self.snapshot is not None:
            found.append(
                Contradiction(
                    keys=("snapshot", "durability"),
                    message="`snapshot` needs `durability: step`; in place the only generation is written over",
                )
            )
        if found:
            raise refuse_together(found)
        return self


class LimitsConfig(Section):
    """How much memory the run may take."""

    gpu_memory: Size = None
    """GPU memory that the run may use, such as 24GiB. Default: what is free, less a margin."""
    host_memory: Size = None
    """Main memory that the run may use, such as 64GiB. Default: what is free, less a margin."""


class ModelShape(Section):
    """A GPT-type model by its shape alone, for `ratel plan`."""

    num_layers: int = Field(ge=1)
    """Decoder layers."""
    num_heads: int = Field(ge=1)
    """Attention heads in a layer."""
    hidden_size: int = Field(ge=1)
    """Width of the hidden states."""
    vocab_size: int = Field(default=50257, ge=1)
    """Tokens in the vocabulary."""
    num_parameters: int | None = Field(default=None, ge=1)
    """Parameters in the model, if the number is known more exactly than the shape gives it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.num_heads:
            message = f"`hidden_size` ({self.hidden_size}) must be a multiple of `num_heads` ({self.num_heads})"
            raise refuse_together([Contradiction(keys=("hidden_size", "num_heads"), message=message)])
        return self
