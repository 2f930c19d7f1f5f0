"""What ranks do in the layout tests: the functions that are sent to them, and what they measure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.losses import LogitEntropy, SequenceNLL, TokenNLL

LOSSES = {"token": TokenNLL, "sequence": SequenceNLL, "logit": LogitEntropy}
GLOBAL_BATCH, MICROBATCHES = 8, 4


def policy_config(
    path: Path | str, megatron: Mapping[str, Any], lr: float = oracle.LR, **top: Any
) -> dict[str, Any]:
    """The oracle's hyperparameters under a layout: `megatron` overrides megatron_cfg, `top` the
    policy section. With `dtensor_cfg` or `fsdp_cfg` in it, its keys are those of FSDP2 or FSDP1.
    """
    for section in ("dtensor_cfg", "fsdp_cfg"):
        if section not in megatron:
            continue
        keys = {"weight_decay_of": "matrices"} | dict(megatron[section])
        if "checkpoint" in megatron:
            top = {"megatron_cfg": {"enabled": False, "checkpoint": megatron["checkpoint"]}} | top
        return fsdp_config(path, keys, lr=lr, section=section, **top)
    ddp = {"grad_reduce_in_fp32": True, "overlap_grad_reduce": False, "overlap_param_gather": False}
    section = {
        "enabled": True,
        "optimizer": {
            "optimizer": "adam",
            "lr": lr,
            "min_lr": lr,
            "weight_decay": oracle.WEIGHT_DECAY,
            "adam_beta1": oracle.BETAS[0],
            "adam_beta2": oracle.BETAS[1],
            "adam_eps": oracle.EPS,
            "use_distributed_optimizer": False,
        },
        "scheduler": {
            "start_weight_decay": oracle.WEIGHT_DECAY,
            "end_weight_decay": oracle.WEIGHT_DECAY,
            "weight_decay_incr_style": "constant",
            "lr_decay_style": "constant",
            "lr_decay_iters": 1000,
            "lr_warmup_iters": 0,
            "lr_warmup_init": lr,
        },
        "distributed_data_parallel_config": ddp,
    }
    for key, value in megatron.items():
        section[key] = section[key] | value if isinstance(section.get(key), dict) else value
    return _common(path) | {"megatron_cfg": section} | top


def fsdp_config(
    path: Path | str,
    keys: Mapping[str, Any],
    lr: float = oracle.LR,
    section: str = "dtensor_cfg",
    **top: Any,
) -> dict[str, Any]:
    """The oracle's hyperparameters under FSDP2, or FSDP1 with its `section`, with weight decay of
    every parameter unless `keys` say otherwise.
    """
    kwargs = {"weight_decay": oracle.WEIGHT_DECAY, "betas": list(oracle.BETAS), "eps": oracle.EPS}
    own = {
        section: {"enabled": True, **keys},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": lr} | kwargs},
    }
    return _common(path) | own | top


def _common(path: Path | str) -> dict[str, Any]:
    return {
        "model_name": str(path),
        "train_global_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size": 1,
        "logprob_batch_size": 3,
        "max_total_sequence_length": 32,
        "rope_length": "batch",  # the oracle goes by it
        "max_grad_norm": oracle.CLIP,
        "precision": "float32",
    }


@contextmanager
def open_policy(config: dict[str, Any], **kwargs: Any):
    """A policy on this rank, closed afterwards; the process group outlives it."""
    prepare_platform()
    join_process_group(60.0)
    policy = MegatronPolicy(config, timeout_s=300.0, **kwargs)
    try:
        yield policy
    finally:
        policy.shutdown()


UNUSED = {"init_optimizer": False, "init_reference_model": False}


def own_share(policy: MegatronPolicy, data: BatchedDataDict) -> BatchedDataDict:
    """This data-parallel rank's part of each global batch, one after another."""
    return data.shard_by_batch_size(policy.topology.dp, batch_size=GLOBAL_BATCH)[policy.coords.dp]


def as_text(tokens: torch.Tensor) -> BatchedDataDict:
    """Rows of text, whose tokens are no places of pictures in a model that sees either."""
    return BatchedDataDict({"input_ids": tokens, "mm_token_type_ids": torch.zeros_like(tokens)})


def read_everything(policy: MegatronPolicy, tokens: torch.Tensor, k: int) -> dict[str, Any]:
    """Log-probabilities and the `k` largest logits of `tokens`, the same on every rank."""
    data = as_text(tokens)
    values, indices = policy.topk_logits(data, k)
    logits = torch.zeros(*tokens.shape, k).scatter_(-1, indices, values) if k else None
    return {"logits": logits, "logprobs": policy.logprobs(data)}


def train_two_steps(
    config: dict[str, Any], loss: str, data: BatchedDataDict, vocab: int, init_reference: bool
) -> dict[str, Any]:
    """Read, train over every global batch of `data`; what this rank sees, by HF names."""
    with open_policy(config, init_reference_model=init_reference) as policy:
        seen: dict[str, Any] = {"coords": policy.coords}
        tokens = data["input_ids"]
        if init_reference:
            seen["before"] = read_everything(policy, tokens, vocab)
        share = own_share(policy, data)
        micro = GLOBAL_BATCH // policy.topology.dp // MICROBATCHES
        seen["eval"] = policy.train(share, LOSSES[loss](), eval_mode=True, mbs=micro)
        seen["steps"] = [
            policy.train(step, LOSSES[loss](), gbs=GLOBAL_BATCH, mbs=micro)
            for step in own_steps(policy, data)
        ]
        seen["weights"] = {name: p.detach().clone() for name, p in policy.named_parameters()}
        if init_reference:
            seen["reference"] = policy.reference_logprobs(as_text(tokens))
            seen["unchanged"] = all(
                torch.equal(seen["weights"][name], p) for name, p in policy.named_parameters()
            )
            seen["after"] = policy.logprobs(as_text(tokens))
        return seen


def learned_weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Copies of this rank's parts of the weights by global name; under FSDP2, where no part is
    Megatron-Core's, of whole tensors by HF name.
    """
    fsdp = not policy.config.megatron_cfg.enabled
    named = policy.export() if fsdp else policy.named_parameters()
    return {name: tensor.detach().clone() for name, tensor in named}


def own_steps(policy: MegatronPolicy, data: BatchedDataDict) -> list[BatchedDataDict]:
    share = own_share(policy, data)
    rows = GLOBAL_BATCH // policy.topology.dp
    return [share.get_batch(index, rows) for index in range(share.size // rows)]


def logits_of(models: list[tuple[Path, int]], tokens: torch.Tensor) -> list[torch.Tensor]:
    """What this rank alone makes of the tokens, for each checkpoint and size of vocabulary."""
    logits = []
    for path, vocab in models:
        with open_policy(policy_config(path, {}), **UNUSED) as policy:
            logits.append(read_everything(policy, tokens, vocab)["logits"])
    return logits
