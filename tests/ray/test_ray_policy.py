"""The driver's policy over two replicas that do not train: what it refuses, reads and tells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch

from megatron_policy import MegatronPolicyWorker, Policy
from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, ExportError, LossError
from tests.fork_server import PLAIN
from tests.losses import TokenNLL
from tests.ray.policies import (
    DP2,
    GBS,
    LENGTH,
    VOCAB,
    batch,
    config_of,
    opened,
    under_the_reference,
)


@pytest.fixture(scope="module")
def untrained(checkpoint: Callable[..., Path]) -> Iterator[Policy]:
    """Two data-parallel workers without optimizer, for tests that break nothing. They import what
    they need themselves.
    """
    config = config_of(checkpoint, DP2 | {"env_vars": {PLAIN: "1"}})
    with opened(config, init_optimizer=False) as policy:
        yield policy


@pytest.mark.nightly
def test_a_dry_run_names_the_callers_rows_and_a_key_that_is_missing(untrained: Policy) -> None:
    data = batch(rows=8)
    data["sample_mask"][:3] = 0
    found = untrained.dry_run(data, TokenNLL())
    assert found.rows == (4, 6) and not found.warnings and found.loss > 0
    del data["token_mask"]
    with pytest.raises(LossError, match=r"KeyError: 'token_mask' .* the data have no 'token_mask'"):
        untrained.dry_run(data, TokenNLL())


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


def test_workers_tell_about_themselves_and_refuse_to_train_without_an_optimizer(
    untrained: Policy,
) -> None:
    with pytest.raises(ConfigError, match=r"^train\(\) needs an optimizer.*init_optimizer=False"):
        untrained.train(batch(), TokenNLL())
    untrained.start_gpu_profiling()  # which does nothing without a GPU
    untrained.stop_gpu_profiling()
    said = repr(untrained)
    assert said.startswith("Policy(qwen2 ") and said.endswith("pp 1 x dp 2, float32, driver)")
    group = untrained.worker_group
    assert group.run_all("is_alive") == [True, True]
    assert len(set(group.run_all("report_device_id"))) == 2
    group.run_all("reset_peak_memory_stats")
    infos = group.run_all("get_gpu_info")
    assert [info["rank"] for info in infos] == [0, 1]
    assert all(0 < info["memory_free"] <= info["memory_total"] for info in infos)


def test_a_profile_is_of_all_workers_and_none_is_written_after_an_error(
    untrained: Policy, tmp_path: Path
) -> None:
    with pytest.raises(KeyError), untrained.profile(tmp_path / "failed"):
        raise KeyError
    assert list((tmp_path / "failed").iterdir()) == []
    with untrained.profile(tmp_path, operations=False) as profile:
        assert str(tmp_path) in str(profile)
        untrained.get_logprobs(batch(rows=4))
    assert profile.summary["ranks"] == 2 and profile.summary["seconds"]["forward"] > 0
    assert all(path.is_file() for path in profile.files)


def test_noise_reaches_every_weight_but_not_the_reference_which_counts_in_its_context_alone(
    untrained: Policy,
) -> None:
    group, data = untrained.worker_group, batch(rows=2)
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
    reference = untrained.get_reference_policy_logprobs(data)["reference_logprobs"]
    assert torch.equal(reference, before)
    read = untrained.get_logprobs(data)["logprobs"]
    assert not torch.allclose(read, before)
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
    assert torch.equal(untrained.get_logprobs(data)["logprobs"], read)


def test_the_worker_is_what_a_host_takes_for_one() -> None:
    from megatron_policy.workers.worker import MegatronPolicyWorkerImpl

    assert isinstance(MegatronPolicyWorker, ray.actor.ActorClass)
    with pytest.raises(ConfigError, match="has no argument skip_weight_load"):
        MegatronPolicyWorkerImpl({}, None, skip_weight_load=True)


@pytest.mark.nightly
def test_driver_and_worker_modules_leave_megatron_core_to_the_worker_process() -> None:
    code = (
        "import sys, megatron_policy.workers.policy, megatron_policy.workers.worker;"
        "print([name for name in ('megatron', 'transformers.models') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr
