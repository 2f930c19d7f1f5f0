"""Configs of the families with mixtures of experts: plain ones, and random draws of their kinds."""

from __future__ import annotations

import random
from typing import Any

_SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
_SOFTMAX = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": _SIGMOID | _LATENT,
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_norm_min": 0.6,
    },
    "glm4_moe": _SIGMOID | {"attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": _SIGMOID | _LATENT,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "kimi_k2": _SIGMOID | _LATENT | {"n_group": 1, "topk_group": 1},
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "partial_rotary_factor": 0.5,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _SOFTMAX | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": _SOFTMAX | {"norm_topk_prob": True, "mlp_only_layers": [0]},
}
"""Config fields of each family with values that make a difference where its defaults would not."""

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


def draw(family: str, seed: int) -> dict[str, Any]:
    """Random keywords for `make_checkpoint`: sizes, heads, experts and how they are chosen."""
    rng = random.Random(f"{family} {seed}")
    heads = rng.choice([2, 4, 6])
    groups = rng.choice([n for n in (1, 2, 3, 6) if heads % n == 0])
    sizes = {
        "hidden": rng.choice([24, 48]),
        "layers": rng.choice([2, 3]),
        "heads": heads,
        "groups": groups,
        "head_dim": rng.choice([8, 16]),
        "ffn": rng.choice([24, 40]),
        "vocab": rng.choice([131, 150, 200]),
        "tied": rng.random() < 0.3,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "seed": seed,
    }
    layers = sizes["layers"]
    return sizes | _DRAWS[family](rng, layers, sizes)


def _mixtral(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = rng.choice([2, 3, 5])
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts),
        "sliding_window": rng.choice([None, 5]),
    }


def _softmax(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = rng.choice([3, 4, 6])
    return {
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts),
        "moe_intermediate_size": rng.choice([8, 24]),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice([1, 1, 2]),
        "mlp_only_layers": rng.choice([[], [0], [layers - 1]]),
    }


def _olmoe(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = rng.choice([3, 4, 6])
    return {
        "head_dim": None,
        "num_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts),
        "norm_topk_prob": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
    }


def _qwen2_moe(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    shared = {"shared_expert_intermediate_size": rng.choice([8, 20])}
    return (
        _softmax(rng, layers, sizes) | shared | {"head_dim": None, "qkv_bias": rng.random() < 0.5}
    )


def _qwen3_moe(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    return _softmax(rng, layers, sizes) | {"attention_bias": rng.random() < 0.5}


def _sigmoid(rng: random.Random, layers: int) -> dict[str, Any]:
    groups = rng.choice([1, 2, 4])
    taken = rng.randint(1, groups)
    size = rng.choice([2, 3])
    return {
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": taken,
        "num_experts_per_tok": rng.randint(1, taken * size),
        "moe_intermediate_size": rng.choice([8, 24]),
        "n_shared_experts": rng.choice([1, 2]),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "first_k_dense_replace": rng.randint(0, layers),
    }


def _deepseek_v3(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    return _sigmoid(rng, layers) | {
        "num_key_value_heads": sizes["heads"],
        "head_dim": None,
        "q_lora_rank": rng.choice([None, 12, 20]),
        "kv_lora_rank": rng.choice([8, 20]),
        "qk_nope_head_dim": rng.choice([6, 8]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([6, 8, 14]),
        "rope_scaling": rng.choice([None, YARN]),
    }


def _kimi_k2(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    # One ramp that is a step, as published.
    scaling = rng.choice([None, YARN | {"beta_fast": 1.0, "beta_slow": 1.0}])
    experts = rng.choice([3, 6])
    return _deepseek_v3(rng, layers, sizes) | {
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts),
        "rope_scaling": scaling,
    }


def _ernie4_5_moe(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = rng.choice([3, 4, 6])
    return {
        "moe_num_experts": experts,
        "moe_k": rng.randint(1, experts),
        "moe_intermediate_size": rng.choice([8, 24]),
        "moe_num_shared_experts": rng.choice([0, 1, 2]),
        "moe_layer_start_index": rng.randint(0, 1),
        "moe_layer_end_index": rng.choice([-1, 1]),
        "moe_layer_interval": rng.choice([1, 1, 2]),
        "moe_norm_min": rng.choice([1e-12, 0.6]),
    }


def _glm4_moe(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    return _sigmoid(rng, layers) | {
        "attention_bias": rng.random() < 0.5,
        "use_qk_norm": rng.random() < 0.5,
        "partial_rotary_factor": rng.choice([0.5, 1.0]),
    }


def _glm4_moe_lite(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = [rng.choice(["dense", "sparse"]) for _ in range(layers)]
    return _deepseek_v3(rng, layers, sizes) | {"mlp_layer_types": kinds}


def _minimax_m2(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = rng.choice([3, 4, 6])
    # Both, because the oracle of some releases of transformers does not read rotary_dim alone.
    rotated = rng.choice([4, sizes["head_dim"]])
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, experts),
        "partial_rotary_factor": rotated / sizes["head_dim"],
        "rotary_dim": rotated,
    }


def _gpt_oss(rng: random.Random, layers: int, sizes: dict[str, Any]) -> dict[str, Any]:
    plain = {"rope_type": "default"}
    yarn = {k: v for k, v in YARN.items() if "mscale" not in k} | {"truncate": False}
    return _mixtral(rng, layers, sizes) | {
        "sliding_window": rng.choice([4, 128]),
        "attention_bias": rng.random() < 0.7,
        "rope_scaling": rng.choice([plain, yarn]),
    }


_DRAWS = {
    "deepseek_v3": _deepseek_v3,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "kimi_k2": _kimi_k2,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
