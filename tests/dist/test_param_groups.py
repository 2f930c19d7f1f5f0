"""Parameters in groups: frozen, or with a learning rate and a weight decay of their own, as torch's
AdamW trains transformers' model with the same groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, layout
from tests.dist.resuming import paths, resumed
from tests.dist.test_export import tensors_of
from tests.exact import assert_equal

VOCAB, STEPS = 131, 3
SMALL = {"hidden": 32, "heads": 4, "groups": 2, "layers": 4, "ffn": 40, "vocab": VOCAB}
HIGH, DECAY = 5 * oracle.LR, 0.3
GROUPS = [
    {"names": ["model.embed_tokens.*", "model.layers.[01].*"], "freeze": True},
    {"roles": ["norm"], "weight_decay": DECAY},
    {"names": ["model.layers.2.*"], "roles": ["linear", "expert"], "lr": HIGH},
]
SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
RECOMPUTED = {
    "activation_checkpointing": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
TRAINED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "one process, recomputed": (1, RECOMPUTED),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron),
    # The first stage trains nothing.
    "PP2": (2, LAYOUTS["PP2"].megatron),
    "PP2, recomputed": (2, LAYOUTS["PP2"].megatron | RECOMPUTED),
    "PP2 distributed optimizer": (2, LAYOUTS["PP2"].megatron | SHARDED),
    "DP2 distributed optimizer": (2, layout(2).megatron | SHARDED),
}


def own(name: str) -> Mapping[str, float] | None:
    """The same groups, as the oracle has them."""
    if name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1.")):
        return None
    if "norm" in name:
        return {"weight_decay": DECAY}
    linear = name.startswith("model.layers.2.") and not name.endswith(".bias")
    return {"lr": HIGH} if linear and ".mlp.gate." not in name else {}


def grouped(megatron: dict[str, Any], groups: Any = GROUPS) -> dict[str, Any]:
    optimizer = {**megatron.get("optimizer", {}), "param_groups": groups}
    return {**megatron, "optimizer": optimizer}


def train(config: dict[str, Any], data: BatchedDataDict, root: Path | None = None) -> Any:
    """The steps' results, weights by their Hugging Face names, and log-probabilities after them;
    `root` is where a checkpoint is saved after the last but one step, and gone on from.
    """
    with open_policy(config, init_reference_model=False) as policy:
        batches = own_steps(policy, data)
        if root is not None:
            *batches, last = batches
        steps = [policy.train(batch, LOSSES["token"](), mbs=1) for batch in batches]
        if root is None:
            return seen_of(policy, steps, data)
        policy.save_checkpoint(**paths(root))
    with resumed(config, root, init_reference_model=False) as policy:
        steps.append(policy.train(last, LOSSES["token"](), mbs=1))
        return seen_of(policy, steps, data)


def seen_of(policy: Any, steps: list[Any], data: BatchedDataDict) -> dict[str, Any]:
    weights = {name: tensor.detach().clone() for name, tensor in policy.export()}
    read = policy.logprobs(BatchedDataDict({"input_ids": data["input_ids"]}))
    return {"steps": steps, "weights": weights, "logprobs": read}


CASES = [(family, name) for family in ("qwen3", "qwen3_moe") for name in TRAINED]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_groups_are_trained_like_transformers_by_torchs_optimizer(
    ranks, checkpoint, family: str, name: str
) -> None:
    assert_trained(ranks, checkpoint, family, name, None)


@pytest.mark.parametrize("name", ["TP2+SP", "PP2 distributed optimizer"])
def test_groups_go_on_from_a_checkpoint(ranks, checkpoint, tmp_path, name: str) -> None:
    assert_trained(ranks, checkpoint, "qwen2", name, tmp_path)


def assert_trained(ranks, checkpoint, family: str, name: str, root: Path | None) -> None:
    path = checkpoint(family, **SMALL)
    data = oracle.make_batch(STEPS * GLOBAL_BATCH, LENGTH, VOCAB)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level, own=own)
    expected = hf.read(partial(oracle.hf_logprobs, tokens=data["input_ids"]))
    world, megatron = TRAINED[name]
    config = policy_config(path, grouped(megatron))
    before = tensors_of(path)
    for seen in ranks.run(world, train, config, data, root):
        hf.assert_same_steps(seen["steps"])
        for weight, tensor in seen["weights"].items():
            if own(weight) is None:
                assert torch.equal(tensor, before[weight]), weight
            if weight in hf.exact.weights:  # transformers stacks experts
                hf.assert_same_weight(tensor, hf.exact.weights[weight], weight)
        assert_equal("logprobs after training", seen["logprobs"][:, 1:], expected)
