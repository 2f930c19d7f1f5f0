"""Transformers' own modules under FSDP2 and FSDP1: what they train, read, hand over and save is
what one process of Hugging Face makes of the same, and Megatron-Core continues it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.memory.states import Kind
from megatron_policy.workers.worker.memory import WorkerMemory
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, fsdp_config, open_policy, policy_config
from tests.dist.fsdp_cases import BATCHINGS, SHARDINGS, data, decayed, resume, share, trained
from tests.dist.layouts import LENGTH
from tests.exact import load_hf

LOSS_OF = {"token": oracle.token_level, "logit": oracle.logit_level}

CASES = [
    ("qwen2", {"tied": True}, "one rank", "padded", "token"),
    ("qwen2", {"tied": True}, "2 shards", "packed", "token"),
    ("qwen2", {"tied": False}, "4 shards", "dynamic", "logit"),
    ("gemma2", {}, "2 shards x 2 copies", "packed", "token"),
    ("qwen3", {}, "cp 2", "packed", "token"),
    ("gemma2", {}, "cp 2 x dp 2", "padded", "logit"),
    ("gpt_oss", {}, "2 shards", "packed", "token"),
    ("qwen3_moe", {}, "4 shards", "packed", "token"),
    ("qwen2_moe", {}, "one rank", "packed", "token"),
    ("qwen2", {"tied": True}, "tp 4", "dynamic", "token"),
    ("qwen3_moe", {}, "tp 2 + sp x cp 2", "packed", "token"),
]
SWEPT = [
    ("qwen3", {}, "tp 2", "dynamic", "logit"),
    ("qwen2", {"tied": False}, "tp 2 x dp 2", "packed", "token"),
    ("gemma2", {}, "tp 2 + sp x dp 2", "padded", "logit"),
    ("qwen3", {}, "tp 2 x 2 copies", "padded", "token"),
    ("gpt_oss", {}, "tp 4", "packed", "token"),
    ("qwen3", {}, "tp 2 + sp, own plan", "packed", "token"),
]

OF_FSDP1 = [
    ("qwen2", {"tied": True}, "FSDP1 x 2", "packed", "token"),
    ("qwen2", {"tied": True}, "FSDP1 no shard x 2", "packed", "token"),
    ("gemma2", {}, "FSDP1 grad op x 2", "padded", "logit"),
    ("gpt_oss", {}, "FSDP1 no shard x 2", "packed", "token"),
    ("qwen3_moe", {}, "FSDP1 x 4", "dynamic", "token"),
]


def named(case: tuple[Any, ...]) -> str:
    return f"{case[0]}, {case[2]}, {case[3]}"


@pytest.mark.parametrize(
    ("family", "settings", "sharding", "batching", "loss"),
    [pytest.param(*case, id=named(case)) for case in (*CASES, *OF_FSDP1, *SWEPT)],
)
def test_training_reading_and_export_equal_hf(
    ranks, checkpoint, tmp_path, family, settings, sharding, batching, loss
) -> None:
    path = checkpoint(family, **settings)
    layout = SHARDINGS[sharding]
    config = fsdp_config(path, layout.keys, section=layout.section, **BATCHINGS[batching])
    seen = ranks.run(layout.world, trained, config, loss, str(tmp_path))
    learned = oracle.Learned.of(path, data(), 8, LOSS_OF[loss], own=decayed)
    for rank in seen:
        learned.assert_same_steps(rank["steps"])
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "refit" / "model.safetensors").keys()
    for name, weight in of_files(learned.exact.weights, exported).items():
        learned.assert_same_weight(exported[name], weight, name)
        assert torch.equal(seen[0]["streamed"][name], exported[name])
    assert_reads_as_hf(path, tmp_path, seen)
    assert_writes_what_it_reads(seen)


def of_files(weights: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in weights.items() if name in names}


def assert_reads_as_hf(path: Path, folder: Path, seen: list[dict[str, Any]]) -> None:
    tokens = data()["input_ids"]
    lengths = data()["input_lengths"]
    start, after = load_hf(path, torch.float32), load_hf(folder / "exported", torch.float32)
    for rank in seen:
        each = len(tokens) // len({other["dp"] for other in seen})
        own = slice(rank["dp"] * each, (rank["dp"] + 1) * each)
        inside = torch.arange(LENGTH)[1:] < lengths[own, None]
        for found, model in (
            (rank["before"], start),
            (rank["reference"], start),
            (rank["logprobs"], after),
        ):
            with torch.no_grad():
                expected = oracle.hf_logprobs(model, tokens[own])
            assert torch.allclose(found[:, 1:][inside], expected[inside], atol=1e-5, rtol=0)
        with torch.no_grad():
            logits = start(tokens[own]).logits
        values, _ = rank["topk"]
        expected = logits.topk(3).values[:, 1:][inside]
        assert torch.allclose(values[:, 1:][inside], expected, atol=1e-5)
        entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
        assert torch.allclose(rank["entropy"][:, 1:][inside], entropy[inside], atol=1e-5)


def assert_writes_what_it_reads(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        written = rank["written"]
        rows = len(written.lengths_B)
        assert written.generated_B.eq(4).all() and written.lengths_B.tolist() == [9, 7] * (
            rows // 2
        )
        new = written.logprobs_BT != 0
        assert new.sum() == 4 * rows
        assert torch.allclose(written.logprobs_BT[new], rank["read again"][new], atol=1e-5)


def trained_in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    """Weights that are trained and weights that are handed over, by name."""
    with open_policy(config) as policy:
        policy.train(data().get_batch(0, GLOBAL_BATCH), LOSSES["token"]())
        main = {name: p.detach().clone() for name, p in policy.named_parameters()}
        return {"main": main, "handed over": {n: t.clone() for n, t in policy.export()}}


def test_bf16_trains_weights_in_fp32_and_hands_over_what_the_checkpoint_has(
    ranks, bf16_checkpoints
) -> None:
    config = fsdp_config(bf16_checkpoints[True], {}, precision="bfloat16")
    (seen,) = ranks.run(1, trained_in_bf16, config)
    main, handed_over = seen["main"], seen["handed over"]
    assert main.keys() == handed_over.keys()
    assert {weight.dtype for weight in main.values()} == {torch.float32}
    for name, weight in main.items():
        assert torch.equal(handed_over[name], weight.bfloat16()), name
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in main.values())


def one_step_in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    with open_policy(config) as policy:
        found = policy.train(share(data().get_batch(0, GLOBAL_BATCH), policy), LOSSES["token"]())
        weights = {name: tensor.clone() for name, tensor in policy.export(torch.float32)}
        return {"loss": found["loss"], "norm": found["grad_norm"], "weights": weights}


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["FSDP1 x 2", "FSDP1 no shard x 2", "FSDP1 grad op x 2"])
def test_bf16_computes_the_same_whatever_shards_the_model(
    ranks, bf16_checkpoints, sharding: str
) -> None:
    seen = {}
    for name in ("2 shards", sharding):
        layout = SHARDINGS[name]
        config = fsdp_config(
            bf16_checkpoints[True], layout.keys, section=layout.section, precision="bfloat16"
        )
        seen[name] = ranks.run(2, one_step_in_bf16, config)[0]
    two, one = seen["2 shards"], seen[sharding]
    assert torch.equal(one["loss"], two["loss"])
    # Two ranks' sums are the same in any order; squares of a whole gradient are added in another.
    assert torch.allclose(one["norm"], two["norm"], rtol=1e-5)
    assert one["weights"].keys() == two["weights"].keys()
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, two["weights"][name], atol=1e-5, rtol=0), name


def move(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        worker, model = WorkerMemory(), policy._engine.sharding.root
        worker.policy = policy
        tokens = BatchedDataDict({"input_ids": data()["input_ids"]})
        before = policy.logprobs(tokens)
        assert worker.manual_offload_to_cpu(model) is model
        assert Kind.PARAMETERS not in policy.memory.state.holds
        assert worker.manual_load_to_gpu(model) is model
        assert Kind.PARAMETERS in policy.memory.state.holds
        assert torch.equal(policy.logprobs(tokens), before)


def test_a_worker_moves_the_model_under_the_names_of_the_fsdp1_worker(ranks, checkpoint) -> None:
    layout = SHARDINGS["FSDP1 x 2"]
    path = checkpoint("qwen2", tied=True)
    ranks.run(layout.world, move, fsdp_config(path, layout.keys, section=layout.section))


NO_DECAY = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
MEGATRON = {"tp2 x pp2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})}
MEGATRON |= {"tp4": (4, {"tensor_model_parallel_size": 4}), "one": (1, {})}


@pytest.mark.nightly
def test_engines_continue_what_the_other_has_saved(ranks, checkpoint, tmp_path) -> None:
    path = checkpoint("qwen2", tied=True)

    def config(where: str) -> tuple[int, dict[str, Any]]:
        if where in SHARDINGS:
            layout = SHARDINGS[where]
            made = fsdp_config(path, layout.keys)
            made["optimizer"]["kwargs"]["weight_decay"] = 0.0
            return layout.world, made
        world, keys = MEGATRON[where]
        without = {"optimizer": {"weight_decay": 0.0}, "scheduler": NO_DECAY}
        return world, policy_config(path, keys | without)

    places = ["tp2 x pp2", "4 shards", "tp2 x pp2", "tp 2 + sp x dp 2", "tp4"]
    saved = None
    for step, where in enumerate(places):
        world, made = config(where)
        folder = str(tmp_path / str(step))
        seen = ranks.run(world, resume, made, saved, folder, step)
        if saved:
            assert {"weights", "optimizer", "schedule"} <= set(seen[0]["report"].restored)
        saved = folder
    straight = None
    for step in range(len(places)):
        folder = str(tmp_path / f"straight{step}")
        ranks.run(1, resume, config("one")[1], straight, folder, step)
        straight = folder
    found = load_file(tmp_path / f"{len(places) - 1}-exported" / "model.safetensors")
    for name, weight in load_file(Path(f"{straight}-exported", "model.safetensors")).items():
        assert torch.allclose(found[name], weight, atol=1e-5, rtol=0), name


def read_by_one_policy_after_another(config: dict[str, Any], count: int) -> list[torch.Tensor]:
    read = []
    for _ in range(count):
        with open_policy(config, init_optimizer=False) as policy:
            read.append(policy.logprobs(share(data(), policy)))
    return read


@pytest.mark.parametrize(
    "sharding", ["2 copies", "cp 2", "tp 2 x dp 2", "FSDP1 x 2", "FSDP1 no shard x 2"]
)
def test_a_process_opens_one_policy_after_another(ranks, checkpoint, sharding) -> None:
    layout = SHARDINGS[sharding]
    config = fsdp_config(checkpoint("qwen2", tied=True), layout.keys, section=layout.section)
    for read in ranks.run(layout.world, read_by_one_policy_after_another, config, 4, timeout=120):
        for other in read[1:]:
            assert torch.equal(other, read[0])
