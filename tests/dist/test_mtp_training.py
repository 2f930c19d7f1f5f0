"""Multi-token prediction trains as its plain torch form does, in every layout and batching; and its
weights on their way out: exports, also of layers that the policy leaves out, refits, checkpoints.
"""

from __future__ import annotations

import json
from importlib import import_module
from itertools import product
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.config.layout import pads
from megatron_policy.convert import verify
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    MICROBATCHES,
    open_policy,
    own_share,
    own_steps,
    policy_config,
)
from tests.dist.layouts import FSDP2_LAYOUTS, OVERLAPPED, Layout, layout
from tests.dist.resuming import paths, replaced
from tests.dist.shortcuts import UNUSED, answer_trainable, dynamic, packed, refusal
from tests.dist.test_export import assert_same_tensors, export, tensors_of
from tests.exact import ROOM
from tests.losses import SequenceNLL
from tests.margins import check
from tests.mtp_checkpoints import COPIES, ONE_AT_MOST, add_mtp_layers, layer_name, own_names
from tests.mtp_oracle import learned

VOCAB, LENGTH = 200, 24
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB, "tokenizer": False}
FACTOR = 0.3
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
SP = {"sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "one process": layout(1),
    "TP2+SP": layout(2, tp=2, **SP),
    "PP2": layout(2, pp=2),
    "PP2xVPP2": layout(2, pp=2, vpp=2),
    "DP2, both overlaps": layout(2, **OVERLAPPED),
    "CP2": layout(2, context_parallel_size=2),
    "EP2": layout(2, **EP2),
    "TP2xPP2xDP2xEP2+SP": layout(8, tp=2, pp=2, **SP, **EP2, **OVERLAPPED),
}
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": dynamic(64, sequence_length_round=4),
    "packed": packed(64),
}


def train(config: dict[str, Any]) -> dict[str, Any]:
    """What this rank sees of two steps, and all weights afterwards under their HF names."""
    with open_policy(config, init_reference_model=False) as policy:
        padded = pads(policy.config)
        micro = GLOBAL_BATCH // policy.topology.dp // MICROBATCHES if padded else None
        steps = own_steps(policy, DATA)
        evaluated = policy.train(
            steps[0], LOSSES["token"](), eval_mode=True, gbs=GLOBAL_BATCH, mbs=micro
        )
        found = []
        for step in steps:
            found.append(policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=micro))
            # Reads that pass these layers by leave them fit for the next step.
            policy.logprobs(step)
        weights = {}
        if policy.topology.ep == 1:
            weights = {name: tensor.clone() for name, tensor in policy.export()}
        return {
            "dp": policy.coords.dp,
            "eval": evaluated,
            "steps": found,
            "weights": weights if policy.rank == 0 else {},
        }


def total(results: list[dict[str, Any]], k: int) -> float:
    return sum(sum(each["microbatch_metrics"][f"mtp_{k}_loss"]) for each in results)


def assert_learned_alike(
    results: list[dict[str, Any]], expected: tuple[oracle.Learned, list[list[float]]], name: str
) -> None:
    hf, losses = expected
    by_replica = {seen["dp"]: seen for seen in results}
    for number, (main, *further) in enumerate(losses):
        mtp = 0.0
        for k, exact in enumerate(further, start=1):
            found = total([seen["steps"][number] for seen in by_replica.values()], k)
            check("mtp loss", abs(found / exact - 1), ROOM * hf.rounding.loss, name)
            mtp += found / len(further)
        for seen in results:
            step = seen["steps"][number]
            hf.assert_same_norm(step["grad_norm"], number, name)
            check("loss", abs(step["loss"].item() / main - 1), ROOM * hf.rounding.loss, name)
            hf.assert_same_loss(step["loss"] + FACTOR * mtp, number, name)
    for each, tensor in results[0]["weights"].items():
        each = each.replace("backbone.", "model.", 1)  # as nemotron_h calls it in memory
        if each not in hf.exact.weights:  # transformers stacks experts, and has no copies
            assert ".experts." in each or each.endswith((*COPIES, "correction_bias")), each
        else:
            hf.assert_same_weight(tensor, hf.exact.weights[each], f"{each} {name}")
    evaluated = total([seen["eval"] for seen in by_replica.values()], 1)
    check("mtp loss", abs(evaluated / losses[0][1] - 1), ROOM * hf.rounding.loss, name)


FAMILIES = ("deepseek_v3", "glm4_moe", "mimo")
WITHOUT_EXPERTS = ("mimo", "qwen3_5_text")
OPTIONS = {"nemotron_h": {"moe_latent_size": 20}}
"""As Nemotron 3 Super has it."""


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory) -> tuple[str, Path, Any]:
    path = tmp_path_factory.mktemp(request.param)
    add_mtp_layers(make_checkpoint(path, request.param, **SMALL, **OPTIONS.get(request.param, {})))
    return request.param, path, learned(path, DATA, GLOBAL_BATCH, factor=FACTOR)


DATA = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": FACTOR}
OF_HYBRIDS = {
    "one process": "padded",
    "TP2+SP": "packed",
    "PP2xVPP2": "dynamic",
    "CP2": "packed",
    "EP2": "padded",
    "TP2xPP2xDP2xEP2+SP": "padded",
}
DAILY = {("deepseek_v3", "PP2xVPP2", "padded"), *((f, "TP2+SP", "packed") for f in ONE_AT_MOST[:2])}
CELLS = [
    *product(FAMILIES, LAYOUTS, BATCHINGS),
    *((family, *cell) for family in ONE_AT_MOST for cell in OF_HYBRIDS.items()),
]


@pytest.mark.parametrize(
    ("made", "name", "batching"),
    [
        pytest.param(*cell, marks=[pytest.mark.daily] * (cell in DAILY))
        for cell in CELLS
        if not ("EP2" in cell[1] and cell[0] in WITHOUT_EXPERTS)
    ],
    indirect=["made"],
)
def test_losses_norms_and_updates_are_those_of_plain_torch(ranks, made, name, batching) -> None:
    _, path, expected = made
    case, context = LAYOUTS[name], f"{name} {batching}"
    config = policy_config(path, case.megatron | MTP, **BATCHINGS[batching])
    assert_learned_alike(ranks.run(case.world, train, config), expected, context)


DETACHED = {"mtp_detach_heads": True}
REPEATED = {"mtp_use_repeated_layer": True}
KINDS = {
    "two layers": ({"depths": 2}, 2, False, "TP2+SP", {}),
    "repeated": ({"depths": 3, "repeated": True}, 1, False, "PP2", REPEATED),
    "detached": ({"detached": True}, 1, False, "PP2", DETACHED),
    "detached, recomputed": (*({"detached": True}, 1, False, "one process"), RECOMPUTED | DETACHED),
    "tied": ({}, 1, True, "PP2", RECOMPUTED),
    "tied alone": ({}, 1, True, "one process", {}),
    "mimo, two layers, detached": (
        *({"depths": 2, "detached": True}, 2, False, "PP2"),
        RECOMPUTED | DETACHED,
    ),
    "nemotron_h, repeated, detached": (
        *({"depths": 3, "repeated": True, "detached": True}, 1, False, "PP2"),
        RECOMPUTED | DETACHED | REPEATED,
    ),
}


@pytest.mark.parametrize("which", KINDS)
def test_every_kind_of_prediction_trains_as_its_plain_form(ranks, tmp_path, which: str) -> None:
    kind, layers, tied, name, megatron = KINDS[which]
    named = which.partition(",")[0]
    family = named if named in (*FAMILIES, *ONE_AT_MOST) else "deepseek_v3"
    add_mtp_layers(make_checkpoint(tmp_path, family, tied=tied, **SMALL), layers)
    expected = learned(tmp_path, DATA, GLOBAL_BATCH, factor=FACTOR, **kind)
    case = LAYOUTS[name]
    section = case.megatron | MTP | megatron | {"mtp_num_layers": kind.get("depths", 1)}
    config = policy_config(tmp_path, section)
    assert_learned_alike(ranks.run(case.world, train, config), expected, str(kind))


def skip_a_sum(summing: Any) -> Any:
    """Gradients of the embedding's copies are not added up."""
    return lambda chunks: None


def shift_twice(shifted: Any) -> Any:
    """The embedding is that of the token after the next."""
    return lambda values, places: shifted(values, places + 1)


def train_broken(config: dict[str, Any], module: str, name: str, make: Any) -> dict[str, Any]:
    with replaced(import_module(f"megatron_policy.engines.megatron.{module}"), name, make):
        return train(config)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (("optimizer", "sum_embedding_gradients", skip_a_sum), "PP2"),
        (("mtp", "shifted", shift_twice), "one process"),
    ],
)
def test_a_planted_fault_is_noticed(ranks, made, fault: tuple[Any, ...], name: str) -> None:
    _, path, (hf, _) = made
    config = policy_config(path, LAYOUTS[name].megatron | MTP)
    seen = ranks.run(LAYOUTS[name].world, train_broken, config, *fault)
    apart = abs(seen[0]["steps"][0]["grad_norm"].item() / hf.exact.grad_norms[0] - 1)
    assert apart > 10 * ROOM * hf.rounding.grad_norm


TP2PP2 = layout(4, tp=2, pp=2, sequence_parallel=True, **OVERLAPPED)
PP2 = layout(2, pp=2)
BATCH = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)


def make_model(path: Path, family: str = "deepseek_v3", layers: int = 1, **more: Any) -> Path:
    return add_mtp_layers(make_checkpoint(path, family, **SMALL | more), layers)


def step(policy: MegatronPolicy) -> dict[str, Any]:
    return policy.train(own_share(policy, BATCH), LOSSES["token"](), mbs=2)


WHOLE_EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
IN_TP2PP2 = Layout(4, 2, TP2PP2.megatron | MTP)
SHARDS = {"max_shard_bytes": 200_000}
EXPORTED: list[tuple[str, Layout, dict[str, int]]] = [
    ("deepseek_v3", Layout(4, 2, IN_TP2PP2.megatron | WHOLE_EXPERTS), SHARDS),
    ("glm4_moe", IN_TP2PP2, SHARDS),
    ("mimo", IN_TP2PP2, SHARDS),
    ("deepseek_v3", LAYOUTS["one process"], {}),
    ("glm4_moe", LAYOUTS["TP2+SP"], {"max_shard_bytes": 100_000}),
    ("glm4_moe_lite", PP2, {}),
    ("mimo", PP2, {}),
    ("nemotron_h", Layout(4, 2, IN_TP2PP2.megatron | WHOLE_EXPERTS), SHARDS),
    ("nemotron_h", PP2, {}),
    ("nemotron_h", FSDP2_LAYOUTS["FSDP2 x 2"], {}),
    ("mimo", FSDP2_LAYOUTS["FSDP2 x 2"], {}),
]


@pytest.mark.parametrize(("family", "case", "options"), EXPORTED)
def test_held_and_left_out_layers_come_back_bit_equal(
    ranks, tmp_path, family: str, case: Layout, options: dict[str, int]
) -> None:
    """One of the two is held in bf16; where none is held, weights are in fp32."""
    dtype = "bfloat16" if "mtp_num_layers" in case.megatron else "float32"
    layers = 1 if family in ONE_AT_MOST else 2
    source = make_model(tmp_path / "source", family, layers, dtype=dtype)
    config = policy_config(source, case.megatron, precision=dtype)
    ranks.run(case.world, export, config, tmp_path / "exported", options)
    assert_same_tensors(tmp_path / "exported", source)
    written = json.loads((tmp_path / "exported/config.json").read_text())
    assert written["num_nextn_predict_layers"] == layers
    assert layer_name(written, layers - 1) + own_names(written)[2] in tensors_of(
        tmp_path / "exported"
    )


def export_without_source(config: dict[str, Any], source: Path, path: Path) -> str:
    """The error of an export whose source has lost its weights; with them it succeeds."""
    file, away = source / "model.safetensors", source.parent / "away"
    with open_policy(config, **UNUSED) as policy:
        dist.barrier()  # all ranks have read their weights
        if policy.rank == 0:
            file.rename(away)
        with pytest.raises(ConfigError) as error:
            policy.export_hf(path)
        assert not path.exists()
        if policy.rank == 0:
            away.rename(file)
        policy.export_hf(path)
        return str(error.value)


def test_a_source_that_has_lost_layers_that_are_left_out_is_named_and_the_policy_stays_usable(
    ranks, tmp_path
) -> None:
    source, target = make_model(tmp_path / "source"), tmp_path / "exported"
    config = policy_config(source, PP2.megatron)
    for message in ranks.run(2, export_without_source, config, source, target):
        assert str(source) in message and "model.layers.4." in message
        assert "Put the checkpoint's safetensors back" in message
    assert_same_tensors(target, source)


def train_and_send(config: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """What a refit sends after a step, by name; an export of the same goes to `path`."""
    with open_policy(config, init_reference_model=False) as policy:
        step(policy)
        policy.export_hf(path)
        names = set(policy.exporter.plan().info())
        sent = {name: tensor.clone() for name, tensor in policy.export()}
        assert sent.keys() == names
        return sent if policy.rank == 0 else {}


def test_a_refit_sends_trained_layers_with_their_copies_and_none_that_are_left_out(
    ranks, tmp_path
) -> None:
    source = make_model(tmp_path / "source", layers=2)
    config = policy_config(source, TP2PP2.megatron | MTP)
    sent, *_ = ranks.run(4, train_and_send, config, tmp_path / "exported")
    exported, before = tensors_of(tmp_path / "exported"), tensors_of(source)
    assert exported.keys() == before.keys()
    left_out = {name for name in before if name.startswith("model.layers.5.")}
    assert sent.keys() == before.keys() - left_out
    for name, tensor in exported.items():
        assert torch.equal(tensor, before[name] if name in left_out else sent[name]), name
    for name in ("enorm.weight", "eh_proj.weight", "shared_head.norm.weight"):
        assert not torch.equal(sent[f"model.layers.4.{name}"], before[f"model.layers.4.{name}"])
    for copy, original in COPIES.items():
        assert torch.equal(sent[f"model.layers.4.{copy}"], sent[original])
        assert not torch.equal(sent[original], before[original])


def step_again(config: dict[str, Any], root: Path, save: bool) -> dict[str, Any]:
    """What a second step gives, with the weights after it; the first is saved, or was."""
    saved = {} if save else paths(root)
    with open_policy(config, init_reference_model=False, **saved) as policy:
        if save:
            step(policy)
            policy.save_checkpoint(**paths(root), hf_export=root / "hf")
        assert policy.steps == 1
        result = step(policy)
        kept = {name: p.detach().clone() for name, p in policy.named_parameters()}
        return {"norm": result["grad_norm"], "weights": kept}


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron_h"])
def test_a_checkpoint_goes_on_bit_for_bit_and_converts_to_what_was_exported(
    ranks, tmp_path, family: str
) -> None:
    config = policy_config(make_model(tmp_path / "source", family), PP2.megatron | MTP)
    saved, resumed = (ranks.run(2, step_again, config, tmp_path, save) for save in (True, False))
    for before, after in zip(saved, resumed, strict=True):
        assert torch.equal(before["norm"], after["norm"])
        assert before["weights"].keys() == after["weights"].keys()
        for name, tensor in before["weights"].items():
            assert torch.equal(tensor, after["weights"][name]), name
    assert any(name.startswith("mtp.embedding.") for name in saved[1]["weights"])
    assert verify(tmp_path / "weights", tmp_path / "hf", config=tmp_path / "source").equal
    # Another layout goes on with the same weights; its sums are rounded in another order.
    alone = ranks.run(1, step_again, policy_config(tmp_path / "source", MTP), tmp_path, False)[0]
    torch.testing.assert_close(alone["norm"], saved[0]["norm"], rtol=1e-4, atol=0)
    load = methodcaller("load_checkpoint", tmp_path / "weights", tmp_path / "optimizer")
    without = policy_config(tmp_path / "source", {})
    (message,) = ranks.run(1, refusal, without, CheckpointError, load)
    assert "their megatron_cfg.mtp_num_layers or" in message


def in_parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A step taken at once, and one from the same weights in two parts."""
    found = []
    for split in (False, True):
        with open_policy(config, init_reference_model=False) as policy:
            if not split:
                found.append(step(policy))
                continue
            with pytest.raises(ConfigError, match="divided by valid sequences"):
                policy.accumulator.begin(SequenceNLL())
            policy.accumulator.begin(LOSSES["token"](), mbs=2)
            for part in (BATCH.slice(0, 2), BATCH.slice(2, GLOBAL_BATCH)):
                policy.accumulator.microbatch(part)
            found.append(policy.accumulator.finish())
    return found


def test_a_step_in_parts_is_the_step_taken_at_once(ranks, tmp_path) -> None:
    config = policy_config(make_model(tmp_path), PP2.megatron | MTP)
    for whole, parts in ranks.run(2, in_parts, config):
        torch.testing.assert_close(parts["grad_norm"], whole["grad_norm"], rtol=1e-5, atol=0)
        torch.testing.assert_close(parts["loss"], whole["loss"], rtol=1e-5, atol=0)
        assert total([parts], 1) == pytest.approx(total([whole], 1), rel=1e-5)


def test_more_layers_than_the_model_has_are_refused_by_the_key_to_change(ranks, tmp_path) -> None:
    config = policy_config(make_model(tmp_path), {"mtp_num_layers": 2})
    (message,) = ranks.run(1, refusal, config, ConversionError)
    assert "mtp_num_layers asks for 2: set it to 1 or less" in message


def test_log_probabilities_are_the_same_with_and_without_these_layers(ranks, tmp_path) -> None:
    path, score = make_model(tmp_path), methodcaller("logprobs", {"input_ids": BATCH["input_ids"]})
    with_layers, without = (
        ranks.run(1, answer_trainable, policy_config(path, section), score)[0]
        for section in (MTP, {})
    )
    assert torch.equal(with_layers, without)
