from megatron_policy.converters.architecture.rotary import Rope
from tests.samples import Samples, parse_published

SAMPLES = Samples(
    architecture="Ernie4_5ForCausalLM",
    head_dim=True,
    full={"use_bias": True},
    variants={"ernie4_5": {"tied": True}, "ernie4_5 with biases": {"use_bias": True}},
    generating=("PP2", {"use_bias": True}),
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"use_bias": True, "head_dim": 8},
            {
                "rope": Rope(5e5, interleaved=True),
                "qkv_bias": True,
                "proj_bias": True,
                "mlp_bias": True,
                "kv_channels": 8,
            },
        ),
    ),
    refused=(
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ),
    published={
        "ERNIE-4.5-0.3B-PT": parse_published("""360_748_032 parameters
            "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072,
            "max_position_embeddings": 131072, "num_attention_heads": 16, "num_hidden_layers": 18,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": null,
            "rope_theta": 500000, "tie_word_embeddings": true, "use_bias": false,
            "vocab_size": 103424
        """)
    },
)
