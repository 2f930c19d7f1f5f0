"""A step whose data come in parts is the step that `train` takes on all of them at once; so is one
whose layers add weight gradients to the buffers themselves, as those of Transformer Engine do.

Its gradients are divided by the number of tokens after they have been added up, not before. By a
power of two that is exact, so where microbatches are the same and in the same order, every bit is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, LossError
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.memory.states import IDLE, LOGPROB, Kind
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, policy_config
from tests.dist.layouts import (
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    VOCAB,
    layout,
    of_transformers,
)
from tests.dist.shortcuts import answer, answer_trainable, dynamic, packed
from tests.exact import furthest
from tests.losses import Result, SequenceNLL, TokenNLL, loss_mask, token_nll
from tests.margins import check

EIGHT_TOKENS = 8
BF16_GRADIENTS = OVERLAPPED | {
    "distributed_data_parallel_config": OVERLAPPED["distributed_data_parallel_config"]
    | {"grad_reduce_in_fp32": False}
}


Normalizer = enum.Enum("Normalizer", {"SEQUENCES": "sequences", "NONE": "none"})
"""A host's own enumeration: only its values are alike."""


class Measured:
    """Its metrics are divided by tokens, by sequences, by nothing, and not to be added up."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB
    metric_normalizations: ClassVar = {"rows": Normalizer.SEQUENCES, "valid": Normalizer.NONE}

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs) -> Any:
        loss = token_nll(next_token_logprobs, data, global_valid_toks)
        return loss, {
            "loss": loss.item(),
            "rows": data["sample_mask"].sum() / global_valid_seqs,
            "valid": loss_mask(data).sum(),
            "logprob_min": next_token_logprobs.min(),
        }


class CountingTokens(TokenNLL):
    metric_normalizations: ClassVar = {"valid": Normalizer.NONE}


class CountingSequences(SequenceNLL):
    metric_normalizations: ClassVar = {"valid": Normalizer.NONE}


class Failing(TokenNLL):
    """Raises when it is called for the second time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("the second microbatch")
        return super().__call__(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    world: int
    megatron: dict[str, Any]
    loss: Callable[[], Any] = Measured
    family: str = "qwen2"
    top: dict[str, Any] = field(default_factory=dict)


PACKED, DYNAMIC, BF16 = packed(), dynamic(), {"precision": "bfloat16"}
FSDP1, FSDP2 = FSDP1_LAYOUTS, FSDP2_LAYOUTS
CASES = {
    "one process": Case(1, {}, CountingTokens),
    "TP2+SP": Case(2, LAYOUTS["TP2+SP"].megatron),
    "PP2, tied": Case(2, LAYOUTS["PP2"].megatron),
    "DP2, both overlaps": Case(2, layout(2, **OVERLAPPED).megatron, CountingSequences),
    "DP2, both overlaps, bf16": Case(2, BF16_GRADIENTS, top=BF16),
    "PP2xVPP2": Case(2, LAYOUTS["PP2xVPP2"].megatron | OVERLAPPED),
    "DP2, packed": Case(2, {}, top=PACKED),
    "DP2, dynamic": Case(2, OVERLAPPED, top=DYNAMIC),
    "DP2, experts": Case(2, OVERLAPPED, family="deepseek_v3"),
    "FSDP2 x 2": Case(2, FSDP2["FSDP2 x 2"].megatron),
    "FSDP2, 2 copies, dynamic": Case(2, {"dtensor_cfg": {"dp_replicate_size": 2}}, top=DYNAMIC),
    "FSDP2 CP2, packed": Case(2, FSDP2["FSDP2 CP2"].megatron, top=PACKED),
    "FSDP2 TP2+SP, packed": Case(
        2, FSDP2_TENSOR_LAYOUTS["FSDP2 TP2+SP x 2"].megatron, top=PACKED, family="qwen3"
    ),
    "FSDP2 x 2, bf16": Case(2, FSDP2["FSDP2 x 2"].megatron, top=BF16),
    "FSDP1 x 2, packed": Case(2, FSDP1["FSDP1 x 2"].megatron, top=PACKED),
    "FSDP1 2 copies, bf16": Case(2, FSDP1["FSDP1 2 copies"].megatron, top=BF16),
}
WARMING_UP = {"scheduler": {"lr_warmup_iters": 8, "lr_warmup_init": 0.0}}
WARMING_UP_FSDP2 = {
    "scheduler": {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1}}
}


def even_batch(seed: int) -> BatchedDataDict:
    """As many valid tokens in each row, a power of two of them."""
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed)
    random = torch.Generator().manual_seed(seed)
    data["input_ids"] = torch.randint(1, VOCAB, (GLOBAL_BATCH, LENGTH), generator=random)
    data["input_lengths"] = torch.full((GLOBAL_BATCH,), LENGTH)
    data["sample_mask"] = torch.ones(GLOBAL_BATCH)
    chosen = torch.rand(GLOBAL_BATCH, LENGTH - 1, generator=random).topk(EIGHT_TOKENS).indices
    data["token_mask"] = torch.zeros(GLOBAL_BATCH, LENGTH).scatter(1, chosen + 1, 1).long()
    return data


BATCHES = {
    "at once": even_batch(1),
    "in many parts": even_batch(2),
    "after a failure": even_batch(3),
    "unevenly": oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=4),
    "nothing valid": even_batch(9) | {"sample_mask": torch.zeros(GLOBAL_BATCH)},
    "train once more": oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=5),
}
EXACT = ("at once", "in many parts", "after a failure")


def share_of(policy: MegatronPolicy, name: str) -> BatchedDataDict:
    return BATCHES[name].shard_by_batch_size(policy.topology.dp)[policy.coords.dp]


def in_one_go(policy: MegatronPolicy, loss: Any, name: str) -> dict[str, Any]:
    return policy.train(share_of(policy, name), loss, mbs=1)


def in_parts(policy: MegatronPolicy, loss: Any, name: str) -> dict[str, Any]:
    if name == "train once more":
        return in_one_go(policy, loss, name)
    if name == "after a failure":
        fail(policy, share_of(policy, name))
    policy.accumulator.begin(loss, mbs=1)
    for part in parts_of(policy, name):
        policy.accumulator.microbatch(part)
    return policy.accumulator.finish()


def parts_of(policy: MegatronPolicy, name: str) -> list[BatchedDataDict]:
    share = share_of(policy, name)
    if name != "unevenly":
        sizes = [share.size] if name == "at once" else [1] * share.size
        return cut(share, sizes)
    everything = BATCHES[name]
    if policy.topology.dp == 1:
        return [*cut(everything, [3]), BatchedDataDict(), *cut(everything, [3, 5])[1:]]
    # Rank 0 has 3 rows, 0 and 1; rank 1 has 1, 3 and, said in another way, 0.
    rows = cut(everything, [3, 1, 3, 1])
    mine = [rows[0], everything.slice(0, 0), rows[3]]
    return mine if policy.coords.dp == 0 else [rows[1], rows[2], BatchedDataDict()]


def cut(data: BatchedDataDict, sizes: Sequence[int]) -> list[BatchedDataDict]:
    ends = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return [data.slice(ends[i], ends[i + 1]) for i in range(len(sizes))]


def fail(policy: MegatronPolicy, share: BatchedDataDict) -> None:
    """A step that is begun and dropped after its loss raised."""
    policy.accumulator.begin(Failing(), mbs=1)
    policy.accumulator.microbatch(share.slice(0, 1))
    with pytest.raises(LossError, match="raised ArithmeticError: the second microbatch"):
        policy.accumulator.microbatch(share.slice(1, 2))
    for go_on in (lambda: policy.accumulator.microbatch(share), policy.accumulator.finish):
        refuse(go_on, r"LossError: call abort_train_step\(\)")
    policy.accumulator.abort()
    policy.accumulator.abort()


class Rounding(NamedTuple):
    """What another order of sums can change: weights absolute, all else relative."""

    relative: float
    weights: float


IN_FP32 = Rounding(1e-5, 2e-6)
# In bf16 an ulp is 2**-7 of a number, and 2**-7 itself for weights between 1 and 2.
IN_BF16 = Rounding(2.5 * 2**-7, 2.5 * 2**-7)


def walk_both_ways(config: dict[str, Any], loss: Callable[[], Any]) -> Any:
    """Each step's result and the weights after it, by the name of its batch; and steps counted."""
    ways = []
    for step in (in_one_go, in_parts):
        with open_policy(config, init_reference_model=False) as policy:
            seen = {}
            for name in BATCHES:
                result = step(policy, loss(), name)
                weights = {key: p.detach().clone() for key, p in policy.named_parameters()}
                seen[name] = (result, weights)
            ways.append((seen, policy.steps))
    return ways


def config_of(case: Case, path: Path) -> dict[str, Any]:
    schedule = WARMING_UP_FSDP2 if of_transformers(case.megatron) else {}
    return policy_config(path, dict(case.megatron) | WARMING_UP, **schedule, **case.top)


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_parts_is_the_step_that_train_takes(ranks, checkpoint, name: str) -> None:
    case = CASES[name]
    config = config_of(case, checkpoint(case.family, tied="tied" in name, **SIZES))
    half = "precision" in case.top
    by_rows = half or not case.top  # else parts make other microbatches than the whole
    seen = ranks.run(case.world, walk_both_ways, config, case.loss)
    for (whole, steps), (parts, counted) in seen:
        assert steps == counted == len(BATCHES) - 1  # none is taken with nothing valid
        for batch in BATCHES:
            exact = batch == "at once" or (batch in EXACT and by_rows)
            (one, weights), (other, others) = whole[batch], parts[batch]
            rounding = Rounding(0, 0) if exact else IN_BF16 if half else IN_FP32
            assert_same_step(one, other, rounding.relative)
            what = "bf16 weights" if half else "weights"
            for key, weight in weights.items():
                assert_near(what, furthest(others[key], weight), rounding.weights)
    for batch in BATCHES:
        of_whole, of_parts = (merged([rank[way][0][batch][0] for rank in seen]) for way in (0, 1))
        assert of_parts.keys() == of_whole.keys()
        for name, value in of_whole.items():
            rel = (IN_BF16 if half else IN_FP32).relative
            assert_near("metrics", abs(of_parts[name] - value), rel * max(abs(value), 1e-12))
    for (whole, _), (parts, _) in seen:
        assert whole["at once"][0]["grad_norm"] > 0
        assert parts["nothing valid"][0]["grad_norm"] == 0


def assert_same_step(one: dict[str, Any], other: dict[str, Any], rel: float) -> None:
    assert one.keys() == other.keys()
    assert one["rank"] == other["rank"]
    for key in ("loss", "grad_norm"):
        assert one[key].dtype == other[key].dtype and one[key].shape == other[key].shape
        for found, value in zip(other[key].tolist(), one[key].tolist(), strict=True):
            assert_near(key, abs(found - value), rel * abs(value))


def assert_near(what: str, difference: float, tolerance: float) -> None:
    """Equal where rounding has no part in it."""
    if tolerance:
        check(f"parts: {what}", difference, tolerance)
    else:
        assert difference == 0, what


def merged(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics over all ranks: what the step used, which is the same everywhere, extrema, and sums.

    A rank counts as often as it has copies, in parts and in one go alike.
    """
    lists: dict[str, list[float]] = {}
    for result in results:
        for name, values in result["microbatch_metrics"].items():
            lists.setdefault(name, []).extend(values)
    found = {}
    for name, values in lists.items():
        if name in ("lr", "wd", "global_valid_seqs", "global_valid_toks"):
            (found[name],) = set(values)
        else:
            found[name] = min(values) if name.endswith("_min") else sum(values)
    return found


class Untyped(TokenNLL):
    loss_type = None


class Mismeasured(TokenNLL):
    metric_normalizations: ClassVar = {"valid": "bytes"}


def mistakes(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Everything that is refused around and within a step, and what that step came to."""
    with open_policy(config) as policy:
        split, share = policy.accumulator, share_of(policy, "at once")
        split.abort()
        for early in (lambda: split.microbatch(share), split.finish):
            refuse(early, r"no training step is open, call begin_train_step\(\) first")
        refuse(lambda: split.begin(Untyped()), r"Untyped.loss_type is None.*token_level")
        refuse(lambda: split.begin(Mismeasured()), "'bytes' for 'valid'; legal: tokens, sequences")
        refuse(lambda: split.begin(TokenNLL(), mbs=-1), "mbs is -1", BatchError)
        policy.memory.enter(LOGPROB)
        refuse(lambda: split.begin(TokenNLL()), r"call prepare_for_training\(\) first")
        policy.memory.onload(Kind)
        tokens = BATCHES["at once"]
        before = policy.logprobs(tokens), policy.reference_logprobs(tokens)

        split.begin(TokenNLL(), mbs=1)
        refuse(split.finish, r"nothing to step with: call train_microbatch\(\)")
        split.microbatch(share.slice(0, 1))
        within = {
            "begin_train_step": lambda: split.begin(TokenNLL()),
            "train": lambda: policy.train(share, TokenNLL(), mbs=1),
            "save_checkpoint": lambda: policy.save_checkpoint(directory / "weights"),
            "load_checkpoint": lambda: policy.load_checkpoint(directory / "weights"),
            "export_hf": lambda: policy.export_hf(directory / "exported"),
            "export": lambda: next(policy.export()),
            "idle": lambda: policy.memory.enter(IDLE),
            "logprob": lambda: policy.memory.enter(LOGPROB),
        }
        for name, call in within.items():
            refuse(call, rf"{name}\b.*call finish_train_step\(\), or abort_train_step\(\)")
        bad = share.slice(0, 2) if policy.coords.dp else share.slice(0, 1)
        with pytest.raises(BatchError, match="'token_mask'" if policy.coords.dp else "another"):
            narrow(split, bad)
        policy.memory.offload(Kind.PARAMETERS)
        policy.memory.onload(Kind)
        evaluated = policy.train(share, TokenNLL(), mbs=1, eval_mode=True)["loss"]
        after = policy.logprobs(tokens), policy.reference_logprobs(tokens)
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        split.microbatch(share.slice(1, share.size))
        result = split.finish()
        assert evaluated.item() == result["loss"].item()
        return result


def narrow(split: Any, bad: BatchedDataDict) -> None:
    """A part that only fits on the ranks where it has one row."""
    if bad.size > 1:
        bad["token_mask"] = bad["token_mask"][:1]
    split.microbatch(bad)


def refuse(call: Callable[[], Any], match: str, kind: type[Exception] = ConfigError) -> None:
    with pytest.raises(kind, match=match):
        call()


def take_one_step(policy: MegatronPolicy) -> dict[str, Any]:
    return in_one_go(policy, TokenNLL(), "at once")


def begin_without_an_optimizer(policy: MegatronPolicy) -> None:
    pieces, share = policy.pieces, share_of(policy, "at once")
    for name, call in {
        "begin_train_step": lambda: policy.accumulator.begin(TokenNLL()),
        "zero_gradients": pieces.zero_gradients,
        "forward_backward": lambda: pieces.forward_backward([], lambda scores: (scores, None)),
        "step": pieces.step,
        "advance_schedule": lambda: pieces.advance_schedule(1),
    }.items():
        refuse(call, rf"^{name}\(\) needs an optimizer, but.* init_optimizer=False: leave that out")
    refuse(lambda: policy.train(share, TokenNLL()), r"^train\(\) needs an optimizer")
    policy.accumulator.abort()


@pytest.mark.parametrize("name", ["DP2, both overlaps", "FSDP2 x 2"])
def test_mistakes_around_a_step_are_refused_and_cost_nothing_of_it(
    ranks, checkpoint, tmp_path, name: str
) -> None:
    case = CASES[name]
    config = config_of(case, checkpoint(case.family, **SIZES))
    expected = ranks.run(case.world, answer_trainable, config, take_one_step)
    for one, other in zip(expected, ranks.run(case.world, mistakes, config, tmp_path), strict=True):
        assert_same_step(one, other, rel=0.0)
    ranks.run(case.world, answer, config, begin_without_an_optimizer)
    assert not any(tmp_path.iterdir())


class Drawing(TokenNLL):
    """Draws random numbers, as losses that sample do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        torch.rand(2)
        return super().__call__(*args, **kwargs)


def draws_after_a_skipped_step(policy: MegatronPolicy) -> None:
    """The caller's are kept, also those between the parts."""
    policy.accumulator.begin(Drawing(), mbs=1)
    for part in parts_of(policy, "nothing valid"):
        policy.accumulator.microbatch(part)
        torch.rand(5)
    drawn = torch.get_rng_state()
    assert policy.accumulator.finish()["skipped"]
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_step_that_is_skipped_keeps_what_the_caller_has_drawn(ranks, checkpoint) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {})
    ranks.run(1, answer_trainable, config, draws_after_a_skipped_step)


def begin_without_memory(policy: MegatronPolicy) -> None:
    """A step whose beginning fails is not open."""
    engine, share = policy._engine, share_of(policy, "at once")
    spent = torch.OutOfMemoryError("no memory")
    for owner, method in ((engine.trainable, "zero_gradients"), (engine, "volatile_buffers")):
        for begin in (
            lambda: policy.accumulator.begin(TokenNLL()),
            lambda: policy.pieces.forward_backward([], lambda scores: (scores, None)),
            lambda: policy.train(share, TokenNLL(), mbs=1),
        ):
            with mock.patch.object(type(owner), method, side_effect=spent):
                refuse(begin, "no memory", torch.OutOfMemoryError)
            policy.accumulator.begin(TokenNLL())
            policy.accumulator.abort()


def test_a_step_that_could_not_begin_does_not_keep_others_from_beginning(ranks, checkpoint) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {})
    ranks.run(1, answer_trainable, config, begin_without_memory)


LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)


class FusedProduct(torch.autograd.Function):
    """Transformer Engine's contract: the gradient is added to `main_grad`, the parameter is marked,
    and what autograd gets has no meaning.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        parameter: Any = ctx.weight
        parameter.main_grad.add_(grad.flatten(0, -2).t() @ x.flatten(0, -2))
        parameter.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan)


@contextmanager
def fusing_layers() -> Iterator[list[Any]]:
    """Within this context linear layers are made that can do so, and are listed."""
    made: list[Any] = []
    plainly = layers.linear_with_grad_accumulation_and_async_allreduce

    def product(input: torch.Tensor, weight: torch.Tensor, bias: Any, **others: Any) -> Any:
        (own,) = (each for each in made if each.weight is weight)
        if not (own.fuse_wgrad_accumulation and hasattr(weight, "main_grad")):
            return plainly(input=input, weight=weight, bias=bias, **others)
        found = FusedProduct.apply(input, weight)  # type: ignore[no-untyped-call]
        return found if bias is None else found + bias

    def making(kind: Any) -> Any:
        init = kind.__init__

        def fusing(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            self.fuse_wgrad_accumulation = False
            made.append(self)

        return mock.patch.object(kind, "__init__", fusing)

    name = "linear_with_grad_accumulation_and_async_allreduce"
    with mock.patch.object(layers, name, product), making(LINEARS[0]), making(LINEARS[1]):
        yield made


def steps(config: dict[str, Any], fused: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms of a step at once and of one in three parts, and the weights after them."""
    data = oracle.make_batch(8, LENGTH, VOCAB, seed=2)
    with (
        fusing_layers() if fused else nullcontext([]) as made,
        open_policy(config, init_reference_model=False) as policy,
    ):
        assert fused == bool(made) and all(each.fuse_wgrad_accumulation for each in made)
        norms = [float(policy.train(data, SequenceNLL())["grad_norm"])]
        policy.accumulator.begin(SequenceNLL())
        for start, end in ((0, 2), (2, 3), (3, 8)):
            policy.accumulator.microbatch(data.slice(start, end))
        norms.append(float(policy.accumulator.finish()["grad_norm"]))
        chunk = policy._engine.trainable.chunks[0]
        return norms, {name: p.detach().clone() for name, p in chunk.named_parameters()}


@pytest.mark.parametrize("recomputed", [False, True])
def test_they_are_the_same_at_once_and_in_parts(ranks, checkpoint, recomputed: bool) -> None:
    """The same sums in the same order: to the bit."""
    path = checkpoint("qwen2", **SIZES)
    config = policy_config(path, {"activation_checkpointing": recomputed})
    ((norms, weights),) = ranks.run(1, steps, config, True)
    ((norms_by_autograd, weights_by_autograd),) = ranks.run(1, steps, config, False)
    assert norms == norms_by_autograd
    for name, weight in weights.items():
        assert torch.equal(weight, weights_by_autograd[name]), name
