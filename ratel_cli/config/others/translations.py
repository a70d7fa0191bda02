"""Keys of other trainers that become keys of ours, where a new name alone is not enough.

`translate_top_level` applies the tables of all such keys to the top level of a config, from above; those of optimizers,
adapters, quantised models, preferences, trackers and data have modules of their own. Code beside a table is for what
depends on several keys at once, or has a form of its own.

Invariant: what a rewritten config trains is what the other trainer's documentation says, or there is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ratel_cli.config.others.row import (
    SAME,
    Code,
    ForeignKey,
    Given,
    Site,
    absent,
    decide,
    empty,
    is_text,
    refuse,
    rename,
    sets,
    translate,
)
from ratel_cli.config.others.their_adapters import ADAPTERS
from ratel_cli.config.others.their_datasets import DATASETS
from ratel_cli.config.others.their_optimizers import OPTIMIZERS, OPTIONS, RATES
from ratel_cli.config.others.their_preferences import PREFERENCES
from ratel_cli.config.others.their_quantisation import QUANTISATION
from ratel_cli.config.others.their_trackers import TRACKERS
from ratel_cli.config.others.their_vocabulary import VOCABULARY
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Plain, plain, show


def translate_top_level(entries: Entries, report: Report) -> None:
    """Rewrite the entries of a config's top level."""
    translate(_TOP_LEVEL, entries, report)


# Empty keys of ours.

_MAY_BE_EMPTY = """
    train_on_inputs sequence_len cutoff_len max_seq_length sample_packing packing shuffle micro_batch_size
    per_device_train_batch_size gradient_accumulation_steps num_epochs num_train_epochs epochs learning_rate lr
    lr_scheduler lr_scheduler_type warmup_steps warmup_ratio optimizer optim adam_beta1 adam_beta2 adam_epsilon
    weight_decay attn_implementation save_total_limit val_set_size val_size logging_steps seed train_on_prompt
    completion_only_loss assistant_only_loss output_dir streaming excess_length_strategy load_best_model_at_end
    metric_for_best_model early_stopping_threshold unfrozen_parameters frozen_parameters
    tokenizer_use_mistral_common"""
_EMPTY = (
    ForeignKey(theirs=_MAY_BE_EMPTY, how=empty, only=(None,), when=Given.is_file),
    ForeignKey(
        theirs="max_length",
        how=decide,
        only=(None,),
        when=Given.is_file,
        why="TRL then truncates nothing; Ratel truncates at `sequence_len`",
    ),
)

# The precision: flags, and two names of a data type.


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

_PRECISION = (
    ForeignKey(theirs=" ".join((*_PRECISIONS, *_DTYPE_KEYS)), how=Code(_precision)),
    ForeignKey(theirs="use_cpu no_cuda", how=sets({"device": "cpu"}), only=(True,), when=absent("device")),
)

# The order of the rows, and losses that a key of ours turns on.


_ORDER = (
    ForeignKey(
        theirs="train_sampling_strategy", how=sets({"shuffle": False}), only=("sequential",), when=absent("shuffle")
    ),
    ForeignKey(theirs="train_sampling_strategy", how=sets({"shuffle": True}), only=("random",), when=absent("shuffle")),
    ForeignKey(theirs="disable_shuffling", how=sets({"shuffle": False}), only=(True,), when=absent("shuffle")),
    ForeignKey(theirs="loss_type", how=sets({"use_dft_loss": True}), only=("dft",), when=absent("use_dft_loss")),
    ForeignKey(
        theirs="liger_use_token_scaling", how=sets({"use_dft_loss": True}), only=(True,), when=absent("use_dft_loss")
    ),
    ForeignKey(theirs="dataset_streaming", how=sets({"streaming": True}), only=(True,), when=absent("streaming")),
)

# When a run saves and evaluates.


def _strategy(theirs: str, steps: str, per_epoch: str) -> Sequence[ForeignKey]:
    """`save_strategy` and `eval_strategy`: `no`, `steps` or `epoch`."""
    is_no, is_epoch = (f"`{theirs}` is `{value}`" for value in ("no", "epoch"))
    decides = f"`{steps}` decides this"
    evaluates_as_it_logs = ForeignKey(
        theirs=theirs,
        how=sets({steps: lambda given: given.value("logging_steps")}),
        only=("steps",),
        when=lambda given: given.has("logging_steps") and not given.has("eval_steps", "evals_per_epoch"),
    )
    return (
        ForeignKey(
            theirs=theirs,
            how="ignored",
            only=("no", False),
            over={steps: is_no, per_epoch: is_no},
            why=f"without `{steps}`, only the last step counts",
        ),
        ForeignKey(theirs=theirs, how=sets({per_epoch: 1}), only=("epoch",), over={steps: is_epoch}),
        *([evaluates_as_it_logs] if steps == "eval_steps" else []),
        ForeignKey(theirs=theirs, how="ignored", only=("steps", None, ""), why=decides),
        ForeignKey(theirs=theirs, how="noted", only=("best",), why=decides),
        ForeignKey(
            theirs=theirs,
            how=refuse("`{key}` must be `no`, `steps` or `epoch`, not {value}", at_value=True),
            ours=steps,
        ),
    )


_WHEN = (
    *_strategy("save_strategy", "save_steps", "saves_per_epoch"),
    *_strategy("eval_strategy", "eval_steps", "evals_per_epoch"),
    *_strategy("evaluation_strategy", "eval_steps", "evals_per_epoch"),
    ForeignKey(
        theirs="eval_delay",
        how="ignored",
        when=lambda given: (
            not any(map(given.value, ("load_best_model_at_end", "early_stopping_patience", "early_stopping_steps")))
        ),
        why="no evaluation affects this run",
    ),
)

# Values of keys of ours that others' configs often have, and that mean what a config without the key means.

_WITHOUT_MEANING = (
    ForeignKey(theirs="revision_of_model model_revision", how="ignored", only=("main",), why="it is the default"),
    ForeignKey(theirs="max_steps", how="ignored", only=(-1,), why="`num_epochs` decides when the run ends"),
    ForeignKey(theirs="lr_scheduler_kwargs optim_args", how="ignored", only=({}, ""), why="it is empty"),
    ForeignKey(theirs="rl", how="ignored", only=(False, ""), why="without `rl`, training is supervised"),
)

# Kernels.

_HARMLESS_PLUGINS = (
    "expert_parallel", "tensor_parallel", "context_parallel", "sequence_parallel", "fsdp", "deepspeed", "liger",
    "cut_cross_entropy", "kernels", "chunked", "spectrum_scan", "densemixer", "swanlab", "lm_eval",
)  # fmt: skip
"""In the modules of axolotl's plugins that only name kernels, shard the model or report."""
_SHARDS = re.compile(r"\.(?:(?:expert|tensor|context|sequence)_parallel|fsdp|deepspeed)\b")
"""In the module of a plugin that only shards."""


def _plugins(site: Site) -> None:
    """axolotl's plugins: most of them name kernels, or shard the model."""
    content = site.content
    names = content if isinstance(content, list) else [content] if content else []
    others = [str(name) for name in names if not any(f".{each}" in str(name) for each in _HARMLESS_PLUGINS)]
    sharding = [str(name).rpartition(".")[2] for name in names if _SHARDS.search(str(name))]
    entry = site.take()
    if others:
        message = f"`plugins` is not a key of Ratel: {', '.join(others)} changes what is trained"
        site.report.reject(entry.where, message, "plugins", hint="remove it")
    elif sharding:
        reason = f"{', '.join(sharding)}: Ratel streams the model through one device and needs no sharding"
        site.report.drop(entry, reason, quietly=False)
    else:
        site.report.drop(entry, "they only select kernels")


def _is_other_attention(value: Plain) -> bool:
    """Whether this names kernels that Ratel does not know by name: the results are those of sdpa."""
    if not isinstance(value, str) or value in ("sdpa", "eager", "flash_attention_2", "flash_attention_3"):
        return False
    return "flash" in value or value in ("flex_attention", "xformers") or "/" in value


_KERNELS = (
    ForeignKey(theirs="plugins", how=_plugins),
    ForeignKey(theirs="attn_implementation", how="ignored", only=("auto",), why="`sdpa` computes the same"),
    ForeignKey(theirs="attn_implementation", how="noted", only=_is_other_attention, why="`sdpa` computes the same"),
)

# TRL's two keys about the loss, chat templates and special tokens.


_TEXTS = (
    # That a completion alone has loss is the default, whatever conversations have.
    ForeignKey(
        theirs="completion_only_loss",
        how="ignored",
        only=lambda value: value is True,
        when=lambda given: "assistant_only_loss" in given,
        why="a prompt has no loss then, as without it",
    ),
    ForeignKey(
        theirs="assistant_only_loss",
        how="ignored",
        only=lambda value: value is False,
        when=lambda given: given.value("completion_only_loss") is False,
        why="`completion_only_loss: false` trains all tokens",
    ),
    ForeignKey(
        theirs="chat_template custom_chat_template",
        how=rename,
        ours="chat_template_jinja",
        only=lambda value: is_text(value) and ("{%" in str(value) or "{{" in str(value)),
    ),
    ForeignKey(
        theirs="chat_template_path",
        how=sets({"chat_template_jinja": SAME}),
        only=lambda value: str(value).endswith((".jinja", ".jinja2")),
    ),
    ForeignKey(
        theirs="tokens",
        how=rename,
        ours="special_tokens",
        only=lambda value: isinstance(value, dict),
        when=absent("special_tokens"),
    ),
    ForeignKey(
        theirs="eos_token", how=sets({"special_tokens.eos_token": SAME}), only=is_text, when=absent("special_tokens")
    ),
)
_TOP_LEVEL: tuple[ForeignKey, ...] = (
    *_EMPTY,
    *OPTIONS,
    *_PRECISION,
    *_ORDER,
    *_WHEN,
    *_WITHOUT_MEANING,
    *RATES,
    *OPTIMIZERS,
    *TRACKERS,
    *_KERNELS,
    *QUANTISATION,
    *ADAPTERS,
    *_TEXTS,
    *VOCABULARY,
    *PREFERENCES,
    *DATASETS,
)
