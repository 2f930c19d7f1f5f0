"""verl's sections of a Megatron engine, as plain mappings with the values its YAML files have."""

from __future__ import annotations

from typing import Any


def model(**changes: Any) -> dict[str, Any]:
    lora = {"type": "lora", "merge": False, "rank": 0, "alpha": 32, "dropout": 0.0}
    lora |= {"target_modules": ["linear_qkv", "linear_proj"], "exclude_modules": [], "dtype": None}
    mtp = {"enable": False, "enable_train": False, "mtp_loss_scaling_factor": 0.1}
    return {
        "path": "/models/tiny",
        "model_type": "language_model",
        "use_remove_padding": True,
        "enable_gradient_checkpointing": True,
        "enable_activation_offload": False,
        "override_config": {},
        "lora_rank": 0,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "lora": lora | changes.pop("lora", {}),
        "mtp": mtp | changes.pop("mtp", {}),
        "tiled_mlp": {"enabled": False, "num_shards": 4},
    } | changes


def engine(**changes: Any) -> dict[str, Any]:
    transformer = {
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "recompute_method": None,
        "recompute_num_layers": None,
        "attention_backend": "flash",
    }
    return {
        "strategy": "megatron_policy",
        "dtype": "bfloat16",
        "param_offload": False,
        "optimizer_offload": False,
        "grad_offload": False,
        "forward_only": False,
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "dynamic_context_parallel": False,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "use_dist_checkpointing": False,
        "use_mbridge": True,
        "use_remove_padding": True,
        "use_megatron_fsdp": False,
        "seed": 42,
        "override_ddp_config": {},
        "override_transformer_config": transformer | changes.pop("override_transformer_config", {}),
        "override_mcore_model_config": {},
        "router_replay": {"mode": "disabled", "record_file": None},
        "qat": {"enable": False, "mode": "w4a16"},
    } | changes


def optim(**changes: Any) -> dict[str, Any]:
    return {
        "lr": 1e-3,
        "lr_warmup_steps_ratio": 0.0,
        "total_training_steps": -1,
        "weight_decay": 0.01,
        "lr_warmup_steps": -1,
        "betas": [0.9, 0.999],
        "clip_grad": 1.0,
        "optimizer": "adam",
        "lr_warmup_init": 0.0,
        "lr_decay_steps": None,
        "lr_decay_style": "constant",
        "min_lr": 0.0,
        "weight_decay_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": False,
        "use_precision_aware_optimizer": False,
        "main_grads_dtype": "fp32",
        "override_optimizer_config": {},
    } | changes


def checkpoint(**changes: Any) -> dict[str, Any]:
    contents = ["model", "optimizer", "extra"]
    return {"save_contents": contents, "load_contents": contents, "async_save": False} | changes


def sections_with(key: str, value: Any, **own: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All sections, in the order of `translate`, with a value at a path such as `engine.seed`."""
    found = {"model": model(), "engine": engine(), "optim": optim(), "checkpoint": checkpoint()}
    found |= own
    *path, name = key.split(".")
    section: dict[str, Any] = found
    for each in path:
        section = section.setdefault(each, {})
    section[name] = value
    return found
