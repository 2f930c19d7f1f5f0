from dataclasses import replace
from random import Random

from megatron_policy.converters.architecture import Scoring, ShortConvolution
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Fields, Samples, make_moe, parse_published

EXPERTS: Fields = {
    "conv_L_cache": 3,
    "num_dense_layers": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.5,
}
MOE = make_moe(
    scoring=Scoring.SIGMOID,
    renormalized=True,
    added_to_sum=1e-6,
    scale=1.5,
    correction_bias=True,
)


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    return {
        "num_dense_layers": random.randint(0, 1),
        "num_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "moe_intermediate_size": random.choice([8, 24]),
        "norm_topk_prob": random.random() < 0.7,
        "use_expert_bias": random.random() < 0.7,
        "routed_scaling_factor": random.choice([1.0, 2.5]),
        "conv_L_cache": random.choice([3, 4]),
        "conv_bias": random.random() < 0.5,
    }


SAMPLES = Samples(
    architecture="Lfm2MoeForCausalLM",
    epsilon="norm_eps",
    experts=True,
    tiny=EXPERTS,
    turns={"layer_types": ("conv", "full_attention")},
    full={"conv_bias": True},
    draw=draw,
    context={"conv_bias": True},
    without_heads=("regression", "bradley_terry"),
    trained=("PP2", "EP2xTP2+SP"),
    read=(
        (
            {"conv_bias": True},
            {
                "mixers": ("ShortConvolution", "Attention", "ShortConvolution"),
                "short_convolution": ShortConvolution(channels=16, taps=3, bias=True),
                "moe": MOE,
                "moe_layers": (False, True, True),
                "qk_norm": QkNorm.PER_HEAD,
            },
        ),
        (
            {"norm_topk_prob": False, "use_expert_bias": False, "num_dense_layers": 0},
            {"moe": replace(MOE, renormalized=False, correction_bias=False), "moe_layers": ()},
        ),
    ),
    refused=(
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': MLPs and experts have SiLU"),
        (
            {"layer_types": ["conv", "conv", "linear_attention"]},
            "layer_types = 'linear_attention': must be full_attention",
        ),
    ),
    published={
        "LFM2-8B-A1B": parse_published("""8_339_930_560 parameters
            "conv_L_cache": 3, "conv_bias": false, "hidden_size": 2048, "intermediate_size": 7168,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv",
            "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv",
            "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv",
            "full_attention", "conv", "conv"], "max_position_embeddings": 128000,
            "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": true,
            "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": true,
            "vocab_size": 65536
        """)
    },
)
