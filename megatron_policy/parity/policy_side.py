"""The Megatron-Core side: this rank's part of a forward pass, and joining the parts.

Shapes: B rows, S positions, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from megatron_policy.config.parallel_sizes import keys_of_sizes
from megatron_policy.config.policy_config import least_section
from megatron_policy.convert.headers import open_headers
from megatron_policy.parity.result import Job, ModelOutputs, draw_batch, keep_output
from megatron_policy.policy import MegatronPolicy


def read_policy(job: Job) -> ModelOutputs:
    """Run the model: all logits and logprobs, and the outputs of this rank's layers.

    Under sequence parallelism the outputs have this tensor-parallel rank's share of the positions.
    """
    policy = MegatronPolicy(
        make_policy_section(job),
        init_optimizer=False,
        init_reference_model=False,
        timeout_s=job.timeout_s,
    )
    try:
        data = draw_batch(job, open_headers(job.model)[1].architecture.shell)
        layers: dict[int, torch.Tensor] = {}
        with ExitStack() as hooks:
            if job.per_layer:
                for number, layer in policy.decoder_layers():
                    hook = layer.register_forward_hook(keep_output(layers, number))
                    hooks.callback(hook.remove)
            logits_BSV = torch.empty(0)
            if job.sequences is None:
                found, order = policy.topk_logits(data, job.vocab_size, micro_batch_size=job.rows)
                logits_BSV = torch.empty_like(found).scatter_(-1, order, found)
        logprobs_BS = policy.logprobs(data, micro_batch_size=job.rows)[:, 1:]
        rows_first = {n: hidden_SBD.transpose(0, 1) for n, hidden_SBD in layers.items()}
        return ModelOutputs(logits_BSV, logprobs_BS, rows_first)
    finally:
        policy.shutdown()


def join_outputs(job: Job, readings: Sequence[ModelOutputs]) -> ModelOutputs:
    """Join the readings of all ranks, in rank order: tensor-parallel ranks are adjacent."""
    layers: dict[int, torch.Tensor] = {}
    for first in range(0, len(readings), job.tp):
        stage = readings[first : first + job.tp]
        for number, hidden_BSD in stage[0].layers.items():
            shares = [outputs.layers[number] for outputs in stage]
            whole_BSD = torch.cat(shares, dim=1) if job.sequence_parallel else hidden_BSD
            layers[number] = whole_BSD[:, : job.tokens]
    return ModelOutputs(readings[0].logits, readings[0].logprobs, layers)


def make_policy_section(job: Job) -> dict[str, Any]:
    """The configuration of the job's policy, as a host would write it."""
    return least_section(
        job.model,
        job.dtype,
        job.rows,
        keys_of_sizes(asdict(job)),
        train_micro_batch_size=job.rows,
        max_total_sequence_length=job.tokens + (job.sequences is not None),
        # As transformers has it; as engines have it, which are made for so many tokens.
        rope_length="batch" if job.sequences is None else "maximum",
    )
