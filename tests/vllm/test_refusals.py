"""Refits that a real vLLM refuses: what it answers afterwards, and that the next one is complete
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.exact import Exact, assert_equal, furthest
from tests.vllm.engines import EngineCaller, EngineError, options_of
from tests.vllm.sessions import FIXED, SIZES
from tests.vllm.trainers import (
    BUFFER,
    Damaging,
    Trainer,
    Weights,
    exact_of,
    info_of,
    send,
    weights_of,
)

LAST = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"
TIMEOUT_S = 30.0


@dataclass
class Pair:
    """An engine with the weights of step 1, and what it and transformers make of the fixed rows
    with these and with those of step 2.
    """

    caller: EngineCaller
    address: str
    first: Weights
    second: Weights
    exact: tuple[Exact, Exact]
    before: list[list[float]]

    @classmethod
    def of(cls, caller: EngineCaller, paths: tuple[Path, Path], folder: Path, staged: bool) -> Pair:
        first, second = map(weights_of, paths)
        exact = exact_of(paths[0], FIXED), exact_of(paths[1], FIXED)
        pair = cls(caller, f"ipc://{folder}/s", first, second, exact, [])
        caller.call("prepare", info_of(first), TIMEOUT_S, staged)
        pair.refit(first, 1)
        pair.before = caller.call("logprobs", FIXED)
        assert_equal("engine", torch.tensor(pair.before), exact[0])
        assert furthest(exact[0].value, exact[1].value) > 0.1
        return pair

    def refit(self, weights: Weights, step: int) -> None:
        """One over the stream."""
        self.caller.begin("receive_stream", self.address)
        send(weights, IpcStream(self.address, BUFFER), step)
        assert self.caller.result() == step

    @contextmanager
    def refused(self, words: str, trainers: str | None = None) -> Iterator[None]:
        """A refit begun in the body, which both sides refuse with these words."""
        self.caller.begin("receive_stream", self.address)
        with pytest.raises(RefitError, match=trainers or words):
            yield
        with pytest.raises(EngineError, match=f"RefitError.*{words}") as error:
            self.caller.result()
        mixed = "The engine's weights are mixed" in str(error.value)
        assert mixed == self.caller.call("state")[1]

    def holds_first(self) -> None:
        """Bit for bit, as if nothing had been."""
        assert self.caller.call("state") == (1, False)
        assert self.caller.call("workers", "refit_left_on_meta") == [[]]
        assert self.caller.call("logprobs", FIXED) == self.before

    def is_mixed(self, visibly: bool = True) -> None:
        """It says so; it can compute, and what it computes is neither, if one could see that."""
        assert self.caller.call("state") == (1, True)
        assert self.caller.call("workers", "refit_left_on_meta") == [[]]
        found = torch.tensor(self.caller.call("logprobs", FIXED))
        assert found.isfinite().all(), "every layer has weights of one of both"
        apart = min(furthest(found, exact.value) for exact in self.exact)
        assert not visibly or apart > 1e-3

    def goes_on(self) -> None:
        """The next refit is complete."""
        self.refit(self.second, 2)
        assert self.caller.call("state") == (2, False)
        found = torch.tensor(self.caller.call("logprobs", FIXED))
        assert_equal("engine", found, self.exact[1])


@pytest.fixture(scope="module")
def paths(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return checkpoint("qwen2", **SIZES), checkpoint("qwen2", seed=1, **SIZES)


@pytest.fixture
def pair(
    request: pytest.FixtureRequest,
    engine: Callable[..., str],
    paths: tuple[Path, Path],
    tmp_path: Path,
) -> Iterator[Pair]:
    staged = getattr(request, "param", True)
    with EngineCaller(engine(paths[0], **options_of("qwen2"))) as caller:
        yield Pair.of(caller, paths, tmp_path, staged)


@pytest.mark.parametrize("pair", [True, False], indirect=True, ids=["staged", "unstaged"])
def test_another_model_is_refused_before_a_weight_moves(pair: Pair) -> None:
    wide = torch.zeros(SIZES["hidden"] + 1)
    for words, sent in (
        ("1 of another shape or dtype: .*instead of", pair.second | {NORM: wide}),
        ("1 of another shape or dtype", pair.second | {NORM: pair.second[NORM].bfloat16()}),
        (f"1 missing: {NORM}", {n: t for n, t in pair.second.items() if n != NORM}),
        ("1 unknown to it: model.extra", pair.second | {"model.extra": wide}),
    ):
        with pair.refused(words):
            send(sent, IpcStream(pair.address, BUFFER), 2)
        pair.holds_first()
    pair.goes_on()


def stop(name: str) -> None:
    """For `during`: the trainer gives up before the last layer."""
    if name == NORM:
        raise RefitError("the trainer gives up")


def damage(pair: Pair) -> None:
    send(pair.second, Damaging(IpcStream(pair.address, BUFFER), LAST), 2)


def rewind(pair: Pair) -> None:
    send(pair.second, IpcStream(pair.address, BUFFER), 0)


def give_up(pair: Pair) -> None:
    send(pair.second, IpcStream(pair.address, BUFFER), 2, during=stop)


FAULTS: dict[str, tuple[Callable[[Pair], None], str, str]] = {
    "damaged": (damage, f"1 with a wrong digest: {LAST}", "with a wrong digest"),
    "stale": (rewind, "weights of step 0 are older than those of step 1", "are older"),
    "unfinished": (give_up, "the trainer at .* disconnected in the middle", "gives up"),
}


@pytest.mark.parametrize("pair", [True, False], indirect=True, ids=["staged", "unstaged"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_refused_refit_leaves_the_old_weights_or_is_said_to_mix_them(
    pair: Pair, request: pytest.FixtureRequest, fault: str
) -> None:
    act, words, trainers = FAULTS[fault]
    staged = "unstaged" not in request.node.callspec.id
    with pair.refused(words, trainers):
        act(pair)
    if staged:
        pair.holds_first()
    else:  # of the others all has been loaded
        pair.is_mixed(visibly=fault == "unfinished")
    pair.goes_on()


@pytest.mark.parametrize("pair", [True, False], indirect=True, ids=["staged", "unstaged"])
@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("refit_break_reading", LAST),
        ("refit_break_reading", "model.layers.1.self_attn.v_proj.weight"),
        ("refit_break_processing", "model.layers.1.mlp.down_proj"),
    ],
)
def test_a_failure_within_vllm_mixes_weights_until_the_next_refit(
    pair: Pair, method: str, argument: str
) -> None:
    pair.caller.call("workers", method, argument)
    words = f"could not load the weights: RuntimeError: broken while {method.split('_')[-1]}"
    try:
        with pair.refused(words):
            send(pair.second, IpcStream(pair.address, BUFFER), 2)
    finally:
        pair.caller.call("workers", "refit_repair", "model.layers.1.mlp.down_proj")
    pair.is_mixed()
    pair.goes_on()


def test_what_vllm_itself_cannot_load_is_refused(pair: Pair) -> None:
    """Trainer and receiver agree on a model that the engine does not have."""
    narrow = {n: t[:8].clone() if n == NORM else t for n, t in pair.second.items()}
    fewer = {n: t for n, t in pair.second.items() if n != NORM}
    for sent, words in (
        (narrow, "could not load the weights"),
        (fewer, "has loaded nothing into 1"),
    ):
        pair.caller.call("prepare", info_of(sent), TIMEOUT_S, True)
        with pair.refused(words):
            send(sent, IpcStream(pair.address, BUFFER), 2)
        assert pair.caller.call("state") == (None, True)
        assert pair.caller.call("workers", "refit_left_on_meta") == [[]]
    pair.caller.call("prepare", info_of(pair.first), TIMEOUT_S, True)
    pair.goes_on()


@pytest.mark.parametrize("pair", [False], indirect=True, ids=["unstaged"])
@pytest.mark.parametrize("trusting", [False, True])
def test_memory_that_the_trainer_uses_again_is_copied(pair: Pair, trusting: bool) -> None:
    """A layer's tensors come in several packs, and vLLM reads them when the last one is there."""
    with reserved_port() as port:
        group = Collective.join(Trainer(pair.first), "127.0.0.1", port, 2, timeout_s=TIMEOUT_S)
    pair.caller.call("join", 1, "127.0.0.1", port, 2, None, group.secret)
    if trusting:
        pair.caller.call("workers", "refit_trust_tensors")
    try:
        pair.caller.begin("receive_group")
        send(pair.second, group.transport(BUFFER), 2)
        assert pair.caller.result() == 2
    finally:
        group.close()
    found = torch.tensor(pair.caller.call("logprobs", FIXED))
    if trusting:
        assert not furthest(found, pair.exact[1].value) < 1e-3, "as it is without copies"
    else:
        assert_equal("engine", found, pair.exact[1])


@pytest.mark.parametrize("pair", [True, False], indirect=True, ids=["staged", "unstaged"])
def test_handles_of_a_refit_that_does_not_end_are_dropped(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    names = tuple(pair.second)
    half = len(names) // 2
    with pytest.raises(EngineError, match=r"RefitError.*missing"):
        handles = IpcHandles(Trainer(pair.second))
        pair.caller.call("receive_handles", handles.weights(names[:half], 2))
        pair.caller.call("finish_handles", _whole(pair.second))
    for drops in (True, False):
        handles.release()
        pair.caller.call("receive_handles", handles.weights(names[:half], 2))
        if drops:
            pair.caller.call("drop_handles")
            assert pair.caller.call("workers", "refit_left_on_meta") == [[]]
    handles.release()
    pair.caller.call("receive_handles", handles.weights(names[:half], 2))
    staged = "unstaged" not in request.node.callspec.id
    pair.caller.call("prepare", info_of(pair.first), TIMEOUT_S, staged)  # another trainer
    for some in (names[:half], names[half:]):  # begins again, with the first names
        pair.caller.call("receive_handles", handles.weights(some, 2))
    assert pair.caller.call("finish_handles", handles.manifest(2)) == 2
    handles.release()
    assert_equal("engine", torch.tensor(pair.caller.call("logprobs", FIXED)), pair.exact[1])


def _whole(weights: Weights) -> Any:
    """The manifest of all of them."""
    whole = IpcHandles(Trainer(weights))
    whole.weights(tuple(weights), 2)
    try:
        return whole.manifest(2)
    finally:
        whole.release()


def test_workers_that_refuse_answer_the_next_call(
    engine: Callable[..., str], paths: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of several, of which vLLM reads one answer only if it is an exception."""
    address = engine(paths[0], **options_of("qwen2", 2))
    first, second = map(weights_of, paths)
    exact = exact_of(paths[1], FIXED)
    with EngineCaller(address) as caller:
        caller.call("prepare", info_of(first), TIMEOUT_S, True)
        with pytest.raises(EngineError, match=r"worker 0: .* is not a directory.*worker 1: "):
            caller.call("receive_directory", str(tmp_path / "absent"))
        assert caller.call("state") == (None, False)
        with pytest.raises(EngineError, match=r"vLLM's worker 1 has no address"):
            caller.call("receive_stream", [])
        handles = IpcHandles(Trainer(second))
        caller.call("receive_handles", handles.weights(tuple(second), 2))
        assert caller.call("finish_handles", handles.manifest(2)) == 2
        handles.release()
        assert caller.call("state") == (2, False)
        assert_equal("engine", torch.tensor(caller.call("logprobs", FIXED)), exact)
