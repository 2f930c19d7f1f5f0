"""What a training call reports of its speed: counts follow from the data and the layout, times add
up, and nothing is exchanged for it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.profiling import device_name
from megatron_policy.estimate.devices import figures_of
from megatron_policy.estimate.flops import model_flops
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.training import step
from megatron_policy.training.sync_microbatches import cut_synchronized
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB, layout
from tests.losses import TokenNLL

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 20, "logprob_mb_tokens": 20}}
BATCHES = 2
DATA = oracle.make_batch(BATCHES * GLOBAL_BATCH, LENGTH, VOCAB, seed=3)
TOKENS = int(DATA["input_lengths"].sum())
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "PP2xVPP2": (2, layout(2, pp=2, vpp=2).megatron, {}),
    "PP2xDP2, packed": (4, layout(4, pp=2).megatron, PACKED),
    "TP2xCP2+SP": (
        4,
        layout(4, tp=2, sequence_parallel=True, context_parallel_size=2).megatron,
        {},
    ),
}


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """The speed of each kind of call, and what it has to be counted from."""
    with open_policy(config, init_reference_model=False) as policy:
        share = DATA.shard_by_batch_size(policy.topology.dp, batch_size=GLOBAL_BATCH)
        own = share[policy.coords.dp]
        trained = policy.train(own, TokenNLL())
        evaluated = policy.train(own, TokenNLL(), eval_mode=True)
        policy.accumulator.begin(TokenNLL())
        half = own.size // 2
        for part in (own.slice(0, half), own.slice(half, own.size)):
            policy.accumulator.microbatch(part)
        in_parts = policy.accumulator.finish()
        lengths = DATA["input_lengths"].tolist()
        predicted = sum(trained["valid_tokens"])
        return {
            "results": (trained, evaluated, in_parts),
            "flops": model_flops(policy._engine.table.architecture, lengths, int(predicted)),
            "collectives": collectives(policy, own),
        }


def collectives(policy: MegatronPolicy, own: BatchedDataDict) -> int:
    """How many it takes to cut a batch together."""
    batcher, calls = policy._batcher, []
    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast_object_list", "barrier")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return originals[name](*args, **kwargs)

    try:
        for name in names:
            setattr(dist, name, partial(counting, name))
        cut = partial(step._cut, policy._engine, batcher, own, TokenNLL(), GLOBAL_BATCH, 1)
        cut_synchronized(cut, batcher, policy._engine.groups.dp)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return len(calls)


@pytest.mark.parametrize("name", CASES)
def test_speed_is_counted_from_data_and_layout_and_times_add_up(ranks, checkpoint, name) -> None:
    world, megatron, top = CASES[name]
    config = policy_config(checkpoint("qwen2", **SIZES), megatron, **top)
    found = ranks.run(world, measured, config)
    for rank in found:
        assert rank["collectives"] == 2  # one says that no rank refuses, one what each will run
        for result, first in zip(rank["results"], found[0]["results"], strict=True):
            speed = result["speed"]
            assert counts(speed) == counts(first["speed"])
            check_times(speed)
        trained, evaluated, in_parts = (result["speed"] for result in rank["results"])
        assert trained["model_flops"] == in_parts["model_flops"] == rank["flops"]
        assert evaluated["model_flops"] * 3 == trained["model_flops"]
        assert evaluated["step_seconds"] == evaluated["reduce_seconds"] == 0
        assert min(trained["step_seconds"], trained["reduce_seconds"]) > 0
        assert min(in_parts["step_seconds"], in_parts["reduce_seconds"]) > 0
        known = figures_of(device_name()) is not None
        assert ("mfu" in trained) == known, "no figures are known of a CPU"
        run = rank["results"][0]["microbatch_metrics"]["lr"]
        check_efficiency(name, trained, len(run))


def counts(speed: dict[str, float]) -> dict[str, float]:
    """What is the same on every rank."""
    times = ("second", "peak")
    return {key: value for key, value in speed.items() if not any(word in key for word in times)}


def check_times(speed: dict[str, float]) -> None:
    parts = ("forward_backward_seconds", "reduce_seconds", "step_seconds")
    assert speed["forward_backward_seconds"] > 0
    assert sum(speed[part] for part in parts) <= speed["seconds"]
    assert speed["tokens"] == TOKENS
    assert speed["tokens_per_second"] == TOKENS / speed["seconds"]
    assert ("peak_resident_bytes" in speed) != ("peak_memory_bytes" in speed)
    assert max(speed.get(f"peak_{kind}_bytes", 0) for kind in ("resident", "memory")) > 0


def check_efficiency(name: str, speed: dict[str, float], microbatches: int) -> None:
    """`microbatches` are those that this rank has run, of both batches, without fillers."""
    efficiency, imbalance = speed["packing_efficiency"], speed["data_parallel_imbalance"]
    if name == "PP2xDP2, packed":
        assert efficiency > 0.9 and 1 < imbalance < 2
        turns = BATCHES / speed["pipeline_bubble"] - BATCHES  # of both batches together
        assert turns == pytest.approx(round(turns)) and turns >= microbatches
        return
    # Padded rows are one microbatch each, as wide as the layout needs.
    width = 16 if name == "TP2xCP2+SP" else LENGTH
    assert efficiency == TOKENS / (BATCHES * GLOBAL_BATCH * width)
    assert imbalance == 1
    chunks = 2 if name == "PP2xVPP2" else 0
    assert speed["pipeline_bubble"] == (1 / (GLOBAL_BATCH * chunks + 1) if chunks else 0)


def reported(config: dict[str, Any], root: Path) -> Any:
    """The reports of a save, of one in the background, and of a refit."""
    with open_policy(config, init_reference_model=False) as policy:
        waits = not config["megatron_cfg"].get("checkpoint")
        saved = policy.save_checkpoint(root / "weights", root / "optimizer")
        assert (saved is not None) == waits
        finished = policy.finalize_async_save()
        assert (finished is None) == waits
        manifest = policy.refit(HfDirectory(root / "hf", config["model_name"]))
        return saved or finished, manifest.speed


@pytest.mark.parametrize("background", [False, True])
def test_saves_and_refits_report_bytes_seconds_and_their_rate(
    ranks, checkpoint, tmp_path, background: bool
) -> None:
    path = checkpoint("qwen2", **SIZES)
    config = policy_config(path, {"checkpoint": {"async_save": True}} if background else {})
    found = ranks.run(2, reported, config, tmp_path)
    written = [
        file
        for part in ("weights", "optimizer")
        for file in (tmp_path / part).rglob("*")
        if file.is_file() and file.parent != tmp_path / part
    ]
    on_disk = sum(file.stat().st_size for file in written)
    for saved, sent in found:
        assert saved.step == 0 and saved.total_bytes == found[0][0].total_bytes
        assert saved.total_bytes == on_disk
        assert saved.bytes_per_second == saved.total_bytes / saved.seconds > 0
        assert sent["bytes_per_second"] * sent["seconds"] == pytest.approx(sent["total_bytes"])
        assert sent["seconds"] > 0
    hf = sum(file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors"))
    assert 0.9 * hf < sum(sent["total_bytes"] for _, sent in found) < hf
