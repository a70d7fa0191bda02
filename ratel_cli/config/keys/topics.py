"""What people call things, and what Ratel has of them: the answer to `ratel explain qlora`.

Invariant: `keys` are keys of a config, and `page` is a file in docs; what has neither is not supported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Something that trainers do."""

    name: str
    words: str
    """What people call it, in lower case without hyphens, separated by blanks."""
    text: str
    """What Ratel does; of what it does not do, what to do instead."""
    keys: tuple[str, ...] = ()
    """The keys to begin with."""
    page: str = ""
    """Page of the documentation, with the place in it."""

    @property
    def is_supported(self) -> bool:
        """Whether Ratel does it."""
        return bool(self.keys or self.page)


TOPICS: tuple[Topic, ...] = (
    Topic(
        name="LoRA, QLoRA and DoRA",
        words="lora qlora dora rslora adapter adapters peft lowrank",
        text="`adapter: lora` trains a LoRA adapter beside the frozen model; `load_in_4bit: true` quantises that model"
        " (QLoRA), `peft_use_dora: true` makes it DoRA. `ratel merge` merges the adapter into its base model.",
        keys=("adapter", "lora_r", "lora_target_modules", "load_in_4bit", "peft_use_dora"),
        page="docs/guide/models.md",
    ),
    Topic(
        name="Other adapters than LoRA and DoRA",
        words="prefixtuning prompttuning ptuning ia3 vera loha lokr oft boft adalora",
        text="`adapter: lora` trains LoRA and DoRA by PEFT's modules. Merge another adapter into its base model to"
        " train on from it.",
    ),
    Topic(
        name="Preference training: DPO, IPO, ORPO, SimPO, KTO",
        words="dpo ipo orpo simpo kto preference preferences alignment chosen rejected",
        text="`rl: dpo` trains on pairs of a chosen and a rejected answer, `rl: kto` on single answers that are marked"
        " good or bad, with all weights or an adapter.",
        keys=("rl", "rl_beta"),
        page="docs/guide/data.md",
    ),
    Topic(
        name="GRPO, PPO, reward models and distillation",
        words="grpo gspo dapo ppo rlhf rloo reward rewards rewardmodel distillation gkd",
        text="Train on preferences instead (`rl: dpo`, `ipo`, `orpo`, `simpo` or `kto`), or use TRL for reward models "
        "and for methods that generate answers during training.",
    ),
    Topic(
        name="DeepSpeed and ZeRO",
        words="deepspeed zero zerooffload zeroinfinity",
        text="Ratel has an engine of its own and reads no DeepSpeed config: all state lies on NVMe and in spare RAM"
        " without a key. `ratel finetune CONFIG --ranks N` trains on N GPUs.",
        keys=("storage.paths", "limits.host_memory"),
        page="docs/guide/memory-and-devices.md",
    ),
    Topic(
        name="Several GPUs or machines",
        words="ranks multigpu gpus distributed ddp fsdp torchrun sharding parallel parallelism"
        " accelerate multinode nodes",
        text="`ratel finetune CONFIG --ranks N` trains on N GPUs of this machine: each takes a part of a step's"
        " micro-batches and of the optimizer state. torchrun starts the ranks of several machines.",
        page="docs/guide/ranks.md",
    ),
    Topic(
        name="A quantised base model",
        words="quantised quantized quantisation quantization 4bit 8bit int4 int8 nf4 fp8 bitsandbytes bnb gptq awq"
        " mxfp4",
        text="Beside an adapter the base model can be quantised (`load_in_4bit`, `load_in_8bit`), or stay as GPTQ, AWQ"
        " or MXFP4 have it. Without an adapter, a quantised model is dequantised and trained in `dtype`.",
        keys=("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant"),
        page="docs/guide/models.md",
    ),
    Topic(
        name="GGUF and llama.cpp",
        words="gguf llamacpp ollama",
        text="Ratel reads and writes safetensors. llama.cpp converts its exports with convert_hf_to_gguf.py.",
    ),
    Topic(
        name="Images, sound and video",
        words="vision image images audio video multimodal vlm llava",
        text="Only text is trained on. Of a vision-language model the language part is trained, and the vision tower"
        " is exported unchanged; `media: ignore` reads only the text of rows with images.",
    ),
    Topic(
        name="Diffusion transformers",
        words="diffusion dit denoiser latents flux",
        text="Datasets of `type: latents` train a diffusion transformer of diffusers on latents.",
        keys=("datasets.type",),
        page="docs/guide/data.md",
    ),
    Topic(
        name="Offloading and activation checkpointing",
        words="offload offloading cpuoffload nvme checkpointing gradientcheckpointing recompute recomputation",
        text="The state is on the drives in `storage.paths`. A cost model decides which activations are offloaded and"
        " which are recomputed; `ratel plan` shows it.",
        keys=("storage.paths", "activations", "optimizer_overlap"),
        page="docs/guide/memory-and-devices.md",
    ),
    Topic(
        name="Packing",
        words="pack padding multipack",
        text="Samples are packed into rows of `sequence_len` tokens, and attention keeps them apart.",
        keys=("sample_packing", "sequence_len"),
        page="docs/guide/data.md",
    ),
    Topic(
        name="Chat templates",
        words="chatml template templates sharegpt alpaca conversation conversations messages",
        text="Conversations are rendered by the model's own chat template, or by the one in `chat_template`; `ratel"
        " data` shows the tokens that have loss.",
        keys=("chat_template", "chat_template_jinja", "datasets.type", "datasets.field_messages"),
        page="docs/guide/data.md",
    ),
    Topic(
        name="Saving, resuming and exporting",
        words="resume checkpoint checkpoints save saving restart snapshot",
        text="Every step is saved. The same command resumes a run, `ratel export` writes the model of a saved step.",
        keys=("save_steps", "save_total_limit", "storage.snapshot"),
        page="docs/guide/resume-and-save.md",
    ),
    Topic(
        name="Early stopping and the best step",
        words="earlystopping patience best",
        text="Evaluations can end a run early, and choose the step that is exported.",
        keys=("early_stopping_patience", "load_best_model_at_end", "metric_for_best_model", "eval_steps"),
        page="docs/guide/output.md",
    ),
    Topic(
        name="Mixed precision",
        words="bf16 fp16 fp32 mixedprecision precision autocast amp",
        text="`dtype` is what the model computes in; its master weights are fp32. `bf16: true` and `fp16: true` are"
        " read as `dtype: bfloat16` and `dtype: float16`.",
        keys=("dtype", "bf16_master"),
        page="docs/guide/memory-and-devices.md",
    ),
    Topic(
        name="NEFTune",
        words="neftune",
        text="`neftune_noise_alpha` adds noise to the embeddings of tokens while the model trains.",
        keys=("neftune_noise_alpha",),
        page="docs/config.md",
    ),
    Topic(
        name="Trackers",
        words="wandb tensorboard mlflow trackio tracking logging",
        text="Metrics are in run/metrics.jsonl, `ratel report` draws them, and trackers get them as they come.",
        keys=("report_to",),
        page="docs/guide/output.md",
    ),
    Topic(
        name="Optimizers",
        words="adam adamw adamw8bit lion muon sgd 8bitadam pagedadamw galore adafactor",
        text="adamw, adamw_8bit, lion, muon and sgd. All of them compute in fp32, on the CPU.",
        keys=("optimizer", "learning_rate", "weight_decay"),
        page="docs/config.md",
    ),
    Topic(
        name="Classifiers and masked language models",
        words="classifier classification bert encoder mlm masked",
        text="Datasets of `type: classification` train a classifier, those of `type: mlm` a masked language model.",
        keys=("datasets.type", "datasets.field_label"),
        page="docs/guide/data.md",
    ),
)


def topic_of(word: str) -> Topic | None:
    """What people call by this word; None if there is nothing."""
    plain = "".join(char for char in word.lower() if char.isalnum())
    return next((each for each in TOPICS if plain in each.words.split()), None)


def instead_of(word: str) -> str:
    """What to do instead of something that people call by this word."""
    found = topic_of(word)
    assert found is not None and not found.is_supported
    return found.text
