"""How other trainers name their data: sets in a mixture, by name and companions, or in `dataset_info.json`.

Invariant: afterwards the sets are in `datasets` and `test_datasets`, each with its path, and nothing about them is lost
without a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ratel_cli.config.keys.sections import DatasetConfig
from ratel_cli.config.others.aliases import canonical_key
from ratel_cli.config.others.dataset_info import FILE_NAME, describe_set, read_dataset_info
from ratel_cli.config.others.row import (
    SAME,
    Code,
    ForeignKey,
    Given,
    Site,
    absent,
    decide,
    each_set,
    put,
    sets,
    translate,
)
from ratel_cli.config.yaml.reporting import Entries, Report, keys_of_set, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, marked, plain, show


def translate_dataset(entries: Entries, report: Report) -> None:
    """Rewrite the entries of one dataset: the names that TRL and axolotl have for files and messages."""
    translate(_OF_A_SET, entries, report)


def _is_mapping(value: Plain) -> bool:
    return isinstance(value, dict)


# One set.


def _empty_in_set(site: Site) -> None:
    """An empty key has its default, unless nothing is what it has by default."""
    field = DatasetConfig.model_fields.get(canonical_key("datasets", site.key))
    if field is None or field.default is not None:
        site.report.drop(site.take(), "it is empty")


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
    named, read = ("reasoning_content" if each is None else plain(each.value) for each in (field, key))
    for entry in filter(None, (field, key)):
        if named == read or not isinstance(read, str):
            report.drop(entry, "the chat template gets all keys of a message")
            continue
        put(entries, f"message_property_mappings.{read}", made(entry, named))
        report.read_as(entry, f"message_property_mappings: {{{read}: {show(named)}}}".replace("'", ""))


def _columns_in_type(site: Site) -> None:
    """The columns in axolotl's `type` as a mapping. As a type it stays an error: its prompt has words of its own, by
    default the instruction and the input with a space behind each."""
    columns = site.entry.value.entries
    for key in sorted(columns.keys() & {"field_instruction", "field_input", "field_output"}):
        site.entries.setdefault(key, columns[key])


_OF_A_SET = (
    ForeignKey(theirs="*", how=_empty_in_set, only=(None,), when=Given.is_file),
    ForeignKey(
        theirs="data_files",
        how=sets({"path": SAME}),
        only=lambda value: isinstance(value, str),
        when=lambda given: given.value("path") in (None, *_BUILDERS),
        over={"path": "`data_files` names the files"},
    ),
    ForeignKey(theirs="type", how=_columns_in_type, only=_is_mapping),
    ForeignKey(theirs="message_field_role", how=sets({"message_property_mappings.role": SAME})),
    ForeignKey(theirs="message_field_content", how=sets({"message_property_mappings.content": SAME})),
    ForeignKey(theirs="field_thinking template_thinking_key", how=Code(_thinking)),
)

# The names of sets.


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


def _mixture(site: Site) -> None:
    """The alignment handbook's `dataset_mixture`."""
    mixture = site.take()
    inner = mixture.value.entries
    if "datasets" in inner:
        site.entries["datasets"] = replace(mixture, value=inner["datasets"].value)
        site.report.read_as(mixture, "datasets")
    if "test_split_size" in inner and "val_set_size" not in site.entries:
        site.entries["test_split_size"] = inner["test_split_size"]
    for key in [key for key in inner if key not in ("datasets", "test_split_size")]:
        site.report.drop(replace(inner[key], written=f"dataset_mixture.{key}"), "Ratel shuffles all data with `seed`")


def _mixer(site: Site) -> None:
    """`dataset_mixer`, which the alignment handbook had before."""
    mixer = site.take()
    sets = [_mixed(mixer, name, share) for name, share in mixer.value.entries.items()]
    for key, ours in (("dataset_splits", "split"), ("dataset_configs", "name")):
        _one_each(site.entries, key, ours, sets, site.report)
    site.entries["datasets"] = replace(mixer, value=replace(mixer.value, content=list(sets)))
    site.report.read_as(mixer, "datasets")


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


def _pretraining(site: Site) -> None:
    """axolotl's `pretraining_dataset`, whose sets are plain texts with a key of its own for their column."""
    entries = site.entries
    pretraining = entries["datasets"] = site.take()
    is_stream = site.given.value("max_steps") not in (None, -1) and "streaming" not in entries
    if is_stream:
        entries["streaming"] = made(pretraining, True)
    for each in pretraining.value.items or [pretraining.value]:
        keys, texts = keys_of_set(each), Marked(where=each.where, content="completion")
        keys.setdefault("type", Entry(where=each.where, written="", value=texts))
        if "text_column" in keys:
            keys.setdefault("field", keys.pop("text_column"))
    site.report.read_as(pretraining, "datasets, streaming: true" if is_stream else "datasets")


def _named_sets(site: Site) -> None:
    """Names with commas between them; all but TRL's may be in LLaMA-Factory's dataset_info.json."""
    entry = as_written = site.take()
    if isinstance(entry.value.content, str):
        names = [replace(entry.value, content=name.strip()) for name in entry.value.content.split(",") if name.strip()]
        if site.key != "dataset_name":
            names = [found for name in names if (found := _looked_up(entry, name, site)) is not None]
        entry = replace(entry, value=replace(entry.value, content=names))
    site.entries[site.row.ours] = entry
    site.report.read_as(as_written, site.row.ours)


def _looked_up(entry: Entry, name: Marked, site: Site) -> Marked | None:
    """The set that a name stands for in dataset_info.json; the name as a path if it is not there.

    None if it cannot be used, with a finding: the name is no path then.
    """
    given = site.given
    directory = given.value("dataset_dir")
    folder = Path(directory if isinstance(directory, str) else "data")
    try:
        info = read_dataset_info(folder)
    except (OSError, ValueError) as error:
        message = f"{folder / FILE_NAME}: cannot be read: {str(error).splitlines()[0]}"
        site.report.reject(entry.value.where, message, "datasets")
        return None
    if info is None or str(name.content) not in info:
        return name
    described = describe_set(
        info[str(name.content)], folder, is_text=given.value("stage") == "pt", method=given.value("rl")
    )
    if isinstance(described, str):
        message = f"`{entry.written}`: {show(name.content)} cannot be used: {described}"
        site.report.reject(entry.value.where, message, "datasets")
        return None
    return marked(described, name.where)


_NAMED = "dataset_name dataset train_dataset"
_OF_ALL_SETS = {
    "dataset_config": "name",
    "dataset_config_name": "name",
    "dataset_configs": "name",
    "dataset_train_split": "split",
    "train_split": "split",
    "dataset_text_field": "field",
    "max_samples": "max_samples",
    "default_system": "system_prompt",
}
"""Keys about all datasets, and our key of each dataset. The first one counts."""
DATASETS = (
    ForeignKey(theirs=" ".join(("datasets test_datasets eval_dataset", *_NAMES_OF_DATA)), how=Code(_reject_several)),
    ForeignKey(
        theirs="dataset_mixture", how=_mixture, only=lambda value: isinstance(value, dict), when=absent("datasets")
    ),
    ForeignKey(theirs="dataset_mixer", how=_mixer, only=lambda value: isinstance(value, dict), when=absent("datasets")),
    ForeignKey(theirs="pretraining_dataset", how=_pretraining, only=bool, when=absent("datasets")),
    ForeignKey(
        theirs=f"{_NAMED} eval_dataset",
        how=decide,
        only=lambda value: str(value).endswith((".yaml", ".yml")),
        why="it describes datasets by name; name their files here",
    ),
    ForeignKey(theirs=f"{_NAMED} eval_dataset", how="ignored", only=(None, ""), why="it is empty"),
    ForeignKey(theirs=_NAMED, how=_named_sets, ours="datasets"),
    ForeignKey(theirs="eval_dataset", how=_named_sets, ours="test_datasets"),
    ForeignKey(theirs="dataset_dir", how="ignored", why="`datasets` has the paths of the files"),
    ForeignKey(theirs=" ".join(_OF_ALL_SETS), how="ignored", only=(None,), why="it is empty"),
    *(ForeignKey(theirs=theirs, how=each_set, ours=ours) for theirs, ours in _OF_ALL_SETS.items()),
)
