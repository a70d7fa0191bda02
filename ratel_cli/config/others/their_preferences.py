"""Preference tuning of other trainers: their stages, losses and types of datasets become keys of ours.

Invariant: what a rewritten config trains is what the other trainer would, or there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, plain, show

_HINT = "`rl` is dpo, ipo, orpo, simpo or kto"


def translate_preferences(entries: Entries, report: Report) -> None:
    """Find the method, by whatever key says it, and rewrite what belongs to it."""
    _stage(entries, report)
    _trl_method(entries, report)
    entry = entries.get("rl")
    if entry is None or entry.value.content is None:
        return
    _loss_type(entries, report, entry)
    for key, reason in _HARMLESS.items():
        if key in entries:
            report.drop(entries.pop(key), reason)
    smoothing = entries.pop("label_smoothing", None)
    if smoothing is not None and smoothing.value.content:
        report.reject(
            smoothing.where,
            "`label_smoothing` assumes that some preferences are wrong; no loss of `rl` does",
            "rl",
            hint="set it to 0",
        )
    elif smoothing is not None:
        report.drop(smoothing, "it is 0")
    for each in entries["datasets"].value.items if "datasets" in entries else ():
        _dataset(each.entries, entries, report)


def _stage(entries: Entries, report: Report) -> None:
    """LLaMA-Factory's `stage`, with the loss in `pref_loss`."""
    stage, loss = entries.get("stage"), entries.pop("pref_loss", None)
    if stage is None or stage.value.content not in ("dpo", "kto"):
        if loss is not None:
            report.drop(loss, "this is no preference training")
        return
    del entries["stage"]
    name = "sigmoid" if loss is None else loss.value.content
    method = "kto" if stage.value.content == "kto" else _LOSSES.get(str(name))
    if method is None:
        message = f"`pref_loss: {name}` is another loss than those of `rl`"
        if name == "orpo":
            message = "`pref_loss: orpo` counts the cross-entropy of answers only, `rl: orpo` that of prompts too"
        assert loss is not None
        report.reject(loss.where, message, "rl", hint=_HINT)
        return
    entries["rl"] = replace(made(stage, method), written="rl")
    report.read_as(stage, f"rl: {method}")
    if loss is not None:
        report.read_as(loss, f"rl: {method}")
    if method == "simpo":
        entries.setdefault("cpo_alpha", replace(made(stage, 0.0), written="cpo_alpha"))
    ftx = entries.pop("pref_ftx", None)
    if ftx is not None and ftx.value.content:
        report.reject(
            ftx.where, "`pref_ftx` adds the cross-entropy of each chosen answer to the loss", "rl", hint="set it to 0"
        )
    elif ftx is not None:
        report.drop(ftx, "it is 0")


_LOSSES: Mapping[str, str] = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo"}


def _trl_method(entries: Entries, report: Report) -> None:
    """TRL's configs do not say which of its trainers they are for, but by the loss."""
    if "beta" not in entries or ("rl" in entries and entries["rl"].value.content is not None):
        return
    loss = entries.get("loss_type")
    name = None if loss is None else _only(plain(loss.value))
    of_cpo = next((entries[key] for key in ("cpo_alpha", "simpo_gamma") if key in entries), None)
    if of_cpo is not None and name != "simpo":
        shown = "its default" if name is None else f"`{name}`"
        report.reject(
            of_cpo.where,
            f"`{of_cpo.written}` belongs to TRL's CPO, which with {shown} as its loss has no reference model",
            "rl",
            hint=_HINT,
        )
        for key in ("beta", "loss_type"):
            entries.pop(key, None)
        return
    if str(name) in _LOSSES:
        method = _LOSSES[str(name)]
        entries["rl"] = replace(made(entries["beta"], method), written="rl")
        return
    report.reject(
        entries["beta"].where,
        "`beta` belongs to preference training, but no key names the method",
        "rl",
        hint="write it into the config: `rl: dpo`, `orpo` or `kto`",
    )
    del entries["beta"]


def _loss_type(entries: Entries, report: Report, method: Entry) -> None:
    """TRL's `loss_type`, and axolotl's `dpo_loss_type`: a name, or a list of them."""
    for key in ("loss_type", "dpo_loss_type"):
        entry = entries.get(key)
        if entry is None:
            continue
        name, current = _only(plain(entry.value)), method.value.content
        if name is None or name == current or (name, current) == ("sigmoid", "dpo"):
            report.drop(entries.pop(key), f"it is that of `rl: {current}`")
        elif current == "dpo" and str(name) in _LOSSES:
            method.value = made(method, _LOSSES[str(name)]).value
            report.read_as(entries.pop(key), f"rl: {_LOSSES[str(name)]}")
        else:
            report.reject(
                entries.pop(key).where,
                f"`{key}: {show(plain(entry.value))}` is another loss than that of `rl: {current}`",
                "rl",
                hint=_HINT,
            )


def _only(value: object) -> object:
    """The item of a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_NO_PADDING = "rows are padded to the longest of their micro-batch"
_HARMLESS: Mapping[str, str] = {
    "precompute_ref_log_probs": "reference log-probabilities are computed once, before training",
    "precompute_ref_batch_size": "reference log-probabilities are computed once, before training",
    "max_prompt_length": "prompts have no limit of their own; see `sequence_len`",
    "max_prompt_len": "prompts have no limit of their own; see `sequence_len`",
    "max_completion_length": "answers have no limit of their own; see `sequence_len`",
    "generate_during_eval": "Ratel evaluates the loss and the rewards",
    "dpo_generate_during_eval": "Ratel evaluates the loss and the rewards",
    "dpo_padding_free": _NO_PADDING,
    "dpo_use_logits_to_keep": "logits are computed in chunks",
    "use_logits_to_keep": "logits are computed in chunks",
    "rl_adapter_ref_model": "the reference is the model before step 1",
}
"""Keys that change nothing about preferences, and why."""

_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "argilla_chat": {},
    "ultra": {},
    "prompt_pairs": {"field_prompt": "prompt", "field_system": "system"},
    "icr": {"field_prompt": "input"},
    "intel": {"field_prompt": "question", "field_system": "system"},
    "argilla": {
        "field_prompt": "instruction",
        "field_chosen": "chosen_response",
        "field_rejected": "rejected_response",
        "field_system": "system",
    },
}
"""By the end of axolotl's types, such as `chatml.intel`: the columns that they read."""
_TEMPLATES = ("chatml", "llama3", "chat_template")


def _dataset(entries: Entries, top: Entries, report: Report) -> None:
    """axolotl's types of preference data: a chat template and columns, or columns of the user's."""
    entry = entries.get("type")
    content = None if entry is None else entry.value.content
    if entry is None:
        return
    if isinstance(content, dict):
        _user_defined(entries, content, report)
        return
    template, _, form = str(content).partition(".")
    if template not in _TEMPLATES or not form or form not in _OF_TYPES:
        return
    if template != "chat_template" and "chat_template" not in top:
        top["chat_template"] = replace(made(entry, template), written="chat_template")
    columns = {} if template == "chat_template" else _OF_TYPES[form]  # those have the prompt in the answers
    for key, column in columns.items():
        entries.setdefault(key, replace(made(entry, column), written=key))
    entries["type"] = made(entry, "chat_template")
    report.read_as(entry, "type: chat_template")


def _user_defined(entries: Entries, content: Entries, report: Report) -> None:
    """Columns in a mapping. A format that adds words to a text is an error."""
    entry = entries["type"]
    columns = {key: each for key, each in content.items() if key.startswith("field_") and each.value.content}
    formats = {key: each for key, each in content.items() if key.endswith("_format") and each.value.content}
    for key, each in formats.items():
        role = key.removesuffix("_format")
        column = columns.get(f"field_{role}")
        names = {role, "" if column is None else str(column.value.content)}
        if str(each.value.content).strip() not in {f"{{{name}}}" for name in names}:
            report.reject(
                each.where,
                f"`{key}` adds words to the text of its column",
                "datasets",
                hint="write the words into the data, or set `type: chat_template`",
            )
    system = columns.pop("field_system", None)
    if system is not None:
        report.drop(system, "without `prompt_format` no text has it", quietly=False)
    for key, each in columns.items():
        entries.setdefault(key, each)
    entries["type"] = replace(made(entry, "completion"), value=Marked(where=entry.value.where, content="completion"))
    report.read_as(entry, "type: completion")
