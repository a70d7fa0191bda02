"""Trackers of other trainers, and the hub: `report_to`, and what turns a tracker on without it.

Invariant: a tracker reports what the other trainer would have it report, or the config says why it does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ratel_cli.config.others.row import Code, ForeignKey
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, marked, plain


def _trackers(entries: Entries, report: Report) -> None:
    """`report_to` with the names of trackers, and what axolotl and LLaMA-Factory call project and run there."""
    on = _tracker_names(entries, report)
    for ours, theirs in _TRACKER_KEYS.items():
        for key, tracker in theirs.items():
            entry = entries.get(key)
            if (
                entry is None
                or tracker not in on
                or not isinstance(entry.value.content, str)
                or not entry.value.content
            ):
                continue
            del entries[key]
            if ours in entries and entries[ours].value.content is not None:
                report.drop(entry, f"`{entries[ours].written}` is set", quietly=False)
            else:
                entries[ours] = made(entry, entry.value.content)
                report.read_as(entry, f"{ours}: {entry.value.content}")


def _tracker_names(entries: Entries, report: Report) -> Sequence[Plain]:
    """The trackers of `report_to`, without those that Ratel does not know, and without a wandb that is turned off."""
    entry = entries.get("report_to")
    if entry is None or entry.value.content is None:
        return _turned_on(entries, report)
    content = plain(entry.value)
    names: list[Plain] = list(content) if isinstance(content, list) else [content]
    if names in ([], [None], ["none"]):
        return ()
    mode = entries.get("wandb_mode")
    is_off = mode is not None and mode.value.content not in (None, "", "online")
    for name in [name for name in names if name in _OTHER_TRACKERS or (name == "wandb" and is_off)]:
        names.remove(name)
        reason = "Ratel does not know this tracker; the metrics of every step are in run/metrics.jsonl"
        if name == "wandb":
            reason = "`wandb_mode` turns it off; to use it without a network, set WANDB_MODE in the environment instead"
        dropped = replace(entry, value=Marked(where=entry.value.where, content=str(name)))
        report.drop(dropped, reason, quietly=name in ("none", "all"))
    if names:
        entries["report_to"] = replace(entry, value=marked(names, entry.value.where))
    else:
        del entries["report_to"]
    return names


def _turned_on(entries: Entries, report: Report) -> Sequence[Plain]:
    """The trackers that a config turns on without `report_to`: by their own key, or by a project, as in axolotl."""
    found: dict[str, Entry] = {}
    off = {_SWITCHES[key] for key in _SWITCHES if key in entries and entries[key].value.content in (False, 0)}
    mode = entries.get("wandb_mode")
    if mode is not None and mode.value.content not in (None, "", "online"):
        off.add("wandb")
    for key, tracker in _SWITCHES.items():
        if key in entries and entries[key].value.content in (True, 1) and tracker not in off:
            found[tracker] = entries.pop(key)
    for key, tracker in _TRACKER_KEYS["project"].items():
        content = entries[key].value.content if key in entries else None
        if isinstance(content, str) and content and tracker not in off:
            found.setdefault(tracker, entries[key])
    for tracker, entry in found.items():
        report.read_as(entry, f"report_to: {tracker}")
    if found:
        first = next(iter(found.values()))
        names = marked(list(found), first.value.where)
        entries["report_to"] = replace(first, value=names)
    return tuple(found)


_SWITCHES: Mapping[str, str] = {
    "use_wandb": "wandb", "use_mlflow": "mlflow", "use_trackio": "trackio", "use_tensorboard": "tensorboard",
}  # fmt: skip
"""Keys that turn a tracker on or off."""
_OTHER_TRACKERS = (
    "none", "all", "comet_ml", "comet", "swanlab", "clearml", "neptune", "azure_ml", "dagshub", "codecarbon", "flyte",
    "dvclive",
)  # fmt: skip
_TRACKER_KEYS: Mapping[str, Mapping[str, str]] = {
    "project": {
        "wandb_project": "wandb",
        "mlflow_experiment_name": "mlflow",
        "trackio_project_name": "trackio",
    },
    "run_name": {
        "wandb_name": "wandb",
        "wandb_run_name": "wandb",
        "mlflow_run_name": "mlflow",
        "trackio_run_name": "trackio",
    },
}
"""By our key: other trainers' names for it, and the tracker that each is about."""
TRACKERS = (
    ForeignKey(
        theirs=" ".join(("report_to", *_SWITCHES, *(key for names in _TRACKER_KEYS.values() for key in names))),
        how=Code(_trackers),
    ),
    # `push_to_hub` decides, where it is set, whether `hub_model_id` counts.
    ForeignKey(
        theirs="hub_model_id",
        how="ignored",
        only=lambda value: value is not None,
        when=lambda given: given.value("push_to_hub") in (False, 0),
        why="`push_to_hub` is false",
    ),
    ForeignKey(
        theirs="push_to_hub",
        how="ignored",
        only=(True,),
        when=lambda given: "hub_model_id" in given,
        why="`hub_model_id` says where to",
    ),
)
