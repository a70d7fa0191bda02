"""Adapters of other trainers: their switches, names and defaults become keys of ours.

Invariant: the adapter that a rewritten config trains is the one that the other trainer would, or there is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from ratel_cli.config.keys.key_groups import OF_ADAPTER
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.others.row import (
    Code,
    ForeignKey,
    Given,
    absent,
    adds,
    forget,
    is_text,
    move,
    refuse,
    sets,
    split,
    spread,
)
from ratel_cli.config.yaml.reporting import Entries, Report
from ratel_cli.config.yaml.yaml_marks import Plain, plain

_SWITCHES: Sequence[str] = ("adapter", "use_peft", "finetuning_type")
_PREFIXES = ("lora_", "loraplus_", "qlora", "peft_", "adapter", "use_peft")
_OURS: Mapping[str, Plain] = {
    key: list(default) if isinstance(default := RunConfig.model_fields[key].default, tuple) else default
    for key in ("adapter", "loraplus_lr_ratio", *OF_ADAPTER)
}
"""Our keys of an adapter, with the values that a config of ours has where it has no adapter."""
_Tool: TypeAlias = Literal["axolotl", "LLaMA-Factory", "TRL"]


def _tool(given: Given) -> _Tool | None:
    """The trainer whose adapter is on; None if none is."""
    if given.value("adapter") not in ("lora", "qlora"):
        return None
    if given.value("adapter") == "qlora":
        return "axolotl"
    if given.value("use_peft") in (True, 1):
        return "TRL"
    return "LLaMA-Factory" if given.value("finetuning_type") == "lora" else "axolotl"


def _of(*tools: _Tool) -> Callable[[Given], bool]:
    """A condition: the adapter of one of the trainers is on."""
    return lambda given: _tool(given) in tools


def _turned_off(entries: Entries, report: Report) -> None:
    """Where the switches turn an adapter off, its settings change nothing, as its trainer ignores them."""
    is_off = [entries[key].value.content in (None, False, "", "full") for key in _SWITCHES if key in entries]
    for key in [key for key in entries if all(is_off) and key.startswith(_PREFIXES)]:
        if key not in _OURS or plain(entries[key].value) != _OURS[key]:
            report.drop(entries.pop(key), "there is no adapter")


def _twice_the_rank(given: Given) -> Plain:
    rank = given.value("lora_r")
    assert isinstance(rank, int)
    return 2 * rank


ADAPTERS = (
    ForeignKey(
        theirs="peft_config",
        how=spread(
            names={"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"},
            without="name",
            more={"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05},
        ),
        only=lambda value: isinstance(value, dict) and value.get("name") == "lora",
    ),
    ForeignKey(theirs="lora_rank", how=move, ours="lora_r", when=absent("lora_r")),
    ForeignKey(theirs="use_rslora", how=move, ours="peft_use_rslora", when=absent("peft_use_rslora")),
    ForeignKey(theirs="use_dora", how=move, ours="peft_use_dora", when=absent("peft_use_dora")),
    ForeignKey(theirs="additional_target", how=move, ours="lora_modules_to_save", when=absent("lora_modules_to_save")),
    ForeignKey(theirs="lora_target", how=move, ours="lora_target_modules", when=absent("lora_target_modules")),
    ForeignKey(
        theirs="peft_layers_to_transform",
        how=move,
        ours="lora_layers_to_transform",
        when=absent("lora_layers_to_transform"),
    ),
    ForeignKey(
        theirs=" ".join(key for key in OF_ADAPTER if _OURS[key] is not None),
        how="ignored",
        only=(None,),
        why="it is empty, so its default is used",
    ),
    ForeignKey(theirs=" ".join(_SWITCHES), how=Code(_turned_off)),
    ForeignKey(
        theirs="adapter",
        how="ignored",
        only=(None,),
        when=lambda given: given.value("use_peft") in (True, 1) or given.value("finetuning_type") == "lora",
        why="it is empty, and another key turns an adapter on",
    ),
    # The adapter that a switch turns on, and what no key says of it is as in the switch's trainer.
    ForeignKey(
        theirs="adapter",
        how=refuse("`adapter: qlora` without `load_in_4bit: true`", goes_on=True),
        hint="add it; for a model that is not quantised: `adapter: lora`",
        only=("qlora",),
        when=lambda given: given.value("load_in_4bit") is not True,
    ),
    ForeignKey(theirs="finetuning_type", how=adds({"adapter": "lora"}), only=("lora",)),
    ForeignKey(theirs="use_peft", how=adds({"adapter": "lora"}), only=(True,)),
    ForeignKey(theirs="lora_target_modules lora_modules_to_save", how=split, only=is_text, when=_of("LLaMA-Factory")),
    ForeignKey(
        theirs="use_peft",
        how=refuse("no key names the modules that get an adapter; TRL leaves this to PEFT", goes_on=True),
        ours="lora_target_modules",
        hint="name them: `lora_target_modules: [q_proj, v_proj]`",
        when=lambda given: _tool(given) == "TRL" and not given.has("lora_target_modules"),
    ),
    ForeignKey(
        theirs="lora_target_modules",
        how="ignored",
        only=("all", "all-linear", ["all"], ["all-linear"]),
        when=_of("axolotl", "LLaMA-Factory", "TRL"),
        why="all linear layers have an adapter by default",
    ),
    # An empty one has its trainer's default, not ours.
    ForeignKey(theirs="lora_alpha", how=forget, only=(None,), when=_of("axolotl", "LLaMA-Factory", "TRL")),
    ForeignKey(theirs="finetuning_type", how=adds({"lora_r": 8}), when=_of("LLaMA-Factory")),
    ForeignKey(
        theirs="finetuning_type",
        how=adds({"lora_alpha": _twice_the_rank}),
        when=lambda given: _tool(given) == "LLaMA-Factory" and isinstance(given.value("lora_r"), int),
    ),
    ForeignKey(theirs="use_peft", how=adds({"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}), when=_of("TRL")),
    ForeignKey(theirs="finetuning_type", how=sets({"adapter": "lora"}, keep=True), only=("lora",)),
    ForeignKey(theirs="use_peft", how=sets({"adapter": "lora"}, keep=True), only=(True,)),
    ForeignKey(theirs="adapter", how=sets({"adapter": "lora"}), only=("qlora",)),
)
