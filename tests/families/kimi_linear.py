from random import Random
from typing import Any

from megatron_policy.converters.architecture import ChannelDeltaNet, Mla, Scoring
from tests.samples import RECURRENT, Fields, Samples, make_moe, parse_published

LATENT: Fields = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
LINEAR: Fields = {"linear_num_heads": 4, "linear_head_dim": 12, "linear_conv_kernel_dim": 4}
EXPERTS: Fields = {
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 16,
    "num_shared_experts": 1,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.5,
}
MOE = make_moe(
    experts=8,
    chosen=3,
    scoring=Scoring.SIGMOID,
    renormalized=True,
    scale=2.5,
    groups=4,
    groups_chosen=2,
    correction_bias=True,
    shared_ffn_hidden_size=16,
)


def draw(random: Random, sizes: Fields) -> Fields:
    groups = random.choice([1, 2, 4])
    taken = random.randint(1, groups)
    size = random.choice([2, 3])
    return {
        "tied": False,
        "mlp_layer_types": [random.choice(["dense", "sparse"]) for _ in range(sizes["layers"])],
        "num_key_value_heads": sizes["heads"],
        "head_dim": None,
        "q_lora_rank": random.choice([None, 12]),
        "kv_lora_rank": random.choice([8, 20]),
        "qk_nope_head_dim": random.choice([6, 8]),
        "qk_rope_head_dim": random.choice([4, 8]),
        "v_head_dim": random.choice([6, 14]),
        "linear_num_heads": random.choice([2, 4]),
        "linear_head_dim": random.choice([6, 8]),
        "linear_conv_kernel_dim": random.choice([2, 4]),
        "num_experts": groups * size,
        "num_expert_group": groups,
        "topk_group": taken,
        "num_experts_per_token": random.randint(1, taken * size),
        "moe_intermediate_size": random.choice([8, 24]),
        "num_shared_experts": random.choice([1, 2]),
        "moe_renormalize": random.random() < 0.7,
        "routed_scaling_factor": random.choice([1.0, 2.5]),
    }


def publish(config: Any, tensors: Fields) -> Fields:
    """With MLPs by their own names: transformers saves them by those of experts."""
    for layer, kind in enumerate(config.mlp_layer_types):
        start = f"model.layers.{layer}.block_sparse_moe."
        for name in [name for name in tensors if kind == "dense" and name.startswith(start)]:
            tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
    return tensors


SAMPLES = Samples(
    architecture="KimiLinearForCausalLM",
    experts=True,
    tiny=LATENT | LINEAR | EXPERTS,
    turns={
        "layer_types": ("linear_attention", "full_attention"),
        "mlp_layer_types": ("dense", "sparse", "sparse"),
    },
    ranges=RECURRENT,
    publish=publish,
    draw=draw,
    context={},
    untied=True,
    without_heads=("regression", "bradley_terry"),
    trained=("PP2", "EP2xTP2+SP"),
    read=(
        (
            {"num_key_value_heads": 4},
            {
                "mixers": ("ChannelDeltaNet", "Mla", "ChannelDeltaNet"),
                "channel_delta_net": ChannelDeltaNet(num_heads=4, head_dim=12, taps=4),
                "mla": Mla(
                    num_attention_heads=4,
                    rope=None,
                    q_lora_rank=None,
                    kv_lora_rank=16,
                    qk_nope_head_dim=8,
                    qk_rope_head_dim=4,
                    v_head_dim=10,
                ),
                "moe": MOE,
                "moe_layers": (False, True, True),
                "max_position_embeddings": 128,
            },
        ),
    ),
    refused=(
        ({"mla_use_nope": False}, "mla_use_nope = False: no layer has a rotary"),
        ({"index_topk": 4}, "index_topk = 4: unknown field"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': delta nets and MLPs have it"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1: layers that predict"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func = 'softmax'"),
    ),
    published={
        "Kimi-Linear-48B-A3B": parse_published("""49_122_681_728 parameters
            "first_k_dense_replace": 1, "head_dim": 72, "hidden_size": 2304,
            "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "kda_layers": [1, 2, 3,
            5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32,
            "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576,
            "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
            "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
            "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
            "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
            "num_shared_experts": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
            "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false,
            "topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": true,
            "v_head_dim": 128, "vocab_size": 163840
        """)
    },
)
