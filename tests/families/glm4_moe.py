from random import Random

from megatron_policy.converters.architecture.traits import QkNorm
from tests.families.deepseek_v3 import SIGMOID, SIGMOID_FIELDS, draw_sigmoid
from tests.samples import Fields, Samples, parse_published

PUBLISHED = parse_published("""106_852_251_264 parameters
    "attention_bias": true, "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": false, "topk_group": 1, "use_qk_norm": false,
    "vocab_size": 151552
""")


def draw(random: Random, sizes: Fields) -> Fields:
    return draw_sigmoid(random, sizes) | {
        "attention_bias": random.random() < 0.5,
        "use_qk_norm": random.random() < 0.5,
        "partial_rotary_factor": random.choice([0.5, 1.0]),
    }


SAMPLES = Samples(
    architecture="Glm4MoeForCausalLM",
    experts=True,
    tiny=SIGMOID_FIELDS | {"attention_bias": True, "use_qk_norm": True},
    head_dim=True,
    full={"num_nextn_predict_layers": 1},
    draw=draw,
    context={},
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"first_k_dense_replace": 0, "use_qk_norm": False},
            {"moe": SIGMOID, "moe_layers": (), "qk_norm": QkNorm.NONE, "qkv_bias": True},
        ),
    ),
    refused=(
        ({"num_nextn_predict_layers": 1.5}, "num_nextn_predict_layers = 1.5: must be"),
        ({"index_topk": 4}, "index_topk = 4: unknown field"),
    ),
    published={
        "GLM-4.5-Air": PUBLISHED,
        "GLM-4.5": PUBLISHED
        | {
            "parameters": 352_797_829_024,
            "first_k_dense_replace": 3,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_hidden_layers": 92,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    },
)
