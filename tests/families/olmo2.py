from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Samples, parse_published

SAMPLES = Samples(
    architecture="Olmo2ForCausalLM",
    full={"attention_bias": True},
    variants={"olmo2 with biases": {"attention_bias": True}},
    context={},
    without_heads=("regression",),
    read=(({}, {"pre_norm": False, "post_norm": True, "qk_norm": QkNorm.ALL_HEADS}),),
    refused=(({"clip_qkv": 8.0}, "clip_qkv = 8.0: unknown field"),),
    published={
        "OLMo-2-1124-7B": parse_published("""7_298_617_344 parameters
            "attention_bias": false, "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": null,
            "rope_theta": 500000, "tie_word_embeddings": false, "vocab_size": 100352
        """)
    },
)
