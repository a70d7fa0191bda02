"""The key names of other trainers: those that are accepted for our keys, and those that are rejected with a reason.

Invariant: an alias never changes what a value means, except the INVERSE ones, whose booleans are inverted. A key is
rejected if tools give it different meanings.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from ratel_cli.config.schema import DatasetConfig, LimitsConfig, ModelShape, RunConfig, SnapshotConfig, StorageConfig
from ratel_cli.config.sections import Section
from ratel_cli.config.yaml_marks import Finding, Where

TOP = ""
SECTIONS: Mapping[str, type[Section]] = {
    TOP: RunConfig,
    "datasets": DatasetConfig,
    "storage": StorageConfig,
    "limits": LimitsConfig,
    "model_shape": ModelShape,
    "storage.snapshot": SnapshotConfig,
}
"""By name: the class of each section. The name of a nested section has a dot."""

ALIASES: Mapping[str, Mapping[str, str]] = {
    TOP: {
        "model_name_or_path": "base_model",
        "model": "base_model",
        "train_on_prompt": "train_on_inputs",
        "completion_only_loss": "train_on_inputs",
        "assistant_only_loss": "train_on_inputs",
        "cutoff_len": "sequence_len",
        "max_length": "sequence_len",
        "max_seq_length": "sequence_len",
        "packing": "sample_packing",
        "per_device_train_batch_size": "micro_batch_size",
        "num_train_epochs": "num_epochs",
        "epochs": "num_epochs",
        "lr": "learning_rate",
        "lr_scheduler_type": "lr_scheduler",
        "optim": "optimizer",
        "clip_grad_norm": "max_grad_norm",
        "gradient_clipping": "max_grad_norm",
        "torch_dtype": "dtype",
        "val_size": "val_set_size",
    },
    "datasets": {"formatting": "type"},
}
"""By section: other names of our keys."""
INVERSE = frozenset({"completion_only_loss", "assistant_only_loss"})
"""Aliases whose `true` is our `false`."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "dtype": _DTYPES,
    "gradient_dtype": _DTYPES,
    "optimizer": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"},
    "lr_scheduler": {"constant_with_warmup": "constant"},
}
"""By key: other names of its values."""

_QUANTISED = ("it quantises the model", "remove it; Ratel trains every weight in full precision")
_ADAPTER = ("it trains an adapter", "remove it; Ratel trains every weight of the model")
_SHARDING = ("it spreads the model over several GPUs", "remove it; Ratel streams the model through one device")
_OFFLOAD = ("it configures the offloading of another engine", "remove it, or use `storage` and `limits`")
_MASTER = ("`dtype` sets the precision", "use `dtype: bfloat16`, `float16` or `float32`")
_BATCH = (
    "it means different things in different tools",
    "use `micro_batch_size` (sequences computed at once) and `gradient_accumulation_steps`",
)
_CHECKPOINTING = ("the plan decides what is recomputed", "remove it, or use `activations`")
_ATTENTION = (
    "`attn_implementation` sets the attention kernel",
    "use `attn_implementation: sdpa` or `flash_attention_2`",
)
_TRACKER = ("Ratel never sends data anywhere", "remove it; the metrics of every step are in run/metrics.jsonl")
_REMOTE_CODE = ("Ratel never runs code from a model's repository", "remove it")
_RESUME = ("it is an option of the command line", "use `--resume auto`, `--resume no` or `--resume STEP`")
_OVERWRITE = ("it is an option of the command line", "use `--resume no` to start over")
_PER_EPOCH = ("Ratel counts in steps, not in epochs", "use `save_steps` and `eval_steps`")
_STAGE = ("Ratel does supervised full fine-tuning only", "remove it")
_LOADER = ("Ratel prepares the data once, by itself", "remove it")
_PADDING = ("packing fills the sequences", "use `sample_packing` and `sequence_len`")
_TEMPLATE = ("Ratel uses the tokenizer's own chat template", "remove it, or change that template")
_STRATEGY = ("`save_steps` and `eval_steps` decide this", "remove it, and use these keys")
_MERGE = ("YAML merge keys are not supported", "write the keys out")

FOREIGN: Mapping[str, tuple[str, str]] = {
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "per_device_eval_batch_size": ("evaluation also uses `micro_batch_size`", "remove it"),
    "eval_batch_size": ("evaluation also uses `micro_batch_size`", "remove it"),
    "deepspeed": _OFFLOAD,
    "zero_optimization": _OFFLOAD,
    "zero_stage": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "aio": _OFFLOAD,
    "fsdp": _SHARDING,
    "tensor_parallel_size": _SHARDING,
    "sequence_parallel_degree": _SHARDING,
    "context_parallel_size": _SHARDING,
    "load_in_4bit": _QUANTISED,
    "load_in_8bit": _QUANTISED,
    "quantization_bit": _QUANTISED,
    "quantization_config": _QUANTISED,
    "adapter": _ADAPTER,
    "peft": _ADAPTER,
    "use_peft": _ADAPTER,
    "use_dora": _ADAPTER,
    "bf16": _MASTER,
    "fp16": _MASTER,
    "tf32": _MASTER,
    "pure_bf16": _MASTER,
    "gradient_checkpointing": _CHECKPOINTING,
    "activation_offloading": _CHECKPOINTING,
    "flash_attention": _ATTENTION,
    "flash_attn": _ATTENTION,
    "xformers_attention": _ATTENTION,
    "sdp_attention": _ATTENTION,
    "eager_attention": _ATTENTION,
    "trust_remote_code": _REMOTE_CODE,
    "resume_from_checkpoint": _RESUME,
    "auto_resume_from_checkpoints": _RESUME,
    "overwrite_output_dir": _OVERWRITE,
    "saves_per_epoch": _PER_EPOCH,
    "evals_per_epoch": _PER_EPOCH,
    "save_strategy": _STRATEGY,
    "eval_strategy": _STRATEGY,
    "evaluation_strategy": _STRATEGY,
    "stage": _STAGE,
    "do_train": _STAGE,
    "finetuning_type": _STAGE,
    "rl": _STAGE,
    "template": _TEMPLATE,
    "chat_template": _TEMPLATE,
    "pad_to_sequence_len": _PADDING,
    "group_by_length": _PADDING,
    "dataset_prepared_path": _LOADER,
    "dataset_num_proc": _LOADER,
    "dataset_processes": _LOADER,
    "preprocessing_num_workers": _LOADER,
    "<<": _MERGE,
}
"""Keys of other trainers that are rejected: the reason and the hint."""
FOREIGN_PREFIXES: Mapping[str, tuple[str, str]] = {
    "lora_": _ADAPTER,
    "qlora": _ADAPTER,
    "peft_": _ADAPTER,
    "bnb_": _QUANTISED,
    "fsdp_": _SHARDING,
    "ddp_": _SHARDING,
    "deepspeed_": _OFFLOAD,
    "wandb_": _TRACKER,
    "mlflow_": _TRACKER,
    "comet_": _TRACKER,
    "hub_": ("Ratel uploads nothing", "remove it, and upload `output_dir` after the run"),
    "push_to_hub": ("Ratel uploads nothing", "remove it, and upload `output_dir` after the run"),
    "dataloader_": _LOADER,
}
"""By prefix: the reason and the hint for rejected keys that begin with it."""


def section_in(section: str, key: str) -> str:
    """The name of the section that is the value of `key` in `section`: sections may be nested."""
    return key if section == TOP else f"{section}.{key}"


def canonical_key(section: str, written: str) -> str:
    """Our name for a key: what it is an alias of, or the key itself."""
    return ALIASES.get(section, {}).get(written, written)


def explain_unknown(section: str, written: str, where: Where) -> tuple[Finding, str | None]:
    """The finding for a key that the section does not have, and our name for the key that was probably meant."""
    known = [*SECTIONS[section].model_fields, *ALIASES.get(section, {})]
    foreign = FOREIGN.get(written)
    close = [] if foreign else get_close_matches(written, known, n=1, cutoff=0.8)
    for prefix, reason_and_hint in FOREIGN_PREFIXES.items():
        if foreign is None and not close and written.startswith(prefix):
            foreign = reason_and_hint
    if foreign:
        reason, hint = foreign
        return Finding(where=where, message=f"`{written}` is not a key of Ratel: {reason}", hint=hint), None
    message = f"unknown key `{written}`" + (f" in `{section}`" if section else "")
    belongs = _elsewhere(section, written)
    if belongs:
        return Finding(where=where, message=message, hint=belongs), None
    close = close or get_close_matches(written, known, n=1, cutoff=0.6)
    if close:
        hint = f"did you mean `{close[0]}`?"
        return Finding(where=where, message=message, hint=hint), canonical_key(section, close[0])
    return Finding(where=where, message=message), None


def _elsewhere(section: str, written: str) -> str | None:
    for other, model in SECTIONS.items():
        if other != section and written in model.model_fields:
            return f"`{written}` belongs in `{other}`" if other else f"`{written}` belongs at the top level"
    return None
