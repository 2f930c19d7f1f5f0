"""Tiny random Hugging Face checkpoints of the real architectures, with nothing in them trivial."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.expert_families import EXPERTS

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "cohere": {"logit_scale": 0.25},
    "ernie4_5": {},
    "exaone4": {},
    "gemma2": {
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"query_pre_attn_scalar": 24, "rope_local_base_freq": 500.0},
    "glm4": {},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.6,
    },
    "hunyuan_v1_dense": {},
    "llama": {},
    "mimo": {},
    "ministral3": {},
    "mistral": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {},
    "starcoder2": {},
}
"""Config fields of each dense family with values that make a difference where its defaults would
not.
"""
ALL_FAMILIES = FAMILIES | EXPERTS
EPSILON = {"cohere": "layer_norm_eps", "starcoder2": "norm_epsilon"}
HEAD_DIM = ("ernie4_5", "gemma2", "gemma3_text", "glm4", "hunyuan_v1_dense", "llama")
HEAD_DIM += ("ministral3", "mistral", "qwen3", "seed_oss")
HEAD_DIM += ("ernie4_5_moe", "glm4_moe", "gpt_oss", "minimax_m2", "mixtral", "qwen3_moe")
MAKERS_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k2": (
        "deepseek_v3",
        {
            "auto_map": {
                "AutoConfig": "configuration_deepseek.DeepseekV3Config",
                "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
            }
        },
    ),
    "mimo": (
        "qwen2",
        {
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
            "auto_map": {
                "AutoConfig": "configuration_mimo.MiMoConfig",
                "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
            },
        },
    ),
}
"""Families that transformers only knows from their makers' code, which no checkpoint here has: the
model_type of its class with the same fields, and what their config.json has besides those.
"""
_CONSTANTS = {"alpha_p": (-1, 1), "alpha_n": (-1, 1), "beta": (0.3, 0.7), "eps": (-0.5, -0.1)}
"""Ranges of the constants of Apertus's activation functions."""
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_checkpoint(
    path: Path | str,
    family: str,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    groups: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 256,
    max_position: int = 512,
    tied: bool = False,
    dtype: torch.dtype | str = torch.float32,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    window: int | None = None,
    full_layers: int = 0,
    max_shard_size: str | int | None = None,
    tokenizer: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint of `family` (weights, config, tokenizer) and return its path.

    `window` is the sliding window in tokens. Of the qwen families, the first `full_layers` layers
    do without it; Gemma 2 has it on every other layer, Gemma 3 and OLMo 3 on all but the last.
    SmolLM3 has it on every other layer, which then does without rotary embedding; EXAONE 4 on all
    but the last, which then does without rotary embedding. `max_shard_size` ("40KB" or bytes)
    splits the weights over files with an index.
    Further keywords go to the family's config as they are (`attention_bias=True`, ...).
    The same arguments give the same bytes.
    """
    assert family in ALL_FAMILIES, f"no tiny checkpoint for {family!r}, only {list(ALL_FAMILIES)}"
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tied,
        "rope_theta": rope_theta,
        EPSILON.get(family, "rms_norm_eps"): 1e-6,
        # Large enough that attention is far from uniform and the layers matter.
        "initializer_range": 0.1,
        # With a padding token torch's embedding would keep that row from learning.
        "pad_token_id": None,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
    }
    if head_dim is not None or family in HEAD_DIM:
        fields["head_dim"] = head_dim or hidden // heads
    if rope_scaling is not None:
        fields["rope_scaling"] = dict(rope_scaling)
    fields |= ALL_FAMILIES[family] | _window_fields(family, layers, window, full_layers) | config
    model = _random_model(family, fields, seed).to(_dtype(dtype))
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(path, **sharding)
    if family in MAKERS_OWN:
        file = Path(path) / "config.json"
        written = json.loads(file.read_text())
        written |= MAKERS_OWN[family][1] | {"model_type": family}
        file.write_text(json.dumps(written, indent=2))
    if tokenizer:
        make_tokenizer(vocab).save_pretrained(path)
    return Path(path)


def hf_config(path: Path | str) -> Any:
    """The checkpoint's config as transformers' own class of its model has it."""
    fields = json.loads((Path(path) / "config.json").read_text())
    if fields["model_type"] in MAKERS_OWN:
        known_as, own = MAKERS_OWN[fields["model_type"]]
        fields = {name: value for name, value in fields.items() if name not in own}
        return AutoConfig.for_model(**fields | {"model_type": known_as})
    return AutoConfig.from_pretrained(path)


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of at most `vocab` tokens, trained on this project's licence."""
    assert vocab >= 128, f"{vocab} tokens are too few for the letters of a text"
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    inner.decoder = ByteLevelDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), show_progress=False
    )
    inner.train_from_iterator(TEXT.read_text(encoding="utf-8").splitlines(), trainer)
    unk, pad, bos, eos = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=unk, pad_token=pad, bos_token=bos, eos_token=eos
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) <= vocab
    return tokenizer


def _window_fields(
    family: str, layers: int, window: int | None, full_layers: int
) -> dict[str, Any]:
    slides, sees_all = "sliding_attention", "full_attention"
    if family in ("ministral3", "mistral", "phi3", "starcoder2"):
        return {"sliding_window": window}
    if family == "gemma2":
        return {"sliding_window": window or 7}
    if family == "exaone4":
        types = [sees_all if window is None else slides] * (layers - 1) + [sees_all]
        return {"sliding_window": window, "layer_types": types}
    if family in ("gemma3_text", "olmo3"):
        types = [slides] * (layers - 1) + [sees_all]
        return {"sliding_window": window or 7, "layer_types": types}
    if family == "smollm3":
        rotated = [(layer + 1) % 2 for layer in range(layers)]
        sliding = {"use_sliding_window": window is not None, "sliding_window": window}
        return {"no_rope_layers": rotated, **sliding}
    if window is None:
        return {}
    assert family.startswith("qwen"), f"{family} has no sliding window"
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": full_layers,
    }


def _random_model(family: str, fields: dict[str, Any], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(MAKERS_OWN.get(family, (family,))[0], **fields),
            dtype=torch.float32,
        )
        with torch.no_grad():
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in name:
                    less = 1.0 if family.startswith("gemma") else 0.0
                    parameter.uniform_(0.5 - less, 1.5 - less)
                elif ".act_fn." in name:
                    parameter.uniform_(*_CONSTANTS[name.rsplit(".", 1)[1]])
    return model


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
