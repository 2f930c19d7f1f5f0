from random import Random

from megatron_policy.converters.architecture import Mamba2, Scoring
from tests.samples import RECURRENT, Fields, Samples, make_moe, parse_published

FACTORS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
EXPERTS = make_moe(
    ffn_hidden_size=16,
    scoring=Scoring.SOFTMAX_OF_CHOSEN,
    shared_ffn_hidden_size=40,
    aux_loss_coeff=0.001,
)


def draw(random: Random, sizes: Fields) -> Fields:
    layers = ["full_attention", *random.choices(["linear_attention", "full_attention"], k=2)]
    random.shuffle(layers)
    experts = random.choice([3, 4, 6])
    return {
        "layers": len(layers),
        "layer_types": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "shared_intermediate_size": random.choice([8, 20]),
        "position_embedding_type": random.choice([None, "rope"]),
        "attention_bias": random.random() < 0.5,
        "mamba_n_heads": random.choice([4, 8]),
        "mamba_n_groups": random.choice([1, 2]),
        "mamba_d_state": random.choice([4, 6]),
        "mamba_conv_bias": random.random() < 0.7,
        "mamba_proj_bias": random.random() < 0.5,
        "residual_multiplier": random.choice([0.5, 1.0]),
    }


SAMPLES = Samples(
    architecture="GraniteMoeHybridForCausalLM",
    experts=True,
    shared=False,
    tiny=FACTORS
    | {
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 12,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    turns={"layer_types": ("linear_attention", "full_attention")},
    ranges=RECURRENT,
    draw=draw,
    context={"position_embedding_type": "rope"},
    without_heads=("regression", "bradley_terry"),
    trained=("PP2", "EP2xTP2+SP"),
    read=(
        (
            FACTORS | {"intermediate_size": 16},
            {
                "mixers": ("Mamba2", "Attention", "Mamba2"),
                "mamba2": Mamba2(num_heads=8, head_dim=4, groups=1, state_size=12, taps=4),
                "moe": EXPERTS,
                "moe_layers": (),
                "rope": None,
                "attention_scale": 0.3,
                "embedding_scale": 2.0,
                "logit_scale": 2.0,
                "residual_scale": 0.5,
            },
        ),
        (
            {"num_local_experts": 0, "mamba_n_groups": 2, "mamba_proj_bias": True},
            {"moe": None, "ffn_hidden_size": 40},
        ),
    ),
    refused=(
        ({"layer_types": ["mamba", "conv", "mamba"]}, "layer_types = 'conv': must be"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi': heads are"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ),
    published={
        "Granite-4.0-H-Tiny": parse_published("""6_939_037_248 parameters
            "attention_bias": false, "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12, "hidden_size": 1536, "init_method": "mup",
            "intermediate_size": 512, "layer_types": ["mamba", "mamba", "mamba", "mamba",
            "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
            "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba", "mamba",
            "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba", "mamba",
            "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba",
            "mamba"], "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": true,
            "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
            "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": false,
            "max_position_embeddings": 131072, "normalization_function": "rmsnorm",
            "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40,
            "num_key_value_heads": 4, "num_local_experts": 64, "position_embedding_type":
            "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
            "shared_intermediate_size": 1024, "tie_word_embeddings": true, "vocab_size": 100352
        """)
    },
)
