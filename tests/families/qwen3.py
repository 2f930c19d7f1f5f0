from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import YARN, Samples, parse_published, set_later_windows

ALL = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}

SAMPLES = Samples(
    architecture="Qwen3ForCausalLM",
    head_dim=True,
    layer_types=True,
    windows=set_later_windows,
    full={"attention_bias": True},
    variants={
        "qwen3 with biases and heads wider than hidden": {"head_dim": 32, "attention_bias": True},
        "qwen3 with a window": {"window": 5, "full_layers": 2},
        "qwen3 with yarn scaling": {"rope_scaling": YARN, "tied": True},
    },
    generating=None,
    read=(
        ({"head_dim": 4, **ALL}, {"window": 4, "windowed": ()}),
        ({"head_dim": 8}, {"qk_norm": QkNorm.PER_HEAD, "qkv_bias": False}),
        ({"attention_dropout": 0.1}, {"attention_dropout": 0.1, "kv_channels": 128}),
    ),
    published={
        "Qwen3-0.6B": parse_published("""596_049_920 parameters
            "attention_bias": false, "head_dim": 128, "hidden_size": 1024,
            "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
            "sliding_window": null, "tie_word_embeddings": true, "use_sliding_window": false,
            "vocab_size": 151936
        """)
    },
)
