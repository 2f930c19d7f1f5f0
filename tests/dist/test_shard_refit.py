"""Engines that are split get their own elements from the trainers that hold them, bit for bit, in
processes of their own; what fails is refused on both sides, and the next refit works.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import Topology
from megatron_policy.refit.deltas.codec import expect_bytes
from megatron_policy.refit.shards import place_on_grid
from megatron_policy.refit.transports.collective import shards as transport_module
from megatron_policy.refit.transports.collective.stream import Writer
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaShards
from megatron_policy.refit.transports.movers.named import MOVERS
from tests import collective_engine, refit_engine
from tests.collective_engine import SECRET
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import LAYOUTS
from tests.dist.resuming import replaced
from tests.dist.test_delta_refit import BUCKET, disturb
from tests.dist.test_detached_refit import PEFT, SIZES, bits_of
from tests.other_process import OtherProcess
from tests.ranks import RankPool

TIMEOUT_S = 30.0
ENGINES: dict[str, tuple[str, str, Topology, dict[str, Any]]] = {
    "tp2 to tp2": ("qwen2", "tp2", Topology(tp=2), {}),
    "ep2 tp2 to ep2": ("qwen3_moe", "ep2 tp2", Topology(dp=2, ep=2), {}),
    "tp2 pp2 to tp2": ("qwen2", "tp2 pp2", Topology(tp=2), {}),
    "stacked experts to pp2": ("gpt_oss", "ep2", Topology(pp=2), {}),
    "fsdp2 to tp2": ("qwen2", "fsdp2", Topology(tp=2), {}),
    "tp2, merged adapters, to dp2": ("qwen2", "tp2", Topology(dp=2), PEFT),
}
"""A family, the trainer's layout, the engine's, and what the policy has besides."""
DAILY = ("tp2 to tp2", "ep2 tp2 to ep2")
FAULTS: dict[str, tuple[Any, str, str]] = {
    "a failure": (transport_module, "_send_runs", "the disk of this test is full"),
    "a flipped bit": (Writer, "filled", "with a wrong digest"),
}
"""What is disturbed, and what is said of it."""


def held_by(policy: Any, grid: Topology) -> Any:
    return place_on_grid(policy.exporter.plan(), policy.exporter.table.architecture, grid)


def join(policy: Any, port: int, engines: int, timeout_s: float = TIMEOUT_S) -> Collective:
    ranks = policy.topology.world_size
    sizes = {"world_size": ranks + engines, "train_world_size": ranks, "timeout_s": timeout_s}
    own = {"secret": SECRET, "of_shards": True}
    return Collective.join(policy.exporter, "127.0.0.1", port, **sizes, **own)


def send(
    config: dict[str, Any], grid: Topology, port: int, fault: str, mover: str | None
) -> dict[str, Any]:
    """Three refits, of which the second fails if there is a `fault`."""
    encoded: list[Any] = []
    wire: Counter[int] = Counter()

    def note(encode: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        def act(layout: Any) -> bytes:
            encoded.append(layout)
            return encode(layout)

        return act

    def count(send: Callable[[Any, torch.Tensor, int], Any]) -> Callable[..., Any]:
        def act(channel: Any, memory: torch.Tensor, target: int) -> Any:
            wire[target - 1] += memory.nbytes
            return send(channel, memory, target)

        return act

    def count_written(write: Callable[..., Any]) -> Callable[..., Any]:
        def act(own: Any, to: bytes, chunk: torch.Tensor, at: int) -> Any:
            wire[group.member._reached[1].index(to)] += chunk.nbytes
            return write(own, to, chunk, at)

        return act

    counted = [(BoundedProcessGroup, "send", count)]
    counted += [(MOVERS[mover], "write", count_written)] if mover else []
    with (
        replaced(transport_module.ShardList, "encode", note),
        ExitStack() as stack,
        open_policy(config, **UNUSED) as policy,
    ):
        for of in counted:
            stack.enter_context(replaced(*of))
        held = held_by(policy, grid)
        group = join(policy, port, grid.world_size)
        refits, seen, sent = group.shards(held, mover), [], []
        for number in range(3):
            disturb(policy, number, 0.5)
            now = bits_of(policy)
            wire.clear()
            if number == 1 and fault:
                fail_once(policy, refits, fault)
                continue
            manifest = policy.refit(refits)
            sent.append(manifest.shard_bytes)
            assert not manifest.changed_bytes and manifest.total_bytes == sent[-1]
            seen.append(now)
        links, over = refits.plan(policy.exporter).link_bytes, dict(wire)
        with pytest.raises(ConfigError, match="ShardRefits sends while"):
            policy.begin_refit(refits)
        with pytest.raises(ConfigError, match="'rdma' is none of shared_memory, nixl"):
            group.shards(held, "rdma")
        group.of_shards = False
        with pytest.raises(ConfigError, match="join it with train_world_size and of_shards=True"):
            group.shards(held)
        group.close()
        told = {"encoded": len(encoded), "planned": dict(links), "wire": over}
        return {"seen": seen, "sent": sent, "held": held, **told}


def fail_once(policy: Any, refits: Any, fault: str) -> None:
    """A refit in which rank 0 fails in its second call, or has another byte in its first run."""
    holder, name, said = FAULTS[fault]
    calls: list[Any] = []

    def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any) -> Any:
            calls.append(args)
            if policy.rank == 0 and len(calls) == 2 and fault == "a failure":
                raise OSError(said)
            if policy.rank == 0 and len(calls) == 1 and fault == "a flipped bit":
                args[2].bytes(1)[0] ^= 1
            return call(*args)

        return act

    with replaced(holder, name, faulty), pytest.raises(RefitError, match=said):
        policy.refit(refits)


@pytest.fixture
def engines() -> Iterator[list[OtherProcess]]:
    started = [OtherProcess(), OtherProcess()]
    yield started
    for process in started:
        process.kill()


def run(
    ranks: RankPool,
    engines: list[OtherProcess],
    path: Path,
    case: str,
    fault: str = "",
    mover: str | None = None,
) -> None:
    _, layout, grid, more = ENGINES[case]
    world, section = LAYOUTS[layout]
    top = {"refit_bucket_bytes": BUCKET, "refit_timeout_s": TIMEOUT_S}
    config = policy_config(path, section | more, **top)
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        trainers = pool.submit(ranks.run, world, send, config, grid, port, fault, mover)
        for number, process in enumerate(engines):
            options = {"expected": None, "timeout_s": TIMEOUT_S}
            process.call(start_empty, options)
            place = (port, world + number, world + len(engines), world, TIMEOUT_S)
            process.call(collective_engine.join, *place)
        heard = []
        for number in range(3):
            for process in engines:
                process.begin(receive)
            results = [process.result() for process in engines]
            if number == 1 and fault:
                assert any(FAULTS[fault][2] in str(said) for said in results)
                assert all(isinstance(said, str) for said in results)
            else:
                heard.append(results)
        first, *_ = of_ranks = trainers.result()
    assert len(heard) == len(first["seen"])
    assert first["encoded"] == len(engines)  # once for all refits
    for number, (results, whole) in enumerate(zip(heard, first["seen"], strict=True)):
        own = [shards_of(whole, first["held"], rank) for rank in range(len(engines))]
        differing = [
            (rank, name)
            for rank, (has, should) in enumerate(zip(results, own, strict=True))
            for name in {**has, **should}
            if has.get(name) != should.get(name)
        ]
        assert not differing
        received = sum(len(bits) for each in own for _, _, bits in each.values())
        assert sum(of_rank["sent"][number] for of_rank in of_ranks) == received
    # What went over each link in the last one is what is planned, as all runs are aligned here.
    wire = {(rank, to): n for rank, of in enumerate(of_ranks) for to, n in of["wire"].items()}
    assert wire == first["planned"]


def send_changes(
    config: dict[str, Any], grid: Topology, port: int, mover: str | None
) -> dict[str, Any]:
    """Refits of what has changed; the weights and what was sent in each, or what was said of it."""
    with open_policy(config, **UNUSED) as policy:
        held = held_by(policy, grid)
        group = join(policy, port, grid.world_size)
        refits, seen, sent = DeltaShards(group.shards(held, mover)), [], list[Any]()
        for number in range(CHANGES):
            if number != 2:  # else nothing changes
                disturb(policy, number, SHARE)
            seen.append(bits_of(policy))
            try:
                manifest = policy.refit(refits)
            except RefitError as error:
                sent.append(str(error))
            else:
                sent.append(manifest.total_bytes)
                nbytes = (0, sent[-1]) if manifest.why_whole else (sent[-1], 0)
                assert (manifest.changed_bytes, manifest.shard_bytes) == nbytes
                assert bool(manifest.why_whole) == (number in (0, FORGETS, DIFFERS + 1))
        with pytest.raises(ConfigError, match="DeltaShards sends while"):
            policy.begin_refit(refits)
        copies = policy.exporter.published[DeltaShards].copies
        shards = group.shards(held).plan(policy.exporter)
        assert sum(copy.nbytes for copy in copies) == shards.kept_bytes[policy.rank] > 0
        sizes = {each.tensor.dtype for each in shards.transfers}
        links = shards.scale_links({size: expect_bytes(SHARE, size.itemsize) for size in sizes})
        group.close()
        planned = sum(nbytes for (source, _), nbytes in links.items() if source == policy.rank)
        of_plan = {"planned": planned, "runs": len(shards.by_source[policy.rank])}
        return {"seen": seen, "sent": sent, "held": held, **of_plan}


CHANGES, FORGETS, DIFFERS = 8, 3, 5
"""How many refits, before which an engine rank is new, and before which it has other weights."""
SHARE, HEADER = 0.05, 200
"""Which share of the elements changes, and most bytes that say of which run changes are."""


def forget() -> None:
    """As if this engine rank had been started again."""
    refit_engine._here["receiver"].release()


def differ() -> None:
    """Its staged weights are not those that the trainer has sent."""
    for kept in refit_engine._here["receiver"]._engine.kept.values():
        kept.view(-1).view(torch.uint8)[0] ^= 1


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.daily] * (c in DAILY)) for c in ENGINES]
)
def test_each_engine_rank_gets_what_has_changed_of_its_own_elements(
    ranks: RankPool, checkpoint: Any, engines: list[OtherProcess], case: str
) -> None:
    run_changes(ranks, checkpoint, engines, case)


def run_changes(
    ranks: RankPool,
    checkpoint: Any,
    engines: list[OtherProcess],
    case: str,
    mover: str | None = None,
) -> None:
    family, layout, grid, more = ENGINES[case]
    world, section = LAYOUTS[layout]
    top = {"refit_bucket_bytes": BUCKET, "refit_timeout_s": TIMEOUT_S}
    path = checkpoint(family, **SIZES | {"vocab": 4001})
    config = policy_config(path, section | more, **top)
    heard = []
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        trainers = pool.submit(ranks.run, world, send_changes, config, grid, port, mover)
        for number, process in enumerate(engines):
            process.call(start_empty, {"expected": None, "timeout_s": TIMEOUT_S})
            place = (port, world + number, world + len(engines), world, TIMEOUT_S)
            process.call(collective_engine.join, *place)
        for number in range(CHANGES):
            if number in (FORGETS, DIFFERS):
                engines[1].call(forget if number == FORGETS else differ)
            for process in engines:
                process.begin(receive)
            heard.append([process.result() for process in engines])
        first, *_ = of_ranks = trainers.result()
    for number, (results, whole) in enumerate(zip(heard, first["seen"], strict=True)):
        sent = [of_rank["sent"][number] for of_rank in of_ranks]
        if number == DIFFERS:
            assert all("another digest" in words for words in (*results, *sent))
            continue
        own = [shards_of(whole, first["held"], rank) for rank in range(len(engines))]
        assert results == own, number
        whole_bytes = sum(len(bits) for each in own for _, _, bits in each.values())
        if number in (0, FORGETS, DIFFERS + 1):
            assert sum(sent) == whole_bytes, number
        else:
            assert sum(sent) < whole_bytes / 2, number
            for of_rank in () if more or number == 2 else of_ranks:
                over = of_rank["sent"][number] - of_rank["planned"]
                allowed = 0.04 * of_rank["planned"]
                assert -allowed < over < allowed + HEADER * of_rank["runs"], number


def start_empty(options: dict[str, Any]) -> None:
    """An engine that takes whatever it is given."""

    class Taking(refit_engine.SmallEngine):
        def load(self, tensors: Any) -> None:
            self.weights = {name: tensor.clone() for name, tensor in tensors}

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    engine = Taking({})
    receiver = refit_engine.Receiver(engine.load, **options)
    refit_engine._here |= {"engine": engine, "receiver": receiver}


def receive() -> Any:
    """One refit; what the engine has then, or what was said of its failure."""
    try:
        collective_engine.receive()
    except RefitError as error:
        return str(error)
    return refit_engine.bits(refit_engine._here["engine"].weights)


def shards_of(whole: refit_engine.Bits, held: Any, rank: int) -> refit_engine.Bits:
    """What that engine rank has of these tensors."""
    found = {}
    for name, (shape, dtype, content) in whole.items():
        tensor = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
        for part, holders in enumerate(held[name].holders):
            low, high = held[name].bounds(shape or (1,), part)
            if rank in holders and low < high:  # of a padded vocabulary a rank can have nothing
                own = tensor.narrow(held[name].dim, low, high - low) if shape else tensor
                found[name] = own.contiguous()
    return refit_engine.bits(found)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.daily] * (c in DAILY)) for c in ENGINES]
)
def test_each_engine_rank_gets_its_own_elements_from_those_that_hold_them(
    ranks: RankPool, checkpoint: Any, engines: Any, case: str
) -> None:
    run(ranks, engines, checkpoint(ENGINES[case][0], **SIZES), case)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_fails_on_all_and_the_next_refit_works(
    ranks: RankPool, checkpoint: Any, engines: Any, fault: str
) -> None:
    run(ranks, engines, checkpoint("qwen2", **SIZES), "tp2 to tp2", fault)
