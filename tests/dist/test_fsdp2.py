"""Transformers' own modules under FSDP2 and FSDP1: what they train, read, hand over and save is
what one process of Hugging Face makes of the same, and Megatron-Core continues it and agrees. With
ENGINES_FIGURE=1 the figure of docs/fsdp.md is drawn. And the same of an engine of plain torch
(tests/plain_engine.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.notes import count
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.exporter import stream_tensors
from tests import oracle, plain_engine
from tests.dist import fsdp_cases
from tests.dist.cases import GLOBAL_BATCH, LOSSES, fsdp_config, open_policy, policy_config
from tests.dist.fsdp_cases import BATCHINGS, SHARDINGS, data, resume, share
from tests.dist.layouts import LENGTH, VOCAB
from tests.dist.shortcuts import answer, packed
from tests.dist.test_launch import run_python
from tests.exact import load_hf
from tests.margins import check

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
    ("qwen2", {"tied": True}, "FSDP1 x 2", "packed", "token"),
    ("qwen2", {"tied": True}, "FSDP1 no shard x 2", "packed", "token"),
    ("gemma2", {}, "FSDP1 grad op x 2", "padded", "logit"),
    ("gpt_oss", {}, "FSDP1 no shard x 2", "packed", "token"),
    ("qwen3_moe", {}, "FSDP1 x 4", "dynamic", "token"),
    ("qwen3", {}, "tp 2", "dynamic", "logit"),
    ("qwen2", {"tied": False}, "tp 2 x dp 2", "packed", "token"),
    ("gemma2", {}, "tp 2 + sp x dp 2", "padded", "logit"),
    ("qwen3", {}, "tp 2 x 2 copies", "padded", "token"),
    ("gpt_oss", {}, "tp 4", "packed", "token"),
    ("qwen3", {}, "tp 2 + sp, own plan", "packed", "token"),
]


@pytest.mark.parametrize(("family", "settings", "sharding", "batching", "loss"), CASES)
def test_training_reading_and_export_equal_hf(
    ranks, checkpoint, tmp_path, family, settings, sharding, batching, loss
) -> None:
    path = checkpoint(family, **settings)
    layout = SHARDINGS[sharding]
    config = fsdp_config(path, layout.keys, section=layout.section, **BATCHINGS[batching])
    seen = ranks.run(layout.world, fsdp_cases.trained, config, loss, str(tmp_path))
    loss_of = fsdp_cases.LOSS_OF[loss]
    hf = oracle.Learned.of(path, data(), GLOBAL_BATCH, loss_of, own=fsdp_cases.decayed)
    fsdp_cases.assert_trained(hf, path, tmp_path, seen)


def train_in_bf16(config: dict[str, Any]) -> dict[str, Any]:
    """A step, weights that are trained, by name, and those handed over as they are and in fp32."""
    with open_policy(config) as policy:
        step = policy.train(share(data().get_batch(0, GLOBAL_BATCH), policy), LOSSES["token"]())
        return {
            "step": step,
            "main": {name: p.detach().clone() for name, p in policy.named_parameters()},
            "handed over": {name: tensor.clone() for name, tensor in policy.export()},
            "wide": {name: tensor.clone() for name, tensor in policy.export(torch.float32)},
        }


def test_bf16_trains_weights_in_fp32_and_hands_over_what_the_checkpoint_has(
    ranks, bf16_checkpoints
) -> None:
    config = fsdp_config(bf16_checkpoints[True], {}, precision="bfloat16")
    (seen,) = ranks.run(1, train_in_bf16, config)
    main, handed_over = seen["main"], seen["handed over"]
    assert main.keys() == handed_over.keys()
    assert {weight.dtype for weight in main.values()} == {torch.float32}
    for name, weight in main.items():
        assert torch.equal(handed_over[name], weight.bfloat16()), name
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in main.values())


@pytest.mark.nightly
def test_bf16_computes_the_same_whatever_shards_the_model(ranks, bf16_checkpoints) -> None:
    seen = {}
    for name in ("2 shards", "FSDP1 x 2", "FSDP1 no shard x 2", "FSDP1 grad op x 2"):
        keys, section = SHARDINGS[name].keys, SHARDINGS[name].section
        config = fsdp_config(bf16_checkpoints[True], keys, section=section, precision="bfloat16")
        seen[name] = ranks.run(2, train_in_bf16, config)[0]
    two = seen.pop("2 shards")
    for sharding, one in seen.items():
        assert torch.equal(one["step"]["loss"], two["step"]["loss"]), sharding
        # Two ranks' sums are the same in any order; squares of a whole gradient are added in
        # another.
        assert torch.allclose(one["step"]["grad_norm"], two["step"]["grad_norm"], rtol=1e-5)
        assert one["wide"].keys() == two["wide"].keys()
        for name, weight in one["wide"].items():
            assert torch.allclose(weight, two["wide"][name], atol=1e-5, rtol=0), (sharding, name)


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

    def weights_after(run: str, places: list[str]) -> dict[str, torch.Tensor]:
        saved = None
        for step, where in enumerate(places):
            world, made = config(where)
            folder = str(tmp_path / f"{run}{step}")
            seen = ranks.run(world, resume, made, saved, folder, step)
            if saved:
                assert {"weights", "optimizer", "schedule"} <= set(seen[0]["report"].restored)
            saved = folder
        return load_file(f"{saved}-exported/model.safetensors")

    places = ["tp2 x pp2", "4 shards", "tp2 x pp2", "tp 2 + sp x dp 2", "tp4"]
    found = weights_after("in turn", places)
    for name, weight in weights_after("straight", ["one"] * len(places)).items():
        assert torch.allclose(found[name], weight, atol=1e-5, rtol=0), name


def read(policy: MegatronPolicy) -> torch.Tensor:
    return policy.logprobs(share(data(), policy))


def read_by_one_policy_after_another(config: dict[str, Any], count: int) -> list[torch.Tensor]:
    return [answer(config, read, init_reference_model=True) for _ in range(count)]


@pytest.mark.parametrize(
    "sharding", ["2 copies", "cp 2", "tp 2 x dp 2", "FSDP1 x 2", "FSDP1 no shard x 2"]
)
def test_a_process_opens_one_policy_after_another(ranks, checkpoint, sharding) -> None:
    layout = SHARDINGS[sharding]
    config = fsdp_config(checkpoint("qwen2", tied=True), layout.keys, section=layout.section)
    for read in ranks.run(layout.world, read_by_one_policy_after_another, config, 4, timeout=120):
        for other in read[1:]:
            assert torch.equal(other, read[0])


STEPS, BATCHES = 20, 4
"""The batches come again and again, so that the loss falls."""
AGREE = 1e-5
"""Losses and norms relative, weights absolute; a step moves a weight by up to 1e-2."""
FIGURE = Path(__file__).parents[2] / "docs" / "engines.svg"
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32}}


def batches() -> list[BatchedDataDict]:
    made = [oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=seed) for seed in range(BATCHES)]
    return [made[step % BATCHES] for step in range(STEPS)]


def twenty_steps(config: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    with open_policy(config, init_reference_model=False) as policy:
        steps = []
        for batch in batches():
            result = policy.train(share(batch, policy), LOSSES["token"]())
            steps.append({name: result[name].item() for name in ("loss", "grad_norm")})
        exporter = policy.exporter
        return steps, {n: w.clone() for n, w in stream_tensors(exporter, exporter.plan())}


@pytest.mark.nightly
def test_both_engines_take_the_same_twenty_steps(ranks, checkpoint) -> None:
    path = checkpoint("qwen3", tied=True)
    two = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    matrices = {"weight_decay_of": "matrices"}
    megatron = ranks.run(2, twenty_steps, policy_config(path, two, **PACKED))
    fsdp = ranks.run(2, twenty_steps, fsdp_config(path, matrices, **PACKED))
    (ours, weights), (theirs, others) = megatron[0], fsdp[0]
    for name in ("loss", "grad_norm"):
        for step in range(STEPS):
            apart = abs(theirs[step][name] / ours[step][name] - 1)
            check(name, apart, AGREE, step)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        check("weights", float((others[name] - weight).abs().max()), AGREE, name)
    assert ours[-1]["loss"] < ours[0]["loss"]
    if os.environ.get("ENGINES_FIGURE"):
        draw(ours, theirs)


def draw(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "engines", "svg.fonttype": "none"}
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(7, 4.6), layout="constrained")
    steps = range(1, STEPS + 1)
    above.plot(steps, [s["loss"] for s in ours], label="Megatron-Core, TP2 + SP", linewidth=3)
    above.plot(steps, [s["loss"] for s in theirs], "k--", label="FSDP2 on 2 ranks", linewidth=1)
    above.set_ylabel("loss")
    above.legend(frameon=False)
    for name, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
        apart = [abs(b[name] / a[name] - 1) for a, b in zip(ours, theirs, strict=True)]
        below.semilogy(steps, [max(each, 1e-9) for each in apart], "o-", markersize=3, label=label)
    below.axhline(AGREE, color="0.5", linestyle=":", label="tolerance of the test")
    below.set(xlabel="step", ylabel="relative difference")
    below.legend(frameon=False, ncols=3, loc="upper left")
    figure.savefig(FIGURE, metadata={"Date": None})
    plt.close(figure)


@pytest.mark.parametrize(
    ("tied", "loss", "batching"),
    [(True, "token", {}), (False, "logit", {}), (False, "token", packed(32))],
    ids=["tied, padded", "untied, logits", "untied, packed"],
)
def test_another_engine_trains_reads_and_exports_like_hf(
    ranks, checkpoints, tmp_path, tied: bool, loss: str, batching: dict[str, Any]
) -> None:
    path = checkpoints[tied]
    config = policy_config(path, {}, train_micro_batch_size=2, **batching)
    (seen,) = ranks.run(1, fsdp_cases.trained, config, loss, str(tmp_path), plain_engine.__name__)
    hf = oracle.Learned.of(path, data(), GLOBAL_BATCH, fsdp_cases.LOSS_OF[loss])
    fsdp_cases.assert_trained(hf, path, tmp_path, [seen])
    size = sum(parameter.numel() for parameter in load_hf(path, torch.float32).parameters())
    layout = "tp 1 x cp 1 x pp 1 x dp 1, float32, rank 0 of 1, step 2"
    family = json.loads((path / "config.json").read_text())["model_type"]
    assert seen["shown"] == f"MegatronPolicy({family} {count(size)}, {layout})"


def resumed(config: dict[str, Any], folder: str, plain: bool) -> dict[str, Any]:
    """One step of an engine from what the plain one has saved."""
    with open_policy(config, engine=plain_engine if plain else None) as policy:
        report = policy.load_checkpoint(folder, folder)
        step = policy.train(data().get_batch(0, GLOBAL_BATCH), LOSSES["token"](), mbs=2)
        weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
        return {"report": report, "step": step, "weights": weights}


def test_what_another_engine_saves_is_continued_by_itself_and_by_megatron_core(
    ranks, checkpoints, tmp_path
) -> None:
    config = policy_config(checkpoints[False], {})
    ranks.run(1, fsdp_cases.trained, config, "token", str(tmp_path), plain_engine.__name__)
    (own,) = ranks.run(1, resumed, config, f"{tmp_path}/saved", True)
    (other,) = ranks.run(1, resumed, config, f"{tmp_path}/saved", False)
    for each in (own, other):
        assert each["report"].step == 2
        assert {"weights", "optimizer", "schedule"} <= set(each["report"].restored)
    assert own["step"]["loss"].item() == pytest.approx(other["step"]["loss"].item(), rel=1e-6)
    for name, weight in own["weights"].items():
        assert torch.allclose(weight, other["weights"][name], atol=1e-5, rtol=0), name


WITHOUT_MEGATRON = """
import json, sys
from megatron_policy import BatchedDataDict, MegatronPolicy
from tests import oracle, plain_engine
from tests.losses import TokenNLL

config = json.loads(sys.argv[1])
policy = MegatronPolicy(config, engine=plain_engine)
policy.train(oracle.make_batch(8, 13, 251), TokenNLL(), mbs=2)
policy.shutdown()
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"], "imported"
"""


@pytest.mark.nightly
def test_a_policy_over_another_engine_does_not_import_megatron_core(checkpoints) -> None:
    done = run_python("-c", WITHOUT_MEGATRON, json.dumps(policy_config(checkpoints[True], {})))
    assert done.returncode == 0, done.stderr
