"""Configs of further published hybrids, by what they have in place of those in `tests/families`."""

from __future__ import annotations

from typing import Any

from tests.families import PUBLISHED

_SUPER = {
    "hidden_size": 4096,
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 2688,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
}
_NANO_V2 = {
    "hidden_size": 5120,
    "hybrid_override_pattern": 6 * "M-M-M-M*-" + "M-M-M-M-",
    "intermediate_size": 20480,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
}
_QWEN_27B = PUBLISHED["Qwen3.5-27B"][1]
_QWEN_9B = {
    "text_config": _QWEN_27B["text_config"]
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_num_value_heads": 32,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
    },
    "vision_config": _QWEN_27B["vision_config"] | {"out_hidden_size": 4096},
}
HYBRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    name: (parameters, PUBLISHED[like][1] | changes)
    for name, parameters, like, changes in (
        ("Nemotron-3-Super-120B-A12B", 120_668_707_840, "Nemotron-3-Nano-30B-A3B", _SUPER),
        ("Nemotron-Nano-12B-v2", 12_310_001_152, "Nemotron-3-Nano-30B-A3B", _NANO_V2),
        ("Qwen3.5-9B", 9_409_813_744, "Qwen3.5-27B", _QWEN_9B),
    )
}
"""As `PUBLISHED`. What Nemotron 3 Super has for multi-token prediction is not counted."""
