from functools import partial
from importlib.metadata import version

from packaging.version import Version

from megatron_policy.converters.architecture.traits import QkNorm, Scoring
from tests.families.qwen2_5_omni_thinker import EARS, LISTENING
from tests.families.qwen3_moe import draw
from tests.families.qwen3_vl import DEEP, TOWER
from tests.samples import Fields, Samples, make_moe, parse_published, surround_with_sound

CONVOLVED: Fields = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 4}

SAMPLES = Samples(
    architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
    surround=partial(
        surround_with_sound,
        vision=DEEP,
        interleaved=True,
        audio=LISTENING | CONVOLVED,
        ending="id",
    ),
    experts=True,
    tiny={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"norm_topk_prob": True, "mlp_only_layers": [0]},
    head_dim=True,
    full={"attention_bias": True},
    draw=draw,
    shared=Version(version("transformers")) >= Version("5.24"),  # which has a plan for it
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"attention_bias": True, "head_dim": 8},
            {
                "moe": make_moe(scoring=Scoring.SOFTMAX_OF_CHOSEN),
                "moe_layers": (False, True, True),
                "qk_norm": QkNorm.PER_HEAD,
                "qkv_bias": True,
            },
        ),
        ({"norm_topk_prob": False, "sliding_window": 4}, {"moe": make_moe(), "window": None}),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        (
            {"audio_config": LISTENING | CONVOLVED | {"n_window": 40}},
            "audio_config.n_window = 40: the class counts 13 tokens for each 100 frames; it can",
        ),
    ),
    published={
        "Qwen3-Omni-30B-A3B-Instruct": {
            "vision_config": TOWER,
            "audio_config": EARS
            | {"n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480},
        }
        | parse_published("""31_719_205_488 parameters
            "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_size": 2048, "intermediate_size": 768, "max_position_embeddings": 65536,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000, "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": false, "vocab_size": 152064
        """)
    },
)
