"""Training goes on from a checkpoint as if it had never stopped: bit by bit under the layout that
saved it, within rounding under any other.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.convert import convert, verify
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    VOCAB,
    Layout,
    layout,
    of_transformers,
)
from tests.dist.resuming import (
    CONSTANT,
    HOST_DATA,
    TOKENIZER,
    TRACKER,
    config_of,
    differing,
    drawn,
    everything_of,
    iteration,
    leftovers,
    optimizers,
    paths,
    prints,
    read_disk,
    resumed,
    train,
    weights_of,
    writers_held,
)
from tests.dist.test_adapters import FULL
from tests.dist.test_dist_checkpoints import sharded
from tests.exact import furthest
from tests.margins import check
from tests.ranks import RankPool

SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
BF16 = {"precision": "bfloat16"}
FP16 = {"precision": "float16"}
DOUBLING = {"optimizer": {"loss_scale_window": 3, "initial_loss_scale": 256.0}}
"""The factor on losses doubles after the third step, the first of those after the save."""
ALL = {"weights", "optimizer", "schedule", "random numbers"}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}}
FSDP1, FSDP2 = FSDP1_LAYOUTS["FSDP1 x 2"], FSDP2_LAYOUTS["FSDP2 x 2"]
SGD = {"optimizer": {"name": "torch.optim.SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}}}
RADAM = {"optimizer": {"name": "torch.optim.RAdam", "kwargs": {"lr": 0.01}}}
PLAIN_SGD = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0}}
PEFT = {"enabled": True, "dim": 4, "alpha": 8.0, "lora_B_init_method": "normal"}
LORA, DROPPED = {"peft": PEFT}, {"peft": {**PEFT, "dropout": 0.3}}
ASYNC = {"checkpoint": {"async_save": True, "ckpt_assume_constant_structure": True}}


@dataclass(frozen=True)
class Case:
    """A policy: its layout, the rest of its configuration, and its model."""

    layout: Layout
    megatron: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen2"
    """Which is tied here; others are not."""

    def config(self, path: Path) -> dict[str, Any]:
        return config_of(path, self.layout.megatron, self.megatron, **self.top)


@pytest.fixture
def path_of(checkpoint: Callable[..., Path]) -> Callable[[Case], Path]:
    return lambda case: checkpoint(case.family, tied=case.family == "qwen2", **SIZES)


def bare(path: Path, case: Case, to: Path) -> dict[str, Any]:
    """The configuration with a copy of the model that has no weights, unless adapters need them."""
    if "peft" in case.megatron:
        return case.config(path)
    shutil.copytree(path, to / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    return case.config(to / "bare")


SAME = {
    "TP2": Case(LAYOUTS["TP2"], family="qwen3"),
    "PP2, tied": Case(LAYOUTS["PP2"]),
    "DP2, distributed optimizer, both overlaps": Case(layout(2, **OVERLAPPED), ASYNC),
    "DP2, distributed, bf16, async": Case(layout(2, **SHARDED), ASYNC, BF16),
    "DP2, distributed, fp16": Case(layout(2, **SHARDED), DOUBLING, FP16),
    "TP2, bf16": Case(LAYOUTS["TP2"], top=BF16, family="apertus"),
    "EP2xDP2, distributed, packed": Case(
        layout(4, expert_model_parallel_size=2, **OVERLAPPED), {}, PACKED, "qwen3_moe"
    ),
    "CP2, packed": Case(layout(2, context_parallel_size=2, **OVERLAPPED), top=PACKED),
    "TP2xPP2xDP2": Case(layout(8, tp=2, pp=2, **OVERLAPPED)),
    "PP2, distributed, tied, bf16": Case(layout(2, pp=2, **SHARDED), top=BF16),
    "bf16, SGD without momentum": Case(layout(1), PLAIN_SGD, BF16),
    "DP2, distributed, bf16, frozen routers": Case(
        layout(2, **OVERLAPPED), {"freeze_moe_router": True}, BF16, "deepseek_v3"
    ),
    "adapters, TP2+SP": Case(LAYOUTS["TP2+SP"], DROPPED),
    "adapters, PP2xVPP2, recomputed": Case(LAYOUTS["PP2xVPP2"], FULL | DROPPED),
    "adapters, DP2, distributed, overlapped, bf16": Case(layout(2, **OVERLAPPED), DROPPED, BF16),
    "adapters, EP2": Case(EXPERT_LAYOUTS["EP2"], DROPPED, family="qwen3_moe"),
    "FSDP2 x 2, bf16": Case(FSDP2, top=BF16, family="gpt_oss"),
    "FSDP2 2x2 copies": Case(FSDP2_LAYOUTS["FSDP2 2x2 copies"], top=PACKED),
    "FSDP2 x 2, SGD": Case(FSDP2, top=SGD),
    "FSDP2 x 2, RAdam": Case(FSDP2, top=RADAM, family="qwen3_moe"),
    "FSDP1 x 2, bf16": Case(FSDP1, top=BF16, family="gpt_oss"),
}


def go_on(policy: MegatronPolicy) -> dict[str, Any]:
    """What is drawn and trained from here."""
    return {
        "drawn": prints(drawn(policy)),
        "steps": [prints_of(step) for step in train(policy, range(2, 4))],
        "end": prints(everything_of(policy)),
    }


def prints_of(step: dict[str, Any]) -> dict[str, Any]:
    return prints({k: v for k, v in step.items() if isinstance(v, torch.Tensor)}) | {
        k: v for k, v in step.items() if not isinstance(v, torch.Tensor)
    }


def straight(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Four steps with a save after two; then back to it, and on from there once more."""
    tokens = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    background = config.get("megatron_cfg", {}).get("checkpoint", {}).get("async_save", False)
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        seen: dict[str, Any] = {"reference": prints({"": policy.reference_logprobs(tokens)})}
        train(policy, range(2))
        drawn(policy)
        seen["saved"] = prints(everything_of(policy))
        with writers_held() if background else nullcontext():
            policy.save_checkpoint(**paths(root), host_data=HOST_DATA)
            seen["on"] = go_on(policy)
            assert not (background and (root / "weights" / TRACKER).exists()), (
                "the save was complete before what it should not wait for"
            )
        policy.finalize_async_save()
        seen["report"] = policy.load_checkpoint(**paths(root))
        seen["back"] = prints(everything_of(policy))
        seen["on again"] = go_on(policy)
        return seen


def from_checkpoint(config: dict[str, Any], root: Path, reference: bool) -> dict[str, Any]:
    tokens = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with resumed(config, root, init_reference_model=reference) as policy:
        seen: dict[str, Any] = {"report": policy.loaded}
        seen["back"] = prints(everything_of(policy))
        seen["on"] = go_on(policy)
        if reference:
            seen["reference"] = prints({"": policy.reference_logprobs(tokens)})
        return seen


SAME_EVERY_DAY = ("TP2", "DP2, distributed, bf16, async")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.daily] * (name in SAME_EVERY_DAY)) for name in SAME],
)
def test_four_steps_equal_two_a_save_a_load_in_other_processes_and_two(
    ranks: RankPool, path_of: Callable[[Case], Path], tmp_path: Path, name: str
) -> None:
    case = SAME[name]
    path, root = path_of(case), tmp_path / "run"
    before = ranks.run(case.layout.world, straight, case.config(path), root)
    assert leftovers(root / "weights") == leftovers(root / "optimizer") == []
    if name == "TP2":
        others = RankPool()
        after = others.run(case.layout.world, from_checkpoint, case.config(path), root, True)
        others.end()
    else:
        config = bare(path, case, tmp_path)
        after = ranks.run(case.layout.world, from_checkpoint, config, root, "peft" in case.megatron)
    for old, new in zip(before, after, strict=True):
        for seen in (old, new):
            assert differing(seen["back"], old["saved"]) == []
            assert seen["report"].step == 2 and seen["report"].host_data == HOST_DATA
            assert Path(seen["report"].path) == iteration(root / "weights", 2)
            assert {*seen["report"].restored} == ALL
            assert not seen["report"].not_restored
        for on in (old["on again"], new["on"]):
            assert on["drawn"] == old["on"]["drawn"]
            assert on["steps"] == old["on"]["steps"]
            assert differing(on["end"], old["on"]["end"]) == []
        assert differing(old["on"]["end"], old["saved"]) != []
        if "reference" in new:
            assert new["reference"] == old["reference"]
    learning = [(step["lr"], step["wd"]) for step in before[0]["on"]["steps"]]
    assert len({*learning}) == len(learning), "a lost counter would not be noticed"


SGD_MEGATRON = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}}
ALL_LAYOUTS = {
    **(LAYOUTS | EXPERT_LAYOUTS | FSDP2_LAYOUTS | FSDP2_TENSOR_LAYOUTS | FSDP1_LAYOUTS),
    "DP4": layout(4, **SHARDED),
    "DP2, distributed": layout(2, **SHARDED),
    "TP2xPP2": layout(4, tp=2, pp=2),
    "TP2xPP2+SP": layout(4, tp=2, pp=2, sequence_parallel=True),
    "EP4, distributed": layout(4, expert_model_parallel_size=4, **SHARDED),
    "EP2xETP2": layout(4, expert_model_parallel_size=2, expert_tensor_parallel_size=2),
}
MOVES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("qwen2", "DP4", "TP2xPP2", {}),
    ("qwen2", "TP2xPP2", "DP4", {}),
    ("qwen3", "PP2xVPP2", "TP2", {}),
    ("qwen2", "one process", "PP2", {}),
    ("qwen3_moe", "DP2, distributed", "TP2+SP", {}),
    ("deepseek_v3", "EP4, distributed", "one process", {}),
    ("qwen3_moe", "EP4, distributed", "EP2xETP2", {}),
    ("mixtral", "EP4, distributed", "TP2xPP2+SP", {}),
    ("gpt_oss", "EP2xTP2+SP", "EP2xPP2", {}),
    ("qwen2", "TP2", "DP2", SGD_MEGATRON),
    ("qwen2", "FSDP2 x 2", "FSDP2 2x2 copies", {}),
    ("gpt_oss", "FSDP2 x 4", "FSDP2 CP2", {}),
    ("gpt_oss", "FSDP2 TP2+SP x 2", "FSDP2 x 4", {}),
    ("qwen2", "TP2+SP", "FSDP2 x 2", CONSTANT),
    ("qwen2", "FSDP2 x 4", "PP2", CONSTANT),
    ("qwen3_moe", "FSDP2 x 2", "EP2", CONSTANT),
    ("qwen2", "FSDP1 x 4", "PP2", CONSTANT),
    ("qwen3_moe", "FSDP2 x 2", "FSDP1 x 2", {}),
    ("qwen2", "TP2+SP", "FSDP1 2 copies", CONSTANT),
    ("gpt_oss", "FSDP1 x 2", "FSDP2 x 4", {}),
    ("qwen3", "TP2+SP", "PP2 uneven", LORA),
    ("qwen3", "PP2xVPP2", "one process", LORA),
    ("qwen3_moe", "EP2xTP2+SP", "EP2xPP2", LORA),
    ("qwen3_moe", "TP2+SP, experts whole", "EP2xETP2+TP2", LORA),
    ("qwen3_moe", "EP2", "one process", LORA),
    ("gpt_oss", "EP2xTP2+SP", "PP2", LORA),
    ("gpt_oss", "EP4", "EP2xTP2+SP", LORA),
]
"""Model, who saves, who loads, and what both have."""


def moved(family: str, saver: str, loader: str, both: dict[str, Any]) -> tuple[Case, ...]:
    return tuple(Case(ALL_LAYOUTS[each], both, family=family) for each in (saver, loader))


TP2, DP2_BF16 = Case(LAYOUTS["TP2"]), Case(layout(2, **SHARDED), top=BF16)
CHANGES = {
    **{
        f"{'adapters, ' * (move[3] is LORA)}{' -> '.join(move[:3])}": moved(*move) for move in MOVES
    },
    "bf16, DP2 -> TP2": (DP2_BF16, Case(LAYOUTS["TP2"], top=BF16)),
    "fp32 -> bf16": (TP2, DP2_BF16),
    "bf16 -> fp32": (DP2_BF16, TP2),
}


def save_and_step(config: dict[str, Any], root: Path) -> dict[str, Any]:
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, range(2))
        policy.save_checkpoint(**paths(root / "saved"))
        (step,) = train(policy, [2])
        policy.save_checkpoint(**paths(root / "a step later"))
        return step


def load_and_step(config: dict[str, Any], root: Path) -> dict[str, Any]:
    with resumed(config, root / "saved", init_reference_model=False) as policy:
        policy.save_checkpoint(**paths(root / "loaded"))
        report = policy.loaded
        (step,) = train(policy, [2])
        policy.save_checkpoint(**paths(root / "loaded, a step later"))
        return step | {"report": report}


def on_disk(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Everything by key in one-rank form, whatever wrote it."""
    weights, optimizer = (read_disk(iteration(at, step)) for at in paths(root).values())
    assert weights and optimizer and not weights.keys() & optimizer.keys()
    return weights | optimizer


STATE = "optimizer.state."


def expected(saved: dict[str, torch.Tensor], saver: Case, loader: Case) -> dict[str, torch.Tensor]:
    """What the loader must hold of what was saved: fp32 weights are what was trained."""
    main = f"{STATE}fp32_param."
    trained = {key.removeprefix(main): t for key, t in saved.items() if key.startswith(main)}
    weights = {key: t for key, t in saved.items() if not key.startswith(STATE)}
    moments = {key: t for key, t in saved.items() if key.startswith(STATE) and main not in key}
    if saver.top == loader.top:
        return saved
    if loader.top == BF16:
        rounded = {key: t.bfloat16() for key, t in weights.items()}
        return rounded | {main + key: t for key, t in weights.items()} | moments
    return weights | trained | moments


DAILY = ("qwen2 -> DP4 -> TP2xPP2",)
# Two ranks share copies of experts' adapters, and other two those of all else.
DAILY += ("adapters, qwen3_moe -> TP2+SP, experts whole -> EP2xETP2+TP2",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.daily] * (name in DAILY)) for name in CHANGES]
)
def test_weights_moments_and_schedule_go_on_under_another_layout(
    ranks: RankPool, path_of: Callable[[Case], Path], tmp_path: Path, name: str
) -> None:
    saver, loader = CHANGES[name]
    assert_goes_on(ranks, path_of(saver), saver, loader, tmp_path)


def assert_goes_on(ranks: Any, path: Path, saver: Case, loader: Case, tmp_path: Path) -> None:
    """The loader holds what the saver had, and its next step is that of the saver."""
    old = ranks.run(saver.layout.world, save_and_step, saver.config(path), tmp_path)
    new = ranks.run(loader.layout.world, load_and_step, bare(path, loader, tmp_path), tmp_path)
    saved, loaded = on_disk(tmp_path / "saved", 2), on_disk(tmp_path / "loaded", 2)
    assert "peft" not in saver.megatron or all(".adapter." in key for key in saved)
    wanted = expected(saved, saver, loader)
    if saver.top != loader.top:  # norms under two names are written once as fp32 parameters
        wanted = {key: wanted[key] for key in loaded}
    assert differing(prints(loaded), prints(wanted)) == []
    kinds = {key.removeprefix(STATE).split(".")[0] for key in saved if key.startswith(STATE)}
    assert kinds - {"fp32_param"} == (
        {"momentum_buffer"} if saver.megatron is SGD_MEGATRON else {"exp_avg", "exp_avg_sq"}
    )
    precise = saver.top == loader.top == {}
    for seen in new:
        assert (seen["lr"], seen["wd"]) == (old[0]["lr"], old[0]["wd"])
        rtol = 1e-5 if precise else 2e-2
        for key, allowed in (("loss", rtol), ("grad_norm", 10 * rtol)):
            apart = furthest(seen[key] / old[0][key], torch.ones(()))
            check(f"resumed {key}, {'precise' if precise else 'rounded'}", apart, allowed)
        report = seen["report"]
        missing = set(report.not_restored)
        if of_transformers(saver.layout.megatron) and not of_transformers(loader.layout.megatron):
            # Schedules of torch have no such settings as Megatron-Core's.
            missing = {name for name in missing if not name.startswith("schedule.")}
        assert {*report.restored} | missing == ALL
        assert ALL - {*report.restored} <= {"random numbers"}, report
    if precise:
        later, then = (on_disk(tmp_path / n, 3) for n in ("a step later", "loaded, a step later"))
        assert then.keys() == later.keys()
        for key, tensor in later.items():
            allowed = 1e-6 + 1e-4 * float(tensor.abs().max())
            kind = key.removeprefix(STATE).split(".")[0] if key.startswith(STATE) else "weights"
            check(f"resumed {kind}", furthest(then[key], tensor), allowed, key)


def in_memory_and_on_disk(config: dict[str, Any], root: Path) -> list[str]:
    """The keys under which the disk has something else than one process that holds everything."""
    from megatron_policy.converters.formats.dist_keys import written

    with open_policy(config, init_reference_model=False) as policy:
        train(policy, range(2))
        policy.save_checkpoint(**paths(root))
        arch, wrong = policy._engine.table.architecture, []
        (optimizer,) = optimizers(policy)
        disk = on_disk(root, 2)
        for entry, parameter in policy._engine.held:
            rows = parameter.shape[0] - entry.row.pad_rows(arch, 0, 1)
            state = optimizer.state[parameter]
            held = {"": parameter, **{f"{STATE}{kind}.": state[kind] for kind in MOMENTS}}
            for place in written(entry, arch):
                for prefix, tensor in held.items():
                    if not (prefix and place != written(entry, arch)[0]):
                        found = disk[prefix + place.key][place.lead]
                        if not torch.equal(found, tensor.detach()[:rows].cpu()):
                            wrong.append(prefix + place.key)
        return wrong


MOMENTS = ("exp_avg", "exp_avg_sq")


def test_the_disk_has_under_each_key_what_one_process_has_in_memory(
    ranks: RankPool, path_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    case = Case(layout(1))
    assert ranks.run(1, in_memory_and_on_disk, case.config(path_of(case)), tmp_path) == [[]]


def save_and_export(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root), hf_export=root / "hf")


def load_by_megatron(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """What differs of the weights that Megatron-Core's own loader reads, and what ours says."""
    from megatron.core import dist_checkpointing

    path = str(iteration(root / "weights", 1))
    unused = {"init_optimizer": False, "init_reference_model": False}
    with open_policy(config, **unused) as policy, torch.no_grad():
        (chunk,) = policy._engine.pipeline.chunks
        for parameter in chunk.parameters():
            parameter.normal_()
        content = dist_checkpointing.load_content_metadata(path)
        state = dist_checkpointing.load({"model": sharded(chunk, **content)}, path)
        chunk.load_state_dict(state["model"])
        theirs = prints(weights_of(policy))
        for parameter in chunk.parameters():
            parameter.normal_()
        report = policy.load_checkpoint(root / "weights")
        return {"differ": differing(theirs, prints(weights_of(policy))), "report": report}


def test_megatron_loads_it_and_the_converter_makes_of_it_what_hf_export_wrote(
    ranks: RankPool, path_of: Callable[[Case], Path], tmp_path: Path
) -> None:
    case = Case(layout(2, **OVERLAPPED))
    path = path_of(case)
    ranks.run(2, save_and_export, case.config(path), tmp_path)
    for seen in ranks.run(2, load_by_megatron, Case(LAYOUTS["PP2"]).config(path), tmp_path):
        assert seen["differ"] == []
        assert "optimizer" in seen["report"].not_restored
    convert(tmp_path / "weights", tmp_path / "converted", "hf")
    assert verify(tmp_path / "converted", tmp_path / "hf").equal
    assert not verify(tmp_path / "converted", path).equal
