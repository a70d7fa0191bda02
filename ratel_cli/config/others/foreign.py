"""The keys of other trainers that Ratel has no key for, and what becomes of each.

    ignored      Ratel does it anyway, or it changes nothing in a run
    noted        it is about how another engine works; the reason is printed
    undecided    it changes what is trained, mildly; the user decides
    impossible   it changes what is trained, and Ratel does not do it

Invariant: a key that changes which numbers come out is never ignored. An empty value is always ignored, and so is
the key's default, which is `false` for whatever a user would have to turn on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ratel_cli.config.keys.topics import instead_of
from ratel_cli.config.others.recorded import changes_nothing
from ratel_cli.config.others.row import Fate, ForeignKey
from ratel_cli.config.yaml.yaml_marks import Marked, Plain, plain


def _with(row: ForeignKey, harmless: Mapping[str, tuple[Plain, ...]]) -> Iterator[ForeignKey]:
    """A row, and others with its fate for keys that have harmless values of their own."""
    yield row
    for names, values in harmless.items():
        yield replace(row, theirs=names, harmless=values)


_ROWS: tuple[ForeignKey, ...] = (
    ForeignKey(
        theirs="""model_type tokenizer_type processor_type is_llama_derived_model is_falcon_derived_model
        is_mistral_derived_model is_qwen_derived_model cls_model_config tokenizer_use_fast
        use_fast_tokenizer use_fast use_fast_processor model_class is_encoder_decoder type_of_model""",
        how="ignored",
        why="the files of the model say which classes it has",
    ),
    ForeignKey(
        theirs="""use_cache low_cpu_mem_usage device_map max_memory gpu_memory_limit cache_dir
        base_model_ignore_patterns experimental_skip_move_to_device""",
        how="ignored",
        why="it only affects how the model is loaded",
    ),
    ForeignKey(
        theirs="""local_rank world_size _n_gpu n_gpu ddp use_ray ray_scope ray_num_workers
        resources_per_worker mp_parameters average_tokens_across_devices split_batches
        accelerator_config parallelism_config sharded_ddp env data_shared_file_system seed_worker
        dist_timeout ray_*""",
        how="ignored",
        why="it configures distributed training; Ratel has `--ranks`",
    ),
    ForeignKey(
        theirs="""debug log_level log_level_replica log_on_each_node logging_strategy logging_first_step
        logging_nan_inf_filter logging_dir disable_tqdm plot_loss include_num_input_tokens_seen
        include_tokens_per_second include_mfu include_tkps skip_memory_metrics profiler_steps
        profiler_steps_start tpu_metrics_debug print_param_status telemetry trackio_space_id
        trackio_bucket_id trackio_static_space_id log_completions log_completions_hub_repo
        log_multimodal log_unique_prompts num_completions_to_print ignore_bias_buffers mfu_*
        profiler_* gradio_*""",
        how="ignored",
        why="it only affects logging",
    ),
    ForeignKey(
        theirs="""save_safetensors save_only_model save_first_step save_on_each_node
        restore_callback_states_from_checkpoint ignore_data_skip enable_jit_checkpoint
        overwrite_cache tokenizer_save_jinja_files dynamic_checkpoint num_dataset_shards_to_save
        axolotl_config_path save_ckpt_as_hf""",
        how="ignored",
        why="it only affects checkpoint files and resuming",
    ),
    ForeignKey(
        theirs="""do_train do_eval eval_do_concat_batches prediction_loss_only include_for_metrics
        include_inputs_for_metrics eval_on_start eval_use_gather_object eval_accumulation_steps
        batch_eval_metrics fp16_full_eval bf16_full_eval per_device_eval_batch_size eval_batch_size
        use_logits_to_keep compute_accuracy label_names remove_unused_columns length_column_name""",
        how="ignored",
        why="it only affects evaluation",
    ),
    ForeignKey(theirs="strict", how="ignored", why="Ratel checks every key of a config"),
    ForeignKey(
        theirs="""hf_use_auth_token hf_hub_token hub_token push_to_hub_token ms_hub_token om_hub_token""",
        how="ignored",
        why="the hub's token comes from the environment",
    ),
    ForeignKey(
        theirs="""past_index tpu_num_cores use_mps_device use_ipex jit_mode_eval xpu_backend fp16_opt_level
        half_precision_backend fp16_backend torchdistx_path use_habana use_lazy_mode
        gaudi_config_name use_hpu_graphs use_v2_trainer push_to_hub_model_id
        push_to_hub_organization""",
        how="ignored",
        why="it belongs to other hardware, or to older releases of its tool",
    ),
    ForeignKey(
        theirs="""gc_steps gc_collect_steps torch_empty_cache_steps auto_find_batch_size large_head_attention""",
        how="ignored",
        why="it avoids running out of memory; Ratel plans its memory",
    ),
    ForeignKey(theirs="mean_resizing_embeddings", how="ignored", why="`new_tokens_init` says how rows are drawn"),
    ForeignKey(theirs="pad_token padding_value", how="ignored", why="padding has no loss"),
    ForeignKey(
        theirs="upcast_lmhead_output embeddings_skip_upcast", how="ignored", why="Ratel computes the loss in fp32"
    ),
    ForeignKey(
        theirs="""crop_to_patches image_max_pixels image_min_pixels video_max_pixels video_min_pixels
        video_fps video_maxlen use_audio_in_video audio_sampling_rate""",
        how="ignored",
        why="text has no images",
    ),
    ForeignKey(theirs="loraplus_lr_embedding", how="ignored", why="Ratel trains no adapters of embeddings"),
    ForeignKey(
        theirs="""data_seed full_determinism shuffle_merged_datasets shuffle_before_merging_datasets
        shuffle_dataset buffer_size streaming_multipack_buffer_size pretrain_multipack_buffer_size""",
        how="ignored",
        why="`seed` gives the order of the rows",
    ),
    ForeignKey(theirs="use_cpu no_cuda", how="ignored", why="`device: auto` takes the GPU if there is one"),
    ForeignKey(
        theirs="""do_sample temperature top_p top_k min_p num_beams max_new_tokens repetition_penalty
        length_penalty skip_special_tokens generation_kwargs cache_implementation generation_config
        infer_backend infer_dtype vllm_enforce_eager vllm_maxlen vllm_gpu_util vllm_config
        vllm_max_lora_rank sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config
        sample_backend""",
        how="noted",
        why="no text is generated while Ratel trains",
    ),
    ForeignKey(
        theirs="""export_dir export_hub_model_id export_device export_size export_legacy_format
        export_quantization_bit export_quantization_dataset export_quantization_nsamples
        export_quantization_maxlen export_hf_on_finish""",
        how="noted",
        why="Ratel exports in the format of the base model; see `ratel export`",
    ),
    ForeignKey(theirs="tf32", how="noted", why="products in fp32 stay in fp32, which is more exact"),
    ForeignKey(
        theirs="""gradient_checkpointing gradient_checkpointing_kwargs disable_gradient_checkpointing
        activation_checkpointing activation_checkpointing_kwargs use_reentrant_gc
        activation_offloading activations_offloading tiled_mlp tiled_mlp_use_original_mlp
        tiled_mlp_num_shards use_unsloth_gc offload_activations enable_activation_checkpointing
        layer_offloading selective_checkpointing""",
        how="ignored",
        why="the plan decides what is recomputed or offloaded; see `activations`",
    ),
    ForeignKey(
        theirs="""flash_attention flash_attn attn attention xformers_attention sdp_attention eager_attention
        flex_attention flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_rms_norm
        flash_attn_fuse_mlp flash_attn_fuse_qkv flash_attn_fuse_cross_entropy flash_optimum
        attn_needs_dtype_cast attn_supports_packing attn_uses_flash_lib cut_cross_entropy enable_cce
        use_cce cce chunked_cross_entropy chunked_cross_entropy_num_chunks use_liger_kernel
        use_liger enable_liger_kernel liger_kernel_config use_unsloth use_kernels use_scattermoe
        use_sonicmoe moe_kernels use_kernel use_hub_kernels use_v1_kernels kernel_name
        use_flash_attention_2 torch_compile torch_compile_backend torch_compile_mode
        torch_compile_dynamic torchdynamo compile experts_implementation padding_free loss_kernel
        fused_attn_kernel use_dsv4_kernels gemma4_hybrid_attn_impl kernel_config flash_attn_*
        liger_* cut_cross_entropy_* unsloth_* torch_compile_*""",
        how="ignored",
        why="it only selects kernels; see `attn_implementation`",
    ),
    ForeignKey(
        theirs="""dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory
        push_dataset_to_hub preprocessing_num_workers preprocessing_batch_size batching_workers
        dataset_batch_size tokenized_path overwrite_prepared_data trust_remote_code_for_data
        num_proc preprocess_iterable dataloader_* datasets.ds_type datasets.preprocess_shards
        datasets.trust_remote_code datasets.columns datasets.ranking datasets.num_proc
        datasets.format_kwargs""",
        how="ignored",
        why="Ratel prepares the data once, by itself",
    ),
    ForeignKey(
        theirs="""pad_to_sequence_len pad_to_multiple_of eval_sample_packing eval_packing
        sample_packing_group_size sample_packing_bin_size sample_packing_mp_start_method
        sample_packing_eff_est multipack_real_batches neat_packing batch_flattening total_num_tokens
        total_supervised_tokens sample_packing_drop_attention_mask pretraining_sample_concatenation
        num_of_sequences sample_packing_*""",
        how="ignored",
        why="packing fills the sequences; see `sample_packing`",
    ),
    *_with(
        ForeignKey(
            theirs="group_by_length sample_packing_sequentially curriculum_sampling",
            how="undecided",
            why="Ratel reads the rows in the order that `seed` gives, or in their own with `shuffle: false`",
            hint="remove it, or see `shuffle`",
        ),
        {"train_sampling_strategy": ("random",)},
    ),
    ForeignKey(
        theirs="dataloader_drop_last",
        how="undecided",
        why="Ratel drops no rows at the end of an epoch; the last step may be smaller",
        hint="remove it",
    ),
    ForeignKey(
        theirs="batching_strategy",
        how="undecided",
        why="Ratel packs whole samples, which do not attend to each other, and truncates longer ones",
        hint="remove it; see `sample_packing`",
        harmless=("normal", "padding_free"),
    ),
    ForeignKey(
        theirs="packing_strategy",
        how="undecided",
        why="Ratel packs whole samples, which do not attend to each other, and truncates longer ones",
        hint="remove it; see `sample_packing`",
        harmless=("bfd",),
    ),
    ForeignKey(
        theirs="pretrain_multipack_attn",
        how="undecided",
        why="Ratel packs whole samples, which do not attend to each other, and truncates longer ones",
        hint="remove it; see `sample_packing`",
    ),
    *_with(
        ForeignKey(
            theirs="interleave_probs",
            how="undecided",
            why="an epoch of Ratel is one pass over all datasets, shuffled together",
            hint="remove it, or set `weight` of the datasets",
        ),
        {"mix_strategy": ("concat",)},
    ),
    ForeignKey(
        theirs="skip_prepare_dataset dataset_kwargs",
        how="undecided",
        why="Ratel tokenises the rows itself",
        hint="remove it",
    ),
    ForeignKey(
        theirs="upcast_layernorm fp32_norms fp32_norm_classes cast_lm_head_to_fp32",
        how="undecided",
        why="Ratel computes everything in `dtype`, norms too",
        hint="remove it",
    ),
    ForeignKey(
        theirs="ignore_pad_token_for_loss",
        how="undecided",
        why="padding has no loss here",
        hint="remove it",
    ),
    ForeignKey(
        theirs="resize_token_embeddings_to_32x shrink_embeddings",
        how="undecided",
        why="Ratel does not make an embedding smaller: its rows count in the softmax",
        hint="remove it, or change the model beforehand",
    ),
    ForeignKey(
        theirs="tokenizer_legacy",
        how="undecided",
        why="Ratel tokenises as the tokenizer's files say",
        hint="remove it, or change the files",
    ),
    ForeignKey(
        theirs="peft_layers_pattern", how="undecided", why="Ratel finds the layers of a model itself", hint="remove it"
    ),
    ForeignKey(
        theirs="lora_task_type",
        how="impossible",
        why="Ratel trains adapters of language models only",
        hint="remove it",
        harmless=("CAUSAL_LM",),
    ),
    ForeignKey(
        theirs="""use_wandb use_mlflow use_comet use_swanlab use_tensorboard use_otel_metrics use_trackio
        wandb_* mlflow_* comet_* swanlab_* trackio_* otel_*""",
        how="noted",
        why="`report_to` names the trackers, and the environment has their settings, such as WANDB_ENTITY",
    ),
    ForeignKey(
        theirs="push_to_hub hub_*",
        how="noted",
        why="with `hub_model_id` Ratel uploads the model once, at the end; otherwise nothing",
    ),
    ForeignKey(
        theirs="""fsdp sequence_parallel_degree sequence_parallel_size sequence_parallel_mode
        context_parallel_size context_parallel_dim expert_parallel_size dp_shard_size
        dp_replicate_size dp_world_size data_parallel_shard_dim data_parallel_replicate_dim
        ring_attn_func heads_k_stride custom_sharded_layers pipeline_parallel_size
        tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
        sequence_parallel use_distributed_optimizer overlap_param_gather overlap_grad_reduce
        dist_config dp_size cp_size cp_mode mp_replicate_size mp_shard_size fsdp_* ddp_* alst_*
        expert_parallel_*""",
        how="noted",
        why="Ratel streams the model through one device and needs no sharding",
    ),
    ForeignKey(
        theirs="tensor_parallel_size tensor_parallel tensor_parallel_dim",
        how="noted",
        why="there is no tensor parallelism: a block that fits the device needs none; see `--ranks`",
    ),
    ForeignKey(
        theirs="""deepspeed deepspeed_config zero_optimization zero_stage offload_optimizer offload_param aio
        accelerate_config use_megatron use_kt unsloth optimizer_in_bwd optimizer_overlap_backward
        deepspeed_* kt_*""",
        how="noted",
        why="Ratel has an engine of its own; see `storage` and `limits`",
    ),
    ForeignKey(
        theirs="trust_remote_code",
        how="noted",
        why="Ratel never runs code from a model's repository; models that transformers has need none",
    ),
    ForeignKey(
        theirs="template datasets.conversation datasets.roles_kwargs",
        how="noted",
        why="the tokenizer's own chat template is used; its system prompt, reasoning or end of a turn may differ",
        harmless=("tokenizer_default",),
    ),
    ForeignKey(
        theirs="""tool_format default_system default_system_message chat_template_kwargs
        datasets.split_thinking""",
        how="undecided",
        why="the tokenizer's own chat template decides this",
        hint="remove it, or set a template that does it: `chat_template_jinja: FILE`",
    ),
    ForeignKey(
        theirs="chat_template_path",
        how="undecided",
        why="Ratel does not read the chat template of another tokenizer",
        hint="write it into a file: `chat_template_jinja: FILE`",
    ),
    ForeignKey(
        theirs="""fp8 fp8_backend fp8_recipe fp8_format fp8_enable_fsdp_float8_all_gather fp8_config
        enable_fp8 enable_fp8_fsdp enable_fp8_training fp8_*""",
        how="noted",
        why="Ratel computes in `dtype`, which is more exact",
    ),
    ForeignKey(
        theirs="loss_watchdog_threshold loss_watchdog_patience",
        how="noted",
        why="only evaluations can end a run early; see `early_stopping_patience`",
    ),
    ForeignKey(
        theirs="resume_from_checkpoint auto_resume_from_checkpoints",
        how="noted",
        why="a run resumes automatically; `--resume no` starts over and `--resume STEP` goes back",
    ),
    ForeignKey(
        theirs="overwrite_output_dir",
        how="noted",
        why="Ratel resumes a run in its own directory, and overwrites no other directory",
    ),
    ForeignKey(
        theirs="""eval_table_size eval_max_new_tokens eval_table_max_new_tokens callbacks benchmarks
        do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split
        dataset_test_split eval_on_each_dataset test_split eval_strategy_best predict_with_generate
        generate_samples num_generation_samples generation_max_length generation_num_beams""",
        how="noted",
        why="Ratel evaluates the loss, and the accuracy of classifiers and preferences, on `val_set_size` or "
        "`test_datasets`",
    ),
    *_with(
        ForeignKey(
            theirs="""freeze_base_model pissa_init use_llama_pro lora_model_dir lora_init kt_use_lora_experts
        kt_lora_expert_num kt_lora_expert_intermediate_size lora_* qlora* peft_*""",
            how="impossible",
            why="Ratel does not train this kind of adapter",
            hint="remove it; `adapter: lora` trains LoRA, and with `load_in_4bit: true` QLoRA",
        ),
        {"peft adapter_name_or_path": ("full", "none")},
    ),
    ForeignKey(
        theirs="finetuning_type peft_config",
        how="impossible",
        why="it trains a part of the weights, or an adapter",
        hint="name the part in `unfrozen_parameters`; `adapter: lora` trains an adapter",
        harmless=("full", "none"),
    ),
    ForeignKey(
        theirs="""lora_qkv_kernel lora_o_kernel lora_mlp_kernel lora_embedding_kernel lora_on_cpu
        lora_fan_in_fan_out""",
        how="noted",
        why="Ratel computes with PEFT's modules",
    ),
    ForeignKey(theirs="merge_lora", how="noted", why="Ratel exports the adapter; `ratel merge` adds it to its base"),
    *_with(
        ForeignKey(
            theirs="""bnb_config_kwargs quantization_bit quantization_config quantization qat enable_qat
        llmcompressor nvfp4 mxfp4 use_bnb use_onebitllms quant_config bnb_*""",
            how="impossible",
            why="Ratel does not quantise in this way",
            hint="remove it; with an adapter, use `load_in_4bit` or `load_in_8bit`",
        ),
        {"quantization_method": ("bnb", "bitsandbytes"), "quantization_type bnb_4bit_quant_type": ("nf4",)},
    ),
    ForeignKey(
        theirs="bnb_4bit_compute_dtype",
        how="undecided",
        why="Ratel dequantises weights to `dtype` for computing",
        hint="set `dtype` to it, and remove it",
    ),
    ForeignKey(
        theirs="""bnb_4bit_quant_storage gptq gptq_disable_exllama gptq_groupsize gptq_model_v1""",
        how="ignored",
        why="the files of a quantised model say so",
    ),
    *_with(
        ForeignKey(
            theirs="""freeze_language_model freeze_trainable_layers freeze_trainable_modules freeze_extra_modules
        use_badam lisa_n_layers lisa_step_interval lisa_layers_attribute mixture_of_depths""",
            how="impossible",
            why="it trains a part of the weights; Ratel has `unfrozen_parameters` for that",
            hint="remove it, and set `unfrozen_parameters`; without it Ratel trains every weight",
        ),
        {"freeze_vision_tower freeze_multi_modal_projector freeze_mm_modules": (True, False)},
    ),
    ForeignKey(
        theirs="""use_galore use_apollo use_adam_mini use_lomo optim_target_modules adam_beta3 adam_epsilon2
        torchao_optimizer dion_learning_rate dion_momentum dion_lr dion_rank_fraction
        dion_rank_multiple_of muon_momentum muon_learning_rate use_dion galore_* apollo_* badam_*
        muon_* dion_*""",
        how="impossible",
        why="it belongs to another optimizer",
        hint="remove it, or see `optimizer`",
    ),
    *_with(
        ForeignKey(
            theirs="""reward_model process_reward_model trl vllm reward_model_path reward_model_name_or_path
        reward_model_adapters reward_model_quantization_bit reward_model_type reward_funcs
        reward_weights reward_clip_range scale_rewards normalize_advantages
        multi_objective_aggregation num_generations num_generations_eval num_iterations
        generation_batch_size steps_per_generation num_ppo_epochs num_mini_batches total_episodes
        kl_coef cliprange vf_coef cliprange_value whiten_rewards response_length epsilon_high
        importance_sampling_level mask_truncated_completions off_policy_mask_threshold
        top_entropy_quantile entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target
        use_adaptive_entropy use_bias_correction_kl max_tool_calling_iterations sapo_temperature_neg
        sapo_temperature_pos vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
        center_rewards_coefficient train_on_last_step_only use_vllm
        use_transformers_continuous_batching use_transformers_paged
        transformers_continuous_batching_config ds3_gather_for_generation grpo_* ppo_* vllm_*
        reward_*""",
            how="impossible",
            why="it belongs to reinforcement learning, or to a reward model",
            hint=instead_of("grpo"),
        ),
        {"stage": ("sft", "pt", 0)},
    ),
    ForeignKey(
        theirs="""diffusion kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_online_server relora
        relora_steps relora_prune_ratio relora_prune_method relora_cpu_offload ebft mtp_enabled
        distill teacher_model_name_or_path do_predict mtp_* kd_*""",
        how="impossible",
        why="it is a training method that Ratel does not have",
        hint="remove the key, and train without this method",
    ),
    ForeignKey(
        theirs="""rpo_alpha pref_loss pref_ftx pref_bco_weight dpo_label_smoothing reference_free
        dpo_use_weighting use_weighting loss_weights ld_alpha f_divergence_type
        f_alpha_divergence_coef discopop_tau dpo_* kto_*""",
        how="impossible",
        why="Ratel does not have this preference loss",
        hint="remove it; `rl` has the losses dpo, ipo, orpo, simpo and kto",
    ),
    ForeignKey(
        theirs="""ref_model ref_model_name_or_path ref_model_adapters ref_model_quantization_bit
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps""",
        how="impossible",
        why="Ratel's reference model is the model before step 1",
        hint="remove it, if it is the base model",
    ),
    *_with(
        ForeignKey(
            theirs="""use_eaft_loss use_eaft eaft_alpha eaft_k use_asft_loss asft_alpha use_dft dft_loss eaft
        liger_use_token_scaling router_aux_loss_coef moe_aux_loss_coef""",
            how="impossible",
            why="Ratel does not have this loss",
            hint="remove it; there are `use_dft_loss`, `label_smoothing_factor` and the losses of `rl`",
        ),
        {
            "loss_type": ("nll", "chunked_nll", "cross_entropy", "ce"),
            "aux_loss_coef": (0,),
        },
    ),
    ForeignKey(
        theirs="media_dir image_size image_resize_algorithm is_multimodal",
        how="impossible",
        why="it trains on images or sound",
        hint="remove it; Ratel trains on text",
    ),
    ForeignKey(
        theirs="enable_thinking",
        how="undecided",
        why="the tokenizer's chat template decides how answers without reasoning are rendered",
        hint="remove it, or set a template that writes an empty reasoning block: `chat_template_jinja: FILE`",
    ),
    ForeignKey(
        theirs="""add_tokens add_special_tokens resize_vocab split_special_tokens tokenizer_config
        tokenizer_name_or_path tokenizer_path eos_token new_special_tokens_config init_special_tokens""",
        how="undecided",
        why="Ratel takes the base model's tokenizer, with `tokens` and `new_special_tokens`",
        hint="remove it if the tokenizer has these tokens already",
    ),
    *_with(
        ForeignKey(
            theirs="""rope_scaling rope_theta overrides_of_model_config overrides_of_model_kwargs
        model_init_kwargs base_model_config model_config model_config_type model_kwargs s2_attention
        shift_attn sage_attention llama4_linearized_experts use_attentive_kernels yarn
        model_quantization_config model_quantization_config_kwargs""",
            how="undecided",
            why="Ratel takes the model as its config.json describes it",
            hint="remove it, and write it into config.json of a copy of the model",
        ),
        {"revision datasets.revision": ("main",)},
    ),
    *_with(
        ForeignKey(
            theirs="""dataset_exact_deduplication filter max_train_samples skip_train_samples dataset_shard_num
        dataset_shard_idx datasets.shards datasets.shards_idx datasets.message_field_training_detail
        datasets.train_on_eot datasets.skip datasets.drop_exceeded_length""",
            how="undecided",
            why="Ratel trains on every sample",
            hint="remove it, and filter the data beforehand",
        ),
        {"min_sample_len": (0, 1, 2)},
    ),
    ForeignKey(
        theirs="mask_history train_on_last_turn_only",
        how="undecided",
        why="Ratel trains on every turn of `roles_to_train`",
        hint="remove it, or split each conversation at its turns beforehand",
    ),
    ForeignKey(
        theirs="truncation_mode truncation_side",
        how="undecided",
        why="Ratel truncates long samples at their end",
        hint="remove it, or shorten the data",
        harmless=("keep_start", "right"),
    ),
    ForeignKey(
        theirs="""lr_groups lr_quadratic_warmup cosine_constant_lr_ratio decay_lr_schedule relora_warmup_steps
        lr_scheduler_groups optimizer_kwargs lr_div_factor""",
        how="undecided",
        why="Ratel has no such schedule or parameter group",
        hint="remove it; see `lr_scheduler_kwargs`, `loraplus_lr_ratio` and `embedding_lr`",
    ),
    ForeignKey(
        theirs="eval_delay",
        how="undecided",
        why="Ratel has no delay: earlier evaluations count for the best step and the patience, too",
        hint="remove it",
    ),
    ForeignKey(
        theirs="max_packed_sequence_len",
        how="undecided",
        why="it packs samples in axolotl's old way, across the borders of samples",
        hint="use `sample_packing: true`, which keeps samples apart, and `sequence_len`",
    ),
    ForeignKey(
        theirs="batch_size train_batch_size global_batch_size",
        how="undecided",
        why="it means different things in different tools",
        hint="use `micro_batch_size` (sequences computed at once) and `gradient_accumulation_steps`, or "
        "`tokens_per_step`",
    ),
    ForeignKey(theirs="<<", how="impossible", why="YAML merge keys are not supported", hint="write the keys out"),
    ForeignKey(
        theirs="datasets.chat_template",
        how="undecided",
        why="Ratel has one chat template for all datasets",
        hint="move it out of the dataset: `chat_template` or `chat_template_jinja`",
        harmless=("tokenizer_default",),
    ),
    ForeignKey(
        theirs="datasets.data_dir datasets.data_files datasets.subset",
        how="undecided",
        why="Ratel reads all files of a set",
        hint="name the files in `path`, each in a set of its own, or the configuration in `name`",
    ),
)
"""Keys with a fate of their own; those of a dataset begin with `datasets.`."""
LISTED: Mapping[str, ForeignKey] = {key: row for row in _ROWS for key in row.theirs.split()}
"""By a name of `_ROWS`: what becomes of it."""
FOREIGN: Mapping[str, ForeignKey] = {key: row for key, row in LISTED.items() if not {"*", "."} & set(key)}
"""By key of the top level: what becomes of it. A key of Ratel's own is not among them."""


def foreign_key(section: str, key: str) -> ForeignKey | None:
    """What becomes of another trainer's key in a section; None if no trainer's key is known by this name."""
    listed = LISTED.get(f"{section}.{key}" if section else key)
    if listed is not None or section:
        return listed
    return next((each for name, each in LISTED.items() if name[-1] == "*" and key.startswith(name[:-1])), None)


def fate_of(section: str, key: str, value: Marked) -> Fate:
    """What becomes of another trainer's key with this value. The tables in `config/fates` have what it is by default
    and what 0 means there."""
    row, content = foreign_key(section, key), plain(value)
    assert row is not None
    if content in (None, "", [], {}):
        return "ignored"
    if row.fate in ("ignored", "noted"):
        return "ignored" if content == 0 and not isinstance(content, float) else row.fate
    is_harmless = content in row.harmless or changes_nothing(f"{section}.{key}" if section else key, content)
    return "ignored" if is_harmless else row.fate
