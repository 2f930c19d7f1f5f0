"""Generation by the policy itself, for a driver that asks one worker of several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.hosts.nemo_rl.config import refuse_lone_generation
from megatron_policy.hosts.nemo_rl.worker import NemoRLWorker
from tests.dist.cases import policy_config
from tests.dist.layouts import SIZES
from tests.hosts.fake_host import PARTS, HostBatch, host_with
from tests.hosts.test_worker import ROWS, TOKENIZER, batch
from tests.losses import SequenceNLL
from tests.ranks import RankPool

TRAINED = ("input_ids", "input_lengths", "token_mask", "sample_mask")
LONE_GENERATION = {
    "nemo_rl.models.generation.megatron.megatron_generation": {"MegatronGeneration": object}
}


def alone(path: Path) -> dict[str, Any]:
    """What the first of two whole workers generates, called as newer hosts call it."""
    overlapped = {"overlap_param_gather": True, "overlap_grad_reduce": True}
    megatron = {
        "optimizer": {"use_distributed_optimizer": True, "lr": 1e-2},
        "distributed_data_parallel_config": overlapped,
    }
    generation = {"max_new_tokens": 4}
    data, found = batch(), []
    prompts = {"input_ids": data["input_ids"][:3, :4], "input_lengths": torch.full((3,), 4)}
    with host_with(PARTS | LONE_GENERATION):
        worker = NemoRLWorker(policy_config(path, megatron, generation=generation), TOKENIZER)
        for _ in range(2):  # before the first step and after it
            worker.prepare_for_lp_inference()
            worker.prepare_for_generation()
            if worker.policy.rank == 0:
                found.append(list(worker.generate_async(data=prompts, greedy=True)))
            worker.finish_generation(release_gpu=True)
            worker.prepare_for_training()
            own = BatchedDataDict({key: data[key][: ROWS // 2] for key in TRAINED})
            worker.train(data=own, loss_fn=SequenceNLL(), gbs=ROWS, mbs=2)
        worker.prepare_for_lp_inference()
        whole = worker.generate(data=prompts, greedy=True)
        worker.shutdown()
    return {"found": found, "last": whole["output_ids"]}


@pytest.mark.nightly
def test_a_worker_that_holds_the_whole_model_generates_while_the_others_wait(
    ranks: RankPool, checkpoint: Callable[..., Path]
) -> None:
    first, second = ranks.run(2, alone, checkpoint("qwen2", **SIZES))
    assert not second["found"] and torch.equal(first["last"], second["last"])
    for found in first["found"]:
        assert [row for row, _ in found] == [0, 1, 2]
        for _, one in found:
            assert type(one) is HostBatch and one["generation_lengths"].tolist() == [4]
            assert one["output_ids"].shape == one["logprobs"].shape == (1, 8)
    before, after = ([one["output_ids"] for _, one in found] for found in first["found"])
    assert not torch.equal(torch.cat(before), torch.cat(after))


@pytest.mark.parametrize(
    ("sizes", "world", "refused"),
    [
        ({}, 2, False),
        ({"tensor_model_parallel_size": 2}, 2, True),
        ({"context_parallel_size": 2}, 4, True),
        ({"expert_model_parallel_size": 2}, 2, True),
    ],
)
def test_a_worker_that_holds_a_part_of_the_model_is_not_asked_to_generate_alone(
    sizes: dict[str, int], world: int, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    topology = topology_of(PolicyConfig.parse(policy_config("/nowhere", sizes)), world)
    with host_with({}):
        refuse_lone_generation(topology)  # that host calls all workers
    with host_with(LONE_GENERATION):
        if not refused:
            assert not caplog.records
            refuse_lone_generation(topology)
            assert "gives all prompts to the first of 2 workers" in caplog.text
            return
        with pytest.raises(NotImplementedError, match=r"Set all parallel sizes .* to 1"):
            refuse_lone_generation(topology)
