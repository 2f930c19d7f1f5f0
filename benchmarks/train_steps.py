"""Alternating steps of policy and plain loop: `python -m benchmarks.train_steps CHECKPOINT STEPS
[ROWS MICROBATCH_ROWS LENGTH IMPLEMENTATION]`.

Prints the CPU seconds of each; with the further arguments, in bf16 on this process's device, the
seconds on its clock. Both have equal models, optimizers, schedules, starting weights and
batches, so losses, gradient norms and final weights must be equal as well.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device_once import timed
from benchmarks.plain_loop import PlainLoop
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.layout import layer_split
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.formats.hf_files import HfReader, read_config
from megatron_policy.converters.table import Table, bind
from megatron_policy.engines.megatron.build import build_chunks
from megatron_policy.engines.megatron.layer_spec import resolve_implementation
from megatron_policy.engines.megatron.model_config import LOCAL, transformer_config
from megatron_policy.engines.megatron.routers import Routers
from megatron_policy.engines.megatron.trainable import make_trainable
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.parallel.topology import Placement
from megatron_policy.policy import MegatronPolicy
from megatron_policy.weights.load import Held, held_entries, load_parameters


@dataclass(frozen=True)
class Shape:
    """A step: `rows` of `length` tokens, in microbatches of `microbatch_rows`; by default one that
    a CPU takes.
    """

    rows: int = 8
    microbatch_rows: int = 2
    length: int = 128
    implementation: str = LOCAL
    precision: str = "float32"
    on_device: bool = False


LEARNING_RATE = 1e-4
# The two losses sum in different orders, and Adam takes full steps for the smallest gradients.
RELATIVE, WEIGHTS = 1e-5, 0.1 * LEARNING_RATE
# With weights that differ so slightly, a token to which two experts are equally good may still take
# the other one. A weight then moves by other full steps.
RELATIVE_OF_EXPERTS = 2e-4
# In bf16 every logit, and every weight after a step, is rounded to 8 bits. Later steps start from
# weights that were rounded in different directions.
RELATIVE_OF_BF16, LATER_OF_BF16, ROUNDING = 2e-2, 1e-1, 2**-7


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


def main(path: Path, steps: int, shape: Shape | None = None) -> dict[str, Any]:
    """Seconds of every step on both sides, and what was verified."""
    shape = shape or Shape()
    policy = MegatronPolicy(make_config(path, shape), init_reference_model=False)
    table = bind(read_config(path))
    plain, held = _plain_loop(policy, table, shape)
    before = {entry.megatron: parameter.detach().clone() for entry, parameter in held}
    seconds: dict[str, list[float]] = {"plain loop": [], "ours": []}
    experts = table.architecture.moe is not None
    for step, batch in enumerate(make_batches(steps, table.architecture.vocab_size, shape)):
        relative = RELATIVE_OF_EXPERTS if experts and step else RELATIVE
        if shape.on_device:
            relative = LATER_OF_BF16 if step else RELATIVE_OF_BF16
        timing = _timed_on_device if shape.on_device else _timed
        rows = shape.microbatch_rows
        expected = timing(seconds["plain loop"], _plain_step, plain, batch, rows)
        got = timing(seconds["ours"], _policy_step, policy, batch)
        for what, ours, theirs in zip(("loss", "gradient norm"), got, expected, strict=True):
            if abs(ours - theirs) > relative * abs(theirs):
                raise RuntimeError(f"{what} {ours} of the policy, {theirs} of the plain loop")
    allowed = steps * LEARNING_RATE if experts else WEIGHTS
    if shape.on_device:
        allowed = 2 * steps * LEARNING_RATE  # both take full steps, each in its direction
    rounding = ROUNDING if shape.on_device else 0.0
    difference = _compare_weights(policy, held, before, allowed, rounding)
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


def _timed_on_device(seconds: list[float], step: Callable[..., Any], *arguments: Any) -> Any:
    results: list[Any] = []
    seconds.append(timed(lambda: results.append(step(*arguments))))
    return results[0]


def _plain_step(plain: PlainLoop, batch: BatchedDataDict, rows: int) -> tuple[float, float]:
    return plain.step(batch["input_ids"], batch["token_mask"], rows)


def _policy_step(policy: MegatronPolicy, batch: BatchedDataDict) -> tuple[float, float]:
    result = policy.train(batch, NextTokenLoss())
    return result["loss"].item(), result["grad_norm"].item()


def make_config(path: Path, shape: Shape) -> dict[str, Any]:
    """The configuration of a policy for such steps."""
    return {
        "model_name": str(path),
        "precision": shape.precision,
        "train_global_batch_size": shape.rows,
        "train_micro_batch_size": shape.microbatch_rows,
        "max_total_sequence_length": shape.length,
        "megatron_cfg": {
            "enabled": True,
            "transformer_impl": shape.implementation,
            "optimizer": {"lr": LEARNING_RATE, "min_lr": LEARNING_RATE},
        },
    }


def _plain_loop(policy: MegatronPolicy, table: Table, shape: Shape) -> tuple[PlainLoop, Held]:
    """A second model with its own optimizer, in the process groups that the policy created."""
    config, architecture, topology = policy.config, table.architecture, policy.topology
    settings = config.megatron_cfg
    place = Placement(topology, policy.coords, layer_split(config, architecture, topology))
    layers = resolve_implementation(shape.implementation, architecture)
    dtype = getattr(torch, shape.precision)
    model_config = transformer_config(architecture, settings, topology, dtype, layers)
    chunks = build_chunks(architecture, model_config, place, layers, config.seed)
    held = held_entries(chunks, table, place)
    with HfReader(config.model_name) as reader:
        load_parameters(held, reader, table, place)
    trainable = make_trainable(
        chunks,
        model_config,
        settings,
        shape.rows,
        PendingReads(),
        held,
        architecture,
        place,
        Routers((), 0, 0.0, False, (), dist.group.WORLD),  # the plain loop trains no biases
        ParamGroups(),
    )
    (model,) = trainable.chunks
    return PlainLoop(model, trainable.optimizer, trainable.scheduler), held


def make_batches(count: int, vocab_size: int, shape: Shape) -> Iterator[BatchedDataDict]:
    """So many batches of random tokens."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        size = shape.rows, shape.length
        tokens_BS = torch.randint(vocab_size, size, generator=generator)
        ones_BS, ones_B = torch.ones(size), torch.ones(shape.rows)
        yield BatchedDataDict(
            {"input_ids": tokens_BS, "token_mask": ones_BS, "sample_mask": ones_B}
        )


def _compare_weights(
    policy: MegatronPolicy,
    held: Held,
    before: dict[str, torch.Tensor],
    allowed: float,
    rounding: float,
) -> float:
    """The largest difference beyond `rounding` times the weight; RuntimeError if it is too large,
    or if nothing was trained.
    """
    weights = dict(policy.named_parameters())

    def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float(((ours - theirs).abs() - rounding * theirs.abs()).max())

    difference = max(max(0.0, apart(weights[e.megatron], p)) for e, p in held)
    if difference > allowed:
        raise RuntimeError(f"policy and plain loop end with weights {difference} apart")
    # A step is too small for weights near 1 in bf16: those of norms.
    moving = [(e, p) for e, p in held if p.ndim > 1 or not rounding]
    if any(torch.equal(before[entry.megatron], parameter) for entry, parameter in moving):
        raise RuntimeError("a weight did not move: nothing was trained")
    return difference


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """`main` with the arguments of the command line."""
    path, steps, *of_step = arguments
    if not of_step:
        return main(Path(path), int(steps))
    rows, microbatch_rows, length, implementation = of_step
    sizes = int(rows), int(microbatch_rows), int(length)
    return main(Path(path), int(steps), Shape(*sizes, implementation, "bfloat16", on_device=True))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
