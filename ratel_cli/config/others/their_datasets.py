"""How other trainers name their data: sets in a mixture, by name and companions, or in `dataset_info.json`.

Invariant: afterwards the sets are in `datasets` and `test_datasets`, each with its path, and nothing about them is lost
without a report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ratel_cli.config.keys.sections import DatasetConfig
from ratel_cli.config.others.aliases import canonical_key
from ratel_cli.config.others.dataset_info import FILE_NAME, describe_set, read_dataset_info
from ratel_cli.config.yaml.reporting import Entries, Report, keys_of_set, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, marked, plain, show


def translate_datasets(entries: Entries, report: Report) -> None:
    """Rewrite the entries of a config's top level that are about data."""
    _reject_several(entries, report)
    _nested_datasets(entries, report)
    _one_dataset(entries, report)


def translate_dataset(entries: Entries, report: Report) -> None:
    """Rewrite the entries of one dataset: the names that TRL and axolotl have for files and messages."""
    for key in [key for key, entry in entries.items() if entry.value.content is None and entry.where.layer == 0]:
        field = DatasetConfig.model_fields.get(canonical_key("datasets", key))
        if field is None or field.default is not None:  # otherwise nothing is what it has by default
            report.drop(entries.pop(key), "it is empty")
    files, path = entries.get("data_files"), entries.get("path")
    if files is not None and isinstance(files.value.content, str) and (path is None or path.value.content in _BUILDERS):
        del entries["data_files"]
        entries["path"] = replace(files, written="path")
        report.read_as(files, f"path: {files.value.content}")
    _custom_prompt(entries)
    mappings = {
        role: entries.pop(key)
        for key, role in (("message_field_role", "role"), ("message_field_content", "content"))
        if key in entries
    }
    given = {role: entry for role, entry in mappings.items() if entry.value.content is not None}
    if given and "message_property_mappings" not in entries:
        first = next(iter(given.values()))
        value = Marked(where=first.value.where, content=dict(given))
        entries["message_property_mappings"] = replace(first, written="message_property_mappings", value=value)
        report.read_as(first, "message_property_mappings")
    _thinking(entries, report)


_BUILDERS = ("json", "csv", "parquet", "text", "arrow")
"""What axolotl has as the path of a set whose files have a key of their own."""


def each_file(item: Marked) -> list[Marked]:
    """A set for each file of a set that names several."""
    content = item.content
    files = content["data_files"].value.content if isinstance(content, dict) and "data_files" in content else None
    if not isinstance(content, dict) or not isinstance(files, list):
        return [item]
    return [
        replace(item, content={**content, "data_files": replace(content["data_files"], value=each)}) for each in files
    ]


def _thinking(entries: Entries, report: Report) -> None:
    """axolotl's keys of a message for its reasoning: that of the rows, and that of the template."""
    field, key = entries.pop("field_thinking", None), entries.pop("template_thinking_key", None)
    named, read = ("reasoning_content" if each is None else each.value.content for each in (field, key))
    for entry in filter(None, (field, key)):
        if named == read or not isinstance(read, str):
            report.drop(entry, "the chat template gets all keys of a message")
            continue
        mapping = entries.get("message_property_mappings", entry)
        value = Marked(where=entry.value.where, content={**mapping.value.entries, read: made(entry, str(named))})
        entries["message_property_mappings"] = replace(entry, value=value)
        report.read_as(entry, f"message_property_mappings: {{{read}: {named}}}")


def _custom_prompt(entries: Entries) -> None:
    """The columns in axolotl's `type` as a mapping. As a type it stays an error: its prompt has words of its own, by
    default the instruction and the input with a space behind each."""
    columns = entries["type"].value.entries if "type" in entries else {}
    for key in sorted(columns.keys() & {"field_instruction", "field_input", "field_output"}):
        entries.setdefault(key, columns[key])


def _reject_several(entries: Entries, report: Report) -> None:
    """Several keys that name the data: one of them would be lost."""
    for names in (("datasets", *_NAMES_OF_DATA), ("test_datasets", "eval_dataset")):
        given = [key for key in names if key in entries and entries[key].value.content not in (None, "")]
        if given and names[0] not in given and names[0] in entries:
            report.drop(entries.pop(names[0]), "it is empty")
        for key in given[1:]:
            entry = entries.pop(key)
            report.reject(
                entry.where,
                f"`{key}` and `{given[0]}` are both set, and both name the data",
                key,
                hint=f"name all of it in `{names[0]}`",
            )


_NAMES_OF_DATA = (
    "dataset_mixture", "dataset_mixer", "pretraining_dataset", "dataset_name", "dataset", "train_dataset",
)  # fmt: skip


def _nested_datasets(entries: Entries, report: Report) -> None:
    """`dataset_mixture` of the alignment handbook, `dataset_mixer` before it, and axolotl's `pretraining_dataset`."""
    mixture = entries.get("dataset_mixture")
    if mixture is not None and isinstance(mixture.value.content, dict) and "datasets" not in entries:
        del entries["dataset_mixture"]
        inner = mixture.value.content
        if "datasets" in inner:
            entries["datasets"] = replace(mixture, value=inner["datasets"].value)
            report.read_as(mixture, "datasets")
        if "test_split_size" in inner and "val_set_size" not in entries:
            entries["val_set_size"] = replace(inner["test_split_size"], written="test_split_size")
        for key in [key for key in inner if key not in ("datasets", "test_split_size")]:
            report.drop(replace(inner[key], written=f"dataset_mixture.{key}"), "Ratel shuffles all data with `seed`")
    mixer = entries.get("dataset_mixer")
    if mixer is not None and isinstance(mixer.value.content, dict) and "datasets" not in entries:
        del entries["dataset_mixer"]
        sets = [_mixed(mixer, name, share) for name, share in mixer.value.content.items()]
        for key, ours in (("dataset_splits", "split"), ("dataset_configs", "name")):
            _one_each(entries, key, ours, sets, report)
        entries["datasets"] = replace(mixer, value=replace(mixer.value, content=list(sets)))
        report.read_as(mixer, "datasets")
    pretraining = entries.get("pretraining_dataset")
    if pretraining is not None and pretraining.value.content and "datasets" not in entries:
        entries["datasets"] = entries.pop("pretraining_dataset")
        steps, streaming = entries.get("max_steps"), entries.get("streaming")
        is_stream = steps is not None and steps.value.content not in (None, -1) and streaming is None
        if is_stream:
            entries["streaming"] = made(pretraining, True)
        _as_texts(pretraining.value)
        report.read_as(pretraining, "datasets, streaming: true" if is_stream else "datasets")


def _mixed(mixer: Entry, name: str, share: Entry) -> Marked:
    """A set of `dataset_mixer`: its name, and the share of it that an epoch has."""
    content: Entries = {"path": replace(share, written="path", value=replace(share.value, content=name))}
    if share.value.content != 1:
        content["weight"] = replace(share, written="weight")
    return Marked(where=mixer.value.where, content=content)


def _one_each(entries: Entries, key: str, ours: str, sets: Sequence[Marked], report: Report) -> None:
    """A key with one value for each set of `dataset_mixer`."""
    entry = entries.get(key)
    values = None if entry is None else entry.value.content
    if entry is None or not isinstance(values, list) or len(values) != len(sets):
        return
    del entries[key]
    for each, value in zip(sets, values, strict=True):
        if value.content is not None:
            each.entries[ours] = replace(entry, value=value)
    report.read_as(entry, f"datasets: - {ours}: {', '.join(show(plain(value)) for value in values)}")


def _as_texts(value: Marked) -> None:
    """The sets of axolotl's `pretraining_dataset` are plain texts, whose column has a key of its own."""
    for each in value.items or [value]:
        keys, texts = keys_of_set(each), Marked(where=each.where, content="completion")
        keys.setdefault("type", Entry(where=each.where, written="type", value=texts))
        if "text_column" in keys:
            keys.setdefault("field", replace(keys.pop("text_column"), written="text_column"))


def _one_dataset(entries: Entries, report: Report) -> None:
    """TRL's `dataset_name` with its companions, and the names of LLaMA-Factory's `dataset` and `eval_dataset`."""
    directory = entries.pop("dataset_dir", None)
    is_text = "stage" in entries and entries["stage"].value.content == "pt"
    method = entries["rl"].value.content if "rl" in entries else None
    described = partial(describe_set, is_text=is_text, method=method)
    companions = {key: entries.pop(key) for key in _COMPANIONS if key in entries}
    given = {key: entry for key, entry in companions.items() if entry.value.content is not None}
    for key in [key for key in companions if key not in given]:
        report.drop(companions[key], "it is empty")
    for written, ours in _OURS.items():
        entry = entries.pop(written, None)
        if entry is not None and str(entry.value.content).endswith((".yaml", ".yml")):
            report.decide(entry, "it describes datasets by name; name their files here")
            continue
        if entry is None or entry.value.content in (None, ""):
            if entry is not None:
                report.drop(entry, "it is empty")
            continue
        content, as_written = entry.value.content, entry
        if isinstance(content, str):
            names = [replace(entry.value, content=name.strip()) for name in content.split(",") if name.strip()]
            if written != "dataset_name":
                found = [_looked_up(entry, name, directory, report, described) for name in names]
                names = [name for name in found if name is not None]
            entry = replace(entry, value=replace(entry.value, content=names))
        entries[ours] = entry
        report.read_as(as_written, ours)
    if directory is not None:
        report.drop(directory, "`datasets` has the paths of the files")
    _add_to_datasets(entries, given, report)


_OURS: Mapping[str, str] = {
    "dataset_name": "datasets", "dataset": "datasets", "train_dataset": "datasets", "eval_dataset": "test_datasets",
}  # fmt: skip
"""Keys that name the data, and ours."""


def _looked_up(
    entry: Entry,
    name: Marked,
    directory: Entry | None,
    report: Report,
    describe: Callable[[Mapping[str, Plain], Path], dict[str, Plain] | str],
) -> Marked | None:
    """The set that a name stands for in dataset_info.json; the name as a path if it is not there.

    None if it cannot be used, with a finding: the name is no path then.
    """
    named = None if directory is None else directory.value.content
    folder = Path(named if isinstance(named, str) else "data")
    try:
        info = read_dataset_info(folder)
    except (OSError, ValueError) as error:
        report.reject(
            entry.value.where, f"{folder / FILE_NAME}: cannot be read: {str(error).splitlines()[0]}", "datasets"
        )
        return None
    if info is None or str(name.content) not in info:
        return name
    described = describe(info[str(name.content)], folder)
    if isinstance(described, str):
        report.reject(
            entry.value.where, f"`{entry.written}`: {show(name.content)} cannot be used: {described}", "datasets"
        )
        return None
    return marked(described, name.where)


_COMPANIONS: Mapping[str, str] = {
    "dataset_config": "name",
    "dataset_config_name": "name",
    "dataset_configs": "name",
    "dataset_train_split": "split",
    "train_split": "split",
    "dataset_text_field": "field",
    "max_samples": "max_samples",
    "default_system": "system_prompt",
}
"""Keys about all datasets, and our key of each dataset."""


def _add_to_datasets(entries: Entries, given: Entries, report: Report) -> None:
    """Put keys about all datasets into each dataset that has no such key."""
    datasets = entries.get("datasets")
    items = [] if datasets is None or not datasets.value.content else datasets.value.items or [datasets.value]
    for key, written in given.items():
        several = written.value.items
        entry = replace(written, value=several[0]) if len(several) == 1 else written
        for item in items:
            keys_of_set(item).setdefault(_COMPANIONS[key], entry)
        report.read_as(entry, f"datasets: - {_COMPANIONS[key]}: {show(plain(entry.value))}")
