"""Refits over groups and streams that cannot work as they were asked for are refused on all sides
before any engine loads, and the next refit works; ranks without a part in a refit do not hinder it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import Topology
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.shards import place_on_grid
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaStream
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import LAYOUTS
from tests.dist.resuming import replaced
from tests.dist.test_delta_refit import disturb
from tests.dist.test_delta_stream import SECRET, Follower
from tests.dist.test_detached_refit import SIZES
from tests.ranks import RankPool

TIMEOUT_S = 20.0


class Engines:
    """Two ranks of an engine, in threads of this process, and the trainer's group with them."""

    def __init__(self, policy: MegatronPolicy, port: int, pool: ThreadPoolExecutor) -> None:
        self.pool, self.loads = pool, [0, 0]
        sizes = {"world_size": 3, "train_world_size": 1, "timeout_s": TIMEOUT_S, "secret": SECRET}
        at = ("127.0.0.1", port)
        self.group = Collective.join(policy.exporter, *at, **sizes, of_shards=True)
        self.ends = [
            join_collective(*at, 1 + rank, 3, 1, TIMEOUT_S, secret=SECRET) for rank in (0, 1)
        ]
        self.receivers = [Receiver(self._count(rank), timeout_s=TIMEOUT_S) for rank in (0, 1)]
        self.held = self.place(policy, Topology(tp=2))

    def _count(self, rank: int) -> Callable[[Any], None]:
        def load(_: Any) -> None:
            self.loads[rank] += 1

        return load

    @staticmethod
    def place(policy: MegatronPolicy, grid: Topology) -> dict[str, Any]:
        exporter = policy.exporter
        return dict(place_on_grid(exporter.plan(), exporter.table.architecture, grid))

    def begin(self) -> list[Any]:
        pairs = zip(self.receivers, self.ends, strict=True)
        return [self.pool.submit(each.receive_collective, end) for each, end in pairs]

    def follow(self, policy: MegatronPolicy) -> list[int]:
        """Take a last refit; how often each rank has loaded."""
        waiting = self.begin()
        policy.refit(self.group.shards(self.held))
        for each in waiting:
            each.result()
        self.group.close()
        return self.loads


def refuse(policy: MegatronPolicy, engines: Engines, kind: str) -> None:
    """Refits that do not fit; of "another step" the engines hear."""
    if kind == "transport of whole tensors":
        with pytest.raises(ConfigError, match="this group sends shards"):
            engines.group.transport()
        with pytest.raises(ConfigError, match=r"refit\(\) takes no Collective: give a transport"):
            policy.refit(engines.group)  # type: ignore[arg-type]
        return
    if kind == "another step":
        engines.receivers[0].step = 10  # the other rank was started again
        waiting = engines.begin()
        with pytest.raises(RefitError, match="step"):
            policy.refit(engines.group.shards(engines.held))
        for each in waiting:
            with pytest.raises(RefitError, match="step"):
                each.result()
        engines.receivers[0].step = None
        return
    held = dict(engines.held)
    if kind == "a tensor without a place":
        held.pop(next(iter(held)))
    elif kind == "a rank without tensors":
        held = engines.place(policy, Topology())
    else:
        held = {n: replace(of, holders=[*of.holders[:-1], [2]]) for n, of in held.items()}
    with pytest.raises(ConfigError, match="engine"):
        policy.refit(engines.group.shards(held))


def refuse_and_go_on(config: dict[str, Any], port: int, kind: str) -> list[int]:
    """How often each engine rank has loaded after a refit that is refused and one that works."""
    with open_policy(config, **UNUSED) as policy, ThreadPoolExecutor(2) as pool:
        engines = Engines(policy, port, pool)
        refuse(policy, engines, kind)
        assert engines.loads == [0, 0] and not any(each.mixed for each in engines.receivers)
        return engines.follow(policy)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("another step", marks=pytest.mark.daily),
        "a tensor without a place",
        "a rank without tensors",
        "a rank beyond the group",
        "transport of whole tensors",
    ],
)
def test_shards_that_do_not_fit_are_refused_before_any_rank_loads(
    ranks: RankPool, checkpoint: Any, kind: str
) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, refit_timeout_s=TIMEOUT_S)
    with reserved_port() as port:
        assert ranks.run(1, refuse_and_go_on, config, port, kind) == [[1, 1]]


def leave_at_once(config: dict[str, Any], port: int) -> list[int]:
    """How often each engine rank has loaded from a trainer that leaves when all have accepted."""

    def lose(put: Callable[..., None]) -> Callable[..., None]:
        def act(store: Any, key: str, content: bytes) -> None:
            if store._values is None and not content:
                raise RefitError("the trainer has left")
            put(store, key, content)

        return act

    with open_policy(config, **UNUSED) as policy, ThreadPoolExecutor(2) as pool:
        engines = Engines(policy, port, pool)
        with replaced(ControlStore, "put_at_end", lose):
            return engines.follow(policy)


def test_an_engine_that_has_accepted_does_not_need_the_trainer_any_more(
    ranks: RankPool, checkpoint: Any
) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {}, refit_timeout_s=TIMEOUT_S)
    with reserved_port() as port:
        assert ranks.run(1, leave_at_once, config, port) == [[1, 1]]


def follow_rank_0(config: dict[str, Any], address: str, adapters: bool) -> list[tuple[int, bool]]:
    """Bytes that refits have changed, and whether the engine of rank 0 then has what was there."""
    found = []
    with open_policy(config, **UNUSED) as policy, ThreadPoolExecutor(1) as thread:
        forms = policy.exporter.select(adapters=adapters).plan().info()
        engine, to = Follower(forms, thread), DeltaStream(IpcStream(address))
        for number in range(3):
            disturb(policy, number, 0.02)
            now = {name: tensor.clone() for name, tensor in policy.export(adapters=adapters)}
            heard = engine.begin(address) if policy.rank == 0 else None
            policy.begin_refit(to, adapters=adapters)
            changed = policy.finish_refit().changed_bytes
            if heard is not None:
                heard.result()
                has = dict(engine.engine.weights)
                found.append((changed, all(bool((has[n] == t).all()) for n, t in now.items())))
    return found


OF_ATTENTION = {"enabled": True, "dim": 32, "alpha": 6.0, "target_modules": ["linear_qkv"]}


@pytest.mark.parametrize(
    ("family", "layout", "peft"),
    [("qwen2", "dp2", None), ("qwen3_moe", "ep2", OF_ATTENTION)],
    ids=["a replica without an engine", "experts without adapters"],
)
def test_what_has_changed_is_sent_though_a_rank_has_no_part_in_it(
    ranks: RankPool, checkpoint: Any, tmp_path: Any, family: str, layout: str, peft: Any
) -> None:
    world, section = LAYOUTS[layout]
    section = section if peft is None else section | {"peft": peft}
    config = policy_config(checkpoint(family, **SIZES), section)
    seen, *_ = ranks.run(world, follow_rank_0, config, f"ipc://{tmp_path}/at", peft is not None)
    assert [same for _, same in seen] == [True] * 3
    assert seen[0][0] == 0 < min(changed for changed, _ in seen[1:])
