"""The sections of a run's config: a dataset, the store, the snapshot, the limits, a model's shape.

`schema` composes them into RunConfig. The field types for what people write, such as sizes (24GiB) and paths (~/store),
are here too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ratel_cli.config.keys.base import Contradiction, Section, contradictions, rejection
from ratel_cli.config.keys.relation import broken, has, needs
from ratel_cli.units import MIB, parse_bytes

_LEAST_LIMIT_BYTES = MIB
MOST = 10**15
"""No number of a config is larger: products of several of them are numbers that can be computed with."""


_AnyNumber = TypeVar("_AnyNumber", int, float, int | float)


def within_most(value: _AnyNumber) -> _AnyNumber:
    """The value of a key, which no run can use if it is larger than all that is counted."""
    if value > MOST:
        raise rejection(f"must be at most {MOST:g}")
    return value


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
    return None if value is None else _bytes_of(value, "a size like 24GiB")


def _to_bytes_or_auto(value: object) -> object:
    return value if value == "auto" else _bytes_of(value, "`auto` or a size like 256MiB")


def _bytes_of(value: object, words: str) -> int:
    """The number of bytes; `words` name what is expected."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise rejection(f"must be {words}")
    try:
        num_bytes = parse_bytes(value)
    except (ValueError, OverflowError) as exc:
        raise rejection(f"must be {words}, 500MB or 1073741824") from exc
    if num_bytes < _LEAST_LIMIT_BYTES:
        number = str(value)
        hint = f"did you mean {number}GiB?" if number.isdigit() and int(number) else None
        raise rejection(f"must be at least 1MiB; {number} is {num_bytes} bytes", hint)
    return within_most(num_bytes)


Whole = Annotated[int, Field(le=MOST)]
Number = Annotated[float, Field(le=MOST)]
Directory = Annotated[Path, BeforeValidator(_to_path, json_schema_input_type=Annotated[str, Field(min_length=1)])]
PathOrHubId = Annotated[str, Field(min_length=1), AfterValidator(_expand_home)]
_WrittenSize = Annotated[str, Field(pattern=r"^\s*[0-9]+(\.[0-9]+)?\s*([KkMmGgTt]([Ii]?[Bb])?|[Bb])?\s*$")]
_SizeInput = Annotated[int, Field(ge=_LEAST_LIMIT_BYTES)] | _WrittenSize
Size = Annotated[int | None, BeforeValidator(_to_bytes, json_schema_input_type=_SizeInput | None), "size"]
"""A text among the metadata is the type's name in docs/config.md."""
SizeOrAuto = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_to_bytes_or_auto, json_schema_input_type=Literal["auto"] | _SizeInput),
    "`auto` or size",
]
Column = Annotated[str, Field(min_length=1)]


class DatasetConfig(Section):
    """One source of training samples. Instead of a mapping, a bare path or hub id is enough."""

    path: PathOrHubId
    """A JSONL, JSON, CSV, TSV, Parquet or text file, a directory or glob pattern of such files, or a hub id."""
    type: Literal[
        "auto", "completion", "chat_template", "alpaca", "tokens", "mlm", "classification", "seq2seq", "latents"
    ] = "auto"
    """How a row becomes tokens. `completion`: plain text, or prompt and completion. `chat_template`: a list of
    messages, or another form of conversation, in the format of the model's chat template. `alpaca`: instruction, input
    and output. `tokens`: token ids. `auto`: one of these, decided by the columns of the first row, and printed. `mlm`:
    plain text, for masked language modelling with an encoder such as BERT. `classification`: a text and its class, for
    a classifier; its head is initialised if the base model has none. `seq2seq`: prompt and completion, for an
    encoder-decoder such as T5. `latents`: safetensors or parquet files with `latents` [N, C, H, W] and `labels` [N],
    on which a diffusion transformer of diffusers learns to predict the added noise."""
    split: str = Field(default="train", min_length=1)
    """The split of a hub dataset or of a directory, and a part of its rows if you add one: `train[:20%]`,
    `train[100:200]`. Files that `path` names have no splits, but a part of their rows can be taken too."""
    name: str | None = None
    """The configuration of a hub dataset or of a directory whose README has several. Default: its own default."""
    field: Column = "text"
    """The column with the text, for `completion`, `mlm` and `classification`."""
    field_label: Column = "label"
    """The column with the class, for `classification`: its name, or its number, counted from 0."""
    labels: Annotated[tuple[Column, ...] | None, Field(strict=False, min_length=2)] = None
    """The names of all classes, in order, for `classification`: `[negative, positive]`. Default: those of the base
    model, if it is a classifier."""
    field_prompt: Column = "prompt"
    """The column with the prompt, which has no loss: a text, or a list of messages. For `seq2seq` the source."""
    field_completion: Column = "completion"
    """The column with the answer to `field_prompt`, which has loss: a text, or a list of messages. With
    `type: chat_template` two texts are a user's and an assistant's turn."""
    field_chosen: Column = "chosen"
    """The column with the better one of two answers, for `rl`: a text, a message or a list of messages, which may begin
    with the prompt. The prompt may also be in `field_prompt`, `field_messages` or `field_instruction`. For `rl: kto`
    the answer is in `field_completion`, and its label, true (good) or false (bad), in `field_label`."""
    field_rejected: Column = "rejected"
    """The column with the other answer, for `rl`."""
    field_messages: Column = "messages"
    """The column with the list of messages, for `chat_template`. Each message has a `role` and a `content`."""
    field_instruction: Column = "instruction"
    """The column with the instruction, for `alpaca`."""
    field_input: Column = "input"
    """The column with further input, for `alpaca`. It may be empty or missing. If it is that of `field_instruction`,
    there is no further input."""
    field_output: Column = "output"
    """The column with the answer, for `alpaca`."""
    media: Literal["reject", "ignore"] = "reject"
    """What becomes of rows with images, video or sound, in columns such as `image`, in parts of messages, or as marks
    such as `<image>` in a text. `reject`: they cannot be used, because Ratel trains on text. `ignore`: their text is
    trained without them."""
    max_samples: Whole | None = Field(default=None, ge=1)
    """Use only the first N usable rows. Default: all of them."""
    weight: float = Field(default=1.0, gt=0, le=10_000)
    """How often an epoch visits each sample: 2 is twice. 0.3 visits 30 % of the samples, drawn from `seed` and the
    same in each epoch; 2.3 visits all twice, and 30 % once more."""
    text_unit: Literal["line", "file"] = "line"
    """What a sample of a text file (.txt) is: each `line`, or the whole `file`."""
    field_system: Column | None = None
    """The column with a system prompt. `chat_template` puts it before the conversation; `alpaca` writes it in place of
    the first sentences of its prompt. Default: no column."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """A system prompt for all rows, in place of their own. `chat_template` puts it before each conversation; `alpaca`
    writes it in place of the first sentences of its prompt. Default: none."""
    drop_system_message: bool = False
    """Leave out the system prompt that a conversation begins with, such as for a model whose template has none."""
    field_history: Column | None = None
    """The column with earlier rounds, as pairs of question and answer, for `chat_template` with instruction and output.
    Default: no column."""
    field_tools: Column = "tools"
    """The column with the tools of a conversation: a list, or its JSON text."""
    message_property_mappings: dict[str, Column] | None = None
    """The keys that messages use, by Ratel's names: `{role: from, content: value}`. Default: `role` and `content`, or
    ShareGPT's `from` and `value`."""
    roles: Annotated[dict[str, Annotated[tuple[Column, ...], Field(strict=False)]] | None, Field(strict=False)] = None
    """The names that the rows use for each role: `{user: [human], assistant: [gpt, bot]}`. Default: the names of
    ShareGPT."""
    roles_to_train: Annotated[tuple[Column, ...] | None, Field(strict=False)] = None
    """The roles whose turns have loss, such as `[assistant]`. Then only the content of a turn and the stop tokens of
    `train_on_eos` have loss, not the special tokens around the turn. Default: assistant turns have loss, with the
    token that ends them. `[]`: no role, only the turns that `message_field_training` chooses."""
    train_on_eos: Literal["all", "turn", "last", "none"] | None = None
    """Which stop tokens behind turns have loss: `all`, those of the trained turns (`turn`), the `last` of a
    conversation, or `none`. They are the tokenizer's EOS token, those in `eos_token_id` of the model's
    generation_config.json and config.json, and `eot_tokens`. Default: `turn` if `roles_to_train` is set; otherwise the
    token that ends a trained turn."""
    message_field_training: Column | None = None
    """The key of a message that says whether its turn has loss: true or false. A message without it follows
    `roles_to_train`. Default: no key."""


class SnapshotConfig(Section):
    """A second copy of the model's state on another device, made while training continues."""

    path: Directory
    """The directory of the snapshot, which no other run may use. It takes 24 bytes per parameter (28 with
    `dtype: float16`): space for two generations of the state."""
    every: Whole = Field(ge=1)
    """Copy the state every N steps, in the background."""


class StorageConfig(Section):
    """Where the store with the model's state is, and how it is written."""

    paths: Annotated[tuple[Directory, ...], Field(strict=False)] = ()
    """Directories for stores, one on each SSD. The state is striped over them. Each run makes a directory of its own in
    each of them, named after `output_dir`. Default: one directory next to `output_dir`, with the same name and
    `.store`. With several ranks, `{rank}`, `{local_rank}` and `{host}` stand for what each has."""
    engine: Literal["auto", "io_uring", "liburing", "threads"] = "auto"
    """How files are read and written. `auto`: with io_uring, or with threads where the system does not allow it.
    `liburing`: with io_uring through the Python package of that name, whose wheel needs a processor with AVX-512."""
    durability: Literal["step", "none"] = "step"
    """What a crash may cost. `step`: each step is committed; a crash costs at most the step that is being computed and
    the one before it. `none`: the state is written in place, which takes half the space; a crash costs the whole
    run."""
    max_tb_written: Number | None = Field(default=None, gt=0)
    """Stop before more than this many TB (10^12 bytes) are written to the store; every step so far stays saved. A dry
    run says at which step. Default: no limit."""
    wear: Literal["auto", "save", "balanced", "ignore"] = "auto"
    """What may be written to the drives to save time, in addition to the model's state. `balanced`: activations and
    gradients, where writing one percent more makes a step at least half a percent faster (a percent of what a step of
    the whole model writes). `save`: nothing, unless the run does not fit otherwise. `ignore`: whatever makes a step
    faster. `auto`: `save` beside an adapter, whose state is small, and `balanced` for all other runs."""
    endurance_tb: Number | None = Field(default=None, gt=0)
    """The rated endurance of all drives of the store together: the sum of their TBW, in TB (10^12 bytes). With it,
    `ratel plan` and a run report the share of the drives' life that the run takes. Default: unknown."""
    keep_generations: Annotated[
        Whole | None, needs(has("durability", "step"), but=(0,), why="with `none` there is only one generation")
    ] = Field(default=None, ge=0)
    """How many saved steps the store has space for, in addition to the two generations that a step needs. Fixed when
    the store is made. Default: `save_total_limit` if `save_steps` is set, otherwise 0."""
    snapshot: Annotated[
        SnapshotConfig | None,
        needs(has("durability", "step"), why="with `none` there is no second generation to copy from"),
    ] = None
    """A second copy of the state on another device, in case this one fails. `ratel restore` makes a store from it.
    Default: none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = broken(self)
        if len(set(self.paths)) < len(self.paths):
            found.append(Contradiction(keys=("paths",), message="`paths` contains a directory twice"))
        if found:
            raise contradictions(found)
        return self


class LimitsConfig(Section):
    """How much memory the run may use."""

    gpu_memory: Size = None
    """The most GPU memory that the run may use, such as 24GiB; the plan leaves 4 % of it to torch's allocator. Default:
    what is free, of which the plan leaves 5 %, and at least 1GiB."""
    host_memory: Size = None
    """The most RAM that the run may use, such as 64GiB. Default: what is free, less a margin."""


class ModelShape(Section):
    """A GPT-type model described by its shape, for `ratel plan`."""

    num_layers: Whole = Field(ge=1)
    """Decoder layers of the model."""
    num_heads: Whole = Field(ge=1)
    """Attention heads in each layer. `hidden_size` must be a multiple of it."""
    hidden_size: Whole = Field(ge=1)
    """Width of the hidden states."""
    vocab_size: Whole = Field(default=50257, ge=1)
    """Tokens in the vocabulary."""
    num_parameters: Whole | None = Field(default=None, ge=1)
    """The number of parameters, if it differs from what the shape gives. Default: computed from the shape."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hidden_size % self.num_heads:
            message = f"`hidden_size` ({self.hidden_size}) must be a multiple of `num_heads` ({self.num_heads})"
            raise contradictions([Contradiction(keys=("hidden_size", "num_heads"), message=message)])
        return self
