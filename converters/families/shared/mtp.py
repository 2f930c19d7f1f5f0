"""Multi-token prediction (MTP): the rows of its layers, and the field that counts them.

Published checkpoints keep these layers after the last one, for speculative decoding. Such a layer
is an ordinary one with a projection before it, which takes the normalised embedding of the next
token and the normalised hidden states, in this order, and with a final norm of its own. It shares
embedding and head with the model; checkpoints hold copies of both.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import Ignore, Role, Row, Tied, Whole
from megatron_policy.converters.rows.kinds import RowBase

from .dense import EMBEDDING, H, M

_MTP = "mtp.layers.{mtp}."
_HELD = H.replace("{layer}", "{predicting}")
_LEFT_OUT = H.replace("{layer}", "{mtp_layer}")
_PREDICTS = "a layer that predicts a further token, which the model's logits do not need"
_COPY = "a copy that a layer for multi-token prediction has of the model's own"

_OWN: tuple[Row, ...] = (
    Whole(_MTP + "enorm.weight", (_HELD + "enorm.weight",), ("hidden_size",), role=Role.NORM),
    Whole(_MTP + "hnorm.weight", (_HELD + "hnorm.weight",), ("hidden_size",), role=Role.NORM),
    Whole(
        _MTP + "eh_proj.weight", (_HELD + "eh_proj.weight",), ("hidden_size", "mtp_projection_size")
    ),
)
_FINAL_NORM = Whole(
    _MTP + "final_layernorm.weight",
    (_HELD + "shared_head.norm.weight",),
    ("hidden_size",),
    role=Role.NORM,
)
_COPIED_EMBEDDING = Tied(
    "mtp.embedding.word_embeddings.weight", of=EMBEDDING, when="mtp_layers !tied"
)
"""On the last pipeline stage; where the embedding is tied, the head there is one already."""
_HEAD_COPY = "shared_head.head.weight"
_COPIES = (
    Ignore(_HELD + "embed_tokens.weight", _COPY, equals="model.embed_tokens.weight", carried=True),
    Ignore(_HELD + _HEAD_COPY, _COPY, when="!tied", equals="lm_head.weight", carried=True),
    Ignore(
        _HELD + _HEAD_COPY, _COPY, when="tied", equals="model.embed_tokens.weight", carried=True
    ),
)


def layers(rows: Iterable[Row | Ignore]) -> tuple[Row | Ignore, ...]:
    """The rows of MTP layers whose decoder layer has `rows`, and for layers that the model leaves
    out the same tensors, ignored.
    """
    ordinary = [row for row in rows if not isinstance(row, Ignore)]
    held = (*_OWN, *map(_predicting, ordinary), _FINAL_NORM)
    names = [name for row in held for name in row.hf] + [copy.hf for copy in _COPIES]
    left_out = dict.fromkeys(name.replace(_HELD, _LEFT_OUT) for name in names)
    return (
        _COPIED_EMBEDDING,
        *held,
        *_COPIES,
        *(Ignore(name, _PREDICTS, carried=True) for name in left_out),
    )


def _predicting(row: Row) -> Row:
    """The row of the same parameter in an MTP layer."""
    return cast(
        Row,
        replace(
            cast(RowBase, row),
            megatron=row.megatron.replace(M, _MTP + "transformer_layer."),
            hf=tuple(name.replace(H, _HELD) for name in row.hf),
        ),
    )


def take_layers(fields: Fields) -> int:
    """How many MTP layers the checkpoint can have after the last layer."""
    count = fields.take("num_nextn_predict_layers", 0)
    if not isinstance(count, int) or count < 0:
        fields.refuse("num_nextn_predict_layers", count, "must be 0 or the number of these layers")
        return 0
    fields.ignore("num_nextn_predict_layers", "counts layers that the model's logits do not need")
    return count
