from random import Random

from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Fields, Samples, make_moe, parse_published, set_later_windows


def draw_softmax(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    return {
        "num_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "moe_intermediate_size": random.choice([8, 24]),
        "norm_topk_prob": random.random() < 0.5,
        "decoder_sparse_step": random.choice([1, 1, 2]),
        "mlp_only_layers": random.choice([[], [0], [sizes["layers"] - 1]]),
    }


def draw(random: Random, sizes: Fields) -> Fields:
    shared = {"shared_expert_intermediate_size": random.choice([8, 20])}
    return (
        draw_softmax(random, sizes) | shared | {"head_dim": None, "qkv_bias": random.random() < 0.5}
    )


SAMPLES = Samples(
    architecture="Qwen2MoeForCausalLM",
    experts=True,
    tiny={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    layer_types=True,
    windows=set_later_windows,
    draw=draw,
    context={},
    trained=("PP2 uneven", "TP2+SP"),
    read=(
        (
            {},
            {
                "moe": make_moe(shared_ffn_hidden_size=24, shared_gate=True),
                "moe_layers": (True, False, True),
                "qkv_bias": True,
            },
        ),
        ({"qkv_bias": False}, {"qkv_bias": False, "qk_norm": QkNorm.NONE}),
    ),
    refused=(({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),),
    published={
        "Qwen1.5-MoE-A2.7B": parse_published("""14_315_784_192 parameters
            "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
            "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
            "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60,
            "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
            "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false,
            "vocab_size": 151936
        """)
    },
)
