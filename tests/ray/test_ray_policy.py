"""The driver's policy over real workers, against the Hugging Face model in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from megatron_policy import MegatronPolicyWorker, Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, ExportError
from megatron_policy.workers import RayVirtualCluster
from tests import oracle
from tests.exact import Exact, assert_equal, load_hf
from tests.losses import TokenNLL
from tests.ray.policies import (
    DP2,
    GBS,
    LENGTH,
    PP2,
    ROWS,
    TOKENIZER,
    TP2,
    VOCAB,
    PolicyMaker,
    batch,
    config_of,
    under_the_reference,
)


@pytest.mark.parametrize("layout", [TP2, PP2, DP2], ids=["tp2", "pp2", "dp2"])
def test_two_workers_do_what_one_process_of_transformers_does(
    make_policy: PolicyMaker,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    layout: dict[str, Any],
) -> None:
    path = checkpoint("qwen2", vocab=VOCAB)
    policy = make_policy(layout)
    data = batch()

    assert_logprobs(policy.get_logprobs(data)["logprobs"], path, data)
    assert_logprobs_of_a_part(policy, path, data)
    assert_topk(policy, path, data)
    assert_greedy_tokens(policy, load_hf(path), data)

    policy.prepare_for_training()
    more = batch(seed=1, rows=GBS)
    everything = BatchedDataDict.from_batches([data, more])
    hf = oracle.Learned.of(path, everything, GBS, oracle.token_level)
    evaluated = policy.train(data, TokenNLL(), eval_mode=True)
    assert evaluated["loss"].shape == (ROWS // GBS,)
    results = policy.train(data, TokenNLL())
    in_parts = train_in_parts(policy, more)
    policy.finish_training()
    assert results["loss"].shape == (2,) and results["grad_norm"].shape == (1,)
    for index, loss in enumerate(results["loss"]):
        hf.assert_same_loss(loss, index)
    hf.assert_same_norm(results["grad_norm"], 1)
    metrics = results["microbatch_metrics"]
    assert len(metrics["loss"]) == ROWS, "microbatches of one row, of all data-parallel ranks"
    hf.assert_same_total(sum(metrics["loss"]) * 2, 0, 1)
    hf.assert_same_loss(in_parts["loss"], 2)
    hf.assert_same_norm(in_parts["grad_norm"], 2)
    hf.assert_same_total(sum(in_parts["microbatch_metrics"]["loss"]), 2)

    reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert_logprobs(reference, path, data)
    policy.export_hf(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    for name, weight in exported.named_parameters():
        hf.assert_same_weight(weight.data, hf.exact.weights[name], name)
    assert_logprobs(policy.get_logprobs(data)["logprobs"], tmp_path / "exported", data)
    assert policy.shutdown()
    assert policy.shutdown()


def train_in_parts(policy: Policy, data: BatchedDataDict) -> dict[str, Any]:
    """One step, after one that is dropped and calls that have to wait; one part is one row, so that
    a data-parallel rank has none.
    """
    with pytest.raises(ConfigError, match=r"call begin_train_step\(\) first"):
        policy.train_microbatch(data)
    policy.begin_train_step(TokenNLL())
    policy.train_microbatch(data.slice(1, 4))
    policy.abort_train_step()
    policy.begin_train_step(TokenNLL())
    with pytest.raises(ConfigError, match=r"nothing to step with: call train_microbatch\(\)"):
        policy.finish_train_step()
    policy.train_microbatch(data.slice(0, 1))
    with pytest.raises(ConfigError, match="a training step is open"):
        policy.finish_training()
    with pytest.raises(BatchError, match="sample_mask"):
        policy.train_microbatch({"input_ids": data["input_ids"]})
    policy.train_microbatch(data.slice(1, 4))
    return policy.finish_train_step()


def assert_logprobs(found: torch.Tensor, path: Path, data: BatchedDataDict) -> None:
    expected = Exact.of(path, partial(oracle.hf_logprobs, tokens=data["input_ids"]))
    assert found.shape == data["input_ids"].shape
    assert not found[:, 0].any()
    inside = torch.arange(1, LENGTH) < data["input_lengths"].unsqueeze(1)
    assert_equal("logprobs", found[:, 1:][inside], expected[inside])


def assert_logprobs_of_a_part(policy: Policy, path: Path, data: BatchedDataDict) -> None:
    """Five rows do not divide over two ranks; the caller must not notice."""
    part = data.slice(0, 5)
    assert_logprobs(policy.get_logprobs(part)["logprobs"], path, part)


def assert_topk(policy: Policy, path: Path, data: BatchedDataDict) -> None:
    found = policy.get_topk_logits(data.slice(0, 3), k=4)
    logits = Exact.of(path, lambda m: m(data["input_ids"][:3]).logits)
    inside = torch.arange(LENGTH) < data["input_lengths"][:3].unsqueeze(1)
    expected = logits.value.topk(4, dim=-1).values[inside]
    assert_equal("logits", found["topk_logits"][inside], replace(logits, value=expected))
    assert torch.equal(logits.value.gather(-1, found["topk_indices"])[inside], expected)


def assert_greedy_tokens(policy: Policy, model: Any, data: BatchedDataDict) -> None:
    """Unequal prompts, more of them than divide; the longest of each rank differ."""
    prompts = data.slice(0, 3)
    found = policy.generate(prompts, greedy=True)
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        tokens = prompts["input_ids"][row, :length]
        with torch.no_grad():
            for _ in range(6):
                following = model(tokens.unsqueeze(0)).logits[0, -1].argmax()
                tokens = torch.cat([tokens, following.view(1)])
        end = int(found["unpadded_sequence_lengths"][row])
        assert found["output_ids"][row, :end].tolist() == tokens.tolist()
        assert int(found["generation_lengths"][row]) == 6
        assert not found["output_ids"][row, end:].any(), "padding is the tokenizer's pad token"


@pytest.fixture(scope="module")
def untrained(checkpoint: Callable[..., Path]) -> Iterator[Policy]:
    """Two data-parallel workers without optimizer, for tests that break nothing."""
    cluster = RayVirtualCluster([2], use_gpus=False)
    policy = Policy(cluster, config_of(checkpoint, DP2), TOKENIZER, init_optimizer=False)
    yield policy
    policy.shutdown()
    cluster.shutdown()


def test_batches_that_do_not_divide_are_refused_and_the_policy_goes_on(untrained: Policy) -> None:
    def evaluate(rows: int, **sizes: int) -> torch.Tensor:
        return untrained.train(batch(rows=rows), TokenNLL(), eval_mode=True, **sizes)["loss"]

    with pytest.raises(ConfigError, match="7 samples, which is not a multiple of gbs=4"):
        evaluate(7)
    with pytest.raises(ConfigError, match="make gbs a multiple of 2"):
        evaluate(8, gbs=3)
    with pytest.raises(ConfigError, match="make gbs a multiple of 8"):
        evaluate(8, mbs=4)
    assert evaluate(8, gbs=8).shape == (1,)


def test_data_that_do_not_fit_are_refused_by_the_callers_row_and_the_policy_goes_on(
    untrained: Policy,
) -> None:
    data = batch(rows=5)
    for ask in (
        untrained.get_logprobs,
        untrained.get_reference_policy_logprobs,
        lambda data: untrained.get_topk_logits(data, k=2),
        lambda data: untrained.train(data, TokenNLL(), eval_mode=True),
        untrained.generate,
    ):
        with pytest.raises(BatchError, match="'input_ids'"):
            ask(BatchedDataDict({"sample_mask": torch.ones(GBS)}))
    too_long = torch.tensor([3, 3, 3, 3, LENGTH + 1])
    with pytest.raises(BatchError, match=f"has {LENGTH + 1} in row 4"):
        untrained.generate({"input_ids": data["input_ids"], "input_lengths": too_long})
    with pytest.raises(BatchError, match="k is 0"):
        untrained.get_topk_logits(data, k=0)
    foreign = data["input_ids"].clone()
    foreign[4, 2] = VOCAB
    with pytest.raises(BatchError, match=f"token {VOCAB} in row 4"):
        untrained.get_logprobs({"input_ids": foreign})
    assert untrained.get_logprobs(data)["logprobs"].shape == (5, LENGTH)


def test_an_export_that_fails_leaves_the_policy_and_the_next_export_works(
    untrained: Policy, tmp_path: Path
) -> None:
    data = batch(rows=2)
    before = untrained.get_logprobs(data)["logprobs"]
    with pytest.raises(ExportError, match="rank 0"):
        untrained.export_hf("/proc/nope/x")
    path = tmp_path / "exported"
    untrained.export_hf(path)
    with pytest.raises(ConfigError, match="overwrite"):
        untrained.export_hf(path)
    untrained.export_hf(path, overwrite=True, max_shard_bytes=20_000)
    assert torch.equal(untrained.get_logprobs(data)["logprobs"], before)
    assert len(list(path.glob("*.safetensors"))) > 2, "two ranks need no more than a file each"


def test_a_policy_without_optimizer_refuses_to_train(untrained: Policy) -> None:
    with pytest.raises(ConfigError, match="init_optimizer=False"):
        untrained.train(batch(), TokenNLL())


def test_workers_tell_about_themselves(untrained: Policy) -> None:
    group = untrained.worker_group
    assert group.run_all("is_alive") == [True, True]
    assert len(set(group.run_all("report_device_id"))) == 2
    group.run_all("reset_peak_memory_stats")
    infos = group.run_all("get_gpu_info")
    assert [info["rank"] for info in infos] == [0, 1]
    assert all(0 < info["memory_free"] <= info["memory_total"] for info in infos)


def test_a_range_for_a_profiler_does_nothing_without_a_gpu(untrained: Policy) -> None:
    untrained.start_gpu_profiling()
    untrained.stop_gpu_profiling()
    assert untrained.worker_group.run_all("is_alive") == [True, True]


def test_noise_reaches_every_weight_alike_and_not_the_reference(untrained: Policy) -> None:
    group = untrained.worker_group
    data = batch(rows=2)
    before = untrained.get_logprobs(data)["logprobs"]
    states = group.run_all("return_state_dict")
    group.run_all("_add_noise_to_weights")
    noisy = group.run_all("return_state_dict")
    assert not any(
        torch.equal(old[name], new[name])
        for old, new in zip(states, noisy, strict=True)
        for name in old
    )
    norm = "decoder.final_layernorm.weight"
    assert torch.equal(noisy[0][norm], noisy[1][norm]), "replicas must stay alike"
    assert not torch.allclose(before, untrained.get_logprobs(data)["logprobs"])
    reference = untrained.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, before)


def test_a_worker_computes_as_its_reference_within_that_context_only(untrained: Policy) -> None:
    group, data = untrained.worker_group, batch(rows=2)
    before = untrained.get_reference_policy_logprobs(data)["reference_logprobs"]
    group.run_all("_add_noise_to_weights")
    noisy = untrained.get_logprobs(data)["logprobs"]
    workers = [ray.get_actor(f"{group.name} rank {rank}") for rank in range(2)]
    # Each has the row that the driver gave it: with two rows it would sum in another order.
    rows = [data.slice(rank, rank + 1) for rank in range(2)]
    within = ray.get(
        [
            worker.__ray_call__.remote(under_the_reference, row)
            for worker, row in zip(workers, rows, strict=True)
        ]
    )
    assert torch.equal(torch.cat(within), before)
    assert not torch.allclose(noisy, before)
    assert torch.equal(untrained.get_logprobs(data)["logprobs"], noisy)


def test_the_worker_is_what_a_host_takes_for_one() -> None:
    from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

    assert isinstance(MegatronPolicyWorker, ray.actor.ActorClass)
    with pytest.raises(ConfigError, match="has no argument skip_weight_load"):
        MegatronPolicyWorkerImpl({}, None, skip_weight_load=True)


def test_driver_and_worker_modules_leave_megatron_core_to_the_worker_process() -> None:
    code = (
        "import sys, megatron_policy.workers.driver.policy, megatron_policy.workers.worker;"
        "print([name for name in ('megatron', 'transformers.models') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr
