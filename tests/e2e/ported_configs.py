"""Configs that axolotl, LLaMA-Factory, TRL (with the recipes written for it) and torchtune ship: most are of full
fine-tuning, some of LoRA.

Facts only: keys and values of public examples, in our own layout, without their comments. What many examples of a tool
have in common stands once. A value of `IMPOSSIBLE` is a part of the error that the config must end with.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.e2e.ported_recipes import CHECKPOINTED, TORCHTUNE, TRL, Config

WANDB: Config = dict.fromkeys(("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model"))
LORA: Config = dict.fromkeys(
    ("adapter", "lora_model_dir", "lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_fan_in_fan_out")
)
UNQUANTISED: Config = {"load_in_8bit": False, "load_in_4bit": False, "strict": False}
PREPARED: Config = {"dataset_prepared_path": "last_run_prepared"}
EMPTY: Config = dict.fromkeys(
    ("early_stopping_patience", "resume_from_checkpoint", "xformers_attention", "eval_table_size", "debug")
)
UNSHARDED: Config = {"deepspeed": None, "fsdp": None, "fsdp_config": None}
FSDP1: Config = {
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {
        "fsdp_limit_all_gathers": True,
        "fsdp_offload_params": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    },
}
FSDP2: Config = {
    "fsdp_version": 2,
    "fsdp_config": {
        "offload_params": False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
    },
}
ALPACA: Config = {"datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}]}
SHAREGPT: Config = {
    "datasets": [
        {
            "path": "mlabonne/FineTome-100k",
            "type": "chat_template",
            "split": "train[:20%]",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
        }
    ]
}


def batch(accumulation: int, micro: int, epochs: float = 1) -> Config:
    return {"gradient_accumulation_steps": accumulation, "micro_batch_size": micro, "num_epochs": epochs}


def rate(optimizer: str, learning_rate: float, scheduler: str = "cosine") -> Config:
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "learning_rate": learning_rate}


def per_epoch(evals: int, saves: int) -> Config:
    return {"evals_per_epoch": evals, "saves_per_epoch": saves}


AXOLOTL: Mapping[str, Config] = {
    "llama-3/fft-8b": {
        "base_model": "meta-llama/Meta-Llama-3-8B", "model_type": "LlamaForCausalLM",
        "tokenizer_type": "AutoTokenizer", **UNQUANTISED, **ALPACA, **PREPARED, "val_set_size": 0.05,
        "output_dir": "./out", "sequence_len": 8192, "sample_packing": True, "pad_to_sequence_len": True, **WANDB,
        **batch(8, 1), **rate("paged_adamw_8bit", 2e-5), "train_on_inputs": False, "group_by_length": False,
        "bf16": "auto", "fp16": None, "tf32": False, **CHECKPOINTED, **EMPTY, "logging_steps": 1,
        "flash_attention": True, "warmup_steps": 100, **per_epoch(2, 1), "weight_decay": 0.0, **UNSHARDED,
        "special_tokens": {"pad_token": "<|end_of_text|>"},
    },
    "llama-3/fft-8b-liger-fsdp": {
        "base_model": "NousResearch/Meta-Llama-3.1-8B", "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True,
        "liger_fused_linear_cross_entropy": True, "chat_template": "llama3", **SHAREGPT, **PREPARED,
        "val_set_size": 0.02, "output_dir": "./outputs/out", "sequence_len": 4096, "sample_packing": True,
        "pad_to_sequence_len": True, **WANDB, **batch(4, 2), **rate("adamw_torch_fused", 2e-5), "bf16": "auto",
        "tf32": False, **CHECKPOINTED, "resume_from_checkpoint": None, "logging_steps": 1, "attention": "flash",
        "warmup_steps": 100, **per_epoch(2, 1), "weight_decay": 0.0, **FSDP1,
        "special_tokens": {"pad_token": "<|finetune_right_pad_id|>", "eos_token": "<|eot_id|>"},
    },
    "archived/mpt-7b": {
        "base_model": "mosaicml/mpt-7b", "tokenizer_type": "AutoTokenizer", "trust_remote_code": True,
        "load_in_8bit": False, **ALPACA, "dataset_prepared_path": None, "val_set_size": 0.02, **LORA,
        "lora_target_modules": ["q_proj", "v_proj"], "sequence_len": 2048, "max_packed_sequence_len": None, **WANDB,
        "output_dir": "./outputs/mpt-alpaca-7b", **batch(1, 1, 4), **rate("adamw_bnb_8bit", 2e-7),
        "torchdistx_path": None, "bf16": "auto", "tf32": True, "resume_from_checkpoint": None, "logging_steps": 5,
        "gptq_groupsize": None, "gptq_model_v1": None, "warmup_ratio": 0.1, **per_epoch(4, 1), "weight_decay": 1e-4,
        "tokens": {"pad_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    },
    "compare-adamw-pretrain": {
        "base_model": "Qwen/Qwen2.5-0.5B", "model_type": "AutoModelForCausalLM", "reinit_weights": True,
        **UNQUANTISED, "pretraining_dataset": [
            {"path": "allenai/c4", "name": "en", "type": "pretrain", "split": "train"}
        ], "dataset_prepared_path": None, "val_set_size": 0.0, "output_dir": "./outputs/compare-adamw-pretrain",
        "sequence_len": 2048, "sample_packing": True, "pad_to_sequence_len": True, **WANDB, **batch(1, 4),
        "max_steps": 305, **rate("adamw_torch_fused", 2e-4), "weight_decay": 0.01, "lr_scheduler_kwargs": None,
        "train_on_inputs": True, "group_by_length": False, "bf16": "auto", "fp16": False, "tf32": False,
        "gradient_checkpointing": False, **EMPTY, "local_rank": None, "logging_steps": 1, "flash_attention": True,
        "warmup_steps": 10, **per_epoch(0, 1), "deepspeed": None, "seed": 42, **FSDP1, "special_tokens": None,
    },
    "LiquidAI/lfm2-350m-fft": {
        "base_model": "LiquidAI/LFM2-350M", "chunked_cross_entropy": True, "eot_tokens": ["<|im_end|>"],
        "datasets": [{
            "path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:20%]",
            "field_messages": "conversations", "message_field_role": "from", "message_field_content": "value",
        }],
        **PREPARED, "val_set_size": 0.05, "output_dir": "./outputs/out", "sequence_len": 4096, "sample_packing": True,
        **WANDB, **batch(2, 4), **rate("adamw_torch_fused", 5e-5), "bf16": True, "tf32": True,
        "gradient_checkpointing": False, "resume_from_checkpoint": None, "logging_steps": 1, "flash_attention": True,
        "warmup_ratio": 0.1, **per_epoch(2, 1), "weight_decay": 0.0,
    },
    "alst/llama3-8b-deepspeed-alst": {
        "base_model": "meta-llama/Llama-3.1-8B",
        "datasets": [
            {"path": "togethercomputer/Long-Data-Collections", "type": "completion", "field": "text",
             "data_files": ["pretrain/rp_sub.jsonl.zst"]},
            {"path": "princeton-nlp/TextbookChapters", "type": "completion", "field": "chapter"},
        ],
        **PREPARED, "val_set_size": 0.0, "output_dir": "./outputs/out", "sequence_len": 500_000,
        "min_sample_len": 200_000, "sample_packing": True, "tiled_mlp": True, "sequence_parallel_degree": 8,
        "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"], **batch(1, 1),
        **rate("adamw_torch_8bit", 2e-5), "bf16": "auto", "tf32": True, "gradient_checkpointing": True,
        "activation_offloading": "legacy", "resume_from_checkpoint": None, "logging_steps": 1,
        "flash_attention": True, "warmup_steps": 100, **per_epoch(2, 1), "weight_decay": 0.0,
        "special_tokens": {"pad_token": "<|end_of_text|>"},
        "deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json",
    },
    "llama-3/sparse-finetuning": {
        "base_model": "neuralmagic/Sparse-Llama-3.1-8B-2of4",
        "plugins": ["axolotl.integrations.llm_compressor.LLMCompressorPlugin"], **UNQUANTISED, **ALPACA,
        "output_dir": "./outputs/out", "sequence_len": 4096, "sample_packing": True, **batch(8, 1),
        **rate("paged_adamw_8bit", 2e-5), "bf16": "auto", "flash_attention": True, "warmup_steps": 100,
        "llmcompressor": {"recipe": {"finetuning_stage": {"finetuning_modifiers": {}}}, "save_compressed": True},
    },
    "glm45/glm4.5-fft-fsdp2": {
        "base_model": "zai-org/GLM-4.5-Air",
        "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
        "experimental_skip_move_to_device": True,
        "datasets": [{"path": "winglian/pirate-ultrachat-10k", "type": "chat_template"}], **PREPARED,
        "val_set_size": 0, "output_dir": "./outputs/qlora-out", "sequence_len": 2048, "sample_packing": True,
        "eval_sample_packing": True, **WANDB, **batch(1, 1), **rate("adamw_torch_4bit", 2e-4), "bf16": "auto",
        "tf32": False, "resume_from_checkpoint": None, "logging_steps": 1, "flash_attention": True,
        "loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3, "warmup_ratio": 0.1, **per_epoch(1, 1),
        "weight_decay": 0.0, "special_tokens": None, **FSDP2,
    },
    "phi/phi3-ft": {
        "base_model": "microsoft/Phi-3-mini-4k-instruct", "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer", **UNQUANTISED,
        "datasets": [{"path": "aaditya/alpaca_subset_1", "type": "alpaca"}], "dataset_prepared_path": None,
        "val_set_size": 0, "output_dir": "./phi-sft-out", "sequence_len": 4000, "sample_packing": True,
        "pad_to_sequence_len": True, "trust_remote_code": True, **LORA, **WANDB, "wandb_project": "phi3",
        **batch(2, 12, 2), **rate("adamw_torch", 3e-6), "adam_beta2": 0.95, "adam_epsilon": 0.00001,
        "max_grad_norm": 1.0, "train_on_inputs": False, "group_by_length": False, "bf16": "auto", "fp16": None,
        "tf32": True, **CHECKPOINTED, **EMPTY, "local_rank": None, "logging_steps": 1, "flash_attention": True,
        "warmup_steps": 100, **per_epoch(4, 1), "deepspeed": None, "weight_decay": 0.1, **FSDP1,
        "resize_token_embeddings_to_32x": True, "special_tokens": {"pad_token": "<|endoftext|>"},
    },
    "tiny-llama/pretrain": {
        "base_model": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "model_type": "LlamaForCausalLM",
        "tokenizer_type": "LlamaTokenizer", "is_llama_derived_model": True, **UNQUANTISED, "max_steps": 200,
        "pretraining_dataset": {"path": "c4", "name": "en"}, "dataset_prepared_path": None, "val_set_size": 0.0,
        "output_dir": "./model-out", "sequence_len": 2048, "sample_packing": True, **WANDB, **batch(4, 2, 4),
        **rate("adamw_bnb_8bit", 2e-4), "train_on_inputs": False, "group_by_length": False, "bf16": "auto",
        "fp16": False, "tf32": False, "gradient_checkpointing": True, **EMPTY, "local_rank": None, "logging_steps": 1,
        "flash_attention": True, "warmup_steps": 10, "evals_per_epoch": None, "saves_per_epoch": 1,
        "weight_decay": 0.0, **UNSHARDED, "special_tokens": None,
    },
    "streaming/sft": {
        "base_model": "HuggingFaceTB/SmolLM2-135M",
        "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca", "split": "train"}], "streaming": True,
        "streaming_multipack_buffer_size": 10_000, "shuffle_merged_datasets": True, "max_steps": 1000,
        "output_dir": "./outputs/smollm2-135m-sft-streaming", "sequence_len": 1024, "sample_packing": True,
        "flash_attention": True, "gradient_accumulation_steps": 4, "micro_batch_size": 1, **rate("adamw_torch", 2e-4),
        "warmup_ratio": 0.1, "weight_decay": 0.0, "bf16": "auto", "tf32": True, "logging_steps": 10,
        "save_strategy": "steps", "save_steps": 100, "save_total_limit": 3, **WANDB,
        "special_tokens": {"pad_token": "<|endoftext|>"},
    },
    "falcon-e/falcon-e-3b-ft": {
        "base_model": "tiiuae/Falcon-E-3B-Base-prequantized", "output_dir": "./output",
        "plugins": ["axolotl.integrations.kernels.KernelsPlugin"], "use_kernels": False, "use_onebitllms": True,
        "load_in_8bit": False, "load_in_4bit": False, "chat_template": "tokenizer_default", **SHAREGPT,
        "sequence_len": 32768, "trust_remote_code": False, **batch(4, 1, 3), **rate("adamw_torch", 5e-4),
        "bf16": True, "flash_attention": True, "warmup_steps": 128, "save_steps": 500, "save_strategy": "steps",
    },
    "distributed-parallel/qwen3-8b-fsdp-tp-cp": {
        "base_model": "Qwen/Qwen3-8B", "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
        "dp_shard_size": 2, "context_parallel_size": 2, "tensor_parallel_size": 2, **PREPARED, **FSDP2, **ALPACA,
        "output_dir": "./outputs/ndp-out/", "sequence_len": 8192, "sample_packing": True,
        "attn_implementation": "flash_attention_2", **batch(1, 1, 2),
        **rate("adamw_torch_fused", 2e-6, "constant_with_warmup"), "bf16": True, "tf32": True, "logging_steps": 1,
        "saves_per_epoch": 1, "warmup_ratio": 0.1, "special_tokens": None,
    },
    "eurollm/tower-wmt24": {
        "base_model": "utter-project/EuroLLM-1.7B", "model_type": "AutoModelForCausalLM",
        "tokenizer_type": "AutoTokenizer", **UNQUANTISED,
        "datasets": [{"path": "Unbabel/Tower-v1-2106", "type": "sharegpt", "conversation": "chatml"}],
        "chat_template": "chatml", "dataset_prepared_path": None, "val_set_size": 0, "output_dir": "SFT-2106",
        "sequence_len": 4096, "sample_packing": True, "pad_to_sequence_len": True, **LORA, **WANDB,
        "wandb_project": "translation-llm", **batch(4, 8, 2), "eval_batch_size": 1, **rate("adamw_torch", 7e-6),
        "train_on_inputs": False, "group_by_length": False, "bf16": True, "fp16": False, "tf32": False,
        "gradient_checkpointing": True, **EMPTY, "local_rank": None, "logging_steps": 10, "flash_attention": True,
        "flash_attn_cross_entropy": False, "flash_attn_rms_norm": True, "warmup_steps": 125, "eval_steps": None,
        "eval_sample_packing": False, "save_steps": None, "save_total_limit": None,
        "deepspeed": "deepspeed/zero3.json", "weight_decay": 0.01, "fsdp": None, "fsdp_config": None,
        "tokens": ["<|im_start|>"],
        "special_tokens": {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
    },
    "llama-2/fft_optimized": {
        "base_model": "NousResearch/Llama-2-7b-hf", "model_type": "LlamaForCausalLM",
        "tokenizer_type": "LlamaTokenizer", "is_llama_derived_model": True, **UNQUANTISED,
        "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}], **PREPARED, "val_set_size": 0.05,
        "output_dir": "./out", "sequence_len": 4096, "sample_packing": True, "pad_to_sequence_len": True, **LORA,
        **WANDB, **batch(1, 1), **rate("adamw_bnb_8bit", 2e-4), "train_on_inputs": False, "group_by_length": False,
        "bf16": "auto", "fp16": False, "tf32": False, "gradient_checkpointing": True, **EMPTY, "local_rank": None,
        "logging_steps": 1, "flash_attention": True, "flash_attn_cross_entropy": False, "flash_attn_rms_norm": True,
        "flash_attn_fuse_qkv": False, "flash_attn_fuse_mlp": True, "warmup_steps": 100, **per_epoch(4, 1),
        "weight_decay": 0.1, **UNSHARDED,
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    },
    "gpt-oss/gpt-oss-20b-fft-fsdp2": {
        "base_model": "openai/gpt-oss-20b", "use_kernels": False, "model_quantization_config": "Mxfp4Config",
        "model_quantization_config_kwargs": {"dequantize": True},
        "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
        "experimental_skip_move_to_device": True,
        "datasets": [{"path": "HuggingFaceH4/Multilingual-Thinking", "type": "chat_template",
                      "field_thinking": "thinking", "template_thinking_key": "thinking"}],
        "val_set_size": 0, "output_dir": "./outputs/gpt-oss-out/", "sequence_len": 4096, "sample_packing": True,
        **WANDB, **batch(2, 1), **rate("adamw_torch_8bit", 2e-5, "constant_with_warmup"), "bf16": True, "tf32": True,
        "flash_attention": True, "attn_implementation": "kernels-community/vllm-flash-attn3",
        "gradient_checkpointing": True, "activation_offloading": True, "logging_steps": 1, "saves_per_epoch": 1,
        "warmup_ratio": 0.03, "special_tokens": None, "eot_tokens": ["<|end|>"], **FSDP2,
    },
    "llama-3/3b-fp8-fsdp2": {
        "base_model": "meta-llama/Llama-3.2-3B", **UNQUANTISED,
        "plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_layer_norm": True,
        "datasets": [{"path": "yahma/alpaca-cleaned", "type": "alpaca"}], "output_dir": "./outputs/fp8_out/",
        "sample_packing": True, "pad_to_sequence_len": True, "sequence_len": 512, "flex_attention": True,
        "flex_attn_compile_kwargs": {"dynamic": False, "mode": "max-autotune-no-cudagraphs"}, "torch_compile": True,
        **WANDB, **batch(1, 16), "optimizer": "adamw_torch_fused", "cosine_constant_lr_ratio": 0,
        "cosine_min_lr_ratio": 1.0, "learning_rate": 2e-5, "save_only_model": True, "fp8": True,
        "fp8_enable_fsdp_float8_all_gather": True, "resume_from_checkpoint": None, "logging_steps": 1,
        **per_epoch(1, 1), "warmup_steps": 10, "weight_decay": 0.0, "fsdp_config": {"fsdp_version": 2},
        "special_tokens": {"pad_token": "<|end_of_text|>"},
    },
}  # fmt: skip

LORA_ON: Config = {
    "adapter": "lora", "lora_model_dir": None, "lora_r": 32, "lora_alpha": 16, "lora_dropout": 0.05,
    "lora_target_linear": True, "lora_fan_in_fan_out": None,
}  # fmt: skip
AXOLOTL_LORA: Mapping[str, Config] = {
    "llama-2/lora, unquantised": {
        "base_model": "NousResearch/Llama-2-7b-hf", "model_type": "LlamaForCausalLM",
        "tokenizer_type": "LlamaTokenizer", **UNQUANTISED,
        "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}], "dataset_prepared_path": None,
        "val_set_size": 0.05, "output_dir": "./outputs/lora-out", "sequence_len": 4096, "sample_packing": True,
        "pad_to_sequence_len": True, **LORA_ON, "lora_target_modules": None, **WANDB, **batch(4, 2, 4),
        **rate("adamw_bnb_8bit", 2e-4), "bf16": "auto", "tf32": False, **CHECKPOINTED, **EMPTY, "logging_steps": 1,
        "flash_attention": True, "warmup_steps": 10, **per_epoch(4, 1), "weight_decay": 0.0, **UNSHARDED,
        "lora_qkv_kernel": True, "lora_o_kernel": True, "lora_mlp_kernel": True,
    },
    "qwen3/8b-lora-fused-attn": {
        "base_model": "Qwen/Qwen3-8B", **UNQUANTISED, "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
        "dataset_prepared_path": None, "val_set_size": 0.05, "output_dir": "./outputs/qwen3-8b-lora-fused",
        "sequence_len": 4096, "sample_packing": True, "eval_sample_packing": True, "adapter": "lora", "lora_r": 32,
        "lora_alpha": 64, "lora_dropout": 0.0, "lora_target_linear": True, "fused_attn_kernel": True, **batch(4, 1),
        **rate("adamw_torch_fused", 2e-4), "num_epochs": 1, "bf16": "auto", "tf32": False,
        "gradient_checkpointing": True, "flash_attention": True, "warmup_ratio": 0.1, "saves_per_epoch": 1,
        "weight_decay": 0.0,
    },
    "swanlab/lora-swanlab-profiling": {
        "base_model": "NousResearch/Llama-3.2-1B", "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
        "val_set_size": 0.1, "output_dir": "./outputs/lora-swanlab-profiling-out", "adapter": "lora", "lora_r": 16,
        "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": [
            "gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"
        ],
        "sequence_len": 2048, "sample_packing": True, "eval_sample_packing": True, **batch(2, 2), "num_epochs": 1,
        **rate("adamw_8bit", 2e-4), "warmup_ratio": 0.1, "weight_decay": 0.0, "bf16": "auto", "tf32": False,
        "gradient_checkpointing": True, "attn_implementation": "flash_attention_2", "logging_steps": 1,
        "evals_per_epoch": 4, "saves_per_epoch": 1, "loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3,
        "special_tokens": {"pad_token": "<|end_of_text|>"},
        "plugins": ["axolotl.integrations.swanlab.SwanLabPlugin"], "use_swanlab": True,
        "swanlab_project": "lora-profiling", "swanlab_experiment_name": "llama-3.2-1b-profiling-demo",
        "swanlab_mode": "cloud", "swanlab_log_completions": False,
    },
}  # fmt: skip

LLAMA_FACTORY_COMMON: Config = {
    "stage": "sft", "do_train": True, "finetuning_type": "full", "template": "qwen", "overwrite_cache": True,
    "preprocessing_num_workers": 16, "plot_loss": True, "overwrite_output_dir": True,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 1.0e-5,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "ddp_timeout": 180000000,
    "logging_steps": 10, "save_steps": 500,
}  # fmt: skip
DEMO: Config = {**LLAMA_FACTORY_COMMON, "dataset": "identity,alpaca_en_demo", "max_samples": 1000, "cutoff_len": 2048}
HELD_OUT: Config = {"val_size": 0.1, "per_device_eval_batch_size": 1, "eval_steps": 500}
ZERO3: Config = {"deepspeed": "examples/deepspeed/ds_z3_config.json"}
TRACES: Config = {
    **LLAMA_FACTORY_COMMON, "dataset": "tbench_traces_sharegptv1", "cutoff_len": 32768, "max_samples": None,
    "enable_liger_kernel": True, "report_to": "wandb", "gradient_checkpointing": True, "trust_remote_code": True,
    "dataloader_num_workers": 8, "save_only_model": True, "max_grad_norm": 1.0e-3, "weight_decay": 0.01,
}  # fmt: skip

QWEN3_LORA: Config = {
    **LLAMA_FACTORY_COMMON, "trust_remote_code": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
    "cutoff_len": 2048, "dataloader_num_workers": 4, "save_only_model": False, "report_to": "none",
    "gradient_accumulation_steps": 8, "learning_rate": 1.0e-4, "bf16": True, "resume_from_checkpoint": None,
}  # fmt: skip

LLAMA_FACTORY: Mapping[str, Config] = {
    "llama3_lora_sft": {
        **DEMO, "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "trust_remote_code": True,
        "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "template": "llama3",
        "output_dir": "saves/llama3-8b/lora/sft", "bf16": True,
    },
    "train_lora/qwen3_lora_sft": {
        **QWEN3_LORA, "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "dataset": "identity,alpaca_en_demo",
        "template": "qwen3_nothink", "max_samples": 1000, "output_dir": "saves/qwen3-4b/lora/sft",
    },
    "ktransformers/train_lora/qwen3moe_lora_sft_kt": {
        **QWEN3_LORA, "model_name_or_path": "Qwen/Qwen3-235B-A22B-Instruct-2507",
        "dataset": "identity, alpaca_en_demo", "template": "qwen3", "max_samples": 100000,
        "output_dir": "saves/KT_FT_qwen3Moe", "use_kt": True,
    },
    "llama3_full_sft": {
        **DEMO, "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "trust_remote_code": True, **ZERO3,
        "template": "llama3", "output_dir": "saves/llama3-8b/full/sft", "bf16": True,
    },
    "nanbeige42_full_sft": {
        **DEMO, "model_name_or_path": "Nanbeige/Nanbeige4.2-3B", "trust_remote_code": True, **ZERO3,
        "use_fast_tokenizer": False, "dataloader_num_workers": 4, "save_only_model": False, "report_to": "none",
        "output_dir": "saves/nanbeige42-3b/full/sft", "bf16": True, "resume_from_checkpoint": None,
    },
    "qwen2_full_sft_ds3_gaudi": {
        **DEMO, "model_name_or_path": "Qwen/Qwen2-7B-Instruct", "trust_remote_code": True, "dataset": "alpaca_en",
        "deepspeed": "examples/deepspeed/ds_z3_config_gaudi.json", "output_dir": "saves/qwen2", "bf16": True,
        "use_habana": True, "use_lazy_mode": True, "gaudi_config_name": "Habana/qwen",
    },
    "qwen3_full_sft_fsdp2": {
        **TRACES, "model_name_or_path": "Qwen/Qwen3-8B", "attn": "fa2", "torch_compile": False,
        "torch_compile_backend": "inductor", "include_mfu": True, "mask_history": True,
        "dataloader_prefetch_factor": 1, "dataloader_persistent_workers": False, "dataloader_pin_memory": False,
        "output_dir": "output/qwen3_full_sft_fsdp", "bf16": True, "pure_bf16": False,
    },
    "qwen3_full_sft_e2_adamw_bnb_8bit": {
        **TRACES, "model_name_or_path": "Qwen/Qwen3-8B", **ZERO3, "output_dir": "output/e2", "bf16": True,
        "pure_bf16": False, "optim": "adamw_bnb_8bit", "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1.0e-8,
        "push_to_hub": False,
    },
    "qwen3_full_sft_256k": {
        **TRACES, "model_name_or_path": "Qwen/Qwen3-8B", "rope_scaling": "yarn", "flash_attn": "auto",
        "sequence_parallel_size": 4, "sequence_parallel_mode": "ulysses", "cutoff_len": 204800, "bf16": True,
        "output_dir": "output/ulysses", **ZERO3,
    },
    "qwen3_full_sft_alst": {
        **TRACES, "model_name_or_path": "Qwen/Qwen3-8B", "rope_scaling": "linear", "attn": "sdpa",
        "sequence_parallel_size": 4, "sequence_parallel_mode": "deepspeed-alst", "alst_sequence_backend": "deepspeed",
        "alst_ulysses_degree": 4, "alst_sequence_tiling": True, "alst_memory_optimizations": True, **ZERO3,
        "mask_history": True, "cutoff_len": 196608, "output_dir": "output/alst", "bf16": True, "pure_bf16": True,
    },
    "qwen2_5_full_sft_fp8_te": {
        **TRACES, "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "rope_scaling": "yarn", "flash_attn": "auto",
        **ZERO3, "fp8": True, "fp8_backend": "te", "fp8_enable_fsdp_float8_all_gather": True, "bf16": False,
        "output_dir": "output/fp8_te",
    },
    "extras/galore/llama3_full_sft": {
        **DEMO, **HELD_OUT, "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "use_galore": True,
        "galore_layerwise": True, "galore_target": "mlp,self_attn", "galore_rank": 128, "galore_scale": 2.0,
        "output_dir": "saves/galore", "warmup_steps": 0.1, "pure_bf16": True, "evaluation_strategy": "steps",
    },
    "extras/pure_bf16 with a warm-up below one": {
        **{key: value for key, value in DEMO.items() if key != "warmup_ratio"}, **HELD_OUT,
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "output_dir": "saves/pure", "pure_bf16": True,
        "warmup_steps": 0.1, "eval_strategy": "steps",
    },
}  # fmt: skip

PORTED: Mapping[str, Config] = {
    f"{tool}: {name}": config
    for tool, configs in (
        ("axolotl", AXOLOTL),
        ("axolotl", AXOLOTL_LORA),
        ("LLaMA-Factory", LLAMA_FACTORY),
        ("TRL", TRL),
        ("torchtune", TORCHTUNE),
    )
    for name, config in configs.items()
}
IMPOSSIBLE: Mapping[str, str] = {
    "axolotl: llama-3/sparse-finetuning": "LLMCompressorPlugin changes what is trained",
    "axolotl: falcon-e/falcon-e-3b-ft": "`use_onebitllms` is not a key of Ratel: Ratel does not quantise",
    "LLaMA-Factory: extras/galore/llama3_full_sft": "`use_galore` is not a key of Ratel: it belongs to another",
}
