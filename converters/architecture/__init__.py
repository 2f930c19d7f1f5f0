"""A decoder-only model in numbers: what rows and builders know of a model. Read `architecture.py`
first, then `traits.py` (the kinds of norms, activations and experts) and `rotary.py`.
"""

from __future__ import annotations

from .architecture import MOST_LAYERS, Architecture, VocabShard, padded_vocab, vocab_shard
from .rotary import Rope
from .traits import Activation, Mla, Moe, Norm, QkNorm, ScalarHead, Scoring

__all__ = [
    "MOST_LAYERS",
    "Activation",
    "Architecture",
    "Mla",
    "Moe",
    "Norm",
    "QkNorm",
    "Rope",
    "ScalarHead",
    "Scoring",
    "VocabShard",
    "padded_vocab",
    "vocab_shard",
]
