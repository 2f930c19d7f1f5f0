"""Configurations of the engine over transformers' modules with the oracle's hyperparameters, and
what its ranks do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.refit.transports.disk import HfDirectory
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy
from tests.dist.layouts import LENGTH, VOCAB

BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 32, "sequence_length_round": 4}
    },
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 32}},
}


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
    ranks = policy.topology.dp
    return batch.get_batch(policy.coords.dp, batch.size // ranks)


def trained(config: dict[str, Any], loss: str, folder: str) -> dict[str, Any]:
    """Two steps, and everything that can be asked for before and after."""
    config = config | {"generation": {"max_new_tokens": 4, "temperature": 1.0}}
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    with open_policy(config, tokenizer=tokenizer) as policy:
        own = share(data(), policy)
        texts = BatchedDataDict({key: own[key] for key in ("input_ids", "input_lengths")})
        seen: dict[str, Any] = {"dp": policy.coords.dp, "before": policy.logprobs(texts)}
        seen["topk"], seen["entropy"] = policy.topk_logits(texts, 3), policy.entropy(texts)
        seen["steps"] = [
            policy.train(share(data().get_batch(step, GLOBAL_BATCH), policy), LOSSES[loss]())
            for step in range(2)
        ]
        seen["logprobs"] = policy.logprobs(texts)
        seen["reference"] = policy.reference_logprobs(texts)
        policy.export_hf(f"{folder}/exported")
        policy.refit(HfDirectory(f"{folder}/refit", config["model_name"]))
        lengths = torch.tensor([5, 3] * (texts.size // 2))
        prompts = {"input_ids": own["input_ids"][:, :5], "input_lengths": lengths}
        seen["written"] = policy.generate(BatchedDataDict(prompts), greedy=True)
        again = {"input_ids": seen["written"].tokens_BT, "input_lengths": seen["written"].lengths_B}
        seen["read again"] = policy.logprobs(BatchedDataDict(again))
        seen["streamed"] = {name: tensor.clone() for name, tensor in policy.export()}
        policy.save_checkpoint(f"{folder}/saved", f"{folder}/saved")
        dist.barrier()
        return seen


def resume(config: dict[str, Any], saved: str | None, folder: str, step: int) -> dict[str, Any]:
    """Go on from what is saved, take global batch number `step` and save again."""
    with open_policy(config) as policy:
        report = policy.load_checkpoint(saved, saved) if saved else None
        batch = share(data().get_batch(step % 2, GLOBAL_BATCH), policy)
        found = policy.train(batch, LOSSES["token"]())
        policy.save_checkpoint(folder, folder)
        policy.export_hf(f"{folder}-exported")
        return {"report": report, "step": found}
