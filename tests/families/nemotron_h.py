from random import Random

from megatron_policy.converters.architecture import Activation, Mamba2, Scoring
from tests.samples import RECURRENT, Fields, Samples, make_moe, parse_published

KINDS = ("linear_attention", "full_attention", "mlp", "moe")
PARTS = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "ssm_state_size": 6,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
MAMBA = Mamba2(num_heads=8, head_dim=4, groups=2, state_size=6, taps=4)
EXPERTS = make_moe(
    experts=8,
    chosen=3,
    ffn_hidden_size=24,
    scoring=Scoring.SIGMOID,
    renormalized=True,
    scale=2.5,
    groups=4,
    groups_chosen=2,
    correction_bias=True,
    shared_ffn_hidden_size=40,
    activation=Activation.SQUARED_RELU,
    gated=False,
)


def draw(random: Random, sizes: Fields) -> Fields:
    layers = [*KINDS, random.choice(KINDS)]
    random.shuffle(layers)
    groups, experts = random.choice([1, 2]), random.choice([1, 2, 4])
    taken = random.randint(1, experts)
    size = random.choice([2, 3])
    return {
        "layers": len(layers),
        "layers_block_type": layers,
        "tied": False,
        "mamba_num_heads": groups * random.choice([2, 4]),
        "mamba_head_dim": random.choice([4, 6]),
        "n_groups": groups,
        "ssm_state_size": random.choice([4, 6]),
        "conv_kernel": random.choice([2, 4]),
        "use_conv_bias": random.random() < 0.7,
        "n_routed_experts": experts * size,
        "n_group": experts,
        "topk_group": taken,
        "num_experts_per_tok": random.randint(1, taken * size),
        "norm_topk_prob": random.random() < 0.7,
        "routed_scaling_factor": random.choice([1.0, 2.5]),
        "moe_intermediate_size": random.choice([8, 24]),
        "moe_shared_expert_intermediate_size": random.choice([8, 20]),
        "moe_latent_size": random.choice([None, 10, 20]),
    }


SAMPLES = Samples(
    architecture="NemotronHForCausalLM",
    epsilon="layer_norm_epsilon",
    head_dim=True,
    untied=True,
    experts=True,
    tiny=PARTS,
    turns={"layers_block_type": ("full_attention", "moe", "linear_attention", "mlp")},
    ranges=RECURRENT,
    full={"num_nextn_predict_layers": 1},
    draw=draw,
    context={"moe_latent_size": 12},
    without_heads=("regression", "bradley_terry"),
    trained=("PP2xVPP2", "EP2xTP2+SP"),
    read=(
        (
            {},
            {
                "mixers": ("Attention", "", "Mamba2"),
                "mamba2": MAMBA,
                "moe": EXPERTS,
                "moe_layers": (False, True, False),
                "rope": None,
            },
        ),
    ),
    refused=(
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu': the MLP's activation is"),
        ({"use_bias": True}, "use_bias = True: linear layers have no biases"),
        ({"sliding_window": 8}, "sliding_window = 8: no layer has a window"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True: the head has weights"),
        ({"n_shared_experts": 2}, "n_shared_experts = 2: experts have a shared MLP"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2: checkpoints have one"),
        (
            {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["moe"]},
            "mtp_layers_block_type = ['moe']: a layer that predicts further tokens is attention",
        ),
    ),
    published={
        "Nemotron-3-Nano-30B-A3B": parse_published("""31_577_940_288 parameters
            "attention_bias": false, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
            "head_dim": 128, "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
            "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": false,
            "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2",
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 6,
            "num_hidden_layers": 52, "num_key_value_heads": 2, "partial_rotary_factor": 1.0,
            "rescale_prenorm_residual": true, "residual_in_fp32": false, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": false,
            "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "use_bias": false,
            "use_conv_bias": true, "vocab_size": 131072
        """)
    },
)
