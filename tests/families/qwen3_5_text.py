from random import Random

from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import Norm, QkNorm
from tests.families.qwen3_next import DELTA, LINEAR, RANGES, TURNS, draw_linear
from tests.samples import Fields, Samples, draw_scaling, parse_published

GRIDS = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
COMMON: Fields = {
    "attention_bias": False,
    "attn_output_gate": True,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
"""What all published text models say, as a part of a model that also reads images."""


def draw(random: Random, sizes: Fields) -> Fields:
    return draw_linear(random) | draw_scaling(random, sizes)


SAMPLES = Samples(
    architecture="Qwen3_5ForCausalLM",
    tiny=LINEAR | {"partial_rotary_factor": 0.5},
    head_dim=True,
    turns=TURNS,
    ranges=RANGES,
    full={"attention_bias": True, "mtp_num_hidden_layers": 1},
    draw=draw,
    variants={
        "qwen3_5_text with biases": {"attention_bias": True},
        "qwen3_5_text with three grids of positions": {"rope_scaling": GRIDS, "tied": True},
    },
    generating=("TP2+SP", {"attention_bias": True}),
    context={},
    without_heads=("regression",),
    read=(
        (
            LINEAR | {"attention_bias": True, "head_dim": 8},
            {
                "mixers": ("DeltaNet", "Attention", "DeltaNet"),
                "delta_net": DELTA,
                "norm": Norm.RMS_PLUS_ONE,
                "qk_norm": QkNorm.PER_HEAD,
                "attention_output_gate": True,
                "qkv_bias": True,
                "proj_bias": True,
                "rope": Rope(1e4, fraction=0.25),
                "further_layers": 1,
            },
        ),
        ({"mtp_num_hidden_layers": 0}, {"further_layers": 0, "qkv_bias": False}),
    ),
    refused=(
        ({"attn_output_gate": False}, "attn_output_gate = False: attention has gates"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2: checkpoints have one such"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True: layers"),
        ({"num_experts": 4}, "num_experts = 4: unknown field"),
    ),
    published={
        "Qwen3.5-27B, text": COMMON
        | parse_published("""26_895_998_464 parameters
            "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
            "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4
        """)
    },
)
