"""What becomes of every key of a configuration: applied, ignored or rejected; data only."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.config_sections import (
    CheckpointConfig,
    DTensorConfig,
    DynamicBatchingConfig,
    GenerationConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    Section,
    SequencePackingConfig,
    TokenizerConfig,
)


@dataclass(frozen=True)
class Applied:
    """Has the effect its name says."""


@dataclass(frozen=True)
class Nested:
    """A section whose keys have rules of their own."""

    section: type[Section]


@dataclass(frozen=True)
class Ignored:
    """Changes no result here; `why` says what happens instead."""

    why: str


@dataclass(frozen=True)
class Rejected:
    """Would change results. Passes only when it asks for nothing (null, false, 0, an empty or
    disabled section) or means the same as the key `same_as`, given or by default."""

    why: str
    same_as: str = ""


Rule = Applied | Nested | Ignored | Rejected


def _each(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_BALANCING = "bears on losses that balance experts, which are not built"
_EXPERTS = "follows from the model's config.json"
_ENGINE = "belongs to the host's inference engines, not to the policy's own generate"
_FP8 = "bears on fp8 training only, and fp8_cfg is rejected"
_GRAPHS = "bears on captured CUDA graphs only; nothing is captured here"
_HOST = "read by the host's driver, not by the worker"
_KERNEL = "chooses kernels only; the implementation picks its own"
_MEMORY = "saves memory only; results are the same without it"
_MTP = "bears on multi-token prediction only, and mtp_num_layers is rejected"
_NORMALISED = "losses are divided by global counts and gradients summed, whatever it says"
_OTHER = "belongs to the host's other workers, which this project does not run"
_QUANT = "bears on quantised training only, and quant_cfg is rejected"
_TEXT = "bears on vision, audio and video towers only; the built-in model families are text only"

_POLICY: dict[str, Rule] = {
    **_each(
        Applied(),
        """model_name precision train_global_batch_size train_micro_batch_size logprob_batch_size
        generation_batch_size max_total_sequence_length max_grad_norm learning_rate seed
        make_sequence_length_divisible_by logprob_chunk_size refit_buffer_size_gb
        refit_bucket_bytes refit_dtype refit_timeout_s
        checkpoint_timeout_s""",
    ),
    "tokenizer": Nested(TokenizerConfig),
    "generation": Nested(GenerationConfig),
    "megatron_cfg": Nested(MegatronConfig),
    "dtensor_cfg": Nested(DTensorConfig),
    "dynamic_batching": Nested(DynamicBatchingConfig),
    "sequence_packing": Nested(SequencePackingConfig),
    **_each(
        Ignored(_OTHER),
        "optimizer scheduler fsdp_offload_enabled activation_checkpointing_enabled",
    ),
    **_each(
        Ignored(_MEMORY),
        "offload_optimizer_for_logprob offload_optimizer_for_refit",
    ),
    **_each(
        Ignored(_QUANT),
        """quant_calib_data quant_calib_size quant_batch_size quant_sequence_length
        disable_modelopt_layer_spec""",
    ),
    "quant_cfg": Rejected("quantised training is not built"),
    "hf_config_overrides": Rejected("write the change into the checkpoint's config.json"),
    "env_vars": Rejected("workers get the variables of megatron_cfg.env_vars; put them there"),
    "draft": Rejected("training a draft model beside the policy is not built"),
    "router_replay": Rejected("replaying the routes of experts is not built"),
    "reward_model_cfg": Rejected("reward models are not built"),
    "pretrained_checkpoint": Rejected("weights come from the Hugging Face files of model_name"),
    "dequantize_base_checkpoint": Rejected("store the checkpoint in bfloat16 or float32"),
    "is_vlm": Rejected("vision-language models are not built"),
}

_TOKENIZER: dict[str, Rule] = {
    **_each(
        Ignored("the caller makes the tokenizer and the prompts"),
        "name chat_template chat_template_kwargs use_fastokens use_processor",
    ),
    **_each(Ignored(_TEXT), "audio video"),
}

_GENERATION: dict[str, Rule] = {
    **_each(Applied(), "max_new_tokens temperature top_p top_k stop_token_ids"),
    "backend": Ignored("the caller chooses whom it asks to generate"),
    "stop_strings": Rejected("generate stops at tokens; put their ids into stop_token_ids"),
    "bad_words": Rejected("the policy's own generate bans no words"),
    "ignore_eos": Rejected("generate ends a row at the tokenizer's end of sequence"),
    "val_temperature": Rejected("generate has one temperature", same_as="generation.temperature"),
    "val_top_p": Rejected("generate has one top_p", same_as="generation.top_p"),
    "val_top_k": Rejected("generate has one top_k", same_as="generation.top_k"),
    **_each(
        Ignored(_ENGINE),
        """vllm_cfg vllm_kwargs sglang_cfg sglang_kwargs trtllm_cfg trtllm_kwargs dynamo_cfg
        mcore_generation_config model_path quant_cfg real_quant real_quant_export_cpu_offload
        real_quant_ignore refit_cfg refit_transport""",
    ),
    **_each(
        Ignored(_HOST),
        """colocated port_range_low port_range_high model_name use_async_rollouts
        num_prompts_per_step _pad_token_id _mtp_weights_from_refit _debug_payload_metrics""",
    ),
}

_MEGATRON: dict[str, Rule] = {
    **_each(
        Applied(),
        """enabled tensor_model_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage context_parallel_size expert_model_parallel_size
        sequence_parallel activation_checkpointing recompute_granularity recompute_method
        recompute_num_layers recompute_modules transformer_impl apply_rope_fusion
        bias_activation_fusion freeze_moe_router moe_router_dtype moe_router_load_balancing_type
        moe_router_bias_update_rate train_iters env_vars""",
    ),
    "optimizer": Nested(MegatronOptimizerConfig),
    "scheduler": Nested(MegatronSchedulerConfig),
    "distributed_data_parallel_config": Nested(MegatronDDPConfig),
    "checkpoint": Nested(CheckpointConfig),
    "pipeline_dtype": Rejected("stages exchange what they compute in", same_as="precision"),
    "empty_unused_memory_level": Ignored("caches are emptied where memory is handed over"),
    "converter_type": Ignored("the checkpoint's config.json names the model family"),
    "force_reconvert_from_hf": Ignored("every start reads the Hugging Face files anew"),
    "use_gloo_process_groups": Ignored("process groups follow from the device"),
    **_each(
        Ignored(_MEMORY),
        """defer_fp32_logits use_fused_linear_logprobs fused_linear_logprobs_chunk_size
        use_linear_ce_fusion_loss linear_ce_fusion_chunk_size fine_grained_activation_offloading
        offload_modules clear_memory_caches_before_refit""",
    ),
    **_each(
        Ignored(_KERNEL),
        "attention_backend gradient_accumulation_fusion use_fused_weighted_squared_relu",
    ),
    **_each(Ignored(_GRAPHS), "cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps"),
    **_each(
        Ignored(_NORMALISED),
        """calculate_per_token_loss cp_normalize do_not_average_loss scale_loss_by_dp_cp_size""",
    ),
    **_each(
        Ignored(_FP8),
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    ),
    **_each(Ignored(_MTP), "mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads"),
    **_each(
        Ignored(_TEXT),
        """freeze_vision_model freeze_vision_projection freeze_sound_encoder
        freeze_sound_projection radio_force_cpe_eval_mode""",
    ),
    "expert_tensor_parallel_size": Ignored(
        "experts are shared out like all else over tensor-parallel ranks; results are the same"
    ),
    "moe_aux_loss_coeff": Rejected("losses that balance experts are not built"),
    **_each(Ignored(_BALANCING), "moe_per_layer_logging track_moe_metrics"),
    **_each(
        Ignored(_EXPERTS),
        "moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk",
    ),
    **_each(
        Ignored(_KERNEL),
        """moe_permute_fusion moe_grouped_gemm moe_enable_deepep moe_token_dispatcher_type
        moe_shared_expert_overlap moe_flex_dispatcher_backend moe_hybridep_num_sms
        moe_pad_experts_for_cuda_graph_inference hybridep_num_ranks_per_nvlink_domain
        hybridep_use_mnnvl inference_moe_token_dispatcher_type inference_grouped_gemm_backend""",
    ),
    "peft": Rejected("adapters (LoRA) are not built; all weights are trained"),
    "fp8_cfg": Rejected("fp8 training is not built; use precision bfloat16"),
    "mtp_num_layers": Rejected("multi-token prediction is not built"),
    "model_overrides": Rejected("write the change into the checkpoint's config.json"),
    "freeze_config": Rejected("freezing parts of the model is not built"),
    "pipeline_model_parallel_layout": Rejected(
        "use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
    ),
    "account_for_embedding_in_pipeline_split": Rejected("use num_layers_in_first_pipeline_stage"),
    "account_for_loss_in_pipeline_split": Rejected("use num_layers_in_last_pipeline_stage"),
}

_OPTIMIZER: dict[str, Rule] = {
    **_each(
        Applied(),
        """optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps sgd_momentum
        use_distributed_optimizer clip_grad""",
    ),
    "fp16": Rejected("float16 training is not built; use precision bfloat16 or float32"),
    "bf16": Ignored("follows from precision; main parameters are always fp32"),
    "params_dtype": Ignored("parameters have the dtype of precision, main parameters are fp32"),
    **_each(
        Ignored(_MEMORY),
        """use_precision_aware_optimizer optimizer_cpu_offload optimizer_offload_fraction
        overlap_cpu_optimizer_d2h_h2d""",
    ),
}

_SCHEDULER: dict[str, Rule] = {
    **_each(
        Applied(),
        """start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_style
        lr_decay_iters lr_warmup_iters lr_warmup_init""",
    ),
    "override_opt_param_scheduler": Ignored("the schedule of the configuration always counts"),
}

_DDP: dict[str, Rule] = {
    **_each(Applied(), "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather"),
    "average_in_collective": Ignored(_NORMALISED),
    "use_custom_fsdp": Rejected("Megatron's own sharded data parallelism is not built"),
    "data_parallel_sharding_strategy": Ignored("bears on use_custom_fsdp only"),
}

_CHECKPOINT: dict[str, Rule] = {
    **_each(Applied(), "async_save fresh_optimizer"),
    "ckpt_assume_constant_structure": Ignored("what goes where is worked out at every save"),
}

_BATCHING: dict[str, Rule] = {
    **_each(Applied(), "enabled train_mb_tokens logprob_mb_tokens"),
    "microbatch_order": Ignored("each rank computes its costliest microbatch first"),
    "fuse_loss": Ignored(_MEMORY),
}

_DYNAMIC: dict[str, Rule] = _BATCHING | {
    "sequence_length_round": Applied(),
    "algorithm": Ignored("bears on sequence_packing only"),
}

_PACKING: dict[str, Rule] = _BATCHING | {
    "algorithm": Applied(),
    "sequence_length_round": Ignored("packed sequences are padded only as the layout needs it"),
}

_SECTIONS: dict[str, dict[str, Rule]] = {
    "": _POLICY,
    "tokenizer.": _TOKENIZER,
    "generation.": _GENERATION,
    "megatron_cfg.": _MEGATRON,
    "megatron_cfg.optimizer.": _OPTIMIZER,
    "megatron_cfg.scheduler.": _SCHEDULER,
    "megatron_cfg.distributed_data_parallel_config.": _DDP,
    "megatron_cfg.checkpoint.": _CHECKPOINT,
    "dtensor_cfg.": {"enabled": Applied(), "*": Ignored(_OTHER)},
    "dynamic_batching.": _DYNAMIC,
    "sequence_packing.": _PACKING,
}

KEYS: dict[str, Rule] = {
    prefix + name: rule for prefix, rules in _SECTIONS.items() for name, rule in rules.items()
}
"""Every key by its path below `policy`; a `*` stands for any other key of its section."""

IGNORED: dict[str, str] = {
    path: rule.why for path, rule in KEYS.items() if isinstance(rule, Ignored)
}
"""Keys without effect here and why."""
