from random import Random

from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import QkNorm, Scoring
from tests.samples import Fields, Samples, make_moe, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    # Both, because the oracle of some releases of transformers does not read rotary_dim alone.
    rotated = random.choice([4, sizes["head_dim"]])
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "partial_rotary_factor": rotated / sizes["head_dim"],
        "rotary_dim": rotated,
    }


SAMPLES = Samples(
    architecture="MiniMaxM2ForCausalLM",
    experts=True,
    tiny={"num_local_experts": 8, "num_experts_per_tok": 3, "partial_rotary_factor": 0.5},
    head_dim=True,
    draw=draw,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"head_dim": 16, "rotary_dim": 8},
            {
                "moe": make_moe(
                    experts=8,
                    chosen=3,
                    ffn_hidden_size=24,
                    scoring=Scoring.SIGMOID,
                    renormalized=True,
                    correction_bias=True,
                ),
                "rope": Rope(5e6, fraction=0.5),
                "qk_norm": QkNorm.ALL_HEADS,
                "qkv_bias": False,
            },
        ),
    ),
    refused=(
        ({"rotary_dim": 24}, "rotary_dim = 24: contradicts partial_rotary_factor"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size = 8"),
        ({"attn_type_list": [1, 0, 1]}, "attn_type_list = [1, 0, 1]: every layer"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
    ),
    published={
        "MiniMax-M2.5 in bf16": parse_published("""228_689_764_864 parameters
            "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
            "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"}, "head_dim": 128,
            "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
            "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
            "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
            "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
            "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
            "shared_intermediate_size": 0, "tie_word_embeddings": false, "use_mtp": true,
            "use_qk_norm": true, "use_routing_bias": true, "vocab_size": 200064
        """)
        | {"attn_type_list": [1] * 62}
    },
)
