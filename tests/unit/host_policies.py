"""Policy sections as NeMo RL's drivers hand them over, without what becomes of them."""

from __future__ import annotations

from typing import Any

_MODEL = "Qwen/Qwen2.5-1.5B"

_PEFT = {
    "enabled": False,
    "dim": 8,
    "alpha": 32,
    "dropout": 0.0,
    "dropout_position": "post",
    "target_modules": [],
    "exclude_modules": [],
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "lora_dtype": None,
}

_OPTIMIZER = {
    "optimizer": "adam",
    "lr": 5e-6,
    "min_lr": 5e-7,
    "weight_decay": 0.01,
    "bf16": True,
    "fp16": False,
    "params_dtype": "float32",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    # YAML 1.1 reads this as a string.
    "adam_eps": "1e-8",
    "sgd_momentum": 0.9,
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": True,
    "clip_grad": 1.0,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
    "overlap_cpu_optimizer_d2h_h2d": False,
}

_SCHEDULER = {
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.01,
    "weight_decay_incr_style": "constant",
    "lr_decay_style": "constant",
    "lr_decay_iters": 1000,
    "lr_warmup_iters": 13,
    "lr_warmup_init": 5e-7,
}

_MEGATRON = {
    "enabled": True,
    "env_vars": None,
    "model_overrides": {},
    "checkpoint": {"async_save": True, "ckpt_assume_constant_structure": True},
    "force_reconvert_from_hf": False,
    "empty_unused_memory_level": 1,
    "activation_checkpointing": False,
    "recompute_granularity": "full",
    "recompute_modules": None,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_warmup_steps": 3,
    "fine_grained_activation_offloading": False,
    "offload_modules": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_dtype": "bfloat16",
    "sequence_parallel": False,
    "freeze_moe_router": True,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "moe_permute_fusion": True,
    "moe_per_layer_logging": False,
    "moe_enable_deepep": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "mtp_num_layers": 0,
    "mtp_loss_scaling_factor": 0.0,
    "mtp_use_repeated_layer": False,
    "mtp_detach_heads": False,
    "apply_rope_fusion": True,
    "bias_activation_fusion": True,
    "gradient_accumulation_fusion": False,
    "use_fused_weighted_squared_relu": False,
    "use_gloo_process_groups": False,
    "defer_fp32_logits": False,
    "use_fused_linear_logprobs": False,
    "fused_linear_logprobs_chunk_size": 256,
    "peft": _PEFT,
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "distributed_data_parallel_config": {
        "grad_reduce_in_fp32": False,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "use_custom_fsdp": False,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
    "fp8_cfg": {"enabled": False, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
}

_GENERATION = {
    "backend": "vllm",
    "max_new_tokens": 512,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "val_temperature": 1.0,
    "val_top_p": 1.0,
    "val_top_k": None,
    "stop_token_ids": [151643],
    "stop_strings": None,
    "port_range_low": 3000,
    "port_range_high": 4999,
    "refit_transport": None,
    "refit_cfg": {"nixl": {"device": "cuda"}},
    "real_quant_export_cpu_offload": True,
    "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
    "vllm_cfg": {"tensor_parallel_size": 1, "load_format": "dummy"},
    "vllm_kwargs": {},
    "mcore_generation_config": {"buffer_size_gb": 10},
    # Written by the driver, not by the user.
    "model_name": _MODEL,
    "_pad_token_id": 151643,
    "_mtp_weights_from_refit": False,
}

_BATCHING = {
    "enabled": False,
    "train_mb_tokens": 2048,
    "logprob_mb_tokens": 2048,
    "sequence_length_round": 64,
}

_OTHER_WORKERS: dict[str, Any] = {
    "dtensor_cfg": {"enabled": False, "_v2": True, "lora_cfg": {"enabled": False, "dim": 8}},
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 5e-6, "betas": [0.9, 0.98]}},
    "scheduler": [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 20}},
        {"milestones": [20]},
    ],
}

GRPO: dict[str, Any] = {
    "model_name": _MODEL,
    "tokenizer": {"name": _MODEL, "chat_template_kwargs": None, "use_fastokens": False},
    "hf_config_overrides": {},
    "precision": "bfloat16",
    "train_global_batch_size": 512,
    "train_micro_batch_size": 4,
    "logprob_batch_size": 4,
    "generation_batch_size": 64,
    "logprob_chunk_size": None,
    "max_total_sequence_length": 512,
    "make_sequence_length_divisible_by": 1,
    "max_grad_norm": 1.0,
    "offload_optimizer_for_logprob": False,
    "draft": {"enabled": False, "model_name": None, "loss_weight": 0.1},
    **_OTHER_WORKERS,
    "optimizer": None,
    "dynamic_batching": _BATCHING,
    "sequence_packing": _BATCHING
    | {"enabled": True, "algorithm": "modified_first_fit_decreasing", "microbatch_order": "packer"},
    "generation": _GENERATION,
    "megatron_cfg": _MEGATRON,
}
"""GRPO of a small model, sequence packing on; as of mid 2026."""

_SHARED = {
    key: GRPO[key]
    for key in (
        "model_name",
        "tokenizer",
        "precision",
        "train_global_batch_size",
        "train_micro_batch_size",
        "max_total_sequence_length",
        "make_sequence_length_divisible_by",
        "max_grad_norm",
        "offload_optimizer_for_logprob",
    )
}

SFT: dict[str, Any] = {
    **_SHARED,
    **_OTHER_WORKERS,
    "tokenizer": {"name": _MODEL, "chat_template": "{{ messages }}", "chat_template_kwargs": None},
    "dynamic_batching": {"enabled": False, "train_mb_tokens": 1024, "sequence_length_round": 64},
    "sequence_packing": {"enabled": False, "train_mb_tokens": 1024, "fuse_loss": True},
    "megatron_cfg": _MEGATRON
    | {
        "env_vars": {},
        "moe_router_bias_update_rate": "1e-3",
        "peft": _PEFT | {"lora_dtype": "None"},
    },
}
"""Supervised fine-tuning; there is no section `generation`."""

DPO: dict[str, Any] = {
    **_SHARED,
    **_OTHER_WORKERS,
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {"enabled": False},
    "megatron_cfg": _MEGATRON
    | {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "scheduler": {k: v for k, v in _SCHEDULER.items() if k != "lr_decay_iters"},
    },
}
"""Preference optimisation; the schedule names no end."""

EARLY: dict[str, Any] = {
    "model_name": _MODEL,
    "tokenizer": {"name": _MODEL},
    "precision": "float32",
    "train_global_batch_size": 8,
    "train_micro_batch_size": 2,
    "logprob_batch_size": 2,
    "generation_batch_size": 2,
    "learning_rate": 5e-6,
    "max_grad_norm": 1.0,
    "fsdp_offload_enabled": False,
    "activation_checkpointing_enabled": False,
    "refit_buffer_size_gb": 4,
    "optimizer": None,
    "scheduler": None,
    "dtensor_cfg": {"enabled": False},
    "dynamic_batching": {"enabled": False},
    "generation": {
        "backend": "megatron",
        "max_new_tokens": 32,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
    },
    "megatron_cfg": {
        "enabled": True,
        "empty_unused_memory_level": 0,
        "activation_checkpointing": False,
        "converter_type": "Qwen2ForCausalLM",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "context_parallel_size": 1,
        "pipeline_dtype": "float32",
        "sequence_parallel": False,
        "optimizer": {k: v for k, v in _OPTIMIZER.items() if "offload" not in k} | {"bf16": False},
        "scheduler": _SCHEDULER | {"lr_decay_iters": None, "lr_warmup_iters": 50},
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": False,
            "overlap_grad_reduce": True,
            "overlap_param_gather": False,
            "average_in_collective": True,
            "use_custom_fsdp": False,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    },
}
"""As of mid 2025, the policy generating for itself."""

ALL = {"grpo": GRPO, "sft": SFT, "dpo": DPO, "early": EARLY}
