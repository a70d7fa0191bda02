"""`ratel import`: the config of another trainer, as a commented YAML file of ours.

Invariant: what the written file trains is what the other trainer would train, its defaults included; what differs is
named. The file loads, unless a line says that a decision is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ratel_cli.config.aliases import TOP
from ratel_cli.config.dialect import Dialect, KeyOutcome
from ratel_cli.config.json_schema import editor_line
from ratel_cli.config.load import dump, validate
from ratel_cli.config.source import read_file
from ratel_cli.config.torchtune import is_torchtune, translate_torchtune
from ratel_cli.config.yaml_marks import Entry, Finding, Marked, Scalar, Where, plain, raise_all, read_text

_SIGNS: Mapping[str, str] = {
    "axolotl": """base_model sequence_len micro_batch_size sample_packing dataset_prepared_path val_set_size strict
        lr_scheduler optimizer num_epochs saves_per_epoch evals_per_epoch special_tokens pad_to_sequence_len
        flash_attention load_in_8bit train_on_inputs pretraining_dataset plugins""",
    "LLaMA-Factory": """stage finetuning_type dataset dataset_dir template cutoff_len overwrite_cache plot_loss
        preprocessing_num_workers pure_bf16 val_size flash_attn enable_liger_kernel""",
    "TRL": """dataset_name dataset_config dataset_mixture dataset_mixer dataset_train_split dataset_test_split
        max_seq_length max_length packing assistant_only_loss completion_only_loss dataset_text_field model_revision
        chat_template_path eos_token use_liger dataset_num_proc""",
    "transformers": "adafactor logging_dir dataloader_num_workers fp16_full_eval log_level_replica label_names",
}
"""By tool: keys that others hardly have."""
_ONLY_OURS = frozenset(
    {
        "tokens_per_step", "storage", "limits", "activations", "head_chunk", "optimizer_overlap", "dtype",
        "gradient_dtype", "random_init", "deterministic", "trace",
    }
)  # fmt: skip
"""Keys that only Ratel has."""
_TRAINER_DEFAULTS: Mapping[str, Scalar] = {
    "micro_batch_size": 8,
    "num_epochs": 3,
    "lr_scheduler": "linear",
    "warmup_ratio": 0,
}
_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = {
    "axolotl": {"sequence_len": 512, "sample_packing": False},
    "LLaMA-Factory": {
        **_TRAINER_DEFAULTS,
        "learning_rate": 5e-5,
        "sequence_len": 2048,
        "sample_packing": False,
        "dtype": "float32",
    },
    "TRL": {**_TRAINER_DEFAULTS, "sequence_len": 1024, "sample_packing": False},
    "transformers": {**_TRAINER_DEFAULTS, "learning_rate": 5e-5, "sample_packing": False, "dtype": "float32"},
    "torchtune": {
        "sample_packing": False,
        "lr_scheduler": "constant",
        "warmup_ratio": 0,
        "weight_decay": 0.01,
        "max_grad_norm": 0,
    },
}
"""By tool: its defaults, where Ratel's are others."""


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
    if tool == "torchtune":
        root.content = translate_torchtune(root.content, dialect)
    is_constant = any(
        key in root.content and root.content[key].value.content == "constant"
        for key in ("lr_scheduler", "lr_scheduler_type")
    )
    dialect.translate(TOP, root)
    if root.content.keys() & _ONLY_OURS and all(outcome.fate == "kept" for outcome in dialect.outcomes):
        tool = "Ratel"  # axolotl shares the other keys
    has_warmup = tool in ("torchtune", "Ratel") or not is_constant
    steps = root.content.get("warmup_steps")
    if steps is not None and steps.value.content and "warmup_ratio" in root.content:
        dialect.drop(root.content.pop("warmup_ratio"), "`warmup_steps` decides, as it does there")
    _add_defaults(root, tool, has_warmup=has_warmup)
    missing = _missing(root)
    _check(root, missing, dialect)
    raise_all(findings)
    if tool == "TRL" and "train_on_inputs" not in root.content:
        dialect.outcomes.append(_undecided("train_on_inputs", root.where))
    outcomes = tuple(sorted(dialect.outcomes, key=lambda outcome: outcome.where))
    return Imported(
        tool=tool,
        text=_text(root, tool, path, outcomes, missing),
        outcomes=(*outcomes, *(_undecided(key, root.where) for key in missing)),
    )


def _is_of_a_model(root: Marked) -> bool:
    """Whether this is a model's config.json."""
    assert isinstance(root.content, dict)
    if "base_model" in root.content or "model_name_or_path" in root.content:
        return False
    return "architectures" in root.content or ("model_type" in root.content and recognise(root) == "Ratel")


def recognise(root: Marked) -> str:
    """The tool that a config is for, by its keys; `Ratel` if it has none of another tool's."""
    if is_torchtune(root):
        return "torchtune"
    assert isinstance(root.content, dict)
    counts = {tool: len(root.content.keys() & set(signs.split())) for tool, signs in _SIGNS.items()}
    best = max(counts, key=lambda tool: counts[tool])
    if counts[best]:
        return best
    trainer = ("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "model_name_or_path")
    return "transformers" if any(key in root.content for key in trainer) else "Ratel"


def _add_defaults(root: Marked, tool: str, *, has_warmup: bool) -> None:
    """Write out the tool's defaults. A rate that is `constant` there has no warm-up."""
    content = root.content
    assert isinstance(content, dict)
    defaults = dict(_DEFAULTS.get(tool, {}))
    if not has_warmup:
        for key in ("warmup_steps", "warmup_ratio"):
            content.pop(key, None)
        defaults["warmup_ratio"] = 0
    where = replace(root.where, line=2**31)  # behind all that the user wrote
    for key, value in defaults.items():
        if key not in content and not (key == "warmup_ratio" and "warmup_steps" in content):
            content[key] = Entry(where=where, written="", value=Marked(where=where, content=value))


def _missing(root: Marked) -> tuple[str, ...]:
    """Keys that a run needs and that the other trainer has elsewhere."""
    content = root.content
    assert isinstance(content, dict)
    return tuple(key for key in ("base_model", "datasets") if key not in content)


def _check(root: Marked, missing: Sequence[str], dialect: Dialect) -> None:
    """Validate the config as it will be once the missing keys are there."""
    content = root.content
    assert isinstance(content, dict)
    for key in missing:
        value = Marked(where=root.where, content="missing")
        inner = Marked(where=root.where, content={"path": Entry(where=root.where, written="path", value=value)})
        given = value if key == "base_model" else Marked(where=root.where, content=[inner])
        content[key] = Entry(where=root.where, written=key, value=given)
    validate(root, dialect)
    for key in missing:
        del content[key]


def _undecided(key: str, where: Where) -> KeyOutcome:
    return KeyOutcome(where=where, written=key, value="", fate="undecided", reason=_MISSING[key])


_MISSING: Mapping[str, str] = {
    "base_model": "which model to train: a directory or hub id",
    "datasets": "what to train on: files or hub ids",
    "train_on_inputs": "TRL has loss on whole conversations and texts by default; set it to true for that",
}


def _text(root: Marked, tool: str, path: Path, outcomes: Sequence[KeyOutcome], missing: Sequence[str]) -> str:
    """The YAML file: our keys with where they come from, then what was left out and why."""
    content = root.content
    assert isinstance(content, dict)
    origins = {outcome.where: outcome for outcome in outcomes if outcome.fate == "translated"}
    lines = [editor_line(), f"# Made by `ratel import` from {path.name} ({tool}).", ""]
    lines += [f"# {key}:  # needs a decision: {_MISSING[key]}" for key in missing]
    for key, entry in content.items():
        first, *more = dump({key: plain(entry.value)}).rstrip("\n").split("\n")
        origin = origins.get(entry.where)
        comment = f"the default of {tool}" if not entry.written else ""
        if origin is not None:
            comment = f"was `{_key_and_value(origin)}`"
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
