"""The names of the files in a model's directory: which of them hold weights, and which belong to
the model besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "megatron_policy.json"
"""A converted checkpoint's origin and digests; not copied, since it applies only to this one."""
ADAPTER_MODEL, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
TEMPLATES = "additional_chat_templates/"
"""The folder in which transformers keeps a tokenizer's named chat templates."""

_WEIGHTS = re.compile(
    r".+\.(safetensors|index(\.[^.]+)?\.json|bin|pt|pth|ckpt|distcp|gguf|h5|msgpack|onnx|onnx_data"
    r"|npz|ot|tflite)"
)
# Files that describe weights which are not copied: adapters', and quantised ones, since what is
# written is not quantised.
_OF_OTHER_WEIGHTS = {
    ADAPTER_CONFIG,
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
}

_OF_TOKENIZERS = re.compile(
    r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|vocab\.txt|merges\.txt|chat_template\.(json|jinja)"
    r"|(tokenizer|spiece|sentencepiece\.bpe)\.model|[^/]+\.tiktoken"
    rf"|{TEMPLATES}.+"
)


def holds_weights(name: str) -> bool:
    """Whether a file of a checkpoint with this name holds weights, or their index."""
    return _WEIGHTS.fullmatch(name) is not None


def is_of_tokenizer(name: str) -> bool:
    """Whether a file of this name, relative to the model's directory, is one of its tokenizer's."""
    return _OF_TOKENIZERS.fullmatch(name) is not None


def side_names(names: Iterable[str]) -> list[str]:
    """Which of a directory's files, by relative names, belong to its model besides the weights.

    All do but hidden ones, those that describe other weights, and those in a folder that has
    weights: it is another model, or another form of this one.
    """
    every = sorted(names)
    others = {name.partition("/")[0] for name in every if "/" in name and holds_weights(name)}
    return [
        name
        for name in every
        if not any(part.startswith(".") for part in name.split("/"))
        and not holds_weights(name)
        and name not in {MANIFEST, *_OF_OTHER_WEIGHTS}
        and not ("/" in name and name.partition("/")[0] in others)
    ]
