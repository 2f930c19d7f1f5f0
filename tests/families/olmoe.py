from random import Random

from megatron_policy.converters.architecture.traits import QkNorm, Scoring
from tests.samples import Fields, Samples, make_moe, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    return {
        "head_dim": None,
        "num_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "norm_topk_prob": random.random() < 0.5,
        "attention_bias": random.random() < 0.5,
    }


SAMPLES = Samples(
    architecture="OlmoeForCausalLM",
    experts=True,
    tiny={"num_experts": 4, "num_experts_per_tok": 2},
    full={"attention_bias": True},
    draw=draw,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"attention_bias": True},
            {
                "moe": make_moe(ffn_hidden_size=24),
                "qk_norm": QkNorm.ALL_HEADS,
                "qkv_bias": True,
                "proj_bias": True,
                "uniform_layers": True,
            },
        ),
        (
            {"norm_topk_prob": True},
            {"moe": make_moe(ffn_hidden_size=24, scoring=Scoring.SOFTMAX_OF_CHOSEN)},
        ),
    ),
    refused=(({"clip_qkv": 8.0}, "clip_qkv = 8.0"),),
    published={
        "OLMoE-1B-7B-0924": parse_published("""6_919_161_856 parameters
            "attention_bias": false, "clip_qkv": null, "hidden_size": 2048,
            "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": false,
            "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": false,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01, "tie_word_embeddings": false, "vocab_size": 50304
        """)
    },
)
