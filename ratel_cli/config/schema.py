"""The config of a run: every key, its type, its default and what it means. The only home of defaults.

Built by `config.load` from a person's YAML and arguments; read by the commands, which pass plain
values on: nothing below `run` knows this class. `scripts/write_config_docs.py` writes docs/config.md from it.

Invariant: a RunConfig is whole. Every key is of its type, no two keys contradict each other, and
dumping one (`to_yaml`) and loading it again gives an equal one.
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
    refuse,
    refuse_together,
)
from ratel_cli.sizes import DtypeName

__all__ = ["DatasetConfig", "LimitsConfig", "ModelShape", "RunConfig", "SnapshotConfig", "StorageConfig"]

_ACTIVATION_POLICIES = ("auto", "keep", "recompute", "swap_all", "static")


def _check_activations(value: object) -> object:
    if isinstance(value, str) and value in _ACTIVATION_POLICIES:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise refuse("must be `auto`, `keep`, `recompute`, `swap_all`, `static` or a fraction from 0 to 1")


def _check_val_set_size(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise refuse("must be a fraction below 1 or a whole number of samples")
    if isinstance(value, float) and not value < 1:
        whole = f"; for {int(value)} samples write {int(value)}" if value.is_integer() else ""
        raise refuse(f"must be a fraction below 1 or a whole number of samples, not {value}{whole}")
    return value


def _check_report_to(value: object) -> object:
    if value in (None, "none"):
        return "none"
    raise refuse("can only be `none`", "every step is in run/metrics.jsonl of the output directory; send it from there")


def _zero_is_off(value: float | None) -> float | None:
    return value or None


Activations = Annotated[
    Literal["auto", "keep", "recompute", "swap_all", "static"] | float, BeforeValidator(_check_activations)
]
FractionOrCount = Annotated[int | float, BeforeValidator(_check_val_set_size)]
ClipNorm = Annotated[float | None, Field(ge=0), AfterValidator(_zero_is_off)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Section):
    """What `ratel finetune` and `ratel plan` are asked to do."""

    base_model: PathOrHubId | None = None
    """The model to train: a directory with config.json and safetensors files, or a hub id. Required."""
    model_shape: ModelShape | None = None
    """For `ratel plan` only, instead of `base_model`: a GPT-type model given by its shape."""
    cost_model: Literal["ratel", "paper"] = "ratel"
    """For `ratel plan` only. `ratel` plans what a run does. `paper` uses the equations of the Ratel paper: 14 bytes of
    state per parameter and 34 b s h bytes of activations per layer."""
    random_init: bool = False
    """Draw the initial weights from the model's initialiser, seeded by `seed`, instead of reading them from files."""

    datasets: Annotated[tuple[DatasetConfig, ...], Field(strict=False)] = ()
    """The training data: a path, or a list of paths and of mappings with `path` and the other keys of a dataset.
    Required."""
    train_on_inputs: bool = False
    """Learn the tokens of the prompt too, not only those of the answer."""
    sequence_len: int = Field(default=1024, ge=2)
    """Tokens in a row. A longer plain text is split; any other longer sample is cut."""
    sample_packing: bool = True
    """Put several samples into one row. No token attends to another sample."""
    shuffle: bool = True
    """Visit the data in a new order in each epoch, drawn from `seed`."""

    micro_batch_size: int = Field(default=1, ge=1)
    """Rows that pass through a block at once. More rows take more device memory."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Micro-batches in a step. More of them take more time and little memory: weights move once per step, however many
    micro-batches there are."""
    num_epochs: float = Field(default=1.0, gt=0)
    """Passes over the data. Ignored if `max_steps` is set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Steps in the run. Overrides `num_epochs`."""

    learning_rate: float = Field(default=2e-5, ge=0)
    """The learning rate after warm-up."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """The learning rate after warm-up: `constant`, or falling to zero at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly from zero. Setting it sets `warmup_ratio` to 0."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """The same as `warmup_steps`, as a fraction of all steps."""
    optimizer: Literal["adamw"] = "adamw"
    """AdamW on fp32 master weights and fp32 moments."""
    adam_beta1: Decay = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Decay = 0.999
    """Decay rate of the second moment."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay. It is never applied to norms and biases."""
    max_grad_norm: ClipNorm = 1.0
    """Clip the global gradient norm to this value, exactly. 0 or null turns clipping off."""

    dtype: DtypeName = "bfloat16"
    """The precision in which the model computes. Master weights and moments are always fp32."""
    gradient_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The precision to which gradients are rounded after the micro-batches are summed in fp32. `auto` is the same as
    `dtype`."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute. `auto` is `cuda` if there is a CUDA device, else `cpu`."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """The attention kernel, by its Hugging Face name. If the model does not support it, another one is used, with a
    notice."""
    activations: Activations = "auto"
    """What happens to the outputs of a layer's operators between forward and backward. `auto`: the plan decides for
    each of them. `keep`: all stay in memory. `swap_all`: all are offloaded, to NVMe where memory is short. `recompute`
    and `static`: only the inputs of layers are offloaded; everything else is recomputed. A number from 0 to 1: this
    fraction of their bytes is offloaded."""
    optimizer_overlap: Literal["optimized", "naive", "separate"] = "optimized"
    """When the optimizer runs. `optimized`: overlapped with backward; one group of parameters is read while another is
    updated and a third is written. `naive`: overlapped with backward, one transfer after another. `separate`: after
    backward. The bits are the same for all three."""
    deterministic: bool = True
    """Use only kernels that give the same bits every time. `false` allows a faster backward of attention on a GPU."""
    trace: bool = False
    """Write `run/trace.json`, a timeline of every step for Perfetto."""

    storage: StorageConfig = StorageConfig()
    """Where the training state lies, and how it is protected."""
    limits: LimitsConfig = LimitsConfig()
    """How much memory the run may use."""

    output_dir: Directory = Path("outputs/run")
    """The Hugging Face directory that the run writes. Default: `outputs/` and the name of the config file."""
    save_steps: int | None = Field(default=None, ge=1)
    """Save every N steps, by pinning the step in the store. Default: no step is saved before the end."""
    save_total_limit: int = Field(default=1, ge=1)
    """Number of saved steps in the store. The oldest one is dropped first."""
    eval_steps: int | None = Field(default=None, ge=1)
    """Evaluate every N steps. Default: once, at the end."""
    val_set_size: FractionOrCount = 0
    """Samples held out for evaluation: a fraction below 1, or a number of samples."""
    logging_steps: int = Field(default=1, ge=1)
    """Print every N-th step. `run/metrics.jsonl` has every step."""
    report_to: Annotated[Literal["none"], BeforeValidator(_check_report_to)] = "none"
    """Ratel sends nothing anywhere, so `none` is the only choice."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Seed of the drawn weights, of the order of the data and of dropout."""

    def resolved(self, name: str) -> Self:
        """The same with the paths filled in that depend on others; ``name`` is the run's."""
        output_dir = self.output_dir if "output_dir" in self.model_fields_set else Path("outputs") / (name or "run")
        named = output_dir.name not in ("", "..")
        store = output_dir.with_name(output_dir.name + ".store") if named else output_dir / "ratel.store"
        storage = self.storage if self.storage.paths else self.storage.model_copy(update={"paths": (store,)})
        return self.model_copy(update={"output_dir": output_dir, "storage": storage})

    @property
    def resolved_gradient_dtype(self) -> DtypeName:
        """What `auto` stands for."""
        return self.dtype if self.gradient_dtype == "auto" else self.gradient_dtype

    @property
    def num_saved_generations(self) -> int:
        """Generations the store has room for, beside the two that a step needs."""
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
            raise refuse_together(found)
        return self


def unused_keys(config: RunConfig) -> list[Contradiction]:
    """Keys that were set to something and that this run does not look at, each with the reason."""
    found = []
    if config.max_steps is not None and config.num_epochs != 1:
        found.append(_unused("num_epochs", f"`max_steps` ({config.max_steps}) says when the run ends"))
    if config.max_steps is not None and config.warmup_steps > config.max_steps:
        message = f"`warmup_steps` is {config.warmup_steps}, but the run ends after {config.max_steps} steps"
        found.append(Contradiction(keys=("warmup_steps",), message=message))
    if config.save_steps is None and config.save_total_limit != 1:
        found.append(_unused("save_total_limit", "`save_steps` is not set"))
    if config.eval_steps is not None and not config.val_set_size:
        found.append(_unused("eval_steps", "`val_set_size` is 0"))
    return found


def _unused(key: str, reason: str) -> Contradiction:
    return Contradiction(keys=(key,), message=f"`{key}` is not used: {reason}")


def _model_contradictions(config: RunConfig) -> list[Contradiction]:
    if config.model_shape is not None:
        if config.base_model is None:
            return []
        message = "`model_shape` and `base_model` are both given"
        return [Contradiction(keys=("model_shape", "base_model"), message=message, hint="keep one of them")]
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
        message = "`warmup_steps` and `warmup_ratio` are both given"
        found.append(Contradiction(keys=("warmup_ratio", "warmup_steps"), message=message, hint="keep one of them"))
    if config.gradient_dtype == "float16" and config.dtype != "float16":
        message = f"`gradient_dtype: float16` needs `dtype: float16`, not {config.dtype}: only there the loss is scaled"
        found.append(Contradiction(keys=("gradient_dtype", "dtype"), message=message))
    if config.save_steps is not None:
        found.extend(_save_contradictions(config))
    return found


def _save_contradictions(config: RunConfig) -> list[Contradiction]:
    if config.storage.durability == "none":
        message = "`save_steps` needs `storage.durability: step`; written in place there is nothing to go back to"
        return [Contradiction(keys=("save_steps", "storage"), message=message)]
    keep = config.storage.keep_generations
    if keep is not None and keep < config.save_total_limit:
        message = f"`save_total_limit` is {config.save_total_limit}, but `storage.keep_generations` has room for {keep}"
        hint = "raise `storage.keep_generations`"
        return [Contradiction(keys=("save_total_limit", "storage"), message=message, hint=hint)]
    return []
