from random import Random

from megatron_policy.converters.architecture import DeltaNet
from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import Norm, QkNorm, Scoring
from tests.families.qwen2_moe import draw_softmax
from tests.samples import RECURRENT, Fields, Samples, make_moe, parse_published

LINEAR: Fields = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    # Else what a head reads is normalised even where next to nothing of it is left but rounding.
    "rms_norm_eps": 1e-3,
}
DELTA = DeltaNet(num_key_heads=4, num_value_heads=8, key_head_dim=8, value_head_dim=12, taps=4)
TURNS = {"layer_types": ("linear_attention", "full_attention")}
RANGES = {"norm": (-0.5, 0.5), "linear_attn.norm": (0.5, 1.5)} | RECURRENT
EXPERTS: Fields = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
MOE = make_moe(scoring=Scoring.SOFTMAX_OF_CHOSEN, shared_ffn_hidden_size=24, shared_gate=True)


def draw_linear(random: Random) -> Fields:
    """Sizes of delta nets, biases of attention, and how much of its heads rotates."""
    keys = random.choice([2, 4])
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * random.choice([1, 2, 3]),
        "linear_key_head_dim": random.choice([6, 8]),
        "linear_value_head_dim": random.choice([6, 12]),
        "linear_conv_kernel_dim": random.choice([2, 4]),
        "attention_bias": random.random() < 0.5,
        "partial_rotary_factor": random.choice([0.5, 1.0]),
    }


def draw(random: Random, sizes: Fields) -> Fields:
    shared = {"shared_expert_intermediate_size": random.choice([8, 20])}
    return draw_softmax(random, sizes) | shared | draw_linear(random)


SAMPLES = Samples(
    architecture="Qwen3NextForCausalLM",
    experts=True,
    tiny=LINEAR | EXPERTS | {"mlp_only_layers": [0], "partial_rotary_factor": 0.5},
    head_dim=True,
    turns=TURNS,
    ranges=RANGES,
    full={"attention_bias": True},
    draw=draw,
    context={},
    trained=("PP2 uneven", "TP2+SP"),
    read=(
        (
            {"attention_bias": True, "head_dim": 8},
            {
                "mixers": ("DeltaNet", "Attention", "DeltaNet"),
                "delta_net": DELTA,
                "moe": MOE,
                "moe_layers": (False, True, True),
                "norm": Norm.RMS_PLUS_ONE,
                "qk_norm": QkNorm.PER_HEAD,
                "attention_output_gate": True,
                "qkv_bias": True,
                "proj_bias": True,
                "rope": Rope(1e4, fraction=0.5),
                "further_layers": 1,
            },
        ),
        (
            {"norm_topk_prob": False, "layer_types": None, "full_attention_interval": 3},
            {
                "mixers": ("DeltaNet", "DeltaNet", "Attention"),
                "moe": make_moe(shared_ffn_hidden_size=24, shared_gate=True),
            },
        ),
    ),
    refused=(
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': convolutions and gates"),
        ({"use_sliding_window": True}, "use_sliding_window = True: no layer has"),
        ({"n_routed_experts": 4}, "n_routed_experts = 4: unknown field"),
        (
            {"layer_types": ["linear_attention", "full_attention", "conv"]},
            "layer_types = 'conv': must be full_attention or linear_attention",
        ),
    ),
    published={
        "Qwen3-Next-80B-A3B-Instruct": parse_published("""79_674_391_296 parameters
            "attention_bias": false, "decoder_sparse_step": 1, "full_attention_interval": 4,
            "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
            "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
            "use_sliding_window": false, "vocab_size": 151936
        """)
    },
)
