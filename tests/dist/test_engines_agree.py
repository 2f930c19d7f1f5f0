"""Twenty steps under Megatron-Core and with transformers' own modules under FSDP2: the same losses,
gradient norms and weights. With ENGINES_FIGURE=1 the figure of docs/fsdp.md is drawn from them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.refit.exporter import tensors
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, fsdp_config, open_policy, policy_config
from tests.dist.fsdp_cases import share
from tests.dist.layouts import LENGTH, VOCAB
from tests.margins import check

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
        return steps, {n: w.clone() for n, w in tensors(exporter, exporter.plan())}


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
