from random import Random

from megatron_policy.converters.architecture import Mamba2
from tests.samples import RECURRENT, Fields, Samples, parse_published

PARTS: Fields = {
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
    "mamba_d_ssm": 32,
    "mamba_n_groups": 4,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
}
FACTORS: Fields = {
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 1.5,
    "key_multiplier": 0.8,
    "lm_head_multiplier": 0.6,
    "mlp_multipliers": [0.9, 1.3],
    "ssm_in_multiplier": 2.0,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    "ssm_out_multiplier": 0.6,
}
NORMALISED: Fields = {"mamba_rms_norm": True}


def draw(random: Random, sizes: Fields) -> Fields:
    groups = random.choice([1, 2])
    heads, size = groups * random.choice([2, 4]), random.choice([4, 6])
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_ssm": heads * size,
        "mamba_n_groups": groups,
        "mamba_d_state": random.choice([4, 6]),
        "mamba_d_conv": random.choice([2, 4]),
        "mamba_conv_bias": random.random() < 0.7,
    }


SAMPLES = Samples(
    architecture="FalconH1ForCausalLM",
    tiny=PARTS | FACTORS,
    ranges=RECURRENT | {"mamba.D": (0.5, 1.5)},
    draw=draw,
    full=NORMALISED,
    variants={
        "falcon_h1": {},
        "falcon_h1 with norms behind its gates": NORMALISED | {"tied": True},
    },
    generating=("PP2xVPP2", NORMALISED),
    context=NORMALISED,
    without_heads=("regression", "bradley_terry"),
    shared=False,
    read=(
        (
            PARTS | FACTORS,
            {
                "mamba2": Mamba2(
                    num_heads=8,
                    head_dim=4,
                    groups=4,
                    state_size=6,
                    taps=4,
                    norm=False,
                    factors=(1.6, 2.2, 1.8, 2.4, 1.4),
                ),
                "beside": (0.6, 0.84),
                "embedding_scale": 1.5,
                "logit_scale": 0.6,
                "gate_factor": 0.9,
                "out_factor": 1.3,
            },
        ),
    ),
    refused=(
        (
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "mamba_norm_before_gate = True: kernels normalise after the gate",
        ),
        ({"mlp_bias": True}, "mlp_bias = True: linear layers have no biases"),
        ({"attn_layer_indices": [0]}, "attn_layer_indices = [0]: all layers have attention"),
    ),
    published={
        "Falcon-H1-1.5B": parse_published("""1_479_292_288 parameters
            "attention_bias": false, "attention_in_multiplier": 1.0, "attention_out_multiplier":
            0.6666666666666666, "attn_layer_indices": null, "embedding_multiplier":
            5.656854249492381, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 4096, "key_multiplier": 0.42083936309600115, "lm_head_multiplier":
            0.03125, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4,
            "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_expand": 2,
            "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_norm_before_gate": false,
            "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_use_mlp": true,
            "max_position_embeddings": 131072, "mlp_bias": false, "mlp_expansion_factor": 8,
            "mlp_multipliers": [0.8838834764831845, 0.625], "num_attention_heads": 8,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "num_logits_to_keep": 1,
            "projectors_bias": false, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta":
            100000000000.0, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3535, 0.25, 0.3535,
            0.5, 0.3535], "ssm_out_multiplier": 0.2357, "tie_word_embeddings": false, "vocab_size":
            65537
        """)
    },
)
