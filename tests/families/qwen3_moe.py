from random import Random

from megatron_policy.converters.architecture.traits import Scoring
from tests.families.qwen2_moe import draw_softmax
from tests.samples import Fields, Samples, make_moe, parse_published, set_later_windows

PUBLISHED = parse_published("""30_532_122_624 parameters
    "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
    "use_sliding_window": false, "vocab_size": 151936
""")


def draw(random: Random, sizes: Fields) -> Fields:
    return draw_softmax(random, sizes) | {"attention_bias": random.random() < 0.5}


SAMPLES = Samples(
    architecture="Qwen3MoeForCausalLM",
    experts=True,
    tiny={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    head_dim=True,
    windows=set_later_windows,
    full={"attention_bias": True},
    draw=draw,
    trained=("one process", "PP2", "DP2 distributed optimizer, both overlaps", "TP2+SP"),
    read=(
        (
            {"attention_bias": True},
            {
                "moe": make_moe(scoring=Scoring.SOFTMAX_OF_CHOSEN),
                "moe_layers": (False, True, True),
                "qkv_bias": True,
                "proj_bias": True,
                "mlp_bias": False,
                "uniform_layers": False,
            },
        ),
        ({"norm_topk_prob": False}, {"moe": make_moe(), "window": None}),
        ({"mlp_only_layers": [0, 1, 2]}, {"moe": None, "moe_layers": ()}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": []}, {"moe_layers": (False, True, False)}),
    ),
    refused=(({"n_routed_experts": 4}, "n_routed_experts = 4: unknown field"),),
    published={
        "Qwen3-30B-A3B": PUBLISHED,
        "Qwen3-235B-A22B": PUBLISHED
        | {
            "parameters": 235_093_634_560,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_window_layers": 94,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
    },
)
