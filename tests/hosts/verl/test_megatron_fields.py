"""Every field of the installed Megatron-Core that verl lets override has a rule."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from importlib.metadata import version
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_policy.config.section import Applied, Ignored, Rejected
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.verl.keys import rule_of
from megatron_policy.hosts.verl.megatron_fields import DDP, MODEL, TRANSFORMER
from megatron_policy.hosts.verl.translate import Translation, translate
from tests.hosts.verl.sections import sections_with

CLASSES: dict[str, tuple[Any, ...]] = {
    "engine.override_transformer_config.": (TransformerConfig, MLATransformerConfig),
    "engine.override_ddp_config.": (DistributedDataParallelConfig,),
    "optim.override_optimizer_config.": (OptimizerConfig,),
}
DECIDED = (MODEL, "the model's config.json decides")
"""Reasons of fields for which Megatron-Core's default means another model."""

BESIDE = """swiglu use_flash_attn use_fused_swiglu use_fused_rmsnorm use_naive_l2norm
    use_distributed_optimizer"""
"""No fields of Megatron-Core, but set by examples of verl."""
DROPPED = """async_tensor_model_parallel_allreduce moe_extended_tp moe_use_legacy_grouped_gemm
    preserve_fp32_weights"""
"""Fields of 0.16 that 0.19 does not have."""
LATER = """activation_offload_fraction cpu_offloading_retain_pinned_cpu_buffers
    delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks dsa_indexer_k_norm_epsilon
    dsa_indexer_k_norm_fp32 dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
    dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_kernel_backend
    experimental_attention_variant_loss_scale_func expert_gtp_weight_remat_size
    expert_tensor_parallel_num_weight_shards fine_grained_offloading_max_inflight_offloads
    flash_attention_version fp4_param_gather fp8_output_proj fsdp_all_gather_in_start_param_sync
    fsdp_db_use_persist_buf_on_alloc_fail fused_residual_rmsnorm gtp_weight_remat_size
    high_priority_a2a_comm_stream inference_disable_triton_nvls_kernels
    inference_moe_disable_fused_quant_kernels mamba_training_ssm_states_dtype
    megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather
    megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
    megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad mla_down_proj_fusion
    mlp_chunks_for_training moe_expert_rank_capacity_factor moe_flex_dispatcher_num_sms
    moe_grad_scale_func moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash
    moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_page_size moe_permute_fusion_into_hybridep moe_router_force_biased
    moe_router_quantile_balancing_ema moe_shared_expert_glu_interleave_size
    moe_single_grouped_bias moe_single_grouped_weight mtp_grad_scale_func
    mtp_hybrid_override_pattern mup_attn_scale_power mup_base_head_dim mup_base_hidden_size
    mup_embedding_mult mup_output_mult mup_width_mult nccl_all_reduce_for_prefill num_buckets
    overlap_dispatch_backward_with_experts_wgrad param_name_patterns_for_fp32_local_accumulation
    tensor_parallel_num_weight_shards use_grouped_gemm_for_dense_mlp
    use_grouped_gemm_for_shared_expert use_mup use_transformer_engine_op_fuser"""
"""Fields of 0.19 that 0.16 does not have."""


def told(prefix: str, overrides: dict[str, Any]) -> Translation:
    return translate(*sections_with(prefix.rstrip("."), overrides).values())


def known(prefix: str) -> dict[str, Field[Any]]:
    """Fields by name. verl's sections lose names with an underscore in front."""
    found = {field.name: field for each in CLASSES[prefix] for field in fields(each)}
    return {name: field for name, field in found.items() if not name.startswith("_")}


def default(field: Field[Any]) -> Any:
    """A field's default, as a configuration file spells it."""
    value = field.default if field.default is not MISSING else None
    if field.default_factory is not MISSING:
        value = field.default_factory()
    return str(value) if isinstance(value, torch.dtype) else value


@pytest.mark.parametrize("prefix", CLASSES)
def test_every_field_of_megatron_core_has_a_rule(prefix: str) -> None:
    found = {name: rule_of(prefix, name) for name in known(prefix)}
    assert len(found) > 20, "Megatron-Core's classes have fields"
    rules = Applied | Ignored | Rejected
    assert [name for name, rule in found.items() if not isinstance(rule, rules)] == []


@pytest.mark.parametrize("prefix", CLASSES)
def test_a_default_that_asks_for_nothing_passes(prefix: str) -> None:
    """All but what config.json decides, or has to agree with a key of the engine."""
    defaults = {}
    for name, field in known(prefix).items():
        rule = rule_of(prefix, name)
        if isinstance(rule, Rejected) and rule.why not in DECIDED and not rule.same_as:
            defaults[name] = default(field)
    assert defaults
    bare = told(prefix, {})
    assert told(prefix, defaults) == bare
    assert told(prefix, dict.fromkeys(known(prefix))) == bare


@pytest.mark.parametrize("prefix", CLASSES)
def test_what_is_ignored_changes_no_policy(prefix: str) -> None:
    ignored = {
        name: "anything" for name in known(prefix) if isinstance(rule_of(prefix, name), Ignored)
    }
    assert told(prefix, ignored).policy == told(prefix, {}).policy


def test_no_rule_is_for_a_field_that_no_supported_megatron_core_has() -> None:
    release = tuple(int(part) for part in version("megatron-core").split(".")[:2])
    elsewhere = set(BESIDE.split())
    elsewhere |= set(LATER.split()) if release < (0, 19) else set()
    elsewhere |= set(DROPPED.split()) if release > (0, 16) else set()
    transformer, ddp, _ = CLASSES
    assert set(TRANSFORMER) - set(known(transformer)) - elsewhere == set()
    assert set(DDP) - set(known(ddp)) - elsewhere == set()


ASKED = {
    "num_moe_experts": 8,
    "use_mup": True,
    "fp32_residual_connection": True,
    "params_dtype": "float32",
    "batch_invariant_mode": True,
    "deterministic_mode": True,
    "cpu_offloading": True,
    "mlp_chunks_for_training": 4,
    "tensor_parallel_num_weight_shards": 2,
    "gtp_weight_remat_size": 2,
    "grad_scale_func": "package.function",
    "moe_router_force_load_balancing": True,
    "moe_input_jitter_eps": 0.01,
    "hidden_dropout": 0.1,
}


@pytest.mark.parametrize("name", ASKED)
def test_a_field_that_would_change_results_or_memory_is_refused(name: str) -> None:
    prefix = "engine.override_transformer_config."
    with pytest.raises(ConfigError, match=rf"^{re.escape(prefix)}{name}=.* is not"):
        told(prefix, {name: ASKED[name]})


def test_a_field_passes_that_repeats_the_engines_own_key() -> None:
    same = {
        "params_dtype": "bfloat16",
        "pipeline_dtype": "bfloat16",
        "tensor_parallel_num_weight_shards": 1,
    }
    told("engine.override_transformer_config.", same)
    told("engine.override_ddp_config.", {"use_distributed_optimizer": True})
    with pytest.raises(ConfigError, match="set the engine's own key of this name"):
        told("engine.override_ddp_config.", {"use_distributed_optimizer": "no"})


def test_a_name_that_no_megatron_core_has_stays_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown to this engine: did you mean 'kv_channels'"):
        told("engine.override_transformer_config.", {"kv_chanels": 64})


@pytest.mark.parametrize("section", ["optimizer", "peft", "distributed_data_parallel_config"])
def test_a_section_of_a_policys_is_no_field_and_stays_unknown(section: str) -> None:
    with pytest.raises(ConfigError, match=f"{section} is unknown to this engine: .*leave it out"):
        told("engine.override_transformer_config.", {section: {"lr": 1.0}})
