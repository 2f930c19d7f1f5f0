"""A loss that goes wrong on one rank: all ranks say what and where, and nothing has changed.

The loss goes wrong on the last rank only, in its second microbatch. Afterwards the policy takes the
step that transformers and torch take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.random_states import capture
from megatron_policy.engines.hugging_face.table import local_part
from megatron_policy.errors import ConfigError, LossError
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import (
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    LAYOUTS,
    LENGTH,
    OVERLAPPED,
    VOCAB,
    layout,
)
from tests.dist.resuming import modules, optimizers
from tests.dist.shortcuts import answer_trainable, packed
from tests.losses import sequence_nll
from tests.mistaken import MISTAKES, READING, Mistaken, NoGradientOfSqrt

Case = tuple[int, dict[str, Any], str, dict[str, Any]]
FSDP1, FSDP2 = FSDP1_LAYOUTS, FSDP2_LAYOUTS
CASES: dict[str, Case] = {
    "one process": (1, {}, "token", {}),
    "DP2": (2, {}, "sequence", {}),
    "DP2, both overlaps": (2, OVERLAPPED, "token", {}),
    "DP2, both overlaps, packed": (2, OVERLAPPED, "logit", packed()),
    "TP2": (2, LAYOUTS["TP2"].megatron, "token", {}),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron, "sequence", {}),
    "PP2": (2, LAYOUTS["PP2"].megatron, "logit", {}),
    "PP2xVPP2, both overlaps": (2, LAYOUTS["PP2xVPP2"].megatron | OVERLAPPED, "sequence", {}),
    "CP2, packed": (2, layout(2, context_parallel_size=2).megatron, "sequence", packed()),
    "TP2xDP2+SP, overlaps": (4, LAYOUTS["TP2+SP"].megatron | OVERLAPPED, "sequence", {}),
    "FSDP2 x 2, packed": (2, FSDP2["FSDP2 x 2"].megatron, "logit", packed()),
    "FSDP2 2x2 copies": (4, FSDP2["FSDP2 2x2 copies"].megatron, "token", {}),
    "FSDP2 TP2": (2, FSDP2_TENSOR_LAYOUTS["FSDP2 TP2 x 2"].megatron, "token", {}),
    "FSDP2 CP2": (2, FSDP2["FSDP2 CP2"].megatron, "sequence", {}),
    "FSDP2 x 2": (2, FSDP2["FSDP2 x 2"].megatron, "sequence", {}),
    "FSDP1 x 2": (2, FSDP1["FSDP1 x 2"].megatron, "sequence", {}),
    "FSDP1 2 copies": (2, FSDP1["FSDP1 2 copies"].megatron, "logit", packed()),
}


def with_masked_rows() -> BatchedDataDict:
    return oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)


def good() -> BatchedDataDict:
    """Every row has tokens that count."""
    data = with_masked_rows()
    data["sample_mask"] = torch.ones(GLOBAL_BATCH)
    data["token_mask"][:, 1] = 1
    return data


@cache
def expected(path: Path, kind: str, masked: bool = False) -> oracle.Learned:
    loss = {"token": oracle.token_level, "logit": oracle.logit_level, "sequence": sequence_level}
    data = with_masked_rows() if masked else good()
    return oracle.Learned.of(path, data, GLOBAL_BATCH, loss[kind])


def sequence_level(model: Any, data: BatchedDataDict) -> torch.Tensor:
    logprobs = oracle.hf_logprobs(model, data["input_ids"])
    return sequence_nll(logprobs, data, data["sample_mask"].sum())


def whole_state(policy: MegatronPolicy) -> dict[str, Any]:
    """All that a step changes on this rank, as values."""
    trainable = policy._session.trainable
    state: dict[str, Any] = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for number, optimizer in enumerate(optimizers(policy)):
        for place, each in enumerate(optimizer.state.values()):
            for name, value in each.items():
                held = isinstance(value, torch.Tensor)
                state[f"{number}.{place}.{name}"] = local_part(value).clone() if held else value
    for chunk, model in enumerate(modules(policy)):
        for name, buffer in model.named_buffers():
            if ".balancing." not in name:  # what routers sum up begins anew with each step
                state[f"chunk {chunk} {name}"] = buffer.clone()
    schedule = trainable.schedule_state().items()
    # A step that is skipped for its loss scale lowers that.
    state["schedule"] = {n: value for n, value in schedule if not n.startswith("loss_scale")}
    state["steps"] = policy.steps
    state["rates"] = trainable.lr, trainable.weight_decay
    return state | {"random": capture(policy._engine, {})}


@contextmanager
def unchanged(policy: MegatronPolicy) -> Iterator[None]:
    before = whole_state(policy)
    yield
    after = whole_state(policy)
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, after[name]), name


def hear(call: Callable[[], object], kind: type[Exception] = LossError) -> str:
    with pytest.raises(kind) as error:
        call()
    return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def micro(policy: MegatronPolicy) -> dict[str, int]:
    return {"gbs": GLOBAL_BATCH, "mbs": GLOBAL_BATCH // policy.topology.dp // 4}


def make_mistakes(config: dict[str, Any], kind: str, world: int) -> dict[str, Any]:
    """What this rank hears of each mistake, and what it computes afterwards."""
    with open_policy(config) as policy:
        share, said = own_share(policy, good()), {}
        for training, mistakes in ((True, MISTAKES), (False, READING)):
            for mistake in mistakes:
                loss = Mistaken(kind, mistake, rank=world - 1)
                with unchanged(policy):
                    call = partial(policy.train, share, loss, eval_mode=not training)
                    said[mistake, training] = hear(partial(call, **micro(policy)))
        evaluated = policy.train(share, LOSSES[kind](), eval_mode=True, **micro(policy))
        trained = policy.train(share, LOSSES[kind](), **micro(policy))
        weights = {name: tensor.clone() for name, tensor in policy.export()}
        return {
            "said": said,
            "replica": policy.topology.dp - 1,
            "evaluated": evaluated["loss"],
            "trained": trained,
            "weights": weights,
        }


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_name_the_loss_that_failed_on_one_and_go_on(ranks, checkpoints, name) -> None:
    world, megatron, kind, top = CASES[name]
    path = checkpoints[True]
    config = policy_config(path, megatron, **top)
    hf = expected(path, kind)
    seen = ranks.run(world, make_mistakes, config, kind, world)
    for each in seen:
        for (mistake, training), said in each["said"].items():
            where = f"{name}, {mistake}, {'training' if training else 'reading'}: {said}"
            assert MISTAKES[mistake][1] in said, where
            assert f"on data-parallel replica {each['replica']} (rows " in said, where
            assert "in microbatch " in said, where
            assert said == seen[0]["said"][mistake, training]
        assert "return MISTAKES[self.mistake]" in each["said"]["raises", True], "no traceback"
        hf.assert_same_loss(each["evaluated"], 0)
        hf.assert_same_steps([each["trained"]])
        hf.assert_same_weights(each["weights"])


def fail_in_the_second_batch(config: dict[str, Any]) -> tuple[str, dict[str, torch.Tensor]]:
    with open_policy(config) as policy:
        data = own_share(policy, good())
        loss = Mistaken("sequence", "NaN", rank=1, call=data.size // 2 + 1)
        said = hear(lambda: policy.train(data, loss, gbs=GLOBAL_BATCH // 2, mbs=1))
        assert policy.steps == 1
        return said, {name: p.detach().clone() for name, p in policy.named_parameters()}


def train_on_the_first_batch(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    half = own_share(policy, good()).slice(0, GLOBAL_BATCH // 4)
    policy.train(half, LOSSES["sequence"](), gbs=GLOBAL_BATCH // 2, mbs=1)
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


@pytest.mark.parametrize("megatron", [{}, {"dtensor_cfg": {}}], ids=["Megatron-Core", "FSDP2"])
def test_steps_before_the_one_that_fails_stay_and_are_counted(ranks, checkpoints, megatron) -> None:
    """Microbatches are counted anew in each global batch, and rows are not."""
    config = policy_config(checkpoints[True], megatron)
    train = answer_trainable
    alone = ranks.run(2, train, config, train_on_the_first_batch)
    for (said, weights), right in zip(
        ranks.run(2, fail_in_the_second_batch, config), alone, strict=True
    ):
        assert "in microbatch 1 of global batch 1 on data-parallel replica 1 (rows 3)" in said
        assert "The 1 optimizer step(s) already taken are kept" in said
        assert all(torch.equal(right[name], weight) for name, weight in weights.items())


def follow_a_gradient_that_is_not_finite(config: dict[str, Any]) -> list[str]:
    with open_policy(config) as policy:
        share, said = own_share(policy, good()), []
        with unchanged(policy):
            said.append(hear(lambda: policy.train(share, NoGradientOfSqrt(1), **micro(policy))))
        policy.accumulator.begin(NoGradientOfSqrt(1), **micro(policy))
        with unchanged(policy):
            policy.accumulator.microbatch(share)
            said.append(hear(policy.accumulator.finish))
            policy.accumulator.abort()
        result = policy.train(share, LOSSES["sequence"](), **micro(policy))
        assert result["grad_norm"].isfinite().all()
        return said


@pytest.mark.parametrize(
    "name", ["DP2", "DP2, both overlaps", "PP2xVPP2, both overlaps", "TP2", "experts", "FSDP2 x 2"]
)
def test_a_gradient_that_is_not_finite_is_refused_on_all_ranks(
    ranks, checkpoints, checkpoint, name: str
) -> None:
    """Also where a router's bias would have moved, or counted tokens, by then."""
    path = checkpoint("deepseek_v3", vocab=VOCAB) if name == "experts" else checkpoints[True]
    megatron = OVERLAPPED if name == "experts" else CASES[name][1]
    for said in ranks.run(2, follow_a_gradient_that_is_not_finite, policy_config(path, megatron)):
        assert all("the gradient's norm is nan, although the loss is finite" in s for s in said)
        assert "abort_train_step()" in said[1]


def fail_in_a_part(config: dict[str, Any]) -> dict[str, list[str]]:
    said = {}
    with open_policy(config) as policy:
        share = own_share(policy, good())
        for mistake in ("raises", "NaN", "detached", "no metrics"):
            loss = Mistaken("sequence", mistake, rank=1, call=2)
            policy.accumulator.begin(loss, **micro(policy))
            with unchanged(policy):
                policy.accumulator.microbatch(share.slice(0, 2))
                part = partial(policy.accumulator.microbatch, share)
                end = (
                    hear(part),
                    hear(part, ValueError),
                    hear(policy.accumulator.finish, ConfigError),
                )
                policy.accumulator.abort()
            said[mistake] = end
        policy.accumulator.begin(LOSSES["sequence"](), **micro(policy))
        policy.accumulator.microbatch(share)
        said["loss"] = policy.accumulator.finish()["loss"].tolist()
        return said


@pytest.mark.parametrize(
    "name", ["DP2, both overlaps", "PP2", "TP2", "FSDP2 x 2", "FSDP1 x 2", "FSDP1 2 copies"]
)
def test_a_part_that_fails_on_one_rank_fails_on_all_and_the_step_can_be_aborted(
    ranks, checkpoints, name: str
) -> None:
    config = policy_config(checkpoints[True], CASES[name][1])
    for said in ranks.run(2, fail_in_a_part, config):
        loss = said.pop("loss")
        expected(checkpoints[True], "sequence").assert_same_loss(torch.tensor(loss), 0)
        for mistake, (part, again, end) in said.items():
            assert MISTAKES[mistake][1] in part and "abort_train_step()" in part
            assert "incomplete" in again and "incomplete" in end


class Constant(LOSSES["sequence"]):  # type: ignore[misc]
    """Of rows of which no token counts a loss may say 0, without a gradient."""

    def __call__(self, data: BatchedDataDict, *args: Any, **kwargs: Any) -> Any:
        if not data["sample_mask"].any():
            return torch.zeros(()), {}
        return super().__call__(data, *args, **kwargs)


def train_without_tokens(policy: MegatronPolicy) -> list[dict[str, Any]]:
    share = own_share(policy, with_masked_rows())
    return [policy.train(share, Constant(), **micro(policy))]


@pytest.mark.parametrize("name", ["DP2, both overlaps", "PP2", "FSDP2 x 2"])
def test_a_constant_0_for_rows_without_tokens_is_trained_on(ranks, checkpoints, name: str) -> None:
    hf = expected(checkpoints[True], "sequence", masked=True)
    assert 0 in with_masked_rows()["sample_mask"].tolist()
    config = policy_config(checkpoints[True], CASES[name][1])
    train = answer_trainable
    for steps in ranks.run(2, train, config, train_without_tokens):
        hf.assert_same_steps(steps)


class Uncalled(LOSSES["sequence"]):  # type: ignore[misc]
    def __call__(self, data: Any, logprobs: Any) -> Any:
        raise AssertionError("it cannot be called as a loss is")


TYPOS: list[tuple[Any, str]] = [
    (LOSSES["token"], "is the class TokenNLL itself: pass an instance"),
    (None, "is a NoneType, which cannot be called"),
    ("token", "is a str, which cannot be called"),
    (Uncalled(), "Uncalled(data, logprobs) cannot be called as a loss of its"),
    (lambda logits, data: None, "cannot be called as a loss of its kind is"),
]


def train_on_typos(config: dict[str, Any]) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        share = own_share(policy, good())
        for loss, message in TYPOS:
            with unchanged(policy):
                assert message in hear(partial(policy.train, share, loss, **micro(policy)))
                assert message in hear(partial(policy.accumulator.begin, loss, **micro(policy)))
        policy.train(share, LOSSES["token"](), **micro(policy))


def test_what_cannot_be_called_as_a_loss_is_found_before_it_is_called(ranks, checkpoints) -> None:
    ranks.run(2, train_on_typos, policy_config(checkpoints[True], {}))
