"""Refits of adapters alone through the driver: the same over every transport as on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file

from megatron_policy import Policy
from megatron_policy.converters.formats.peft_files import ADAPTER_MODEL
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.ipc.transport import IpcStream
from megatron_policy.refit.transports.peft import PeftDirectory
from megatron_policy.workers import RayVirtualCluster
from tests import peft_models
from tests.losses import TokenNLL
from tests.ray.policies import TOKENIZER, TP2, batch, config_of
from tests.ray.test_ray_refit import WAIT_S, Engine

PEFT = {"enabled": True, "dim": peft_models.RANK, "alpha": peft_models.ALPHA}


@pytest.fixture(scope="module")
def policy(checkpoint: Callable[..., Path]) -> Iterator[Policy]:
    """Two workers with adapters that a step has trained."""
    cluster = RayVirtualCluster([2], use_gpus=False)
    made = Policy(cluster, config_of(checkpoint, {**TP2, "peft": PEFT}), TOKENIZER)
    made.train(batch(), TokenNLL())
    yield made
    assert made.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def expected(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    path = tmp_path_factory.mktemp("peft") / "exported"
    policy.export_peft(path)
    tensors = load_file(path / ADAPTER_MODEL)
    assert any(".lora_B." in name and tensor.any() for name, tensor in tensors.items())
    return tensors


def check(engine: Engine, expected: dict[str, torch.Tensor]) -> None:
    assert engine.holds(expected)
    model = engine.receiver.model
    assert model is not None and model.adapters is not None
    assert (model.adapters["r"], model.adapters["lora_alpha"]) == (4, 6)
    assert {name.split(".")[-3] for name in expected} == {
        module.rpartition(".")[2] for module in model.adapters["target_modules"]
    }


@pytest.mark.nightly
def test_what_is_announced_is_of_the_adapters(policy: Policy, expected: Any) -> None:
    info = policy.prepare_refit_info(adapters=True)
    assert {n: (tuple(t.shape), t.dtype) for n, t in expected.items()} == info
    assert info.model is not None and info.model.adapters is not None
    whole = policy.prepare_refit_info()
    assert whole.model is not None and whole.model.adapters is None
    assert not whole.keys() & info.keys()
    counted = policy.prepare_refit_info(with_numel=True, adapters=True)
    assert {name: n for name, (_, _, n) in counted.items()} == {
        name: tensor.numel() for name, tensor in expected.items()
    }


def test_engines_on_the_same_devices_get_them(policy: Policy, expected: Any) -> None:
    info, addresses = policy.prepare_refit_info(adapters=True), policy.get_refit_addresses()
    engines = {device: Engine(info) for device in addresses}
    with ThreadPoolExecutor(2) as threads:
        received = [
            threads.submit(engine.receiver.receive_ipc_stream, addresses[device])
            for device, engine in engines.items()
        ]
        sent = ray.get(policy.stream_weights_via_ipc_zmq(adapters=True))
        steps = {each.result().step for each in received}
    assert steps == {2}
    size = sum(tensor.nbytes for tensor in expected.values())
    assert [each["total_bytes"] for each in sent] == [size, size]
    for engine in engines.values():
        check(engine, expected)


def test_the_old_protocol_hands_them_out_in_groups(policy: Policy, expected: Any) -> None:
    info = policy.prepare_refit_info(adapters=True)
    engines = {device: Engine(info) for device in policy.get_refit_addresses()}
    groups = policy.prepare_weights_for_ipc(8 * 1024 / 2**30, adapters=True)
    assert len(groups) > 1 and sorted(n for keys in groups for n in keys) == sorted(expected)
    for keys in groups:
        handles = policy.get_weights_ipc_handles(keys, adapters=True)
        for device, engine in engines.items():
            engine.receiver.receive_ipc_handles(handles, device)
    manifests = policy.get_refit_manifest()
    for device, engine in engines.items():
        engine.receiver.finish_ipc(manifests[device])
        check(engine, expected)
    policy.offload_after_refit()
    policy.prepare_for_training()


@pytest.mark.parametrize("by_stage", [False, True], ids=["rank 0 joins", "all ranks join"])
def test_engines_that_join_a_group_get_them(policy: Policy, expected: Any, by_stage: bool) -> None:
    trains = 2 if by_stage else None
    world = (trains or 1) + 1
    engine = Engine(policy.prepare_info_for_collective(adapters=True))
    with reserved_port() as port, ThreadPoolExecutor(1) as threads:
        ray.get(policy.init_collective("127.0.0.1", port, world, train_world_size=trains))
        secret = policy.get_refit_secret()
        group = join_collective("127.0.0.1", port, world - 1, world, trains, WAIT_S, secret=secret)
        received = threads.submit(engine.receiver.receive_collective, group)
        ray.get(policy.broadcast_weights_for_collective(adapters=True))
        received.result()
        group.close()
    check(engine, expected)


def test_the_call_of_one_rank_sends_them_too(policy: Policy, expected: Any, tmp_path: Path) -> None:
    engine = Engine(policy.prepare_refit_info(adapters=True))
    address = f"ipc://{tmp_path}/engine.sock"
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(engine.receiver.receive_ipc_stream, address)
        manifest = policy.refit(IpcStream(address), adapters=True)
        assert received.result() == manifest
    check(engine, expected)
    assert manifest.tensors.keys() == expected.keys() and manifest.bytes_per_second > 0
    published = policy.refit(PeftDirectory(tmp_path / "peft"), adapters=True)
    assert published.model == manifest.model
    on_disk = Engine(policy.prepare_refit_info(adapters=True))
    on_disk.receiver.receive_directory(tmp_path / "peft")
    check(on_disk, expected)


def test_a_refusal_reaches_the_driver_and_the_policy_goes_on(
    policy: Policy, expected: Any, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    whole = Engine(policy.prepare_refit_info())
    with ThreadPoolExecutor(1) as threads:
        received = threads.submit(whole.receiver.receive_ipc_stream, address)
        with pytest.raises(RefitError, match="not the weights of the engine's model"):
            policy.refit(IpcStream(address), adapters=True)
        with pytest.raises(RefitError):
            received.result()
    with pytest.raises(ConfigError, match="broadcast_weights_for_collective"):
        policy.refit(Collective(False, None, "secret").transport())
    policy.refit(PeftDirectory(tmp_path / "peft"), adapters=True)
    assert load_file(tmp_path / "peft" / ADAPTER_MODEL).keys() == expected.keys()
