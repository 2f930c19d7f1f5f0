"""What a sequence and its pictures cost a model, relative to others."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megatron_policy.converters.architecture import Architecture, Attention, Mla


@dataclass(frozen=True)
class Cost:
    """Called with the tokens of a sequence, the cost L (1 + c L), in tokens of a very short one;
    and with the patches of its pictures, that of the towers that read them as well.
    """

    growth: float
    """c."""
    patch: float = 0.0
    """What a patch costs."""

    def __call__(self, length: int, patches: int = 0) -> float:
        return length * (1 + self.growth * length) + self.patch * patches


def sequence_cost(architecture: Architecture) -> Cost:
    """What a sequence costs this model.

    A token is multiplied with the weights of its layers, two operations each, and a recurrence
    costs each token the same besides; a patch is multiplied with all matrices of the towers. In
    attention each of L tokens meets L others, with two operations for each channel of its queries
    and of its context: c is their share of the former. In a plain layer of width h, with 12 h^2
    weights (4 h^2 of attention, 8 h^2 of an MLP four times as wide), it is 1 / 6h. Causal attention
    needs half of the pairs, but its kernels run at about half the rate of large matrix products, so
    counting all of them is closer to the time. Source: Narayanan et al. 2021, "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", appendix.
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
    shell = architecture.shell
    tensors = () if shell is None else shell.tensors
    tower = 2 * sum(prod(shape) for _, shape in tensors if len(shape) > 1)
    return Cost(pair / each, tower / each)
