from tests.samples import Samples, parse_published, set_window

SAMPLES = Samples(
    architecture="MistralForCausalLM",
    head_dim=True,
    windows=set_window,
    full={"sliding_window": 16},
    variants={"mistral with a window": {"window": 7}, "mistral without one": {}},
    generating=None,
    context={"window": 7},
    read=(
        ({"sliding_window": 4}, {"window": 4, "windowed": ()}),
        ({"sliding_window": None}, {"window": None}),
    ),
    refused=(({"layer_types": ["full_attention"] * 3}, "no model family 'ministral'"),),
    published={
        "Mistral-7B-v0.1": parse_published("""7_241_732_096 parameters
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": false, "vocab_size": 32000
        """)
    },
)
