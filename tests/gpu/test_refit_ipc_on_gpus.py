"""Weights of a GPU, shared with another process on it, where there is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_policy import device
from megatron_policy.device import allocated, release_cached
from megatron_policy.errors import RefitError
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.shared_memory import open_exported, read_handle
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
        read_handle((os.system, ("true",)))
    with pytest.raises(RefitError, match="same GPU"):
        open_exported(((1, 2, 3),), print)


def refit_from_here(address: str, step: int) -> str:
    """Refit an engine from this process: "refitted", or why not."""
    try:
        deliver(trainer(step), IpcStream(address, buffer_bytes=BUFFER), step)
    except RefitError as error:
        return str(error)
    return "refitted"


def test_memory_in_expandable_segments_arrives_or_is_refused_by_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    receiver = OtherProcess(clean=True, on_gpu=True)
    receiver.call(engine.start, FORMS, 0, {"expected": FORMS, "timeout_s": 30.0})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sender, address = OtherProcess(clean=True, on_gpu=True), f"ipc://{tmp_path}/refit"
    receiver.begin(engine.receive, address)
    outcome = sender.call(refit_from_here, address, 1)
    if outcome == "refitted":
        assert receiver.result() == 1
        assert receiver.call(engine.state)[:3] == (engine.bits(weights(1)), 1, False)
    else:
        assert "remove expandable_segments:True" in outcome
        with pytest.raises(RefitError):
            receiver.result()
        assert receiver.call(engine.state)[0] == engine.bits(engine.zeros(FORMS))
    sender.kill()
    receiver.kill()


def test_an_engine_that_is_killed_while_it_holds_handles_leaves_nothing_behind() -> None:
    held, source, resident = trainer(1), None, []
    for _ in range(4):
        process = OtherProcess(clean=True, on_gpu=True)
        process.call(engine.start, FORMS, 0, {"expected": FORMS})
        source = IpcHandles(held)
        process.call(engine.receive_handles, source.weights(list(FORMS)[:4]))
        process.kill()
        source.release()
        release_cached()
        resident.append(allocated())
    assert resident[1:] == resident[:1] * 3
    process = OtherProcess(clean=True, on_gpu=True)
    process.call(engine.start, FORMS, 0, {"expected": FORMS})
    process.begin(engine.receive, address_of(device.device_id()))
    deliver(held, IpcStream(buffer_bytes=BUFFER), 5)
    assert process.result() == 5
    assert process.call(engine.state)[:3] == (engine.bits(weights(1)), 5, False)
    process.kill()
