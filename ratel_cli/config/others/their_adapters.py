"""Adapters of other trainers: their switches, names and defaults become keys of ours.

Invariant: the adapter that a rewritten config trains is the one that the other trainer would, or there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from ratel_cli.config.keys.key_groups import OF_ADAPTER
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, Scalar, plain, show

_ADAPTER_SWITCHES: Sequence[str] = ("adapter", "use_peft", "finetuning_type")
_PREFIXES = ("lora_", "loraplus_", "qlora", "peft_", "adapter", "use_peft")
_NAMES: Mapping[str, str] = {
    "lora_rank": "lora_r",
    "use_rslora": "peft_use_rslora",
    "use_dora": "peft_use_dora",
    "additional_target": "lora_modules_to_save",
    "lora_target": "lora_target_modules",
    "peft_layers_to_transform": "lora_layers_to_transform",
}
"""Names of others, and ours."""


def translate_adapter(entries: Entries, report: Report) -> None:
    """An adapter that a switch of its trainer turns on. Where it turns it off, its settings change nothing, as its
    trainer ignores them."""
    for theirs, ours in _NAMES.items():
        if theirs in entries and ours not in entries:
            entries[ours] = entries.pop(theirs)
            report.read_as(entries[ours], f"{ours}: {show(plain(entries[ours].value))}")
    for name in OF_ADAPTER:
        if name in entries and entries[name].value.content is None and _OURS[name] is not None:
            report.drop(entries.pop(name), "it is empty, so its default is used")
    switches: Entries = {key: entries[key] for key in _ADAPTER_SWITCHES if key in entries}
    is_off = [entry.value.content in (None, False, "", "full") for entry in switches.values()]
    if is_off and all(is_off):
        for key in [key for key in entries if key.startswith(_PREFIXES)]:
            if key not in _OURS or plain(entries[key].value) != _OURS[key]:
                report.drop(entries.pop(key), "there is no adapter")
    elif switches:
        _adapter_that_is_on(entries, report, switches)


def open_mappings(entries: Entries, report: Report) -> None:
    """What LLaMA-Factory's newer configs have in a mapping: an adapter, and how the model beside it is quantised."""
    for key, (named, names) in _MAPPINGS.items():
        content = entries[key].value.content if key in entries else None
        if not isinstance(content, dict) or "name" not in content or content["name"].value.content not in named:
            continue
        entry = entries.pop(key)
        inner = {names.get(each, each): content[each] for each in content if each != "name"}
        if key == "peft_config":
            inner = {**{name: made(entry, value) for name, value in _LORA_IN_MAPPING.items()}, **inner}
        report.read_as(entry, ", ".join(f"{name}: {show(plain(each.value))}" for name, each in inner.items()))
        entries.update({name: replace(each, written=name) for name, each in inner.items() if name not in entries})


_MAPPINGS: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "peft_config": (
        ("lora",),
        {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"},
    ),
    "quant_config": (("bnb", "auto"), {"compute_dtype": "bnb_4bit_compute_dtype"}),
}
"""By mapping: the names that it may have, and our names of its keys."""
_LORA_IN_MAPPING: Mapping[str, Scalar] = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
"""What such an adapter is by default."""


def _adapter_that_is_on(entries: Entries, report: Report, switches: Mapping[str, Entry]) -> None:
    """The switches become `adapter`, and what no key says is as in its trainer."""
    tool: _Tool = "axolotl"
    for key, on, of_tool in _TOOLS:
        if key in switches and switches[key].value.content == on:
            if on == "qlora" and ("load_in_4bit" not in entries or entries["load_in_4bit"].value.content is not True):
                report.reject(
                    switches[key].where,
                    "`adapter: qlora` without `load_in_4bit: true`",
                    "adapter",
                    hint="add it; for a model that is not quantised: `adapter: lora`",
                )
            report.read_as(entries.pop(key), "adapter: lora")
            entries.setdefault("adapter", made(switches[key], "lora"))
            tool = of_tool
    if "adapter" not in entries or entries["adapter"].value.content != "lora":
        return
    switch = entries["adapter"]
    _adapted_modules(entries, report, tool)
    if "lora_alpha" in entries and entries["lora_alpha"].value.content is None:
        del entries["lora_alpha"]  # so that it has its trainer's default, not ours
    for key, content in _LORA_DEFAULTS[tool].items():
        entries.setdefault(key, made(switch, content))
    rank = entries["lora_r"].value.content if "lora_r" in entries else None
    if tool == "LLaMA-Factory" and isinstance(rank, int):
        entries.setdefault("lora_alpha", made(switch, 2 * rank))


_Tool: TypeAlias = Literal["axolotl", "LLaMA-Factory", "TRL"]
_TOOLS: tuple[tuple[str, str | bool, _Tool], ...] = (
    ("finetuning_type", "lora", "LLaMA-Factory"),
    ("use_peft", True, "TRL"),
    ("adapter", "qlora", "axolotl"),
)
"""The switch of each, and how it is on."""
_LORA_DEFAULTS: Mapping[_Tool, Mapping[str, int | float]] = {
    "axolotl": {},
    "LLaMA-Factory": {"lora_r": 8},
    "TRL": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
}
_OURS: Mapping[str, Plain] = {
    key: list(default) if isinstance(default := RunConfig.model_fields[key].default, tuple) else default
    for key in ("adapter", "loraplus_lr_ratio", *OF_ADAPTER)
}
"""Our keys of an adapter, with the values that a config of ours has where it has no adapter."""


def _adapted_modules(entries: Entries, report: Report, tool: _Tool) -> None:
    """Names of modules; LLaMA-Factory's one string with commas; or a word for all linear layers."""
    for key in ("lora_target_modules", "lora_modules_to_save"):
        if tool == "LLaMA-Factory" and key in entries and isinstance(entries[key].value.content, str):
            _divide(entries, key, report)
    entry = entries.get("lora_target_modules")
    if entry is None or entry.value.content is None:
        if tool == "TRL":
            report.reject(
                entries["adapter"].where,
                "no key names the modules that get an adapter; TRL leaves this to PEFT",
                "lora_target_modules",
                hint="name them: `lora_target_modules: [q_proj, v_proj]`",
            )
    elif plain(entry.value) in ("all", "all-linear", ["all"], ["all-linear"]):
        report.drop(entries.pop("lora_target_modules"), "all linear layers have an adapter by default")


def _divide(entries: Entries, key: str, report: Report) -> None:
    """Make a list of names with commas between them."""
    entry = entries[key]
    names = [name.strip() for name in str(entry.value.content).split(",")]
    content = [Marked(where=entry.value.where, content=name) for name in names]
    entries[key] = replace(entry, value=Marked(where=entry.value.where, content=content))
    report.read_as(entry, f"{key}: [{', '.join(names)}]")
