from random import Random

from tests.families import deepseek_v3
from tests.families.deepseek_v3 import LATENT, LATENT_FIELDS, SIGMOID, SIGMOID_FIELDS
from tests.samples import Fields, Samples, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    kinds = [random.choice(["dense", "sparse"]) for _ in range(sizes["layers"])]
    return deepseek_v3.draw(random, sizes) | {"mlp_layer_types": kinds}


SAMPLES = Samples(
    architecture="Glm4MoeLiteForCausalLM",
    experts=True,
    tiny=SIGMOID_FIELDS | LATENT_FIELDS,
    full={"num_nextn_predict_layers": 1},
    draw=draw,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"num_key_value_heads": 4, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            {
                "moe": SIGMOID,
                "mla": LATENT,
                "moe_layers": (True, False, True),
                "kv_channels": 12,
                "num_query_groups": 4,
            },
        ),
        (
            {"num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 3},
            {"moe": None, "moe_layers": ()},
        ),
    ),
    refused=(
        ({"num_key_value_heads": 4, "rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 4, "mlp_layer_types": ["sparse"]}, "mlp_layer_types = ['sparse']"),
        (
            {"num_key_value_heads": 4, "mlp_layer_types": ["dense", "linear", "sparse"]},
            "mlp_layer_types = 'linear': must be dense or sparse",
        ),
    ),
    published={
        "GLM-4.7-Flash": parse_published("""29_943_393_920 parameters
            "attention_bias": false, "first_k_dense_replace": 1, "hidden_size": 2048,
            "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
            "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 20,
            "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
            "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
            "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
            "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
            "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc",
            "v_head_dim": 256, "vocab_size": 154880
        """)
    },
)
