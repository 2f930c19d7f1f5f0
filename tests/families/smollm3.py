from tests.samples import Fields, Samples, parse_published


def set_windows(layers: int, window: int | None, full_layers: int) -> Fields:
    rotated = [(layer + 1) % 2 for layer in range(layers)]
    own = {"use_sliding_window": window is not None, "sliding_window": window}
    return {"no_rope_layers": rotated} | own


SAMPLES = Samples(
    architecture="SmolLM3ForCausalLM",
    layer_types=True,
    windows=set_windows,
    full={"attention_bias": True, "mlp_bias": True, "no_rope_layers": [1] * 3},
    variants={"smollm3 with biases and a window": {"window": 5, "tied": True, "mlp_bias": True}},
    generating=("PP2", {"window": 4}),
    read=(
        (
            {
                "no_rope_layers": [1, 0, 1, 0],
                "use_sliding_window": True,
                "sliding_window": 4,
                "pad_token_id": None,
            },
            {"without_rope": (False, True, False), "window": 4, "windowed": (False, True, False)},
        ),
    ),
    published={
        "SmolLM3-3B": parse_published("""3_075_098_624 parameters
            "attention_bias": false, "hidden_size": 2048, "intermediate_size": 11008,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false,
            "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36,
            "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null,
            "use_sliding_window": false, "vocab_size": 128256
        """)
        | {"layer_types": ["full_attention"] * 36, "no_rope_layers": [1, 1, 1, 0] * 9}
    },
)
