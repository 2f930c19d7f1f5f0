from functools import partial

from megatron_policy.converters.architecture.traits import QkNorm
from tests.families import glm4v
from tests.families.deepseek_v3 import SIGMOID, SIGMOID_FIELDS, draw_sigmoid
from tests.samples import Samples, parse_published, surround

APART = {"rope_type": "default", "mrope_section": [2, 1, 1]}

SAMPLES = Samples(
    architecture="Glm4vMoeForConditionalGeneration",
    surround=partial(surround, vision=glm4v.SQUARE, interleaved=False, marks=glm4v.MARKS),
    experts=True,
    tiny=SIGMOID_FIELDS | {"attention_bias": True, "partial_rotary_factor": 0.5},
    draw=draw_sigmoid,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"first_k_dense_replace": 0},
            {"moe": SIGMOID, "moe_layers": (), "qk_norm": QkNorm.NONE, "qkv_bias": True},
        ),
        ({"attention_bias": False}, {"qkv_bias": False, "proj_bias": False}),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        (
            {"text_config": {"use_qk_norm": True, "head_dim": 16, "rope_scaling": APART}},
            "text_config.use_qk_norm = True: the class has no norms of queries and keys",
        ),
    ),
    published={
        "GLM-4.5V": {"vision_config": glm4v.TOWER | {"intermediate_size": 10944}}
        | parse_published("""107_710_933_120 parameters
            "attention_bias": true, "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
            "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1,
            "use_qk_norm": false, "vocab_size": 151552
        """)
    },
)
