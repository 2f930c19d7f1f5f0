"""A decoder-only model in numbers: what rows and builders know of a model. Read `architecture.py`
first, then `layer.py` and the parts that layers are made of: `attention.py`, `mla.py`, `mlp.py` and
`moe.py`.
"""

from __future__ import annotations

from .architecture import Architecture, VocabShard, padded_vocab, vocab_shard
from .attention import Attention
from .layer import MOST_LAYERS, Feed, Layer, Mixer, Norms, stack
from .mla import Mla
from .mlp import Mlp
from .moe import Moe
from .part import LayerPart
from .rotary import Rope
from .traits import Activation, Norm, QkNorm, ScalarHead, Scoring

__all__ = [
    "MOST_LAYERS",
    "Activation",
    "Architecture",
    "Attention",
    "Feed",
    "Layer",
    "LayerPart",
    "Mixer",
    "Mla",
    "Mlp",
    "Moe",
    "Norm",
    "Norms",
    "QkNorm",
    "Rope",
    "ScalarHead",
    "Scoring",
    "VocabShard",
    "padded_vocab",
    "stack",
    "vocab_shard",
]
