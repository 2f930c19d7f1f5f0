from random import Random

from megatron_policy.converters.architecture.rotary import Rope
from tests.samples import Fields, Samples, draw_scaling, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    fraction = random.choice([0.5, 1.0])
    return {"partial_rotary_factor": fraction} | draw_scaling(random, sizes)


SAMPLES = Samples(
    architecture="Glm4ForCausalLM",
    head_dim=True,
    full={"attention_bias": True},
    draw=draw,
    variants={"glm4": {}},
    context={},
    read=(
        (
            {"head_dim": 8, "rope_theta": 5e4},
            {
                "rope": Rope(5e4, fraction=0.5, interleaved=True),
                "pre_norm": True,
                "post_norm": True,
                "qkv_bias": True,
                "proj_bias": False,
            },
        ),
        ({"attention_bias": False}, {"qkv_bias": False, "layernorm_epsilon": 1.5625e-7}),
    ),
    refused=(({"mlp_bias": True}, "mlp_bias = True: unknown field"),),
    published={
        "GLM-4-9B-0414": parse_published("""9_400_279_040 parameters
            "attention_bias": true, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
            "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0, "tie_word_embeddings": false, "vocab_size": 151552
        """)
    },
)
