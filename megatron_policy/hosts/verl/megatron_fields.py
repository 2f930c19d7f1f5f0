"""What becomes of the fields of Megatron-Core's configurations that verl lets override:
`TransformerConfig` with that of MLA, and `DistributedDataParallelConfig`. Only data.

Fields that `megatron_cfg` has, too, have its rules (`keys.rule_of`); here are the others, of
Megatron-Core 0.16.1 to 0.19. Overrides come after the model's config.json: of a field that it
decides, Megatron-Core's default is a change like any other value.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.config.keys import KEYS
from megatron_policy.config.section import Applied, Ignored, Rejected, Rules, by_name


@dataclass(frozen=True)
class Accepted(Applied):
    """Has the effect that its name says; `note` adds the rest.

    It sets the keys `sets` of a policy, which blanks separate and in which `*` is its own name.
    """

    note: str = ""
    sets: str = ""


DCP = "affects dynamic_context_parallel only, which is rejected"
MODEL = "the model's config.json decides; model.override_config can replace its fields"
_ABSENT = (
    "affects Mamba, linear attention or sparse attention (DSA) only; the built-in model families "
    "have none of them"
)
_FP8 = "affects fp8 and fp4 training only, which are not supported"
_FSDP = KEYS["megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy"]
_GRAPHS = KEYS["megatron_cfg.cuda_graph_impl"]
_INFERENCE = "affects generation by Megatron-Core only; verl's rollout generates"
_KERNEL = "chooses a kernel only; the implementation picks its own"
_LOG = "logs and checks only"
_OVERLAP = "hides communication or waiting only"
_PIPELINE = "affects the order and the exchanges of pipeline stages only; the layout decides them"
_SHARDS = "weights are split over tensor-parallel ranks alone"
_SIZES = """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    sequence_parallel use_distributed_optimizer expert_model_parallel_size
    expert_tensor_parallel_size"""
_NO_FP8 = Rejected("fp8 and fp4 training are not supported")
_UNREAD = "Megatron-Core itself does not read it"


def _only(key: str) -> Ignored:
    """The rule for what counts beside another key alone, which is rejected."""
    return Ignored(f"affects {key} only, which is rejected")


_LAYOUT: Rules = {
    **{
        name: Rejected("set the engine's own key of this name", same_as=f"engine.{name}")
        for name in _SIZES.split()
    },
    "max_seqlen_per_dp_cp_rank": Ignored(DCP),
    "hybrid_context_parallel": Rejected("all microbatches have context_parallel_size ranks"),
    "cp_comm_type hierarchical_context_parallel_sizes": Ignored(
        "chooses how context-parallel ranks exchange keys and values only"
    ),
    "tensor_parallel_num_weight_shards": Rejected(
        _SHARDS, same_as="engine.tensor_model_parallel_size", changes="memory"
    ),
    "expert_tensor_parallel_num_weight_shards": Rejected(
        _SHARDS, same_as="engine.expert_tensor_parallel_size", changes="memory"
    ),
    "gtp_weight_remat_size expert_gtp_weight_remat_size": Rejected(
        f"has to be 1: {_SHARDS}", only=(1,), changes="memory"
    ),
    """batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs
    microbatch_group_size_per_vp_stage mtp_standalone overlap_p2p_comm
    overlap_p2p_comm_warmup_flush use_ring_exchange_p2p variable_seq_lengths""": Ignored(_PIPELINE),
    "pipeline_model_parallel_comm_backend": KEYS["megatron_cfg.use_gloo_process_groups"],
    "hetereogenous_dist_checkpoint": Ignored("checkpoints have this package's own form"),
}

_ARCHITECTURE: Rules = {
    """swiglu normalization multi_latent_attention hidden_size num_layers num_attention_heads
    num_query_groups layernorm_epsilon rotary_base qk_layernorm ffn_hidden_size kv_channels
    add_bias_linear add_qkv_bias gated_linear_unit activation_func activation_func_clamp_value
    glu_linear_offset softmax_scale softmax_type apply_residual_connection_post_layernorm
    layernorm_zero_centered_gamma qk_l2_norm attention_output_gate window_size
    window_attn_skip_freq rotary_interleaved no_rope_freq mrope_section num_moe_experts
    moe_ffn_hidden_size moe_layer_freq moe_latent_size moe_shared_expert_intermediate_size
    moe_shared_expert_gate moe_apply_probs_on_input moe_router_topk
    moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_router_pre_softmax
    moe_router_score_function q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    rope_type rotary_percent rotary_scaling_factor original_max_position_embeddings beta_fast
    beta_slow mscale mscale_all_dim experimental_attention_variant linear_attention_freq
    is_hybrid_model heterogeneous_block_specs mtp_hybrid_override_pattern""": Rejected(MODEL),
    "attention_dropout hidden_dropout": Rejected("the model's config.json decides", only=(0, 0.0)),
    """mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path
    mamba_training_ssm_states_dtype linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads dsa_indexer_n_heads
    dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
    dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
    dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32""": Ignored(_ABSENT),
    "use_mup": Rejected("neither learning rates nor outputs are scaled by the model's width"),
    """mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
    mup_attn_scale_power""": _only("use_mup"),
    """perform_initialization use_cpu_initialization init_method init_method_std
    output_layer_init_method embedding_init_method embedding_init_method_std""": Ignored(
        "weights are read from the checkpoint, and new ones drawn by this package"
    ),
    "init_model_with_meta_device": _FSDP,
}

_PRECISION: Rules = {
    "params_dtype pipeline_dtype": Rejected("set engine.dtype", same_as="engine.dtype"),
    "fp16 bf16": Rejected("set engine.dtype"),
    "enable_autocast fp32_residual_connection": Rejected(
        "layers and residual connections have engine.dtype"
    ),
    "autocast_dtype": _only("enable_autocast"),
    "disable_bf16_reduced_precision_matmul": Rejected(
        "matrix products are summed as torch does by default"
    ),
    "attention_softmax_in_fp32 apply_query_key_layer_scaling": Ignored(
        "softmax is always computed in fp32"
    ),
    "batch_invariant_mode": Rejected(
        "kernels are chosen for speed: rounding depends on what else is in a batch"
    ),
    "deterministic_mode": Rejected(
        "kernels are chosen for speed; NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 restricts those of "
        "Transformer Engine's attention",
        changes="whether a run can be repeated exactly",
    ),
    "fp8 fp4": _NO_FP8,
    "quant_recipe use_kitchen use_kitchen_attention activation_func_fp8_input_store": Rejected(
        "quantised training is not supported"
    ),
    "kitchen_attention_backend": _only("use_kitchen_attention"),
    """fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
    fp8_output_proj tp_only_amax_red fp4_recipe fp4_param fp4_quantizer_factory
    moe_router_padding_for_quantization moe_router_padding_for_fp8""": Ignored(_FP8),
}

_MEMORY: Rules = {
    "cpu_offloading": Rejected(
        "activations stay on the device; use recompute_granularity", changes="memory"
    ),
    """cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
    cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers""": _only(
        "cpu_offloading"
    ),
    """min_offloaded_tensor_size delay_offload_until_cuda_graph
    delta_offload_bytes_across_pp_ranks activation_offload_fraction
    fine_grained_offloading_max_inflight_offloads""": KEYS["megatron_cfg.offload_modules"],
    "distribute_saved_activations": Rejected(
        "engine.sequence_parallel splits them over tensor-parallel ranks", changes="memory"
    ),
    "num_microbatches_with_partial_activation_checkpoints": Ignored(
        "all microbatches are recomputed alike, which takes time but no memory"
    ),
    "moe_layer_recompute": Rejected(
        "recompute_granularity 'full' recomputes experts, with the whole layer", changes="memory"
    ),
    "mlp_chunks_for_training": Rejected(
        "an MLP takes all positions in 1 chunk; use recompute_granularity",
        only=(1,),
        changes="memory",
    ),
    "clone_scatter_output_in_embedding disable_parameter_transpose_cache": Ignored(
        "always done where it saves memory"
    ),
    "memory_efficient_layer_norm": Ignored("affects Apex's norms only, which are not used"),
}

_SPEED: Rules = {
    """use_flash_attn attention_backend flash_attention_version persist_layer_norm
    bias_dropout_fusion masked_softmax_fusion use_fused_swiglu use_fused_rmsnorm use_naive_l2norm
    moe_grouped_gemm moe_use_legacy_grouped_gemm fused_single_qkv_rope cross_entropy_loss_fusion
    cross_entropy_fusion_impl moe_router_fusion use_te_activation_func fused_residual_rmsnorm
    use_transformer_engine_op_fuser use_grouped_gemm_for_shared_expert
    use_grouped_gemm_for_dense_mlp moe_single_grouped_weight moe_single_grouped_bias
    mla_down_proj_fusion symmetric_ar_type moe_flex_dispatcher_num_sms moe_deepep_num_sms
    moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing""": Ignored(_KERNEL),
    """tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
    tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
    overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release delay_wgrad_compute
    defer_embedding_wgrad_compute wgrad_deferral_limit
    overlap_dispatch_backward_with_experts_wgrad high_priority_a2a_comm_stream""": Ignored(
        _OVERLAP
    ),
    """enable_cuda_graph external_cuda_graph cuda_graph_scope cuda_graph_use_single_mempool
    cuda_graph_retain_backward_graph use_te_rng_tracker""": _GRAPHS,
    """flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers
    inference_fuse_tp_communication inference_disable_triton_nvls_kernels
    inference_moe_disable_fused_quant_kernels nccl_all_reduce_for_prefill mlp_chunks_for_prefill
    cache_mla_latents""": Ignored(_INFERENCE),
    "timers barrier_with_L1_time config_logger_dir log_max_attention_logit test_mode": Ignored(
        _LOG
    ),
    "async_tensor_model_parallel_allreduce moe_extended_tp moe_token_dropping": Ignored(_UNREAD),
}

ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_TRAINING: Rules = {
    " ".join(ACCOUNTED): Accepted(
        "the first or the last model chunk has a layer less",
        sets="megatron_cfg.pipeline_model_parallel_layout",
    ),
    """finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func
    param_sync_func moe_grad_scale_func mtp_grad_scale_func
    experimental_attention_variant_loss_scale_func""": Rejected(
        "a function, which a configuration cannot hold; this engine sets its own"
    ),
    "qk_clip": Rejected("the optimizer alone changes weights"),
    "qk_clip_alpha qk_clip_threshold": _only("qk_clip"),
    "moe_enable_deepep": Accepted("with moe_token_dispatcher_type 'flex', which it asks for"),
    "moe_enable_routing_replay": Rejected("set engine.router_replay.mode"),
    "moe_router_force_load_balancing moe_router_force_biased": Rejected(
        "a benchmark's: experts would be chosen at random"
    ),
    "moe_input_jitter_eps": Rejected("routers read what layers compute, without noise"),
    "moe_router_quantile_balancing_ema": Ignored(
        "affects moe_router_load_balancing_type 'quantile_balancing' only, which is not among its "
        "values"
    ),
    "moe_expert_rank_capacity_factor": Rejected("use moe_expert_capacity_factor"),
    """moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu""": _only("moe_expert_rank_capacity_factor"),
    "moe_ncclep_static_shape moe_ncclep_zero_copy": Ignored(
        "affects moe_flex_dispatcher_backend 'ncclep' only, which is not among its values"
    ),
    "moe_hybridep_pad_uneven_dispatch_inputs": Ignored("done wherever replicas share experts"),
    "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size": Rejected(
        "gates and linear units are the two halves of a weight, as in checkpoints"
    ),
}

TRANSFORMER = by_name(_LAYOUT | _ARCHITECTURE | _PRECISION | _MEMORY | _SPEED | _TRAINING)
"""`TransformerConfig` and `MLATransformerConfig`, and what verl's examples set beside them."""

_DDP: Rules = {
    "use_distributed_optimizer": _LAYOUT["use_distributed_optimizer"],
    "num_distributed_optimizer_instances": Ignored(
        "main parameters and moments are spread over all data-parallel ranks"
    ),
    "align_param_gather delay_wgrad_compute": Ignored(_OVERLAP),
    """bucket_size num_buckets pad_buckets_for_high_nccl_busbw nccl_ub
    disable_symmetric_registration""": Ignored(
        "affects the sizes and buffers of messages only; this engine sets them"
    ),
    "check_for_nan_in_grad": Ignored("no step is taken if the norm of the gradient is not finite"),
    "check_for_large_grads": Ignored(_LOG),
    """reduce_scatter_with_fp32_accumulation
    param_name_patterns_for_fp32_local_accumulation""": Rejected(
        "set grad_reduce_in_fp32, with which all gradients are summed in fp32"
    ),
    "fp8_param_gather fp4_param_gather keep_fp8_transpose_cache": Ignored(_FP8),
    "reuse_grad_buf_for_mxfp8_param_ag": _NO_FP8,
    """gradient_reduce_div_fusion suggested_communication_unit_size preserve_fp32_weights
    outer_dp_sharding_strategy fsdp_double_buffer fsdp_manual_registration
    fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
    megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
    megatron_fsdp_use_decoupled_grad megatron_fsdp_cuda_graph_mode
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer""": _FSDP,
}

DDP = by_name(_DDP)
"""`DistributedDataParallelConfig`."""
