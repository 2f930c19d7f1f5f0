"""What a configuration leads to that its author may not expect is said, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.config.model_table import bind_model
from megatron_policy.config.notes import notes_of

POSITIONS = 64


def section(checkpoint: Any, family: str = "qwen2", **keys: Any) -> dict[str, Any]:
    return {
        "model_name": str(checkpoint(family)),
        "train_global_batch_size": 2,
        "train_micro_batch_size": 1,
        "megatron_cfg": {"enabled": True},
        **keys,
    }


def notes(checkpoint: Any, family: str = "qwen2", **keys: Any) -> list[str]:
    keys = {"max_total_sequence_length": POSITIONS, **keys}
    config = PolicyConfig.parse(section(checkpoint, family, **keys))
    return list(notes_of(config, bind_model(config)))


def megatron(**keys: Any) -> dict[str, Any]:
    return {"megatron_cfg": {"enabled": True, **keys}}


WARM_UP = {"lr_warmup_iters": 13}
PACKED = {"enabled": True, "train_mb_tokens": POSITIONS, "logprob_mb_tokens": 40}
EXPERTS = {"moe_router_dtype": "fp64", "freeze_moe_router": True, "moe_permute_fusion": False}

SAID: dict[str, dict[str, Any]] = {
    "rows of more than 512 tokens are refused: the model has no more positions": {
        "max_total_sequence_length": 4096
    },
    "scoring rows of more than 40 tokens is refused: no microbatch of sequence_packing.": {
        "sequence_packing": PACKED
    },
    "training ends within the warm-up of the learning rate, which takes 13 of 10": megatron(
        train_iters=10, scheduler=WARM_UP
    ),
    "since the model has no experts: freeze_moe_router, moe_router_dtype": megatron(**EXPERTS),
    "since the model has no such part: freeze_audio_tower": {
        "megatron_cfg": {"enabled": False},
        "dtensor_cfg": {
            "enabled": True,
            "automodel_kwargs": {
                "freeze_config": {"freeze_vision_tower": False, "freeze_audio_tower": True}
            },
        },
    },
}


@pytest.mark.parametrize("words", SAID)
def test_what_may_not_be_expected_is_said(checkpoint: Any, words: str) -> None:
    (note,) = notes(checkpoint, **SAID[words])
    assert words in note


def test_what_is_meant_is_not(checkpoint: Any) -> None:
    assert notes(checkpoint) == []
    assert notes(checkpoint, **megatron(train_iters=14, scheduler=WARM_UP)) == []
    assert notes(checkpoint, "mixtral", **megatron(**EXPERTS)) == []
    whole = {name: value for name, value in PACKED.items() if name != "logprob_mb_tokens"}
    assert notes(checkpoint, sequence_packing=whole) == []


def test_inspect_config_says_them(checkpoint: Any, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(section(checkpoint, **megatron(**EXPERTS))))
    said = CliRunner().invoke(app, ["inspect-config", str(file)]).stdout
    assert "since the model has no experts:" in " ".join(said.split())
    found = json.loads(CliRunner().invoke(app, ["inspect-config", str(file), "--json"]).stdout)
    assert len(found["notes"]) == 2
