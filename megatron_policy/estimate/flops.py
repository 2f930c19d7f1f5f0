"""Floating-point operations of a model over sequences of given lengths.

Only matrix products count, two operations for each pair of factors: the projections, the pairs of
tokens that attention looks at, convolutions and states of recurrences (token by token, however they
are computed), the MLPs, the routers and the head. Element-wise work does not count
(norms, rotary embedding, softmax, activation functions, the loss), nor does what one implementation
does and another does not: recomputation, padding, masked pairs of tokens. So a count is that of the
model, not of how it is run, as model FLOPs utilisation (MFU) needs it.
Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", appendix B; here
causal attention counts the pairs that it looks at, not all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture, Layer
from megatron_policy.converters.architecture.part import Linears
from megatron_policy.estimate.adapters import LinearAdapters, ModelAdapters

BACKWARD = 2
"""Operations of the backward pass for each of the forward pass where both factors of a product need
gradients; where one does, as with frozen weights, there are as many as forward.
"""


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one decoder layer, forward: `projections` of attention, `attention` itself
    (query-key products and the weighted sums of values) or a recurrence in its place, `mlp` with
    routers and all experts that are used, and `adapters`. `backward` are those of the backward
    pass.
    """

    projections: int
    attention: int
    mlp: int
    adapters: int
    backward: int

    @property
    def total(self) -> int:
        return self.projections + self.attention + self.mlp + self.adapters


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of a forward pass: each decoder layer in order, the `head`, and the layers for
    multi-token prediction with what they ask of the head, `mtp`. `backward` are those of the whole
    backward pass, `head_backward` of them the head's, without `mtp`.
    """

    layers: tuple[LayerFlops, ...]
    head: int
    mtp: int
    head_backward: int

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.head + self.mtp

    @property
    def backward(self) -> int:
        layers = sum(layer.backward for layer in self.layers)
        return layers + self.head_backward + BACKWARD * self.mtp


def model_flops(
    architecture: Architecture,
    lengths: Iterable[int],
    predicted: int | None = None,
    adapters: ModelAdapters | None = None,
) -> int:
    """Operations of a training step, forward and backward, over sequences of `lengths` tokens.

    `predicted` as in `forward_flops`. Every parameter is trained, or the `adapters` alone.
    """
    found = forward_flops(architecture, lengths, predicted, adapters=adapters)
    return found.total + found.backward


def forward_flops(
    architecture: Architecture,
    lengths: Iterable[int],
    predicted: int | None = None,
    further: int | None = None,
    adapters: ModelAdapters | None = None,
) -> ForwardFlops:
    """Operations of a forward pass over sequences of `lengths` tokens, without padding.

    The head is computed for `predicted` tokens, by default for all; losses need it only where a
    token counts. `further` is how many further tokens are predicted (MTP), by default one for each
    layer that the model has for it. With `adapters` all else is frozen.
    """
    lengths = tuple(lengths)
    tokens = sum(lengths)
    counted = tokens if predicted is None else predicted
    further = architecture.mtp_layers if further is None else further
    predicting = architecture.find_layer(architecture.num_layers)
    kinds = {
        layer: layer_flops(architecture, layer, lengths)
        for layer in {*architecture.layers, predicting}
    }
    outputs = architecture.vocab_size if architecture.head is None else 1
    head = _product(counted, architecture.hidden_size, outputs)
    if adapters is not None:
        adapted, trained = [], adapters.towers
        for layer, linears in zip(architecture.layers, adapters.layers, strict=True):
            adapted.append(layer_flops(architecture, layer, lengths, linears, trained))
            trained |= bool(linears)
        return ForwardFlops(tuple(adapted), head, mtp=0, head_backward=head)
    mtp = 0
    if further:
        own = _product(tokens, architecture.mtp_projection_size, architecture.hidden_size)
        mtp = further * (own + kinds[predicting].total + head)
    layers = tuple(kinds[layer] for layer in architecture.layers)
    return ForwardFlops(layers, head, mtp, BACKWARD * head)


def layer_flops(
    architecture: Architecture,
    layer: Layer,
    lengths: Sequence[int],
    adapters: LinearAdapters | None = None,
    trained: bool = True,
) -> LayerFlops:
    """Operations of a layer of the model. With `adapters` all else of it is frozen; `trained` says
    whether anything before it is trained.
    """
    tokens, hidden = sum(lengths), architecture.hidden_size
    core = sum(mixer.count_core_flops(lengths) for mixer in layer.mixers)
    mixer = layer.list_mixer_linears(hidden)
    feed = () if layer.feed is None else layer.feed.list_linears(hidden)
    projections, inner = (
        _product(tokens, 1, sum(linear.elements for group in linears for linear in group))
        for linears in (mixer, feed)
    )
    if adapters is None:
        backward = BACKWARD * (projections + core + inner)
        return LayerFlops(projections, core, inner, 0, backward)
    count = _Adapted(architecture, adapters, tokens, trained)
    count.pass_through(mixer[:-1])
    count.backward += BACKWARD * core * count.trained
    count.pass_through(mixer[-1:])
    if layer.norms.parallel:  # the feed does not read what the mixer gives
        count.trained = trained
    count.pass_through(feed)
    return LayerFlops(projections, core, inner, count.forward, count.backward)


class _Adapted:
    """Counts a frozen layer's backward pass, and both passes of its adapters, in the order in which
    tokens pass through it.
    """

    def __init__(
        self, architecture: Architecture, adapters: LinearAdapters, tokens: int, trained: bool
    ) -> None:
        self._architecture, self._adapters, self._tokens = architecture, adapters, tokens
        self.trained = trained
        """Whether what has been computed so far needs gradients."""
        self.forward = self.backward = 0

    def pass_through(self, linears: Linears) -> None:
        """Count linear layers and their adapters."""
        for group in linears:
            trained = self.trained
            for linear in group:
                # Of inputs alone, if anything needs them.
                self.backward += _product(self._tokens, 1, linear.elements) * trained
                adapter = self._adapters.get(linear.name)
                if adapter is not None:
                    a, b = (
                        linear.chosen * _product(self._tokens, 1, size)
                        for size in adapter.elements(self._architecture)
                    )
                    self.forward += a + b
                    self.backward += (1 + trained) * a + BACKWARD * b
                    self.trained = True


def _product(rows: int, inner: int, columns: int) -> int:
    """Operations of a matrix product `[rows, inner] x [inner, columns]`."""
    return 2 * rows * inner * columns
