"""The keys of `megatron_cfg` and its sections that are ignored or rejected, by reason."""

from __future__ import annotations

from megatron_policy.config.section import Ignored, Rejected, Rules, switched_off

_FP32 = (
    "kept in fp32; other dtypes need Transformer Engine's Adam and a form of state that "
    "checkpoints here do not have"
)
_FSDP = (
    "Megatron-Core's FSDP makes parameters DTensors, which loading, checkpoints and refits here "
    "cannot address; use_distributed_optimizer spreads main parameters and moments over "
    "data-parallel ranks"
)
_GRAPHS = Ignored("affects captured CUDA graphs only; nothing is captured here")
_KERNEL = Ignored("chooses kernels only; the implementation picks its own")
_NORMALISED = Ignored("losses are always divided by global counts, and gradients are summed")

_MEGATRON: Rules = {
    "pipeline_dtype": Rejected(
        "stages exchange tensors of the dtype of precision", same_as="precision"
    ),
    "account_for_embedding_in_pipeline_split": Rejected("use num_layers_in_first_pipeline_stage"),
    "account_for_loss_in_pipeline_split": Rejected("use num_layers_in_last_pipeline_stage"),
    "use_gloo_process_groups": Ignored("process groups follow from the device"),
    "_override_": Ignored("a mark for the host, which composes its files"),
    "optimizer_offload": Rejected(
        "the optimizer's state leaves the device for log-probabilities and refits anyhow; "
        "within a step use_distributed_optimizer spreads it over data-parallel ranks",
        changes="memory",
    ),
    """defer_fp32_logits use_fused_linear_logprobs fused_linear_logprobs_chunk_size
    use_linear_ce_fusion_loss linear_ce_fusion_chunk_size""": Ignored(
        "log-probabilities are always computed in tiles, without logits of all tokens; only a "
        "loss that takes logits gets them, in fp32"
    ),
    "clear_memory_caches_before_refit": Ignored("always done when memory is handed over"),
    "fine_grained_activation_offloading": Rejected(
        "activations stay on the device; use activation_checkpointing", changes="memory"
    ),
    "offload_modules": Ignored(
        "affects fine_grained_activation_offloading only, which is rejected"
    ),
    """attention_backend gradient_accumulation_fusion use_fused_weighted_squared_relu
    moe_grouped_gemm moe_enable_deepep moe_hybridep_num_sms
    moe_pad_experts_for_cuda_graph_inference hybridep_num_ranks_per_nvlink_domain
    hybridep_use_mnnvl inference_moe_token_dispatcher_type
    inference_grouped_gemm_backend""": _KERNEL,
    """cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps
    inference_cuda_graph_scope""": _GRAPHS,
    """calculate_per_token_loss cp_normalize do_not_average_loss
    scale_loss_by_dp_cp_size""": _NORMALISED,
    "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16": Ignored(
        "affects fp8 training only, and fp8_cfg.enabled is rejected"
    ),
    "converter_type": Ignored("the checkpoint's config.json names the model family"),
    "force_reconvert_from_hf force_overwrite_initial_ckpt": Ignored(
        "every start reads the Hugging Face files again"
    ),
    "layernorm_epsilon model_overrides moe_router_num_groups moe_router_group_topk": Rejected(
        "the model's config.json decides; write the change there"
    ),
    "radio_force_cpe_eval_mode": Ignored("towers compute in training what they compute otherwise"),
    "track_moe_metrics": Ignored("`moe_metrics` is always reported"),
}

_OPTIMIZER: Rules = {
    "params_dtype": Ignored("parameters have the dtype of precision, main parameters are fp32"),
    "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype": Rejected(
        _FP32, only=("float32", "fp32", "torch.float32")
    ),
    "use_precision_aware_optimizer": Ignored(
        "results are the same without it; main parameters take 4 bytes each instead of 2, and "
        "a step copies bfloat16 gradients to fp32",
        warned=True,
    ),
    "store_param_remainders": Ignored("affects use_precision_aware_optimizer only"),
    "optimizer_cpu_offload": Rejected(
        "Megatron-Core's hybrid optimizer keeps copies of the state that checkpoints and "
        "memory states do not reach. Between steps the state leaves the device anyhow; within "
        "them use_distributed_optimizer spreads it over data-parallel ranks",
        changes="memory",
    ),
    """optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
    use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params""": Ignored(
        "affects optimizer_cpu_offload only, which is rejected"
    ),
    "decoupled_lr decoupled_min_lr": Rejected(
        "give the embedding and the head a learning rate of their own in param_groups, by roles"
    ),
    "apply_wd_to_qk_layernorm": Rejected(
        "norms, biases and sinks have no weight decay, but for those to which param_groups gives it"
    ),
    "grad_norm_skip_threshold": Rejected(
        "no step is skipped for its gradient norm", only=(float("inf"),)
    ),
    "reuse_grad_buf_for_mxfp8_param_ag": Rejected("fp8 training is not supported"),
    "fp8_recipe": Ignored("affects fp8 training only, and fp8_cfg.enabled is rejected"),
    "overlap_param_gather": Ignored("distributed_data_parallel_config.overlap_param_gather counts"),
    "overlap_param_gather_with_optimizer_step": _KERNEL,
    "optimizer_cuda_graph": _GRAPHS,
    "log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir": Ignored("logs only"),
    """use_layer_wise_distributed_optimizer muon_momentum muon_split_qkv muon_nesterov
    muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type
    muon_num_ns_steps muon_tp_mode muon_extra_scale_factor muon_scalar_optimizer lion_beta1
    lion_beta2 soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo
    adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps""": Ignored(
        "affects optimizers that `optimizer` does not offer"
    ),
}

_SCHEDULER: Rules = {
    "lr_warmup_fraction lr_warmup_samples": Rejected("use lr_warmup_iters"),
    "lr_decay_samples": Rejected("use lr_decay_iters"),
    "lr_wsd_decay_style lr_wsd_decay_iters": Ignored(
        "affects lr_decay_style 'WSD' only, which is not among its values"
    ),
    "no_weight_decay_cond_type": Rejected("norms, biases and sinks alone have no weight decay"),
    "use_checkpoint_opt_param_scheduler": Rejected("the schedule of the configuration is used"),
    "override_opt_param_scheduler": Ignored("the schedule of the configuration is always used"),
}

_DDP: Rules = {
    "average_in_collective": _NORMALISED,
    "use_custom_fsdp use_megatron_fsdp": Rejected(_FSDP, changes="memory"),
    "data_parallel_sharding_strategy": Ignored(
        "affects use_custom_fsdp and use_megatron_fsdp only, which are rejected"
    ),
}

_CHECKPOINT: Rules = {
    """ckpt_assume_constant_structure ckpt_fully_parallel_save_process_group
    ckpt_fully_parallel_load_process_group ckpt_fully_parallel_load_exchange_algo
    fully_parallel_save_process_group fully_parallel_load_process_group
    fully_parallel_load_exchange_algo""": Ignored("the plan is computed at every save and load"),
}

_FREEZING: Rules = {
    "*": Rejected("optimizer.param_groups freezes parameters, by names and roles"),
}

NOT_APPLIED: dict[str, Rules] = {
    "megatron_cfg.": _MEGATRON,
    "megatron_cfg.optimizer.": _OPTIMIZER,
    "megatron_cfg.scheduler.": _SCHEDULER,
    "megatron_cfg.distributed_data_parallel_config.": _DDP,
    "megatron_cfg.checkpoint.": _CHECKPOINT,
    "megatron_cfg.peft.": {
        "a2a_experimental": Ignored("ranks exchange vectors of the adapters' rank alone"),
    },
    "megatron_cfg.fp8_cfg.": switched_off(
        "fp8 training is not supported; use precision bfloat16",
        "fp8 training",
        "fp8 fp8_recipe fp8_param force_clear_fp8_caches",
    ),
    "megatron_cfg.freeze_config.": _FREEZING,
}
"""Rules by the path of a section, with its trailing dot."""
