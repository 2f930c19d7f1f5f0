"""Auxiliary losses, correction biases and counts of routers are those of plain torch over whole
global batches, however a batch is cut and spread over ranks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import LossError
from megatron_policy.packing.microbatch import inside
from megatron_policy.policy import MegatronPolicy
from tests import margins, oracle
from tests.balanced import COEFFICIENT, RATE, Z_COEFFICIENT, Balanced, side_by_side
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    MICROBATCHES,
    open_policy,
    own_steps,
    policy_config,
)
from tests.dist.layouts import OVERLAPPED, Layout, layout
from tests.dist.shortcuts import dynamic, packed
from tests.dist.test_export import tensors_of
from tests.exact import ROOM, UNIT
from tests.losses import TokenNLL, sequence_nll

VOCAB, LENGTH = 131, 16
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB}
SP = {"sequence_parallel": True, "expert_tensor_parallel_size": 1}
EP2 = {"expert_model_parallel_size": 2}
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
LAYOUTS = {
    "one process": layout(1),
    "DP2": layout(2, **OVERLAPPED),
    "EP2": layout(2, **EP2),
    "EP2xTP2+SP": layout(2, tp=2, **EP2, **SP),
    "TP2xPP2+SP": layout(4, tp=2, pp=2, **SP),
    "PP2xCP2, recomputed": layout(4, pp=2, context_parallel_size=2, **RECOMPUTED),
    "EP2xPP2xVPP2": layout(4, pp=2, vpp=2, **EP2),
}
BATCHINGS = {"padded": {}, "dynamic": dynamic(48), "packed": packed(48)}
METRICS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
FAMILIES = {"aux_loss": "qwen3_moe", "seq_aux_loss": "deepseek_v3", "global_aux_loss": "qwen3_moe"}
CELLS = [("aux_loss", "EP2", "padded")]
"""The first of them, and with it every other: sequences are the same scopes however a batch is cut,
and padded microbatches are known rows.
"""
CELLS += [
    cell
    for cell in product(METRICS, LAYOUTS, BATCHINGS)
    if "seq_aux_loss" in cell or ("padded" in cell and cell not in CELLS)
]
DATA = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)


def sequence_level(model: Any, data: BatchedDataDict) -> torch.Tensor:
    logprobs = oracle.hf_logprobs(model, data["input_ids"])
    return sequence_nll(logprobs, data, data["sample_mask"].sum())


@cache
def expected(path: Path, kind: str, replicas: int, by_sequence: bool) -> tuple[Any, Balanced]:
    """What transformers' model learns from two global batches, and how its routers fared."""
    rows = GLOBAL_BATCH // replicas
    balanced = Balanced(
        kind,
        sequence_level if by_sequence else oracle.token_level,
        microbatches=side_by_side(replicas, rows, rows // MICROBATCHES),
        by_sequence=by_sequence,
    )
    return oracle.Learned.of(path, DATA, GLOBAL_BATCH, balanced), balanced


def settings(kind: str, case: Layout) -> dict[str, Any]:
    return case.megatron | {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": COEFFICIENT,
        "moe_z_loss_coeff": Z_COEFFICIENT,
        "moe_router_bias_update_rate": RATE,
        "moe_per_layer_logging": True,
    }


def biases(policy: MegatronPolicy) -> dict[int, torch.Tensor]:
    """The correction biases of this rank's layers."""
    return {
        int(name.split(".")[2]): bias.clone()
        for name, bias in policy.named_parameters()
        if name.endswith("expert_bias")
    }


def in_parts(policy: MegatronPolicy, loss: Any, step: BatchedDataDict) -> dict[str, Any]:
    """One step in two parts, of which data-parallel ranks have different numbers of rows."""
    rows = step.size // 4 * (3 if policy.coords.dp else 1)
    policy.accumulator.begin(loss, gbs=GLOBAL_BATCH, mbs=1)
    policy.accumulator.microbatch(step.slice(0, rows))
    policy.logprobs(step)  # which counts nothing
    policy.accumulator.microbatch(step.slice(rows, step.size))
    return policy.accumulator.finish()


def train(
    config: dict[str, Any], loss: str, in_two: bool, planted: tuple[str, Any] | None
) -> tuple[list[dict[str, Any]], dict[int, torch.Tensor]]:
    """Train over every global batch; return the results and the biases afterwards. `planted` is a
    place in the package and the mistake that is there meanwhile.
    """
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(*planted)
        with open_policy(config, init_reference_model=False) as policy:
            micro = GLOBAL_BATCH // policy.topology.dp // MICROBATCHES
            steps = [
                in_parts(policy, LOSSES[loss](), step)
                if in_two
                else policy.train(step, LOSSES[loss](), gbs=GLOBAL_BATCH, mbs=micro)
                for step in own_steps(policy, DATA)
            ]
            return steps, biases(policy)


def assert_balanced(
    learned: oracle.Learned,
    balanced: Balanced,
    kind: str,
    found: tuple[list[dict[str, Any]], Mapping[int, torch.Tensor]],
    context: object,
) -> None:
    steps, found_biases = found
    exact, rounded = balanced.routed
    assert all(map(torch.equal, exact.tokens, rounded.tokens)), "near ties: draw other data"
    learned.assert_same_steps(steps, context)
    for index, step in enumerate(steps):
        metrics = step["moe_metrics"]
        for name, quantity in ((METRICS[kind], "balance"), ("z_loss", "z")):
            right, near = (getattr(each, quantity)[index] for each in (exact, rounded))
            tolerance = ROOM * max(abs(right - near), 8 * UNIT * abs(right))
            margins.check(name, abs(metrics[name] - right), tolerance, context)
        tokens_LE = exact.tokens[index].double()
        most_L = tokens_LE.max(1).values / tokens_LE.mean(1)
        assert metrics["max_over_mean_tokens"] == pytest.approx(float(most_L.mean()), rel=1e-9)
        last = SMALL["layers"] - 1
        assert metrics[f"moe/max_over_mean_tokens_layer_{last}"] == pytest.approx(float(most_L[-1]))
        idle = float((tokens_LE == 0).double().mean())
        assert metrics["idle_experts"] == pytest.approx(idle, rel=1e-9)
        assert metrics.keys() == steps[0]["moe_metrics"].keys()
    first = SMALL["layers"] - len(exact.biases[-1])
    for layer, bias_E in found_biases.items():
        # Two additions to a number below 1, in fp32.
        apart = float((bias_E - exact.biases[-1][layer - first]).abs().max())
        margins.check("correction bias", apart, 2 * UNIT, context)


@pytest.fixture
def compare(ranks, checkpoint) -> Callable[..., None]:
    """Trains in a layout and compares with the oracle."""

    def run(kind: str, name: str, batching: str, **more: Any) -> None:
        case = LAYOUTS[name]
        by_sequence, in_two = more.get("by_sequence", False), more.get("in_two", False)
        several = name in ("DP2", "EP2", "EP2xPP2xVPP2") and kind != "seq_aux_loss"
        source = checkpoint(FAMILIES[kind], **SMALL)
        learned, balanced = expected(source, kind, 2 if several else 1, by_sequence)
        megatron = settings(kind, case) | more.get("asked", {})
        config = policy_config(more.get("path", source), megatron, **BATCHINGS[batching])
        loss = "sequence" if by_sequence else "token"
        for found in ranks.run(case.world, train, config, loss, in_two, more.get("planted")):
            assert_balanced(learned, balanced, kind, found, (kind, name, batching))

    return run


@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_routers_are_trained_as_in_one_process(compare, cell: tuple[str, str, str]) -> None:
    compare(*cell)


@pytest.mark.parametrize("name", ["one process", "DP2"])
def test_a_step_in_parts_trains_routers_as_a_whole_one(compare, name: str) -> None:
    compare("seq_aux_loss", name, "padded", in_two=True)


def test_a_coefficient_that_is_not_given_is_the_models_own(compare, checkpoint, tmp_path) -> None:
    path = shutil.copytree(checkpoint("qwen3_moe", **SMALL), tmp_path / "model")
    published = json.loads((path / "config.json").read_text())
    published["router_aux_loss_coef"] = COEFFICIENT
    (path / "config.json").write_text(json.dumps(published))
    compare("aux_loss", "EP2", "padded", path=path, asked={"moe_aux_loss_coeff": None})


def test_rows_weigh_in_auxiliary_losses_what_they_weigh_in_the_loss(compare) -> None:
    compare("seq_aux_loss", "EP2", "dynamic", by_sequence=True)
    compare("seq_aux_loss", "EP2", "padded", by_sequence=True, in_two=True)


def count_padding(data: BatchedDataDict) -> torch.Tensor:
    return torch.ones_like(data["input_ids"]).bool()


class Alone:
    """In place of `torch.distributed`: the counts of one rank."""

    all_reduce = staticmethod(lambda *_, **__: None)


ENGINE = "megatron_policy.engines.megatron"
PLANTED = {
    "padding counts": (f"{ENGINE}.layers.balancing.routed", count_padding),
    "rows left out count": (f"{ENGINE}.layers.balancing.routed", inside),
    "counts of one rank": (f"{ENGINE}.routers.dist", Alone),
}


@pytest.mark.nightly
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_planted_mistake_is_found(compare, planted: tuple[str, Any]) -> None:
    """It is ten times further away than rounding can explain."""
    with margins.apart() as used, pytest.raises(AssertionError):
        compare("seq_aux_loss", "EP2", "padded", planted=planted)
    assert max(used.values()) > 10, used


@pytest.mark.parametrize("name", ["EP2xTP2+SP", "EP2"])
def test_the_dispatcher_changes_no_result(compare, name: str) -> None:
    """Where replicas share experts, all-to-all takes the place of all-gather."""
    asked = {"moe_token_dispatcher_type": "allgather", "moe_permute_fusion": True}
    compare("seq_aux_loss", name, "packed", asked=asked)


class Infinite(TokenNLL):
    """Its loss is finite, its gradient is not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss + (loss - loss.detach()).abs().sqrt(), metrics


def only_look(config: dict[str, Any], exported: Path) -> dict[str, dict[int, torch.Tensor]]:
    """The biases after each call that must not change them, and after one that does."""
    with open_policy(config, init_reference_model=False) as policy:
        seen = {"loaded": biases(policy)}
        policy.logprobs(DATA)
        assert "moe_metrics" not in policy.train(DATA, TokenNLL(), eval_mode=True, mbs=2)
        seen["read"] = biases(policy)
        with pytest.raises(LossError):
            policy.train(DATA, Infinite(), mbs=2)
        seen["refused"] = biases(policy)
        policy.accumulator.begin(TokenNLL(), mbs=2)
        policy.accumulator.microbatch(DATA)
        policy.accumulator.abort()
        seen["aborted"] = biases(policy)
        policy.train(DATA, TokenNLL(), mbs=2)
        seen["trained"] = biases(policy)
        policy.export_hf(exported)
        return seen


def test_only_a_step_that_is_taken_moves_biases_which_stay_in_fp32(
    ranks, checkpoint, tmp_path
) -> None:
    config = policy_config(
        checkpoint("deepseek_v3", **SMALL),
        {"moe_router_bias_update_rate": 1e-3, "freeze_moe_router": True},
        precision="bfloat16",
        train_global_batch_size=2 * GLOBAL_BATCH,
    )
    (seen,) = ranks.run(1, only_look, config, tmp_path / "exported")
    exported = tensors_of(tmp_path / "exported")
    for layer, loaded_E in seen["loaded"].items():
        for name in ("read", "refused", "aborted"):
            assert torch.equal(seen[name][layer], loaded_E), name
        moved_E = seen["trained"][layer] - loaded_E
        assert moved_E.dtype is torch.float32
        assert moved_E.any()
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert torch.equal(exported[name], seen["trained"][layer])
        # A bias below 1 in fp32 moves by the rate, or not at all.
        assert ((moved_E.abs() - 1e-3).abs() < UNIT).logical_or(moved_E == 0).all()
