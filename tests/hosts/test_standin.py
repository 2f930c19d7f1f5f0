"""A driver with NeMo RL's manners, in both forms of its contract, over workers of ours."""

from __future__ import annotations

import inspect
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

from megatron_policy.batch import BatchedDataDict
from megatron_policy.hosts import nemo_rl as host
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED
from megatron_policy.hosts.nemo_rl.value_worker import MegatronValueWorker
from megatron_policy.hosts.nemo_rl.worker import ACTOR_OPTIONS, MegatronPolicyWorker, NemoRLWorker
from tests import oracle
from tests.dist.cases import open_policy
from tests.fork_server import PLAIN
from tests.hosts.driver import (
    GBS,
    LENGTH,
    ROWS,
    TOKENIZER,
    VOCAB,
    config_of,
    layout_of,
    standin_modules,
)
from tests.hosts.fake_host import Packed
from tests.hosts.methods import FORMS, REFUSED
from tests.losses import SequenceNLL
from tests.picture_models import MEDIA, make_model, make_rows
from tests.ranks import RankPool

TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def standin(nemo_rl_standin: None, ray_instance: None) -> SimpleNamespace:
    """The stand-in's modules, with our worker installed."""
    host.install()
    return standin_modules()


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2", vocab=VOCAB)


@pytest.fixture(scope="module")
def rows() -> BatchedDataDict:
    return oracle.make_batch(ROWS, LENGTH, VOCAB)


@pytest.fixture(scope="module")
def expected(path: Path, rows: BatchedDataDict) -> oracle.Trained:
    """Five steps: the older host makes the first two, the newer one goes on."""
    again = BatchedDataDict.from_batches([rows, rows, rows.slice(0, GBS)])
    return oracle.train(path, again, GBS, oracle.token_level)


@pytest.fixture(scope="module")
def older(
    standin: SimpleNamespace, path: Path, rows: BatchedDataDict, tmp_path_factory: Any
) -> SimpleNamespace:
    """What the older contract's driver saw of two tensor-parallel workers with engines on the same
    devices, and where it saved.
    """
    data, folder = standin.data.BatchedDataDict(dict(rows)), tmp_path_factory.mktemp("older")
    cluster = standin.cluster.RayVirtualCluster([2], use_gpus=False)
    engines = {"backend": "vllm", "max_new_tokens": LENGTH, "colocated": {"enabled": True}}
    config = config_of(path, layout_of(tp=2)) | {"generation": engines}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PLAIN, "1")  # these import what they need themselves, as under a host
        policy = standin.policy.Policy(standin.policy.OLDER, cluster, config, TOKENIZER)
    seen = SimpleNamespace(folder=folder)
    policy.call("prepare_for_lp_inference")
    seen.logprobs = policy.get_logprobs(data)
    seen.reference = policy.get_reference_policy_logprobs(data, micro_batch_size=2)
    policy.call("prepare_for_training")
    seen.evaluated = policy.train(data, standin.losses.LogitLoss(), eval_mode=True)
    seen.trained = policy.train(data, standin.losses.LogitLoss())
    seen.info = policy.call("prepare_refit_info")[0]
    policy.call("offload_before_refit")
    seen.sizes = policy.call("prepare_weights_for_ipc")
    policy.call("offload_after_refit")
    policy.call("prepare_for_lp_inference")
    seen.after = policy.get_logprobs(data)
    saved = {"weights_path": folder / "weights", "optimizer_path": folder / "optimizer"}
    saved["tokenizer_path"] = folder / "tokenizer"
    policy.call("save_checkpoint", **{key: str(value) for key, value in saved.items()})
    seen.imported = ray.get([each.imported.remote() for each in policy.group.initializers])
    seen.processes = ray.get([w.__ray_call__.remote(process_of) for w in policy.group.workers])
    policy.shutdown()
    cluster.shutdown()
    return seen


@pytest.fixture(scope="module")
def newer(
    standin: SimpleNamespace, path: Path, rows: BatchedDataDict, older: SimpleNamespace
) -> SimpleNamespace:
    """What the newer contract's driver saw of two stages, packed, going on from that checkpoint."""
    data = standin.data.BatchedDataDict(dict(rows))
    cluster = standin.cluster.RayVirtualCluster([2], use_gpus=False)
    paths = {f"{kind}_path": str(older.folder / kind) for kind in ("weights", "optimizer")}
    config = config_of(path, layout_of(pp=2), packing=True)
    policy = standin.policy.Policy(standin.policy.NEWER, cluster, config, TOKENIZER, **paths)
    seen = SimpleNamespace()
    seen.places = policy.call("report_node_ip_and_gpu_id")
    policy.call("prepare_for_lp_inference", keep_train_buffers=True)
    seen.logprobs = policy.get_logprobs(data)
    seen.reference = policy.get_reference_policy_logprobs(data)
    seen.top = policy.get_topk_logits(data, k=3, micro_batch_size=2)
    policy.call("finish_inference")
    policy.call("prepare_for_training")
    seen.trained = policy.train(data, standin.losses.LogprobLoss())
    parts = [data.rows([0]), data.rows([1, 2, 3])]
    seen.in_parts = policy.train_in_parts(parts, standin.losses.LogprobLoss())
    seen.free = policy.call("get_free_memory_bytes")
    seen.info = policy.call("prepare_refit_info")[0]
    policy.call("finalize_async_save")
    policy.shutdown()
    cluster.shutdown()
    return seen


@pytest.mark.nightly
def test_two_data_parallel_ranks_take_turns_in_the_rows_and_answer_in_order(
    standin: SimpleNamespace, path: Path, rows: BatchedDataDict, expected: oracle.Trained
) -> None:
    data = standin.data.BatchedDataDict(dict(rows))
    cluster = standin.cluster.RayVirtualCluster([2], use_gpus=False)
    config = config_of(path, layout_of(), packing=True)
    policy = standin.policy.Policy(standin.policy.NEWER, cluster, config, TOKENIZER)
    found = policy.get_logprobs(data)["logprobs"]
    trained = policy.train(data, standin.losses.LogprobLoss())
    policy.shutdown()
    cluster.shutdown()
    with torch.no_grad():
        close(found, oracle.hf_logprobs(oracle.load_hf(path), rows["input_ids"]), rows)
    assert trained["ranks"] == [0, 1]
    # Of each step both ranks give their own microbatches.
    check_trained(trained, expected, slice(0, 2))


def train_without_ray(config: dict[str, Any], rows: BatchedDataDict) -> dict[str, Any]:
    """What a rank makes of its share of the rows, before, in and after a step."""
    with open_policy(config) as policy:
        share = rows.chunk(policy.coords.dp, policy.topology.dp)
        before = policy.logprobs(share)
        trained = policy.train(share, SequenceNLL(), gbs=len(share["input_ids"]) * 2, mbs=2)
        return {"before": before, "trained": trained, "after": policy.logprobs(share)}


def test_pictures_that_the_host_packs_train_over_ray_as_without_it(
    standin: SimpleNamespace, ranks: RankPool, tmp_path: Path
) -> None:
    rows = make_rows("qwen3_vl")
    packed = {key: Packed(rows[key], dim_to_pack=0) for key in MEDIA}
    data = standin.data.BatchedDataDict({**rows, **packed})
    config = config_of(make_model(tmp_path / "hf", "qwen3_vl"), layout_of())
    config |= {"max_total_sequence_length": rows["input_ids"].size(1)}
    config |= {"train_global_batch_size": len(rows["input_ids"])}
    alone = ranks.run(2, train_without_ray, config, rows)
    cluster = standin.cluster.RayVirtualCluster([2], use_gpus=False)
    policy = standin.policy.Policy(standin.policy.NEWER, cluster, config, TOKENIZER)
    before = policy.get_logprobs(data)["logprobs"]
    trained = policy.train(data, SequenceNLL())
    after = policy.get_logprobs(data)["logprobs"]
    policy.shutdown()
    cluster.shutdown()
    assert torch.equal(before, torch.cat([rank["before"] for rank in alone]))
    assert torch.equal(after, torch.cat([rank["after"] for rank in alone]))
    assert (after - before).abs().max() > TOLERANCE, "a step changes what is computed"
    for rank in alone:
        assert torch.equal(trained["loss"], rank["trained"]["loss"])
        assert torch.equal(trained["grad_norm"], rank["trained"]["grad_norm"])


def check_trained(trained: dict[str, Any], expected: oracle.Trained, steps: slice) -> None:
    assert trained["loss"].tolist() == pytest.approx(expected.losses[steps], abs=TOLERANCE)
    last = expected.grad_norms[steps][-1]
    assert float(trained["grad_norm"]) == pytest.approx(last, rel=1e-3)
    # Metrics add up to the value over the call.
    total = sum(expected.losses[steps]) / 2
    assert sum(trained["all_mb_metrics"]["loss"]) == pytest.approx(total, abs=TOLERANCE)


def test_losses_and_norms_are_those_of_one_process_of_transformers(
    older: SimpleNamespace, newer: SimpleNamespace, expected: oracle.Trained
) -> None:
    for host_name, seen, steps in (("older", older, slice(0, 2)), ("newer", newer, slice(2, 4))):
        check_trained(seen.trained, expected, steps)
        assert seen.trained["ranks"] == [0], host_name
    in_parts = newer.in_parts
    assert in_parts["global_loss"].tolist() == pytest.approx(expected.losses[4:], abs=TOLERANCE)
    assert float(in_parts["grad_norm"]) == pytest.approx(expected.grad_norms[4], rel=1e-3)
    evaluated, trained = older.evaluated["loss"].tolist(), older.trained["loss"].tolist()
    assert evaluated[0] == pytest.approx(trained[0], abs=1e-6)
    assert evaluated[1] != pytest.approx(trained[1], abs=1e-6), "evaluating does not train"


def test_log_probabilities_before_training_are_those_of_transformers(
    older: SimpleNamespace, newer: SimpleNamespace, path: Path, rows: BatchedDataDict
) -> None:
    with torch.no_grad():
        wanted = oracle.hf_logprobs(oracle.load_hf(path), rows["input_ids"])
    for found in (
        older.logprobs["logprobs"],
        older.reference["reference_logprobs"],
        newer.reference["reference_logprobs"],
    ):
        assert found.dtype == torch.float32 and found.shape == (ROWS, LENGTH)
        assert not found[:, 0].any()
        close(found, wanted, rows)


def test_a_policy_goes_on_from_where_the_other_has_saved(
    older: SimpleNamespace, newer: SimpleNamespace, rows: BatchedDataDict
) -> None:
    close(newer.logprobs["logprobs"], older.after["logprobs"][:, 1:], rows)
    moved = (older.after["logprobs"] - older.logprobs["logprobs"]).abs().max()
    assert moved > 10 * TOLERANCE


def test_answers_are_batches_of_the_hosts_own_kind(
    standin: SimpleNamespace, older: SimpleNamespace, newer: SimpleNamespace
) -> None:
    for answer in (older.logprobs, older.reference, newer.logprobs, newer.top):
        assert type(answer) is standin.data.BatchedDataDict
    assert newer.top["topk_logits"].shape == newer.top["topk_indices"].shape == (ROWS, LENGTH, 3)


def test_a_refit_announces_every_weight_in_the_form_of_the_contract(
    older: SimpleNamespace, newer: SimpleNamespace, path: Path
) -> None:
    weights = oracle.load_hf(path).state_dict()
    assert newer.info == {name: (w.shape, w.dtype) for name, w in weights.items()}
    assert older.info == {name: (w.shape, w.dtype, w.numel()) for name, w in weights.items()}
    for keys, available in older.sizes:
        assert sum(size for _, size in keys) >= sum(w.nbytes for w in weights.values())
        assert available > 0


def test_workers_tell_where_they_are_and_what_is_free_and_see_all_gpus(
    older: SimpleNamespace, newer: SimpleNamespace
) -> None:
    assert [gpu for _, gpu in newer.places] == [0, 1]
    assert all(isinstance(free, int) and free > 0 for free in newer.free)
    # The host removes the variable that says so, and its own Megatron worker asks for it.
    for _, environment in older.processes:
        assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    for names in older.imported:
        assert "megatron_policy" in names and "megatron" not in names, "it only makes workers"


def test_workers_end_when_a_host_lets_go_of_them(older: SimpleNamespace) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid, _ in older.processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_actor_class_travels_light_and_its_options_are_only_about_gpus() -> None:
    for actor in (MegatronPolicyWorker, MegatronValueWorker):
        assert actor._default_options == ACTOR_OPTIONS
    (variables,) = ACTOR_OPTIONS["runtime_env"].values()
    assert variables == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    assert isinstance(MegatronPolicyWorker, ray.actor.ActorClass)
    # Releases differ in how many values it must return.
    assert not hasattr(MegatronPolicyWorker, "configure_worker")
    carried = cloudpickle.dumps(MegatronPolicyWorker)
    assert len(carried) < 96 * 2**10  # half a KiB for each method, and no module
    assert pickle.loads(carried) is not None


def test_methods_take_the_keywords_of_every_release_or_say_why_they_are_not_there() -> None:
    for name, forms in FORMS.items():
        method, reason = getattr(NemoRLWorker, name), REFUSED.get(name)
        for form in forms:
            inspect.signature(method).bind(None, **dict.fromkeys(form))
            if reason:
                with pytest.raises(NotImplementedError, match=f"(?s){name}.*{reason}"):
                    method(None, **dict.fromkeys(form))
    for name, why in NOT_IMPLEMENTED.items():
        with pytest.raises(NotImplementedError) as raised:
            getattr(NemoRLWorker, name)(None, any="thing")
        assert str(raised.value).startswith(f"{name} is not implemented: {why}")


def close(found: torch.Tensor, wanted: torch.Tensor, rows: BatchedDataDict) -> None:
    """Equal where there are tokens; `wanted` has no position 0."""
    inside = torch.arange(1, LENGTH) < rows["input_lengths"].unsqueeze(-1)
    torch.testing.assert_close(found[:, 1:][inside], wanted[inside], atol=TOLERANCE, rtol=0)


def process_of(worker: Any) -> tuple[int, dict[str, str]]:
    return os.getpid(), dict(os.environ)
