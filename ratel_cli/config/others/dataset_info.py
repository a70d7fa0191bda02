"""LLaMA-Factory's `dataset_info.json`: what the names in `dataset` stand for.

Invariant: a set is described with our keys so that its rows become the conversations that LLaMA-Factory makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ratel_cli.config.keys.sections import DatasetConfig
from ratel_cli.config.yaml.yaml_marks import MAX_TEXT_BYTES, Plain
from ratel_cli.dataset_keys import unread_for_type

FILE_NAME = "dataset_info.json"
_COLUMNS: Mapping[str, str] = {
    "prompt": "field_instruction",
    "query": "field_input",
    "response": "field_output",
    "history": "field_history",
    "messages": "field_messages",
    "system": "field_system",
    "tools": "field_tools",
    "chosen": "field_chosen",
    "rejected": "field_rejected",
    "kto_tag": "field_label",
}
"""By name in `columns`: our key of a dataset."""
_ROLES: Mapping[str, str] = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
    "observation_tag": "tool",
    "function_tag": "function_call",
}
_DEFAULTS = {key: field.default for key, field in DatasetConfig.model_fields.items()}
_SHAREGPT = {"role_tag": "from", "content_tag": "value"}

Info = Mapping[str, Mapping[str, Plain]]


def read_dataset_info(directory: Path) -> Info | None:
    """The sets in a directory's dataset_info.json, by name; None if it has no such file. Raises ValueError."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    with path.open("rb") as file:
        found = json.loads(file.read(64 * MAX_TEXT_BYTES))
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise ValueError("it is not a mapping of names to mappings")
    return found


def describe_set(
    info: Mapping[str, Plain], directory: Path, *, is_text: bool, method: object = None
) -> dict[str, Plain] | str:
    """One set with our keys; a text with the reason if Ratel cannot train on it. `is_text`: for `stage: pt`. `method`:
    our `rl`, if it is set."""
    path = info.get("file_name")
    hub = info.get("hf_hub_url") or info.get("ms_hub_url") or info.get("script_url") or info.get("cloud_file_name")
    columns = info.get("columns")
    columns = columns if isinstance(columns, dict) else {}
    reason = _why_not(info, columns, method)
    if reason is not None:
        return reason
    if not isinstance(path or hub, str):
        return "it names no file and no hub id"
    ours: dict[str, Plain] = {"path": str(directory / str(path)) if path else hub}
    for key, name in (("subset", "name"), ("split", "split"), ("num_samples", "max_samples")):
        if info.get(key) is not None:
            ours[name] = info[key]
    if is_text:
        return {**ours, "type": "completion", "field": columns.get("prompt") or "text"}
    ours["type"] = "chat_template"
    ours.update(_columns(columns, method, is_alpaca=info.get("formatting", "alpaca") == "alpaca"))
    if info.get("formatting", "alpaca") == "alpaca":
        return ours
    tags = info.get("tags")
    tags = tags if isinstance(tags, dict) else {}
    if "messages" not in columns:
        ours["field_messages"] = "conversations"
    names = {**_SHAREGPT, **tags}
    ours["message_property_mappings"] = {"role": names["role_tag"], "content": names["content_tag"]}
    roles: dict[str, Plain] = {role: [tags[tag]] for tag, role in _ROLES.items() if isinstance(tags.get(tag), str)}
    if roles:
        ours["roles"] = roles
    return ours


def _columns(columns: Mapping[str, Plain], method: object, *, is_alpaca: bool) -> dict[str, Plain]:
    """Our keys for the columns of a set, without those that neither LLaMA-Factory nor Ratel reads."""
    ours = {_COLUMNS[key]: column for key, column in columns.items() if key in _COLUMNS and column}
    if method == "kto" and is_alpaca:
        ours["field_completion"] = ours.pop("field_output", "output")
    compares = None if method is None else "verdicts" if method == "kto" else "pairs"
    unread = unread_for_type(ours, _DEFAULTS, "chat_template", compares=compares)
    return {key: column for key, column in ours.items() if key not in unread}


def _why_not(info: Mapping[str, Plain], columns: Mapping[str, Plain], method: object) -> str | None:
    """Why a set is not for training on text by this method; None if it is."""
    has_pairs, has_verdicts = bool(info.get("ranking")), bool(columns.get("kto_tag"))
    if has_pairs and method in (None, "kto"):
        return "it is preference data (chosen and rejected answers), which needs `rl: dpo`"
    if has_verdicts and method != "kto":
        return "its answers are marked good or bad (kto_tag), which needs `rl: kto`"
    if method == "kto" and not has_verdicts:
        return "its answers are not marked good or bad (kto_tag)"
    if method is not None and not has_pairs and not has_verdicts:
        return "it is no preference data (ranking: true)"
    if any(columns.get(media) for media in ("images", "videos", "audios")):
        return "it has images, video or sound; a set in `datasets` with `media: ignore` trains on the text alone"
    return None
