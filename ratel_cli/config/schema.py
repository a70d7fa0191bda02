"""The config of a run: every key with its type, its default and its meaning. The only home of defaults.

The docstring under a key is its help text: `scripts/write_config_docs.py` writes docs/config.md from it. Nothing below
`run` knows these classes; the layers there take plain values.

Invariant: a RunConfig is complete and consistent. Every key has its type, no two keys contradict each other, and a
config that is written (`config.load.to_yaml`) and loaded again is equal to the first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ratel_cli.config.sections import (
    Contradiction,
    DatasetConfig,
    Directory,
    LimitsConfig,
    ModelShape,
    PathOrHubId,
    Section,
    SnapshotConfig,
    StorageConfig,
    contradictions,
    rejection,
)
from ratel_cli.sizes import DtypeName

__all__ = ["DatasetConfig", "LimitsConfig", "ModelShape", "RunConfig", "SnapshotConfig", "StorageConfig"]

_ACTIVATION_POLICIES = ("auto", "keep", "recompute", "swap_all", "static")


def _check_activations(value: object) -> object:
    if isinstance(value, str) and value in _ACTIVATION_POLICIES:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise rejection("must be `auto`, `keep`, `recompute`, `swap_all`, `static` or a fraction from 0 to 1")


def _check_val_set_size(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise rejection("must be a fraction below 1 or a whole number of samples")
    if isinstance(value, float) and not value < 1:
        whole = f"; for {int(value)} samples write {int(value)}" if value.is_integer() else ""
        raise rejection(f"must be a fraction below 1 or a whole number of samples, not {value}{whole}")
    return value


def _check_report_to(value: object) -> object:
    if value in (None, "none"):
        return "none"
    hint = "the metrics of every step are in run/metrics.jsonl in the output directory; send them on from there"
    raise rejection("must be `none`", hint)


def _zero_is_off(value: float | None) -> float | None:
    return value or None


ActivationPolicy = Annotated[
    Literal["auto", "keep", "recompute", "swap_all", "static"] | float, BeforeValidator(_check_activations)
]
FractionOrCount = Annotated[int | float, BeforeValidator(_check_val_set_size)]
ClipNorm = Annotated[float | None, Field(ge=0), AfterValidator(_zero_is_off)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Section):
    """All settings of a run, as `ratel finetune`, `ratel plan` and the other commands read them."""

    base_model: PathOrHubId | None = None
    """The model to train: a directory with config.json and safetensors files, or a Hugging Face hub id. Required."""
    model_shape: ModelShape | None = None
    """For `ratel plan` only, instead of `base_model` and `datasets`: a GPT-type model described by its shape."""
    cost_model: Literal["ratel", "paper"] = "ratel"
    """For `ratel plan` only: how a step is predicted. `ratel`: as for a run. `paper`: with the equations of the Ratel
    paper, with 14 bytes of state per parameter and 34 b s h bytes of activations per layer."""
    random_init: bool = False
    """Draw the weights from the model's own initialiser, with `seed`, instead of reading them. `base_model` then needs
    no safetensors files."""

    datasets: Annotated[tuple[DatasetConfig, ...], Field(strict=False)] = ()
    """What to train on: one path or hub id, or a list of paths or of mappings with `path` and more keys.
    Required."""
    train_on_inputs: bool = False
    """Also train on the tokens of the prompt. By default only the answer counts in the loss."""
    sequence_len: int = Field(default=1024, ge=2)
    """The most tokens in a sequence. Longer samples are truncated, except plain text (`completion`), which is split
    into several samples."""
    sample_packing: bool = True
    """Put several short samples into one sequence, so that fewer tokens are padding. No token attends to another
    sample. A model that cannot separate packed samples gets one sample per sequence, with a notice."""
    shuffle: bool = True
    """Visit the samples in a new order in each epoch. The order is drawn from `seed`."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Sequences that the model computes at once. More of them need more GPU memory, or RAM on the CPU."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches in one step. More of them cost computing time but no further weight or optimizer traffic, because
    weights and states move once per step."""
    num_epochs: float = Field(default=1.0, gt=0)
    """Passes over the training data; a fraction is allowed. Ignored if `max_steps` is set."""
    max_steps: int | None = Field(default=None, ge=1)
    """End the run after this many steps. Default: `num_epochs` decides."""

    learning_rate: float = Field(default=2e-5, ge=0)
    """The peak learning rate, which is reached at the end of the warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """The learning rate after the warm-up. `constant`: it stays at its peak. `linear`, `cosine`: it falls to zero at
    the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly from zero to its peak. If you set it, `warmup_ratio` becomes
    0."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """The length of the warm-up as a fraction of all steps. Set this or `warmup_steps`, not both."""
    optimizer: Literal["adamw"] = "adamw"
    """The optimizer. AdamW is the only one; it updates fp32 master weights with fp32 moments."""
    adam_beta1: Decay = 0.9
    """Decay rate of AdamW's first moment, the running mean of the gradients."""
    adam_beta2: Decay = 0.999
    """Decay rate of AdamW's second moment, the running mean of the squared gradients."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of AdamW's second moment, so that no update divides by zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, as in AdamW. Biases and the weights of norms never decay."""
    max_grad_norm: ClipNorm = 1.0
    """Clip the gradients so that their global norm is at most this. The clipping is exact. 0 or null turns it off."""

    dtype: DtypeName = "bfloat16"
    """The data type that the model computes in. Master weights and moments are always fp32. `float16` uses dynamic loss
    scaling."""
    gradient_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type of gradients on their way to the optimizer. Micro-batches are summed in fp32 first. `auto`: the
    same as `dtype`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """The device that computes. `auto`: the GPU if PyTorch finds one, otherwise the CPU."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """The attention kernel, by its Hugging Face name. If the model does not support it, Ratel uses another one and
    prints a notice."""
    activations: ActivationPolicy = "auto"
    """What happens to the outputs of a layer's operators between forward and backward. `auto`: the plan decides for
    each of them. `keep`: all stay in memory. `swap_all`: all are offloaded, to NVMe if memory is short. `recompute`,
    `static`: only the inputs of layers are offloaded; the rest is recomputed. A number from 0 to 1: this fraction of
    the bytes is offloaded."""
    optimizer_overlap: Literal["optimized", "naive", "separate"] = "optimized"
    """When the optimizer runs. `optimized`: overlapped with backward; one group of parameters is read while another is
    updated and a third is written. `naive`: overlapped with backward, but it reads, updates and writes one after
    another. `separate`: after backward. The bits are the same for all three."""
    deterministic: bool = True
    """Use only kernels that give the same bits every time. `false` allows a faster backward of attention on a GPU."""
    trace: bool = False
    """Write a timeline of every step to run/trace.json in the output directory, for ui.perfetto.dev."""

    storage: StorageConfig = StorageConfig()
    """Where the store with the model's state is, and how it is written."""
    limits: LimitsConfig = LimitsConfig()
    """How much memory the run may use."""

    output_dir: Directory = Path("outputs/run")
    """The directory for the trained model, in the Hugging Face format, and for the run's records in run/. Default:
    outputs/ and the name of the config file."""
    save_steps: int | None = Field(default=None, ge=1)
    """Save a step in the store every N steps, without copying anything. `ratel export` and `--resume` can go back to
    saved steps. Default: no step is saved but the last one."""
    save_total_limit: int = Field(default=1, ge=1)
    """The most saved steps in the store. When there is one more, the oldest is dropped."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate on the held-out samples every N steps, and at the end. Default: only at the end. Needs
    `val_set_size`."""
    val_set_size: FractionOrCount = 0
    """Samples that are held out of training for evaluation: a fraction below 1, or a whole number of samples. 0:
    none."""
    logging_steps: int = Field(default=1, ge=1)
    """Print a line every N steps. run/metrics.jsonl in the output directory always has every step."""
    report_to: Annotated[Literal["none"], BeforeValidator(_check_report_to)] = "none"
    """Accepted for compatibility. `none` is the only value: Ratel never sends data anywhere."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """The seed of everything random: the order of the data, dropout, and the weights if `random_init` is set."""

    def resolved(self, name: str) -> Self:
        """This config with the default paths filled in. `name` is the run's name, from which `output_dir` follows."""
        output_dir = self.output_dir if "output_dir" in self.model_fields_set else Path("outputs") / (name or "run")
        named = output_dir.name not in ("", "..")
        store = output_dir.with_name(output_dir.name + ".store") if named else output_dir / "ratel.store"
        storage = self.storage if self.storage.paths else self.storage.model_copy(update={"paths": (store,)})
        return self.model_copy(update={"output_dir": output_dir, "storage": storage})

    @property
    def resolved_gradient_dtype(self) -> DtypeName:
        """The gradients' data type, with `auto` replaced by the type that it stands for."""
        return self.dtype if self.gradient_dtype == "auto" else self.gradient_dtype

    @property
    def num_saved_generations(self) -> int:
        """How many saved steps the store has space for, in addition to the two generations that a step needs."""
        if self.storage.keep_generations is not None:
            return self.storage.keep_generations
        return self.save_total_limit if self.save_steps is not None else 0

    @model_validator(mode="before")
    @classmethod
    def _steps_before_ratio(cls, data: object) -> object:
        if isinstance(data, dict) and "warmup_steps" in data and "warmup_ratio" not in data:
            return {**data, "warmup_ratio": 0.0}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = _model_contradictions(self) + _run_contradictions(self)
        if found:
            raise contradictions(found)
        return self


def unused_keys(config: RunConfig) -> list[Contradiction]:
    """Keys that the user set and that this run ignores, each with the reason."""
    found = []
    if config.max_steps is not None and config.num_epochs != 1:
        found.append(_unused("num_epochs", f"`max_steps` ({config.max_steps}) decides when the run ends"))
    if config.max_steps is not None and config.warmup_steps > config.max_steps:
        steps = f"`warmup_steps` is {config.warmup_steps}, but `max_steps` is {config.max_steps}"
        message = f"{steps}: the run ends during warm-up"
        found.append(Contradiction(keys=("warmup_steps",), message=message))
    if config.save_steps is None and config.save_total_limit != 1:
        found.append(_unused("save_total_limit", "`save_steps` is not set"))
    if config.eval_steps is not None and not config.val_set_size:
        found.append(_unused("eval_steps", "`val_set_size` is 0"))
    return found


def _unused(key: str, reason: str) -> Contradiction:
    return Contradiction(keys=(key,), message=f"`{key}` is ignored: {reason}")


def _model_contradictions(config: RunConfig) -> list[Contradiction]:
    if config.model_shape is not None:
        if config.base_model is None:
            return []
        message = "`model_shape` and `base_model` are both set"
        return [Contradiction(keys=("model_shape", "base_model"), message=message, hint="remove one of them")]
    found = []
    if config.base_model is None:
        hint = "name a directory or hub id: `base_model: org/name`"
        found.append(Contradiction(keys=("base_model", "model_shape"), message="`base_model` is missing", hint=hint))
    if not config.datasets:
        given = "is empty" if "datasets" in config.model_fields_set else "is missing"
        hint = "name a file, directory or hub id: `datasets: train.jsonl`"
        found.append(Contradiction(keys=("datasets", "model_shape"), message=f"`datasets` {given}", hint=hint))
    return found


def _run_contradictions(config: RunConfig) -> list[Contradiction]:
    found = []
    if config.warmup_steps and config.warmup_ratio:
        message = "`warmup_steps` and `warmup_ratio` are both set"
        found.append(Contradiction(keys=("warmup_ratio", "warmup_steps"), message=message, hint="remove one of them"))
    if config.gradient_dtype == "float16" and config.dtype != "float16":
        message = f"`gradient_dtype: float16` needs `dtype: float16`, which scales the loss; `dtype` is {config.dtype}"
        found.append(Contradiction(keys=("gradient_dtype", "dtype"), message=message))
    if config.save_steps is not None:
        found.extend(_save_contradictions(config))
    return found


def _save_contradictions(config: RunConfig) -> list[Contradiction]:
    if config.storage.durability == "none":
        message = "`save_steps` needs `storage.durability: step`; with `none` the store has no earlier step"
        return [Contradiction(keys=("save_steps", "storage"), message=message)]
    keep = config.storage.keep_generations
    if keep is not None and keep < config.save_total_limit:
        message = f"`save_total_limit` is {config.save_total_limit}, but `storage.keep_generations` is {keep}"
        hint = "increase `storage.keep_generations`"
        return [Contradiction(keys=("save_total_limit", "storage"), message=message, hint=hint)]
    return []
