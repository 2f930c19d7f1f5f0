"""A head that gives one number for each token, in place of a language model's: its rows, and what a
checkpoint has of it.

Hugging Face has two classes with such a head, both with one label: `...ForSequenceClassification`,
whose output is the number at a row's last token, and `...ForTokenClassification`, whose output is
all numbers. The checkpoint of a language model has neither, so the head starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import Ignore, Role, Row, Whole
from megatron_policy.errors import ConversionError

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
_HEAD = "output_layer."
_WEIGHT, _BIAS = "score.weight", "score.bias"
TENSORS = (_WEIGHT, _BIAS)
"""What a checkpoint calls the tensors of a head."""
FIELDS = ("architectures", "id2label", "label2id")
"""The fields of config.json that say of a new head what an export has of it."""
_ROWS = (
    Whole(_HEAD + "weight", (_WEIGHT,), (1, "hidden_size")),
    Whole(_HEAD + "bias", (_BIAS,), (1,), when="head.per_token", role=Role.BIAS),
)
_UNUSED = "the head of a language model, in whose place this model gives one number for each token"
_DEFAULT_STD = 0.02
"""Of transformers' configs."""


@dataclass(frozen=True)
class HeadSource:
    """The model's scalar head, if it has one, and what of it the checkpoint lacks.

    `fresh` are the names of missing tensors with the standard deviation of the normal distribution
    that they are drawn from, 0 for zeros. `fields` are those of config.json that an export needs.
    """

    head: ScalarHead | None
    fresh: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


def find_head(
    fields: Fields, names: Sequence[str], classes: tuple[str, str], wanted: ScalarHead | None
) -> HeadSource:
    """How a checkpoint whose config.json has `names` as its classes gives the head `wanted`; if
    that is None, the head that the checkpoint itself has. `classes` are those of its family.

    ConversionError if it has a part that `wanted` lacks.
    """
    sequence, token = classes
    scalar = sequence in names or token in names
    own = ScalarHead(per_token=token in names) if scalar else None
    if own is not None:
        fields.ignore("classifier_dropout", "no dropout is applied before the head")
        fields.ignore("problem_type", "the loss says what the head is trained for")
        fields.expect("token_classification_bias", (True,), "the head for each token has a bias")
    if wanted is None or wanted == own:
        return HeadSource(own)
    if own is not None and own.per_token:
        raise ConversionError(
            f"the checkpoint is of a {token}, whose {_BIAS} a {sequence} does not have: set "
            "policy.reward_model_cfg.reward_model_type to regression"
        )
    std = fields.take("initializer_range", _DEFAULT_STD)
    if not isinstance(std, int | float) or not 0 <= std < float("inf"):
        fields.refuse("initializer_range", std, "must be a number, 0 or more")
    fresh = {} if own is not None else {_WEIGHT: float(std)}
    if wanted.per_token:
        fresh[_BIAS] = 0.0
    name = token if wanted.per_token else sequence
    values: tuple[Any, ...] = [name], {"0": "LABEL_0"}, {"LABEL_0": 0}
    return HeadSource(wanted, fresh, dict(zip(FIELDS, values, strict=True)))


def put_head(rows: Iterable[Row | Ignore]) -> tuple[Row | Ignore, ...]:
    """A family's rows with those of a scalar head in place of the language model's head. Layers for
    multi-token prediction, which need the latter, are left out of exports too.
    """
    kept: list[Row | Ignore] = []
    unused: dict[str, Ignore] = {}
    for row in rows:
        if isinstance(row, Ignore):
            kept.append(replace(row, equals="", carried=False))
        elif not row.megatron.startswith(_HEAD):
            kept.append(row)
        elif row.owns:
            unused |= {name: Ignore(name, _UNUSED) for name in row.hf}
    return (*kept, *unused.values(), *_ROWS)
