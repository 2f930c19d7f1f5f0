"""Weight decay: which weights of every family have it, decided by the Hugging Face module that owns
them. And parameters in groups: frozen, or with a learning rate and a weight decay of their own, as
torch's AdamW trains transformers' model with the same groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.rows import TowerQkv
from megatron_policy.engines.hugging_face.module import sources_of
from megatron_policy.engines.megatron import optimizer
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, layout
from tests.dist.resuming import paths, replaced, resumed
from tests.dist.test_export import tensors_of
from tests.exact import assert_equal
from tests.families import SAMPLES
from tests.pure.test_table import switches

VOCAB = 131
STRONG = 0.3
DATA = oracle.make_batch(3 * GLOBAL_BATCH, LENGTH, VOCAB)
"""Of three steps."""
DECAYED = {
    "optimizer": {"weight_decay": STRONG},
    "scheduler": {"start_weight_decay": STRONG, "end_weight_decay": STRONG},
}
SMALL = {"hidden": 32, "heads": 4, "groups": 2, "layers": 2, "ffn": 40, "vocab": VOCAB}
SHARDED = {"optimizer": DECAYED["optimizer"] | {"use_distributed_optimizer": True}}
TRAINED = {
    "one process": (1, {}),
    "TP2": (2, LAYOUTS["TP2"].megatron),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron),
    "PP2": (2, LAYOUTS["PP2"].megatron),
    "DP2": (2, {}),
    "DP2 distributed optimizer": (2, layout(2).megatron | SHARDED),
    "TP2 distributed optimizer": (2, LAYOUTS["TP2"].megatron | SHARDED),
}


class Nothing:
    """A loss whose gradient is zero everywhere."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs) -> Any:
        return next_token_logprobs.sum() * 0.0, {}


def step_without_gradient(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        policy.train(oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB), Nothing(), mbs=GLOBAL_BATCH)
        policy.export_hf(path)


@pytest.mark.parametrize("family", SAMPLES)
def test_a_step_without_gradient_shrinks_just_the_matrices_of_every_family(
    ranks, checkpoint, tmp_path, family: str
) -> None:
    path = checkpoint(family, **SMALL, **switches(family))
    ranks.run(1, step_without_gradient, policy_config(path, DECAYED), tmp_path / "stepped")
    model = oracle.load_hf(path)
    before, after = tensors_of(path), tensors_of(tmp_path / "stepped")
    shrunk = {name: not torch.equal(after[name], tensor) for name, tensor in before.items()}
    prefix = "model." if hasattr(model, "model") else ""
    holders = {
        name: prefix + entry.megatron.removeprefix(PARAMETERS)
        for entry in open_model(path).table.entries
        if isinstance(entry.row, TowerQkv)
        for name in entry.hf
    }
    others = [name for name in before if name not in holders]
    for holder, source in sources_of(model, others, turned=False).items():
        holders |= {name: holder for names in source.names for name in names}
    assert shrunk == {
        name: oracle.decays(model.get_submodule(owner), parameter)
        for name, holder in holders.items()
        for owner, _, parameter in [holder.rpartition(".")]
    }
    for name, tensor in before.items():
        factor = 1.0 - oracle.LR * STRONG if shrunk[name] else 1.0
        torch.testing.assert_close(after[name], tensor * factor, rtol=1e-6, atol=0)


def train(config: dict[str, Any], root: Path | None = None) -> dict[str, Any]:
    """What three steps come to; with `root` the last goes on from a checkpoint of the others."""
    with open_policy(config, init_reference_model=False) as policy:
        batches = own_steps(policy, DATA)
        kept = batches[-1:] if root else []
        now = batches[: len(batches) - len(kept)]
        steps = [policy.train(batch, LOSSES["token"](), mbs=1) for batch in now]
        if root is None:
            return seen_of(policy, steps)
        policy.save_checkpoint(**paths(root))
    with resumed(config, root, init_reference_model=False) as policy:
        steps += [policy.train(batch, LOSSES["token"](), mbs=1) for batch in kept]
        return seen_of(policy, steps)


def seen_of(policy: MegatronPolicy, steps: list[Any]) -> dict[str, Any]:
    weights = {name: tensor.detach().clone() for name, tensor in policy.export()}
    read = policy.logprobs(BatchedDataDict({"input_ids": DATA["input_ids"]}))
    return {"steps": steps, "weights": weights, "logprobs": read}


def assert_trained(hf: oracle.Learned, results: list[dict[str, Any]]) -> None:
    read = hf.read(partial(oracle.hf_logprobs, tokens=DATA["input_ids"]))
    for seen in results:
        hf.assert_same_steps(seen["steps"])
        hf.assert_same_weights(seen["weights"])
        assert_equal("logprobs after training", seen["logprobs"][:, 1:], read)


LEARNING = [("cohere", name) for name in TRAINED]
LEARNING += [("apertus", "TP2 distributed optimizer"), ("apertus", "TP2+SP")]


@pytest.mark.parametrize(("family", "name"), LEARNING)
def test_norms_of_each_head_and_activations_learn_like_transformers_under_strong_decay(
    ranks, checkpoint, family: str, name: str
) -> None:
    path = checkpoint(family, **SMALL, **switches(family))
    hf = oracle.Learned.of(path, DATA, GLOBAL_BATCH, oracle.token_level, weight_decay=STRONG)
    world, megatron = TRAINED[name]
    results = ranks.run(world, train, policy_config(path, DECAYED | megatron))
    assert results[0]["weights"].keys() >= hf.exact.weights.keys()
    assert_trained(hf, results)


def optimizer_state(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """This rank's part of it by parameter, and how much of its weight decay each has."""
    trainable = policy._session.trainable
    names = {parameter.data_ptr(): name for name, parameter in policy.named_parameters()}
    found = {
        f"{names[each.parameter.data_ptr()]} {each.kind}": each.tensor.clone()
        for each in trainable.state.tensors()
    }
    groups = [
        (group["wd_mult"], len(group["params"])) for group in trainable.optimizer.param_groups
    ]
    return found | {"groups": torch.tensor(groups)}


def save_in_groups_of_megatron_core(config: dict[str, Any], root: Path) -> dict[str, torch.Tensor]:
    own = replaced(optimizer, "_find_overrides", lambda _: lambda *given: None)
    with own, open_policy(config, init_reference_model=False) as policy:
        for batch in own_steps(policy, DATA)[:2]:
            policy.train(batch, LOSSES["token"](), mbs=1)
        policy.save_checkpoint(**paths(root))
        return optimizer_state(policy)


def load(config: dict[str, Any], root: Path) -> dict[str, torch.Tensor]:
    with resumed(config, root, init_reference_model=False) as policy:
        seen = optimizer_state(policy)
        policy.train(own_steps(policy, DATA)[0], LOSSES["token"](), mbs=1)
        return seen | {"steps": torch.tensor(policy.steps)}


@pytest.mark.parametrize("name", ["one process", "TP2", "DP2 distributed optimizer"])
def test_a_checkpoint_of_an_optimizer_in_other_groups_is_loaded_parameter_by_parameter(
    ranks, checkpoint, tmp_path, name: str
) -> None:
    world, megatron = TRAINED[name]
    config = policy_config(checkpoint("cohere", **SMALL, use_qk_norm=True), megatron)
    saved = ranks.run(world, save_in_groups_of_megatron_core, config, tmp_path)
    for before, after in zip(saved, ranks.run(world, load, config, tmp_path), strict=True):
        assert after.pop("steps") == 3
        assert not torch.equal(before.pop("groups"), after.pop("groups"))
        assert before.keys() == after.keys()
        assert [key for key in before if not torch.equal(before[key], after[key])] == []


HIGH = 5 * oracle.LR
GROUPS = [
    {"names": ["model.embed_tokens.*", "model.layers.[01].*"], "freeze": True},
    {"roles": ["norm"], "weight_decay": STRONG},
    {"names": ["model.layers.2.*"], "roles": ["linear", "expert"], "lr": HIGH},
]
OF_GROUPS = {"optimizer": {"param_groups": GROUPS}}
SHARDED_GROUPS = {"optimizer": OF_GROUPS["optimizer"] | {"use_distributed_optimizer": True}}
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
RECOMPUTED |= {"recompute_method": "uniform", "recompute_num_layers": 1}
GROUPED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, OF_GROUPS),
    "one process, recomputed": (1, OF_GROUPS | RECOMPUTED),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron | OF_GROUPS),
    # The first stage trains nothing.
    "PP2": (2, LAYOUTS["PP2"].megatron | OF_GROUPS),
    "PP2, recomputed": (2, LAYOUTS["PP2"].megatron | OF_GROUPS | RECOMPUTED),
    "PP2 distributed optimizer": (2, LAYOUTS["PP2"].megatron | SHARDED_GROUPS),
    "DP2 distributed optimizer": (2, layout(2).megatron | SHARDED_GROUPS),
}


def own(name: str) -> Mapping[str, float] | None:
    """The same groups, as the oracle has them."""
    if name.startswith(("model.embed_tokens.", "model.layers.0.", "model.layers.1.")):
        return None
    if "norm" in name:
        return {"weight_decay": STRONG}
    linear = name.startswith("model.layers.2.") and not name.endswith(".bias")
    return {"lr": HIGH} if linear and ".mlp.gate." not in name else {}


CASES = [(family, name, False) for family in ("qwen3", "qwen3_moe") for name in GROUPED]
RESUMED = ("qwen2", "TP2+SP", True), ("qwen2", "PP2 distributed optimizer", True)
DAILY = (CASES[0], RESUMED[0])


@pytest.mark.parametrize(
    ("family", "name", "in_two_runs"),
    [pytest.param(*c, marks=[pytest.mark.daily] * (c in DAILY)) for c in (*CASES, *RESUMED)],
)
def test_groups_are_trained_like_transformers_by_torchs_optimizer(
    ranks, checkpoint, tmp_path, family: str, name: str, in_two_runs: bool
) -> None:
    path = checkpoint(family, **SMALL | {"layers": 4})
    hf = oracle.Learned.of(path, DATA, GLOBAL_BATCH, oracle.token_level, own=own)
    world, megatron = GROUPED[name]
    root, before = tmp_path if in_two_runs else None, tensors_of(path)
    results = ranks.run(world, train, policy_config(path, megatron), root)
    assert_trained(hf, results)
    for seen in results:
        for weight, tensor in seen["weights"].items():
            assert own(weight) is not None or torch.equal(tensor, before[weight]), weight
