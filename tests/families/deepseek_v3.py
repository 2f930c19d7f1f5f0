import math
from random import Random

from megatron_policy.converters.architecture import Mla, Rope, Scoring
from tests.samples import YARN, Fields, Samples, make_moe, parse_published

SIGMOID_FIELDS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
LATENT_FIELDS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
SCALED = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
SIGMOID = make_moe(
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
LATENT = Mla(
    num_attention_heads=4,
    rope=Rope(1e4),
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
)


def draw_sigmoid(random: Random, sizes: Fields) -> Fields:
    groups = random.choice([1, 2, 4])
    taken = random.randint(1, groups)
    size = random.choice([2, 3])
    return {
        "n_routed_experts": groups * size,
        "n_group": groups,
        "topk_group": taken,
        "num_experts_per_tok": random.randint(1, taken * size),
        "moe_intermediate_size": random.choice([8, 24]),
        "n_shared_experts": random.choice([1, 2]),
        "norm_topk_prob": random.random() < 0.7,
        "routed_scaling_factor": random.choice([1.0, 2.5]),
        "first_k_dense_replace": random.randint(0, sizes["layers"]),
    }


def draw(random: Random, sizes: Fields) -> Fields:
    return draw_sigmoid(random, sizes) | {
        "num_key_value_heads": sizes["heads"],
        "head_dim": None,
        "q_lora_rank": random.choice([None, 12, 20]),
        "kv_lora_rank": random.choice([8, 20]),
        "qk_nope_head_dim": random.choice([6, 8]),
        "qk_rope_head_dim": random.choice([4, 8]),
        "v_head_dim": random.choice([6, 8, 14]),
        "rope_scaling": random.choice([None, SCALED]),
    }


SAMPLES = Samples(
    architecture="DeepseekV3ForCausalLM",
    experts=True,
    tiny=SIGMOID_FIELDS | LATENT_FIELDS,
    full={"num_nextn_predict_layers": 1},
    draw=draw,
    context={"rope_scaling": YARN},
    trained=(
        "one process",
        "EP2xPP2, stages of 1 and 3 layers",
        "DP2",
        "PP2xVPP2",
        "TP2xPP2xDP2+SP",
    ),
    read=(
        (
            {"num_key_value_heads": 4, "first_k_dense_replace": 2},
            {
                "moe": SIGMOID,
                "mla": LATENT,
                "moe_layers": (False, False, True),
                "kv_channels": 12,
                "num_query_groups": 4,
                "attention_scale": None,
            },
        ),
        (
            {"num_key_value_heads": 4, "rope_scaling": SCALED},
            {"attention_scale": (0.07 * math.log(8) + 1) ** 2 / math.sqrt(12)},
        ),
    ),
    refused=(
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ({"topk_group": 5}, "8 experts in 4 groups, 5 of them chosen"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters = 'DynamicScaling'",
        ),
        ({"aux_loss_alpha": "low"}, "aux_loss_alpha = 'low': must be"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1: must be"),
    ),
    published={
        "DeepSeek-V3 in bf16": parse_published("""671_026_419_200 parameters
            "attention_bias": false, "aux_loss_alpha": 0.001, "ep_size": 1,
            "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
            "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
            "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
            "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
            "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true,
            "tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc",
            "v_head_dim": 128, "vocab_size": 129280
        """),
        "Moonlight-16B-A3B": parse_published("""15_960_110_208 parameters
            "attention_bias": false, "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
            "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 2048,
            "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192,
            "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": true,
            "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
            "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446,
            "scoring_func": "sigmoid", "seq_aux": true, "tie_word_embeddings": false,
            "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840
        """),
    },
)
