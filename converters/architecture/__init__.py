"""A decoder-only model in numbers: what rows and builders know of a model. Read `architecture.py`
first, then `layer.py` and the parts that layers are made of: `attention.py`, `mla.py`, those of
`recurrence.py` (`delta_net.py`, `channel_delta_net.py`, `mamba2.py` and `short_convolution.py`),
`mlp.py` and `moe.py`.
"""

from __future__ import annotations

from .architecture import Architecture, VocabShard, padded_vocab, vocab_shard
from .attention import Attention
from .channel_delta_net import ChannelDeltaNet
from .delta_net import DeltaNet
from .layer import MOST_LAYERS, Beside, Feed, Layer, Mixer, Norms, stack
from .mamba2 import Mamba2
from .media import Medium, PatchMedium, PictureMedium, SoundMedium
from .mla import Mla
from .mlp import Mlp
from .moe import Moe
from .part import LayerPart
from .recurrence import HeadRows, Recurrence
from .rotary import Rope
from .shell import SAY_DRAWN, Shell, join_rows, pick_row
from .short_convolution import ShortConvolution
from .tiles import FilmMedium, FrameMedium, TileMedium
from .traits import Activation, Norm, QkNorm, ScalarHead, Scoring

__all__ = [
    "MOST_LAYERS",
    "SAY_DRAWN",
    "Activation",
    "Architecture",
    "Attention",
    "Beside",
    "ChannelDeltaNet",
    "DeltaNet",
    "Feed",
    "FilmMedium",
    "FrameMedium",
    "HeadRows",
    "Layer",
    "LayerPart",
    "Mamba2",
    "Medium",
    "Mixer",
    "Mla",
    "Mlp",
    "Moe",
    "Norm",
    "Norms",
    "PatchMedium",
    "PictureMedium",
    "QkNorm",
    "Recurrence",
    "Rope",
    "ScalarHead",
    "Scoring",
    "Shell",
    "ShortConvolution",
    "SoundMedium",
    "TileMedium",
    "VocabShard",
    "join_rows",
    "padded_vocab",
    "pick_row",
    "stack",
    "vocab_shard",
]
