"""A torchtune config as entries with names of ours.

torchtune names Python objects (`_component_`) and nests their arguments. Its keys are flat here, with dotted names, and
`_ROWS` says what becomes of each; the sets of data have a module of their own.

Invariant: every key of the file is either read or reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ratel_cli.config.keys.topics import instead_of
from ratel_cli.config.others.row import (
    SAME,
    ForeignKey,
    Given,
    Site,
    decide,
    refuse,
    sets,
    translate_in_order,
    unpack,
)
from ratel_cli.config.others.torchtune_data import translate_sets
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import Entry, Marked, Plain, Scalar, plain, show

MOMENTS_IN_FP32 = "Ratel keeps its moments in fp32, on NVMe"
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
_KEY = re.compile(r"\$\{([\w.]+)\}")
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
    _translate_data(entries, flat, translated, report)
    rest = {name: entry for name, entry in flat.items() if name.partition(".")[0] not in _SETS}
    translate_in_order(_ROWS, rest, translated, report)
    return translated


def _translate_data(entries: Entries, flat: Entries, translated: Entries, report: Report) -> None:
    """Put the sets into `translated`, and what they say about all data."""
    for key, ours in _SETS.items():
        if key not in entries:
            continue
        if entries[key].value.content is None:
            report.drop(entries[key], "it is empty")
        found = translate_sets(list(_sets_in(key, entries[key], flat)), report)
        if found.sets:
            where = entries[key].where
            translated[ours] = replace(entries[key], value=Marked(where=where, content=list(found.sets)))
        if key == "dataset" and found.trains_on_input is not None:
            translated["train_on_inputs"] = found.trains_on_input
        if key == "dataset":
            _of_all_sets(found.packed, "sample_packing", translated, report)
            _of_all_sets(found.lengths, "sequence_len", translated, report)


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


def class_of(component: Entry) -> str:
    """The name of a Python class, without its module."""
    return _last(plain(component.value))


def _last(content: Plain) -> str:
    """The name of a Python object without its module, or what stands in its place."""
    return (content if isinstance(content, str) else show(content)).rpartition(".")[2]


def defaults_of_optimizer(theirs: Marked) -> Mapping[str, Scalar]:
    """The defaults of a config's optimizer where Ratel's are others: each class has its own."""
    optimizer = theirs.content.get("optimizer") if isinstance(theirs.content, dict) else None
    arguments = optimizer.value.content if optimizer is not None else None
    component = arguments.get("_component_") if isinstance(arguments, dict) else None
    last = "" if component is None else class_of(component)
    if "AdamW" in last:
        return {"weight_decay": 0.01}
    return {"adam_beta2": 0.99} if "Lion" in last else {}


# What the rows say of values and of other keys.


def _is_off(content: Plain) -> bool:
    return content is None or content is False


def _optimizer(given: Given) -> str:
    return _last(given.value("optimizer._component_"))


def _is_8_bit(given: Given) -> bool:
    """Whether its moments are 8-bit: optimizers of bitsandbytes have an argument for that, too."""
    return _optimizer(given).endswith("8bit") or given.value("optimizer.optim_bits") == 8


def _rule(given: Given) -> str:
    """Our name of the optimizer."""
    name = _optimizer(given)
    if "AdamW" in name:
        return "adamw_8bit" if _is_8_bit(given) else "adamw"
    if name in ("Lion", "PagedLion", "Lion32bit", "PagedLion32bit", "Lion8bit", "PagedLion8bit"):
        return "lion"
    return "sgd" if name == "SGD" and not _is_8_bit(given) else name


def _smaller_moments(given: Given) -> str:
    is_small = _optimizer(given).endswith(("4bit", "Fp8")) if "AdamW" in _optimizer(given) else _is_8_bit(given)
    return f" ({MOMENTS_IN_FP32})" if is_small and _rule(given) in ("adamw", "lion") else ""


def _schedule(given: Given) -> str:
    return _last(given.value("lr_scheduler._component_")).removeprefix("get_").removesuffix("_schedule_with_warmup")


def _ends_each_epoch(given: Given) -> str:
    number, steps = given.value("epochs"), given.value("max_steps_per_epoch")
    total = "`max_steps` to this times `num_epochs`"
    if isinstance(number, int) and isinstance(steps, int):
        total = f"`max_steps: {number * steps}`"
    return f"torchtune ends each epoch after these steps, and Ratel only the run: set {total}"


def _tokenizer(site: Site) -> None:
    """The tokenizers of torchtune write the turns of a conversation by themselves, without a chat template."""
    last, entry = class_of(site.entry), site.entry
    sets_of = [each for key in _SETS.values() if key in site.target for each in site.target[key].value.items]
    types = {plain(each.entries["type"].value) for each in sets_of if "type" in each.entries}
    template = site.given.value("tokenizer.prompt_template", "tokenizer._component_")
    brackets = () if template is None else _WRITES_BRACKETS
    if last.startswith("llama3") and "chat_template" in types:
        site.target["chat_template"] = made(entry, "llama3")
        site.report.read_as(entry, "chat_template: llama3")
    if last.startswith((*_WRITES_TURNS, *brackets)) and "alpaca" in types:
        why = "torchtune writes the Alpaca prompt as a turn of this tokenizer; here it is plain text"
        site.report.decide(entry, why)
    elif "chat_template" not in site.target:
        site.report.drop(entry, _AS_FILES)


def _begins(*starts: str) -> Callable[[Plain], bool]:
    return lambda content: _last(content).startswith(starts)


def _all_of(names: Sequence[str]) -> str:
    """Names of keys, with whatever they contain."""
    return " ".join(f"{name} {name}.*" for name in names)


_AS_CONFIG = "Ratel takes the model as its config.json describes it"
_AS_FILES = "Ratel takes the tokenizer, and its chat template, as its files describe it"
_NO_KEY = "Ratel has no such key"
_ROUNDS = "optimizer.bf16_stochastic_round"
_ROWS: tuple[ForeignKey, ...] = (
    # The optimizer.
    ForeignKey(theirs="optimizer._component_", how=sets({"optimizer": _rule}, remark=_smaller_moments)),
    ForeignKey(
        theirs="optimizer.betas",
        how=unpack("adam_beta1", "adam_beta2"),
        only=lambda value: isinstance(value, list) and len(value) == 2,
    ),
    ForeignKey(theirs="optimizer.betas", how="ignored", only=(None,), why="it is empty"),
    ForeignKey(theirs="optimizer.betas", how=decide, why="two numbers are expected"),
    ForeignKey(
        theirs="optimizer.optim_bits",
        how="ignored",
        why="the optimizer's name says here how many bits its moments have",
    ),
    ForeignKey(theirs=_ROUNDS, how="ignored", only=lambda value: not value, why="it is the default"),
    ForeignKey(theirs=_ROUNDS, how=sets({"bf16_master": "stochastic"}), only=lambda value: value is True),
    # Defaults of bitsandbytes' 8-bit classes: with other values the moments are others.
    ForeignKey(theirs="optimizer.min_8bit_size", how="ignored", only=(4096, None), why="Ratel does the same"),
    ForeignKey(theirs="optimizer.block_wise", how="ignored", only=(True, None), why="Ratel does the same"),
    ForeignKey(theirs=f"{_ROUNDS} optimizer.min_8bit_size optimizer.block_wise", how=decide, why=_NO_KEY),
    # Other objects.
    ForeignKey(theirs="lr_scheduler._component_", how=sets({"lr_scheduler": _schedule})),
    ForeignKey(theirs="tokenizer._component_", how=_tokenizer),
    ForeignKey(
        theirs="model._component_",
        how=refuse("`{text}` trains an adapter"),
        hint="name the model without an adapter, and write the adapter's keys into the new file: `adapter: lora`",
        only=_begins("lora_", "qlora_", "dora_"),
    ),
    ForeignKey(
        theirs="quantizer._component_",
        how=refuse("`{text}` quantises the model"),
        hint="remove it; with an adapter, use `load_in_4bit` or `load_in_8bit`",
    ),
    ForeignKey(
        theirs=" ".join(f"{name}._component_" for name in _OF_REWARDS),
        how=refuse("`{text}` belongs to reinforcement learning or distillation"),
        hint=instead_of("grpo"),
    ),
    ForeignKey(
        theirs="loss._component_",
        how=refuse("`{text}` belongs to preference training"),
        hint="import a config without it, and write `rl` and the preference data into the new file",
        only=lambda name: any(part in _last(name) for part in _PREFERENCES),
    ),
    ForeignKey(
        theirs="loss._component_",
        how="ignored",
        only=lambda name: "CrossEntropy" in _last(name) or "CE" in _last(name),
        why="it is the cross entropy, as here",
    ),
    ForeignKey(
        theirs="loss._component_",
        how=refuse("`{text}` is another loss"),
        hint="remove it; other losses are `use_dft_loss` and `rl`",
    ),
    ForeignKey(
        theirs="model._component_ checkpointer._component_",
        how="ignored",
        why="Ratel takes the model as its directory describes it",
    ),
    # Steps, lengths, and what has another name.
    ForeignKey(theirs="max_steps_per_epoch", how="ignored", only=(None,), why="it is empty"),
    ForeignKey(
        theirs="max_steps_per_epoch", how=sets({"max_steps": SAME}), when=lambda given: given.value("epochs") == 1
    ),
    ForeignKey(theirs="max_steps_per_epoch", how=decide, why=_ends_each_epoch),
    ForeignKey(
        theirs="tokenizer.max_seq_len",
        how=decide,
        only=(None,),
        when=lambda given: "sequence_len" not in given.target,
        why="torchtune then truncates nothing; Ratel truncates at `sequence_len`",
    ),
    ForeignKey(theirs=" ".join(_READ), how="ignored", only=(None,), why="it is empty"),
    ForeignKey(
        theirs="device",
        how="ignored",
        only=lambda value: value != "cpu",
        why="`device: auto` takes the GPU if there is one",
    ),
    *(ForeignKey(theirs=theirs, how=sets({ours: SAME})) for theirs, ours in _READ.items()),
    # What has no counterpart: what may change what is trained is left to the user.
    ForeignKey(theirs="*", how="ignored", only=_is_off, why="it is off or empty"),
    ForeignKey(theirs="enable_fp8_training", how="noted", why="Ratel computes in `dtype`, which is more exact"),
    ForeignKey(
        theirs=" ".join((_all_of(_DROPPED), *_HARMLESS)),
        how="ignored",
        why="it is about files, speed or memory; Ratel has its own",
    ),
    ForeignKey(theirs="mixed_precision._component_", how="ignored", why="`mixed_precision.enabled` decides"),
    ForeignKey(theirs=_all_of(("model", "moe_router_topk")), how=decide, why=_AS_CONFIG),
    ForeignKey(theirs=_all_of(("tokenizer", "prompt_template")), how=decide, why=_AS_FILES),
    ForeignKey(theirs=_all_of(("loss",)), how=decide, why="Ratel's cross-entropy has no settings"),
    ForeignKey(theirs=_all_of(("collate_fn",)), how=decide, why="Ratel packs samples itself"),
    ForeignKey(theirs=_all_of(("mixed_precision",)), how=decide, why="Ratel computes in `dtype`"),
    ForeignKey(theirs="*", how=decide, why=_NO_KEY),
)
