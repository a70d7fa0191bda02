"""The full fine-tuning configs of TRL (with the recipes written for it) and torchtune, for `ported_configs`.

Facts only: keys and values of public examples, in our own layout, without their comments.
"""

from __future__ import annotations

from collections.abc import Mapping

Config = Mapping[str, object]

CHECKPOINTED: Config = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

RECIPE: Config = {
    "model_revision": "main", "torch_dtype": "bfloat16", "bf16": True, **CHECKPOINTED, "log_level": "info",
    "logging_steps": 5, "logging_strategy": "steps", "max_steps": -1, "overwrite_output_dir": True, "seed": 42,
    "push_to_hub": True, "hub_strategy": "every_save", "report_to": ["wandb"], "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine", "learning_rate": 2.0e-05,
}  # fmt: skip
FLASH: Config = {"attn_implementation": "flash_attention_2"}
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
MIN_LR: Config = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}


def mixture(*names: str, **others: object) -> Config:
    sets = [{"id": name, "config": "default", "split": "train_sft", "columns": ["messages"]} for name in names]
    return {"dataset_mixture": {"datasets": sets, **others}, "dataset_num_proc": 12}


TRL: Mapping[str, Config] = {
    "docs/lora_without_regret": {
        "model_name_or_path": "Qwen/Qwen2.5-3B-Instruct", "dataset_name": "open-thoughts/OpenThoughts-114k",
        "learning_rate": 2.0e-5, "num_train_epochs": 1, "packing": True, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 16, "eval_strategy": "no", "use_peft": True, "lora_r": 256, "lora_alpha": 16,
        "lora_target_modules": "all-linear", "output_dir": "Qwen2.5-3B-OpenThoughts-LoRA", "report_to": "trackio",
        "push_to_hub": True,
    },
    "docs/peft_integration": {
        "model_name_or_path": "Qwen/Qwen2-0.5B", "dataset_name": "trl-lib/Capybara", "use_peft": True, "lora_r": 32,
        "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"], "output_dir": "output",
    },
    "trl/example_config": {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "stanfordnlp/imdb", "report_to": "none",
        "learning_rate": 0.0001, "lr_scheduler_type": "cosine",
    },
    "handbook/zephyr-7b-beta": {
        **RECIPE, **FLASH, "model_name_or_path": "mistralai/Mistral-7B-v0.1", "chat_template": TEMPLATE,
        **mixture("HuggingFaceH4/ultrachat_200k", test_split_size=8, seed=0), "do_eval": True,
        "eval_strategy": "epoch", "gradient_accumulation_steps": 1, "hub_model_id": "zephyr-7b-sft-full",
        "max_seq_length": 2048, "num_train_epochs": 1, "output_dir": "data/zephyr-7b-sft-full",
        "per_device_eval_batch_size": 8, "per_device_train_batch_size": 16, "remove_unused_columns": True,
        "save_strategy": "steps", "save_steps": 100, "save_total_limit": 1,
    },
    "open-r1/R1-Distill-Qwen-Math-7B": {
        **RECIPE, **FLASH, **MIN_LR, "model_name_or_path": "open-r1/Qwen2.5-Math-7B-RoPE-300k",
        "chat_template": TEMPLATE, **mixture("open-r1/OpenR1-Math-220k", seed=0), "eos_token": "<|im_end|>",
        "callbacks": ["push_to_hub_revision"], "benchmarks": ["aime24", "gpqa", "lcb_v4"], "do_eval": False,
        "eval_strategy": "no", "gradient_accumulation_steps": 8, "hub_model_id": "open-r1/R1-Distill-Qwen-Math-7B",
        "hub_model_revision": "v12.00", "packing": False, "max_grad_norm": 0.2, "max_length": 32768,
        "num_train_epochs": 5, "output_dir": "data/R1-Distill-Qwen-Math-7B", "per_device_eval_batch_size": 1,
        "per_device_train_batch_size": 2, "save_strategy": "epoch", "save_total_limit": 1, "use_liger": True,
    },
    "handbook/smollm3": {
        **RECIPE, **FLASH, **MIN_LR, "model_name_or_path": "HuggingFaceTB/SmolLM3-3B-checkpoints",
        "model_revision": "it-mid-training", "trust_remote_code": True, "chat_template": TEMPLATE,
        **mixture("HuggingFaceTB/smoltalk2", seed=0), "eos_token": "<|im_end|>", "assistant_only_loss": True,
        "do_eval": False, "eval_strategy": "no", "gradient_accumulation_steps": 2, "packing": True,
        "packing_strategy": "ffd", "max_grad_norm": 0.2, "max_length": 65536, "num_train_epochs": 5,
        "output_dir": "data/SmolLM3-SFT", "per_device_train_batch_size": 1, "save_strategy": "epoch",
        "save_total_limit": 1, "use_liger_kernel": True, "run_name": "smollm3-sft-training",
        "average_tokens_across_devices": True, "ddp_timeout": 18000,
    },
    "handbook/starchat2-15b": {
        **RECIPE, **FLASH, "model_name_or_path": "bigcode/starcoder2-15b", "chat_template": TEMPLATE,
        **mixture("HuggingFaceH4/airoboros-3.2", "HuggingFaceH4/Code-Feedback", test_split_size=8, seed=0),
        "do_eval": True, "eval_strategy": "epoch", "gradient_accumulation_steps": 2, "max_length": 2048,
        "num_train_epochs": 3, "output_dir": "data/starchat2", "per_device_eval_batch_size": 8,
        "per_device_train_batch_size": 8, "report_to": ["tensorboard", "wandb"], "save_strategy": "no",
    },
    "handbook/gpt2-nl": {
        **RECIPE, "model_name_or_path": "gpt2", "dataset_mixer": {"yhavinga/mc4_nl_cleaned": 1.0},
        "dataset_splits": ["train"], "dataset_configs": ["tiny"], "preprocessing_num_workers": 12, "do_eval": False,
        "eval_strategy": "no", "gradient_accumulation_steps": 1, "learning_rate": 2.0e-04, "max_seq_length": 1024,
        "num_train_epochs": 1, "output_dir": "data/gpt2-cpt-dutch", "per_device_train_batch_size": 16,
        "save_strategy": "steps", "save_steps": 100, "save_total_limit": 1,
    },
    "open-r1/OlympicCoder-7B": {
        **RECIPE, **FLASH, **MIN_LR, "model_name_or_path": "Qwen/Qwen2.5-Coder-7B-Instruct",
        "dataset_name": "open-r1/codeforces-cots", "dataset_config": "solutions_decontaminated",
        "dataset_num_proc": 48, "do_eval": False, "eval_strategy": "no", "gradient_accumulation_steps": 8,
        "hub_model_id": "open-r1/OlympicCoder-7B", "packing": False, "max_grad_norm": 0.2, "max_length": 32768,
        "num_train_epochs": 10, "output_dir": "data/OlympicCoder-7B", "per_device_train_batch_size": 2,
        "save_strategy": "steps", "save_steps": 0.2, "save_total_limit": 1, "use_liger": True, "warmup_ratio": 0.03,
    },
    "open-r1/Qwen2.5-1.5B-Instruct": {
        **RECIPE, **FLASH, **MIN_LR, "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct", "chat_template": TEMPLATE,
        "dataset_name": "open-r1/s1K-1.1", "dataset_configs": ["all"], "dataset_num_proc": 48, "do_eval": False,
        "eval_strategy": "no", "gradient_accumulation_steps": 1, "packing": True, "max_seq_length": 32768,
        "num_train_epochs": 15, "output_dir": "data/Distill", "per_device_train_batch_size": 2,
        "save_strategy": "epoch", "save_total_limit": 1, "use_liger": True, "warmup_ratio": 0.05,
    },
    "open-r1/Doge-20M-Instruct": {
        **RECIPE, "model_name_or_path": "JingzeShi/Doge-20M-Instruct",
        "dataset_name": "HuggingFaceH4/Bespoke-Stratos-17k", "dataset_configs": ["all"],
        "preprocessing_num_workers": 8, "do_eval": True, "evaluation_strategy": "steps", "eval_steps": 100,
        "gradient_accumulation_steps": 4, "learning_rate": 8.0e-04, "packing": True, "max_seq_length": 4096,
        "num_train_epochs": 1, "output_dir": "data/Doge", "per_device_eval_batch_size": 4,
        "per_device_train_batch_size": 4, "save_strategy": "no",
    },
}  # fmt: skip

TUNE: Config = {
    "seed": None, "shuffle": True, "resume_from_checkpoint": False, "max_steps_per_epoch": None, "device": "cuda",
    "dtype": "bf16", "compile": False, "enable_activation_checkpointing": True, "log_every_n_steps": 1,
    "log_peak_memory_stats": True, "gradient_accumulation_steps": 1,
    "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "${output_dir}/logs"},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False, "wait_steps": 5,
                 "output_dir": "${output_dir}/profiling_outputs", "warmup_steps": 3, "num_cycles": 1},
}  # fmt: skip


def tune(
    model: str,
    optimizer: str,
    lr: float,
    *,
    data: str = "alpaca_dataset",
    sizes: tuple[int, int] = (2, 1),
    **more: object,
) -> Config:
    """A torchtune config; `sizes` are `batch_size` and `epochs`."""
    name = model.rpartition(".")[2]
    return {
        **TUNE,
        "output_dir": f"/tmp/torchtune/{name}",
        "tokenizer": {"_component_": f"{model}_tokenizer", "path": f"/tmp/{name}/tokenizer.model", "max_seq_len": None},
        "dataset": {"_component_": f"torchtune.datasets.{data}", "packed": False},
        "model": {"_component_": model},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": f"/tmp/{name}/",
            "checkpoint_files": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": "LLAMA3",
        },
        "batch_size": sizes[0],
        "epochs": sizes[1],
        "optimizer": {"_component_": optimizer, "lr": lr},
        **more,
    }


TORCHTUNE: Mapping[str, Config] = {
    "llama3_1/8B_full_single_device": tune(
        "torchtune.models.llama3_1.llama3_1_8b",
        "bitsandbytes.optim.PagedAdamW8bit",
        2e-5,
        optimizer_in_bwd=True,
        clip_grad_norm=None,
        save_every_n_steps=1,
        enable_activation_offloading=False,
        log_level="INFO",
        loss={"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    ),
    "gemma2/2B_full": tune(
        "torchtune.models.gemma2.gemma2_2b",
        "torch.optim.AdamW",
        2e-5,
        mixed_precision={"_component_": "torchtune.training.quantization.Int8Quantizer", "enabled": False},
    ),
    "llama3_1/70B_full": tune(
        "torchtune.models.llama3_1.llama3_1_70b",
        "torch.optim.AdamW",
        2e-5,
        sizes=(2, 3),
        custom_sharded_layers=["tok_embeddings", "output"],
        fsdp_cpu_offload=True,
    ),
    "phi3/mini_full_low_memory": tune(
        "torchtune.models.phi3.phi3_mini",
        "bitsandbytes.optim.PagedAdamW",
        5e-6,
        data="alpaca_cleaned_dataset",
        optimizer_in_bwd=True,
        enable_activation_offloading=True,
    ),
    "mistral/7B_full": tune(
        "torchtune.models.mistral.mistral_7b",
        "torch.optim.AdamW",
        5e-6,
        sizes=(2, 3),
        dataset={"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": True},
        loss={"_component_": "torch.nn.CrossEntropyLoss"},
        cpu_offload=False,
        log_every_n_steps=None,
        enable_torch_profiler=False,
        output_file_path="./torchtune_perf_tracing.json",
    ),
    "qwen2_5/7B_full_single_device": tune(
        "torchtune.models.qwen2_5.qwen2_5_7b_instruct",
        "bitsandbytes.optim.PagedAdamW",
        5e-6,
        data="alpaca_cleaned_dataset",
        optimizer_in_bwd=True,
    ),
    "llama3_2/1B_full": tune(
        "torchtune.models.llama3_2.llama3_2_1b",
        "torch.optim.AdamW",
        2e-5,
        sizes=(4, 3),
        gradient_accumulation_steps=4,
        enable_activation_checkpointing=False,
        lr_scheduler={
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 10,
        },
    ),
}
