from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Fields, Samples, parse_published


def set_windows(layers: int, window: int | None, full_layers: int) -> Fields:
    kind = "full_attention" if window is None else "sliding_attention"
    return {"sliding_window": window, "layer_types": [kind] * (layers - 1) + ["full_attention"]}


SAMPLES = Samples(
    architecture="Exaone4ForCausalLM",
    layer_types=True,
    windows=set_windows,
    variants={"exaone4 with a window": {"window": 5}, "exaone4": {"tied": True}},
    generating=("TP2+SP", {"window": 4}),
    context={"window": 7},
    read=(
        (
            {"sliding_window": 4, "sliding_window_pattern": 2},
            {
                "window": 4,
                "windowed": (True, False, True),
                "without_rope": (False, True, False),
                "pre_norm": False,
                "post_norm": True,
                "qk_norm": QkNorm.PER_HEAD,
            },
        ),
        (
            {"sliding_window": None, "layer_types": ["full_attention"] * 3},
            {"window": None, "without_rope": ()},
        ),
        (
            {"sliding_window": 4, "layer_types": ["full_attention"] * 3},
            {"window": None, "without_rope": (True, True, True)},
        ),
    ),
    refused=(({"attention_bias": True}, "attention_bias = True: unknown field"),),
    published={
        "EXAONE-4.0-32B": parse_published("""32_003_216_384 parameters
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27392,
            "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 16.0,
            "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 1000000,
            "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": false,
            "vocab_size": 102400
        """)
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16}
    },
)
