"""The kinds of norms, activations, scores and heads that a decoder can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Norm(Enum):
    """How activations are normalised; the weight of `RMS_PLUS_ONE` is stored minus 1."""

    RMS = "rms"
    RMS_PLUS_ONE = "rms_plus_one"
    LAYER = "layer"


class Activation(Enum):
    """The MLP's activation function; `GELU_TANH` is the usual approximation of `GELU`."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    """gpt-oss: x * sigmoid(1.702 x) of a clamped gate, times the clamped up projection plus 1."""
    SQUARED_RELU = "squared_relu"
    """The square of positive inputs, 0 of others."""
    XIELU = "xielu"
    """Apertus: a square of positive inputs, an exponential of others; each layer learns factors."""


class QkNorm(Enum):
    """Whether and how queries and keys are normalised."""

    NONE = "none"
    PER_HEAD = "per_head"
    """Head by head, with the same weights for every head."""
    AFTER_ROTATION = "after_rotation"
    """As `PER_HEAD`, but after the rotary embedding instead of before it."""
    EACH_HEAD = "each_head"
    """Head by head, with separate weights for each head."""
    ALL_HEADS = "all_heads"
    """Over all heads of a token together."""

    def __bool__(self) -> bool:
        """Whether there is such a norm, for the conditions of rows."""
        return self is not QkNorm.NONE


@dataclass(frozen=True)
class QueryGrowth:
    """The query at position p is multiplied by 1 + `rate` * log(1 + floor(p / `length`)) (Llama 4,
    2025).
    """

    rate: float
    length: int


class Scoring(Enum):
    """How router logits become the weights of the chosen experts."""

    SOFTMAX = "softmax"
    """Softmax over all experts, then the top ones are chosen."""
    SOFTMAX_OF_CHOSEN = "softmax_of_chosen"
    """The top ones are chosen, then softmax over them: the same as renormalising SOFTMAX."""
    SIGMOID = "sigmoid"


@dataclass(frozen=True)
class ScalarHead:
    """A linear layer from a token's hidden state to one number."""

    per_token: bool
    """It has a bias, and every token's number is wanted; otherwise that of a row's last token."""
