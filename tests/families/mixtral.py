from random import Random

from megatron_policy.converters.architecture.traits import Scoring
from tests.samples import Fields, Samples, make_moe, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([2, 3, 5])
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "sliding_window": random.choice([None, 5]),
    }


SAMPLES = Samples(
    architecture="MixtralForCausalLM",
    experts=True,
    tiny={"num_local_experts": 4, "num_experts_per_tok": 2},
    head_dim=True,
    draw=draw,
    trained=("one process", "PP2", "DP2", "TP2+SP"),
    read=(
        (
            {"router_aux_loss_coef": 0.5, "sliding_window": 7},
            {
                "moe": make_moe(ffn_hidden_size=24, scoring=Scoring.SOFTMAX_OF_CHOSEN),
                "moe_layers": (),
                "window": 7,
                "uniform_layers": True,
            },
        ),
    ),
    refused=(
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ({"num_experts_per_tok": 5}, "5 experts cannot be chosen from 4"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef = -0.1: must be"),
    ),
    published={
        "Mixtral-8x7B-v0.1": parse_published("""46_702_792_704 parameters
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
            "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32000
        """)
    },
)
