"""PPO's value model under NeMo RL: values of the tokens before each position, and their losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.value_worker import NemoRLValueWorker, ValueLoss
from megatron_policy.interfaces import LossInputType, LossType
from tests import oracle, scalar_oracle
from tests.dist.cases import GLOBAL_BATCH, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, VOCAB
from tests.dist.test_scalar_heads import expected_of
from tests.exact import Exact, assert_equal
from tests.losses import SequenceNLL

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}}


class SquaredError:
    """As the host's loss of values is called: `logits` are values [B, S]."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGIT

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks) -> Any:
        assert logits.shape == data["returns"].shape and not logits[:, 0].any()
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        loss = 0.5 * ((logits - data["returns"]) ** 2 * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "sum": (logits.detach() * mask).sum().item()}


def batch() -> BatchedDataDict:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    random = torch.Generator().manual_seed(1)
    data["returns"] = torch.randn(data["input_ids"].shape, generator=random)
    return data


def work(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    prepare_platform()
    join_process_group(60.0)
    worker = NemoRLValueWorker(config, None)
    try:
        worker.prepare_for_inference()
        before = worker.get_values(data)["values"]
        worker.finish_inference()
        worker.prepare_for_training()
        found = worker.train(data, SquaredError(), gbs=GLOBAL_BATCH, mbs=1)
        again = worker.train(data, SquaredError(), eval_mode=True, gbs=GLOBAL_BATCH, mbs=1)
        worker.finish_training()
        return {"before": before, "trained": found, "again": again}
    finally:
        worker.shutdown()


def of_tokens_before(model: Any, data: BatchedDataDict) -> torch.Tensor:
    values = scalar_oracle.values(model, data)
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


@pytest.mark.parametrize("layout", ["one process", "TP2+SP"])
def test_a_value_worker_gives_and_trains_values_of_the_tokens_before(
    ranks, checkpoints, tmp_path, layout: str
) -> None:
    data = batch()
    path = scalar_oracle.make("regression", checkpoints[True], tmp_path / "value")
    exact: Exact = expected_of(path, "regression", data, of_tokens_before)
    mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    # The host's own configurations for Megatron switch reward models off.
    config = policy_config(
        path, LAYOUTS[layout].megatron, lr=1e-4, reward_model_cfg={"enabled": False}, **PACKED
    )
    for seen in ranks.run(LAYOUTS[layout].world, work, config, data):
        assert_equal("values before each token", seen["before"], exact)
        total = sum(seen["trained"]["all_mb_metrics"]["sum"])
        assert total == pytest.approx(float((exact.value * mask).sum()), rel=1e-4)
        assert float(seen["again"]["global_loss"]) < float(seen["trained"]["global_loss"])


def test_a_loss_of_log_probabilities_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="SequenceNLL is no loss of a value model"):
        ValueLoss(SequenceNLL())
