"""The driver's policy with a scalar head: values and scores in the caller's order, and training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import ConfigError, LossError
from tests import scalar_oracle
from tests.dist.test_scalar_heads import expected_of
from tests.dist.test_scalar_training import ClippedValues
from tests.exact import Exact, assert_equal
from tests.losses import TokenNLL
from tests.ray.policies import DP2, GBS, VOCAB, batch, config_of, opened


def test_a_driver_has_values_and_scores_in_the_callers_order_and_trains_them(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = scalar_oracle.make("regression", checkpoint("qwen2", vocab=VOCAB), tmp_path / "model")
    config = config_of(checkpoint, DP2, path) | {
        "reward_model_cfg": {"enabled": True, "reward_model_type": "regression"},
        "sequence_packing": {"enabled": True, "train_mb_tokens": 24},
    }
    data = batch()
    values = expected_of(path, "regression", data, scalar_oracle.values)
    last = data["input_lengths"].unsqueeze(1) - 1
    with opened(config, init_reference_model=False) as policy:
        assert_equal("values", policy.get_values(data)["values"], values)
        scores = Exact(values.value.gather(1, last).squeeze(1), values.rounding)
        assert_equal("scores", policy.score(data)["scores"], scores)
        with pytest.raises(LossError, match="has a scalar head"):
            policy.train(data, TokenNLL())
        training = BatchedDataDict(
            data | {name: torch.ones(data["input_ids"].shape) for name in ("returns", "old_values")}
        )
        found = policy.train(training, ClippedValues(), gbs=GBS)
        assert found["loss"].isfinite().all() and float(found["grad_norm"]) > 0
        with pytest.raises(ConfigError, match="has no vocabulary"):
            policy.get_logprobs(data)
