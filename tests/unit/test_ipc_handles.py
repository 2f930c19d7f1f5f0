"""Weights shared by handle, some names at a time: what a real other process makes of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.handles import Handles, IpcHandles
from tests import refit_engine as engine
from tests.other_process import OtherProcess, shared_memory_of
from tests.refit_trainer import FORMS, StandIn, weights
from tests.small_disk import MIB, free, small_disk

NAMES = list(FORMS)
CALLS = (NAMES[:3], NAMES[3:8], NAMES[8:])


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


@pytest.fixture
def start(other: OtherProcess) -> Iterator[Callable[..., OtherProcess]]:
    def started(**options: Any) -> OtherProcess:
        other.call(engine.start, FORMS, 0, options)
        return other

    yield started
    assert other.call(engine.left) == []
    gc.collect()
    assert shared_memory_of("self") == []


def source_of(seed: int, **exporter: Any) -> IpcHandles:
    return IpcHandles(StandIn(weights(seed), **exporter))


@pytest.mark.parametrize("staged", [True, False])
def test_every_bit_arrives_and_again_a_step_later(
    start: Callable[..., OtherProcess], staged: bool
) -> None:
    process = start(staged=staged)
    for step in (1, 2):
        source = source_of(step)
        for names in CALLS:
            process.call(engine.receive_handles, source.weights(names))
        manifest = source.manifest(step)
        assert list(manifest.tensors) == NAMES
        assert process.call(engine.finish, manifest) == step
        source.release()
        held, accepted, mixed, _ = process.call(engine.state)
        assert held == engine.bits(weights(step)) and accepted == step and not mixed


def host_receiver_bits(handles: Handles, wanted: str) -> engine.Bits:
    """What a receiver does that knows shapes and the protocol, but not this package."""
    packed, rebuilds, offsets = handles[wanted]
    assert packed is True
    flat = {}
    for dtype, (function, arguments) in rebuilds:
        own = list(arguments)
        own[6] = 0
        flat[dtype] = function(*own)
    return engine.bits(
        {
            name: flat[dtype][offset : offset + torch.Size(shape).numel()].view(shape).clone()
            for name, offset in offsets.items()
            for shape, dtype in [FORMS[name]]
        }
    )


def test_the_handles_are_what_the_hosts_receivers_take(start: Callable[..., OtherProcess]) -> None:
    process, source = start(), source_of(1)
    process.begin(host_receiver_bits, source.weights(NAMES), device.device_id())
    assert process.result() == engine.bits(weights(1))
    source.release()


def test_what_was_lent_cannot_be_opened_after_the_next_call_or_release(
    start: Callable[..., OtherProcess],
) -> None:
    process, source = start(), source_of(1)
    for name, withdraw in (("embed", lambda: source.weights(["norm"])), ("norm", source.release)):
        lent = source.weights([name])
        withdraw()
        with pytest.raises(RefitError, match="send the weights again"):
            process.call(engine.receive_handles, lent)


@pytest.mark.parametrize(
    ("step", "calls", "said"),
    [
        (4, CALLS[:2], "norm"),
        (4, CALLS, "digest"),
        (2, CALLS, "older"),
        (4, (*CALLS, CALLS[1]), "twice"),
    ],
)
def test_what_is_not_the_complete_set_is_refused_and_the_next_refit_succeeds(
    start: Callable[..., OtherProcess], step: int, calls: Any, said: str
) -> None:
    process = start()

    def refit(step: int, calls: Any = CALLS, flip: bool = False) -> None:
        source = source_of(step)
        for names in calls:
            handles = source.weights(names)
            if flip and "norm" in names:
                source._exported[torch.bfloat16].buffer.memory[1] ^= 1
            process.call(engine.receive_handles, handles)
        process.call(engine.finish, source.manifest(step))

    refit(3)
    with pytest.raises(RefitError, match=said):
        refit(step, calls, flip=said == "digest")
    held, accepted, mixed, _ = process.call(engine.state)
    assert held == engine.bits(weights(3)) and accepted == 3 and not mixed
    refit(5)
    assert process.call(engine.state)[:2] == (engine.bits(weights(5)), 5)


def test_a_refit_that_a_trainer_abandoned_does_not_disturb_the_next(
    start: Callable[..., OtherProcess],
) -> None:
    process = start()
    abandoned = source_of(1)
    process.call(engine.receive_handles, abandoned.weights(CALLS[0]))
    source = source_of(2)
    for names in CALLS:
        process.call(engine.receive_handles, source.weights(names))
    process.call(engine.finish, source.manifest(2))
    assert process.call(engine.state)[0] == engine.bits(weights(2))
    source.release()
    abandoned.release()


kept: list[IpcHandles] = []


def lend() -> Any:
    kept.append(source_of(1))
    return kept[-1].weights(CALLS[0])


def test_the_handles_of_a_killed_trainer_are_refused_and_nothing_of_it_is_left(
    start: Callable[..., OtherProcess],
) -> None:
    process, trainer = start(), OtherProcess()
    handles = trainer.call(lend)
    assert len(shared_memory_of(trainer.pid)) > 0
    trainer.kill()
    with pytest.raises(RefitError, match="same machine"):
        process.call(engine.receive_handles, handles)
    held, step, mixed, _ = process.call(engine.state)
    assert step is None and not mixed and not any(any(data) for _, _, data in held.values())


def test_room_for_part_of_it_is_an_error_that_leaves_nothing_and_less_still_fits(
    start: Callable[..., OtherProcess], tmp_path: Path
) -> None:
    process = start()
    forms = dict.fromkeys(("a", "b"), ((300, 1000), torch.bfloat16))
    held = weights(1, forms)
    with small_disk(tmp_path / "tiny") as tiny:
        source = IpcHandles(StandIn(held), directory=tiny)
        with pytest.raises(RefitError, match="shared memory"):
            source.weights(["a", "b"])
        assert free(tiny) == MIB
        process.call(engine.start, forms, 0, {})
        for name in forms:
            process.call(engine.receive_handles, source.weights([name]))
        process.call(engine.finish, source.manifest(1))
        assert process.call(engine.state)[0] == engine.bits(held)
        source.release()
        assert free(tiny) == MIB


def receiver() -> Receiver:
    return Receiver(lambda tensors: None, expected=FORMS)


def test_handles_that_do_not_fit_are_refused_by_name() -> None:
    source = source_of(1)
    with pytest.raises(RefitError, match="other"):
        source.weights(["embed", "other"])
    ((_, entry),) = source.weights(["norm"]).items()
    packed, rebuilds, offsets = entry
    with pytest.raises(RefitError, match="here, there, none for"):
        receiver().receive_ipc_handles({"here": entry, "there": entry})
    with pytest.raises(RefitError, match="none for elsewhere"):
        receiver().receive_ipc_handles({"here": entry}, device_id="elsewhere")
    for offset in (10**6, -1):
        with pytest.raises(RefitError, match="does not fit"):
            receiver().receive_ipc_handles({"here": (packed, rebuilds, {"norm": offset})})
    for wrong in (None, (False, []), (True, [], {"norm": 0}), (True, 3, {})):
        with pytest.raises(RefitError):
            receiver().receive_ipc_handles({"here": wrong})
    receiver().receive_ipc_handles({"here": entry, "there": entry}, device_id="there")
    assert offsets == {"norm": 0}
    source.release()
    source.weights(NAMES)
    manifest = source.manifest(1)
    with pytest.raises(RefitError, match="missing"):
        receiver().finish_ipc(manifest)
    with pytest.raises(RefitError, match="nothing was exported"):
        source.manifest(2)
    source.release()
