"""What becomes of every key of `megatron_cfg` and its sections. Only data."""

from __future__ import annotations

from megatron_policy.config.rules import (
    Applied,
    Ignored,
    Nested,
    Rejected,
    Rules,
    each,
    switched_off,
)
from megatron_policy.config.sections import (
    CheckpointConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
)
from megatron_policy.config.trained import PeftConfig

TEXT = "affects vision, audio and video towers only; the built-in model families are text only"
_FILES = "the plan is computed at every save and load"
_FP32 = (
    "kept in fp32; other dtypes need Transformer Engine's Adam and a form of state that "
    "checkpoints here do not have"
)
_FSDP = (
    "Megatron-Core's FSDP makes parameters DTensors, which loading, checkpoints and refits here "
    "cannot address; use_distributed_optimizer spreads main parameters and moments over "
    "data-parallel ranks"
)
_FP32_NAMES = ("float32", "fp32", "torch.float32")
_OFFLOAD = "affects optimizer_cpu_offload only, which is rejected"
_GRAPHS = "affects captured CUDA graphs only; nothing is captured here"
_KERNEL = "chooses kernels only; the implementation picks its own"
_LOG = "logs only"
_MUON = "affects optimizers that `optimizer` does not offer"
_NORMALISED = "losses are always divided by global counts, and gradients are summed"
_OVERRIDE = "the model's config.json decides; write the change there"
_WSD = "affects lr_decay_style 'WSD' only, which is not among its values"

_LAYOUT: Rules = {
    **each(
        Applied(),
        """enabled tensor_model_parallel_size pipeline_model_parallel_size
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage context_parallel_size
        sequence_parallel""",
    ),
    "virtual_pipeline_model_parallel_size": Applied("model chunks of each pipeline stage"),
    "expert_model_parallel_size": Applied("experts of a layer are spread over these ranks"),
    "expert_tensor_parallel_size": Applied("by default tensor_model_parallel_size"),
    "pipeline_dtype": Rejected(
        "stages exchange tensors of the dtype of precision", same_as="precision"
    ),
    "pipeline_model_parallel_layout": Rejected(
        "use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
    ),
    "account_for_embedding_in_pipeline_split": Rejected("use num_layers_in_first_pipeline_stage"),
    "account_for_loss_in_pipeline_split": Rejected("use num_layers_in_last_pipeline_stage"),
    "use_gloo_process_groups": Ignored("process groups follow from the device"),
    "env_vars": Applied("environment variables of the workers"),
    "_override_": Ignored("a mark for the host, which composes its files"),
}

_COMPUTATION: Rules = {
    "activation_checkpointing": Applied(),
    **each(
        Applied("used where activation_checkpointing is on"),
        "recompute_granularity recompute_method recompute_num_layers",
    ),
    "recompute_modules": Applied(
        "some of 'core_attn', 'layernorm' and 'mlp'; with recompute_granularity 'selective'"
    ),
    "optimizer_offload": Rejected(
        "the optimizer's state leaves the device for log-probabilities and refits anyhow; within a "
        "step use_distributed_optimizer spreads it over data-parallel ranks",
        changes="memory",
    ),
    "transformer_impl": Applied("'auto', 'local' or 'transformer_engine'"),
    **each(
        Applied("where the implementation has the fused kernel"),
        "apply_rope_fusion bias_activation_fusion",
    ),
    "empty_unused_memory_level": Applied(
        "1: unused device memory is given back before the optimizer's part of a step; 2: after it, "
        "too"
    ),
    **each(
        Ignored(
            "log-probabilities are always computed in tiles, without logits of all tokens; only a "
            "loss that takes logits gets them, in fp32"
        ),
        """defer_fp32_logits use_fused_linear_logprobs fused_linear_logprobs_chunk_size
        use_linear_ce_fusion_loss linear_ce_fusion_chunk_size""",
    ),
    "clear_memory_caches_before_refit": Ignored("always done when memory is handed over"),
    "fine_grained_activation_offloading": Rejected(
        "activations stay on the device; use activation_checkpointing", changes="memory"
    ),
    "offload_modules": Ignored(
        "affects fine_grained_activation_offloading only, which is rejected"
    ),
    **each(
        Ignored(_KERNEL),
        "attention_backend gradient_accumulation_fusion use_fused_weighted_squared_relu",
    ),
    **each(
        Ignored(_GRAPHS),
        "cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps inference_cuda_graph_scope",
    ),
    **each(
        Ignored(_NORMALISED),
        "calculate_per_token_loss cp_normalize do_not_average_loss scale_loss_by_dp_cp_size",
    ),
    **each(
        Ignored("affects fp8 training only, and fp8_cfg.enabled is rejected"),
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    ),
}

_MODEL: Rules = {
    "train_iters": Applied("the length of the schedule where lr_decay_iters is not given"),
    "converter_type": Ignored("the checkpoint's config.json names the model family"),
    **each(
        Ignored("every start reads the Hugging Face files again"),
        "force_reconvert_from_hf force_overwrite_initial_ckpt",
    ),
    "layernorm_epsilon": Rejected(_OVERRIDE),
    "model_overrides": Rejected(_OVERRIDE),
    "mtp_num_layers": Applied("at most the model's num_nextn_predict_layers; 0 leaves them out"),
    "mtp_loss_scaling_factor": Applied("factor on the mean of the losses of these layers"),
    "mtp_use_repeated_layer": Applied("the first of these layers predicts all further tokens"),
    "mtp_detach_heads": Applied(
        "the losses of these layers train nothing else; their gradients are clipped apart"
    ),
    **each(
        Ignored(TEXT),
        """freeze_vision_model freeze_vision_projection freeze_sound_encoder
        freeze_sound_projection radio_force_cpe_eval_mode""",
    ),
    "freeze_config": Nested(),
    "peft": Nested(PeftConfig),
    "fp8_cfg": Nested(),
    "optimizer": Nested(MegatronOptimizerConfig),
    "scheduler": Nested(MegatronSchedulerConfig),
    "distributed_data_parallel_config": Nested(MegatronDDPConfig),
    "checkpoint": Nested(CheckpointConfig),
}

_EXPERTS: Rules = {
    "freeze_moe_router": Applied(),
    "moe_router_dtype": Applied("fp32 or fp64; null means what the model's family computes in"),
    "moe_router_load_balancing_type": Applied(
        "'none', 'aux_loss', 'seq_aux_loss' or 'global_aux_loss'; see docs/experts.md"
    ),
    "moe_aux_loss_coeff": Applied("of the load balancing loss; not given, it is the model's own"),
    "moe_z_loss_coeff": Applied("of the router's z-loss; not given, it is 0"),
    "moe_router_bias_update_rate": Applied(
        "of routers with a correction bias; not given, or beside adapters, it is 0"
    ),
    "moe_per_layer_logging": Applied("`moe_metrics` has each layer too"),
    "track_moe_metrics": Ignored("`moe_metrics` is always reported"),
    "moe_token_dispatcher_type": Applied(
        "'alltoall', 'allgather' or 'flex', with the same results; 'alltoall' where replicas share "
        "experts or stages exchange different lengths ('allgather'), or nothing is sent ('flex')"
    ),
    "moe_flex_dispatcher_backend": Applied(
        "of 'flex': 'deepep' (by default) or 'hybridep', which pads where replicas share experts; "
        "before Megatron-Core 0.19 'alltoall' takes its place there"
    ),
    "moe_permute_fusion": Applied("where the implementation has the fused kernel"),
    "moe_shared_expert_overlap": Applied("on GPUs, with moe_token_dispatcher_type 'alltoall'"),
    "moe_expert_capacity_factor": Applied(
        "drops tokens, so results depend on layout and batching; null or -1 drops none"
    ),
    "moe_pad_expert_input_to_capacity": Applied("with moe_expert_capacity_factor"),
    "moe_token_drop_policy": Applied("'probs' or 'position', with moe_expert_capacity_factor"),
    **each(Rejected(_OVERRIDE), "moe_router_num_groups moe_router_group_topk"),
    "moe_router_enable_expert_bias": Applied(
        "follows from the model's config.json; refused where it contradicts it and that counts"
    ),
    **each(
        Ignored(_KERNEL),
        """moe_grouped_gemm moe_enable_deepep moe_hybridep_num_sms
        moe_pad_experts_for_cuda_graph_inference hybridep_num_ranks_per_nvlink_domain
        hybridep_use_mnnvl inference_moe_token_dispatcher_type inference_grouped_gemm_backend""",
    ),
}

_OPTIMIZER: Rules = {
    "optimizer": Applied("'adam' or 'sgd'"),
    **each(
        Applied(),
        """min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum""",
    ),
    "use_distributed_optimizer": Applied("Adam only: false for SGD where it is not given"),
    "lr": Applied("policy.learning_rate where it is not given"),
    "clip_grad": Applied("policy.max_grad_norm where it is not given"),
    "param_groups": Applied("parameters that are trained otherwise, or frozen"),
    "fp16": Applied("follows from precision, and has to agree with it"),
    "bf16": Applied("follows from precision; main parameters are always fp32"),
    "loss_scale": Applied("a fixed factor on losses, with precision float16"),
    "initial_loss_scale": Applied("with precision float16; not given, it is 65536"),
    **each(
        Applied("with precision float16"),
        "min_loss_scale loss_scale_window hysteresis",
    ),
    "params_dtype": Ignored("parameters have the dtype of precision, main parameters are fp32"),
    **each(
        Rejected(_FP32, only=_FP32_NAMES),
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
    ),
    "use_precision_aware_optimizer": Ignored(
        "results are the same without it; main parameters take 4 bytes each instead of 2, and a "
        "step copies bfloat16 gradients to fp32",
        warned=True,
    ),
    "store_param_remainders": Ignored("affects use_precision_aware_optimizer only"),
    "optimizer_cpu_offload": Rejected(
        "Megatron-Core's hybrid optimizer keeps copies of the state that checkpoints and memory "
        "states do not reach. Between steps the state leaves the device anyhow; within them "
        "use_distributed_optimizer spreads it over data-parallel ranks",
        changes="memory",
    ),
    **each(
        Ignored(_OFFLOAD),
        """optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
        use_torch_optimizer_for_cpu_offload pin_cpu_grads pin_cpu_params""",
    ),
    "decoupled_weight_decay": Applied(
        "true of Adam, whose weight decay is always decoupled, false of SGD, which adds it to the "
        "gradient; no other is built"
    ),
    **each(
        Rejected(
            "give the embedding and the head a learning rate of their own in param_groups, by roles"
        ),
        "decoupled_lr decoupled_min_lr",
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
    "overlap_param_gather_with_optimizer_step": Ignored(_KERNEL),
    "optimizer_cuda_graph": Ignored(_GRAPHS),
    "use_layer_wise_distributed_optimizer": Ignored(_MUON),
    **each(Ignored(_LOG), "log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir"),
    **each(
        Ignored(_MUON),
        """muon_momentum muon_split_qkv muon_nesterov muon_use_nesterov muon_scale_mode
        muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode
        muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 soap_shampoo_beta
        soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method
        adaptive_muon_beta2 adaptive_muon_eps""",
    ),
}

_SCHEDULER: Rules = {
    **each(Applied("optimizer.weight_decay if not given"), "start_weight_decay end_weight_decay"),
    "weight_decay_incr_style": Applied("'constant', 'linear' or 'cosine'"),
    "lr_decay_style": Applied("'constant', 'linear', 'cosine' or 'inverse-square-root'"),
    "lr_decay_iters": Applied("megatron_cfg.train_iters where it is not given"),
    **each(Applied(), "lr_warmup_iters lr_warmup_init"),
    **each(Rejected("use lr_warmup_iters"), "lr_warmup_fraction lr_warmup_samples"),
    "lr_decay_samples": Rejected("use lr_decay_iters"),
    **each(Ignored(_WSD), "lr_wsd_decay_style lr_wsd_decay_iters"),
    "no_weight_decay_cond_type": Rejected("norms, biases and sinks alone have no weight decay"),
    "use_checkpoint_opt_param_scheduler": Rejected("the schedule of the configuration is used"),
    "override_opt_param_scheduler": Ignored("the schedule of the configuration is always used"),
}

_DDP: Rules = {
    **each(Applied(), "grad_reduce_in_fp32 overlap_grad_reduce"),
    "overlap_param_gather": Applied("where the distributed optimizer spreads parameters"),
    "average_in_collective": Ignored(_NORMALISED),
    **each(Rejected(_FSDP, changes="memory"), "use_custom_fsdp use_megatron_fsdp"),
    "data_parallel_sharding_strategy": Ignored(
        "affects use_custom_fsdp and use_megatron_fsdp only, which are rejected"
    ),
}

_CHECKPOINT: Rules = {
    "async_save": Applied(
        "where NeMo RL waits for a save before it renames its directory (`finalize_async_save` "
        "in its workers); else saves block, and a warning says so"
    ),
    "fresh_optimizer": Applied("of this project: a checkpoint without optimizer state is loaded"),
    **each(
        Ignored(_FILES),
        """ckpt_assume_constant_structure ckpt_fully_parallel_save_process_group
        ckpt_fully_parallel_load_process_group ckpt_fully_parallel_load_exchange_algo
        fully_parallel_save_process_group fully_parallel_load_process_group
        fully_parallel_load_exchange_algo""",
    ),
}

_PEFT: Rules = {
    **each(Applied(), "enabled dim alpha dropout dropout_position"),
    "target_modules": Applied("all linear layers of the decoder's layers if empty"),
    "exclude_modules": Applied("also together with target_modules"),
    "lora_A_init_method": Applied("drawn for the whole tensor: the same in every layout"),
    "lora_B_init_method": Applied("drawn for the whole tensor: the same in every layout"),
    "lora_dtype": Applied("has to agree with precision"),
    "a2a_experimental": Ignored("ranks exchange vectors of the adapters' rank alone"),
    "start_from": Applied("of this project: a PEFT directory whose adapters are gone on with"),
}

MEGATRON_SECTIONS: dict[str, Rules] = {
    "megatron_cfg.": _LAYOUT | _COMPUTATION | _MODEL | _EXPERTS,
    "megatron_cfg.optimizer.": _OPTIMIZER,
    "megatron_cfg.scheduler.": _SCHEDULER,
    "megatron_cfg.distributed_data_parallel_config.": _DDP,
    "megatron_cfg.checkpoint.": _CHECKPOINT,
    "megatron_cfg.peft.": _PEFT,
    "megatron_cfg.fp8_cfg.": switched_off(
        "fp8 training is not supported; use precision bfloat16",
        "fp8 training",
        "fp8 fp8_recipe fp8_param force_clear_fp8_caches",
    ),
    "megatron_cfg.freeze_config.": {
        **each(
            Ignored(TEXT),
            """freeze_vision_model freeze_vision_projection freeze_sound_encoder
            freeze_sound_projection""",
        ),
        **each(
            Rejected("optimizer.param_groups freezes parameters, by names and roles"),
            "freeze_language_model *",
        ),
    },
}
"""Rules by the path of a section, with its trailing dot; `*` stands for any other key of it."""
