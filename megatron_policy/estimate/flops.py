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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture
from megatron_policy.estimate.adapters import (
    EXPERT_FC1,
    EXPERT_FC2,
    FC1,
    FC2,
    KV_DOWN,
    KV_UP,
    PROJ,
    Q_DOWN,
    Q_PROJ,
    Q_UP,
    QKV,
    SHARED_FC1,
    SHARED_FC2,
    LinearAdapters,
    ModelAdapters,
)

BACKWARD = 2
"""Operations of the backward pass for each of the forward pass where both factors of a product need
gradients; where one does, as with frozen weights, there are as many as forward.
"""

_ROUTER = "mlp.router"


@dataclass(frozen=True)
class LayerFlops:
    """Operations of one decoder layer, forward: `projections` of attention, `attention` itself
    (query-key products and the weighted sums of values), `mlp` with routers and all experts that
    are used, and `adapters`. `backward` are those of the backward pass.
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
    kinds: dict[tuple[bool, bool], LayerFlops] = {}

    def layer(number: int) -> LayerFlops:
        kind = (architecture.has_window(number), architecture.has_experts(number))
        if kind not in kinds:
            kinds[kind] = layer_flops(architecture, number, lengths)
        return kinds[kind]

    outputs = architecture.vocab_size if architecture.head is None else 1
    head = _product(counted, architecture.hidden_size, outputs)
    if adapters is not None:
        adapted, trained = [], False
        for number, linears in enumerate(adapters.layers):
            adapted.append(layer_flops(architecture, number, lengths, linears, trained))
            trained |= bool(linears)
        return ForwardFlops(tuple(adapted), head, mtp=0, head_backward=head)
    mtp = 0
    if further:
        own = _product(tokens, architecture.mtp_projection_size, architecture.hidden_size)
        mtp = further * (own + layer(architecture.num_layers).total + head)
    layers = tuple(map(layer, range(architecture.num_layers)))
    return ForwardFlops(layers, head, mtp, BACKWARD * head)


def layer_flops(
    architecture: Architecture,
    layer: int,
    lengths: Sequence[int],
    adapters: LinearAdapters | None = None,
    trained: bool = True,
) -> LayerFlops:
    """Operations of decoder layer number `layer`; numbers from `num_layers` on are the layers for
    multi-token prediction, without their projection. With `adapters` all else of it is frozen;
    `trained` says whether anything before it is trained.
    """
    tokens = sum(lengths)
    window = architecture.window if architecture.has_window(layer) else None
    pairs = sum(visible_pairs(length, window) for length in lengths)
    # kv_channels is the size of a key, also under MLA, where values have one of their own.
    core = _product(pairs, 1, architecture.query_size + architecture.context_size)
    attention, mlp = _attention_weights(architecture), _mlp_weights(architecture, layer)
    projections, inner = (
        _product(tokens, 1, sum(sum(each.values()) for each in weights))
        for weights in (attention, mlp)
    )
    if adapters is None:
        backward = BACKWARD * (projections + core + inner)
        return LayerFlops(projections, core, inner, 0, backward)
    *into, out = attention
    count = _Adapted(architecture, adapters, tokens, trained)
    for weights in into:
        count.linear(weights)
    count.backward += BACKWARD * core * count.trained
    count.linear(out)
    if architecture.parallel:  # the MLP does not read what attention gives
        count.trained = trained
    for weights in mlp:
        count.linear(weights)
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

    def linear(self, weights: Mapping[str, int]) -> None:
        """Linear layers of so many elements, with the same inputs, and their adapters."""
        architecture, trained = self._architecture, self.trained
        for name, elements in weights.items():
            # Of inputs alone, if anything needs them.
            self.backward += _product(self._tokens, 1, elements) * trained
            adapter = self._adapters.get(name)
            if adapter is None:
                continue
            a, b = (_product(self._tokens, 1, size) for size in adapter.elements(architecture))
            if name in (EXPERT_FC1, EXPERT_FC2):
                assert architecture.moe is not None
                a, b = a * architecture.moe.chosen, b * architecture.moe.chosen
            self.forward += a + b
            self.backward += (1 + trained) * a + BACKWARD * b
            self.trained = True


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


def _attention_weights(architecture: Architecture) -> tuple[dict[str, int], ...]:
    """Elements of the matrices by which attention multiplies each token: those that read the same
    together, in their order.
    """
    hidden, mla = architecture.hidden_size, architecture.mla
    output = {PROJ: architecture.context_size * hidden}
    if mla is None:
        return {QKV: hidden * (architecture.query_size + 2 * architecture.kv_size)}, output
    down = {KV_DOWN: hidden * mla.down_size}
    up = {KV_UP: mla.kv_lora_rank * architecture.expanded_size}
    if mla.q_lora_rank is None:
        return {Q_PROJ: hidden * architecture.query_size} | down, up, output
    rank = mla.q_lora_rank
    return {Q_DOWN: hidden * rank} | down, {Q_UP: rank * architecture.query_size} | up, output


def _mlp_weights(architecture: Architecture, layer: int) -> tuple[dict[str, int], ...]:
    """The same of a layer's MLP: of the chosen experts, the shared one, its gate and the router."""
    hidden, moe = architecture.hidden_size, architecture.moe
    if moe is None or not architecture.has_experts(layer):
        outputs = hidden * architecture.ffn_hidden_size
        return {FC1: (2 if architecture.gated else 1) * outputs}, {FC2: outputs}
    own = hidden * moe.chosen * moe.ffn_hidden_size
    shared = hidden * moe.shared_ffn_hidden_size
    router = {_ROUTER: hidden * (moe.experts + moe.shared_gates)}
    inputs = {EXPERT_FC1: 2 * own, SHARED_FC1: 2 * shared}
    return router | inputs, {EXPERT_FC2: own, SHARED_FC2: shared}
