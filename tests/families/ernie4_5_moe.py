from dataclasses import replace
from random import Random

from megatron_policy.converters.architecture.rotary import Rope
from tests.samples import Fields, Samples, make_moe

ERNIE = make_moe(
    experts=8,
    chosen=3,
    renormalized=True,
    least_sum=0.6,
    correction_bias=True,
    shared_ffn_hidden_size=32,
)


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    return {
        "moe_num_experts": experts,
        "moe_k": random.randint(1, experts),
        "moe_intermediate_size": random.choice([8, 24]),
        "moe_num_shared_experts": random.choice([0, 1, 2]),
        "moe_layer_start_index": random.randint(0, 1),
        "moe_layer_end_index": random.choice([-1, 1]),
        "moe_layer_interval": random.choice([1, 1, 2]),
        "moe_norm_min": random.choice([1e-12, 0.6]),
    }


SAMPLES = Samples(
    architecture="Ernie4_5_MoeForCausalLM",
    experts=True,
    tiny={
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_norm_min": 0.6,
    },
    head_dim=True,
    draw=draw,
    without_heads=("regression", "bradley_terry"),
    trained=("PP2", "EP2xTP2+SP"),
    read=(
        (
            {"num_nextn_predict_layers": 1, "moe_use_aux_free": True},
            {
                "moe": ERNIE,
                "moe_layers": (False, True, True),
                "rope": Rope(5e5, interleaved=True),
                "qkv_bias": False,
                "further_layers": 0,
            },
        ),
        (
            {"moe_layer_interval": 2, "moe_layer_end_index": 2, "moe_layer_start_index": 0},
            {"moe": ERNIE, "moe_layers": (False, True, False)},
        ),
        (
            {"moe_layer_end_index": -1, "moe_layer_start_index": 0, "moe_norm_min": 1e-12},
            {"moe": replace(ERNIE, least_sum=1e-12), "moe_layers": ()},
        ),
        ({"moe_layer_end_index": 0}, {"moe": None, "moe_layers": ()}),
    ),
    refused=(
        ({"use_bias": True}, "use_bias = True: it would add a bias to the output"),
        ({"moe_layer_interval": 0}, "moe_layer_interval = 0"),
        ({"moe_gate": "top2_fused"}, "moe_gate = 'top2_fused'"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"),
    ),
    published={},
    larger={
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 3584,
        "moe_k": 8,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 0,
        "num_attention_heads": 64,
        "num_hidden_layers": 54,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 103424,
    },
)
