"""The config of a run: every key with its type, its default and its meaning. The only home of defaults.

The docstring under a key is its help text, and what the key asks of others stands in its type (`relation`):
`scripts/write_config_docs.py` writes docs/config.md from both. Nothing below `run` knows these classes; the layers
there take plain values.

Invariant: a RunConfig is complete and consistent. Every key has its type, no two keys contradict each other, and a
config that is written (`config.load.to_yaml`) and loaded again is equal to the first.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from ratel_cli.config.keys.base import Contradiction, Section, contradictions, without_defaults
from ratel_cli.config.keys.optimizers import OptimizerChoice, OptimizerConfig, optimizer_contradictions
from ratel_cli.config.keys.relation import (
    ANY_TEXT,
    Beyond,
    broken,
    doubt,
    excludes,
    has,
    ignored_with,
    needs,
    only_if,
    unless,
)
from ratel_cli.config.keys.scheduler import SchedulerChoice, SchedulerConfig, scheduler_contradictions
from ratel_cli.config.keys.sections import (
    DatasetConfig,
    Directory,
    LimitsConfig,
    ModelShape,
    Number,
    PathOrHubId,
    SizeOrAuto,
    SnapshotConfig,
    StorageConfig,
    Whole,
)
from ratel_cli.config.keys.values import (
    ActivationPolicy,
    AdapterInitialisation,
    ChatTemplate,
    ClipNorm,
    CountOrAuto,
    Decay,
    FractionOrCount,
    HubId,
    Interval,
    MetricOfBest,
    NoiseAlpha,
    TimesPerEpoch,
    TrackerNames,
    TrainOnInputs,
    WarmupSteps,
)
from ratel_cli.dataset_keys import KEYS_OF_TEXT, types_that_read, unread_for_type
from ratel_cli.sizes import SPLIT_KEYS, TASKS, DtypeName, NewTokensInit, Task
from ratel_cli.units import counted

__all__ = [
    "DatasetConfig",
    "LimitsConfig",
    "ModelShape",
    "OptimizerConfig",
    "RunConfig",
    "SchedulerConfig",
    "SnapshotConfig",
    "StorageConfig",
]

OWN_DATA: Final = "own data"
"""The context in which a config is validated that names no data, because the caller brings it."""


NewTokens = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
SpecialToken = Literal["bos_token", "eos_token", "pad_token", "unk_token", "mask_token", "cls_token", "sep_token"]


_WITH_ADAPTER = (has("adapter"),)
_WITH_EVALUATION = (has("val_set_size"), has("test_datasets"))
_WITH_EVALUATED_STEPS = (_WITH_EVALUATION, (has("eval_steps"), has("evals_per_epoch")))
"""Guards of relations."""
_LATENTS = has("datasets.type", "latents")
_OF_ADAPTER = only_if("adapter")
_OF_PREFERENCES = only_if("rl")
_OF_SIMPO = only_if(has("rl", "simpo"))
_OF_KTO = only_if(has("rl", "kto"))
_OF_ADAM = only_if(has("optimizer", "adamw", "adamw_8bit", "muon"))
_OF_ADAM_AND_LION = only_if(has("optimizer", "adamw", "adamw_8bit", "lion", "muon"))
_OF_TOKENS = ignored_with(_LATENTS, why="latents are not tokens")
_OF_EMBEDDING = only_if(
    "lora_modules_to_save", when=(_WITH_ADAPTER,), why="embedding and head are frozen beside an adapter"
)
_OF_EVALUATION = only_if(*_WITH_EVALUATION, why="there is no data to evaluate on")
_OF_EVALUATED_STEPS = only_if(
    "eval_steps", "evals_per_epoch", when=(_WITH_EVALUATION,), why="only the last step is evaluated"
)
_IF_BEST_COUNTS = only_if("load_best_model_at_end", "early_stopping_patience")
_NEEDS_ADAPTER = needs("adapter", why="quantised weights cannot be trained", hint="add `adapter: lora`, or remove it")
_NOT_BESIDE_ADAPTER = excludes("adapter", why="with an adapter, all of the model is frozen")
_NOT_OF_SHAPE = excludes(
    "model_shape", why="a shape has no modules or parameters to name", hint="name a `base_model` instead"
)
_NOT_OF_PREFERENCES = excludes("rl", why="each is a loss of its own")
_NEEDS_DURABILITY = needs(has("storage.durability", "step"), why="with `none` the store has no earlier step")
_NEITHER_TEXT = ("alpaca", "tokens", "mlm", "classification", "seq2seq", "latents")
_IN_PLACE_HINT = "remove base_storage; it is for frozen weights: those beside an `adapter`, or `frozen_parameters`"
_NO_TEMPLATE = "mistral-common has no chat template"
_NOT_OF_MISTRAL = excludes("tokenizer_use_mistral_common", why="mistral-common does not change its special tokens")


class RunConfig(Section):
    """All settings of a run, as `ratel finetune`, `ratel plan` and the other commands read them."""

    base_model: PathOrHubId | None = None
    """The model to train: a directory with config.json and safetensors files, or a Hugging Face hub id. Required."""
    revision_of_model: Annotated[str, Field(min_length=1)] | None = None
    """The branch, tag or commit of a hub model. Default: its main branch."""
    model_shape: Annotated[ModelShape | None, excludes("base_model"), excludes("rl", why="a shape has no data")] = None
    """For `ratel plan` only, instead of `base_model` and `datasets`: a GPT-type model described by its shape."""
    cost_model: Literal["ratel", "paper"] = "ratel"
    """For `ratel plan` only: how a step is predicted. `ratel`: as for a run. `paper`: with the equations of the Ratel
    paper, with 14 bytes of state per parameter and 34 b s h bytes of activations per layer."""
    random_init: Annotated[bool, excludes("adapter", why="an adapter needs a trained model")] = False
    """Draw the weights from the model's own initialiser, with `seed`, instead of reading them. `base_model` then needs
    no safetensors files."""
    base_storage: Annotated[
        Literal["store", "in_place"],
        excludes("random_init", of=("in_place",), why="no file has weights that are drawn", hint=_IN_PLACE_HINT),
        excludes("model_shape", of=("in_place",), why="a shape has no files", hint=_IN_PLACE_HINT),
        excludes(
            _LATENTS, of=("in_place",), why="all weights of a diffusion transformer are trained", hint=_IN_PLACE_HINT
        ),
        needs(
            "adapter",
            "unfrozen_parameters",
            "frozen_parameters",
            of=("in_place",),
            why="each step writes the weights that are trained",
            hint=_IN_PLACE_HINT,
        ),
    ] = "store"
    """Where frozen weights are read from, such as the base model of an adapter. `store`: they are copied into
    `storage.paths` once. `in_place`: each step reads them from the base model's own files, where these have them in
    `dtype`. That takes no disk space, writes nothing, and is as fast as the drive with these files. The files must not
    change: each read is compared with a checksum."""
    unfrozen_parameters: Annotated[tuple[str, ...], Field(strict=False), _NOT_BESIDE_ADAPTER, _NOT_OF_SHAPE] = ()
    """Train only the parameters whose names match one of these regular expressions from their beginning, as in axolotl:
    `lm_head`, or `model.layers.2[0-9]+.mlp` (a dot is a dot). The others are frozen: they have no gradient and no
    state, no step writes them, and backward ends where nothing below is trained. Default: all are trained."""
    frozen_parameters: Annotated[tuple[str, ...], Field(strict=False), _NOT_BESIDE_ADAPTER, _NOT_OF_SHAPE] = ()
    """Freeze the parameters whose names match one of these, also among `unfrozen_parameters`. Default: none."""
    adapter: Annotated[
        Literal["lora"] | None,
        _NOT_OF_SHAPE,
        excludes(
            _LATENTS,
            why="it is for language models",
            hint="remove it; `unfrozen_parameters` trains a part of any model",
        ),
        excludes(
            has("datasets.type", "classification"),
            why="the new head of a classifier must be trained",
            hint="remove it; `unfrozen_parameters` trains a part of any model",
        ),
    ] = None
    """Train an adapter beside the frozen model, by PEFT's modules: `lora`. What is exported is then the adapter, in
    PEFT's format. Default: the model's own weights are trained."""
    lora_r: Annotated[int, _OF_ADAPTER] = Field(default=16, ge=1, le=1 << 16)
    """The rank of the adapter's matrices."""
    lora_alpha: Annotated[Whole | None, _OF_ADAPTER] = Field(default=None, ge=1)
    """The adapter's output is multiplied by `lora_alpha / lora_r`. Default: `lora_r`."""
    lora_dropout: Annotated[float, _OF_ADAPTER] = Field(default=0.0, ge=0, lt=1)
    """The share of an adapter's input that dropout sets to zero."""
    lora_target_modules: Annotated[
        Annotated[tuple[str, ...], Field(strict=False)] | str,
        _OF_ADAPTER,
        excludes(
            "lora_layers_to_transform",
            of=(ANY_TEXT,),
            when=(_WITH_ADAPTER,),
            why="a regular expression names layers itself",
            hint="put the layers into the expression, or write a list of names",
        ),
    ] = ()
    """The linear layers that get an adapter, by the ends of their names: `[q_proj, v_proj]`. One string is a regular
    expression that whole names match, as in PEFT: `.*layers.[0-9]+.self_attn.(q|v)_proj`. Default: all of them but the
    head; none if `lora_target_parameters` is set."""
    lora_target_linear: Annotated[bool, _OF_ADAPTER] = False
    """All linear layers get an adapter, whatever `lora_target_modules` and `lora_target_parameters` name."""
    lora_target_parameters: Annotated[
        tuple[str, ...],
        Field(strict=False),
        _OF_ADAPTER,
        excludes(
            "quantize_moe_experts",
            why="PEFT cannot adapt quantised experts",
            hint="remove one of them; `lora_target_modules` adapts all else",
        ),
    ] = ()
    """Stacked expert matrices that also get an adapter, by the ends of their names: `[mlp.experts.gate_up_proj]`. PEFT
    recomputes each stack in forward and backward, which takes memory of its size. In some models `lora_target_modules`
    can name them."""
    lora_layers_to_transform: Annotated[
        tuple[Annotated[Whole, Field(ge=0)], ...], Field(strict=False), _OF_ADAPTER
    ] = ()
    """The layers that get an adapter, counted from 0. Default: all."""
    peft_use_rslora: Annotated[bool, _OF_ADAPTER] = False
    """Multiply by `lora_alpha / sqrt(lora_r)` instead (rank-stabilised LoRA)."""
    peft_use_dora: Annotated[
        bool,
        _OF_ADAPTER,
        excludes("load_in_4bit", "load_in_8bit", why="DoRA beside a quantised model is not supported"),
    ] = False
    """Train DoRA: the magnitude of each output's weights separately, and their direction by the adapter. Each matrix
    is then recomputed in forward and backward, which takes time and memory."""
    lora_modules_to_save: Annotated[tuple[str, ...], Field(strict=False), _OF_ADAPTER] = ()
    """Modules of the model that are trained whole beside the adapter and exported with it, by the ends of their names:
    `[embed_tokens, lm_head]`. Default: none."""
    peft_ensure_weight_tying: Annotated[bool, _OF_ADAPTER] = False
    """Let `lora_modules_to_save` name an embedding that the head shares: the one matrix of both is trained, and PEFT
    loads it so. Without it that is an error, since PEFT trains two copies."""
    peft_init_lora_weights: Annotated[AdapterInitialisation, _OF_ADAPTER] = True
    """How the adapter's weights are initialised, with `seed`. `true`: the second matrix is zero, so the model is as
    before. `gaussian`: the same, with a normal distribution in the first one. `false`: as `true`, which it is in
    axolotl."""
    load_in_4bit: Annotated[bool, _NEEDS_ADAPTER] = False
    """QLoRA: quantise the linear layers of the frozen model, except the head, to NF4, as bitsandbytes does. A weight
    then takes about half a byte, in the store, in memory and on the link. The layers compute in `dtype`."""
    load_in_8bit: Annotated[bool, _NEEDS_ADAPTER, excludes("load_in_4bit")] = False
    """Quantise these layers to 8 bit instead, with a scale for each row, as in LLM.int8(). Activations are not
    quantised."""
    bnb_4bit_use_double_quant: Annotated[bool, only_if("load_in_4bit")] = True
    """Also quantise the scales of NF4, which saves 0.05 bytes for each weight."""
    quantize_moe_experts: Annotated[
        bool,
        _NEEDS_ADAPTER,
        needs("load_in_4bit", "load_in_8bit", why="they say how", hint="add one of them, or remove it"),
    ] = False
    """With `load_in_4bit` or `load_in_8bit`: also quantise stacks of experts, which are most of the weights of a
    mixture of experts. The experts of a layer are dequantised together while it computes. Experts then get no
    adapter."""

    datasets: Annotated[tuple[DatasetConfig, ...], Field(strict=False)] = ()
    """What to train on: one path or hub id, or a list of paths or of mappings with `path` and more keys.
    Required."""
    test_datasets: Annotated[tuple[DatasetConfig, ...], Field(strict=False)] = ()
    """What to evaluate on, written like `datasets`, instead of samples held out by `val_set_size`. Default: none."""
    streaming: Annotated[
        bool,
        needs("max_steps", why="the end of a stream is not known"),
        excludes("rl", why="preference data is read whole before step 1"),
        excludes(_LATENTS, why="latents are read from their files", hint="remove it"),
    ] = False
    """Read only as many rows as `max_steps` needs, in order, and shuffle them in windows of 16384 samples. Use it for
    datasets that are larger than the drives, or that need not be downloaded whole. Several datasets are interleaved in
    proportion to their weights."""
    chat_template: Annotated[
        ChatTemplate | None,
        needs("chat_template_jinja", of=("jinja",), hint="write `chat_template_jinja: FILE`"),
        excludes("chat_template_jinja", but=("jinja",), why="they name two templates"),
        excludes("tokenizer_use_mistral_common", but=("jinja", "tokenizer_default*"), why=_NO_TEMPLATE),
    ] = None
    """The chat template for conversations: `chatml` or `llama3`; `jinja`: the one in `chat_template_jinja`;
    `tokenizer_default`: the tokenizer's own. Under another name of axolotl, such as `qwen3`, the tokenizer's own is
    used, with a notice. The exported tokenizer has it too. Default: the tokenizer's own."""
    chat_template_jinja: Annotated[
        Annotated[str, Field(min_length=1)] | None, excludes("tokenizer_use_mistral_common", why=_NO_TEMPLATE)
    ] = None
    """A chat template in Jinja, or the path of a file with one."""
    special_tokens: Annotated[
        dict[SpecialToken, Annotated[str, Field(min_length=1)]] | None,
        _NOT_OF_MISTRAL,
    ] = None
    """Other special tokens than the tokenizer's own, such as `{eos_token: "<|im_end|>"}`. `bos_token` and `eos_token`
    must be in its vocabulary; others that are not are ignored, with a notice. The exported tokenizer has them too."""
    eot_tokens: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(strict=False),
        _NOT_OF_MISTRAL,
    ] = ()
    """More tokens that end a turn, besides the EOS token and those in `eos_token_id` of generation_config.json and
    config.json. A turn has loss up to the first of them, and the export's generation_config.json lists those that
    answers end with. Each must be in the vocabulary. Default: none."""
    tokens: Annotated[NewTokens, _NOT_OF_MISTRAL] = ()
    """Tokens to add to the vocabulary, such as `["<think>", "</think>"]`. The tokenizer finds each of them in a text
    before anything else; those that are named in `special_tokens`, too, come first. Embedding and head get rows for
    them, if they have none, and the export has the grown model and tokenizer. An adapter trains
    the rows of these tokens alone (`trainable_token_indices` of PEFT), unless `lora_modules_to_save` names the whole
    matrices. Default: none."""
    new_special_tokens: Annotated[NewTokens, _NOT_OF_MISTRAL] = ()
    """The same for special tokens, which are left out of generated text. They come last. Default: none."""
    added_tokens_overrides: Annotated[
        dict[Annotated[int, Field(ge=0, strict=False)], Annotated[str, Field(min_length=1)]] | None, _NOT_OF_MISTRAL
    ] = None
    """Other names for tokens that the tokenizer has beside its vocabulary, by id, such as reserved ones:
    `{128011: "<|think|>"}`. No row is added. Default: none."""
    new_tokens_init: NewTokensInit = "mean"
    """How new rows of embedding and head are drawn, with `seed`. `mean`: from the normal distribution with mean and
    covariance of the old rows, as transformers' `resize_token_embeddings` does; it takes three times the memory of the
    matrix in fp32. `random`: by the model's own initialiser, as with `mean_resizing=False`, the default of axolotl.
    `noisy_mean`: the mean of the old rows and noise, as in LLaMA-Factory."""
    pad_vocab_to_multiple_of: Whole | None = Field(default=None, ge=1, le=65536)
    """Give embedding and head rows up to a multiple of this, if the tokenizer has more tokens than they have rows, or
    as many as a multiple needs. Default: as many rows as `tokens` and `new_special_tokens` need."""
    tokenizer_use_mistral_common: Annotated[
        bool,
        excludes(
            has("datasets.type", "mlm", "seq2seq", "latents"), why="it is for rows of a decoder", hint="remove it"
        ),
    ] = False
    """Tokenise with the package mistral-common, the reference for Mistral's models, instead of transformers, and encode
    conversations by it, without a chat template. It reads `tekken.json`, or `tokenizer.model`: of version 1 unless its
    name ends with another one, such as `.v3`. Needs the extra `mistral`."""
    train_on_inputs: Annotated[
        TrainOnInputs, ignored_with("rl", of=(True,), why="preference losses do not count prompts")
    ] = False
    """Also train on the tokens of the prompt. By default only the answer counts in the loss. `conversations`: train on
    all tokens of conversations, but not on a prompt that has a completion of its own; this is the default of TRL."""
    sequence_len: Annotated[
        Whole, ignored_with(_LATENTS, why="the size of the latents decides the number of tokens")
    ] = Field(default=1024, ge=2)
    """The maximum number of tokens in a sequence. For longer samples see `excess_length_strategy`."""
    excess_length_strategy: Literal["truncate", "drop", "raise"] = "truncate"
    """What becomes of a sample that is longer than `sequence_len`. `truncate`: its end is cut off. `drop`: it is left
    out; this is the default of axolotl. `raise`: it is an error. A notice counts the samples that were truncated or
    dropped. Plain text (`completion`) is always split into several samples."""
    sample_packing: Annotated[bool, ignored_with("rl", of=(True,), why="preference data is not packed")] = True
    """Put several short samples into one sequence, so that fewer tokens are padding. No token attends to another
    sample. A model that cannot separate packed samples gets one sample per sequence, with a notice."""
    mlm_probability: float = Field(default=0.15, gt=0, lt=1)
    """The share of the tokens that are masked, for datasets of `type: mlm`. Each epoch masks other tokens."""
    shuffle: bool = True
    """Visit the samples in a new order in each epoch. The order is drawn from `seed`."""

    micro_batch_size: Annotated[
        CountOrAuto,
        doubt(
            has("micro_batch_size", 1),
            "the KL divergence of each micro-batch is estimated from one answer",
            "set it to 2 or more",
            when=((has("rl", "kto"),),),
        ),
    ] = 1
    """Sequences that the model computes at once. More of them need more GPU memory, or RAM on the CPU. `auto`: it
    follows from `tokens_per_step` and `gradient_accumulation_steps`. If the latter is `auto` too, the plan chooses the
    fastest split of the step that fits, before the first step and for the whole run."""
    gradient_accumulation_steps: CountOrAuto = 1
    """Micro-batches in one step. More of them cost computing time but no further weight or optimizer traffic, because
    weights and states move once per step. `auto`: as many as reach `tokens_per_step`."""
    tokens_per_step: Annotated[
        Whole | None,
        excludes("rl", why="a step is counted in pairs or answers", hint="remove it, and set `micro_batch_size`"),
        excludes(
            _LATENTS,
            why="a step of latents is counted in samples",
            hint="set `micro_batch_size` and `gradient_accumulation_steps`",
        ),
    ] = Field(default=None, ge=1)
    """Tokens in one step, of all ranks, padding included: a multiple of `sequence_len`. If you set it,
    `micro_batch_size` and `gradient_accumulation_steps` are `auto` unless you set them. Default: these two decide."""
    num_epochs: Annotated[Number, ignored_with("max_steps", why="`max_steps` decides when the run ends")] = Field(
        default=1.0, gt=0
    )
    """Passes over the training data; a fraction is allowed, and a last partial step counts as one. To continue a
    finished run, raise it and run again."""
    max_steps: Whole | None = Field(default=None, ge=1)
    """End the run after this many steps. Default: `num_epochs` decides. To continue a finished run, raise it and run
    again."""

    learning_rate: Annotated[
        Number,
        doubt(
            Beyond("learning_rate", 0.1),
            "every weight moves by about that much in a step",
            "1e-6 to 1e-3 are usual",
            when=((unless("optimizer", "sgd"),),),
        ),
        doubt(
            Beyond("learning_rate", 3e-5, is_below=True),
            "that suits full fine-tuning, and is low for an adapter",
            "1e-4 to 5e-4 are usual for LoRA",
            when=(_WITH_ADAPTER, (unless("rl"),), (has("optimizer", "adamw", "adamw_8bit"),)),
        ),
    ] = Field(default=2e-5, ge=0)
    """The peak learning rate, which is reached at the end of the warm-up."""
    loraplus_lr_ratio: Annotated[Number | None, _OF_ADAPTER] = Field(default=None, gt=0)
    """LoRA+: the second matrices of an adapter, and vectors, learn at `learning_rate` times this, as in PEFT. 16 is
    usual. Default: all learn at `learning_rate`."""
    embedding_lr: Annotated[Number | None, _OF_TOKENS, _OF_EMBEDDING] = Field(default=None, ge=0)
    """The peak learning rate of the weights (not biases) of embedding, head and `lora_modules_to_save`, which then do
    not decay, as in axolotl. Default: `learning_rate`."""
    embedding_lr_scale: Annotated[Number | None, excludes("embedding_lr"), _OF_TOKENS, _OF_EMBEDDING] = Field(
        default=None, ge=0
    )
    """The same as a multiple of `learning_rate`."""
    lr_scheduler: SchedulerChoice = "cosine"
    """The learning rate after the warm-up. `constant`: it stays at its peak. `linear`, `cosine`: it falls to zero at
    the last step. The others are those of transformers, to the bit; `lr_scheduler_kwargs` has their settings."""
    lr_scheduler_kwargs: Annotated[SchedulerConfig | None, AfterValidator(without_defaults)] = None
    """More settings of the schedule, such as `min_lr` for `cosine_with_min_lr`. Default: the schedule's own
    defaults."""
    warmup_steps: Annotated[WarmupSteps, doubt(Beyond("warmup_steps", "max_steps"), "the run ends during warm-up")] = 0
    """Steps in which the learning rate rises linearly from zero to its peak. A number below 1 is a share of all steps,
    rounded up, as in transformers. If you set this key, `warmup_ratio` becomes 0."""
    warmup_ratio: Annotated[float, excludes("warmup_steps")] = Field(default=0.03, ge=0, lt=1)
    """The length of the warm-up as a fraction of all steps, rounded as `warmup_rounding` says."""
    warmup_rounding: Annotated[Literal["up", "down"], ignored_with("warmup_steps")] = "up"
    """How `warmup_ratio` becomes a number of steps. `up`: as in transformers. `down`: as in axolotl, where a warm-up
    of one step has two."""
    max_warmup_steps: Annotated[Whole | None, ignored_with("warmup_steps")] = Field(default=None, ge=1)
    """The most steps that `warmup_ratio` gives. axolotl has 100 if a config says nothing about its warm-up. Default: no
    limit."""
    optimizer: OptimizerChoice = "adamw"
    """The optimizer; each computes in fp32, on master weights. `adamw`: AdamW with fp32 moments, 12 bytes of state per
    parameter with `dtype: bfloat16` (without masters fewer: `bf16_master`). `adamw_8bit`: AdamW with moments in 8 bit,
    in blocks of 256, as in bitsandbytes, but for embeddings, as in transformers' Trainer; 6.2 bytes. `lion`: Lion,
    whose only moment is fp32; 8.1 bytes. `sgd`: gradient descent; 4.1 bytes, or 8.1 with momentum. `muon`: Muon for the
    matrices of layers, whose momentum is made orthogonal, 8.1 bytes; AdamW for biases, vectors, stacks of experts,
    embedding and head, with the same learning rate. A smaller state means less to read and write in a step."""
    optim_args: Annotated[OptimizerConfig | None, AfterValidator(without_defaults)] = None
    """More settings of the optimizer, such as `momentum` for `sgd`. Default: the optimizer's own defaults."""
    bf16_master: Annotated[
        Literal["fp32", "stochastic"],
        needs(has("dtype", "bfloat16"), of=("stochastic",), hint="set `dtype: bfloat16`, or remove `bf16_master`"),
        excludes(
            "adapter",
            of=("stochastic",),
            when=((unless("lora_modules_to_save"),),),
            why="adapters are trained in fp32, and the model is frozen",
            hint="remove `bf16_master`",
        ),
    ] = "fp32"
    """The master weights of a bf16 model. `fp32`: fp32 master weights, so no update is lost. `stochastic`: no master
    weights; each update is computed in fp32 and rounded stochastically to a neighbouring bf16 number, so that small
    updates count on average. Then `adamw` has 10 bytes of state per parameter, `adamw_8bit` 4.0, `lion`, `muon` and
    `sgd` with momentum 6, and `sgd` 2; a step reads and writes as much less. The random numbers follow from `seed`: a
    run that starts from the weights of another one needs its own. Weights in fp32, such as adapters, are not
    rounded."""
    adam_beta1: Annotated[Decay, _OF_ADAM_AND_LION] = 0.9
    """Decay rate of AdamW's first moment, the running mean of the gradients; and Lion's first one, which weighs its
    mean against the gradient in an update."""
    adam_beta2: Annotated[Decay, _OF_ADAM_AND_LION] = 0.999
    """Decay rate of AdamW's second moment, the running mean of the squared gradients; and that of Lion's mean of
    gradients, for which its authors use 0.99 with 0.9, or 0.98 with 0.95."""
    adam_epsilon: Annotated[Number, _OF_ADAM] = Field(default=1e-8, gt=0)
    """Added to the square root of AdamW's second moment, so that no update divides by zero."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay, decoupled as in AdamW; `sgd` adds it to the gradient, as in torch. Biases and the weights of norms
    never decay, by the rule of transformers' Trainer; `run/model.json` lists the names."""
    max_grad_norm: ClipNorm = 1.0
    """Clip the gradients so that their global norm is at most this. The clipping is exact. 0 or null turns it off."""

    label_smoothing_factor: Annotated[float, _NOT_OF_PREFERENCES, _OF_TOKENS] = Field(default=0.0, ge=0, lt=1)
    """Label smoothing: the share of a target's probability that all tokens of the vocabulary get instead."""
    neftune_noise_alpha: Annotated[
        NoiseAlpha,
        excludes(
            has("datasets.type", "latents", "seq2seq"),
            why="it needs a model with one stack of layers that begins with an embedding of tokens",
            hint="remove it",
        ),
    ] = None
    """Train with noise on the embedding (NEFTune): uniform, up to this number divided by the root of the tokens of a
    row times the width of the embedding. 5 to 15 are usual. 0 or null: none."""
    use_dft_loss: Annotated[
        bool, _NOT_OF_PREFERENCES, excludes("label_smoothing_factor", why="each is a loss of its own"), _OF_TOKENS
    ] = False
    """The loss of dynamic fine-tuning: the cross-entropy of each token, times its probability."""

    rl: Annotated[
        Literal["dpo", "ipo", "orpo", "simpo", "kto"] | None,
        excludes(
            has("datasets.type", *_NEITHER_TEXT),
            why="it needs texts or conversations",
            hint="set `type: chat_template` or remove `type`",
            at=("datasets",),
        ),
        excludes(
            has("test_datasets.type", *_NEITHER_TEXT),
            why="it needs texts or conversations",
            hint="set `type: chat_template` or remove `type`",
            at=("test_datasets",),
        ),
    ] = None
    """Preference training, as in TRL. `dpo`, `ipo`, `orpo` and `simpo` train on pairs of a chosen and a rejected
    answer, `kto` on single answers that are marked good or bad. `micro_batch_size` counts pairs, or answers for `kto`;
    each takes two rows. `dpo`, `ipo` and `kto` have a reference model: the model before step 1. Its log-probabilities
    are computed in one pass over the data before step 1, a block at a time, and kept in `run/reference.bin`. Default:
    supervised fine-tuning."""
    rl_beta: Annotated[Number, _OF_PREFERENCES] = Field(default=0.1, gt=0)
    """How strongly the answers' probabilities count in the loss: beta in DPO, KTO and SimPO, tau in IPO, lambda in
    ORPO."""
    simpo_gamma: Annotated[Number, _OF_SIMPO] = Field(default=0.5, ge=0)
    """The margin between the rewards of both answers."""
    cpo_alpha: Annotated[Number, _OF_SIMPO] = Field(default=1.0, ge=0)
    """The weight of the chosen answers' cross-entropy. 0: there is none, as in the SimPO paper; 1 is
    the default of axolotl and TRL."""
    kto_desirable_weight: Annotated[Number, _OF_KTO] = Field(default=1.0, ge=0)
    """The weight of the losses of good answers."""
    kto_undesirable_weight: Annotated[Number, _OF_KTO] = Field(default=1.0, ge=0)
    """The weight of the losses of bad answers."""
    disable_dropout: Annotated[bool, _OF_PREFERENCES] = True
    """With `rl`, turn off the model's dropout modules and `lora_dropout`, as TRL, axolotl and LLaMA-Factory do.
    `false`: dropout is as without `rl`. Attention dropout that is not a module stays on in both cases."""

    dtype: DtypeName = "bfloat16"
    """The data type that the model computes in. Master weights are fp32, but for `bf16_master: stochastic`. `float16`
    uses dynamic loss scaling."""
    gradient_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        needs(
            has("dtype", "float16"),
            of=("float16",),
            hint="set `dtype: float16`, which scales the loss, or remove `gradient_dtype`",
        ),
    ] = "auto"
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
    head_chunk: SizeOrAuto = "auto"
    """The size of the fp32 logits that exist at once: head and loss are computed in chunks of tokens. Larger chunks
    are faster on a GPU, and take three times their size of its memory. The size decides the order in which the head's
    gradient is summed, so it is fixed for a run. `auto`: the plan chooses from 64MiB to 1GiB before the first step; on
    the CPU it is 64MiB."""
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
    save_steps: Annotated[Interval, _NEEDS_DURABILITY] = None
    """Save a step in the store every N steps, without copying anything. `ratel export` and `--resume` can go back to
    saved steps. A number below 1 is a share of all steps. Default: no step is saved but the last one."""
    saves_per_epoch: Annotated[TimesPerEpoch, excludes("save_steps"), _NEEDS_DURABILITY] = None
    """Save a step this many times in each of `num_epochs`, instead of every `save_steps`. 0: never."""
    save_total_limit: Annotated[Whole, only_if("save_steps", "saves_per_epoch")] = Field(default=1, ge=1)
    """The most saved steps in the store. When there is one more, the oldest is dropped. With `load_best_model_at_end`
    the best step is one of them, and is kept in addition to the last one if this is 1."""
    eval_steps: Annotated[Interval, only_if(*_WITH_EVALUATION)] = None
    """Evaluate on the held-out samples every N steps, and at the end. A number below 1 is a share of all steps.
    Default: only at the end."""
    evals_per_epoch: Annotated[TimesPerEpoch, excludes("eval_steps"), only_if(*_WITH_EVALUATION)] = None
    """Evaluate this many times in each of `num_epochs`, instead of every `eval_steps`. 0: only at the end."""
    load_best_model_at_end: Annotated[
        bool,
        _OF_EVALUATION,
        _OF_EVALUATED_STEPS,
        needs(
            has("storage.durability", "step"),
            when=_WITH_EVALUATED_STEPS,
            why="with `none` the store has no earlier step",
        ),
    ] = False
    """Export the step with the best evaluation instead of the last one. That step is saved until there is a better one,
    whatever `save_steps` is. `ratel export`, `eval` and `generate` take it, too, unless they are given a step."""
    metric_for_best_model: Annotated[
        MetricOfBest,
        needs("rl", of=("rewards/margins",), hint="set it to loss"),
        needs(has("rl", "dpo", "ipo", "orpo", "simpo"), of=("rewards/accuracies",), hint="set it to loss"),
        needs(has("datasets.type", "classification"), of=("accuracy",), hint="set it to loss"),
        _IF_BEST_COUNTS,
    ] = "loss"
    """The metric by which the best step is chosen: `loss`; for a classifier, `accuracy`; with `rl`, also
    `rewards/margins` and, but for `kto`, `rewards/accuracies`."""
    greater_is_better: Annotated[bool | None, _IF_BEST_COUNTS] = None
    """Whether a greater value is better. Default: for every metric but the loss."""
    early_stopping_patience: Annotated[Whole | None, _OF_EVALUATION, _OF_EVALUATED_STEPS] = Field(default=None, ge=1)
    """End the run after this many evaluations in a row that do not improve on the best one. Default: no early
    stopping."""
    early_stopping_threshold: Annotated[Number, only_if("early_stopping_patience")] = Field(default=0.0, ge=0)
    """An evaluation must be better by more than this to count as an improvement for `early_stopping_patience`."""
    val_set_size: Annotated[
        FractionOrCount,
        excludes("test_datasets"),
        excludes(
            "streaming",
            why="the number of samples of a stream is not known",
            hint="name data for evaluation with `test_datasets`",
        ),
    ] = 0
    """Samples that are held out of training for evaluation: a fraction below 1, or a whole number of samples. 0:
    none."""
    logging_steps: Whole = Field(default=1, ge=1)
    """Print a line every N steps. run/metrics.jsonl in the output directory always has every step."""
    report_to: TrackerNames = ()
    """Send the metrics of every step to these trackers. Each is a package of its own, which the extra of its name
    installs, and takes its settings from the environment: WANDB_MODE, MLFLOW_TRACKING_URI. Default: none; Ratel then
    sends no data anywhere."""
    run_name: Annotated[str, Field(min_length=1)] | None = None
    """What trackers call the run. Default: the name of `output_dir`."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """The project in wandb and trackio, or the experiment in mlflow, that the run belongs to. Default: the tracker's
    own."""
    hub_model_id: HubId = None
    """Upload the exported model to this repository of the Hugging Face hub when the run ends, with the login of
    `hf auth login`. Default: nothing is uploaded."""
    hub_private_repo: bool | None = None
    """Whether the repository is private, if the upload makes it. Default: as the hub's account says."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """The seed of everything random: the order of the data, dropout, and the weights if `random_init` is set."""

    def resolved(self, name: str) -> Self:
        """This config with the defaults filled in that follow from other keys: paths, the split, an adapter's scale.
        `name` is the run's name, from which `output_dir` follows."""
        output_dir = self.output_dir if "output_dir" in self.model_fields_set else Path("outputs") / (name or "run")
        named = output_dir.name not in ("", "..")
        store = output_dir.with_name(output_dir.name + ".store") if named else output_dir / "ratel.store"
        storage = self.storage if self.storage.paths else self.storage.model_copy(update={"paths": (store,)})
        alpha = self.lora_r if self.adapter is not None and self.lora_alpha is None else self.lora_alpha
        config = self.model_copy(update={"output_dir": output_dir, "storage": storage, "lora_alpha": alpha})
        if isinstance(self.micro_batch_size, int):
            return config.split_by(self.micro_batch_size)
        if isinstance(self.gradient_accumulation_steps, int):
            return config.split_by(self.sequences_per_step // self.gradient_accumulation_steps)
        return config

    @property
    def task(self) -> Task:
        """What the model learns to predict; the type of the datasets says it."""
        types = {each.type for each in self.datasets}
        return next((task for name, task in TASKS.items() if name in types), "causal_lm")

    @property
    def compares(self) -> Literal["pairs", "verdicts"] | None:
        """What of the data is compared; None: answers are imitated."""
        return None if self.rl is None else "verdicts" if self.rl == "kto" else "pairs"

    @property
    def rows_per_sequence(self) -> int:
        """Rows that each of `micro_batch_size` takes: 2 where answers are compared."""
        return 1 if self.rl is None else 2

    @property
    def can_grow(self) -> bool:
        """Whether the vocabulary may get more tokens or rows than the base model's."""
        return bool(self.tokens or self.new_special_tokens or self.pad_vocab_to_multiple_of)

    @property
    def has_dropout(self) -> bool:
        """Whether dropout modules drop anything."""
        return self.rl is None or not self.disable_dropout

    @property
    def has_reference(self) -> bool:
        """Whether the model is compared with what it was before step 1."""
        return self.rl in ("dpo", "ipo", "kto")

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes of a classifier; None: those of the base model."""
        return next((each.labels for each in (*self.datasets, *self.test_datasets) if each.labels is not None), None)

    @property
    def sequences_per_step(self) -> int:
        """Sequences in a full step."""
        if self.tokens_per_step is not None:
            return self.tokens_per_step // self.sequence_len
        size, number = self.known_split
        return size * number

    @property
    def split(self) -> tuple[int, int] | None:
        """Sequences of a micro-batch, and micro-batches of a step; None if the plan has still to choose them."""
        size, number = self.micro_batch_size, self.gradient_accumulation_steps
        return (size, number) if isinstance(size, int) and isinstance(number, int) else None

    def of_rank(self, num_ranks: int) -> Self:
        """The config of each of `num_ranks`, which must divide the sequences of `tokens_per_step`, and their
        micro-batches if those are known: it counts the tokens of all."""
        return self if self.tokens_per_step is None else self.of_ranks(1, shared_by=num_ranks)

    def of_ranks(self, num_ranks: int, *, shared_by: int = 1) -> Self:
        """The config whose steps have the micro-batches of all ranks, from that of each; or those of each of others
        that share them, of which there must be as many as divide them."""
        keys = ("tokens_per_step", "gradient_accumulation_steps")
        numbers = {key: number for key in keys if isinstance(number := getattr(self, key), int)}
        return self.model_copy(update={key: number * num_ranks // shared_by for key, number in numbers.items()})

    @property
    def known_split(self) -> tuple[int, int]:
        """The split of a resolved config that has one."""
        assert self.split is not None
        return self.split

    @property
    def step_keys(self) -> tuple[str, ...]:
        """The keys that decide, with `sequence_len`, how many tokens a step has."""
        return ("tokens_per_step",) if self.split is None else SPLIT_KEYS

    def split_by(self, micro_batch_size: int) -> Self:
        """This config with the same step in micro-batches of this many sequences."""
        if isinstance(self.gradient_accumulation_steps, int) and self.micro_batch_size == micro_batch_size:
            return self
        number = self.sequences_per_step // micro_batch_size
        return self.model_copy(update={"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": number})

    @property
    def is_chunk_planned(self) -> bool:
        """Whether the plan has still to choose how large the head's chunks are."""
        return self.head_chunk == "auto"

    def chunked_by(self, chunk_bytes: int) -> Self:
        """This config with chunks of the head of this many bytes of logits."""
        return self.model_copy(update={"head_chunk": chunk_bytes})

    @property
    def resolved_gradient_dtype(self) -> DtypeName:
        """The gradients' data type, with `auto` replaced by the type that it stands for."""
        return self.dtype if self.gradient_dtype == "auto" else self.gradient_dtype

    @property
    def resolved_wear(self) -> Literal["save", "balanced", "ignore"]:
        """`storage.wear` with `auto` replaced by the rule that it stands for."""
        if self.storage.wear == "auto":
            return "balanced" if self.adapter is None else "save"
        return self.storage.wear

    @property
    def num_saved_generations(self) -> int:
        """How many saved steps the store has space for, in addition to the two generations that a step needs."""
        if self.storage.keep_generations is not None:
            return self.storage.keep_generations
        return max(self.save_total_limit, 1 + self.saves_best) if self.saves else int(self.saves_best)

    @property
    def evaluates_steps(self) -> bool:
        """Whether steps before the last one are evaluated."""
        has_data = bool(self.val_set_size or self.test_datasets)
        return has_data and (self.eval_steps is not None or self.evals_per_epoch is not None)

    @property
    def saves_best(self) -> bool:
        """Whether the step with the best evaluation is saved, and is the run's result."""
        return self.load_best_model_at_end and self.evaluates_steps

    @property
    def is_greater_better(self) -> bool:
        """Whether more of `metric_for_best_model` is better."""
        return self.metric_for_best_model != "loss" if self.greater_is_better is None else self.greater_is_better

    @property
    def saves(self) -> bool:
        """Whether steps before the last one are saved."""
        return self.save_steps is not None or self.saves_per_epoch is not None

    def save_interval(self, num_steps: int) -> int | None:
        """Steps from one saved step to the next, in a run of `num_steps`; None: only the last one is saved."""
        return self._interval(self.save_steps, self.saves_per_epoch, num_steps)

    def eval_interval(self, num_steps: int) -> int | None:
        """Steps from one evaluation to the next, in a run of `num_steps`; None: only the last one is evaluated."""
        return self._interval(self.eval_steps, self.evals_per_epoch, num_steps)

    def _interval(self, steps: float | None, per_epoch: float | None, num_steps: int) -> int | None:
        """As axolotl and transformers count: N times per epoch is the share 1 / (N x `num_epochs`) of all steps."""
        if per_epoch is not None:
            return max(1, math.ceil(num_steps * min(1.0, 1.0 / (per_epoch * self.num_epochs))))
        if steps is None or steps >= 1:
            return None if steps is None else int(steps)
        return max(1, math.ceil(num_steps * steps))

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of the warm-up in a run of `num_steps`."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        if self.warmup_steps:
            return math.ceil(num_steps * self.warmup_steps)
        share = num_steps * self.warmup_ratio
        steps = math.ceil(share)
        if self.warmup_rounding == "down":
            steps = 2 if int(share) == 1 else int(share)
        return min(steps, self.max_warmup_steps or num_steps)

    @model_validator(mode="before")
    @classmethod
    def _steps_before_ratio(cls, data: object) -> object:
        if isinstance(data, dict) and "warmup_steps" in data and "warmup_ratio" not in data:
            return {**data, "warmup_ratio": 0.0}
        return data

    @model_validator(mode="before")
    @classmethod
    def _split_follows_from_tokens(cls, data: object) -> object:
        keys = ("micro_batch_size", "gradient_accumulation_steps")
        if isinstance(data, dict) and (data.get("tokens_per_step") is not None or data.get(keys[0]) == "auto"):
            return {**dict.fromkeys(keys, "auto"), **data}
        return data

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        found = broken(self) + _missing(self, needs_data=info.context != OWN_DATA)
        found += _task_contradictions(self) + _unread_contradictions(self) + _split_contradictions(self)
        found += _generation_contradictions(self)
        options = self.lr_scheduler_kwargs or SchedulerConfig()
        found += scheduler_contradictions(self.lr_scheduler, options, learning_rate=self.learning_rate)
        found += optimizer_contradictions(self.optimizer, self.optim_args or OptimizerConfig())
        if found:
            raise contradictions(found)
        return self


def may_have_adapter(config: RunConfig) -> bool:
    """Whether the config trains a whole model and could train an adapter instead, as far as the config alone says."""
    return config.adapter is None and not broken(config.model_copy(update={"adapter": "lora"}))


def _missing(config: RunConfig, *, needs_data: bool) -> list[Contradiction]:
    """The keys without which there is no run."""
    if config.model_shape is not None:
        return []
    found = []
    if config.base_model is None:
        hint = "name a directory or hub id: `base_model: org/name`"
        found.append(Contradiction(keys=("base_model", "model_shape"), message="`base_model` is missing", hint=hint))
    if needs_data and not config.datasets:
        given = "is empty" if "datasets" in config.model_fields_set else "is missing"
        hint = "name a file, directory or hub id: `datasets: train.jsonl`"
        found.append(Contradiction(keys=("datasets", "model_shape"), message=f"`datasets` {given}", hint=hint))
    return found


def _task_contradictions(config: RunConfig) -> list[Contradiction]:
    """What is wrong about datasets that are for different tasks, or have different classes."""
    found = []
    sets = (*config.datasets, *config.test_datasets)
    tasks = {each.type if each.type in TASKS else "other" for each in sets}
    if len(tasks) > 1:
        message = f"`type: {min(tasks - {'other'})}` is another task than that of the other datasets"
        hint = "give all `datasets` and `test_datasets` the same type"
        found.append(Contradiction(keys=("datasets", "test_datasets"), message=message, hint=hint))
    if tasks == {"latents"}:
        found += _latents_contradictions(config)
    if len({each.labels for each in sets} - {None}) > 1:
        message = "the datasets have different `labels`"
        found.append(Contradiction(keys=("datasets", "test_datasets"), message=message, hint="write them once"))
    if tasks != {"classification"} and any(each.labels is not None for each in sets):
        message = "`labels` are the classes of `type: classification`, which no dataset has"
        found.append(Contradiction(keys=("datasets", "test_datasets"), message=message))
    return found


def _unread_contradictions(config: RunConfig) -> list[Contradiction]:
    """Keys of datasets that are set and that nothing reads: other rows are trained than the user thinks."""
    found = []
    defaults = {key: field.default for key, field in DatasetConfig.model_fields.items()}
    for section in ("datasets", "test_datasets"):
        for at, each in enumerate(getattr(config, section)):
            for key in unread_for_type(dict(each), defaults, each.type, compares=config.compares):
                by = f"`type: {each.type}`" if config.rl is None else f"`rl: {config.rl}`"
                message, hint = f"`{key}` is not read for {by}", f"remove it; it is for {_readers_of(key)}"
                found.append(Contradiction(keys=(section,), message=message, hint=hint, within=(at, key)))
    return found


def _readers_of(key: str) -> str:
    """What a key of a dataset is for, in words."""
    names = [f"`{name}`" for name in types_that_read(key)]
    if key in KEYS_OF_TEXT:
        return "rows of text"
    if not names:
        return "`rl`"
    names[0] = f"`type: {names[0].strip('`')}`"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _latents_contradictions(config: RunConfig) -> list[Contradiction]:
    """What data of latents cannot have."""
    found = []
    if config.tokens_per_step is None and config.split is None:
        message = "`auto` follows from `tokens_per_step`; a step of latents is counted in samples"
        hint = "set `micro_batch_size` and `gradient_accumulation_steps`"
        keys = ("micro_batch_size", "gradient_accumulation_steps")
        found.append(Contradiction(keys=keys, message=message, hint=hint))
    if any(each.max_samples is not None or each.weight != 1 for each in (*config.datasets, *config.test_datasets)):
        message = "`max_samples` and `weight` are for rows of text"
        found.append(Contradiction(keys=("datasets", "test_datasets"), message=message, hint="remove them"))
    return found


def _split_contradictions(config: RunConfig) -> list[Contradiction]:
    """What is wrong about `tokens_per_step`, and about an `auto` that nothing decides."""
    size, number, tokens = config.micro_batch_size, config.gradient_accumulation_steps, config.tokens_per_step
    if config.task == "denoising":
        return []  # it has none of it
    if tokens is None:
        key = "micro_batch_size" if size == "auto" else "gradient_accumulation_steps"
        if "auto" not in (size, number):
            return []
        message = f"`{key}: auto` needs `tokens_per_step`, the tokens of a step"
        hint = "write `tokens_per_step: N`: the sequences of a step times `sequence_len`"
        given = number if isinstance(number, int) else size
        if isinstance(given, int):
            hint = f"for a step of {counted(given, 'sequence')}, write `tokens_per_step: {given * config.sequence_len}`"
            hint += f" and remove `{'gradient_accumulation_steps' if given == number else 'micro_batch_size'}`"
        return [Contradiction(keys=(key,), message=message, hint=hint)]
    keys = ("tokens_per_step", "micro_batch_size", "gradient_accumulation_steps", "sequence_len")
    rows, rest = divmod(tokens, config.sequence_len)
    if rest:
        message = f"`tokens_per_step` ({tokens}) must be a multiple of `sequence_len` ({config.sequence_len})"
        near = [each * config.sequence_len for each in (rows, rows + 1) if each]
        return [Contradiction(keys=keys, message=message, hint=f"write {' or '.join(map(str, near))}")]
    if isinstance(size, int) and isinstance(number, int):
        if size * number == rows:
            return []
        product = size * number * config.sequence_len
        message = f"`tokens_per_step` is {tokens}, but `micro_batch_size` x `gradient_accumulation_steps` x "
        message += f"`sequence_len` is {size} x {number} x {config.sequence_len} = {product}"
        hint = f"write `tokens_per_step: {product}`, or remove one of them; it follows from the others"
        return [Contradiction(keys=keys, message=message, hint=hint)]
    for key, count in (("micro_batch_size", size), ("gradient_accumulation_steps", number)):
        if isinstance(count, int) and rows % count:
            message = f"`tokens_per_step` ({tokens}) is {counted(rows, 'sequence')}, which is not a multiple of"
            message += f" `{key}` ({count})"
            return [Contradiction(keys=(key, "tokens_per_step"), message=message)]
    return []


def _generation_contradictions(config: RunConfig) -> list[Contradiction]:
    """What is wrong about the number of saved steps that the store has space for."""
    keep, hint = config.storage.keep_generations, "increase `storage.keep_generations`"
    if keep is None or config.storage.durability == "none":
        return []
    if config.saves and keep < config.save_total_limit:
        message = f"`save_total_limit` is {config.save_total_limit}, but `storage.keep_generations` is {keep}"
        return [Contradiction(keys=("save_total_limit", "storage"), message=message, hint=hint)]
    if config.saves_best and keep < 1 + config.saves:
        message = f"`load_best_model_at_end` saves a step besides, but `storage.keep_generations` is {keep}"
        return [Contradiction(keys=("load_best_model_at_end", "storage"), message=message, hint=hint)]
    return []
