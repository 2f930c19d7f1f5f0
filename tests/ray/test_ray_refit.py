"""Refits and memory states through the driver, as a host calls them: names, forms, futures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from megatron_policy import Policy
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.workers import RayVirtualCluster
from tests.dist.test_export import tensors_of
from tests.losses import TokenNLL
from tests.ray.policies import GBS, TOKENIZER, TP2, batch, config_of

WAIT_S = 60.0


class Engine:
    """What an engine in a thread of this process has received."""

    def __init__(self, info: dict[str, Any] | None = None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.receiver = Receiver(self._load, expected=info, timeout_s=WAIT_S)

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}

    def holds(self, expected: dict[str, torch.Tensor]) -> bool:
        return self.weights.keys() == expected.keys() and all(
            torch.equal(tensor, expected[name]) for name, tensor in self.weights.items()
        )


def refit_by_stream(policy: Policy, engines: dict[str, Engine]) -> list[int]:
    """As the host's synchroniser: both sides begin, then both are waited for."""
    addresses = policy.get_refit_addresses()
    with ThreadPoolExecutor(len(engines)) as threads:
        received = [
            threads.submit(engine.receiver.receive_ipc_stream, addresses[device])
            for device, engine in engines.items()
        ]
        sent = ray.get(policy.stream_weights_via_ipc_zmq(buffer_size_bytes=64 * 1024))
        assert all(each["total_bytes"] > 0 and each["bytes_per_second"] > 0 for each in sent)
        return [each.result().step for each in received]


@pytest.fixture(scope="module")
def policy(checkpoint: Callable[..., Path]) -> Iterator[Policy]:
    """Two workers that hold the weights between them; tests leave them on the device."""
    cluster = RayVirtualCluster([2], use_gpus=False)
    made = Policy(cluster, config_of(checkpoint, TP2), TOKENIZER)
    yield made
    assert made.shutdown()
    cluster.shutdown()


def test_colocated_engines_follow_the_policy_through_the_hosts_states(
    policy: Policy, tmp_path: Path
) -> None:
    info = policy.prepare_refit_info()
    engines = {device: Engine(info) for device in policy.get_refit_addresses()}
    assert len(engines) == 2
    data = batch()
    for step in range(2):
        policy.prepare_for_lp_inference()
        policy.get_logprobs(data)
        with pytest.raises(ConfigError, match=r"train\(\) needs the train state.*'logprob'"):
            policy.train(data, TokenNLL())
        policy.offload_before_refit()
        assert refit_by_stream(policy, engines) == [2 * step] * 2
        policy.export_hf(tmp_path / f"{step}")
        policy.offload_after_refit()
        assert all(engine.holds(tensors_of(tmp_path / f"{step}")) for engine in engines.values())
        with pytest.raises(ConfigError, match=r"policy is idle .*prepare_for_lp_inference"):
            policy.get_logprobs(data)
        with pytest.raises(ConfigError, match=r"policy is idle .*offload_before_refit"):
            ray.get(policy.stream_weights_via_ipc_zmq(buffer_size_bytes=64 * 1024))
        policy.prepare_for_training()
        policy.train(data, TokenNLL())
    assert policy.get_free_memory_bytes() > 0


def test_the_old_protocol_hands_out_groups_of_names_and_ends_with_a_manifest(
    policy: Policy, tmp_path: Path
) -> None:
    policy.export_hf(tmp_path / "export")
    expected = tensors_of(tmp_path / "export")
    old = policy.prepare_refit_info(with_numel=True)
    assert {n: (tuple(t.shape), t.dtype, t.numel()) for n, t in expected.items()} == old
    engines = {device: Engine(old) for device in policy.get_refit_addresses()}
    groups = policy.prepare_weights_for_ipc(_refit_buffer_size_gb=64 * 1024 / 2**30)
    assert sorted(name for keys in groups for name in keys) == sorted(expected)
    assert len(groups) > 2
    for keys in groups:
        handles = policy.get_weights_ipc_handles(keys)
        assert handles.keys() == engines.keys()
        for device, engine in engines.items():
            engine.receiver.receive_ipc_handles(handles, device)
    manifests = policy.get_refit_manifest()
    for device, engine in engines.items():
        engine.receiver.finish_ipc(manifests[device])
        assert engine.holds(expected)
    policy.offload_after_refit()
    assert len(policy.prepare_weights_for_ipc()) == 1, "all fits in a fifth of the free memory"
    policy.prepare_for_training()


@pytest.mark.parametrize("by_stage", [False, True], ids=["rank 0 joins", "all ranks join"])
def test_engines_elsewhere_join_a_group(policy: Policy, tmp_path: Path, by_stage: bool) -> None:
    policy.export_hf(tmp_path / "export")
    expected = tensors_of(tmp_path / "export")
    assert policy.prepare_info_for_collective() == policy.prepare_refit_info()
    trains = 2 if by_stage else None
    world = (trains or 1) + 1
    engine = Engine(policy.prepare_info_for_collective())
    with reserved_port() as port, ThreadPoolExecutor(1) as threads:
        ray.get(policy.init_collective("127.0.0.1", port, world, train_world_size=trains))
        secret = policy.get_refit_secret()
        group = join_collective(
            "127.0.0.1", port, world - 1, world, trains, timeout_s=WAIT_S, secret=secret
        )
        received = threads.submit(engine.receiver.receive_collective, group)
        sent = ray.get(policy.broadcast_weights_for_collective(kv_scales=None))
        assert sum(each["total_bytes"] for each in sent) > 0 and min(s["seconds"] for s in sent) > 0
        received.result()
        group.close()
    assert engine.holds(expected)


def test_a_refusal_reaches_the_driver_and_the_policy_goes_on(policy: Policy) -> None:
    wrong = policy.prepare_refit_info()
    name = next(iter(wrong))
    wrong[name] = ((1, 2), torch.float32)
    devices = list(policy.get_refit_addresses())
    engines = {devices[0]: Engine(), devices[1]: Engine(wrong)}
    with pytest.raises(RefitError, match=f"rank 1.*{name}"):
        refit_by_stream(policy, engines)
    assert not engines[devices[1]].weights
    engines[devices[1]] = Engine()
    first, second = refit_by_stream(policy, engines)
    assert first == second
    policy.train(batch(rows=GBS), TokenNLL())
    with pytest.raises(ConfigError, match="kv_scales"):
        ray.get(policy.stream_weights_via_ipc_zmq(kv_scales={"a": 1.0}))
