"""The pieces of a step put together are the step that `train` takes, to the last bit; temperatures
of calls and of rows are those of Hugging Face's logits divided by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError, ConfigError, LossError
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.policy import MegatronPolicy
from megatron_policy.training.callbacks import TokenScores
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB, layout
from tests.dist.shortcuts import dynamic, packed
from tests.dist.test_docs import python_blocks
from tests.exact import load_hf
from tests.losses import loss_mask, token_nll
from tests.margins import check

PACKED, DYNAMIC = packed(), dynamic()
DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=7)
TOKENS = loss_mask(DATA).sum()
TEMPERATURES = torch.tensor([1.0, 0.7, 1.3, 0.7, 1.0, 2.0, 1.3, 0.7])

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "one process": (1, {}, {}, "qwen2"),
    "one process, packed": (1, {}, PACKED, "qwen2"),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron, {}, "qwen2"),
    "PP2, dynamic": (2, LAYOUTS["PP2"].megatron, DYNAMIC, "qwen2"),
    "PP2xVPP2, packed": (2, LAYOUTS["PP2xVPP2"].megatron, PACKED, "qwen2"),
    "CP2, packed": (2, layout(2, context_parallel_size=2).megatron, PACKED, "qwen3"),
    "DP2": (2, LAYOUTS["DP2 distributed optimizer, both overlaps"].megatron, {}, "qwen2"),
    "EP2, packed": (2, {"expert_model_parallel_size": 2}, PACKED, "qwen3_moe"),
    "FSDP2 x 2, packed": (2, FSDP2_LAYOUTS["FSDP2 x 2"].megatron, PACKED, "qwen2"),
}


class NLL:
    """What `train` is given."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs) -> Any:
        return token_nll(next_token_logprobs, data, global_valid_toks), {}


def nll(scores: TokenScores) -> tuple[torch.Tensor, tuple[tuple[int, ...], float]]:
    """What the pieces are given: the same loss, and the rows it was called for."""
    assert scores.logprobs is not None
    loss = token_nll(scores.logprobs, scores.data, TOKENS)
    return loss, (scores.rows, loss.item())


def in_one_go(policy: MegatronPolicy, data: BatchedDataDict) -> float:
    return float(policy.train(data, NLL(), mbs=1)["grad_norm"])


def in_pieces(policy: MegatronPolicy, data: BatchedDataDict) -> float:
    """Microbatches as the policy cuts them, one call."""
    return step(policy, [policy.pieces.cut(data, 1)], data.size)


def with_own_rows(policy: MegatronPolicy, data: BatchedDataDict) -> float:
    """The same microbatches, named by the rows that the policy would put into them."""
    rows = [each.rows for each in policy.pieces.cut(data, 1) if not each.dummy]
    return step(policy, [policy.pieces.take(data, rows)], data.size)


def in_calls(policy: MegatronPolicy, data: BatchedDataDict) -> float:
    """The first half of the rows and the other in a call each."""
    half = data.size // 2
    parts = [[[row] for row in range(half)], [[row] for row in range(half, data.size)]]
    return step(policy, [policy.pieces.take(data, each) for each in parts], data.size)


def step(policy: MegatronPolicy, calls: Sequence[list[Microbatch]], rows: int) -> float:
    pieces, steps = policy.pieces, policy.steps
    pieces.zero_gradients()
    seen: list[int] = []
    for microbatches in calls:
        kept = pieces.forward_backward(microbatches, nll, reduce=len(calls) == 1)
        seen += [row for own, _ in kept for row in own]
    assert sorted(seen) == (list(range(rows)) if pieces.last_stage else [])
    stats = pieces.step()
    pieces.advance_schedule(GLOBAL_BATCH)
    assert policy.steps == steps + 1 and stats.skipped == ()
    return torch.tensor(stats.grad_norm).item()  # in fp32, as `train` reports it


def all_ways(config: dict[str, Any]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Two steps in each way: norms, and the weights afterwards."""
    found = []
    for way in (in_one_go, in_pieces, with_own_rows, in_calls):
        with open_policy(config, init_reference_model=False) as policy:
            share = own_share(policy, DATA)
            norms = [way(policy, share) for _ in range(2)]
            weights = {key: p.detach().clone() for key, p in policy.named_parameters()}
        found.append((norms, weights))
    return found


@pytest.mark.parametrize("name", CASES)
def test_pieces_put_together_are_the_step_that_train_takes(ranks, checkpoint, name: str) -> None:
    world, megatron, top, family = CASES[name]
    config = policy_config(checkpoint(family, **SIZES), megatron, **top)
    for found in ranks.run(world, all_ways, config):
        (norms, weights), *others, (call_norms, call_weights) = found
        assert norms[0] > 0
        for other_norms, other_weights in others:
            assert other_norms == norms
            assert all(torch.equal(other_weights[key], each) for key, each in weights.items())
        # Other microbatches and another order of sums.
        check("pieces: grad_norm", abs(call_norms[0] / norms[0] - 1), 1e-5)
        for key, each in weights.items():
            check("pieces: weights", (call_weights[key] - each).abs().max().item(), 1e-5)


def with_balanced_experts(config: dict[str, Any]) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """One step in one go and in pieces: its norm, and the routers afterwards."""
    found = []
    for way in (in_one_go, in_pieces):
        with open_policy(config, init_reference_model=False) as policy:
            norm = way(policy, own_share(policy, DATA))
            routers = {n: p.detach().clone() for n, p in policy.named_parameters() if "router" in n}
        found.append((norm, routers))
    return found


def test_context_parallel_ranks_count_a_token_once_where_experts_are_balanced(
    ranks, checkpoint
) -> None:
    balanced = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    megatron = layout(2, context_parallel_size=2).megatron | balanced
    config = policy_config(checkpoint("qwen3_moe", **SIZES), megatron, **PACKED)
    for (norm, routers), (norm_of_pieces, of_pieces) in ranks.run(2, with_balanced_experts, config):
        assert routers and norm_of_pieces == norm
        assert all(torch.equal(of_pieces[name], each) for name, each in routers.items())


def as_documented(config: dict[str, Any]) -> tuple[float, float]:
    """The norm of the loop in docs/losses.md, and that of the step it stands for."""
    rows = DATA.select_indices(range(4))
    with open_policy(config, init_reference_model=False) as policy:
        made = {"policy": policy, "data": rows, "count": loss_mask(rows).sum(), "samples": 4}
        exec(python_blocks("docs/losses.md")[4], made)
        assert [own for own, _ in made["kept"]] == [(0, 3), (1, 2)] and made["lr"] > 0
    with open_policy(config, init_reference_model=False) as policy:
        whole = BatchedDataDict(rows, sample_mask=torch.ones(4))
        found = policy.train(whole, NLL(), mbs=1, temperature=0.7)
        return made["stats"].grad_norm, float(found["grad_norm"])


def test_the_documents_loop_is_the_step_that_train_takes(ranks, checkpoint) -> None:
    top = DYNAMIC | {"train_global_batch_size": 4}
    config = policy_config(checkpoint("qwen2", **SIZES), {}, **top)
    ((found, wanted),) = ranks.run(1, as_documented, config)
    assert found > 0
    check("pieces: grad_norm", abs(found / wanted - 1), 1e-5)


READINGS = ("one", "of the reference", "of rows", "carried", "entropy", "plain")


def read_at_temperatures(config: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The readings of all rows, and a step at the rows' temperatures."""
    with open_policy(config) as policy:
        own = BatchedDataDict({key: DATA[key] for key in ("input_ids", "input_lengths")})
        found = [
            policy.logprobs(own, temperature=0.7),
            policy.reference_logprobs(own, temperature=0.7),
            policy.logprobs(own, temperature=TEMPERATURES),
            policy.logprobs(BatchedDataDict(own, temperature=TEMPERATURES)),
            policy.entropy(own, temperature=TEMPERATURES),
            policy.logprobs(own),
        ]
        with pytest.raises(BatchError, match=r"'temperature' has -1 in row 1"):
            policy.logprobs(own, temperature=torch.tensor([1.0, -1.0] * 4))
        with pytest.raises(BatchError, match=r"'temperature' has shape \(3,\)"):
            policy.logprobs(own, temperature=torch.ones(3))
        share = own_share(policy, BatchedDataDict(DATA, temperature=TEMPERATURES))
        return found, policy.train(share, NLL(), mbs=1)


def hf_scores(model: Any, temperatures_B: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies `[B, S - 1]`."""
    logits = model(DATA["input_ids"]).logits[:, :-1].float() / temperatures_B.view(-1, 1, 1)
    logprobs = logits.log_softmax(-1)
    found = logprobs.gather(-1, DATA["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
    return found, -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("name", [each for each in CASES if "EP2" not in each])
def test_temperatures_divide_the_logits_of_their_rows(ranks, checkpoint, name: str) -> None:
    world, megatron, top, family = CASES[name]
    path = checkpoint(family, **SIZES)
    model = load_hf(path)
    rows, entropy = hf_scores(model, TEMPERATURES)
    one, _ = hf_scores(model, torch.tensor(0.7))
    plain, _ = hf_scores(model, torch.tensor(1.0))
    loss = token_nll(rows, DATA, TOKENS)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    inside = torch.arange(1, LENGTH) < DATA["input_lengths"].unsqueeze(1)
    wanted = (one, one, rows, rows, entropy, plain)
    for found, step in ranks.run(world, read_at_temperatures, policy_config(path, megatron, **top)):
        for key, scores, right in zip(READINGS, found, wanted, strict=True):
            difference = ((scores[:, 1:] - right) * inside).abs().max().item()
            check(f"temperature: {key}", difference, 1e-5)
        check("temperature: loss", abs(step["loss"].item() / loss.item() - 1), 1e-5)
        check("temperature: norm", abs(step["grad_norm"].item() / norm.item() - 1), 1e-5)


def refusals(config: dict[str, Any]) -> tuple[float, float]:
    """What is refused, on every rank alike; norms of the same step before and after."""
    with open_policy(config, init_reference_model=False) as policy:
        pieces, share = policy.pieces, own_share(policy, DATA)
        replica = policy.coords.dp
        with pytest.raises(ConfigError, match=r"step\(\) has no gradients"):
            pieces.step()
        with pytest.raises(BatchError, match=r"microbatch 1 has the rows \[99\]"):
            pieces.take(share, [[0], [99]])
        with pytest.raises(BatchError, match="refused" if replica else "'temperature' has"):
            pieces.cut(share, 1, temperature=1.0 if replica else -1.0)
        microbatches = pieces.cut(share, 1)
        before = norm_of(policy, microbatches)

        def fails(scores: TokenScores) -> tuple[torch.Tensor, None]:
            if 2 in scores.rows and replica == 0:
                raise ArithmeticError("row 2")
            return nll(scores)[0], None

        def not_finite(scores: TokenScores) -> tuple[torch.Tensor, None]:
            return nll(scores)[0] / 0.0, None

        for wrong, said in ((fails, "ArithmeticError: row 2"), (not_finite, "not finite")):
            with pytest.raises(LossError, match=said):
                pieces.forward_backward(microbatches, wrong)
            with pytest.raises(ConfigError, match="incomplete gradients"):
                pieces.step()
            with pytest.raises(ConfigError, match="reduced or incomplete"):
                pieces.forward_backward(microbatches, nll)
            pieces.zero_gradients()
        with pytest.raises(LossError, match="ArithmeticError: row 2"):
            pieces.read(microbatches, fails)
        pieces.forward_backward(microbatches, nll)
        for other, *args in (
            (pieces.forward_backward, microbatches, nll),
            (policy.train, share, NLL()),
            (policy.accumulator.begin, NLL()),
        ):
            with pytest.raises(ConfigError):
                other(*args)
        pieces.zero_gradients()
        return before, norm_of(policy, microbatches)


def norm_of(policy: MegatronPolicy, microbatches: list[Microbatch]) -> float:
    """The norm of a step, whose parameters are put back."""
    kept = [(p, p.detach().clone()) for _, p in policy.named_parameters()]
    policy.pieces.forward_backward(microbatches, nll)
    norm = policy.pieces.step().grad_norm
    with torch.no_grad():
        for parameter, before in kept:
            parameter.copy_(before)
    return norm


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TP2+SP", "PP2, dynamic", "DP2", "FSDP2 x 2, packed"])
def test_what_cannot_be_put_together_is_refused_on_every_rank(ranks, checkpoint, name: str) -> None:
    world, megatron, top, family = CASES[name]
    config = policy_config(checkpoint(family, **SIZES), megatron, **top)
    for before, after in ranks.run(world, refusals, config):
        assert before == after > 0


def take_what_cut_refuses(config: dict[str, Any]) -> tuple[float, float]:
    """Norms of a step on rows with their lengths, and on the same rows without."""
    with open_policy(config, init_reference_model=False) as policy:
        pieces = policy.pieces
        whole = BatchedDataDict(DATA, input_lengths=torch.full((GLOBAL_BATCH,), LENGTH))
        bare = BatchedDataDict({key: whole[key] for key in whole if key != "input_lengths"})
        budget = policy.config.sequence_packing.train_mb_tokens
        at_once = [list(range(GLOBAL_BATCH))]
        assert budget < GLOBAL_BATCH * LENGTH
        with pytest.raises(BatchError, match="lack a tensor 'input_lengths'"):
            pieces.cut(bare, 1)
        found = (norm_of(policy, pieces.take(data, at_once)) for data in (whole, bare))
        return next(found), next(found)


def test_own_microbatches_need_neither_lengths_nor_a_budget_where_rows_are_packed(
    ranks, checkpoint
) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, **PACKED)
    ((with_lengths, without),) = ranks.run(1, take_what_cut_refuses, config)
    assert with_lengths == without > 0


def without_a_derivative(scores: TokenScores) -> tuple[torch.Tensor, None]:
    """Finite, unlike its gradient; it draws random numbers."""
    torch.rand(3)
    assert scores.logprobs is not None
    return (scores.logprobs - scores.logprobs.detach()).abs().sqrt().sum(), None


def raising(scores: TokenScores) -> tuple[torch.Tensor, None]:
    torch.rand(3)
    raise ArithmeticError("after it has drawn")


def draws_after_steps_that_fail(config: dict[str, Any]) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        pieces, share = policy.pieces, own_share(policy, DATA)
        first, second = (pieces.take(share, [[row]]) for row in range(2))

        def begin() -> torch.Tensor:
            """The random state of the step's beginning, which its first part leaves."""
            state = torch.get_rng_state()
            pieces.forward_backward(first, without_a_derivative, reduce=False)
            assert not torch.equal(torch.get_rng_state(), state)
            return state

        start = begin()
        pieces.forward_backward(second, without_a_derivative, reduce=False)
        with pytest.raises(LossError, match="norm is nan, although the loss is finite"):
            pieces.step()
        assert torch.equal(torch.get_rng_state(), start), "a norm that is not finite"
        start = begin()
        with pytest.raises(LossError, match="ArithmeticError"):
            pieces.forward_backward(second, raising, reduce=False)
        pieces.zero_gradients()
        assert torch.equal(torch.get_rng_state(), start), "a part that failed"
        begin()
        drawn = torch.get_rng_state()
        pieces.zero_gradients()
        assert torch.equal(torch.get_rng_state(), drawn), "a step that was dropped"


def test_a_step_that_fails_gives_back_all_random_numbers_drawn_since_it_began(
    ranks, checkpoint
) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {})
    ranks.run(1, draws_after_steps_that_fail, config)
