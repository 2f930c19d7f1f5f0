"""Floating-point operations of a model over sequences of given lengths.

Only matrix products count, two operations for each pair of factors: the projections, the pairs of
tokens that attention looks at, the MLPs, the routers and the head. Element-wise work does not count
(norms, rotary embedding, softmax, activation functions, the loss), nor does what one implementation
does and another does not: recomputation, padding, masked pairs of tokens. So a count is that of the
model, not of how it is run, as model FLOPs utilisation (MFU) needs it.
Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B; here
causal attention counts the pairs that it looks at, not all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture

BACKWARD = 2
"""Operations of the backward pass for each of the forward pass: the gradients of both factors."""


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one decoder layer, forward: `projections` of attention, `attention` itself
    (query-key products and the weighted sums of values), and `mlp` with routers and all experts
    that are used.
    """

    projections: int
    attention: int
    mlp: int

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.mlp


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass: each decoder layer in order, the `head`, and the layers for
    multi-token prediction with what they ask of the head, `mtp`.
    """

    layers: tuple[LayerFlops, ...]
    head: int
    mtp: int = 0

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.head + self.mtp


def model_flops(
    architecture: Architecture, lengths: Iterable[int], predicted: int | None = None
) -> int:
    """Operations of a training step, forward and backward, over sequences of `lengths` tokens.

    `predicted` as in `forward_flops`. Every parameter is trained.
    """
    return (1 + BACKWARD) * forward_flops(architecture, lengths, predicted).total


def forward_flops(
    architecture: Architecture,
    lengths: Iterable[int],
    predicted: int | None = None,
    further: int | None = None,
) -> ForwardFlops:
    """Operations of a forward pass over sequences of `lengths` tokens, without padding.

    The head is computed for `predicted` tokens, by default for all; losses need it only where a
    token counts. `further` is how many further tokens are predicted (MTP), by default one for each
    layer that the model has for it.
    """
    lengths = tuple(lengths)
    tokens = sum(lengths)
    counted = tokens if predicted is None else predicted
    further = architecture.mtp_layers if further is None else further
    kinds: dict[tuple[bool, bool], LayerFlops] = {}

    def layer(number: int) -> LayerFlops:
        kind = (architecture.has_window(number), architecture.has_experts(number))
        if kind not in kinds:
            kinds[kind] = layer_flops(architecture, number, lengths)
        return kinds[kind]

    outputs = architecture.vocab_size if architecture.head is None else 1
    head = _product(counted, architecture.hidden_size, outputs)
    mtp = 0
    if further:
        own = _product(tokens, architecture.mtp_projection_size, architecture.hidden_size)
        mtp = further * (own + layer(architecture.num_layers).total + head)
    return ForwardFlops(tuple(map(layer, range(architecture.num_layers))), head, mtp)


def layer_flops(architecture: Architecture, layer: int, lengths: Sequence[int]) -> LayerFlops:
    """Operations of decoder layer number `layer`, forward; numbers from `num_layers` on are the
    layers for multi-token prediction, without their projection.
    """
    tokens = sum(lengths)
    window = architecture.window if architecture.has_window(layer) else None
    pairs = sum(visible_pairs(length, window) for length in lengths)
    # kv_channels is the size of a key, also under MLA, where values have one of their own.
    head_sizes = architecture.query_size + architecture.context_size
    return LayerFlops(
        projections=_product(tokens, 1, _attention_weights(architecture)),
        attention=_product(pairs, 1, head_sizes),
        mlp=_product(tokens, 1, _mlp_weights(architecture, layer)),
    )


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of query and key in causal attention over `length` tokens, of which each query sees
    the last `window` keys, itself included, or all of them.
    """
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _product(rows: int, inner: int, columns: int) -> int:
    """Operations of a matrix product `[rows, inner] x [inner, columns]`."""
    return 2 * rows * inner * columns


def _attention_weights(architecture: Architecture) -> int:
    """Elements of the matrices by which attention multiplies each token."""
    hidden, mla = architecture.hidden_size, architecture.mla
    output = architecture.context_size * hidden
    if mla is None:
        return hidden * (architecture.query_size + 2 * architecture.kv_size) + output
    rank = mla.q_lora_rank
    query = (hidden if rank is None else rank) * architecture.query_size
    compressed = hidden * ((rank or 0) + mla.down_size)
    return query + compressed + mla.kv_lora_rank * architecture.expanded_size + output


def _mlp_weights(architecture: Architecture, layer: int) -> int:
    """Elements of the matrices by which a layer's MLP multiplies each token: those of the chosen
    experts, the shared one, its gate and the router.
    """
    hidden, moe = architecture.hidden_size, architecture.moe
    if moe is None or not architecture.has_experts(layer):
        return (3 if architecture.gated else 2) * hidden * architecture.ffn_hidden_size
    width = moe.chosen * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return hidden * (3 * width + moe.experts + moe.shared_gates)
