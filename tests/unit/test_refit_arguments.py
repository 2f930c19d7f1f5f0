"""What cannot be meant is refused by its name, with what to give in its place, on both sides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.policy.weight_exports import WeightExports
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.shards import EngineShards
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaShards, DeltaStream
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.transport import IpcStream
from megatron_policy.refit.transports.peft import PeftDirectory
from megatron_policy.workers.refit_driver import RefitDriver

SECRET = "of the groups in these tests"
STREAM = IpcStream("ipc:///tmp/engine.sock")
GROUP = Collective(False, None, SECRET)
SENDING: tuple[Callable[[Any], Any], ...] = (
    WeightExports.__new__(WeightExports).refit,
    WeightExports.__new__(WeightExports).begin_refit,
    RefitDriver.__new__(RefitDriver).refit,
    RefitDriver.__new__(RefitDriver).begin_refit,
)
NO_TRANSPORTS: dict[str, Any] = {
    "no NoneType": None,
    "no str": "ipc:///tmp/engine.sock",
    "no PosixPath": Path("weights"),
    "no Collective": GROUP,
    "no class, as DeltaDirectory is": DeltaDirectory,
}
"""What is said of each."""


@pytest.mark.parametrize("said", NO_TRANSPORTS)
def test_what_is_no_transport_is_refused_before_anything_is_sent(said: str) -> None:
    for send in SENDING:
        words = rf"refit\(\) takes {said}: give a transport that is made: IpcStream\(address\), a"
        with pytest.raises(ConfigError, match=words):
            send(NO_TRANSPORTS[said])


def receive() -> Receiver:
    return Receiver(lambda weights: None, timeout_s=1.0)


def join(**other: Any) -> Any:
    at = {"ip": "127.0.0.1", "port": 1, "rank": 1, "world_size": 2, "secret": SECRET}
    return join_collective(**at | other)


UNFIT: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "DeltaStream takes no class, as IpcStream is: give": (DeltaStream, IpcStream),
    "takes no HfDirectory: .*; for a directory there is D": (DeltaStream, HfDirectory("x")),
    "DeltaStream takes no DeltaStream: ": (DeltaStream, DeltaStream(STREAM)),
    r"DeltaShards takes no IpcStream: give what Collective\.shards": (DeltaShards, STREAM),
    "DeltaShards takes no str: ": (DeltaShards, "x"),
    "None is no path: give a str": (DeltaDirectory, None),
    "3 is no path": (HfDirectory, 3),
    "b'x' is no path": (PeftDirectory, b"x"),
    "whole_every is True: give": (lambda v: DeltaDirectory("x", whole_every=v), True),
    "max_shard_bytes is 0: give": (lambda v: HfDirectory("x", max_shard_bytes=v), 0),
    "the address 3 is neither": (IpcStream, 3),
    "buffer_bytes is '1 GB': give a whole": (lambda v: IpcStream(buffer_bytes=v), "1 GB"),
    "buffer_bytes is 100: give a whole number, 1024": (lambda v: IpcStream(buffer_bytes=v), 100),
    "bucket_bytes is 1.5: give": (lambda v: GROUP.transport(bucket_bytes=v), 1.5),
    "dtype is 'bf16': give one of torch": (lambda v: GROUP.transport(dtype=v), "bf16"),
    "port is None: give": (lambda v: join(port=v), None),
    "rank is '1': give": (lambda v: join(rank=v), "1"),
    "ip is None: give the address where": (lambda v: join(ip=v), None),
    r"Receiver\(load=...\) takes no int: give a function": (Receiver, 3),
    "expected is 3: give what": (lambda v: Receiver(print, expected=v), 3),
    "what the trainer's prepare": (lambda v: Receiver(print, expected=v), {"a": 3}),
    r"receive_collective\(\) takes no str: give what join_": (receive().receive_collective, "x"),
    "None is not an address on this machine": (receive().receive_ipc_stream, None),
    "handles are None: give what IpcHandles": (receive().receive_ipc_handles, None),
    r"finish_ipc\(\) takes no int: give the manifest": (receive().finish_ipc, 3),
    "5 is no path": (receive().receive_deltas, 5),
    "6 is no path": (receive().receive_directory, 6),
}
"""What is said of a call with that argument."""


@pytest.mark.parametrize("said", UNFIT)
def test_what_cannot_be_meant_is_refused_by_name(said: str) -> None:
    call, value = UNFIT[said]
    with pytest.raises((ConfigError, RefitError), match=said):
        call(value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            (0, 64, ((0,), (0,))),
            r"names rank 0 more than once: .* Give each of its parts a",
        ),
        ((0, 128, ((0, 1, 0),)), "names rank 0 more than once"),
        ((0, 64, (0, 1)), "names no ranks by numbers: give dim and chunk"),
        ((0, 64, "01"), "names no ranks by numbers"),
        ((0, 64.0, ((0,),)), "names no ranks by numbers"),
        ((0, 64, ()), "names no ranks by numbers"),
    ],
)
def test_an_engine_rank_holds_one_part_of_a_tensor_once(fields: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineShards(*fields)


def test_a_layout_of_an_engine_may_be_of_lists() -> None:
    held = EngineShards(1, 32, [[2], [0, 1]])
    assert held.shape((8, 64), 1) == (8, 32) and held.bounds((8, 50), 1) == (32, 50)
    assert GROUP.transport(dtype=torch.bfloat16) is not None
