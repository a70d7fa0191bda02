"""`ratel import`: the config of another trainer, as a commented YAML file of ours.

Invariant: what the written file trains is what the other trainer would train, its defaults included; what differs is
named. The file loads, unless a line says that a decision is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.config.dialect import Dialect, KeyOutcome
from ratel_cli.config.json_schema import editor_line
from ratel_cli.config.keys.key_groups import OF_WARMUP
from ratel_cli.config.keys.sections import DatasetConfig
from ratel_cli.config.load import dump, validate
from ratel_cli.config.others.aliases import TOP
from ratel_cli.config.others.other_tools import (
    MASK,
    OTHER_MEANINGS,
    defaults_of,
    mask_of_sets,
    otherwise,
    recognise,
    sets_in,
    write_mask,
    write_switch,
    write_system_column,
)
from ratel_cli.config.others.torchtune import translate_torchtune
from ratel_cli.config.yaml.reporting import Entries
from ratel_cli.config.yaml.source import read_file
from ratel_cli.config.yaml.yaml_marks import Entry, Finding, Marked, Scalar, plain, raise_all, read_text
from ratel_cli.dataset_keys import unread_for_type

_ONLY_OURS = frozenset(
    {
        "tokens_per_step", "storage", "limits", "activations", "head_chunk", "optimizer_overlap", "dtype",
        "gradient_dtype", "random_init", "deterministic", "trace",
    }
)  # fmt: skip
"""Keys that only Ratel has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A config of ours that was made from another trainer's."""

    tool: str
    text: str
    """The YAML file."""
    outcomes: tuple[KeyOutcome, ...]
    """What became of each key, in the order of the file."""


def import_config(path: Path) -> Imported:
    """The config in a file of another trainer, YAML or JSON. Raises BadInput with everything that Ratel cannot do."""
    findings: list[Finding] = []
    dialect = Dialect(findings, forgiving=True)
    root = read_text(read_file(path, "config"), str(path), findings)
    if not isinstance(root.content, dict) or not root.content:
        raise Finding(where=root.where, message="a config consists of `key: value` lines").as_error()
    if _is_of_a_model(root):
        hint = "name the config of the training; this model is its `base_model`"
        message = "this is the config of a model, not of a training"
        raise Finding(where=root.where, message=message, hint=hint).as_error()
    tool = recognise(root)
    defaults = dict(defaults_of(tool, root))
    if tool == "axolotl":
        # Here an empty one would turn clipping off.
        _replace(root, "max_grad_norm", None, 1.0, "max_grad_norm: 1.0, the trainer's default", dialect)
        _best_by_patience(root, dialect)
        _loraplus(root, dialect)
        # It makes two steps of a warm-up of one.
        _replace(root, "warmup_steps", 1, 2, "warmup_steps: 2, as axolotl counts", dialect)
    _evaluations(root, tool, dialect)
    write_switch(tool, root)
    for key, reason in OTHER_MEANINGS.get(tool, {}).items():
        if key in root.entries:
            dialect.drop(root.entries.pop(key), reason, quietly=False)
    if tool == "torchtune":
        root.content = translate_torchtune(root.entries, dialect)
    is_constant = any(
        key in root.entries and root.entries[key].value.content == "constant"
        for key in ("lr_scheduler", "lr_scheduler_type")
    )
    dialect.translate(TOP, root)
    if root.entries.keys() & _ONLY_OURS and all(outcome.fate == "kept" for outcome in dialect.outcomes):
        tool, defaults = "Ratel", {}  # axolotl shares the other keys
    has_warmup = tool in ("torchtune", "Ratel") or not is_constant
    steps = root.entries.get("warmup_steps")
    if steps is not None and steps.value.content and "warmup_ratio" in root.entries:
        dialect.drop(root.entries.pop("warmup_ratio"), "`warmup_steps` decides, as it does there")
    _add_defaults(root, defaults, has_warmup=has_warmup)
    _leave_unread(root, tool, dialect)
    _write_masks(root, tool, dialect)
    if tool == "axolotl":
        write_system_column(root)
    by_default = _say_otherwise(root, tool, dialect)
    missing = tuple(key for key in ("base_model", "datasets") if key not in root.entries)
    _check(root, missing, dialect)
    raise_all(findings)
    outcomes = tuple(sorted(dialect.outcomes, key=lambda outcome: outcome.where))
    return Imported(
        tool=tool,
        text=_text(root, tool, path, outcomes, missing, by_default),
        outcomes=(
            *outcomes,
            *by_default,
            *(
                KeyOutcome(where=root.where, written=key, value="", fate="undecided", reason=_MISSING[key])
                for key in missing
            ),
        ),
    )


def _say_otherwise(root: Marked, tool: str, dialect: Dialect) -> tuple[KeyOutcome, ...]:
    """Say beside keys what the tool does otherwise. Returns a row for each that no user wrote."""
    by_default = []
    for key, reason in otherwise(tool, root):
        entry = root.entries[key]
        ours = f"{key}: {entry.value.content}"
        row = KeyOutcome(where=root.where, written=key, value="", fate="translated", ours=ours, reason=reason)
        rows = [each for each in dialect.outcomes if entry.written and each.where == entry.where]
        by_default += [] if rows else [row]
        changed = [replace(each, fate=row.fate, ours=each.ours or ours, reason=reason) for each in rows]
        dialect.outcomes = [*(each for each in dialect.outcomes if each not in rows), *changed]
    return tuple(by_default)


def _is_of_a_model(root: Marked) -> bool:
    """Whether this is a model's config.json."""
    if "base_model" in root.entries or "model_name_or_path" in root.entries:
        return False
    return "architectures" in root.entries or ("model_type" in root.entries and recognise(root) == "Ratel")


def _replace(root: Marked, key: str, theirs: object, ours: float, note: str, dialect: Dialect) -> None:
    """Read a value as the one that means the same here."""
    entry = root.entries.get(key)
    if entry is not None and entry.value.content == theirs:
        dialect.read_as(entry, note)
        entry.value = replace(entry.value, content=ours)


def _best_by_patience(root: Marked, dialect: Dialect) -> None:
    """axolotl loads the best model at the end of a run that may be stopped early."""
    patience = root.entries.get("early_stopping_patience")
    if patience is not None and patience.value.content:
        given = root.entries.pop("load_best_model_at_end", patience)
        dialect.read_as(given, "load_best_model_at_end: true")
        root.entries["load_best_model_at_end"] = replace(
            patience, written="load_best_model_at_end", value=replace(patience.value, content=True)
        )


def _loraplus(root: Marked, dialect: Dialect) -> None:
    """axolotl gives PEFT's LoRA+ neither a weight decay nor a rate of embeddings. (LLaMA-Factory does decay.)"""
    ratio, decay = (root.entries.get(key) for key in ("loraplus_lr_ratio", "weight_decay"))
    if ratio is None or not ratio.value.content:
        return
    if decay is not None and decay.value.content:
        dialect.read_as(decay, "weight_decay: 0, since axolotl decays nothing with LoRA+")
        decay.value = replace(decay.value, content=0)
    for key in ("embedding_lr", "embedding_lr_scale"):
        if key in root.entries:
            dialect.drop(root.entries.pop(key), "axolotl does not use it with `loraplus_lr_ratio`", quietly=False)


def _evaluations(root: Marked, tool: str, dialect: Dialect) -> None:
    """`eval_strategy: steps` without `eval_steps` evaluates every `logging_steps`, whose default each tool has."""
    steps, logged = (root.entries.get(key) for key in ("eval_steps", "logging_steps"))
    by_epoch = root.entries.get("evals_per_epoch")
    for key in ("eval_strategy", "evaluation_strategy"):
        entry = root.entries.get(key)
        is_given = any(each is not None and each.value.content is not None for each in (steps, logged, by_epoch))
        if entry is not None and entry.value.content == "steps" and not is_given and tool in _LOGGING_STEPS:
            number = _LOGGING_STEPS[tool]
            dialect.read_as(entry, f"eval_steps: {number}, the `logging_steps` of {tool}")
            root.entries["eval_steps"] = replace(
                entry, written="eval_steps", value=replace(entry.value, content=number)
            )
            return


_LOGGING_STEPS: Mapping[str, int] = {"transformers": 500, "LLaMA-Factory": 500, "TRL": 10}


def _write_masks(root: Marked, tool: str, dialect: Dialect) -> None:
    """Write out which tokens the tool has its loss on, where the config does not say it."""
    sets, whole = list(mask_of_sets(tool, root)), root.entries.get("train_on_inputs")
    if sets and whole is not None and whole.value.content is True:
        dialect.decide(whole, "axolotl then trains the words of all turns and their EOS tokens, Ratel all tokens")
        return
    for key, each, entry in sets:
        written = f"{key}.{entry.written}"
        dialect.outcomes = [row for row in dialect.outcomes if (row.where, row.written) != (entry.where, written)]
        value = str(entry.value.content)
        ours = f"type: chat_template, {MASK}, the default of {tool}"
        row = KeyOutcome(where=entry.where, written=written, value=value, fate="translated", ours=ours)
        dialect.outcomes.append(row)
        write_mask(each)


def _leave_unread(root: Marked, tool: str, dialect: Dialect) -> None:
    """Leave out what the rows of a set do not have read, and axolotl's `field_system`, which it does not read either:
    its conversations have a column `system`, and other rows none."""
    method = root.entries.get("rl")
    name = None if method is None else method.value.content
    compares = None if name is None else "verdicts" if name == "kto" else "pairs"
    defaults = {key: field.default for key, field in DatasetConfig.model_fields.items()}
    for each in sets_in(root):
        of_type = str(plain(each["type"].value)) if "type" in each else "auto"
        keys = {key: plain(entry.value) for key, entry in each.items()}
        for key in unread_for_type(keys, defaults, of_type, compares=compares):
            what = f"`type: {of_type}`" if compares is None else f"`rl: {name}`"
            _leave_out(each, key, f"it is not read for {what}", dialect)
        usual = "system" if of_type == "chat_template" else None
        if tool == "axolotl" and compares is None and keys.get("field_system") not in (usual, None):
            column = "has the column `system`, whatever this says" if usual else "gives these rows no system prompt"
            _leave_out(each, "field_system", f"axolotl {column}", dialect)


def _leave_out(keys: Entries, key: str, reason: str, dialect: Dialect) -> None:
    """Take a key out of a set, and let the user decide about it."""
    entry = keys.pop(key, None)
    if entry is not None:
        kept = [row for row in dialect.outcomes if row.where != entry.where]
        value = str(plain(entry.value))
        row = KeyOutcome(where=entry.where, written=f"datasets.{key}", value=value, fate="undecided", reason=reason)
        dialect.outcomes = [*kept, row]


def _add_defaults(root: Marked, defaults: dict[str, Scalar], *, has_warmup: bool) -> None:
    """Write out the tool's defaults. A rate that is `constant` there has no warm-up."""
    content = root.entries
    if not has_warmup:
        for key in ("warmup_steps", "warmup_ratio"):
            content.pop(key, None)
        defaults["warmup_ratio"] = 0
    if "warmup_steps" in content or not has_warmup:
        defaults = {key: value for key, value in defaults.items() if key not in OF_WARMUP}
    elif "warmup_ratio" in content:
        defaults.pop("max_warmup_steps", None)
    where = replace(root.where, line=2**31)  # behind all that the user wrote
    for key, value in defaults.items():
        if key not in content and not (key == "warmup_ratio" and "warmup_steps" in content):
            content[key] = Entry(where=where, written="", value=Marked(where=where, content=value))


def _check(root: Marked, missing: Sequence[str], dialect: Dialect) -> None:
    """Validate the config as it will be once the missing keys are there."""
    content = root.entries
    for key in missing:
        value = Marked(where=root.where, content="missing")
        inner = Marked(where=root.where, content={"path": Entry(where=root.where, written="path", value=value)})
        given = value if key == "base_model" else Marked(where=root.where, content=[inner])
        content[key] = Entry(where=root.where, written=key, value=given)
    validate(root, dialect)
    for key in missing:
        del content[key]


_MISSING: Mapping[str, str] = {
    "base_model": "which model to train: a directory or hub id",
    "datasets": "what to train on: files or hub ids",
}


def _text(
    root: Marked,
    tool: str,
    path: Path,
    outcomes: Sequence[KeyOutcome],
    missing: Sequence[str],
    by_default: Sequence[KeyOutcome],
) -> str:
    """The YAML file: our keys with where they come from, then what was left out and why. `by_default`: rows of keys
    that have a default of the tool."""
    content = root.entries
    origins = {outcome.where: outcome for outcome in outcomes if outcome.fate == "translated"}
    lines = [editor_line(), f"# Made by `ratel import` from {path.name} ({tool}).", ""]
    lines += [f"# {key}:  # needs a decision: {_MISSING[key]}" for key in missing]
    for key, entry in content.items():
        first, *more = dump({key: plain(entry.value)}).rstrip("\n").split("\n")
        origin = origins.get(entry.where)
        remarks = [f"; {row.reason}" for row in by_default if row.ours.partition(":")[0] == key]
        comment = "".join([f"the default of {tool}", *remarks]) if not entry.written else ""
        if origin is not None:
            comment = f"was `{_key_and_value(origin)}`" + (f"; {origin.reason}" if origin.reason else "")
        if comment and more:  # the first line may end inside a text
            lines += [f"# {comment}:", first, *more]
        else:
            lines += [f"{first}  # {comment}" if comment else first, *more]
    for title, fates in (("Needs a decision", ("undecided",)), ("Not needed here", ("noted", "ignored"))):
        rows = [outcome for outcome in outcomes if outcome.fate in fates]
        if rows:
            lines += ["", f"# {title}:"]
            lines += [f"#   {_key_and_value(row)}   ({row.reason})" for row in rows]
    return "\n".join(lines) + "\n"


def _key_and_value(row: KeyOutcome) -> str:
    """A key with its value on one line, for a comment."""
    return " ".join(f"{row.written}: {row.value}".rstrip(": ").split())
