from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Samples, parse_published, set_later_windows

SOME = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}

SAMPLES = Samples(
    architecture="Qwen2ForCausalLM",
    layer_types=True,
    windows=set_later_windows,
    variants={
        "qwen2 with dynamic scaling of longer texts": {
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
            "max_position": 23,
            "tied": True,
        },
        "qwen2 with a window on later layers": {"window": 6, "full_layers": 1},
    },
    generating=None,
    read=(
        ({}, {"qkv_bias": True, "proj_bias": False, "qk_norm": QkNorm.NONE}),
        ({"sliding_window": 4}, {"window": None, "windowed": ()}),
        (SOME, {"window": 4, "windowed": (False, True, True)}),
        ({"rms_norm_eps": 1e-5}, {"layernorm_epsilon": 1e-5, "num_query_groups": 2}),
    ),
    refused=(
        ({"use_mrope": True}, "use_mrope = True"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types = 'sliding_attention': needs use_sliding_window",
        ),
        ({"architectures": ["Qwen2ForQuestionAnswering"]}, "Qwen2ForCausalLM"),
    ),
    published={
        "Qwen2.5-0.5B": parse_published("""494_032_768 parameters
            "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
            "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": true, "use_mrope": false,
            "use_sliding_window": false, "vocab_size": 151936
        """)
    },
    larger={
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
)
