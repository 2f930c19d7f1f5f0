"""Alternating steps of policy and plain loop: `python -m benchmarks.train_steps CHECKPOINT STEPS`.

Prints the CPU seconds of each. Both have equal models, optimizers, schedules, starting weights and
batches, so losses, gradient norms and final weights must be equal as well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.plain_loop import PlainLoop
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.layout import layer_split
from megatron_policy.converters.formats.hf_files import HfReader, read_config
from megatron_policy.converters.table import Table, bind
from megatron_policy.engines.megatron.build import build_chunks
from megatron_policy.engines.megatron.model_config import LOCAL, transformer_config
from megatron_policy.engines.megatron.routers import Routers
from megatron_policy.engines.megatron.trainable import make_trainable
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.parallel.topology import Placement
from megatron_policy.policy import MegatronPolicy
from megatron_policy.weights.load import Held, held_entries, load_parameters

ROWS, MICROBATCH_ROWS, LENGTH = 8, 2, 128
LEARNING_RATE = 1e-4
# The two losses sum in different orders, and Adam takes full steps for the smallest gradients.
RELATIVE, WEIGHTS = 1e-5, 0.1 * LEARNING_RATE
# With weights that differ so slightly, a token to which two experts are equally good may still take
# the other one. A weight then moves by other full steps.
RELATIVE_OF_EXPERTS = 2e-4


class NextTokenLoss:
    """Mean negative log-probability of the masked tokens."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = -(next_token_logprobs * mask).sum() / global_valid_toks
        return loss, {"loss": loss.detach()}


def main(path: Path, steps: int) -> dict[str, Any]:
    policy = MegatronPolicy(_config(path), init_reference_model=False)
    table = bind(read_config(path))
    plain, held = _plain_loop(policy, table)
    before = {entry.megatron: parameter.detach().clone() for entry, parameter in held}
    seconds: dict[str, list[float]] = {"plain loop": [], "ours": []}
    experts = table.architecture.moe is not None
    for step, batch in enumerate(_batches(steps, table.architecture.vocab_size)):
        relative = RELATIVE_OF_EXPERTS if experts and step else RELATIVE
        expected = _timed(seconds["plain loop"], _plain_step, plain, batch)
        got = _timed(seconds["ours"], _policy_step, policy, batch)
        for what, ours, theirs in zip(("loss", "gradient norm"), got, expected, strict=True):
            if abs(ours - theirs) > relative * abs(theirs):
                raise RuntimeError(f"{what} {ours} of the policy, {theirs} of the plain loop")
    allowed = steps * LEARNING_RATE if experts else WEIGHTS
    difference = _compare_weights(policy, held, before, allowed)
    verified = (
        f"loss and gradient norm of every step equal within {relative:g}; weights after {steps} "
        f"steps of {LEARNING_RATE:g} equal within {difference:.1e}"
    )
    return seconds | {"verified": verified}


def _timed(seconds: list[float], step: Callable[..., Any], *arguments: Any) -> Any:
    started = time.process_time()
    result = step(*arguments)
    seconds.append(time.process_time() - started)
    return result


def _plain_step(plain: PlainLoop, batch: BatchedDataDict) -> tuple[float, float]:
    return plain.step(batch["input_ids"], batch["token_mask"], MICROBATCH_ROWS)


def _policy_step(policy: MegatronPolicy, batch: BatchedDataDict) -> tuple[float, float]:
    result = policy.train(batch, NextTokenLoss())
    return result["loss"].item(), result["grad_norm"].item()


def _config(path: Path) -> dict[str, Any]:
    return {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": MICROBATCH_ROWS,
        "max_total_sequence_length": LENGTH,
        "megatron_cfg": {
            "enabled": True,
            "transformer_impl": LOCAL,
            "optimizer": {"lr": LEARNING_RATE, "min_lr": LEARNING_RATE},
        },
    }


def _plain_loop(policy: MegatronPolicy, table: Table) -> tuple[PlainLoop, Held]:
    """A second model with its own optimizer, in the process groups that the policy created."""
    config, architecture, topology = policy.config, table.architecture, policy.topology
    settings = config.megatron_cfg
    place = Placement(topology, policy.coords, layer_split(config, architecture, topology))
    model_config = transformer_config(architecture, settings, topology, torch.float32, LOCAL)
    chunks = build_chunks(architecture, model_config, place, LOCAL, config.seed)
    held = held_entries(chunks, table, place)
    with HfReader(config.model_name) as reader:
        load_parameters(held, reader, table, place)
    trainable = make_trainable(
        chunks,
        model_config,
        settings,
        ROWS,
        PendingReads(),
        held,
        architecture,
        place,
        Routers((), 0, 0.0, False, (), dist.group.WORLD),  # the plain loop trains no biases
    )
    (model,) = trainable.chunks
    return PlainLoop(model, trainable.optimizer, trainable.scheduler), held


def _batches(count: int, vocab_size: int) -> Iterator[BatchedDataDict]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        tokens_BS = torch.randint(vocab_size, (ROWS, LENGTH), generator=generator)
        ones_BS, ones_B = torch.ones(ROWS, LENGTH), torch.ones(ROWS)
        yield BatchedDataDict(
            {"input_ids": tokens_BS, "token_mask": ones_BS, "sample_mask": ones_B}
        )


def _compare_weights(
    policy: MegatronPolicy, held: Held, before: dict[str, torch.Tensor], allowed: float
) -> float:
    """The largest difference; RuntimeError if it is too large, or if nothing was trained."""
    weights = dict(policy.named_parameters())
    difference = max((weights[e.megatron] - p).abs().max().item() for e, p in held)
    if difference > allowed:
        raise RuntimeError(f"policy and plain loop end with weights {difference} apart")
    if any(torch.equal(before[entry.megatron], parameter) for entry, parameter in held):
        raise RuntimeError("a weight did not move: nothing was trained")
    return difference


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
