from megatron_policy.converters.architecture.rotary import LinearScaling, Rope
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import YARN, Samples, parse_published, set_all_windows_but_the_last

OF_TWO_KINDS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

SAMPLES = Samples(
    architecture="Olmo3ForCausalLM",
    layer_types=True,
    windows=set_all_windows_but_the_last,
    full={"attention_bias": True},
    variants={"olmo3 with biases and yarn scaling": {"rope_scaling": YARN, "attention_bias": True}},
    generating=("one process", {"window": 5}),
    without_heads=("regression",),
    read=(
        (
            {
                "sliding_window": 4,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                "rope_parameters": OF_TWO_KINDS,
            },
            {
                "window": 4,
                "windowed": (True, True, False),
                "rope": Rope(5e5, LinearScaling(8.0)),
                "window_rope": Rope(1e4),
                "qk_norm": QkNorm.ALL_HEADS,
                "pre_norm": False,
                "post_norm": True,
            },
        ),
        ({"layer_types": ["full_attention"] * 3}, {"window": None, "window_rope": None}),
    ),
    refused=(({"clip_qkv": 8.0}, "clip_qkv = 8.0: unknown field"),),
    published={
        "Olmo-3-1025-7B": parse_published("""7_298_011_136 parameters
            "attention_bias": false, "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000,
            "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 100278
        """)
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
    },
)
