"""Keys of other trainers that become keys of ours, where a new name alone is not enough.

Each function takes the entries of a config's top level and rewrites some of them in place. What it did is reported to
the `Report`, at the place of the key that the user wrote.

Invariant: what a rewritten config trains is what the other trainer's documentation says, or there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ratel_cli.config.others.foreign import kernel_plugins
from ratel_cli.config.others.their_adapters import open_mappings, translate_adapter
from ratel_cli.config.others.their_datasets import translate_datasets
from ratel_cli.config.others.their_preferences import translate_preferences
from ratel_cli.config.others.their_quantisation import translate_quantisation
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, Scalar, marked, plain, show


def translate_top_level(entries: Entries, report: Report) -> None:
    """Rewrite the entries of a config's top level."""
    for translation in _TRANSLATIONS:
        translation(entries, report)


def _precision(entries: Entries, report: Report) -> None:
    """`bf16`, `fp16` and the like become `dtype`. Ratel's master weights are fp32, as theirs are with autocast."""
    flags = {key: entries.pop(key) for key in _PRECISIONS if key in entries}
    name = next((key for key in _DTYPE_KEYS if key in entries), None)
    if name is not None and entries[name].value.content in ("auto", None):
        report.drop(entries.pop(name), "the data type of the computation is `dtype`")
        name = None
    chosen = _chosen_precision(flags, report)
    for entry in flags.values():
        if chosen is None or entry is not chosen[1]:
            report.drop(entry, "`dtype` sets the precision")
    if chosen is None:
        return
    dtype, entry = chosen
    given = None if name is None else entries[name].value.content
    if given in ("float32", "fp32", "float") and name is not None:
        reason = f"`{entry.written}` says what the model computes in, and master weights are fp32 all the same"
        report.drop(entries.pop(name), reason, quietly=False)
    elif given is not None:
        if dtype == "float16" and given in ("bfloat16", "bf16"):
            report.reject(
                entry.where,
                f"`{entry.written}` and `{name}: {given}` contradict each other",
                "dtype",
                hint="remove one of them",
            )
        else:
            report.drop(entry, "`dtype` sets the precision")
        return
    entries["dtype"] = made(entry, dtype)
    report.read_as(entry, f"dtype: {dtype}")


def _chosen_precision(flags: Entries, report: Report) -> tuple[str, Entry] | None:
    """The data type that the flags choose, and the flag that does; None if they choose none."""
    wanted: Entries = {}
    for key, entry in flags.items():
        content = entry.value.content
        if content in (True, "auto", "full"):
            wanted.setdefault(_PRECISIONS[key], entry)
        elif content not in (None, False, ""):
            report.reject(
                entry.value.where, f"`{key}` must be true, false or auto, not {show(plain(entry.value))}", "dtype"
            )
    if len(wanted) > 1:
        first, second = wanted.values()
        report.reject(
            second.where, f"`{first.written}` and `{second.written}` are both set", "dtype", hint="remove one of them"
        )
        return None
    off = flags.get("bf16")
    if not wanted and off is not None and off.value.content in (False, 0):
        return "float32", off
    for dtype, entry in wanted.items():
        if entry.value.content != "auto":
            return dtype, entry
    return None


_PRECISIONS: Mapping[str, str] = {
    "bf16": "bfloat16",
    "pure_bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "float32": "float32",
}
_DTYPE_KEYS = ("dtype", "torch_dtype")


def _values(entries: Entries, report: Report) -> None:
    """Keys that are a value of one of ours."""
    for (key, content), (ours, value) in _MEANINGS.items():
        if key in entries and ours not in entries and plain(entries[key].value) == content:
            entry = entries.pop(key)
            entries[ours] = replace(made(entry, value), written=ours)
            report.read_as(entry, f"{ours}: {show(value)}".replace("'", ""))


_MEANINGS: Mapping[tuple[str, Plain], tuple[str, Scalar]] = {
    ("use_cpu", True): ("device", "cpu"),
    ("no_cuda", True): ("device", "cpu"),
    ("train_sampling_strategy", "sequential"): ("shuffle", False),
    ("train_sampling_strategy", "random"): ("shuffle", True),
    ("disable_shuffling", True): ("shuffle", False),
    ("loss_type", "dft"): ("use_dft_loss", True),
    ("liger_use_token_scaling", True): ("use_dft_loss", True),
    ("dataset_streaming", True): ("streaming", True),
}
"""By key and value of others: our key and its value. As there, 1 is true."""


def _strategies(entries: Entries, report: Report) -> None:
    """`save_strategy` and `eval_strategy`: `no`, `steps` or `epoch`."""
    for strategy, steps, per_epoch in (
        ("save_strategy", "save_steps", "saves_per_epoch"),
        ("eval_strategy", "eval_steps", "evals_per_epoch"),
        ("evaluation_strategy", "eval_steps", "evals_per_epoch"),
    ):
        if strategy not in entries:
            continue
        entry = entries.pop(strategy)
        content = entry.value.content
        if content in ("no", False):
            for key in (steps, per_epoch):
                if key in entries:
                    report.drop(entries.pop(key), f"`{strategy}` is `no`")
            report.drop(entry, f"without `{steps}`, only the last step counts")
        elif content == "epoch":
            if steps in entries:
                report.drop(entries.pop(steps), f"`{strategy}` is `epoch`")
            entries[per_epoch] = made(entry, 1)
            report.read_as(entry, f"{per_epoch}: 1")
        elif content == "steps" and steps == "eval_steps" and _evaluates_as_it_logs(entries):
            entries[steps] = replace(entries["logging_steps"], written=steps)
            report.read_as(entry, f"eval_steps: {show(plain(entries[steps].value))}, as `logging_steps`")
        elif content in ("steps", "best", None, ""):
            report.drop(entry, f"`{steps}` decides this", quietly=content != "best")
        else:
            report.reject(
                entry.value.where,
                f"`{strategy}` must be `no`, `steps` or `epoch`, not {show(plain(entry.value))}",
                steps,
            )


def _evaluates_as_it_logs(entries: Entries) -> bool:
    """Whether Trainer takes `logging_steps` for `eval_steps`, which no key gives."""
    given = (entries[key].value.content for key in ("eval_steps", "evals_per_epoch") if key in entries)
    logged = entries.get("logging_steps")
    return logged is not None and logged.value.content is not None and not any(each is not None for each in given)


def _delay(entries: Entries, report: Report) -> None:
    """`eval_delay` leaves out evaluations. Where nothing follows from them, that changes nothing."""
    compared = ("load_best_model_at_end", "early_stopping_patience", "early_stopping_steps")
    if "eval_delay" in entries and not any(key in entries and entries[key].value.content for key in compared):
        report.drop(entries.pop("eval_delay"), "no evaluation affects this run")


def _without_meaning(entries: Entries, report: Report) -> None:
    """Values of keys of ours that others' configs often have, and that mean what a config without the key means."""
    for key, (values, reason) in _WITHOUT_MEANING.items():
        if key in entries and plain(entries[key].value) in values:
            report.drop(entries.pop(key), reason)


_MAIN = (("main",), "it is the default")  # also of a directory
_WITHOUT_MEANING: Mapping[str, tuple[Sequence[Plain], str]] = {
    "revision_of_model": _MAIN,
    "model_revision": _MAIN,
    "max_steps": ((-1,), "`num_epochs` decides when the run ends"),
    "lr_scheduler_kwargs": (({}, ""), "it is empty"),
    "optim_args": (({}, ""), "it is empty"),
    "rl": ((False, ""), "without `rl`, training is supervised"),
}
"""By key: such values, and what is said about them."""


def _minimum_rate(entries: Entries, report: Report) -> None:
    """axolotl's `cosine_min_lr_ratio` is the schedule `cosine_with_min_lr`."""
    entry = entries.pop("cosine_min_lr_ratio", None)
    if entry is None:
        return
    ratio = entry.value.content
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        if ratio is None:
            report.drop(entry, "it is empty")
        else:
            report.reject(
                entry.value.where,
                f"`cosine_min_lr_ratio` must be a number, not {show(plain(entry.value))}",
                "lr_scheduler_kwargs",
            )
        return
    scheduler = next((entries.get(key) for key in ("lr_scheduler", "lr_scheduler_type") if key in entries), None)
    if scheduler is not None and scheduler.value.content != "cosine":
        report.drop(entry, "it is for `lr_scheduler: cosine`")
        return
    entries.pop("lr_scheduler_type", None)
    entries["lr_scheduler"] = made(scheduler or entry, "cosine_with_min_lr")
    options = Marked(where=entry.value.where, content={"min_lr_rate": made(entry, ratio)})
    entries["lr_scheduler_kwargs"] = replace(entry, value=options)
    report.read_as(entry, f"lr_scheduler: cosine_with_min_lr, lr_scheduler_kwargs: {{min_lr_rate: {ratio}}}")


def _whole_batch(entries: Entries, report: Report) -> None:
    """axolotl's `batch_size`, the sequences of a step, beside its `micro_batch_size`."""
    entry, micro = entries.get("batch_size"), entries.get("micro_batch_size")
    size, of_micro = (None if each is None else each.value.content for each in (entry, micro))
    if entry is None or not isinstance(size, int) or not isinstance(of_micro, int) or of_micro < 1:
        return
    given = entries.get("gradient_accumulation_steps")
    if given is not None and given.value.content is not None:
        report.drop(entries.pop("batch_size"), "`gradient_accumulation_steps` decides this")
    elif size >= of_micro:
        del entries["batch_size"]
        number = size // of_micro
        entries["gradient_accumulation_steps"] = replace(made(entry, number), written="gradient_accumulation_steps")
        report.read_as(entry, f"gradient_accumulation_steps: {number}")


def _optimizer_options(entries: Entries, report: Report) -> None:
    """transformers' `optim_args` in one line, `momentum=0.9,nesterov=true`."""
    entry = entries.get("optim_args")
    text = None if entry is None else entry.value.content
    if entry is None or not isinstance(text, str):
        return
    if not text.strip():
        report.drop(entries.pop("optim_args"), "it is empty")
        return
    options: Entries = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            report.reject(
                entry.value.where,
                f"`optim_args` must be a mapping, or `name=value` with commas between; it has {part.strip()!r}",
                "optim_args",
            )
            del entries["optim_args"]
            return
        read = _number_or_text(value)
        if key == "nesterov" and read in (0, 1):  # transformers takes numbers for it, too
            read = bool(read)
        options[key] = replace(made(entry, read), written=key)
    entries["optim_args"] = replace(entry, value=Marked(where=entry.value.where, content=options))


def _stochastic_rounding(entries: Entries, report: Report) -> None:
    """`bf16_stochastic_round` among transformers' `optim_args`, which torchao's optimizers read."""
    options = entries.get("optim_args")
    content = None if options is None else options.value.content
    if options is None or not isinstance(content, dict) or _ROUNDS not in content:
        return
    entry = content[_ROUNDS]
    kept = {key: value for key, value in content.items() if key != _ROUNDS}
    entries["optim_args"] = replace(options, value=Marked(where=options.value.where, content=kept))
    if not kept:
        del entries["optim_args"]
    written = str(entry.value.content).lower()
    if written not in (*_TRUE, *_FALSE):
        report.reject(
            entry.value.where, f"`{_ROUNDS}` must be true or false, not {show(plain(entry.value))}", "bf16_master"
        )
    elif written in _FALSE:
        report.drop(entry, "it is the default")
    elif "bf16_master" in entries:
        report.drop(entry, "`bf16_master` is set", quietly=False)
    elif (reason := _why_nothing_is_rounded(entries)) is not None:
        report.drop(entry, reason, quietly=False)
    else:
        entries["bf16_master"] = made(entry, "stochastic")
        report.read_as(entry, "bf16_master: stochastic")


_ROUNDS = "bf16_stochastic_round"
_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
"""What transformers takes for these."""


def _why_nothing_is_rounded(entries: Entries) -> str | None:
    """Why torchao would round nothing; None if it may."""
    values = {key: entry.value.content for key, entry in entries.items()}
    name = str(values.get("optimizer", values.get("optim", "")))
    if not name.startswith(("adamw_torch_4bit", "adamw_torch_8bit", "ao_adamw")):
        return "only torchao's optimizers read it"
    dtypes = [values.get(key) for key in _DTYPE_KEYS]
    if any(each in ("float32", "fp32", "float", "float16", "fp16", "half") for each in dtypes) or values.get("fp16"):
        return "torchao rounds weights in bf16 alone"
    if values.get("adapter") or values.get("finetuning_type") == "lora":
        return "torchao rounds weights in bf16 alone, and adapters are in fp32"
    return None


def _old_lion(entries: Entries, report: Report) -> None:
    """axolotl's old Lion, of the package lion_pytorch: it has betas of its own unless both are given."""
    names = [key for key in ("optimizer", "optim") if key in entries]
    entry = entries[names[0]] if names else None
    betas = [key for key in ("adam_beta1", "adam_beta2") if key in entries and entries[key].value.content is not None]
    if entry is None or entry.value.content != "lion_pytorch" or len(betas) == 2:
        return
    for key in betas:
        report.drop(entries.pop(key), "lion_pytorch uses both betas or none", quietly=False)
    report.read_as(entry, "optimizer: lion, adam_beta2: 0.99")
    entries[names[0]] = made(entry, "lion")
    entries["adam_beta2"] = replace(made(entry, 0.99), written="adam_beta2")


def _muon(entries: Entries, report: Report) -> None:
    """LLaMA-Factory's `use_muon`, which overrides `optim`."""
    entry = entries.get("use_muon")
    if entry is None:
        return
    del entries["use_muon"]
    if entry.value.content in (None, False, "", "false"):
        report.drop(entry, "it is off")
        return
    for key in ("optimizer", "optim"):
        if key in entries:
            report.drop(entries.pop(key), "`use_muon` decides the optimizer")
    report.read_as(entry, "optimizer: muon")
    entries["optimizer"] = replace(made(entry, "muon"), written="optimizer")


def _number_or_text(text: str) -> str | float | bool:
    """A value of such a line."""
    if text.lower() in ("true", "yes", "false", "no"):
        return text.lower() in ("true", "yes")
    try:
        return float(text)
    except ValueError:
        return text


def _plugins(entries: Entries, report: Report) -> None:
    """axolotl's plugins: most of them name kernels, or shard the model."""
    entry = entries.get("plugins")
    if entry is None:
        return
    content = plain(entry.value)
    names = content if isinstance(content, list) else [content] if content else []
    others = list(kernel_plugins(names))
    del entries["plugins"]
    if not others:
        sharding = [str(name).rpartition(".")[2] for name in names if _SHARDS.search(str(name))]
        if sharding:
            reason = f"{', '.join(sharding)}: Ratel streams the model through one device and needs no sharding"
            report.drop(entry, reason, quietly=False)
        else:
            report.drop(entry, "they only select kernels")
        return
    report.reject(
        entry.where,
        f"`plugins` is not a key of Ratel: {', '.join(others)} changes what is trained",
        "plugins",
        hint="remove it",
    )


_SHARDS = re.compile(r"\.(?:(?:expert|tensor|context|sequence)_parallel|fsdp|deepspeed)\b")
"""In the module of a plugin that only shards."""


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
        entries["report_to"] = replace(first, written="report_to", value=names)
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


def _hub(entries: Entries, report: Report) -> None:
    """`push_to_hub` decides, where it is set, whether `hub_model_id` counts."""
    push, name = entries.get("push_to_hub"), entries.get("hub_model_id")
    if push is None:
        return
    if push.value.content in (False, 0) and name is not None and name.value.content is not None:
        report.drop(entries.pop("hub_model_id"), "`push_to_hub` is false")
    if push.value.content in (True, 1) and name is not None:
        report.drop(entries.pop("push_to_hub"), "`hub_model_id` says where to")


def _attention(entries: Entries, report: Report) -> None:
    """Kernels that Ratel does not know by name: the results are those of sdpa."""
    entry = entries.get("attn_implementation")
    content = None if entry is None else entry.value.content
    known = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
    if entry is None or not isinstance(content, str) or content in known:
        return
    if "flash" in content or content in ("flex_attention", "auto", "xformers") or "/" in content:
        report.drop(entries.pop("attn_implementation"), "`sdpa` computes the same", quietly=content == "auto")


def _two_losses(entries: Entries, report: Report) -> None:
    """TRL's two keys about the loss. That a completion alone has loss is the default, whatever conversations have."""
    completion, assistant = (entries.get(key) for key in ("completion_only_loss", "assistant_only_loss"))
    if completion is None or assistant is None:
        return
    if completion.value.content is True:
        report.drop(entries.pop("completion_only_loss"), "a prompt has no loss then, as without it")
    elif completion.value.content is False and assistant.value.content is False:
        report.drop(entries.pop("assistant_only_loss"), "`completion_only_loss: false` trains all tokens")


def _template(entries: Entries, report: Report) -> None:
    """A chat template that is written out, TRL's names for a template's file and for the EOS token, and axolotl's old
    name for special tokens."""
    for key in ("chat_template", "custom_chat_template"):
        entry = entries.get(key)
        text = None if entry is None else entry.value.content
        if entry is not None and isinstance(text, str) and ("{%" in text or "{{" in text):
            entries["chat_template_jinja"] = entries.pop(key)
            report.read_as(entry, "chat_template_jinja")
    path = entries.get("chat_template_path")
    if path is not None and str(path.value.content).endswith((".jinja", ".jinja2")):
        entries["chat_template_jinja"] = entries.pop("chat_template_path")
        report.read_as(path, f"chat_template_jinja: {path.value.content}")
    tokens = entries.get("tokens")
    if tokens is not None and isinstance(tokens.value.content, dict) and "special_tokens" not in entries:
        entries["special_tokens"] = entries.pop("tokens")
        report.read_as(tokens, "special_tokens")
    token = entries.get("eos_token")
    if token is not None and isinstance(token.value.content, str) and "special_tokens" not in entries:
        del entries["eos_token"]
        value = Marked(where=token.value.where, content={"eos_token": token})
        entries["special_tokens"] = replace(token, written="special_tokens", value=value)
        report.read_as(token, "special_tokens")


def _empty(entries: Entries, report: Report) -> None:
    """A key of ours without a value has its default, as in the other trainers."""
    for key in [key for key, entry in entries.items() if entry.value.content is None and entry.where.layer == 0]:
        if key in _MAY_BE_EMPTY:
            report.drop_empty(entries.pop(key))
        elif key in _OFF_IF_EMPTY:
            report.decide(entries.pop(key), _OFF_IF_EMPTY[key])


_MAY_BE_EMPTY = (
    "train_on_inputs", "sequence_len", "cutoff_len", "max_seq_length", "sample_packing", "packing",
    "shuffle", "micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps", "num_epochs",
    "num_train_epochs", "epochs", "learning_rate", "lr", "lr_scheduler", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "optimizer", "optim", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay",
    "attn_implementation", "save_total_limit", "val_set_size", "val_size", "logging_steps", "seed", "train_on_prompt",
    "completion_only_loss", "assistant_only_loss", "output_dir", "streaming", "excess_length_strategy",
    "load_best_model_at_end", "metric_for_best_model", "early_stopping_threshold", "unfrozen_parameters",
    "frozen_parameters", "tokenizer_use_mistral_common",
)  # fmt: skip
_OFF_IF_EMPTY: Mapping[str, str] = {"max_length": "TRL then truncates nothing; Ratel truncates at `sequence_len`"}
"""Keys whose empty value turns something off there that is on here."""

_TRANSLATIONS: tuple[Callable[[Entries, Report], None], ...] = (
    _empty,
    _optimizer_options,
    _stochastic_rounding,
    _precision,
    _values,
    _strategies,
    _delay,
    _without_meaning,
    _minimum_rate,
    _whole_batch,
    _old_lion,
    _muon,
    _plugins,
    _trackers,
    _hub,
    _attention,
    open_mappings,
    translate_quantisation,
    translate_adapter,
    _two_losses,
    _template,
    translate_preferences,
    translate_datasets,
)
