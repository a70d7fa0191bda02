"""A torchtune config as entries with names of ours.

torchtune names Python objects (`_component_`) and nests their arguments. What Ratel needs of them is flattened here;
the rest has an outcome with its reason.

Invariant: every key of the file is either read or reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ratel_cli.config.reporting import Entries, Report, made
from ratel_cli.config.yaml_marks import Entry, Finding, Marked, plain, show

_READ: Mapping[str, str] = {
    "checkpointer.checkpoint_dir": "base_model",
    "tokenizer.max_seq_len": "sequence_len",
    "dataset.packed": "sample_packing",
    "dataset.train_on_input": "train_on_inputs",
    "dataset.split": "datasets.split",
    "dataset.source": "datasets.path",
    "dataset.data_files": "datasets.path",
    "dataset.name": "datasets.name",
    "dataset.column": "datasets.field",
    "dataset.conversation_column": "datasets.field_messages",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.eps": "adam_epsilon",
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
}
"""By dotted key: our key."""
_HUB_SETS: Mapping[str, tuple[str, str]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca"),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca"),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "chat_template"),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "completion"),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", "completion"),
}
_TYPES: Mapping[str, str] = {
    "text_completion_dataset": "completion",
    "chat_dataset": "chat_template",
    "instruct_dataset": "alpaca",
}
_DROPPED = (
    "model", "tokenizer", "checkpointer", "loss", "metric_logger", "profiler", "resume_from_checkpoint", "compile",
    "enable_activation_checkpointing", "enable_activation_offloading", "log_peak_memory_stats", "log_level",
    "max_steps_per_epoch", "optimizer_in_bwd", "custom_sharded_layers", "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "tensor_parallel_dim", "tensor_parallel_plan", "data_parallel_shard_dim", "data_parallel_replicate_dim",
    "context_parallel_dim", "memory_efficient_fsdp_wrap", "fsdp_sharding_strategy", "ac_mode", "ac_option",
    "activation_offloading_use_streams", "cudnn_deterministic_mode", "run_val_every_n_steps", "dataset_val",
    "batch_size_val", "mixed_precision", "enable_async_checkpointing", "low_cpu_ram", "save_adapter_weights_only",
    "keep_last_n_checkpoints", "use_grouped_mm", "moe_router_topk", "full_finetune", "grad_accum", "nproc_per_node",
    "float8_recipe_name", "enable_fp8_training", "fp8_recipe_name", "root_dir", "base_dir", "model_dir", "log_dir",
    "collate_fn", "prompt_template", "name",
)  # fmt: skip
"""Keys that have no meaning here, with whatever they contain."""


def is_torchtune(marked: Marked) -> bool:
    """Whether a mapping names Python objects anywhere."""
    content = marked.content
    if isinstance(content, dict):
        return "_component_" in content or any(is_torchtune(entry.value) for entry in content.values())
    return isinstance(content, list) and any(map(is_torchtune, content))


def translate_torchtune(entries: Entries, report: Report) -> Entries:
    """The entries with names of ours. torchtune's defaults are written out."""
    flat = {name: replace(entry, written=name) for name, entry in _flat(entries)}
    _interpolate(flat)
    translated: Entries = {}
    dataset: Entries = {}
    for name, entry in flat.items():
        if name.endswith("_component_") and name.count(".") < 2:
            _component(name, entry, translated, dataset, report)
        elif name not in _READ:
            _leftover(name, entry, report)
        elif entry.value.content is None:
            is_length = name == "tokenizer.max_seq_len"
            reason = "torchtune truncates nothing then, Ratel at `sequence_len`" if is_length else "it is empty"
            report.drop(entry, reason, quietly=not is_length)
        else:
            _read(name, entry, translated, dataset, report)
    betas = flat.get("optimizer.betas")
    if betas is not None and isinstance(betas.value.content, list):
        for key, value in zip(("adam_beta1", "adam_beta2"), betas.value.content, strict=False):
            translated[key] = replace(betas, value=value)
    if dataset:
        first = next(iter(dataset.values()))
        translated["datasets"] = replace(first, written="dataset", value=Marked(where=first.where, content=dataset))
    return translated


def _read(name: str, entry: Entry, translated: Entries, dataset: Entries, report: Report) -> None:
    """Put an entry where its key of ours belongs."""
    ours, content = _READ[name], entry.value.content
    section, _, key = ours.rpartition(".")
    if name == "device" and content != "cpu":
        report.drop(entry, "`device: auto` takes the GPU if there is one")
        return
    if section == "datasets":
        if name == "dataset.source" and content in ("json", "csv", "parquet", "text"):
            report.drop(entry, "`data_files` names the files")
            return
        dataset[key] = entry
    elif section:
        translated[section] = replace(entry, value=Marked(where=entry.where, content={key: entry}))
    else:
        translated[ours] = entry
    shown = show(plain(entry.value)).strip("'")
    report.read_as(entry, f"{ours}: {shown}")


def _flat(entries: Entries, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """The leaves of nested mappings, by dotted names. What is dropped whole stays whole."""
    for key, entry in entries.items():
        content = entry.value.content
        is_whole = not prefix and key in _DROPPED and key not in ("model", "tokenizer", "checkpointer", "loss")
        if isinstance(content, dict) and content and not is_whole:
            yield from _flat(content, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry


def _interpolate(flat: Entries) -> None:
    """Replace `${key}` by the value of that key, as OmegaConf does."""
    for _ in range(5):
        for name, entry in flat.items():
            content = entry.value.content
            if isinstance(content, str) and "${" in content:
                text = re.sub(r"\$\{([\w.]+)\}", lambda match: _text_of(flat, match), content)
                flat[name] = replace(entry, value=replace(entry.value, content=text))


def _text_of(flat: Entries, match: re.Match[str]) -> str:
    found = flat.get(match[1])
    return match[0] if found is None or isinstance(found.value.content, dict | list) else str(found.value.content)


def _component(name: str, entry: Entry, translated: Entries, dataset: Entries, report: Report) -> None:
    """Read the name of a Python object."""
    path = str(entry.value.content)
    last = path.rpartition(".")[2]
    match name.partition(".")[0]:
        case "dataset":
            _dataset(last, entry, translated, dataset, report)
        case "optimizer":
            translated["optimizer"] = made(entry, "adamw" if "AdamW" in last else last)
            report.read_as(entry, f"optimizer: {'adamw' if 'AdamW' in last else last}")
        case "lr_scheduler":
            name_of_ours = last.removeprefix("get_").removesuffix("_schedule_with_warmup")
            translated["lr_scheduler"] = made(entry, name_of_ours)
            report.read_as(entry, f"lr_scheduler: {name_of_ours}")
        case "model" if last.startswith(("lora_", "qlora_", "dora_")):
            _impossible(entry, f"`{path}` trains an adapter", "remove it; Ratel trains every weight", report)
        case "quantizer":
            _impossible(entry, f"`{path}` quantises the model", "remove it; Ratel trains in full precision", report)
        case "loss" if "CrossEntropy" not in last and "CE" not in last:
            _impossible(entry, f"`{path}` is another loss", "remove it; Ratel has the cross entropy", report)
        case _:
            report.drop(entry, "Ratel takes the model as its directory describes it")


def _dataset(last: str, entry: Entry, translated: Entries, dataset: Entries, report: Report) -> None:
    if last in _HUB_SETS:
        path, kind = _HUB_SETS[last]
        dataset.setdefault("path", made(entry, path))
        dataset["type"] = made(entry, kind)
        if kind == "alpaca":
            translated.setdefault("train_on_inputs", made(entry, True))
    elif last in _TYPES:
        dataset["type"] = made(entry, _TYPES[last])
    elif any(word in last for word in ("preference", "multimodal", "stack_exchange", "hh_rlhf", "cauldron", "llava")):
        _impossible(entry, f"`{last}` is no text to imitate", "use data with prompts and answers", report)
        return
    else:
        report.drop(entry, "Ratel does not know this set; name its files in `datasets`", quietly=False)
        return
    report.read_as(entry, f"datasets.type: {dataset['type'].value.content}")


def _leftover(name: str, entry: Entry, report: Report) -> None:
    top, _, rest = name.partition(".")
    known = top in _DROPPED
    if name == "max_steps_per_epoch" and entry.value.content is not None:
        report.drop(entry, "set `max_steps` to this times `num_epochs`", quietly=False)
    elif name == "enable_fp8_training" and entry.value.content:
        report.drop(entry, "Ratel computes in `dtype`, which is more exact", quietly=False)
    elif known or rest:
        report.drop(
            entry, "it changes nothing in a run of Ratel", quietly=name.startswith(("dataset.", "optimizer.")) < 1
        )
    else:
        report.drop(entry, "Ratel has no such key", quietly=False)


def _impossible(entry: Entry, message: str, hint: str, report: Report) -> None:
    report.reject(Finding(where=entry.where, message=message, hint=hint), entry.written)
