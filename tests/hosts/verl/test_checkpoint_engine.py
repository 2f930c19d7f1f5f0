"""verl's checkpoint engine over a refit of ours: bit-equal weights in a rollout's process, a set
that is incomplete or damaged refused on both sides, and an update after that which works.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.transports.collective.transport import CollectiveSession
from tests import oracle
from tests.collective_engine import SECRET
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS
from tests.hosts.verl import rollout
from tests.hosts.verl.find import find_verl
from tests.other_process import OtherProcess
from tests.ranks import RankPool
from tests.refit_engine import bits
from tests.refit_trainer import FORMS, StandIn, weights

TIMEOUT_S = 20.0


def engine_class() -> Any:
    find_verl()
    from megatron_policy.hosts.verl.checkpoint_engine import MegatronPolicyCheckpointEngine

    return MegatronPolicyCheckpointEngine


def places_of(trainers: int, rollouts: int, port: int) -> tuple[list[Any], list[Any]]:
    """What `init_process_group` gets on each training rank and on each rollout."""
    from megatron_policy.hosts.verl.checkpoint_engine import Rendezvous

    said = [Rendezvous("127.0.0.1", port, SECRET)] + [None] * (trainers + rollouts - 1)
    sides = engine_class().build_topology(trainers, rollouts, said)
    trainers_own, rollouts_own = (
        [{"membership": place} for place in side["membership"]] for side in sides
    )
    return trainers_own, rollouts_own


@pytest.fixture(scope="module")
def process() -> Iterator[OtherProcess]:
    made = OtherProcess()
    yield made
    made.kill()


@pytest.fixture(params=[True, False], ids=["staged", "not staged"])
def receiver(request: pytest.FixtureRequest, process: OtherProcess) -> OtherProcess:
    """A rollout's process whose engine stages what it receives, or does not."""
    process.call(rollout.start_with, {"staged": request.param, "timeout_s": TIMEOUT_S})
    return process


class Held:
    """In the place of a policy: tensors as they are, which a transport sends."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.exporter = Exporter(held, TIMEOUT_S)

    def refit(self, transport: Any, *, adapters: bool = False) -> RefitManifest:
        return deliver(self.exporter.select(adapters=adapters), transport, step=0)


class Exporter(StandIn):
    def plan(self, **options: Any) -> Any:
        from tests.dist.test_refit_faults_collective import Plan

        return Plan(super().plan().tensors)


@pytest.fixture
def trainer() -> Iterator[tuple[Any, list[Any]]]:
    """A training rank's engine that has taken its place, and the place of the only rollout."""
    engine = engine_class()(4096, is_master=True, timeout_s=TIMEOUT_S)
    with reserved_port() as port:
        (own,), others = places_of(1, 1, port)
        engine.init_process_group(**own)
        yield engine, others
        engine._leave()


def send(engine: Any, seed: int, policy: Held | None = None) -> dict[str, float]:
    from megatron_policy.hosts.verl.weights import WeightStream

    policy = policy or Held(weights(seed))
    policy.exporter.held.update(weights(seed))
    stream = WeightStream(policy)
    return asyncio.run(engine.send_weights(stream, global_steps=seed))


def test_a_rollout_has_what_was_sent_bit_for_bit_at_each_update(
    trainer: Any, receiver: OtherProcess
) -> None:
    engine, (place,) = trainer
    policy = Held(weights(0))
    for seed in (1, 2, 3):
        receiver.begin(rollout.update, place)
        speed = send(engine, seed, policy)
        assert receiver.result() == bits(weights(seed))
        assert all(value > 0 for value in speed.values()) and speed
        assert not receiver.call(rollout.kept)
    assert engine._trainers.member._made_in == 1, "one group for all updates"


WRONG = {
    "incomplete": (lambda sent: sent | {"lm_head": sent["norm"]}, "1 missing: lm_head"),
    "damaged": (lambda sent: sent | {"norm": replace(sent["norm"], digest=1)}, "norm"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_set_that_is_wrong_is_refused_on_both_sides_and_the_next_update_works(
    monkeypatch: pytest.MonkeyPatch, trainer: Any, receiver: OtherProcess, what: str
) -> None:
    (engine, (place,)), (change, words) = trainer, WRONG[what]
    policy, finish = Held(weights(0)), CollectiveSession.finish

    def finish_with(session: CollectiveSession, manifest: RefitManifest) -> None:
        """A trainer that says it has sent something else."""
        finish(session, replace(manifest, tensors=change(dict(manifest.tensors))))

    with monkeypatch.context() as patch:
        patch.setattr(CollectiveSession, "finish", finish_with)
        receiver.begin(rollout.update, place)
        with pytest.raises(RefitError, match=words):
            send(engine, 1, policy)
        with pytest.raises(RefitError, match=words):
            receiver.result()
    receiver.begin(rollout.update, place)
    send(engine, 2, policy)
    assert receiver.result() == bits(weights(2))


def test_the_trainer_hears_that_a_rollout_has_not_taken_all(
    trainer: Any, receiver: OtherProcess
) -> None:
    engine, (place,) = trainer
    receiver.begin(rollout.update, place, 3)
    with pytest.raises(RefitError, match="the rollout has not taken all weights"):
        send(engine, 1)
    assert len(receiver.result()) == 3


def test_another_number_of_rollouts_makes_a_new_group(process: OtherProcess) -> None:
    engine, second = engine_class()(4096, is_master=True, timeout_s=TIMEOUT_S), OtherProcess()
    policy = Held(weights(0))
    try:
        for each in (process, second):
            each.call(rollout.start_with, {"timeout_s": TIMEOUT_S})
        with reserved_port() as port:
            for number, seed in ((1, 1), (2, 2), (1, 3)):
                (own,), others = places_of(1, number, port)
                engine.init_process_group(**own)
                processes = [process, second][:number]
                for each, place in zip(processes, others, strict=True):
                    each.begin(rollout.update, place)
                send(engine, seed, policy)
                assert [each.result() for each in processes] == [bits(weights(seed))] * number
            engine._leave()
    finally:
        second.kill()


def test_weights_of_another_engine_are_refused_with_what_to_set(trainer: Any) -> None:
    engine, _ = trainer
    with pytest.raises(ConfigError, match=r"set rollout\.checkpoint_engine\.backend"):
        asyncio.run(engine.send_weights(iter(weights(0).items())))


def test_a_rollout_without_a_place_says_so() -> None:
    async def first() -> Any:
        return await anext(engine_class()(4096).receive_weights())

    with pytest.raises(RefitError, match=r"init_process_group\(\) comes first"):
        asyncio.run(first())


def test_the_first_training_rank_listens_where_it_did_before() -> None:
    pytest.importorskip("ray")
    made = engine_class()(4096, is_master=True)
    assert made.prepare() == made.prepare() and len(made.prepare().secret) == 64
    assert made.prepare() != engine_class()(4096, is_master=True).prepare()
    assert engine_class()(4096).prepare() is None


def train_and_send(config: dict[str, Any], pickled: bytes, count: int) -> list[Any]:
    """What this rank exports at each update, with a step after it. The places can be read once verl
    has been found.
    """
    engine = engine_class()(32 * 1024, timeout_s=60.0)
    places = pickle.loads(pickled)
    from megatron_policy.hosts.verl.weights import WeightStream

    data = oracle.make_batch(GLOBAL_BATCH, 13, 251)
    exported = []
    with open_policy(config, init_reference_model=False) as policy:
        for _ in range(count):
            engine.init_process_group(**places[policy.rank])
            asyncio.run(engine.send_weights(WeightStream(policy)))
            exported.append(bits({name: each.clone() for name, each in WeightStream(policy)}))
            policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        engine._leave()
    return exported


def test_every_pipeline_stage_sends_its_weights_as_they_are_exported(
    ranks: RankPool, checkpoint: Any, process: OtherProcess
) -> None:
    case = LAYOUTS["PP2"]
    path = checkpoint("qwen2", tied=True, vocab=251)
    process.call(rollout.start_with, {"timeout_s": 60.0})
    with reserved_port() as port:
        trainers, (place,) = places_of(case.world, 1, port)
        process.begin(rollout.updates, place, 2)
        config = policy_config(path, case.megatron)
        exported = ranks.run(case.world, train_and_send, config, pickle.dumps(trainers), 2)
        received = process.result()
    assert received[0] != received[1] and len(received[0]) > len(FORMS)
    assert exported == [received] * case.world
