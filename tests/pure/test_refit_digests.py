"""On a device, a refit's digests are computed without waiting, and read together at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_policy.refit import delivery
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.digest import DEVICE, Digests, digest
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.receive import assembler
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc import handles
from tests.refit_engine import SmallEngine, bits, zeros
from tests.refit_trainer import FORMS, StandIn, weights

READS = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__int__,
    torch.Tensor.cpu,
    torch.Tensor.item,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
}
"""With which the host waits for a device, seen on the CPU too."""


class Reads(TorchFunctionMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func in READS
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[Reads]:
    with Reads() as found:
        yield found


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory gets the digests of a device's."""
    for module in (delivery, assembler, handles):
        monkeypatch.setattr(module, "algorithm_for", lambda memory: DEVICE)


def counted(nbytes: int) -> Tensor:
    return ((torch.arange(nbytes) * 37 + 11) % 256).to(torch.uint8)


@pytest.mark.parametrize(
    ("nbytes", "value"),
    [
        (0, 0xE177AEFC86F461CA),
        (1, 0x95A415CC37ADD3F2),
        (7, 0xEF3C4B8B7C8FE4A4),
        (8, 0xC906A663F221E73A),
        (9, 0x4E3CB1075F907DCD),
        (4096, 0x2FB4F33AC09E7943),
        (10007, 0x92E2312633504A7E),
        (2**25 + 13, 0xE992B7778C315308),
    ],
)
def test_a_digest_is_the_one_of_earlier_releases(nbytes: int, value: int) -> None:
    """Trainer and engine may run different ones."""
    assert digest(counted(nbytes), DEVICE) == value


def test_digests_read_together_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_policy.refit.digest._BLOCK", 4)
    tensors = {f"{n}": counted(n)[n % 3 :] for n in (0, 3, 900, 17, 64, 4096, 8, 1, 25, 250)}
    digests = Digests(DEVICE)
    for number, (name, memory) in enumerate(tensors.items()):
        digests.add(name, memory)
        if number == 5:
            assert len(digests.read()) == 6
    assert digests.read() == {name: digest(of, DEVICE) for name, of in tensors.items()}
    assert list(digests.read()) == list(tensors)


def test_adding_needs_no_values() -> None:
    """A tensor without values raises where one would be read."""
    digests = Digests(DEVICE)
    for nbytes in (7, 8, 4096, 2**25 + 13):
        digests.add(str(nbytes), torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    with pytest.raises((NotImplementedError, RuntimeError)):
        digests.read()


class InThisProcess:
    """A transport to an engine in this process."""

    def __init__(self, receiver: Receiver) -> None:
        self._assembler = receiver.assembler()
        self._buffer = Buffer.on(torch.device("cpu"), 4096)

    def plan(self, exporter: Any) -> Any:
        return exporter.plan()

    def open(self, exporter: Any, plan: Any) -> InThisProcess:
        return self

    def place(self, tensor: RefitTensor) -> BufferSlice:
        return BufferSlice(self._buffer, 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        self._assembler.take([(tensor.name, target.tensor(tensor.shape, tensor.dtype))])

    def finish(self, manifest: RefitManifest) -> None:
        self._assembler.finish(manifest)

    def close(self) -> None: ...


def model(layers: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return FORMS | {f"more.{n}": ((n % 7 + 1,), torch.bfloat16) for n in range(layers)}


def own(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: digest(tensor, DEVICE) for name, tensor in tensors.items()}


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("layers", [0, 50])
@pytest.mark.parametrize("staged", [True, False])
def test_each_side_of_a_refit_reads_once(layers: int, staged: bool) -> None:
    sent, engine = weights(1, model(layers)), SmallEngine(zeros(model(layers)))
    receiver = Receiver(engine.load, expected=model(layers), staged=staged)
    exporter: Any = StandIn(sent)
    with reads() as found:
        manifest = deliver(exporter, InThisProcess(receiver), 1)
    assert found.count == 2
    assert {name: of.digest for name, of in manifest.tensors.items()} == own(sent)
    assert manifest.algorithm == DEVICE and bits(engine.weights) == bits(sent)


@pytest.mark.usefixtures("as_on_a_device")
def test_handles_are_exported_without_reading() -> None:
    sent = weights(1)
    exporter: Any = StandIn(sent)
    source = handles.IpcHandles(exporter)
    with reads() as found:
        for names in (list(FORMS)[:3], list(FORMS)[3:]):
            source.weights(names)
        assert found.count == 0
        manifest = source.manifest(1)
    source.release()
    assert found.count == 1
    assert {name: of.digest for name, of in manifest.tensors.items()} == own(sent)


def one_by_one(tensors: Mapping[str, Tensor]) -> None:
    for tensor in tensors.values():
        digest(tensor, DEVICE)


def with_a_look(tensors: Mapping[str, Tensor]) -> None:
    digests = Digests(DEVICE)
    for name, tensor in tensors.items():
        digests.add(name, tensor)
        assert digests.read()


@pytest.mark.parametrize("careless", [one_by_one, with_a_look])
def test_reading_each_is_counted(careless: Callable[[Mapping[str, Tensor]], None]) -> None:
    with reads() as found:
        careless(weights(1))
    assert found.count == len(FORMS)
