"""The kinds of parts a decoder is made of: norms, activations, experts, latent attention.

Knows neither Hugging Face nor Megatron-Core.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Norm(Enum):
    """How activations are normalised; the weight of `RMS_PLUS_ONE` is stored less 1."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class Activation(Enum):
    """The MLP's nonlinearity; `GELU_TANH` is the usual approximation of `GELU`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: x * sigmoid(1.702 x) of a clamped gate, times the clamped up projection plus 1."""


class QkNorm(Enum):
    """Whether queries and keys are normalised: head by head, or over all of a token's heads."""

    NONE = "none"
    PER_HEAD = "per_head"
    ALL_HEADS = "all_heads"


class Scoring(Enum):
    """How router logits become the weights of the chosen experts."""

    SOFTMAX = "softmax"
    """Softmax over all experts, then the best are chosen."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The best are chosen, then softmax over them: also what renormalising SOFTMAX gives."""
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture-of-experts MLPs: `experts` gated MLPs, of which each token takes `chosen`."""

    experts: int
    chosen: int
    ffn_hidden_size: int
    scoring: Scoring
    renormalized: bool = False
    """The chosen experts' sigmoid scores are divided by their sum."""
    scale: float = 1.0
    """Factor on the chosen experts' weights."""
    groups: int = 1
    groups_chosen: int = 1
    """Experts stand in `groups`; a token takes experts of its best `groups_chosen` groups only."""
    correction_bias: bool = False
    """A bias, kept in fp32, that takes part in choosing experts but not in weighing them."""
    router_bias: bool = False
    shared_ffn_hidden_size: int = 0
    """Width of the MLP that every token passes through besides; 0: there is none."""
    shared_gate: bool = False
    """The shared MLP's output is multiplied by a sigmoid gate of the token."""


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values from a compressed vector."""

    q_lora_rank: int | None
    """Width of the compressed query; None: queries are projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
