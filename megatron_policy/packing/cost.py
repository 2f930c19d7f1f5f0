"""What a sequence costs a decoder, relative to other lengths."""

from __future__ import annotations

from collections.abc import Callable

from megatron_policy.converters.architecture import Architecture, Attention, Mla

Cost = Callable[[int], float]
"""The cost of a sequence of this many tokens; increases with it, 0 for 0 tokens."""


def sequence_cost(architecture: Architecture) -> Cost:
    """The cost L + s L^2 / 6h of a sequence of L tokens, in tokens of a very short one.

    A layer of width h multiplies each token with 12 h^2 weights (4 h^2 of attention, 8 h^2 of an
    MLP four times as wide), 24 h^2 operations. Scores and weighted values take 2 h operations each
    for every pair of tokens, 4 L h per token. Together 24 h^2 (1 + L / 6h) per token. Causal
    attention needs half of the pairs, but its kernels run at about half the rate of large matrix
    products, so counting all of them is closer to the time. A recurrence costs each token the same,
    so only a share s of layers, each with two parts, has what grows: 1 where all have attention.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", appendix.
    """

    attend = sum(isinstance(layer.mixer, Attention | Mla) for layer in architecture.layers)
    parts = sum(len(layer.parts) for layer in architecture.layers)
    width = 3 * parts / attend * architecture.hidden_size

    def cost(length: int) -> float:
        return length * (1 + length / width)

    return cost
