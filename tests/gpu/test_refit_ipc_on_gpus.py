"""Weights of a GPU, shared with another process on it, where there is one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.transports.ipc.exported_buffer import handle_of, open_exported
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream, address_of
from tests import refit_engine as engine
from tests.other_process import OtherProcess
from tests.refit_trainer import BUFFER, FORMS, StandIn, weights

pytestmark = pytest.mark.gpu


def trainer(seed: int) -> StandIn:
    return StandIn({name: tensor.cuda() for name, tensor in weights(seed).items()}, timeout_s=60)


@pytest.mark.parametrize("staged", [True, False])
def test_every_bit_arrives_over_both_protocols(staged: bool) -> None:
    process = OtherProcess(clean=True, on_gpu=True)
    process.call(engine.start, FORMS, 0, {"expected": FORMS, "staged": staged})
    for step in (1, 2):
        process.begin(engine.receive, address_of(device.device_id()))
        deliver(trainer(step), IpcStream(buffer_bytes=BUFFER), step)
        assert process.result() == step
        assert process.call(engine.state)[:3] == (engine.bits(weights(step)), step, False)
    source = IpcHandles(trainer(3))
    for names in (list(FORMS)[:4], list(FORMS)[4:]):
        process.call(engine.receive_handles, source.weights(names))
    assert process.call(engine.finish, source.manifest(3)) == 3
    assert process.call(engine.state)[:3] == (engine.bits(weights(3)), 3, False)
    process.kill()
    source.release()


def host_rebuild(function: Any, arguments: Any) -> float:
    """As the host's receivers do it."""
    own = list(arguments)
    own[6] = 0
    return float(function(*own)[: FORMS["norm"][0][0]].float().sum())


def test_the_handles_are_what_the_hosts_receivers_take() -> None:
    process = OtherProcess(clean=True, on_gpu=True)
    source = IpcHandles(trainer(1))
    ((name, (packed, rebuilds, offsets)),) = source.weights(["norm"]).items()
    assert name == device.device_id() and packed and offsets == {"norm": 0}
    ((_, (function, arguments)),) = rebuilds
    expected = float(weights(1)["norm"].float().sum())
    assert process.call(host_rebuild, function, arguments) == pytest.approx(expected, rel=1e-5)
    process.kill()
    source.release()


def test_what_is_no_memory_of_this_gpu_is_refused() -> None:
    with pytest.raises(RefitError, match="handle"):
        handle_of((os.system, ("true",)))
    with pytest.raises(RefitError, match="same GPU"):
        open_exported(((1, 2, 3),), print)
