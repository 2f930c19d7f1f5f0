from random import Random

from tests.samples import LONGEST, Fields, Samples, parse_published, set_window

LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.5, 4.5, 8.5],
}


def draw(random: Random, sizes: Fields) -> Fields:
    partial = {"partial_rotary_factor": random.choice([0.5, 0.75, 1.0])}
    rotated = sizes["hidden"] // sizes["heads"] * partial["partial_rotary_factor"]
    # Of an odd number of channels, transformers would want a factor less than there are pairs.
    if random.random() < 0.4 or rotated % 2:
        return partial
    factors = {
        f"{name}_factor": [random.uniform(1, 9) for _ in range(int(rotated) // 2)]
        for name in ("short", "long")
    }
    trained = {"original_max_position_embeddings": random.choice([LONGEST, 16])}
    return partial | trained | {"rope_scaling": {"type": "longrope"} | factors}


SAMPLES = Samples(
    architecture="Phi3ForCausalLM",
    windows=set_window,
    draw=draw,
    variants={
        "phi3 with longrope over part of a head": {
            "partial_rotary_factor": 0.5,
            "rope_scaling": LONG,
            "original_max_position_embeddings": 19,
            "max_position": 64,
        },
        "phi3 with a window and three heads per group": {
            "window": 9,
            "hidden": 48,
            "heads": 6,
            "groups": 2,
        },
    },
    generating=("one process", {"partial_rotary_factor": 0.5, "window": 6}),
    read=(
        (
            {"resid_pdrop": 0.25, "sliding_window": 5, "pad_token_id": None},
            {"hidden_dropout": 0.25, "embedding_dropout": 0.0, "window": 5},
        ),
    ),
    refused=(({"attention_bias": True, "pad_token_id": None}, "attention_bias = True"),),
    published={
        "phi-4": parse_published("""14_659_507_200 parameters
            "attention_bias": false, "embd_pdrop": 0.0, "hidden_size": 5120,
            "intermediate_size": 17920, "max_position_embeddings": 16384, "num_attention_heads": 40,
            "num_hidden_layers": 40, "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": null, "rope_theta": 250000, "sliding_window": null,
            "tie_word_embeddings": false, "vocab_size": 100352
        """)
    },
)
