"""Engines that are sent what has changed have, bit for bit, what an export of that moment has, over
a stream and over a group, beside training too; who has other weights is sent whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaStream
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import LAYOUTS
from tests.dist.test_delta_refit import BUCKET, CASES, disturb
from tests.dist.test_detached_refit import PEFT, SIZES, bits_of, step_on
from tests.families import SAMPLES
from tests.ranks import RankPool
from tests.refit_engine import SmallEngine, bits, zeros

SECRET = "of the groups in these tests"
TIMEOUT_S = 60.0
CELLS = {
    "stream to rank 0": ("tp2", False),
    "stream to each rank": ("ep2", False),
    "stream to each rank, beside": ("fsdp2", True),
    "group, beside": ("tp2 pp2, tied", True),
    "group by stage": ("pp2 vpp2", False),
}
"""How engines are reached, the case of `test_delta_refit`, and whether beside training."""
DAILY = ("stream to each rank", "group by stage")
WHY = {
    0: "nothing is kept of a refit before: this is the first",
    3: "what has changed since version 2, which an engine has, is half as much as the weights or",
    5: "an engine has none that could be changed",
    7: "what has changed since version 6",
}
"""The refits of `follow` that send all weights: the first, after a step in fp32, to a new engine,
and after nine tenths of the elements have changed.
"""


class Follower:
    """An engine of zeros in a thread of this process."""

    def __init__(self, forms: dict[str, Any], thread: ThreadPoolExecutor) -> None:
        self.engine, self._thread = SmallEngine(zeros(forms)), thread
        self.receiver = Receiver(self.engine.load, expected=forms, timeout_s=TIMEOUT_S)

    def begin(self, end: Any) -> Any:
        """Begin to receive from an address, or in a group."""
        take = self.receiver.receive_ipc_stream
        return self._thread.submit(
            take if isinstance(end, str) else self.receiver.receive_collective, end
        )


class Reached(ExitStack):
    """A way to this rank's engine: `destination`, and the engine's end of it, if it has one."""

    def __init__(self, policy: MegatronPolicy, how: str, place: str, port: int) -> None:
        super().__init__()
        world = policy.topology.world_size
        if how.startswith("stream"):
            ranks = range(world if "each" in how else 1)
            addresses = {rank: f"ipc://{place}{rank}" for rank in ranks}
            self.destination: Any = IpcStream(addresses, buffer_bytes=BUCKET)
            self.end: Any = addresses.get(policy.rank)
            return
        sizes = (1 + world, world) if "stage" in how else (2, None)
        ends = Collective.join(policy.exporter, "127.0.0.1", port, *sizes, secret=SECRET)
        self.callback(ends.close)
        self.destination, self.end = ends.transport(), None
        if policy.rank == 0:
            first = 1 if sizes[1] is None else world
            own = join_collective("127.0.0.1", port, first, *sizes, TIMEOUT_S, secret=SECRET)
            self.callback(own.close)
            self.end = own


@contextmanager
def reached(policy: MegatronPolicy, how: str, place: str, port: int) -> Iterator[Any]:
    with Reached(policy, how, place, port) as way, ThreadPoolExecutor(1) as thread:
        yield way, thread


def hand_over(policy: MegatronPolicy, to: Any, beside: bool) -> Any:
    """A refit; beside training, with weights that change meanwhile."""
    if not beside:
        return policy.refit(DeltaStream(to))
    policy.begin_refit(DeltaStream(to))
    disturb(policy, 100, 0.02)
    return policy.finish_refit()


def follow(config: dict[str, Any], how: str, beside: bool, *at: Any) -> list[tuple[str, bool]]:
    """Of each refit what was sent, and whether the engine then has what was there."""
    seen: list[tuple[str, bool]] = []
    with (
        open_policy(config, init_reference_model=False) as policy,
        reached(policy, how, *at) as (way, thread),
    ):
        forms = policy.exporter.plan().info()
        engine = Follower(forms, thread)
        for number in range(9):
            if number == 5:  # one that was started again
                engine = Follower(forms, thread)
            if number == 3:
                step_on(policy, number)
            elif number != 4:  # else nothing has changed
                disturb(policy, number, 0.9 if number == 7 else 0.02)
            now = bits_of(policy)
            future = engine.begin(way.end) if way.end is not None else None
            sent = hand_over(policy, way.destination, beside)
            why = WHY.get(number)
            assert sent.why_whole.startswith(why) if why else not sent.why_whole, sent.why_whole
            kind = "changes" if sent.changed_bytes else "whole" if sent.tensors else "nothing"
            if future is not None:
                assert future.result().step == sent.step
                seen.append((kind, bits(engine.engine.weights) == now))
    return seen


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.daily] * (how in DAILY)) for how in CELLS]
)
def test_engines_are_sent_what_has_changed(
    ranks: RankPool, checkpoint: Any, tmp_path_factory: Any, how: str
) -> None:
    case, beside = CELLS[how]
    family, layout, sizes, top = CASES[case]
    world, section = LAYOUTS[layout]
    path = checkpoint(family, **SIZES | {"vocab": 251} | sizes)
    config = policy_config(path, section | top.get("megatron_cfg", {}), refit_bucket_bytes=BUCKET)
    with reserved_port() as port:
        place = str(tmp_path_factory.mktemp("s") / "t")
        seen = ranks.run(world, follow, config, how, beside, place, port)
    served = [of_rank for of_rank in seen if of_rank]
    assert len(served) == (world if "each" in how else 1)
    for of_rank in served:
        assert all(right for _, right in of_rank)
        kinds = ["whole" if number in WHY else "changes" for number in range(9)]
        assert [kind for kind, _ in of_rank] == kinds


class Meddling(IpcStream):
    """A stream in which a byte of the first tensor is another."""

    def open(self, exporter: Any, plan: Any) -> Any:
        session: Any = super().open(exporter, plan)
        filled = session.filled

        def disturbed(tensor: Any, target: Any) -> None:
            target.bytes(40)[37] ^= 1
            filled(tensor, target)

        session.filled = disturbed
        return session


def meet_faults(path: Path, section: dict[str, Any], adapters: bool, address: str) -> None:
    """Refits that are refused, and the next ones."""
    config = policy_config(path, section, refit_timeout_s=TIMEOUT_S)
    with open_policy(config, **UNUSED) as policy, ThreadPoolExecutor(1) as thread:
        forms = policy.exporter.select(adapters=adapters).plan().info()
        engine = Follower(forms, thread)
        state, load = engine.receiver._engine, engine.receiver._engine.load

        def refit(to: Any = IpcStream, refused: str = "") -> str:
            disturb(policy, refit.number, 0.02)
            refit.number += 1
            future = engine.begin(address)
            if refused:
                for side in (
                    lambda: policy.refit(DeltaStream(to(address)), adapters=adapters),
                    future.result,
                ):
                    with pytest.raises(RefitError, match=refused):
                        side()
                return "refused"
            sent = policy.refit(DeltaStream(to(address)), adapters=adapters)
            future.result()
            said.append(sent.why_whole)
            own = bits({name: each.cpu() for name, each in policy.export(adapters=adapters)})
            assert bits(engine.engine.weights) == own and not engine.receiver.mixed
            return "changes" if sent.changed_bytes else "whole"

        refit.number, said = 0, list[str]()  # type: ignore[attr-defined]
        assert [refit(), refit()] == ["whole", "changes"]

        def fail(tensors: Any) -> None:
            load(tensors[:2])
            raise RuntimeError("no memory")

        state.load, at = fail, state.version
        assert refit(refused="no memory") == "refused" and state.version == at
        state.load = load
        assert refit() == "changes"  # those since the last that it has

        assert refit(Meddling, refused="wrong digest") == "refused"
        assert refit() == "changes"

        with torch.no_grad():
            next(iter(state.kept.values())).view(-1)[0] += 1
        assert refit(refused="have another digest") == "refused" and state.version is None
        assert [refit(), refit()] == ["whole", "changes"]

        state.version = ("of another trainer", 3)
        assert [refit(), refit()] == ["whole", "changes"]
        assert said[-2:] == ["an engine has weights that were not sent in this chain of refits", ""]
        direct = Receiver(load, expected=forms, staged=False, timeout_s=TIMEOUT_S)
        engine.receiver = direct
        assert [refit(), refit()] == ["whole", "whole"]


@pytest.mark.parametrize("adapters", [pytest.param(False, marks=pytest.mark.daily), True])
def test_what_is_refused_leaves_the_engine_as_it_was_and_the_next_refit_works(
    ranks: RankPool, checkpoint: Any, tmp_path_factory: Any, adapters: bool
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('s')}/t"
    # Of small adapters what has changed takes more bytes to say than they have.
    section = {"peft": PEFT["peft"] | {"dim": 32}} if adapters else {}
    ranks.run(1, meet_faults, checkpoint("qwen2", **SIZES), section, adapters, address)


def follow_family(path: Path, address: str) -> None:
    config = policy_config(path, {}, refit_timeout_s=TIMEOUT_S)
    with open_policy(config, **UNUSED) as policy, ThreadPoolExecutor(1) as thread:
        engine = Follower(policy.exporter.plan().info(), thread)
        for number in range(3):
            disturb(policy, number, 0.02)
            future = engine.begin(address)
            sent = policy.refit(DeltaStream(IpcStream(address)))
            future.result()
            assert bits(engine.engine.weights) == bits_of(policy)
            assert bool(sent.changed_bytes) == (number > 0)


@pytest.mark.nightly
@pytest.mark.parametrize("family", SAMPLES)
def test_every_family_is_followed(
    ranks: RankPool, checkpoint: Any, tmp_path_factory: Any, family: str
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('s')}/t"
    ranks.run(1, follow_family, checkpoint(family), address)
