"""What a sequence costs a decoder, relative to other lengths."""

from __future__ import annotations

from collections.abc import Callable

from megatron_policy.converters.architecture import Architecture, Attention, Mla

Cost = Callable[[int], float]
"""The cost of a sequence of this many tokens; increases with it, 0 for 0 tokens."""


def sequence_cost(architecture: Architecture) -> Cost:
    """The cost L (1 + c L) of a sequence of L tokens, in tokens of a very short one.

    A token is multiplied with the weights of its layers, two operations each, and a recurrence
    costs each token the same besides. In attention each of L tokens meets L others, with two
    operations for each channel of its queries and of its context: c is their share of the former.
    In a plain layer of width h, with 12 h^2 weights (4 h^2 of attention, 8 h^2 of an MLP four times
    as wide), it is 1 / 6h. Causal attention needs half of the pairs, but its kernels run at about
    half the rate of large matrix products, so counting all of them is closer to the time.
    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", appendix.
    """
    each = pair = 0
    for layer in architecture.layers:
        linears = (part.list_linears(architecture.hidden_size) for part in layer.parts)
        each += 2 * sum(each.elements for groups in linears for group in groups for each in group)
        for mixer in layer.mixers:
            if isinstance(mixer, Attention | Mla):
                pair += 2 * (mixer.query_size + mixer.context_size)
            else:
                each += mixer.count_core_flops([1])
    growth = pair / each

    def cost(length: int) -> float:
        return length * (1 + growth * length)

    return cost
