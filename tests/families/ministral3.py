from random import Random

from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import QueryGrowth
from tests.samples import LONGEST, SCALINGS, YARN, Fields, Samples, parse_published, set_window

UNSCALED = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 64}


def draw(random: Random, sizes: Fields) -> Fields:
    growth = {"llama_4_scaling_beta": random.choice([0.0, 0.7])}
    growth["original_max_position_embeddings"] = random.choice([4, LONGEST])
    return {"rope_scaling": (random.choice(SCALINGS) or {"rope_type": "default"}) | growth}


SAMPLES = Samples(
    architecture="Ministral3ForCausalLM",
    head_dim=True,
    windows=set_window,
    draw=draw,
    variants={
        "ministral3 with growing queries": {
            "rope_scaling": YARN
            | {"original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7}
        }
    },
    generating=(
        "TP2+SP",
        {
            "rope_scaling": {
                "rope_type": "default",
                "original_max_position_embeddings": 3,
                "llama_4_scaling_beta": 0.7,
            }
        },
    ),
    context={"rope_scaling": YARN | {"llama_4_scaling_beta": 0.7}},
    read=(
        (
            {"sliding_window": 4, "rope_parameters": {**UNSCALED, "llama_4_scaling_beta": 0.1}},
            {"window": 4, "rope": Rope(1e4), "query_growth": QueryGrowth(0.1, 64)},
        ),
        (
            {"rope_parameters": {**UNSCALED, "llama_4_scaling_beta": 0}},
            {"window": None, "query_growth": None},
        ),
    ),
    refused=(
        (
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 0.5,
                    "llama_4_scaling_beta": 0.1,
                }
            },
            "original_max_position_embeddings = 0.5: must be a positive integer",
        ),
    ),
    published={
        "Devstral-2-123B-Instruct-2512 in bf16": parse_published("""125_025_988_608 parameters
            "head_dim": 128, "hidden_size": 12288, "intermediate_size": 28672,
            "max_position_embeddings": 262144, "num_attention_heads": 96, "num_hidden_layers": 88,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters": {"beta_fast": 4.0,
            "beta_slow": 1.0, "factor": 64.0, "llama_4_scaling_beta": 0, "mscale": 1.0,
            "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096,
            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"}, "sliding_window": null,
            "tie_word_embeddings": false, "vocab_size": 131072
        """)
    },
)
