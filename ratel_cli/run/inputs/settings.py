"""What a config asks of the store and the plan, in the terms of `planning`: the same for a run and for `ratel plan`.

Invariant: this file imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ratel_cli.config.keys.key_groups import OF_ADAPTER, OF_PREFERENCES, OF_QUANTISATION, OF_RATES, OF_VOCABULARY
from ratel_cli.config.keys.optimizers import has_default_options, resolved_options
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.hardware.host import memory_bytes
from ratel_cli.json_fields import hash_of
from ratel_cli.model.files.denoiser_config import read_denoiser_config
from ratel_cli.model.values.adapter_settings import ALL_LINEAR, AdapterSettings
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.head_chunk import CHUNK_BYTES, with_chunk
from ratel_cli.planning.search.split import divisors
from ratel_cli.schedule.rules import RuleChoice, rules_of
from ratel_cli.sizes import LOGITS_CHUNK_BYTES, QuantisedForm, Task
from ratel_cli.store.base_files import BaseFiles, list_bytes_of
from ratel_cli.store.layout import WHOLE, Geometry, RankSlice, StoredBlock
from ratel_cli.store.open import stored_identity
from ratel_cli.training.best import BestRule
from ratel_cli.training.wear_limit import WearLimit
from ratel_cli.units import format_bytes, format_count

DECIDES_THE_BITS: Final = (
    "train_on_inputs", "sequence_len", "excess_length_strategy", "sample_packing", "shuffle", "micro_batch_size",
    "gradient_accumulation_steps", "learning_rate", "lr_scheduler", "lr_scheduler_kwargs", "warmup_steps",
    "warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm", "dtype",
    "gradient_dtype", "attn_implementation", "head_chunk", "deterministic", "seed", "val_set_size", "mlm_probability",
)  # fmt: skip
"""Keys that must be the same when a run resumes, as those of `CHOOSES_BITS` below; all other keys may change. A new key
belongs there: one more here would change the hash in every store's identity."""
CHOOSES_RULES: Final = ("optimizer", "optim_args", "bf16_master")
CHOOSES_BITS: Final = (
    "label_smoothing_factor", "neftune_noise_alpha", "use_dft_loss", "rl", *OF_PREFERENCES, *OF_RATES, *CHOOSES_RULES,
    *OF_VOCABULARY,
)  # fmt: skip
"""Keys that must be the same when a run resumes, too; new ones that change a bit belong here. Those at their default
are no part of the hash: so it stays that of older stores."""
CHOOSES_PARAMETERS: Final = (
    "unfrozen_parameters", "frozen_parameters", "adapter", *OF_ADAPTER, *OF_QUANTISATION, *OF_VOCABULARY,
)  # fmt: skip
"""Keys that decide what a model's parameters are, and what is trained of them."""
DECIDES_THE_STATE: Final = (
    "base_model", "revision_of_model", "random_init", "base_storage", *CHOOSES_PARAMETERS, *OF_RATES, *CHOOSES_RULES,
    "dtype",
)  # fmt: skip
"""Keys that decide what a store is made of: they must also be those of a run that a new one starts from."""
OF_TEXT: Final = (
    "train_on_inputs", "sequence_len", "excess_length_strategy", "sample_packing", "mlm_probability", "head_chunk",
    "attn_implementation",
)  # fmt: skip
"""Keys of `DECIDES_THE_BITS` that count for text alone."""
DECIDES_THE_LENGTH: Final = ("num_epochs", "max_steps")
"""Keys that may change when a run resumes, and decide the bits of the steps that follow."""

_LEAST_OF_ADAPTERS = 1e-4
"""The least learning rate that is usual for adapters."""
_LARGE_MODEL = 500_000_000
"""Parameters. Smaller models are trained whole at such rates, too."""


def adapter_of(config: RunConfig, task: Task) -> AdapterSettings:
    """The adapter that the config asks for, the same however it is written."""
    takes_all = config.lora_target_linear or not (config.lora_target_modules or config.lora_target_parameters)
    named = config.lora_target_modules
    names = () if isinstance(named, str) else tuple(sorted(named))
    return AdapterSettings(
        rank=config.lora_r,
        alpha=config.lora_r if config.lora_alpha is None else config.lora_alpha,
        dropout=config.lora_dropout if config.has_dropout else 0.0,
        target_modules=ALL_LINEAR if takes_all else names or named,
        target_parameters=tuple(sorted(config.lora_target_parameters)),
        layers=tuple(sorted(config.lora_layers_to_transform)),
        scales_by_root=config.peft_use_rslora,
        has_magnitudes=config.peft_use_dora,
        saved_modules=tuple(sorted(config.lora_modules_to_save)),
        ties_saved=config.peft_ensure_weight_tying,
        initialisation=config.peft_init_lora_weights or True,
        also_named=names if takes_all else (),
        task=task,
    )


def quantised_form(config: RunConfig) -> QuantisedForm | None:
    """How the config quantises the model beside an adapter; None if it does not."""
    if config.load_in_8bit:
        return "int8"
    if config.load_in_4bit:
        return "nf4 double" if config.bnb_4bit_use_double_quant else "nf4"
    return None


def settings_hash(config: RunConfig) -> str:
    """The part of a store's identity that says which settings its run has."""
    others = (key for key in CHOOSES_BITS if getattr(config, key) != RunConfig.model_fields[key].default)
    settings = config.model_dump(mode="json", include={*DECIDES_THE_BITS, *others})
    if settings.pop("optim_args", None) is not None and not has_default_options(config.optimizer, config.optim_args):
        settings["optim_args"] = resolved_options(config.optimizer, config.optim_args)  # however they are written
    form = quantised_form(config)
    if form is not None:  # two forms can take the same bytes, and then no block tells them apart
        settings["quantised_form"] = form
    return hash_of(settings)


def rules_in(config: RunConfig) -> RuleChoice:
    """Which rule each trained parameter of a run has."""
    options = resolved_options(config.optimizer, config.optim_args)
    has_momentum = bool(options.get("momentum"))
    return rules_of(config.optimizer, has_momentum=has_momentum, bf16_master=config.bf16_master)


def as_recorded(config: RunConfig) -> RunConfig:
    """The config with the split, and the chunks of the head, that its store was made with.

    The config as it is if it names both, or if there is no store of a run with these settings.
    """
    is_planned = config.split is None or config.is_chunk_planned
    identity = stored_identity(config.storage.paths) if is_planned else None
    if identity is None:
        return config
    splits = (config,) if config.split else map(config.split_by, divisors(config.sequences_per_step))
    for split in splits:
        for each in map(split.chunked_by, CHUNK_BYTES) if config.is_chunk_planned else (split,):
            if identity.config_hash == settings_hash(each):
                return each
    return config


def workload_of(config: RunConfig) -> Workload:
    """The tokens of a full step, before the model is built. What the head does at once depends on it too: see
    `chunked_workload_of`. Raises BadInput if `base_model` is no directory with the config of a denoiser that needs it.
    """
    if config.task != "denoising":
        return _workload(config, config.sequence_len)
    assert config.base_model is not None
    return _workload(config, read_denoiser_config(Path(config.base_model).expanduser()).sample_tokens)


def _workload(config: RunConfig, sequence_len: int) -> Workload:
    size, number = config.known_split
    rows = size * config.rows_per_sequence
    return Workload(micro_batch_size=rows, num_micro_batches=number, sequence_len=sequence_len)


def chunked_workload_of(config: RunConfig, spec: ModelSpec) -> Workload:
    """The tokens of a full step, and of a chunk of the head; of one of 64 MiB if the plan has still to choose it."""
    chunk_bytes = LOGITS_CHUNK_BYTES if config.head_chunk == "auto" else config.head_chunk
    return with_chunk(spec, _workload(config, spec.sample_tokens or config.sequence_len), chunk_bytes)


def decisions_of(config: RunConfig, *, host_limit_bytes: int) -> Decisions:
    """What the config decides about the plan; the planner decides the rest."""
    slots = num_slots(config)
    return Decisions(
        holds_gradients=slots == 1 or config.max_grad_norm is not None,
        num_slots=slots,
        host_limit_bytes=host_limit_bytes,
        device_limit_bytes=config.limits.gpu_memory,
        activations=config.activations,
        overlap=config.optimizer_overlap,
        wear=config.resolved_wear,
    )


def num_slots(config: RunConfig) -> int:
    """Slots of the config's store: the number of generations that it has space for."""
    if config.storage.durability == "none":
        return 1
    # A generation that is being copied to the snapshot needs its slot until the copy is done.
    return 2 + config.num_saved_generations + (config.storage.snapshot is not None)


def warn_of_host_limit(config: RunConfig, log: RunLog) -> None:
    """Warn if `limits.host_memory` is more than this machine has. The plan keeps to the limit all the same."""
    limit_bytes, total_bytes = config.limits.host_memory, memory_bytes()
    if limit_bytes is not None and limit_bytes > total_bytes:
        limit, total = format_bytes(limit_bytes), format_bytes(total_bytes)
        log.warn(f"limits.host_memory is {limit}, but this machine has {total} of RAM: a run may run out of memory")


def warn_of_learning_rate(config: RunConfig, spec: ModelSpec, log: RunLog) -> None:
    """Warn if all weights of a large model would be trained at the learning rate of an adapter."""
    is_great = config.learning_rate >= _LEAST_OF_ADAPTERS and spec.num_trained >= _LARGE_MODEL
    if config.adapter is None and is_great and not config.random_init:
        log.warn(
            f"`learning_rate` is {config.learning_rate:g}, which suits an adapter; "
            f"{format_count(spec.num_trained)} parameters are usually trained at 5e-6 to 5e-5"
        )


def best_rule(config: RunConfig) -> BestRule | None:
    """How steps are compared by their evaluations; None if nothing follows from it."""
    if not config.evaluates_steps or not (config.saves_best or config.early_stopping_patience):
        return None
    return BestRule(
        metric=config.metric_for_best_model,
        is_greater_better=config.is_greater_better,
        patience=config.early_stopping_patience,
        threshold=config.early_stopping_threshold,
        saves_best=config.saves_best,
    )


def max_bytes_written(config: RunConfig, *, num_sharing: int = 1) -> int | None:
    """What each of `num_sharing` ranks may write to drives that they share; None if the config sets no limit."""
    max_tb_written = config.storage.max_tb_written
    return None if max_tb_written is None else int(max_tb_written * 1e12) // num_sharing


def wear_limit(
    config: RunConfig,
    blocks: tuple[StoredBlock, ...],
    *,
    shares: tuple[int, ...],
    first_step: int,
    num_sharing: int = 1,
) -> WearLimit | None:
    """The config's limit on what is written to a store of these blocks; None if it sets none.

    `shares` are those of `storage.paths`, `first_step` is the step that the store is made with. So many ranks as
    `num_sharing` write to the drives.
    """
    max_bytes = max_bytes_written(config, num_sharing=num_sharing)
    if max_bytes is None:
        return None
    geometry = new_geometry(config, blocks, shares=shares)
    return WearLimit(
        max_bytes=max_bytes,
        store_bytes=geometry.made_bytes,
        slot_bytes=geometry.slot.num_bytes,
        first_step=first_step,
        num_sharing=num_sharing,
    )


def new_geometry(
    config: RunConfig,
    blocks: tuple[StoredBlock, ...],
    *,
    shares: tuple[int, ...],
    rank_slice: RankSlice = WHOLE,
    base_files: BaseFiles | None = None,
) -> Geometry:
    """The geometry of the store that the config asks for. `shares`: of `storage.paths`. `base_files`: see
    `Store.create`; what is only planned does without."""
    return Geometry(
        blocks=blocks,
        num_slots=num_slots(config),
        shares=shares,
        rank_slice=rank_slice,
        list_bytes=list_bytes_of(base_files),
    )
