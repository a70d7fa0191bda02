"""Optimizers, their options, rates and batches of other trainers become keys of ours.

Invariant: what a rewritten config trains is what the other trainer's documentation says, or there is an error.
"""

from __future__ import annotations

from dataclasses import replace

from ratel_cli.config.others.row import HERE, SAME, ForeignKey, Given, Site, is_text, refuse, sets
from ratel_cli.config.yaml.reporting import made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked

# The optimizer's options, and torchao's rounding among them.

_ROUNDS = "optim_args.bf16_stochastic_round"
_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
"""What transformers takes for these."""


def _options_in_a_line(site: Site) -> None:
    """transformers' `optim_args` in one line, `momentum=0.9,nesterov=true`."""
    entry, options = site.entry, dict[str, Entry]()
    for part in str(site.content).split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            site.report.reject(
                entry.value.where,
                f"`optim_args` must be a mapping, or `name=value` with commas between; it has {part.strip()!r}",
                "optim_args",
            )
            del site.entries["optim_args"]
            return
        read = _number_or_text(value)
        if key == "nesterov" and read in (0, 1):  # transformers takes numbers for it, too
            read = bool(read)
        options[key] = replace(made(entry, read), written=key)
    site.entries["optim_args"] = replace(entry, value=Marked(where=entry.value.where, content=options))


def _number_or_text(text: str) -> str | float | bool:
    """A value of such a line."""
    if text.lower() in ("true", "yes", "false", "no"):
        return text.lower() in ("true", "yes")
    try:
        return float(text)
    except ValueError:
        return text


def _computes_otherwise(given: Given) -> bool:
    names = ("float32", "fp32", "float", "float16", "fp16", "half")
    return bool(given.value("dtype") in names or given.value("torch_dtype") in names or given.value("fp16"))


OPTIONS = (
    ForeignKey(
        theirs="optim_args",
        how="ignored",
        only=lambda value: isinstance(value, str) and not value.strip(),
        why="it is empty",
    ),
    ForeignKey(theirs="optim_args", how=_options_in_a_line, only=is_text),
    ForeignKey(
        theirs=_ROUNDS,
        how=refuse("`{key}` must be true or false, not {value}", at_value=True),
        ours="bf16_master",
        only=lambda value: str(value).lower() not in (*_TRUE, *_FALSE),
    ),
    ForeignKey(theirs=_ROUNDS, how="ignored", only=lambda value: str(value).lower() in _FALSE, why="it is the default"),
    ForeignKey(theirs=_ROUNDS, how="noted", when=lambda given: "bf16_master" in given, why="`bf16_master` is set"),
    ForeignKey(
        theirs=_ROUNDS,
        how="noted",
        when=lambda given: (
            not str(given.value("optimizer", "optim")).startswith(("adamw_torch_4bit", "adamw_torch_8bit", "ao_adamw"))
        ),
        why="only torchao's optimizers read it",
    ),
    ForeignKey(theirs=_ROUNDS, how="noted", when=_computes_otherwise, why="torchao rounds weights in bf16 alone"),
    ForeignKey(
        theirs=_ROUNDS,
        how="noted",
        when=lambda given: bool(given.value("adapter")) or given.value("finetuning_type") == "lora",
        why="torchao rounds weights in bf16 alone, and adapters are in fp32",
    ),
    ForeignKey(theirs=_ROUNDS, how=sets({"bf16_master": "stochastic"})),
)

# Rates and batches.


def _micro_batches(given: Given) -> int | None:
    """The number of micro-batches in axolotl's `batch_size`, the sequences of a step; None if that is not known."""
    size, micro = given.value("batch_size"), given.value("micro_batch_size")
    return size // micro if isinstance(size, int) and isinstance(micro, int) and micro > 0 else None


_RATIO = "cosine_min_lr_ratio"
RATES = (
    ForeignKey(theirs=_RATIO, how="ignored", only=(None,), why="it is empty"),
    ForeignKey(
        theirs=_RATIO,
        how=refuse("`{key}` must be a number, not {value}", at_value=True),
        ours="lr_scheduler_kwargs",
        only=lambda value: isinstance(value, bool) or not isinstance(value, int | float),
    ),
    ForeignKey(
        theirs=_RATIO,
        how="ignored",
        when=lambda given: given.value("lr_scheduler", "lr_scheduler_type") not in ("cosine", None),
        why="it is for `lr_scheduler: cosine`",
    ),
    ForeignKey(
        theirs="lr_scheduler",
        how=sets({HERE: "cosine_with_min_lr"}),
        ours="lr_scheduler",
        when=lambda given: _RATIO in given,
    ),
    ForeignKey(
        theirs="lr_scheduler_type",
        how=sets({"lr_scheduler": "cosine_with_min_lr"}),
        when=lambda given: _RATIO in given and "lr_scheduler" not in given,
    ),
    ForeignKey(
        theirs=_RATIO,
        how=sets({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs.min_lr_rate": SAME}, keep=True),
    ),
    ForeignKey(
        theirs="batch_size",
        how="ignored",
        when=lambda given: _micro_batches(given) is not None and given.has("gradient_accumulation_steps"),
        why="`gradient_accumulation_steps` decides this",
    ),
    ForeignKey(
        theirs="batch_size",
        how=sets({"gradient_accumulation_steps": _micro_batches}),
        when=lambda given: (_micro_batches(given) or 0) > 0,
    ),
)

# Optimizers.


def _is_half_of_old_lion(given: Given) -> bool:
    return given.value("optimizer", "optim") == "lion_pytorch" and not all(map(given.has, ("adam_beta1", "adam_beta2")))


OPTIMIZERS = (
    # axolotl's old Lion, of the package lion_pytorch, has betas of its own unless both are given.
    ForeignKey(
        theirs="adam_beta1 adam_beta2",
        how="noted",
        only=lambda value: value is not None,
        when=_is_half_of_old_lion,
        why="lion_pytorch uses both betas or none",
    ),
    ForeignKey(
        theirs="optimizer optim",
        how=sets({HERE: "lion", "adam_beta2": 0.99}),
        ours="optimizer",
        only=("lion_pytorch",),
        when=_is_half_of_old_lion,
    ),
    ForeignKey(theirs="use_muon", how="ignored", only=(None, False, "", "false"), why="it is off"),
    ForeignKey(
        theirs="use_muon",
        how=sets({"optimizer": "muon"}),
        over=dict.fromkeys(("optimizer", "optim"), "`use_muon` decides the optimizer"),
    ),
)
