"""Checkpoints with a scalar head, and what transformers' own classes make of rows with it: each row
alone, without padding.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from megatron_policy.batch import BatchedDataDict
from tests.checkpoints import hf_config

CLASSES = {
    "bradley_terry": AutoModelForSequenceClassification,
    "regression": AutoModelForTokenClassification,
}
"""By `reward_model_type`."""


def load(kind: str, path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of the checkpoint with a head of one label, without dropout before it."""
    config = hf_config(path)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    model = CLASSES[kind].from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


def make(kind: str, source: Path, target: Path, seed: int = 3) -> Path:
    """A checkpoint of that kind with the weights of the language model `source` and a head that is
    drawn at random.
    """
    model = load(kind, source)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.5)
    model.save_pretrained(target)
    return target


def values(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    """`[B, S]`, differentiable: the head's number of the tokens up to each position, 0 beyond the
    end of a row.
    """
    found = []
    width = data["input_ids"].size(1)
    for tokens_S, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        hidden = model.model(tokens_S[None, :length]).last_hidden_state
        values_S = model.score(hidden)[0, :, 0]
        found.append(torch.nn.functional.pad(values_S, (0, width - length)))
    return torch.stack(found)


def scores(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    """`[B]`: what transformers' sequence classification gives for each row."""
    rows = zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
    return torch.stack([model(tokens_S[None, :length]).logits[0, 0] for tokens_S, length in rows])
