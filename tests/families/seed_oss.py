from random import Random

from tests.samples import Fields, Samples, draw_scaling, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    both = sizes["attention_out_bias"] and sizes["attention_bias"]
    return {"attention_out_bias": both} | draw_scaling(random, sizes)


SAMPLES = Samples(
    architecture="SeedOssForCausalLM",
    tiny={"attention_dropout": 0.0, "residual_dropout": 0.0},
    head_dim=True,
    full={"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    draw=draw,
    variants={"seed_oss with biases": {"attention_out_bias": True, "mlp_bias": True}},
    generating=None,
    read=(
        (
            {"head_dim": 8, "residual_dropout": 0.2, "attention_dropout": 0.3},
            {
                "qkv_bias": True,
                "proj_bias": False,
                "mlp_bias": False,
                "hidden_dropout": 0.2,
                "embedding_dropout": 0.0,
                "attention_dropout": 0.3,
            },
        ),
    ),
    refused=(
        (
            {"attention_bias": False, "attention_out_bias": True},
            "attention_out_bias = True: Megatron-Core has it only with attention_bias",
        ),
    ),
    published={
        "Seed-OSS-36B-Instruct": parse_published("""36_151_104_512 parameters
            "attention_bias": true, "attention_dropout": 0.1, "attention_out_bias": false,
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27648,
            "max_position_embeddings": 524288, "mlp_bias": false, "num_attention_heads": 80,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "pretraining_tp": 1,
            "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
            "tie_word_embeddings": false, "vocab_size": 155136
        """)
    },
)
