"""Refits and memory states through the driver, as a host calls them: names, forms, futures. Of all
weights, and of adapters alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from megatron_policy import Policy
from megatron_policy.adapters.peft_files import ADAPTER_MODEL
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.ipc.transport import IpcStream
from megatron_policy.refit.transports.peft import PeftDirectory
from tests import peft_models
from tests.dist.test_export import tensors_of
from tests.losses import TokenNLL
from tests.ray.policies import GBS, TP2, batch, config_of, opened

WAIT_S = 60.0
PEFT = {"enabled": True, "dim": peft_models.RANK, "alpha": peft_models.ALPHA}
BUFFERS = {False: 64 * 1024, True: 8 * 1024}
"""Bytes of a buffer that takes neither all weights nor all adapters."""
Tensors = dict[str, torch.Tensor]

daily = pytest.mark.daily
BOTH = pytest.mark.parametrize(
    "adapters",
    [
        pytest.param(False, marks=daily, id="weights"),
        pytest.param(True, marks=daily, id="adapters"),
    ],
)


class Engine:
    """What an engine in a thread of this process has received."""

    def __init__(self, info: dict[str, Any] | None = None) -> None:
        self.weights: Tensors = {}
        self.receiver = Receiver(self._load, expected=info, timeout_s=WAIT_S)

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def check(self, expected: Tensors, adapters: bool) -> None:
        """It holds these, and knows which model they are of."""
        assert self.weights.keys() == expected.keys()
        for name, tensor in self.weights.items():
            assert torch.equal(tensor, expected[name]), name
        model = self.receiver.model
        assert model is not None and (model.adapters is not None) == adapters
        if model.adapters is not None:
            assert (model.adapters["r"], model.adapters["lora_alpha"]) == (4, 6)
            modules = {module.rpartition(".")[2] for module in model.adapters["target_modules"]}
            assert modules == {name.split(".")[-3] for name in expected}


def refit_by_stream(
    policy: Policy, engines: dict[str, Engine], **options: Any
) -> tuple[list[dict[str, Any]], list[int]]:
    """As the host's synchroniser: both sides begin, then both are waited for. What the workers say,
    and the steps that the engines, which share their devices, have received.
    """
    addresses = policy.get_refit_addresses()
    with ThreadPoolExecutor(len(engines)) as threads:
        received = [
            threads.submit(engine.receiver.receive_ipc_stream, addresses[device])
            for device, engine in engines.items()
        ]
        sent = ray.get(policy.stream_weights_via_ipc_zmq(buffer_size_bytes=64 * 1024, **options))
        return sent, [each.result().step for each in received]


@pytest.fixture(scope="module")
def policy(checkpoint: Callable[..., Path]) -> Iterator[Policy]:
    """Two workers that hold the weights between them, with adapters that a step has trained; tests
    leave them on the device.
    """
    with opened(config_of(checkpoint, {**TP2, "peft": PEFT})) as made:
        made.train(batch(rows=GBS), TokenNLL())
        yield made


def exported(policy: Policy, path: Path, adapters: bool) -> Tensors:
    if not adapters:
        policy.export_hf(path)
        return tensors_of(path)
    policy.export_peft(path)
    tensors: Tensors = load_file(path / ADAPTER_MODEL)
    assert any(".lora_B." in name and tensor.any() for name, tensor in tensors.items())
    return tensors


@BOTH
def test_colocated_engines_follow_the_policy_through_the_hosts_states(
    policy: Policy, tmp_path: Path, adapters: bool
) -> None:
    info = policy.prepare_refit_info(adapters=adapters)
    engines = {device: Engine(info) for device in policy.get_refit_addresses()}
    assert len(engines) == 2
    data, steps = batch(), []
    for number in range(2):
        policy.prepare_for_lp_inference()
        policy.get_logprobs(data)
        with pytest.raises(ConfigError, match=r"train\(\) needs the train state.*'logprob'"):
            policy.train(data, TokenNLL())
        policy.offload_before_refit()
        sent, received = refit_by_stream(policy, engines, adapters=adapters)
        steps.append(received)
        expected = exported(policy, tmp_path / f"{number}", adapters)
        size = sum(tensor.nbytes for tensor in expected.values())
        assert [each["total_bytes"] for each in sent] == [size, size]
        assert all(each["bytes_per_second"] > 0 for each in sent)
        policy.offload_after_refit()
        for engine in engines.values():
            engine.check(expected, adapters)
        with pytest.raises(ConfigError, match=r"policy is idle .*prepare_for_lp_inference"):
            policy.get_logprobs(data)
        with pytest.raises(ConfigError, match=r"policy is idle .*offload_before_refit"):
            ray.get(policy.stream_weights_via_ipc_zmq(buffer_size_bytes=64 * 1024))
        policy.prepare_for_training()
        policy.train(data, TokenNLL())
    assert steps[0][0] > 0 and steps == [steps[0], [steps[0][0] + 2] * 2]
    assert policy.get_free_memory_bytes() > 0


@BOTH
def test_the_old_protocol_hands_out_groups_of_names_and_ends_with_a_manifest(
    policy: Policy, tmp_path: Path, adapters: bool
) -> None:
    expected = exported(policy, tmp_path / "export", adapters)
    plain = policy.prepare_refit_info(adapters=adapters)
    assert {n: (tuple(t.shape), t.dtype) for n, t in expected.items()} == plain
    assert plain.model is not None and (plain.model.adapters is not None) == adapters
    assert plain == policy.prepare_refit_info(adapters=adapters, as_stored=True)
    old = policy.prepare_refit_info(with_numel=True, adapters=adapters)
    assert {n: (tuple(t.shape), t.dtype, t.numel()) for n, t in expected.items()} == old
    engines = {device: Engine(old) for device in policy.get_refit_addresses()}
    groups = policy.prepare_weights_for_ipc(
        _refit_buffer_size_gb=BUFFERS[adapters] / 2**30, adapters=adapters
    )
    assert sorted(name for keys in groups for name in keys) == sorted(expected)
    assert len(groups) > (1 if adapters else 2)
    for keys in groups:
        handles = policy.get_weights_ipc_handles(keys, adapters=adapters)
        assert handles.keys() == engines.keys()
        for device, engine in engines.items():
            engine.receiver.receive_ipc_handles(handles, device)
    manifests = policy.get_refit_manifest()
    for device, engine in engines.items():
        engine.receiver.finish_ipc(manifests[device])
        engine.check(expected, adapters)
    policy.offload_after_refit()
    assert len(policy.prepare_weights_for_ipc()) == 1, "all fits in a fifth of the free memory"
    policy.prepare_for_training()


@pytest.mark.parametrize(
    ("trains", "adapters"),
    [
        pytest.param(None, False, marks=daily, id="rank 0 joins"),
        pytest.param(None, True, marks=daily, id="rank 0 joins, adapters"),
        pytest.param(2, False, id="all ranks join"),
        pytest.param(2, True, id="all ranks join, adapters"),
    ],
)
def test_engines_elsewhere_join_a_group(
    policy: Policy, tmp_path: Path, trains: int | None, adapters: bool
) -> None:
    expected = exported(policy, tmp_path / "export", adapters)
    info = policy.prepare_info_for_collective(adapters=adapters)
    assert info == policy.prepare_refit_info(adapters=adapters)
    engine, world = Engine(info), (trains or 1) + 1
    options = {"adapters": True} if adapters else {"kv_scales": None}
    with reserved_port() as port, ThreadPoolExecutor(1) as threads:
        ray.get(policy.init_collective("127.0.0.1", port, world, train_world_size=trains))
        secret = policy.get_refit_secret()
        group = join_collective("127.0.0.1", port, world - 1, world, trains, WAIT_S, secret=secret)
        received = threads.submit(engine.receiver.receive_collective, group)
        sent = ray.get(policy.broadcast_weights_for_collective(**options))
        assert sum(each["total_bytes"] for each in sent) > 0 and min(s["seconds"] for s in sent) > 0
        received.result()
        group.close()
    engine.check(expected, adapters)


def test_the_call_of_one_rank_sends_adapters_too(policy: Policy, tmp_path: Path) -> None:
    expected = exported(policy, tmp_path / "export", adapters=True)
    engine, on_disk = (Engine(policy.prepare_refit_info(adapters=True)) for _ in range(2))
    address = f"ipc://{tmp_path}/engine.sock"
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(engine.receiver.receive_ipc_stream, address)
        manifest = policy.refit(IpcStream(address), adapters=True)
        assert received.result() == manifest
    engine.check(expected, adapters=True)
    assert manifest.tensors.keys() == expected.keys() and manifest.bytes_per_second > 0
    published = policy.refit(PeftDirectory(tmp_path / "peft"), adapters=True)
    assert published.model == manifest.model
    on_disk.receiver.receive_directory(tmp_path / "peft")
    on_disk.check(expected, adapters=True)


class HeldUp(Engine):
    """Takes every pack as it comes, and waits before the first."""

    def __init__(self, info: dict[str, Any]) -> None:
        super().__init__()
        self.receiver = Receiver(self._load, expected=info, timeout_s=WAIT_S, staged=False)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        self.weights |= {name: tensor.clone() for name, tensor in weights}


def test_a_refit_goes_on_while_the_driver_trains(policy: Policy, tmp_path: Path) -> None:
    expected = exported(policy, tmp_path / "export", adapters=False)
    info, address = policy.prepare_refit_info(), f"ipc://{tmp_path}/engine.sock"
    engine = HeldUp(info)
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(engine.receiver.receive_ipc_stream, address)
        policy.begin_refit(IpcStream(address, BUFFERS[False]))
        assert engine.begun.wait(WAIT_S)
        policy.train(batch(rows=GBS), TokenNLL())
        engine.go_on.set()
        manifest = policy.finish_refit()
        assert received.result() == manifest and policy.finish_refit() is None
    assert manifest is not None and manifest.bytes_per_second > 0
    engine.check(expected, adapters=False)

    moved = exported(policy, tmp_path / "moved", adapters=False)
    engine = HeldUp(info)
    with reserved_port() as port, ThreadPoolExecutor(1) as threads:
        ray.get(policy.init_collective("127.0.0.1", port, 2))
        secret = policy.get_refit_secret()
        group = join_collective("127.0.0.1", port, 1, 2, None, WAIT_S, secret=secret)
        received = threads.submit(engine.receiver.receive_collective, group)
        begun = policy.broadcast_weights_for_collective(
            buffer_size_bytes=BUFFERS[False], detached=True
        )
        assert ray.get(begun) == [None, None] and engine.begun.wait(WAIT_S)
        policy.train(batch(rows=GBS), TokenNLL())
        engine.go_on.set()
        assert policy.finish_refit() == received.result()
        group.close()
    engine.check(moved, adapters=False)


def test_a_refit_beside_training_that_fails_is_raised_by_the_next_one(
    policy: Policy, tmp_path: Path
) -> None:
    address, wrong = f"ipc://{tmp_path}/engine.sock", policy.prepare_refit_info()
    wrong[next(iter(wrong))] = ((1, 2), torch.float32)
    refusing, engine = Engine(wrong), Engine()
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(refusing.receiver.receive_ipc_stream, address)
        policy.begin_refit(IpcStream(address))
        policy.train(batch(rows=GBS), TokenNLL())
        with pytest.raises(RefitError, match=r"the refit of step \d+ has failed: rank 0"):
            policy.refit(IpcStream(address))
        with pytest.raises(RefitError):
            received.result()
        received = threads.submit(engine.receiver.receive_ipc_stream, address)
        assert policy.refit(IpcStream(address)) == received.result()
    alone = exported(policy, tmp_path / "alone", adapters=True)
    policy.begin_refit(PeftDirectory(tmp_path / "beside"), adapters=True)
    policy.train(batch(rows=GBS), TokenNLL())
    assert policy.finish_refit() is not None
    found = load_file(tmp_path / "beside" / ADAPTER_MODEL)
    assert found.keys() == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for name, tensor in found.items())
    with pytest.raises(ConfigError, match="broadcast_weights_for_collective"):
        policy.begin_refit(Collective(False, None, "secret").transport())


def test_a_refusal_reaches_the_driver_and_the_policy_goes_on(
    policy: Policy, tmp_path: Path
) -> None:
    wrong = policy.prepare_refit_info()
    name = next(iter(wrong))
    wrong[name] = ((1, 2), torch.float32)
    devices = list(policy.get_refit_addresses())
    engines = {devices[0]: Engine(), devices[1]: Engine(wrong)}
    with pytest.raises(RefitError, match=f"rank 1.*{name}"):
        refit_by_stream(policy, engines)
    assert not engines[devices[1]].weights
    engines[devices[1]] = Engine()
    _, (first, second) = refit_by_stream(policy, engines)
    assert first == second
    policy.train(batch(rows=GBS), TokenNLL())
    with pytest.raises(ConfigError, match="kv_scales"):
        ray.get(policy.stream_weights_via_ipc_zmq(kv_scales={"a": 1.0}))

    whole, address = Engine(policy.prepare_refit_info()), f"ipc://{tmp_path}/engine.sock"
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(whole.receiver.receive_ipc_stream, address)
        with pytest.raises(RefitError, match="not the weights of the engine's model"):
            policy.refit(IpcStream(address), adapters=True)
        with pytest.raises(RefitError):
            received.result()
    with pytest.raises(ConfigError, match="broadcast_weights_for_collective"):
        policy.refit(Collective(False, None, "secret").transport())
    names = exported(policy, tmp_path / "export", adapters=True).keys()
    policy.refit(PeftDirectory(tmp_path / "peft"), adapters=True)
    assert load_file(tmp_path / "peft" / ADAPTER_MODEL).keys() == names
