"""Weights of layers for multi-token prediction on their way out: exports, refits, checkpoints, and
steps in parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.convert import verify
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import OVERLAPPED, layout
from tests.dist.test_export import assert_same_tensors, export, tensors_of
from tests.losses import SequenceNLL
from tests.mtp_checkpoints import COPIES, add_mtp_layers

VOCAB, LENGTH = 200, 24
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
TP2PP2 = layout(4, tp=2, pp=2, sequence_parallel=True, **OVERLAPPED)
PP2 = layout(2, pp=2)


def made(path: Path, family: str = "deepseek_v3", layers: int = 1, **more: Any) -> Path:
    return add_mtp_layers(make_checkpoint(path, family, **SMALL | more), layers)


def batch() -> BatchedDataDict:
    return oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)


def step(policy: MegatronPolicy) -> dict[str, Any]:
    return policy.train(own_share(policy, batch()), LOSSES["token"](), mbs=2)


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("deepseek_v3", {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
        ("glm4_moe", {}),
        ("mimo", {}),
    ],
)
def test_held_and_left_out_layers_come_back_bit_equal(ranks, tmp_path, family, experts) -> None:
    source = made(tmp_path / "source", family, layers=2, dtype="bfloat16")
    config = policy_config(source, TP2PP2.megatron | MTP | experts, precision="bfloat16")
    ranks.run(4, export, config, tmp_path / "exported", {"max_shard_bytes": 200_000})
    assert_same_tensors(tmp_path / "exported", source)


def train_and_send(config: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """What a refit sends after a step, by name; an export of the same goes to `path`."""
    with open_policy(config, init_reference_model=False) as policy:
        step(policy)
        policy.export_hf(path)
        names = set(policy.exporter.plan().info())
        sent = {name: tensor.clone() for name, tensor in policy.export()}
        assert sent.keys() == names
        return sent if policy.rank == 0 else {}


def test_a_refit_sends_trained_layers_with_their_copies_and_none_that_are_left_out(
    ranks, tmp_path
) -> None:
    source = made(tmp_path / "source", layers=2)
    config = policy_config(source, TP2PP2.megatron | MTP)
    sent, *_ = ranks.run(4, train_and_send, config, tmp_path / "exported")
    exported, before = tensors_of(tmp_path / "exported"), tensors_of(source)
    assert exported.keys() == before.keys()
    left_out = {name for name in before if name.startswith("model.layers.5.")}
    assert sent.keys() == before.keys() - left_out
    for name, tensor in exported.items():
        assert torch.equal(tensor, before[name] if name in left_out else sent[name]), name
    for name in ("enorm.weight", "eh_proj.weight", "shared_head.norm.weight"):
        assert not torch.equal(sent[f"model.layers.4.{name}"], before[f"model.layers.4.{name}"])
    for copy, original in COPIES.items():
        assert torch.equal(sent[f"model.layers.4.{copy}"], sent[original])
        assert not torch.equal(sent[original], before[original])


def save(config: dict[str, Any], root: Path) -> dict[str, Any]:
    with open_policy(config, init_reference_model=False) as policy:
        step(policy)
        policy.save_checkpoint(root / "weights", root / "optimizer", hf_export=root / "hf")
        return _next(policy)


def resume(config: dict[str, Any], root: Path) -> dict[str, Any]:
    paths = {"weights_path": root / "weights", "optimizer_path": root / "optimizer"}
    with open_policy(config, init_reference_model=False, **paths) as policy:
        assert policy.steps == 1
        return _next(policy)


def _next(policy: MegatronPolicy) -> dict[str, Any]:
    """What the next step gives, and the weights after it."""
    result = step(policy)
    kept = {name: p.detach().clone() for name, p in policy.named_parameters()}
    return {"norm": result["grad_norm"], "weights": kept}


@pytest.mark.nightly
def test_a_checkpoint_goes_on_bit_for_bit_and_converts_to_what_was_exported(
    ranks, tmp_path
) -> None:
    config = policy_config(made(tmp_path / "source"), PP2.megatron | MTP)
    saved = ranks.run(2, save, config, tmp_path)
    for before, after in zip(saved, ranks.run(2, resume, config, tmp_path), strict=True):
        assert torch.equal(before["norm"], after["norm"])
        assert before["weights"].keys() == after["weights"].keys()
        for name, tensor in before["weights"].items():
            assert torch.equal(tensor, after["weights"][name]), name
    assert any(name.startswith("mtp.embedding.") for name in saved[1]["weights"])
    assert verify(tmp_path / "weights", tmp_path / "hf", config=tmp_path / "source").equal
    # Another layout goes on with the same weights; its sums are rounded in another order.
    alone = ranks.run(1, resume, policy_config(tmp_path / "source", MTP), tmp_path)[0]
    torch.testing.assert_close(alone["norm"], saved[0]["norm"], rtol=1e-4, atol=0)
    without = policy_config(tmp_path / "source", {})
    (message,) = ranks.run(1, load_into_another, without, tmp_path)
    assert "their megatron_cfg.mtp_num_layers or" in message


def load_into_another(config: dict[str, Any], root: Path) -> str:
    with pytest.raises(CheckpointError) as caught, open_policy(config) as policy:
        policy.load_checkpoint(root / "weights", root / "optimizer")
    return str(caught.value)


def in_parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A step taken at once, and one from the same weights in two parts."""
    found = []
    for split in (False, True):
        with open_policy(config, init_reference_model=False) as policy:
            if not split:
                found.append(step(policy))
                continue
            with pytest.raises(ConfigError, match="divided by valid sequences"):
                policy.accumulator.begin(SequenceNLL())
            policy.accumulator.begin(LOSSES["token"](), mbs=2)
            rows = batch()
            for part in (rows.slice(0, 2), rows.slice(2, GLOBAL_BATCH)):
                policy.accumulator.microbatch(part)
            found.append(policy.accumulator.finish())
    return found


def test_a_step_in_parts_is_the_step_taken_at_once(ranks, tmp_path) -> None:
    config = policy_config(made(tmp_path), PP2.megatron | MTP)
    for whole, parts in ranks.run(2, in_parts, config):
        torch.testing.assert_close(parts["grad_norm"], whole["grad_norm"], rtol=1e-5, atol=0)
        torch.testing.assert_close(parts["loss"], whole["loss"], rtol=1e-5, atol=0)
        mtp = [sum(each["microbatch_metrics"]["mtp_1_loss"]) for each in (whole, parts)]
        assert mtp[1] == pytest.approx(mtp[0], rel=1e-5)


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(ConversionError) as caught, open_policy(config):
        pass
    return str(caught.value)


def test_more_layers_than_the_model_has_are_refused_by_the_key_to_change(ranks, tmp_path) -> None:
    config = policy_config(made(tmp_path), {"mtp_num_layers": 2})
    (message,) = ranks.run(1, refused, config)
    assert "mtp_num_layers asks for 2: set it to 1 or less" in message


def score(config: dict[str, Any]) -> torch.Tensor:
    with open_policy(config, init_reference_model=False) as policy:
        return policy.logprobs(BatchedDataDict({"input_ids": batch()["input_ids"]}))


def test_log_probabilities_are_the_same_with_and_without_these_layers(ranks, tmp_path) -> None:
    path = made(tmp_path)
    with_layers, without = (
        ranks.run(1, score, policy_config(path, section))[0] for section in (MTP, {})
    )
    assert torch.equal(with_layers, without)
