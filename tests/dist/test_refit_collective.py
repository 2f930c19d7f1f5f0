"""Weights over a group of trainers and engines: bit-equal in both shapes of the group, counted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.refit.transports.collective.stream_layout import Stream
from megatron_policy.refit.transports.collective.transport import Collective
from tests import collective_engine, oracle, refit_engine
from tests.collective_engine import SECRET
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, layout
from tests.dist.test_export import tensors_of
from tests.other_process import OtherProcess
from tests.ranks import RankPool
from tests.refit_engine import bits

BUCKET = 32 * 1024
TIMEOUT_S = 60.0
CASES = {
    "TP2xPP2": layout(4, tp=2, pp=2),
    "PP2xVPP2": LAYOUTS["PP2xVPP2"],
}


@pytest.fixture(scope="module")
def engine() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


def refit_train_refit(
    config: dict[str, Any], port: int, world: int, train: int | None
) -> dict[str, Any]:
    """What this rank sent, how often, and what the policy exports before and after a step."""
    data = oracle.make_batch(GLOBAL_BATCH, 13, 251)
    with open_policy(config, init_reference_model=False) as policy:
        group = Collective.join(
            policy.exporter,
            "127.0.0.1",
            port,
            world,
            train,
            TIMEOUT_S,
            secret=SECRET,
        )
        exported, manifests = [], []
        for _ in range(2):
            manifests.append(policy.refit(group.transport(BUCKET)))
            exported.append(bits({name: t.clone() for name, t in policy.export()}))
            policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        own = policy.exporter.plan(own_stage=train is not None, bucket_bytes=BUCKET)
        found = {
            "exported": exported,
            "steps": [manifest.step for manifest in manifests],
            "sent": [list(manifest.tensors) for manifest in manifests],
            "broadcasts": group.broadcasts,
            "chunks": math.ceil(Stream.of(own.tensors).nbytes / BUCKET),
        }
        group.close()
        return found


@pytest.mark.parametrize("by_stage", [False, True], ids=["rank 0 sends", "every stage sends"])
@pytest.mark.parametrize("name", CASES)
def test_the_engine_has_the_exported_weights_bit_for_bit_and_again_a_step_later(
    ranks: RankPool, checkpoint: Any, engine: OtherProcess, name: str, by_stage: bool
) -> None:
    case = CASES[name]
    path = checkpoint("qwen2", tied=True, vocab=251)
    train = case.world if by_stage else None
    trainers = train or 1
    forms = {n: (tuple(t.shape), t.dtype) for n, t in tensors_of(path).items()}
    engine.call(refit_engine.start, forms, 0, {"timeout_s": TIMEOUT_S})
    with reserved_port() as port:
        engine.call(collective_engine.join, port, trainers, trainers + 1, train, TIMEOUT_S)
        engine.begin(collective_engine.receive_each, 2)
        results = ranks.run(
            case.world,
            refit_train_refit,
            policy_config(path, case.megatron),
            port,
            trainers + 1,
            train,
        )
        received = engine.result()
        engine.call(collective_engine.leave)
    assert [step for step, _ in received] == [0, 1]
    assert received[0][1] == bits(tensors_of(path)), "what was not trained comes back bit-equal"
    assert received[0][1] != received[1][1]
    for result in results:
        assert [weights for _, weights in received] == result["exported"]
        assert result["broadcasts"] in (0, 2 * result["chunks"])
    sent = [name for result in results for name in result["sent"][0]]
    assert sorted(sent) == sorted(forms), "each tensor once"
    senders = [result for result in results if result["broadcasts"]]
    assert len(senders) == (case.megatron["pipeline_model_parallel_size"] if by_stage else 1)
