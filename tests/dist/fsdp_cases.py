"""Configurations of the engine over transformers' modules with the oracle's hyperparameters, and
what its ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from megatron_policy.batch import BatchedDataDict
from megatron_policy.refit.transports.disk import HfDirectory
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy
from tests.dist.layouts import LENGTH, VOCAB
from tests.exact import load_hf

LOSS_OF = {"token": oracle.token_level, "logit": oracle.logit_level}
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 32, "sequence_length_round": 4}
    },
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 32}},
}
MLPS = {
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}
"""A plan that leaves attention whole."""


@dataclass(frozen=True)
class Sharding:
    """A layout: ranks, and keys of `dtensor_cfg` (FSDP2) or `fsdp_cfg` (FSDP1)."""

    world: int
    keys: Mapping[str, Any]
    section: str = "dtensor_cfg"


SHARDINGS = {
    "one rank": Sharding(1, {}),
    "2 shards": Sharding(2, {}),
    "4 shards": Sharding(4, {"activation_checkpointing": True}),
    "2 shards x 2 copies": Sharding(4, {"dp_replicate_size": 2}),
    "2 copies": Sharding(2, {"dp_replicate_size": 2}),
    "cp 2": Sharding(2, {"context_parallel_size": 2}),
    "tp 2": Sharding(2, {"tensor_parallel_size": 2}),
    "tp 2 x dp 2": Sharding(4, {"tensor_parallel_size": 2, "activation_checkpointing": True}),
    "tp 2 + sp x dp 2": Sharding(4, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp 2 + sp x cp 2": Sharding(
        4, {"tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    ),
    "tp 2 + sp, own plan": Sharding(
        2,
        {
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "custom_parallel_plan": f"{__name__}.MLPS",
        },
    ),
    "tp 2 x 2 copies": Sharding(4, {"tensor_parallel_size": 2, "dp_replicate_size": 2}),
    "tp 4": Sharding(4, {"tensor_parallel_size": 4}),
    "cp 2 x dp 2": Sharding(4, {"context_parallel_size": 2, "activation_checkpointing": True}),
    "FSDP1 x 2": Sharding(2, {}, "fsdp_cfg"),
    "FSDP1 x 4": Sharding(4, {"activation_checkpointing_enabled": True}, "fsdp_cfg"),
    "FSDP1 grad op x 2": Sharding(2, {"sharding_strategy": "shard_grad_op"}, "fsdp_cfg"),
    "FSDP1 no shard x 2": Sharding(2, {"sharding_strategy": "no_shard"}, "fsdp_cfg"),
}


def decayed(name: str) -> dict[str, float]:
    """What differs for a parameter in the oracle's training, of which torch decays all."""
    return {"weight_decay": oracle.WEIGHT_DECAY}


def data() -> BatchedDataDict:
    """Two global batches."""
    return oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)


def share(batch: BatchedDataDict, policy: Any) -> BatchedDataDict:
    """This data-parallel rank's rows."""
    return share_of(batch, policy.coords.dp, policy.topology.dp)


def share_of(batch: BatchedDataDict, rank: int, ranks: int) -> BatchedDataDict:
    return batch.get_batch(rank, batch.size // ranks)


def trained(config: dict[str, Any], loss: str, folder: str, engine: str = "") -> dict[str, Any]:
    """Two steps, and all that can be asked before and after; over the module `engine`, if any."""
    config = config | {"generation": {"max_new_tokens": 4, "temperature": 1.0}}
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    over = import_module(engine) if engine else None
    with open_policy(config, tokenizer=tokenizer, engine=over) as policy:
        own = share(data(), policy)
        texts = BatchedDataDict({key: own[key] for key in ("input_ids", "input_lengths")})
        seen: dict[str, Any] = {"dp": policy.coords.dp, "before": policy.logprobs(texts)}
        seen["topk"], seen["entropy"] = policy.topk_logits(texts, 3), policy.entropy(texts)
        seen["steps"] = [
            policy.train(share(data().get_batch(step, GLOBAL_BATCH), policy), LOSSES[loss]())
            for step in range(2)
        ]
        seen["logprobs"], seen["shown"] = policy.logprobs(texts), repr(policy)
        seen["reference"] = policy.reference_logprobs(texts)
        policy.export_hf(f"{folder}/exported")
        policy.refit(HfDirectory(f"{folder}/refit"))
        lengths = torch.tensor([5, 3] * (texts.size // 2))
        prompts = {"input_ids": own["input_ids"][:, :5], "input_lengths": lengths}
        seen["written"] = policy.generate(BatchedDataDict(prompts), greedy=True)
        again = {"input_ids": seen["written"].tokens_BT, "input_lengths": seen["written"].lengths_B}
        seen["read again"] = policy.logprobs(BatchedDataDict(again))
        seen["streamed"] = {name: tensor.clone() for name, tensor in policy.export()}
        policy.memory.offload("gradients")
        policy.memory.onload("gradients")
        policy.save_checkpoint(f"{folder}/saved", f"{folder}/saved")
        dist.barrier()
        return seen


def assert_trained(
    hf: oracle.Learned, path: Path, folder: Path, seen: Sequence[dict[str, Any]]
) -> None:
    """What `trained` has seen on each rank is what Hugging Face computes, learns and writes."""
    for rank in seen:
        hf.assert_same_steps(rank["steps"])
    exported = load_file(folder / "exported" / "model.safetensors")
    assert exported.keys() == load_file(folder / "refit" / "model.safetensors").keys()
    for name in hf.exact.weights.keys() & exported.keys():
        hf.assert_same_weight(exported[name], hf.exact.weights[name], name)
        assert torch.equal(seen[0]["streamed"][name], exported[name])
    start, after = load_hf(path, torch.float32), load_hf(folder / "exported", torch.float32)
    for rank in seen:
        own = share_of(data(), rank["dp"], 1 + max(other["dp"] for other in seen))
        assert_reads_as_hf(rank, own, start, after)
        assert_writes_what_it_reads(rank, own.size)


@torch.no_grad()
def assert_reads_as_hf(seen: dict[str, Any], own: BatchedDataDict, start: Any, after: Any) -> None:
    """`own` are the rank's rows, the models those before and after training."""
    tokens = own["input_ids"]
    inside = torch.arange(LENGTH)[1:] < own["input_lengths"][:, None]
    for found, model in (("before", start), ("reference", start), ("logprobs", after)):
        expected = oracle.hf_logprobs(model, tokens)[inside]
        assert torch.allclose(seen[found][:, 1:][inside], expected, atol=1e-5, rtol=0), found
    logits = start(tokens).logits
    values, entries = (each[:, 1:][inside] for each in seen["topk"])
    best = logits.topk(3)
    assert torch.allclose(values, best.values[:, 1:][inside], atol=1e-5)
    assert torch.equal(entries, best.indices[:, 1:][inside])
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    assert torch.allclose(seen["entropy"][:, 1:][inside], entropy[inside], atol=1e-5)


def assert_writes_what_it_reads(seen: dict[str, Any], rows: int) -> None:
    written = seen["written"]
    assert written.generated_B.eq(4).all() and written.lengths_B.tolist() == [9, 7] * (rows // 2)
    new = written.logprobs_BT != 0
    assert new.sum() == 4 * rows
    assert torch.allclose(written.logprobs_BT[new], seen["read again"][new], atol=1e-5)


def resume(config: dict[str, Any], saved: str | None, folder: str, step: int) -> dict[str, Any]:
    """Go on from what is saved, take global batch number `step` and save again."""
    with open_policy(config) as policy:
        report = policy.load_checkpoint(saved, saved) if saved else None
        batch = share(data().get_batch(step % 2, GLOBAL_BATCH), policy)
        found = policy.train(batch, LOSSES["token"]())
        policy.save_checkpoint(folder, folder)
        policy.export_hf(f"{folder}-exported")
        return {"report": report, "step": found}
