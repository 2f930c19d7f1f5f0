"""What tests of the stand-in's driver share: its modules, its model and its configuration."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.dist.cases import policy_config

VOCAB, LENGTH, ROWS, GBS = 251, 12, 8, 4
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
MODULES = {
    "cluster": "distributed.virtual_cluster",
    "data": "distributed.batched_data_dict",
    "policy": "models.policy.lm_policy",
    "losses": "losses",
}


def standin_modules() -> SimpleNamespace:
    found = {key: importlib.import_module(f"nemo_rl.{name}") for key, name in MODULES.items()}
    return SimpleNamespace(**found)


def config_of(path: Path, megatron: dict[str, Any], *, packing: bool = False) -> dict[str, Any]:
    return policy_config(
        path,
        megatron,
        train_global_batch_size=GBS,
        train_micro_batch_size=2,
        make_sequence_length_divisible_by=4,
        sequence_packing={
            "enabled": packing,
            "algorithm": "modified_first_fit_decreasing",
            "train_mb_tokens": 2 * LENGTH,
            "logprob_mb_tokens": 3 * LENGTH,
        },
    )


def layout_of(tp: int = 1, pp: int = 1) -> dict[str, int]:
    """The sizes that the host asks for."""
    sizes = {"tensor_model": tp, "pipeline_model": pp, "context": 1}
    return {f"{kind}_parallel_size": size for kind, size in sizes.items()}
