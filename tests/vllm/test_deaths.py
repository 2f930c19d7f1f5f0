"""A trainer or a real vLLM that is killed during a refit: the other side says so in time, lives on,
and refits with another partner.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.collective.handshake import LOST
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.exact import Exact, assert_equal
from tests.other_process import OtherProcess
from tests.vllm.engines import EngineCaller, EngineError, EngineProcess, options_of
from tests.vllm.sessions import FIXED, SIZES
from tests.vllm.trainers import (
    BUFFER,
    Trainer,
    broadcast_and_die,
    exact_of,
    info_of,
    send,
    stream_and_die,
    weights_of,
)

TIMEOUT_S = 10.0
MIDDLE = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def paths(checkpoint: Callable[..., Path]) -> tuple[Path, Path]:
    return checkpoint("qwen2", **SIZES), checkpoint("qwen2", seed=1, **SIZES)


@pytest.fixture(scope="module")
def exact(paths: tuple[Path, Path]) -> Exact:
    """Of the fixed rows, with the second weights."""
    return exact_of(paths[1], FIXED)


@pytest.fixture
def caller(
    request: pytest.FixtureRequest, engine: Callable[..., str], paths: tuple[Path, Path]
) -> Iterator[EngineCaller]:
    """An engine that is prepared, with weights of any test."""
    staged = getattr(request, "param", False)
    with EngineCaller(engine(paths[0], **options_of("qwen2"))) as made:
        made.call("prepare", info_of(weights_of(paths[0])), TIMEOUT_S, staged)
        yield made


EITHER = pytest.mark.parametrize("caller", [False, True], indirect=True, ids=["unstaged", "staged"])


@pytest.fixture
def trainer() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


def heard(caller: EngineCaller, began: float) -> str:
    """What the engine says of the refit that failed, in time."""
    with pytest.raises(EngineError, match="RefitError") as error:
        caller.result()
    assert time.monotonic() - began < 2 * TIMEOUT_S
    assert caller.call("workers", "refit_left_on_meta") == [[]]
    return str(error.value)


@EITHER
def test_a_trainer_that_is_killed_over_a_stream(
    request: pytest.FixtureRequest,
    caller: EngineCaller,
    trainer: OtherProcess,
    paths: tuple[Path, Path],
    tmp_path: Path,
    exact: Exact,
) -> None:
    address = f"ipc://{tmp_path}/s"
    caller.begin("receive_stream", address)
    began = time.monotonic()
    trainer.begin(stream_and_die, paths[1], address, MIDDLE, TIMEOUT_S)
    said, mixed = heard(caller, began), "unstaged" in request.node.callspec.id
    assert "the trainer at" in said and ("weights are mixed" in said) == mixed
    assert caller.call("state") == (None, mixed)
    caller.begin("receive_stream", address)
    send(weights_of(paths[1]), IpcStream(address, BUFFER), 1)  # another trainer
    assert caller.result() == 1
    assert_equal("engine", torch.tensor(caller.call("logprobs", FIXED)), exact)


@EITHER
def test_a_trainer_that_is_killed_in_a_group(
    request: pytest.FixtureRequest,
    caller: EngineCaller,
    trainer: OtherProcess,
    paths: tuple[Path, Path],
    exact: Exact,
) -> None:
    secret = "0" * 64
    with reserved_port() as port:
        pass
    trainer.begin(broadcast_and_die, paths[1], port, secret, MIDDLE, TIMEOUT_S)
    caller.call("join", 1, "127.0.0.1", port, 2, None, secret)
    began = time.monotonic()
    caller.begin("receive_group")
    heard(caller, began)
    assert caller.call("state") == (None, "unstaged" in request.node.callspec.id)
    with reserved_port() as port:
        group = Collective.join(Trainer(weights_of(paths[1])), "127.0.0.1", port, 2)
    caller.call("join", 1, "127.0.0.1", port, 2, None, group.secret)
    caller.begin("receive_group")
    send(weights_of(paths[1]), group.transport(BUFFER), 1)
    assert caller.result() == 1
    group.close()
    assert_equal("engine", torch.tensor(caller.call("logprobs", FIXED)), exact)


ANEW = "the next refit starts from scratch"


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ("stream", f"the engine at .*{ANEW}"),
        ("group", f"a process has left, or was ended, after .*{ANEW}|^engine 0 {LOST}"),
    ],
)
def test_an_engine_that_is_killed(
    caller: EngineCaller,
    paths: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    exact: Exact,
    transport: str,
    words: str,
) -> None:
    weights, address = weights_of(paths[1]), f"ipc://{tmp_path_factory.mktemp('s')}/s"
    with reserved_port() as port:
        group = Collective.join(Trainer(weights), "127.0.0.1", port, 2, timeout_s=TIMEOUT_S)
    doomed = EngineProcess(paths[0], tmp_path_factory.mktemp("e"), **options_of("qwen2"))
    made = {"stream": IpcStream(address, BUFFER), "group": group.transport(BUFFER)}[transport]

    def receive(by: EngineCaller) -> None:
        if transport == "group":
            by.call("join", 1, "127.0.0.1", port, 2, None, group.secret)
            by.begin("receive_group")
        else:
            by.begin("receive_stream", address)

    def kill(sent: str) -> None:
        if sent == MIDDLE:
            os.kill(doomed.process.pid, signal.SIGKILL)

    try:
        with EngineCaller(doomed.address) as victim:
            victim.call("prepare", info_of(weights), TIMEOUT_S, True)
            receive(victim)
            began = time.monotonic()
            with pytest.raises(RefitError, match=f"(?s){words}"):
                send(weights, made, 1, TIMEOUT_S, kill)
            assert time.monotonic() - began < 2 * TIMEOUT_S
    finally:
        doomed.close()
    receive(caller)  # another engine takes its place
    send(weights, made, 1, TIMEOUT_S)
    assert caller.result() == 1
    group.close()
    assert_equal("engine", torch.tensor(caller.call("logprobs", FIXED)), exact)
