"""The kinds of parts that a decoder is made of: norms, activations, experts, MLA."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megatron_policy.errors import ConversionError


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


@dataclass(frozen=True, kw_only=True)
class Moe:
    """Mixture-of-experts MLPs: `experts` gated MLPs, of which each token uses `chosen`."""

    experts: int
    chosen: int
    ffn_hidden_size: int
    scoring: Scoring
    renormalized: bool = False
    """The chosen experts' scores are divided by their sum."""
    least_sum: float = 0.0
    """If that sum is smaller, the scores are divided by this instead."""
    scale: float = 1.0
    """Factor on the chosen experts' weights."""
    groups: int = 1
    groups_chosen: int = 1
    """Experts are in `groups`; a token only uses experts of its best `groups_chosen` groups."""
    correction_bias: bool = False
    """A bias, kept in fp32, that affects which experts are chosen but not their weights."""
    router_bias: bool = False
    shared_ffn_hidden_size: int = 0
    """Width of the shared MLP that every token also passes through; 0: there is none."""
    shared_gate: bool = False
    """The shared MLP's output is multiplied by a sigmoid gate computed from the token."""
    aux_loss_coeff: float | None = field(default=None, compare=False)
    """The makers' coefficient of the load balancing loss, if they publish one; of use in training
    only.
    """

    def __post_init__(self) -> None:
        for name in ("experts", "chosen", "ffn_hidden_size", "groups", "groups_chosen"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConversionError(f"moe.{name} must be a positive integer, not {value!r}")
        if self.experts % self.groups or self.groups_chosen > self.groups:
            raise ConversionError(
                f"{self.experts} experts in {self.groups} groups, {self.groups_chosen} of them "
                "chosen: experts must divide evenly into groups, and topk_group must not "
                "exceed n_group"
            )
        if self.chosen > self.experts // self.groups * self.groups_chosen:
            raise ConversionError(
                f"{self.chosen} experts cannot be chosen from {self.experts} in "
                f"{self.groups_chosen} of {self.groups} groups"
            )

    @property
    def shared_gates(self) -> int:
        """Rows of the shared MLP's gate."""
        return int(self.shared_gate)


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-head latent attention (MLA; DeepSeek-V2, 2024): keys and values from a compressed
    vector.
    """

    q_lora_rank: int | None
    """Width of the compressed query; None: queries are projected directly."""
    kv_lora_rank: int
    """Width of the compressed keys and values."""
    qk_nope_head_dim: int
    """The part of a query or key head without rotary embedding."""
    qk_rope_head_dim: int
    """The rotated part of a query or key head; all key heads share it."""
    v_head_dim: int
    layernorm_epsilon: float = 1e-6
    """Of the norms of compressed vectors."""

    @property
    def down_size(self) -> int:
        """Output rows of the projection that compresses keys and values."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class ScalarHead:
    """A linear layer from a token's hidden state to one number."""

    per_token: bool
    """It has a bias, and every token's number is wanted; otherwise that of a row's last token."""
