from random import Random

from megatron_policy.converters.architecture import Scoring
from tests.families.granite import FACTORS
from tests.samples import Fields, Samples, draw_scaling, make_moe, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    return draw_scaling(random, sizes) | {
        "head_dim": None,
        "attention_bias": random.random() < 0.5,
        "num_local_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
    }


SAMPLES = Samples(
    architecture="GraniteMoeForCausalLM",
    experts=True,
    shared=False,
    tiny=FACTORS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    full={"attention_bias": True},
    draw=draw,
    without_heads=("regression", "bradley_terry"),
    trained=("PP2", "EP2xTP2+SP"),
    read=(
        (
            FACTORS | {"attention_bias": True, "router_aux_loss_coef": 0.02},
            {
                "moe": make_moe(
                    ffn_hidden_size=24, scoring=Scoring.SOFTMAX_OF_CHOSEN, aux_loss_coeff=0.02
                ),
                "moe_layers": (),
                "qkv_bias": True,
                "proj_bias": True,
                "attention_scale": 0.3,
                "embedding_scale": 3.0,
                "logit_scale": 0.5,
                "residual_scale": 0.6,
            },
        ),
    ),
    refused=(
        ({"shared_intermediate_size": 8}, "shared_intermediate_size = 8: unknown field"),
        ({"num_experts_per_tok": 5}, "5 experts cannot be chosen from 4"),
    ),
    published={
        "granite-3.1-1b-a400m-base": parse_published("""1_334_628_352 parameters
            "attention_bias": false, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
            "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0,
            "max_position_embeddings": 131072, "num_attention_heads": 16, "num_experts_per_tok": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
            "output_router_logits": false, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 1500000.0, "tie_word_embeddings": true,
            "vocab_size": 49155
        """)
    },
)
