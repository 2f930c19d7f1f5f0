from random import Random

from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Fields, Samples, draw_scaling, parse_published

ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}


def draw(random: Random, sizes: Fields) -> Fields:
    return {"rope_scaling": ALPHA} if random.random() < 0.4 else draw_scaling(random, sizes)


SAMPLES = Samples(
    architecture="HunYuanDenseV1ForCausalLM",
    head_dim=True,
    full={"attention_bias": True},
    draw=draw,
    variants={
        "hunyuan_v1_dense with biases and a wider base": {
            "rope_scaling": ALPHA,
            "attention_bias": True,
        }
    },
    context={},
    without_heads=("regression",),
    read=(
        (
            {
                "head_dim": 8,
                "rope_theta": 1e4,
                "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "mscale": 1.0},
            },
            {
                "rope": Rope(1e4 * 1000.0 ** (8 / 6)),
                "qk_norm": QkNorm.AFTER_ROTATION,
                "qkv_bias": False,
            },
        ),
        ({"head_dim": 8, "rope_theta": 5e4}, {"rope": Rope(5e4)}),
    ),
    refused=(
        ({"head_dim": 8, "use_cla": True}, "use_cla = True"),
        ({"head_dim": 8, "use_qk_norm": False}, "use_qk_norm = False"),
        ({"head_dim": 8, "mlp_bias": True}, "mlp_bias = True"),
        (
            {
                "head_dim": 8,
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                    "alpha": 9.0,
                },
            },
            "rope_parameters.alpha = 9.0: needs rope_type dynamic",
        ),
    ),
    published={
        "Hy-MT2-7B": parse_published("""7_504_568_320 parameters
            "add_classification_head": false, "attention_bias": false, "attention_dropout": 0.1,
            "attention_head_dim": 128, "cla_share_factor": 2, "class_num": 0,
            "dense_list": [4096, 0], "head_dim": 128, "hidden_size": 4096, "im_end_id": 5,
            "im_newline_id": 11, "im_start_id": 4, "intermediate_size": 14336, "mask_init_id": 12,
            "max_position_embeddings": 262144, "mlp_bias": false, "norm_type": "rms",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "org_vocab_size": 128167, "pad_id": 127961, "pool_type": "last", "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32,
            "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic"},
            "rope_theta": 10000.0, "sep_token_id": 127962, "text_end_id": 7, "text_start_id": 6,
            "tie_word_embeddings": true, "use_cla": false, "use_qk_norm": true, "vocab_size": 128167
        """)
    },
)
