"""A rank's policy answers to the driver's names, with what the driver returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB

DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)


def compare(config: dict[str, Any]) -> None:
    tokens = BatchedDataDict({key: DATA[key] for key in ("input_ids", "input_lengths")})
    with open_policy(config) as policy:
        policy.prepare_for_training("whatever", a_host="passes")
        policy.begin_train_step(LOSSES["token"](), mbs=1)
        policy.train_microbatch(DATA)
        policy.abort_train_step()
        policy.begin_train_step(LOSSES["token"](), mbs=1)
        policy.train_microbatch(DATA)
        assert policy.finish_train_step()["step"] == policy.steps == 1
        states = {}
        for name in ("offload_before_refit", "offload_after_refit", "prepare_for_generation"):
            getattr(policy, name)()
            states[name] = policy.memory.state.name
        policy.prepare_for_lp_inference(keep_train_buffers=True)
        policy.finish_training()
        states["finish_training"] = policy.memory.state.name
        policy.finish_inference()
        states["finish_inference"] = policy.memory.state.name
        assert states == {
            "offload_before_refit": "refit",
            "offload_after_refit": "idle",
            "prepare_for_generation": "logprob",
            "finish_training": "logprob",
            "finish_inference": "idle",
        }
        policy.prepare_for_lp_inference()
        own = policy.logprobs(tokens)
        for found, wanted in (
            (policy.get_logprobs(tokens, 2), {"logprobs": own}),
            (policy.get_entropy(tokens), {"entropy": policy.entropy(tokens)}),
            (
                policy.get_topk_logits(tokens, 3),
                dict(
                    zip(("topk_logits", "topk_indices"), policy.topk_logits(tokens, 3), strict=True)
                ),
            ),
        ):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value)
        reference = policy.get_reference_policy_logprobs(tokens)["reference_logprobs"]
        with policy.use_reference_model():
            assert torch.equal(policy.logprobs(tokens), reference)
        assert not torch.equal(own, reference)
        # Arrays, and a mask in place of lengths.
        mask = torch.arange(LENGTH) < DATA["input_lengths"].unsqueeze(1)
        arrays = {"input_ids": DATA["input_ids"].numpy(), "attention_mask": mask.numpy()}
        assert torch.equal(policy.logprobs(arrays), own)
        hot = np.full(GLOBAL_BATCH, 0.7)
        assert torch.equal(
            policy.logprobs(arrays, temperature=hot), policy.logprobs(tokens, temperature=0.7)
        )


def test_a_rank_answers_to_the_drivers_names(ranks, checkpoint) -> None:
    ranks.run(1, compare, policy_config(checkpoint("qwen2", **SIZES), {}))
