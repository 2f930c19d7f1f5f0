"""The keys of the `policy` section of NeMo RL 0.3 to main, by section: those of its types, of its
configurations, and those that its code reads or writes. Data only.
"""

from __future__ import annotations

HOST_KEYS: dict[str, str] = {
    "": """
        activation_checkpointing_enabled dequantize_base_checkpoint disable_modelopt_layer_spec
        draft dtensor_cfg dynamic_batching fsdp_offload_enabled generation generation_batch_size
        hf_config_overrides is_vlm logprob_batch_size logprob_chunk_size
        make_sequence_length_divisible_by max_grad_norm max_total_sequence_length megatron_cfg
        model_name offload_optimizer_for_logprob offload_optimizer_for_refit optimizer precision
        pretrained_checkpoint quant_batch_size quant_calib_data quant_calib_size quant_cfg
        quant_sequence_length refit_buffer_size_gb reward_model_cfg router_replay scheduler
        sequence_packing tokenizer train_global_batch_size train_micro_batch_size
    """,
    "megatron_cfg.": """
        _override_ activation_checkpointing apply_rope_fusion attention_backend
        bias_activation_fusion calculate_per_token_loss checkpoint
        clear_memory_caches_before_refit context_parallel_size converter_type cp_normalize
        cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps defer_fp32_logits
        distributed_data_parallel_config do_not_average_loss empty_unused_memory_level enabled
        env_vars expert_model_parallel_size expert_tensor_parallel_size
        fine_grained_activation_offloading first_last_layers_bf16 force_overwrite_initial_ckpt
        force_reconvert_from_hf fp8_cfg freeze_config freeze_moe_router freeze_sound_encoder
        freeze_sound_projection freeze_vision_model freeze_vision_projection
        fused_linear_logprobs_chunk_size gradient_accumulation_fusion
        hybridep_num_ranks_per_nvlink_domain hybridep_use_mnnvl inference_cuda_graph_scope
        inference_grouped_gemm_backend inference_moe_token_dispatcher_type layernorm_epsilon
        linear_ce_fusion_chunk_size model_overrides moe_aux_loss_coeff moe_enable_deepep
        moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms
        moe_pad_experts_for_cuda_graph_inference moe_per_layer_logging moe_permute_fusion
        moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
        moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
        moe_shared_expert_overlap moe_token_dispatcher_type mtp_detach_heads
        mtp_loss_scaling_factor mtp_num_layers mtp_use_repeated_layer num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage offload_modules optimizer peft pipeline_dtype
        pipeline_model_parallel_size radio_force_cpe_eval_mode recompute_granularity
        recompute_modules scale_loss_by_dp_cp_size scheduler sequence_parallel
        tensor_model_parallel_size track_moe_metrics train_iters transformer_impl
        use_fused_linear_logprobs use_fused_weighted_squared_relu use_gloo_process_groups
        use_linear_ce_fusion_loss virtual_pipeline_model_parallel_size
    """,
    "megatron_cfg.optimizer.": """
        adam_beta1 adam_beta2 adam_eps bf16 clip_grad fp16 lr min_lr optimizer
        optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
        params_dtype sgd_momentum use_distributed_optimizer use_precision_aware_optimizer
        weight_decay
    """,
    "megatron_cfg.scheduler.": """
        end_weight_decay lr_decay_iters lr_decay_style lr_warmup_init lr_warmup_iters
        override_opt_param_scheduler start_weight_decay weight_decay_incr_style
    """,
    "megatron_cfg.distributed_data_parallel_config.": """
        average_in_collective data_parallel_sharding_strategy grad_reduce_in_fp32
        overlap_grad_reduce overlap_param_gather use_custom_fsdp
    """,
    "megatron_cfg.checkpoint.": """
        async_save ckpt_assume_constant_structure ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save_process_group
        fully_parallel_load_exchange_algo fully_parallel_load_process_group
        fully_parallel_save_process_group
    """,
    "megatron_cfg.peft.": """
        a2a_experimental alpha dim dropout dropout_position enabled exclude_modules
        lora_A_init_method lora_B_init_method lora_dtype target_modules
    """,
    "megatron_cfg.fp8_cfg.": "enabled force_clear_fp8_caches fp8 fp8_param fp8_recipe",
    "megatron_cfg.freeze_config.": """
        freeze_language_model freeze_vision_model freeze_vision_projection
    """,
    "dynamic_batching.": "enabled logprob_mb_tokens sequence_length_round train_mb_tokens",
    "sequence_packing.": """
        algorithm enabled fuse_loss logprob_mb_tokens microbatch_order sequence_length_round
        train_mb_tokens
    """,
    "generation.": """
        _debug_payload_metrics _mtp_weights_from_refit _pad_token_id backend bad_words colocated
        dynamo_cfg max_new_tokens mcore_generation_config model_name pad_token_id
        port_range_high port_range_low quant_cfg real_quant real_quant_export_cpu_offload
        real_quant_ignore refit_cfg refit_transport sglang_cfg stop_strings stop_token_ids
        temperature top_k top_p trtllm_cfg trtllm_kwargs use_async_rollouts val_temperature
        val_top_k val_top_p vllm_cfg vllm_kwargs
    """,
    "generation.colocated.": "enabled resources",
    "tokenizer.": """
        audio chat_template chat_template_kwargs name use_fastokens use_processor video
    """,
    "dtensor_cfg.": """
        _v2 activation_checkpointing automodel_kwargs clear_cache_every_n_steps
        context_parallel_size cpu_offload custom_parallel_plan defer_fsdp_grad_sync
        dp_replicate_size enabled env_vars expert_parallel_size lora_cfg moe_parallelizer
        sequence_parallel tensor_parallel_size
    """,
    "dtensor_cfg.lora_cfg.": """
        alpha dim dropout dropout_position enabled exclude_modules lora_A_init match_all_linear
        target_modules use_triton
    """,
    "dtensor_cfg.moe_parallelizer.": """
        ignore_router_for_ac lm_head_precision reshard_after_forward wrap_outer_model
    """,
    "dtensor_cfg.automodel_kwargs.": "backend force_hf freeze_config use_liger_kernel",
    "dtensor_cfg.automodel_kwargs.freeze_config.": """
        freeze_audio_tower freeze_language_model freeze_vision_tower
    """,
    "draft.": "aux_layer_indices enabled loss_weight model_name num_layers",
    "router_replay.": "enabled transport",
    "reward_model_cfg.": "enabled reward_model_type",
    "pretrained_checkpoint.": "format path",
}
"""Names by the path of a section, with its last dot."""
