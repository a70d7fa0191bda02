"""A torchtune config as entries with names of ours.

torchtune names Python objects (`_component_`) and nests their arguments. What Ratel needs of them is flattened here;
the rest has an outcome with its reason.

Invariant: every key of the file is either read or reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ratel_cli.config.keys.topics import instead_of
from ratel_cli.config.others.torchtune_data import translate_sets
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, Scalar, plain, show

_READ: Mapping[str, str] = {
    "checkpointer.checkpoint_dir": "base_model",
    "tokenizer.max_seq_len": "sequence_len",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.eps": "adam_epsilon",
    "optimizer.momentum": "optim_args.momentum",
    "optimizer.nesterov": "optim_args.nesterov",
    "lr_scheduler.num_warmup_steps": "warmup_steps",
    "lr_scheduler.num_cycles": "lr_scheduler_kwargs.num_cycles",
    "batch_size": "micro_batch_size",
    "epochs": "num_epochs",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "clip_grad_norm": "max_grad_norm",
    "dtype": "dtype",
    "device": "device",
    "seed": "seed",
    "shuffle": "shuffle",
    "output_dir": "output_dir",
    "log_every_n_steps": "logging_steps",
    "save_every_n_steps": "save_steps",
    "run_val_every_n_steps": "eval_steps",
}
"""By dotted key: our key."""
_DROPPED = (
    "metric_logger", "profiler", "resume_from_checkpoint", "compile", "enable_activation_checkpointing",
    "enable_activation_offloading", "log_peak_memory_stats", "log_level", "optimizer_in_bwd", "custom_sharded_layers",
    "fsdp_cpu_offload", "cpu_offload", "fsdp_reshard_after_forward", "tensor_parallel_dim", "tensor_parallel_plan",
    "data_parallel_shard_dim", "data_parallel_replicate_dim", "context_parallel_dim", "memory_efficient_fsdp_wrap",
    "fsdp_sharding_strategy", "ac_mode", "ac_option", "activation_offloading_use_streams", "cudnn_deterministic_mode",
    "batch_size_val", "enable_async_checkpointing", "low_cpu_ram", "save_adapter_weights_only",
    "keep_last_n_checkpoints", "use_grouped_mm", "full_finetune", "nproc_per_node", "float8_recipe_name",
    "fp8_recipe_name", "root_dir", "base_dir", "model_dir", "log_dir", "name", "enable_torch_profiler",
    "output_file_path", "checkpointer",
)  # fmt: skip
"""Keys about files, speed and memory, which change no number, with whatever they contain."""
_HARMLESS = (
    "tokenizer.path", "tokenizer.merges_file", "tokenizer.vocab_path", "tokenizer.special_tokens_path",
    "loss.num_output_chunks", "optimizer.fused", "optimizer.foreach", "optimizer.capturable",
    "optimizer.differentiable", "optimizer.is_paged",
)  # fmt: skip
"""Keys inside other keys, about files, speed and memory, which change no number."""
_DEFAULTS_OF_8_BIT: Mapping[str, Plain] = {"optimizer.min_8bit_size": 4096, "optimizer.block_wise": True}
"""Defaults of bitsandbytes' 8-bit classes: with other values the moments are others."""
_ROUNDS = "optimizer.bf16_stochastic_round"
_OF_OPTIMIZER = ("optimizer._component_", "optimizer.betas", "optimizer.optim_bits", _ROUNDS, *_DEFAULTS_OF_8_BIT)
MOMENTS_IN_FP32 = "Ratel keeps its moments in fp32, on NVMe"
_UNDECIDED: Mapping[str, str] = {
    "model": "Ratel takes the model as its config.json describes it",
    "tokenizer": "Ratel takes the tokenizer, and its chat template, as its files describe it",
    "prompt_template": "Ratel takes the tokenizer, and its chat template, as its files describe it",
    "loss": "Ratel's cross-entropy has no settings",
    "collate_fn": "Ratel packs samples itself",
    "mixed_precision": "Ratel computes in `dtype`",
    "moe_router_topk": "Ratel takes the model as its config.json describes it",
}
"""By the first part of a key: why it is left to the user."""
_OF_REWARDS = (
    "policy_model", "reward_and_value_model", "value_checkpointer", "reward_checkpointer", "reward_functions",
    "ref_policy_checkpointer", "teacher_model", "teacher_checkpointer", "kd_loss", "postprocessing", "training",
)  # fmt: skip
"""Objects of its recipes for PPO, GRPO and distillation."""
_PREFERENCES = ("DPO", "SimPO", "RSO", "IPO", "KTO")
"""In the names of losses that compare answers."""
_WRITES_TURNS = ("llama3", "llama4", "phi3", "phi4", "qwen2", "qwen3")
"""Beginnings of the names of tokenizers whose turns have headers; those of others are plain texts."""
_WRITES_BRACKETS = ("llama2", "mistral")
"""Beginnings of the names of tokenizers whose `prompt_template` puts words of a user between brackets, unless it is
null."""
_ADAPTER_HINT = "name the model without an adapter, and write the adapter's keys into the new file: `adapter: lora`"
_QUANTISER_HINT = "remove it; with an adapter, use `load_in_4bit` or `load_in_8bit`"
_COMPARED_HINT = "import a config without it, and write `rl` and the preference data into the new file"
_KEY = re.compile(r"\$\{([\w.]+)\}")
_NO_KEY = "Ratel has no such key"
_SETS = {"dataset": "datasets", "dataset_val": "test_datasets"}


def is_torchtune(marked: Marked) -> bool:
    """Whether a mapping names Python objects anywhere."""
    content = marked.content
    if isinstance(content, dict):
        return "_component_" in content or any(is_torchtune(entry.value) for entry in content.values())
    return isinstance(content, list) and any(map(is_torchtune, content))


def translate_torchtune(entries: Entries, report: Report) -> Entries:
    """The entries with names of ours."""
    flat = {name: replace(entry, written=name) for name, entry in _flat(entries)}
    _interpolate(flat, flat)
    translated: Entries = {}
    types = _translate_data(entries, flat, translated, report)
    for name, entry in flat.items():
        if name.partition(".")[0] in _SETS:
            continue
        if name in _OF_OPTIMIZER:
            _optimizer(name, entry, flat, translated, report)
        elif name.endswith("_component_") and name.count(".") < 2:
            _component(name, entry, flat, translated, report, types)
        elif name == "max_steps_per_epoch":
            _steps_per_epoch(entry, flat.get("epochs"), translated, report)
        elif name not in _READ:
            _leftover(name, entry, report)
        elif name == "tokenizer.max_seq_len" and entry.value.content is None and "sequence_len" not in translated:
            report.decide(entry, "torchtune then truncates nothing; Ratel truncates at `sequence_len`")
        elif entry.value.content is None:
            report.drop(entry, "it is empty")
        else:
            _read(name, entry, translated, report)
    return translated


def _translate_data(entries: Entries, flat: Entries, translated: Entries, report: Report) -> set[Plain]:
    """Put the sets into `translated`, and what they say about all data. Returns the types of the sets."""
    types: set[Plain] = set()
    for key, ours in _SETS.items():
        if key not in entries:
            continue
        if entries[key].value.content is None:
            report.drop(entries[key], "it is empty")
        found = translate_sets(list(_sets_in(key, entries[key], flat)), report)
        types |= {plain(each.content["type"].value) for each in found.sets if isinstance(each.content, dict)}
        if found.sets:
            where = entries[key].where
            translated[ours] = replace(entries[key], value=Marked(where=where, content=list(found.sets)))
        if key == "dataset" and found.trains_on_input is not None:
            translated["train_on_inputs"] = found.trains_on_input
        if key == "dataset":
            _of_all_sets(found.packed, "sample_packing", translated, report)
            _of_all_sets(found.lengths, "sequence_len", translated, report)
    return types


def _of_all_sets(entries: Sequence[Entry], name: str, translated: Entries, report: Report) -> None:
    """A key that every set has there, and all data here."""
    for entry in entries:
        value, first = plain(entry.value), plain(entries[0].value)
        if value == first:
            translated[name] = entry
            report.read_as(entry, f"{name}: {show(value)}")
        else:
            report.decide(entry, f"the sets differ in this; Ratel has one `{name}` for all of them")


def _sets_in(key: str, entry: Entry, flat: Entries) -> Iterator[Entries]:
    """The arguments of each set, flat and with their values filled in."""
    content = entry.value.content
    several = isinstance(content, list)
    for number, each in enumerate(content if isinstance(content, list) else [entry.value]):
        if isinstance(each.content, dict):
            prefix = f"{key}.{number}." if several else f"{key}."
            arguments = {name: replace(one, written=prefix + name) for name, one in _flat(each.content)}
            _interpolate(arguments, flat)
            yield arguments


def _steps_per_epoch(entry: Entry, epochs: Entry | None, translated: Entries, report: Report) -> None:
    """torchtune ends each epoch after this number of steps; with one epoch that is the end of the run."""
    steps, number = entry.value.content, None if epochs is None else epochs.value.content
    if steps is None:
        report.drop(entry, "it is empty")
    elif number == 1:
        translated["max_steps"] = entry
        report.read_as(entry, f"max_steps: {steps}")
    else:
        is_known = isinstance(number, int) and isinstance(steps, int)
        several = number * steps if isinstance(number, int) and isinstance(steps, int) else None
        total = f"`max_steps: {several}`" if is_known else "`max_steps` to this times `num_epochs`"
        report.decide(entry, f"torchtune ends each epoch after these steps, and Ratel only the run: set {total}")


def _betas(entry: Entry, translated: Entries, report: Report) -> None:
    values = entry.value.content
    if isinstance(values, list) and len(values) == 2:
        for key, value in zip(("adam_beta1", "adam_beta2"), values, strict=True):
            translated[key] = replace(entry, value=value)
        first, second = map(plain, values)
        report.read_as(entry, f"adam_beta1: {first}, adam_beta2: {second}")
    elif values is None:
        report.drop(entry, "it is empty")
    else:
        report.decide(entry, "two numbers are expected")


def _read(name: str, entry: Entry, translated: Entries, report: Report) -> None:
    """Put an entry where its key of ours belongs."""
    ours, content = _READ[name], entry.value.content
    section, _, key = ours.rpartition(".")
    if name == "device" and content != "cpu":
        report.drop(entry, "`device: auto` takes the GPU if there is one")
        return
    if section:
        others = translated[section].value.content if section in translated else None
        options: Entries = {**(others if isinstance(others, dict) else {}), key: replace(entry, written=key)}
        translated[section] = replace(entry, written=section, value=Marked(where=entry.where, content=options))
    else:
        translated[ours] = entry
    shown = show(plain(entry.value)).strip("'")
    report.read_as(entry, f"{ours}: {shown}")


def _flat(entries: Entries, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """The leaves of nested mappings, by dotted names. What is dropped whole stays whole."""
    for key, entry in entries.items():
        content = entry.value.content
        is_whole = not prefix and key in _DROPPED and key != "checkpointer"
        if isinstance(content, dict) and content and not is_whole:
            yield from _flat(content, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def _interpolate(entries: Entries, values: Entries) -> None:
    """Replace `${key}` by the value of that key, as OmegaConf does."""
    for _ in range(5):
        for name, entry in entries.items():
            entries[name] = replace(entry, value=_filled(entry.value, values))


def _filled(value: Marked, values: Entries) -> Marked:
    content = value.content
    if isinstance(content, list):
        return replace(value, content=[_filled(each, values) for each in content])
    if not isinstance(content, str) or "${" not in content:
        return value
    alone = values.get(content[2:-1]) if content.startswith("${") and content.endswith("}") else None
    if alone is not None:
        return replace(value, content=alone.value.content)
    return replace(value, content=_KEY.sub(lambda match: _text_of(values, match), content))


def _text_of(values: Entries, match: re.Match[str]) -> str:
    found = values.get(match[1])
    return match[0] if found is None or isinstance(found.value.content, dict | list) else str(found.value.content)


def _component(name: str, entry: Entry, flat: Entries, translated: Entries, report: Report, types: set[Plain]) -> None:
    """Read the name of a Python object."""
    path = _named(entry)
    last = path.rpartition(".")[2]
    match name.partition(".")[0]:
        case "lr_scheduler":
            name_of_ours = last.removeprefix("get_").removesuffix("_schedule_with_warmup")
            translated["lr_scheduler"] = made(entry, name_of_ours)
            report.read_as(entry, f"lr_scheduler: {name_of_ours}")
        case "tokenizer":
            template = flat.get("tokenizer.prompt_template", entry)
            brackets = () if template.value.content is None else _WRITES_BRACKETS
            writes_turns = last.startswith((*_WRITES_TURNS, *brackets))
            _tokenizer(last, entry, translated, report, types, writes_turns=writes_turns)
        case "model" if last.startswith(("lora_", "qlora_", "dora_")):
            report.reject(entry.where, f"`{path}` trains an adapter", name, hint=_ADAPTER_HINT)
        case "quantizer":
            report.reject(entry.where, f"`{path}` quantises the model", name, hint=_QUANTISER_HINT)
        case _ if name.partition(".")[0] in _OF_REWARDS:
            report.reject(
                entry.where,
                f"`{path}` belongs to reinforcement learning or distillation",
                name,
                hint=instead_of("grpo"),
            )
        case "loss" if any(part in last for part in _PREFERENCES):
            report.reject(entry.where, f"`{path}` belongs to preference training", name, hint=_COMPARED_HINT)
        case "loss" if "CrossEntropy" not in last and "CE" not in last:
            report.reject(
                entry.where,
                f"`{path}` is another loss",
                name,
                hint="remove it; other losses are `use_dft_loss` and `rl`",
            )
        case "loss":
            report.drop(entry, "it is the cross entropy, as here")
        case "model" | "checkpointer":
            report.drop(entry, "Ratel takes the model as its directory describes it")
        case _:
            _leftover(name, entry, report)


def _optimizer(name: str, entry: Entry, flat: Entries, translated: Entries, report: Report) -> None:
    """Read a key of the optimizer that is more than a number with another name."""
    content = entry.value.content
    if name == "optimizer._component_":
        _class(entry, flat.get("optimizer.optim_bits"), translated, report)
    elif name == "optimizer.betas":
        _betas(entry, translated, report)
    elif name == "optimizer.optim_bits":
        report.drop(entry, "the optimizer's name says here how many bits its moments have")
    elif name == _ROUNDS and not content:
        report.drop(entry, "it is the default")
    elif name == _ROUNDS and content is True:
        translated["bf16_master"] = made(entry, "stochastic")
        report.read_as(entry, "bf16_master: stochastic")
    elif content is None or content == _DEFAULTS_OF_8_BIT.get(name):
        report.drop(entry, "Ratel does the same")
    else:
        report.decide(entry, _NO_KEY)


def _class(entry: Entry, bits: Entry | None, translated: Entries, report: Report) -> None:
    """Read the class of the optimizer; those of bitsandbytes have an argument for the bits of their moments."""
    last = class_of(entry)
    is_8bit = last.endswith("8bit") or (bits is not None and bits.value.content == 8)
    found, remark = last, ""
    if "AdamW" in last:
        found = "adamw_8bit" if is_8bit else "adamw"
        remark = f" ({MOMENTS_IN_FP32})" if last.endswith(("4bit", "Fp8")) else ""
    elif last in ("Lion", "PagedLion", "Lion32bit", "PagedLion32bit", "Lion8bit", "PagedLion8bit"):
        found, remark = "lion", f" ({MOMENTS_IN_FP32})" if is_8bit else ""
    elif last == "SGD" and not is_8bit:
        found = "sgd"
    translated["optimizer"] = made(entry, found)
    report.read_as(entry, f"optimizer: {found}{remark}")


def class_of(component: Entry) -> str:
    """The name of a Python class, without its module."""
    return _named(component).rpartition(".")[2]


def _named(component: Entry) -> str:
    """The name of a Python object, or what stands in its place."""
    content = component.value.content
    return content if isinstance(content, str) else show(plain(component.value))


def defaults_of_optimizer(theirs: Marked) -> Mapping[str, Scalar]:
    """The defaults of a config's optimizer where Ratel's are others: each class has its own."""
    optimizer = theirs.content.get("optimizer") if isinstance(theirs.content, dict) else None
    arguments = optimizer.value.content if optimizer is not None else None
    component = arguments.get("_component_") if isinstance(arguments, dict) else None
    last = "" if component is None else class_of(component)
    if "AdamW" in last:
        return {"weight_decay": 0.01}
    return {"adam_beta2": 0.99} if "Lion" in last else {}


def _tokenizer(
    last: str, entry: Entry, translated: Entries, report: Report, types: set[Plain], *, writes_turns: bool
) -> None:
    """The tokenizers of torchtune write the turns of a conversation by themselves, without a chat template."""
    if last.startswith("llama3") and "chat_template" in types:
        translated["chat_template"] = made(entry, "llama3")
        report.read_as(entry, "chat_template: llama3")
    if writes_turns and "alpaca" in types:
        report.decide(entry, "torchtune writes the Alpaca prompt as a turn of this tokenizer; here it is plain text")
    elif "chat_template" not in translated:
        report.drop(entry, "Ratel takes the tokenizer, and its chat template, as its files describe it")


def _leftover(name: str, entry: Entry, report: Report) -> None:
    """Report a key that has no counterpart: what may change what is trained is left to the user."""
    top, content = name.partition(".")[0], entry.value.content
    if content is None or content is False:
        report.drop(entry, "it is off or empty")
    elif name == "enable_fp8_training":
        report.drop(entry, "Ratel computes in `dtype`, which is more exact", quietly=False)
    elif top in _DROPPED or name in _HARMLESS:
        report.drop(entry, "it is about files, speed or memory; Ratel has its own")
    elif name.endswith("._component_") and top == "mixed_precision":
        report.drop(entry, "`mixed_precision.enabled` decides")
    else:
        report.decide(entry, _UNDECIDED.get(top, _NO_KEY))
