"""The numbers of a model that has no family here, as far as its transformers class names them. They
serve batches and estimates; its weights and what it computes come from transformers alone.
"""

from __future__ import annotations

from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError

_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "vocab_size": ("vocab_size",),
}
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_inner")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_UNLIMITED = 2**20
"""Positions of a model that does not say how many it has."""


def unlisted_table(config: Any, overrides: dict[str, Any]) -> Table:
    """A table without entries for the transformers config of a model without a family; the engine
    adds those of what it has built. ConfigError where the class has no layers or no vocabulary.
    """
    kind = config.model_type
    layers, hidden, vocab = (_first(config, names) or 0 for names in _NAMES.values())
    found = zip(_NAMES, (layers, hidden, vocab), strict=True)
    if missing := [name for name, value in found if not value]:
        raise ConfigError(
            f"the model is a {kind}, whose config names no {', '.join(missing)}: it is not a "
            "causal language model that can be trained here"
        )
    heads = _first(config, _HEADS) or 1
    groups = _first(config, _GROUPS) or heads
    architecture = Architecture(
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=vocab,
        num_attention_heads=heads,
        num_query_groups=groups if heads % groups == 0 else heads,
        kv_channels=2 * max(1, (_first(config, ("head_dim",)) or hidden // heads) // 2),
        ffn_hidden_size=_first(config, _INNER) or 4 * hidden,
        max_position_embeddings=_first(config, _POSITIONS) or _UNLIMITED,
        layernorm_epsilon=1e-6,
        rope=Rope(10000.0),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
    return Table(kind, architecture, (), {}, overrides)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these fields that is a positive number; of a list, its largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
