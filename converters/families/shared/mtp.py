"""Multi-token prediction (MTP): the rows of its layers, and the field that counts them.

Published checkpoints keep these layers for speculative decoding. Such a layer is an ordinary one
with a projection before it, which takes the normalised embedding of the next token and normalised
hidden states, and with a final norm of its own. It shares embedding and head with the model.
Megatron-Core's projection has the embedding as the first half of its input.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from megatron_policy.converters.architecture import Mlp, Moe
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import Halves, Ignore, Role, Row, Tied, Whole
from megatron_policy.converters.rows.kinds import RowBase

from .dense import EMBEDDING, H, M

_MTP = "mtp.layers.{mtp}."
_PREDICTS = "a layer that predicts a further token, which the model's logits do not need"
_COPY = "a copy that a layer for multi-token prediction has of the model's own"
_PROJECTED = ("hidden_size", "mtp_projection_size")


@dataclass(frozen=True)
class Names:
    """What a family's checkpoints call such a layer and what it has besides those of an ordinary
    one.
    """

    held: str
    """The start of the names of a layer that the model has; `left_out` of one it leaves out."""
    left_out: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    """The hidden states are the first half of the projection's input."""
    embedding: str = ""
    """Copies of the model's embedding and head; "" if there are none."""
    head: str = ""
    layer: str = ""
    """The start of the names of its decoder layer, if not as of the others."""
    feed: str = ""
    """The same of what follows attention, if that is a layer of its own."""

    @property
    def own(self) -> tuple[Row, ...]:
        """The rows of what is before the decoder layer."""
        projection = Halves if self.hidden_first else Whole
        return (
            self._norm("enorm", self.embedding_norm),
            self._norm("hnorm", self.hidden_norm),
            projection(_MTP + "eh_proj.weight", (self.held + self.projection,), _PROJECTED),
        )

    @property
    def last(self) -> Row:
        """The row of what is after it."""
        return self._norm("final_layernorm", self.final_norm)

    @property
    def copies(self) -> tuple[Ignore, ...]:
        """What repeats the model's own weights."""
        found = []
        for copy, when, original in (
            (self.embedding, "", EMBEDDING.hf[0]),
            (self.head, "!tied", "lm_head.weight"),
            (self.head, "tied", EMBEDDING.hf[0]),
        ):
            if copy:
                found.append(Ignore(self.held + copy, _COPY, when, equals=original, carried=True))
        return tuple(found)

    def _norm(self, megatron: str, name: str) -> Whole:
        size = ("hidden_size",)
        return Whole(f"{_MTP}{megatron}.weight", (self.held + name,), size, role=Role.NORM)


NUMBERED_ON = Names(
    held=H.replace("{layer}", "{predicting}"),
    left_out=H.replace("{layer}", "{mtp_layer}"),
    embedding_norm="enorm.weight",
    hidden_norm="hnorm.weight",
    projection="eh_proj.weight",
    final_norm="shared_head.norm.weight",
    embedding="embed_tokens.weight",
    head="shared_head.head.weight",
)
"""DeepSeek-V3's: these layers are numbered after all others."""

_COPIED_EMBEDDING = Tied(
    "mtp.embedding.word_embeddings.weight", of=EMBEDDING, when="mtp_layers !tied"
)
"""On the last pipeline stage; where the embedding is tied, the head there is one already."""


def layers(rows: Iterable[Row | Ignore], names: Names = NUMBERED_ON) -> tuple[Row | Ignore, ...]:
    """The rows of MTP layers whose decoder layer has `rows`, and for layers that the model leaves
    out the same tensors, ignored.
    """
    ordinary = [row for row in rows if not isinstance(row, Ignore)]
    held = (*names.own, *(_predicting(row, names) for row in ordinary), names.last)
    tensors = [name for row in held for name in row.hf] + [copy.hf for copy in names.copies]
    # Where checkpoints have at most one such layer, its tensors may have no number.
    left_out = {
        name: name.replace(names.held, names.left_out).replace("{mtp}", "{left_out}")
        for name in tensors
    }
    return (
        _COPIED_EMBEDDING,
        *held,
        *names.copies,
        *(
            Ignore(other, _PREDICTS, when="!mtp_layers" * (other == name), carried=True)
            for name, other in left_out.items()
        ),
    )


def _predicting(row: Row, names: Names) -> Row:
    """The row of the same parameter in an MTP layer."""
    part = cast(RowBase, row).part
    start = names.feed if names.feed and part in (Mlp, Moe) else names.layer or names.held
    return cast(
        Row,
        replace(
            cast(RowBase, row),
            megatron=row.megatron.replace(M, _MTP + "transformer_layer."),
            hf=tuple(name.replace(H, start) for name in row.hf),
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
