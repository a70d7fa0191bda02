"""The data sets of a torchtune config as sets with names of ours.

torchtune builds a set with a function, whose arguments stand next to its name. `dataset` is one of them or a list.

Invariant: every argument of a set is either read or reported, and none that decides what is trained is called harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, plain, show

_Kind = Literal["alpaca", "instruct", "chat", "text", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Builder:
    """A function that builds a set."""

    kind: _Kind
    path: str | None = None
    """The hub id of its data; None: the config names it."""
    field: str | None = None
    """The column that it reads, where the kind does not say it."""
    trains_on_input: bool = False
    """Whether prompts have loss by default."""


_BUILDERS: Mapping[str, _Builder] = {
    "alpaca_dataset": _Builder(kind="alpaca", path="tatsu-lab/alpaca", trains_on_input=True),
    "alpaca_cleaned_dataset": _Builder(kind="alpaca", path="yahma/alpaca-cleaned", trains_on_input=True),
    "instruct_dataset": _Builder(kind="instruct"),
    "chat_dataset": _Builder(kind="chat"),
    "slimorca_dataset": _Builder(kind="chat", path="Open-Orca/SlimOrca-Dedup", field="conversations"),
    "text_completion_dataset": _Builder(kind="text"),
    "wikitext_dataset": _Builder(kind="text", path="EleutherAI/wikitext_document_level", field="page"),
    "cnn_dailymail_articles_dataset": _Builder(kind="text", path="ccdv/cnn_dailymail", field="article"),
}
_NO_TEXT = ("preference", "multimodal", "stack_exchange", "hh_rlhf", "cauldron", "llava", "vqa")
"""Parts of the names of functions whose sets are no text to imitate."""
_TYPES: Mapping[_Kind, str] = {
    "alpaca": "alpaca",
    "instruct": "chat_template",
    "chat": "chat_template",
    "text": "completion",
    "unknown": "auto",
}
_COLUMNS: Mapping[_Kind, Mapping[str, tuple[str, ...]]] = {
    "alpaca": {
        "column_map.instruction": ("field_instruction",),
        "column_map.input": ("field_input",),
        "column_map.output": ("field_output",),
    },
    "instruct": {"column_map.input": ("field_instruction", "field_input"), "column_map.output": ("field_output",)},
    "chat": {"conversation_column": ("field_messages",), "column_map.conversations": ("field_messages",)},
    "text": {"column": ("field",)},
    "unknown": {},
}
"""By kind and argument: our keys for a column. An instruction that is its own further input has none."""
_READ: Mapping[str, str] = {
    "source": "path",
    "data_files": "path",
    "split": "split",
    "name": "name",
    "subset": "name",
    "new_system_prompt": "system_prompt",
}
"""Arguments of every kind, and our keys."""
_SHOWN_BY_ROWS = {"conversation_style": ("openai", "sharegpt"), "add_eos": (True,), "split_across_pack": (False,)}
"""Arguments with values that change nothing, because Ratel sees it in the rows or does it."""
_FILE_TYPES = ("json", "csv", "parquet", "text")
_NO_KEY = "Ratel has no such key of a dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedSets:
    """The sets of a config, and what they say about all data."""

    sets: list[Marked]
    trains_on_input: Entry | None
    """`train_on_inputs`; None: not, or the sets differ."""
    packed: list[Entry]
    """`sample_packing`, of each set that says it."""
    lengths: list[Entry]
    """The most tokens of a sample, of each set that says it."""


def translate_sets(written: Sequence[Entries], report: Report) -> TranslatedSets:
    """Translate the arguments of some sets: flat, each entry with the name under which it is reported."""
    sets: list[Marked] = []
    trained: list[tuple[Entry, bool]] = []
    packed: list[Entry] = []
    lengths: list[Entry] = []
    for arguments in written:
        if not arguments:
            continue
        first = next(iter(arguments.values()))
        builder = _builder(arguments.pop("_component_", None), report)
        trains = _trains_on_input(arguments, builder, first, report)
        trained += [] if builder.kind == "text" else [trains]
        packed += _given(arguments.pop("packed", None), report)
        lengths += _given(arguments.pop("max_seq_len", None), report)
        content = _translated(arguments, builder, first, report)
        if builder.kind != "unknown" or "path" in content:
            sets += _for_each_file(content, first)
    return TranslatedSets(sets=sets, trains_on_input=_for_all(trained, report), packed=packed, lengths=lengths)


def _builder(component: Entry | None, report: Report) -> _Builder:
    """The function that builds a set. One that is not known is a guess, which the user must look at."""
    if component is None:
        return _Builder(kind="unknown")
    name = str(component.value.content).rpartition(".")[2]
    if name in _BUILDERS:
        builder = _BUILDERS[name]
        ours = f"type: {_TYPES[builder.kind]}"
        report.read_as(component, ours if builder.path is None else f"{ours}, path: {builder.path}")
        return builder
    if any(part in name for part in _NO_TEXT):
        report.reject(
            component.where,
            f"`{name}` is no data for supervised fine-tuning",
            component.written,
            hint="use data with prompts and answers",
        )
    else:
        report.decide(component, "Ratel does not know this set; name its files or its hub id, and its `type`")
    return _Builder(kind="unknown")


def _trains_on_input(arguments: Entries, builder: _Builder, first: Entry, report: Report) -> tuple[Entry, bool]:
    """Whether prompts have loss, and the key that says so."""
    flag, strategy = arguments.pop("train_on_input", None), arguments.pop("masking_strategy", None)
    if strategy is not None and strategy.value.content in ("train_on_all", "train_on_assistant"):
        return strategy, strategy.value.content == "train_on_all"
    if strategy is not None and strategy.value.content is not None:
        report.decide(strategy, "Ratel trains on every answer of a conversation")
    if flag is not None and isinstance(flag.value.content, bool):
        return flag, flag.value.content
    return first, builder.trains_on_input


_SAYS = ("train_on_input", "masking_strategy")
"""Ends of keys that say whether prompts have loss."""


def _for_all(trained: Sequence[tuple[Entry, bool]], report: Report) -> Entry | None:
    """`train_on_inputs` for all sets."""
    if not trained:
        return None
    entry, value = trained[-1]
    if len({each for _, each in trained}) > 1:
        report.decide(entry, "the sets differ in this; Ratel has one `train_on_inputs` for all of them")
        return None
    is_said = any(each.written.endswith(_SAYS) for each, _ in trained)
    if not is_said and not value:
        return None
    for each, _ in trained:
        if each.written.endswith(_SAYS):
            report.read_as(each, f"train_on_inputs: {str(value).lower()}")
    return made(entry, value)


def _given(entry: Entry | None, report: Report) -> list[Entry]:
    if entry is not None and entry.value.content is None:
        report.drop(entry, "it is empty")
        return []
    return [] if entry is None else [entry]


def _translated(arguments: Entries, builder: _Builder, first: Entry, report: Report) -> Entries:
    """One set with our keys."""
    content: Entries = {}
    if builder.path is not None:
        content["path"] = made(first, builder.path)
    content["type"] = made(first, _TYPES[builder.kind])
    if builder.kind == "instruct":  # the names that torchtune's columns have without a map
        content.update({key: made(first, "input") for key in ("field_instruction", "field_input")})
        content["field_output"] = made(first, "output")
    if builder.field is not None:
        content["field" if builder.kind == "text" else "field_messages"] = made(first, builder.field)
    source = arguments["source"].value.content if "source" in arguments else None
    if source in _FILE_TYPES and "data_files" in arguments:
        report.drop(arguments.pop("source"), "`data_files` names the files")
    elif source is not None and "data_files" in arguments:
        report.decide(arguments.pop("data_files"), "Ratel reads all files of a set on the hub; name them in `path`")
    for name, entry in arguments.items():
        keys = _COLUMNS[builder.kind].get(name) or ((_READ[name],) if name in _READ else ())
        if entry.value.content is not None and keys:
            content.update(dict.fromkeys(keys, entry))
            shown = show(plain(entry.value)).strip("'")
            report.read_as(entry, f"datasets: {', '.join(f'{key}: {shown}' for key in keys)}")
        else:
            _leftover(name, entry, report)
    return content


def _leftover(name: str, entry: Entry, report: Report) -> None:
    """Report an argument that has no counterpart."""
    value = entry.value.content
    if value is None:
        report.drop(entry, "it is empty")
    elif name == "trust_remote_code":
        report.drop(entry, "Ratel never runs code that comes with data", quietly=False)
    elif value in _SHOWN_BY_ROWS.get(name, ()):
        report.drop(entry, "Ratel does this itself")
    else:
        report.decide(entry, _NO_KEY)


def _for_each_file(content: Entries, first: Entry) -> Iterator[Marked]:
    """A set for each of its files."""
    files = content["path"].value.content if "path" in content else None
    if isinstance(files, dict):
        files = [each.value for each in files.values()]
    for path in files if isinstance(files, list) else [None]:
        one = content if path is None else {**content, "path": replace(content["path"], value=path)}
        yield Marked(where=first.where, content=dict(one))
