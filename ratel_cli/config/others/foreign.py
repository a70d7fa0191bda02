"""The keys of other trainers that Ratel has no key for, and what becomes of each.

    ignored      Ratel does it anyway, or it changes nothing in a run
    noted        it is about how another engine works; the reason is printed
    undecided    it changes what is trained, mildly; the user decides
    impossible   it changes what is trained, and Ratel does not do it

Invariant: a key that changes which numbers come out is never ignored. An empty value is always ignored, and so is
the key's default, which is `false` for whatever a user would have to turn on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ratel_cli.config.keys.topics import instead_of
from ratel_cli.config.yaml.yaml_marks import Marked, Plain, plain

Fate = Literal["ignored", "noted", "undecided", "impossible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What becomes of a key."""

    fate: Fate
    reason: str
    hint: str = ""
    harmless: tuple[Plain, ...] = ()
    """Values that change nothing, in addition to empty ones and the default."""
    default: Plain = False
    """What the other trainer has if the key is not there."""

    def fate_of(self, value: Marked) -> Fate:
        """What becomes of the key with this value."""
        content = plain(value)
        # 0 may stand for false, 0.0 is a number.
        default = None if self.default is False and isinstance(content, float) else self.default
        if content in (default, None, "", [], {}):
            return "ignored"
        if self.fate in ("undecided", "impossible") and content in self.harmless:
            return "ignored"
        return self.fate


_GROUPS: Sequence[tuple[Foreign, str]] = (
    (
        Foreign(fate="ignored", reason="the files of the model say which classes it has"),
        """model_type tokenizer_type processor_type is_llama_derived_model is_falcon_derived_model
        is_mistral_derived_model is_qwen_derived_model cls_model_config tokenizer_use_fast use_fast_tokenizer
        use_fast use_fast_processor model_class is_encoder_decoder type_of_model""",
    ),
    (
        Foreign(fate="ignored", reason="it only affects how the model is loaded"),
        """use_cache low_cpu_mem_usage device_map max_memory gpu_memory_limit cache_dir base_model_ignore_patterns
        experimental_skip_move_to_device""",
    ),
    (
        Foreign(fate="ignored", reason="it configures distributed training; Ratel has `--ranks`"),
        """local_rank world_size _n_gpu n_gpu ddp use_ray ray_scope ray_num_workers resources_per_worker mp_parameters
        average_tokens_across_devices split_batches accelerator_config parallelism_config sharded_ddp env
        data_shared_file_system seed_worker dist_timeout ray_*""",
    ),
    (
        Foreign(fate="ignored", reason="it only affects logging"),
        """debug log_level log_level_replica log_on_each_node logging_strategy logging_first_step
        logging_nan_inf_filter logging_dir disable_tqdm plot_loss include_num_input_tokens_seen
        include_tokens_per_second include_mfu include_tkps skip_memory_metrics profiler_steps profiler_steps_start
        tpu_metrics_debug print_param_status telemetry trackio_space_id trackio_bucket_id trackio_static_space_id
        log_completions log_completions_hub_repo log_multimodal log_unique_prompts num_completions_to_print
        ignore_bias_buffers mfu_* profiler_* gradio_*""",
    ),
    (
        Foreign(fate="ignored", reason="it only affects checkpoint files and resuming"),
        """save_safetensors save_only_model save_first_step save_on_each_node restore_callback_states_from_checkpoint
        ignore_data_skip enable_jit_checkpoint overwrite_cache tokenizer_save_jinja_files dynamic_checkpoint
        num_dataset_shards_to_save axolotl_config_path save_ckpt_as_hf""",
    ),
    (
        Foreign(fate="ignored", reason="it only affects evaluation"),
        """do_train do_eval eval_do_concat_batches prediction_loss_only include_for_metrics include_inputs_for_metrics
        eval_on_start eval_use_gather_object eval_accumulation_steps batch_eval_metrics fp16_full_eval
        bf16_full_eval per_device_eval_batch_size eval_batch_size use_logits_to_keep compute_accuracy label_names
        remove_unused_columns length_column_name""",
    ),
    (Foreign(fate="ignored", reason="Ratel checks every key of a config"), "strict"),
    (
        Foreign(fate="ignored", reason="the hub's token comes from the environment"),
        "hf_use_auth_token hf_hub_token hub_token push_to_hub_token ms_hub_token om_hub_token",
    ),
    (
        Foreign(fate="ignored", reason="it belongs to other hardware, or to older releases of its tool"),
        """past_index tpu_num_cores use_mps_device use_ipex jit_mode_eval xpu_backend fp16_opt_level
        half_precision_backend fp16_backend torchdistx_path use_habana use_lazy_mode gaudi_config_name
        use_hpu_graphs use_v2_trainer push_to_hub_model_id push_to_hub_organization""",
    ),
    (
        Foreign(fate="ignored", reason="it avoids running out of memory; Ratel plans its memory"),
        "gc_steps gc_collect_steps torch_empty_cache_steps auto_find_batch_size large_head_attention",
    ),
    (Foreign(fate="ignored", reason="Ratel adds no tokens to a vocabulary"), "mean_resizing_embeddings"),
    (Foreign(fate="ignored", reason="padding has no loss"), "pad_token padding_value"),
    (Foreign(fate="ignored", reason="Ratel computes the loss in fp32"), "upcast_lmhead_output embeddings_skip_upcast"),
    (
        Foreign(fate="ignored", reason="text has no images"),
        """crop_to_patches image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen
        use_audio_in_video audio_sampling_rate""",
    ),
    (Foreign(fate="ignored", reason="Ratel trains no adapters of embeddings"), "loraplus_lr_embedding"),
    (
        Foreign(fate="ignored", reason="`seed` gives the order of the rows"),
        """data_seed full_determinism shuffle_merged_datasets shuffle_before_merging_datasets shuffle_dataset
        buffer_size streaming_multipack_buffer_size pretrain_multipack_buffer_size""",
    ),
    (Foreign(fate="ignored", reason="`device: auto` takes the GPU if there is one"), "use_cpu no_cuda"),
    (
        Foreign(fate="noted", reason="no text is generated while Ratel trains"),
        """do_sample temperature top_p top_k min_p num_beams max_new_tokens repetition_penalty length_penalty
        skip_special_tokens generation_kwargs cache_implementation generation_config infer_backend infer_dtype
        vllm_enforce_eager vllm_maxlen vllm_gpu_util vllm_config vllm_max_lora_rank sglang_maxlen
        sglang_mem_fraction sglang_tp_size sglang_config sample_backend""",
    ),
    (
        Foreign(fate="noted", reason="Ratel exports in the format of the base model; see `ratel export`"),
        """export_dir export_hub_model_id export_device export_size export_legacy_format export_quantization_bit
        export_quantization_dataset export_quantization_nsamples export_quantization_maxlen export_hf_on_finish""",
    ),
    (Foreign(fate="noted", reason="products in fp32 stay in fp32, which is more exact"), "tf32"),
    (
        Foreign(fate="ignored", reason="the plan decides what is recomputed or offloaded; see `activations`"),
        """gradient_checkpointing gradient_checkpointing_kwargs disable_gradient_checkpointing activation_checkpointing
        activation_checkpointing_kwargs use_reentrant_gc activation_offloading activations_offloading tiled_mlp
        tiled_mlp_use_original_mlp tiled_mlp_num_shards use_unsloth_gc offload_activations
        enable_activation_checkpointing layer_offloading selective_checkpointing""",
    ),
    (
        Foreign(fate="ignored", reason="it only selects kernels; see `attn_implementation`"),
        """flash_attention flash_attn attn attention xformers_attention sdp_attention eager_attention flex_attention
        flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp
        flash_attn_fuse_qkv flash_attn_fuse_cross_entropy flash_optimum attn_needs_dtype_cast attn_supports_packing
        attn_uses_flash_lib cut_cross_entropy enable_cce use_cce cce chunked_cross_entropy
        chunked_cross_entropy_num_chunks use_liger_kernel use_liger enable_liger_kernel liger_kernel_config
        use_unsloth use_kernels use_scattermoe use_sonicmoe moe_kernels use_kernel use_hub_kernels use_v1_kernels
        kernel_name use_flash_attention_2 torch_compile torch_compile_backend torch_compile_mode
        torch_compile_dynamic torchdynamo compile experts_implementation padding_free loss_kernel fused_attn_kernel
        use_dsv4_kernels gemma4_hybrid_attn_impl kernel_config flash_attn_* liger_* cut_cross_entropy_* unsloth_*
        torch_compile_*""",
    ),
    (
        Foreign(fate="ignored", reason="Ratel prepares the data once, by itself"),
        """dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory push_dataset_to_hub
        preprocessing_num_workers preprocessing_batch_size batching_workers dataset_batch_size tokenized_path
        overwrite_prepared_data trust_remote_code_for_data num_proc preprocess_iterable dataloader_*
        datasets.ds_type datasets.preprocess_shards datasets.trust_remote_code datasets.columns datasets.ranking
        datasets.num_proc datasets.format_kwargs""",
    ),
    (
        Foreign(fate="ignored", reason="packing fills the sequences; see `sample_packing`"),
        """pad_to_sequence_len pad_to_multiple_of eval_sample_packing eval_packing sample_packing_group_size
        sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches
        neat_packing batch_flattening total_num_tokens total_supervised_tokens sample_packing_drop_attention_mask
        pretraining_sample_concatenation num_of_sequences sample_packing_*""",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel reads the rows in the order that `seed` gives, or in their own with `shuffle: false`",
            hint="remove it, or see `shuffle`",
        ),
        "train_sampling_strategy group_by_length sample_packing_sequentially curriculum_sampling",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel drops no rows at the end of an epoch; the last step may be smaller",
            hint="remove it",
        ),
        "dataloader_drop_last",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel packs whole samples, which do not attend to each other, and truncates longer ones",
            hint="remove it; see `sample_packing`",
        ),
        "batching_strategy packing_strategy pretrain_multipack_attn",
    ),
    (
        Foreign(
            fate="undecided",
            reason="an epoch of Ratel is one pass over all datasets, shuffled together",
            hint="remove it, or set `weight` of the datasets",
        ),
        "mix_strategy interleave_probs",
    ),
    (
        Foreign(fate="undecided", reason="Ratel tokenises the rows itself", hint="remove it"),
        "skip_prepare_dataset dataset_kwargs",
    ),
    (
        Foreign(fate="undecided", reason="Ratel computes everything in `dtype`, norms too", hint="remove it"),
        "upcast_layernorm fp32_norms fp32_norm_classes cast_lm_head_to_fp32",
    ),
    (Foreign(fate="undecided", reason="padding has no loss here", hint="remove it"), "ignore_pad_token_for_loss"),
    (
        Foreign(
            fate="undecided",
            reason="Ratel does not resize the embedding: new rows would count in the softmax",
            hint="remove it, or change the model beforehand",
        ),
        "resize_token_embeddings_to_32x shrink_embeddings",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel tokenises as the tokenizer's files say",
            hint="remove it, or change the files",
        ),
        "tokenizer_legacy",
    ),
    (
        Foreign(fate="undecided", reason="Ratel finds the layers of a model itself", hint="remove it"),
        "peft_layers_pattern",
    ),
    (
        Foreign(fate="impossible", reason="Ratel trains adapters of language models only", hint="remove it"),
        "lora_task_type",
    ),
    (
        Foreign(
            fate="noted",
            reason="`report_to` names the trackers, and the environment has their settings, such as WANDB_ENTITY",
        ),
        """use_wandb use_mlflow use_comet use_swanlab use_tensorboard use_otel_metrics use_trackio wandb_* mlflow_*
        comet_* swanlab_* trackio_* otel_*""",
    ),
    (
        Foreign(fate="noted", reason="with `hub_model_id` Ratel uploads the model once, at the end; otherwise nothing"),
        "push_to_hub hub_*",
    ),
    (
        Foreign(fate="noted", reason="Ratel streams the model through one device and needs no sharding"),
        """fsdp sequence_parallel_degree sequence_parallel_size sequence_parallel_mode context_parallel_size
        context_parallel_dim expert_parallel_size dp_shard_size dp_replicate_size dp_world_size
        data_parallel_shard_dim data_parallel_replicate_dim ring_attn_func heads_k_stride custom_sharded_layers
        pipeline_parallel_size tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
        sequence_parallel use_distributed_optimizer overlap_param_gather overlap_grad_reduce dist_config dp_size
        cp_size cp_mode mp_replicate_size mp_shard_size fsdp_* ddp_* alst_* expert_parallel_*""",
    ),
    (
        Foreign(
            fate="noted",
            reason="there is no tensor parallelism: a block that fits the device needs none; see `--ranks`",
        ),
        "tensor_parallel_size tensor_parallel tensor_parallel_dim",
    ),
    (
        Foreign(fate="noted", reason="Ratel has an engine of its own; see `storage` and `limits`"),
        """deepspeed deepspeed_config zero_optimization zero_stage offload_optimizer offload_param aio
        accelerate_config use_megatron use_kt unsloth optimizer_in_bwd optimizer_overlap_backward deepspeed_* kt_*""",
    ),
    (
        Foreign(
            fate="noted",
            reason="Ratel never runs code from a model's repository; models that transformers has need none",
        ),
        "trust_remote_code",
    ),
    (
        Foreign(
            fate="noted",
            reason="the tokenizer's own chat template is used; its system prompt, reasoning or end of a turn may "
            "differ",
        ),
        "template datasets.conversation datasets.roles_kwargs",
    ),
    (
        Foreign(
            fate="undecided",
            reason="the tokenizer's own chat template decides this",
            hint="remove it, or set a template that does it: `chat_template_jinja: FILE`",
        ),
        "tool_format default_system default_system_message chat_template_kwargs datasets.split_thinking",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel does not read the chat template of another tokenizer",
            hint="write it into a file: `chat_template_jinja: FILE`",
        ),
        "chat_template_path",
    ),
    (
        Foreign(fate="noted", reason="Ratel computes in `dtype`, which is more exact"),
        """fp8 fp8_backend fp8_recipe fp8_format fp8_enable_fsdp_float8_all_gather fp8_config enable_fp8
        enable_fp8_fsdp enable_fp8_training fp8_*""",
    ),
    (
        Foreign(fate="noted", reason="only evaluations can end a run early; see `early_stopping_patience`"),
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    (
        Foreign(
            fate="noted", reason="a run resumes automatically; `--resume no` starts over and `--resume STEP` goes back"
        ),
        "resume_from_checkpoint auto_resume_from_checkpoints",
    ),
    (
        Foreign(fate="noted", reason="Ratel resumes a run in its own directory, and overwrites no other directory"),
        "overwrite_output_dir",
    ),
    (
        Foreign(
            fate="noted",
            reason="Ratel evaluates the loss, and the accuracy of classifiers and preferences, on `val_set_size` or "
            "`test_datasets`",
        ),
        """eval_table_size eval_max_new_tokens eval_table_max_new_tokens callbacks benchmarks do_causal_lm_eval
        eval_causal_lm_metrics do_bench_eval bench_dataset bench_split dataset_test_split eval_on_each_dataset
        test_split eval_strategy_best predict_with_generate generate_samples num_generation_samples
        generation_max_length generation_num_beams""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="Ratel does not train this kind of adapter",
            hint="remove it; `adapter: lora` trains LoRA, and with `load_in_4bit: true` QLoRA",
        ),
        """peft adapter_name_or_path freeze_base_model pissa_init use_llama_pro lora_model_dir lora_init
        kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size lora_* qlora* peft_*""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="it trains a part of the weights, or an adapter",
            hint="name the part in `unfrozen_parameters`; `adapter: lora` trains an adapter",
        ),
        "finetuning_type peft_config",
    ),
    (
        Foreign(fate="noted", reason="Ratel computes with PEFT's modules"),
        "lora_qkv_kernel lora_o_kernel lora_mlp_kernel lora_embedding_kernel lora_on_cpu lora_fan_in_fan_out",
    ),
    (Foreign(fate="noted", reason="Ratel exports the adapter; `ratel merge` adds it to its base"), "merge_lora"),
    (
        Foreign(
            fate="impossible",
            reason="Ratel does not quantise in this way",
            hint="remove it; with an adapter, use `load_in_4bit` or `load_in_8bit`",
        ),
        """quantization_method quantization_type bnb_4bit_quant_type bnb_config_kwargs quantization_bit
        quantization_config quantization qat enable_qat llmcompressor nvfp4 mxfp4 use_bnb use_onebitllms
        quant_config bnb_*""",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel dequantises weights to `dtype` for computing",
            hint="set `dtype` to it, and remove it",
        ),
        "bnb_4bit_compute_dtype",
    ),
    (
        Foreign(fate="ignored", reason="the files of a quantised model say so"),
        "bnb_4bit_quant_storage gptq gptq_disable_exllama gptq_groupsize gptq_model_v1",
    ),
    (
        Foreign(
            fate="impossible",
            reason="it trains a part of the weights; Ratel has `unfrozen_parameters` for that",
            hint="remove it, and set `unfrozen_parameters`; without it Ratel trains every weight",
        ),
        """freeze_vision_tower freeze_multi_modal_projector freeze_mm_modules freeze_language_model
        freeze_trainable_layers freeze_trainable_modules freeze_extra_modules use_badam lisa_n_layers
        lisa_step_interval lisa_layers_attribute mixture_of_depths""",
    ),
    (
        Foreign(fate="impossible", reason="it belongs to another optimizer", hint="remove it, or see `optimizer`"),
        """use_galore use_apollo use_adam_mini use_lomo optim_target_modules adam_beta3 adam_epsilon2 torchao_optimizer
        dion_learning_rate dion_momentum dion_lr dion_rank_fraction dion_rank_multiple_of muon_momentum
        muon_learning_rate use_dion galore_* apollo_* badam_* muon_* dion_*""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="it belongs to reinforcement learning, or to a reward model",
            hint=instead_of("grpo"),
        ),
        """stage reward_model process_reward_model trl vllm reward_model_path reward_model_name_or_path
        reward_model_adapters reward_model_quantization_bit reward_model_type reward_funcs reward_weights
        reward_clip_range scale_rewards normalize_advantages multi_objective_aggregation num_generations
        num_generations_eval num_iterations generation_batch_size steps_per_generation num_ppo_epochs
        num_mini_batches total_episodes kl_coef cliprange vf_coef cliprange_value whiten_rewards response_length
        epsilon_high importance_sampling_level mask_truncated_completions off_policy_mask_threshold
        top_entropy_quantile entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target
        use_adaptive_entropy use_bias_correction_kl max_tool_calling_iterations sapo_temperature_neg
        sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos center_rewards_coefficient
        train_on_last_step_only use_vllm use_transformers_continuous_batching use_transformers_paged
        transformers_continuous_batching_config ds3_gather_for_generation grpo_* ppo_* vllm_* reward_*""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="it is a training method that Ratel does not have",
            hint="remove the key, and train without this method",
        ),
        """diffusion kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_online_server relora relora_steps
        relora_prune_ratio relora_prune_method relora_cpu_offload ebft mtp_enabled distill
        teacher_model_name_or_path do_predict mtp_* kd_*""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="Ratel does not have this preference loss",
            hint="remove it; `rl` has the losses dpo, ipo, orpo, simpo and kto",
        ),
        """rpo_alpha pref_loss pref_ftx pref_bco_weight dpo_label_smoothing reference_free dpo_use_weighting
        use_weighting loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef discopop_tau dpo_* kto_*""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="Ratel's reference model is the model before step 1",
            hint="remove it, if it is the base model",
        ),
        """ref_model ref_model_name_or_path ref_model_adapters ref_model_quantization_bit sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps""",
    ),
    (
        Foreign(
            fate="impossible",
            reason="Ratel does not have this loss",
            hint="remove it; there are `use_dft_loss`, `label_smoothing_factor` and the losses of `rl`",
        ),
        """loss_type router_aux_loss_coef moe_aux_loss_coef aux_loss_coef use_eaft_loss use_eaft eaft_alpha eaft_k
        use_asft_loss asft_alpha use_dft dft_loss eaft liger_use_token_scaling""",
    ),
    (
        Foreign(fate="impossible", reason="it trains on images or sound", hint="remove it; Ratel trains on text"),
        "media_dir image_size image_resize_algorithm is_multimodal",
    ),
    (
        Foreign(
            fate="undecided",
            reason="the tokenizer's chat template decides how answers without reasoning are rendered",
            hint="remove it, or set a template that writes an empty reasoning block: `chat_template_jinja: FILE`",
        ),
        "enable_thinking",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel does not change the tokenizer or the vocabulary",
            hint="remove it if the tokenizer has these tokens already",
        ),
        """tokens added_tokens_overrides add_tokens add_special_tokens new_special_tokens resize_vocab
        split_special_tokens tokenizer_config tokenizer_name_or_path tokenizer_path eos_token
        new_special_tokens_config init_special_tokens""",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel takes the model as its config.json describes it",
            hint="remove it, and write it into config.json of a copy of the model",
        ),
        """revision rope_scaling rope_theta overrides_of_model_config overrides_of_model_kwargs model_init_kwargs
        base_model_config model_config model_config_type model_kwargs s2_attention shift_attn sage_attention
        llama4_linearized_experts use_attentive_kernels yarn model_quantization_config
        model_quantization_config_kwargs datasets.revision""",
    ),
    (
        Foreign(
            fate="undecided", reason="Ratel trains on every sample", hint="remove it, and filter the data beforehand"
        ),
        """min_sample_len dataset_exact_deduplication filter max_train_samples skip_train_samples dataset_shard_num
        dataset_shard_idx datasets.shards datasets.shards_idx datasets.message_field_training_detail
        datasets.train_on_eot datasets.skip datasets.drop_exceeded_length""",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel trains on every turn of `roles_to_train`",
            hint="remove it, or split each conversation at its turns beforehand",
        ),
        "mask_history train_on_last_turn_only",
    ),
    (
        Foreign(
            fate="undecided", reason="Ratel truncates long samples at their end", hint="remove it, or shorten the data"
        ),
        "truncation_mode truncation_side",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel has no such schedule or parameter group",
            hint="remove it; see `lr_scheduler_kwargs`, `loraplus_lr_ratio` and `embedding_lr`",
        ),
        """lr_groups lr_quadratic_warmup cosine_constant_lr_ratio decay_lr_schedule relora_warmup_steps
        lr_scheduler_groups optimizer_kwargs lr_div_factor""",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel has no delay: earlier evaluations count for the best step and the patience, too",
            hint="remove it",
        ),
        "eval_delay",
    ),
    (
        Foreign(
            fate="undecided",
            reason="it packs samples in axolotl's old way, across the borders of samples",
            hint="use `sample_packing: true`, which keeps samples apart, and `sequence_len`",
        ),
        "max_packed_sequence_len",
    ),
    (
        Foreign(
            fate="undecided",
            reason="it means different things in different tools",
            hint="use `micro_batch_size` (sequences computed at once) and `gradient_accumulation_steps`, or "
            "`tokens_per_step`",
        ),
        "batch_size train_batch_size global_batch_size",
    ),
    (Foreign(fate="impossible", reason="YAML merge keys are not supported", hint="write the keys out"), "<<"),
    (
        Foreign(
            fate="undecided",
            reason="Ratel has one chat template for all datasets",
            hint="move it out of the dataset: `chat_template` or `chat_template_jinja`",
        ),
        "datasets.chat_template",
    ),
    (
        Foreign(
            fate="undecided",
            reason="Ratel reads all files of a set",
            hint="name the files in `path`, each in a set of its own, or the configuration in `name`",
        ),
        "datasets.data_dir datasets.data_files datasets.subset",
    ),
)
"""Each fate with its keys; those of a dataset begin with `datasets.`, and `*` ends the beginning of names."""
_WEIGHTS_OF_LOSSES = (
    "router_aux_loss_coef",
    "moe_aux_loss_coef",
    "aux_loss_coef",
    "dpo_label_smoothing",
    "pref_bco_weight",
    "pref_ftx",
    "rpo_alpha",
    "entropy_coef",
)
"""Keys of losses that are added to another one, or mixed into it: with a weight of 0 there are none."""
_HARMLESS: Mapping[str, tuple[Plain, ...]] = {
    "train_sampling_strategy": ("random",),
    "batching_strategy": (
        "normal",
        "padding_free",
    ),
    "mix_strategy": ("concat",),
    "packing_strategy": ("bfd",),
    "lora_task_type": ("CAUSAL_LM",),
    "template": ("tokenizer_default",),
    "peft": (
        "full",
        "none",
    ),
    "adapter_name_or_path": (
        "full",
        "none",
    ),
    "finetuning_type": (
        "full",
        "none",
    ),
    "peft_config": (
        "full",
        "none",
    ),
    "quantization_method": (
        "bnb",
        "bitsandbytes",
    ),
    "quantization_type": ("nf4",),
    "bnb_4bit_quant_type": ("nf4",),
    "freeze_vision_tower": (True,),
    "freeze_multi_modal_projector": (True,),
    "freeze_mm_modules": (True,),
    "stage": (
        "sft",
        "pt",
        0,
    ),
    "loss_type": (
        "nll",
        "chunked_nll",
        "cross_entropy",
        "ce",
    ),
    **dict.fromkeys(_WEIGHTS_OF_LOSSES, (0,)),
    "revision": ("main",),
    "min_sample_len": (
        0,
        1,
        2,
    ),
    "truncation_mode": (
        "keep_start",
        "right",
    ),
    "truncation_side": (
        "keep_start",
        "right",
    ),
    "datasets.revision": ("main",),
    "datasets.chat_template": ("tokenizer_default",),
    "datasets.conversation": ("tokenizer_default",),
    "datasets.roles_kwargs": ("tokenizer_default",),
}
"""By key: values that change nothing, in addition to empty ones and the default."""
_DEFAULTS: Mapping[str, Plain] = {
    "ld_alpha": None,  # 0 leaves out what is longer than the other answer
    "f_alpha_divergence_coef": 0.5,
    "pretrain_multipack_attn": True,
    "ignore_pad_token_for_loss": True,
    "enable_thinking": True,
    "eval_delay": 0,
}
"""By key: what the other trainer has if it is not there, where that is not `false`."""
LISTED: Mapping[str, Foreign] = {
    key: replace(foreign, harmless=_HARMLESS.get(key, ()), default=_DEFAULTS.get(key, False))
    for foreign, keys in _GROUPS
    for key in keys.split()
}
"""By a name of `_GROUPS`: what becomes of it."""
FOREIGN: Mapping[str, Foreign] = {key: foreign for key, foreign in LISTED.items() if not {"*", "."} & set(key)}
"""By key of the top level: what becomes of it. A key of Ratel's own is not among them."""


def foreign_key(section: str, key: str) -> Foreign | None:
    """What becomes of another trainer's key in a section; None if no trainer's key is known by this name."""
    listed = LISTED.get(f"{section}.{key}" if section else key)
    if listed is not None or section:
        return listed
    return next((each for name, each in LISTED.items() if name[-1] == "*" and key.startswith(name[:-1])), None)


def kernel_plugins(names: Sequence[Plain]) -> Iterator[str]:
    """The plugins among axolotl's `plugins` that do more than name kernels or shard the model."""
    harmless = (
        "expert_parallel",
        "tensor_parallel",
        "context_parallel",
        "sequence_parallel",
        "fsdp",
        "deepspeed",
        "liger",
        "cut_cross_entropy",
        "kernels",
        "chunked",
        "spectrum_scan",
        "densemixer",
        "swanlab",
        "lm_eval",
    )
    for name in names:
        if not isinstance(name, str) or not any(f".{each}" in name for each in harmless):
            yield str(name)
