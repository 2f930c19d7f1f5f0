"""Whichever release of the host is installed: its policy, its losses and what they give on logits
of one process. Releases are told apart by what they have.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.hosts import nemo_rl as ours
from tests.checkpoints import make_tokenizer

GRPO = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.1,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "disable_ppo_ratio": False,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_ratio": None,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "force_on_policy_ratio": False,
}
DPO = {
    "reference_policy_kl_penalty": 0.1,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.3,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}


def newer() -> bool:
    """Whether losses name their input (from 0.6)."""
    return importlib.util.find_spec("nemo_rl.algorithms.loss") is not None


def losses() -> dict[str, Any]:
    """The host's own losses."""
    if newer():
        module = importlib.import_module("nemo_rl.algorithms.loss.loss_functions")
        nll = module.NLLLossFn()
    else:
        module = importlib.import_module("nemo_rl.algorithms.loss_functions")
        nll = module.NLLLoss()
    pg, dpo = _settings(module, "ClippedPGLoss", GRPO), _settings(module, "DPOLoss", DPO)
    return {"nll": nll, "grpo": module.ClippedPGLossFn(pg), "dpo": module.DPOLossFn(dpo)}


def _settings(module: Any, name: str, values: dict[str, Any]) -> Any:
    """As a mapping or as a model, whichever the release has."""
    kind = getattr(module, f"{name}Config")
    return kind(**values)


def loss_on(loss_fn: Any, logits_BSV: torch.Tensor, data: Any) -> tuple[torch.Tensor, dict]:
    """The host's loss of a whole batch, computed as its own code does in one process."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    counts = {
        "global_valid_seqs": data["sample_mask"].sum(),
        "global_valid_toks": mask.sum(),
    }
    where = {"vocab_parallel_rank": 0, "vocab_parallel_group": _alone()}
    if not newer():
        return loss_fn(logits_BSV, data, **counts, **where)
    utils = importlib.import_module("nemo_rl.algorithms.loss.utils")
    found, data = utils.prepare_loss_input(logits=logits_BSV, data=data, loss_fn=loss_fn, **where)
    return loss_fn(data=data, **counts, **found)


def _alone() -> dist.ProcessGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def batch(values: dict[str, Any]) -> Any:
    """The host's own batch."""
    module = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    return module.BatchedDataDict(values)


def make_policy(config: dict[str, Any], world_size: int, **keywords: Any) -> tuple[Any, Any]:
    """The host's Policy, started as a driver script starts it, and its cluster."""
    ours.install("all")
    cluster_module = importlib.import_module("nemo_rl.distributed.virtual_cluster")
    policy_module = importlib.import_module("nemo_rl.models.policy.lm_policy")
    cluster = cluster_module.RayVirtualCluster([world_size], use_gpus=False, name="real-host")
    tokenizer = make_tokenizer(256)
    policy = policy_module.Policy(cluster=cluster, config=config, tokenizer=tokenizer, **keywords)
    return policy, cluster


def config_of(path: Path, batching: str, layout: dict[str, int], **megatron: Any) -> dict[str, Any]:
    """The host's `policy` section with everything that it requires, and little that it does not."""
    tokens = {"train_mb_tokens": 64, "logprob_mb_tokens": 64}
    sizes = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    }
    return {
        "model_name": str(path),
        "tokenizer": {"name": str(path)},
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "generation_batch_size": 2,
        "learning_rate": 1e-3,
        "logprob_batch_size": 2,
        "precision": "float32",
        "max_total_sequence_length": 64,
        "make_sequence_length_divisible_by": 4,
        "max_grad_norm": 1.0,
        "generation": None,
        "optimizer": None,
        "scheduler": None,
        "dtensor_cfg": {"enabled": False},
        "dynamic_batching": {
            "enabled": batching == "dynamic",
            "sequence_length_round": 4,
            **tokens,
        },
        "sequence_packing": {
            "enabled": batching == "packed",
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_round": 4,
            **tokens,
        },
        "megatron_cfg": {
            "enabled": True,
            "empty_unused_memory_level": 0,
            "activation_checkpointing": False,
            "converter_type": "LlamaForCausalLM",
            **(sizes | layout),
            "num_layers_in_first_pipeline_stage": None,
            "num_layers_in_last_pipeline_stage": None,
            "pipeline_dtype": "float32",
            "sequence_parallel": False,
            "freeze_moe_router": True,
            "moe_router_dtype": "fp64",
            "moe_router_load_balancing_type": "none",
            "moe_router_bias_update_rate": 0.0,
            "apply_rope_fusion": True,
            "train_iters": 100,
            "optimizer": {
                "optimizer": "adam",
                "lr": 1e-3,
                "min_lr": 1e-3,
                "weight_decay": 0.0,
                "bf16": False,
                "fp16": False,
                "params_dtype": "float32",
                "adam_beta1": 0.9,
                "adam_beta2": 0.98,
                "adam_eps": 1e-5,
                "use_distributed_optimizer": True,
                "use_precision_aware_optimizer": True,
                "clip_grad": 1.0,
            },
            "scheduler": {
                "start_weight_decay": 0.0,
                "end_weight_decay": 0.0,
                "weight_decay_incr_style": "constant",
                "lr_decay_style": "constant",
                "lr_decay_iters": None,
                "lr_warmup_iters": 0,
                "lr_warmup_init": 1e-3,
            },
            "distributed_data_parallel_config": {
                "grad_reduce_in_fp32": False,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "average_in_collective": True,
                "data_parallel_sharding_strategy": "optim_grads_params",
            },
            "peft": {"enabled": False, "dim": 8, "alpha": 16},
            "fp8_cfg": {"enabled": False, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
            **megatron,
        },
    }


def dtensor_of(config: dict[str, Any]) -> dict[str, Any]:
    """The same policy by the host's DTensor configuration, with the same optimizer."""
    keys = {
        "enabled": True,
        "cpu_offload": False,
        "sequence_parallel": False,
        "activation_checkpointing": False,
        "tensor_parallel_size": 1,
        "context_parallel_size": config["megatron_cfg"]["context_parallel_size"],
        "custom_parallel_plan": None,
    }
    own = config["megatron_cfg"]["optimizer"]
    kwargs = {
        "lr": own["lr"],
        "weight_decay": own["weight_decay"],
        "betas": [own["adam_beta1"], own["adam_beta2"]],
        "eps": own["adam_eps"],
        "foreach": False,
        "fused": False,
    }
    return config | {
        "megatron_cfg": {"enabled": False},
        "dtensor_cfg": keys,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": kwargs},
    }
