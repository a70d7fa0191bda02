"""Preference tuning of other trainers: their stages, losses and types of datasets become keys of ours.

Invariant: what a rewritten config trains is what the other trainer would, or there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratel_cli.config.others.row import Code, ForeignKey, Given, Site, adds, refuse, sets
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Plain

_HINT = "`rl` is dpo, ipo, orpo, simpo or kto"
_METHODS: Mapping[str, str] = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo"}
"""By the name of a loss: ours of the method."""


def _compares(given: Given) -> bool:
    return given.has("rl")


def _in_dpo(given: Given) -> bool:
    return given.value("stage") == "dpo"


def _by_stage(given: Given) -> bool:
    """Whether LLaMA-Factory's `stage` has named the method."""
    return given.written("rl") == "stage"


def _method_of_stage(given: Given) -> Plain:
    return "kto" if given.value("stage") == "kto" else _METHODS[str(given.value("pref_loss") or "sigmoid")]


def _only(value: Plain) -> Plain:
    """The item of a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _method_of_loss(given: Given) -> Plain:
    """The method that TRL's `loss_type` names; None if it names none."""
    return _METHODS.get(str(_only(given.value("loss_type"))))


def _by_beta_alone(given: Given) -> bool:
    """Whether this is TRL's preference training, which no key but those of its loss names."""
    return "beta" in given and not _compares(given)


def _loss_of_cpo(given: Given) -> str:
    name = _only(given.value("loss_type"))
    return "its default" if name is None else f"`{name}`"


def _loss_type(site: Site) -> None:
    """TRL's `loss_type`, and axolotl's `dpo_loss_type`: a name, or a list of them."""
    name, current = _only(site.content), site.given.value("rl")
    method = _METHODS.get(str(name))
    if name is None or name == current or (name, current) == ("sigmoid", "dpo"):
        site.report.drop(site.take(), f"it is that of `rl: {current}`")
    elif current == "dpo" and method is not None:
        site.entries["rl"].value = made(site.entries["rl"], method).value
        site.report.read_as(site.take(), f"rl: {method}")
    else:
        refuse("`{key}: {value}` is another loss than that of `rl: {rl}`")(site)


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


def _types_of_sets(entries: Entries, report: Report) -> None:
    """The types of preference data, for each set."""
    for each in entries["datasets"].value.items:
        _dataset(each.entries, entries, report)


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
        top["chat_template"] = made(entry, template)
    columns = {} if template == "chat_template" else _OF_TYPES[form]  # those have the prompt in the answers
    for key, column in columns.items():
        entries.setdefault(key, made(entry, column))
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
    entries["type"] = made(entry, "completion")
    report.read_as(entry, "type: completion")


PREFERENCES = (
    # LLaMA-Factory's `stage`, with the loss in `pref_loss`.
    ForeignKey(theirs="pref_loss", how="ignored", only=(None,), why="it is empty"),
    ForeignKey(
        theirs="pref_loss",
        how="ignored",
        when=lambda given: given.value("stage") not in ("dpo", "kto"),
        why="this is no preference training",
    ),
    ForeignKey(
        theirs="pref_loss",
        how=refuse(
            "`pref_loss: orpo` counts the cross-entropy of answers only, `rl: orpo` that of prompts too",
            without=("stage",),
        ),
        ours="rl",
        hint=_HINT,
        only=("orpo",),
        when=_in_dpo,
    ),
    ForeignKey(
        theirs="pref_loss",
        how=refuse("`pref_loss: {text}` is another loss than those of `rl`", without=("stage",)),
        ours="rl",
        hint=_HINT,
        only=lambda value: str(value) not in _METHODS,
        when=_in_dpo,
    ),
    ForeignKey(theirs="stage", how=sets({"rl": _method_of_stage}), only=("dpo", "kto")),
    ForeignKey(
        theirs="pref_loss",
        how=adds({"cpo_alpha": 0.0}),
        when=lambda given: _by_stage(given) and given.value("rl") == "simpo",
    ),
    ForeignKey(theirs="pref_loss", how=sets({"rl": lambda given: given.value("rl")}, keep=True), when=_by_stage),
    ForeignKey(
        theirs="pref_ftx",
        how=refuse("`pref_ftx` adds the cross-entropy of each chosen answer to the loss"),
        ours="rl",
        hint="set it to 0",
        only=bool,
        when=_by_stage,
    ),
    ForeignKey(theirs="pref_ftx", how="ignored", when=_by_stage, why="it is 0"),
    # TRL's configs do not say which of its trainers they are for, but by the loss.
    ForeignKey(
        theirs="rl", how="ignored", only=(None,), when=lambda given: "beta" in given, why="the loss names the method"
    ),
    ForeignKey(
        theirs="cpo_alpha simpo_gamma",
        how=refuse(
            "`{key}` belongs to TRL's CPO, which with {why} as its loss has no reference model",
            goes_on=True,
            without=("beta", "loss_type"),
        ),
        ours="rl",
        hint=_HINT,
        when=lambda given: _by_beta_alone(given) and _method_of_loss(given) != "simpo",
        why=_loss_of_cpo,
    ),
    ForeignKey(
        theirs="beta",
        how=adds({"rl": _method_of_loss}),
        when=lambda given: _by_beta_alone(given) and _method_of_loss(given) is not None,
    ),
    ForeignKey(
        theirs="beta",
        how=refuse("`beta` belongs to preference training, but no key names the method"),
        ours="rl",
        hint="write it into the config: `rl: dpo`, `orpo` or `kto`",
        when=_by_beta_alone,
    ),
    ForeignKey(theirs="loss_type dpo_loss_type", how=_loss_type, ours="rl", hint=_HINT, when=_compares),
    # Keys that change nothing about preferences.
    ForeignKey(
        theirs="precompute_ref_log_probs precompute_ref_batch_size",
        how="ignored",
        when=_compares,
        why="reference log-probabilities are computed once, before training",
    ),
    ForeignKey(
        theirs="max_prompt_length max_prompt_len",
        how="ignored",
        when=_compares,
        why="prompts have no limit of their own; see `sequence_len`",
    ),
    ForeignKey(
        theirs="max_completion_length",
        how="ignored",
        when=_compares,
        why="answers have no limit of their own; see `sequence_len`",
    ),
    ForeignKey(
        theirs="generate_during_eval dpo_generate_during_eval",
        how="ignored",
        when=_compares,
        why="Ratel evaluates the loss and the rewards",
    ),
    ForeignKey(
        theirs="dpo_padding_free",
        how="ignored",
        when=_compares,
        why="rows are padded to the longest of their micro-batch",
    ),
    ForeignKey(
        theirs="dpo_use_logits_to_keep use_logits_to_keep",
        how="ignored",
        when=_compares,
        why="logits are computed in chunks",
    ),
    ForeignKey(
        theirs="rl_adapter_ref_model",
        how="ignored",
        when=_compares,
        why="the reference is the model before step 1",
    ),
    ForeignKey(
        theirs="label_smoothing",
        how=refuse("`label_smoothing` assumes that some preferences are wrong; no loss of `rl` does"),
        ours="rl",
        hint="set it to 0",
        only=bool,
        when=_compares,
    ),
    ForeignKey(theirs="label_smoothing", how="ignored", when=_compares, why="it is 0"),
    ForeignKey(theirs="datasets", how=Code(_types_of_sets), when=_compares),
)
