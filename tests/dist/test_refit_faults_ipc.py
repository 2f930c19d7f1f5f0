"""Refits of several ranks to an engine on the machine, and every way they fail: all ranks hear why
in time, the engine keeps what it has, and the next refit succeeds.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.sockets.link import parse_address
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests import refit_engine as engine
from tests.dist.refits import LAYOUTS, serving
from tests.dist.test_export import tensors_of
from tests.other_process import OtherProcess, shared_memory_of
from tests.ranks import RankFailure, RankPool
from tests.small_disk import MIB, free, small_disk

TIMEOUT_S = 4.0
BUFFER = 16 * 1024
DISTURBED = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("s")
    yield f"ipc://{folder}/t.sock"
    assert os.listdir(folder) == []


@pytest.fixture
def start() -> Iterator[Callable[..., OtherProcess]]:
    """`start(...)`: an engine of zeros in a process of its own; nothing may be left in it."""
    running: list[OtherProcess] = []

    def started(forms: Any, die_at_load: int = 0, **options: Any) -> OtherProcess:
        running.append(OtherProcess())
        running[-1].call(engine.start, forms, die_at_load, {"timeout_s": 60.0, **options})
        return running[-1]

    yield started
    for process in running:
        assert not process.alive or process.call(engine.left) == []
        process.kill()


def forms_of(path: Path) -> dict[str, Any]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}


class Meddling:
    """The stream, disturbed on one rank by `fault`: "stall", "flip", "die", or not."""

    def __init__(self, inner: IpcStream, fault: str) -> None:
        self._inner, self._fault = inner, fault

    def plan(self, exporter: Any) -> Any:
        return self._inner.plan(exporter)

    def open(self, exporter: Any, plan: Any) -> Any:
        if self._fault == "stall" and exporter.rank == 1:
            time.sleep(2 * TIMEOUT_S)
        session = self._inner.open(exporter, plan)
        if session is not None:
            filled = session.filled

            def disturbed(tensor: Any, target: Any) -> None:
                if tensor.name == DISTURBED and self._fault == "flip":
                    target.bytes(64)[5] ^= 1
                if tensor.name == DISTURBED and self._fault == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                filled(tensor, target)

            session.filled = disturbed
        return session


def refits(
    path: Path, cfg: dict[str, int], address: str, fault: str, directory: str | None = None
) -> dict[str, Any]:
    """A refit with that fault, and one without."""
    top = {"refit_timeout_s": TIMEOUT_S, "refit_bucket_bytes": BUFFER}
    with serving(path, cfg, **top) as policy:
        place = {} if directory is None else {"directory": directory}
        first = IpcStream(address, buffer_bytes=4 * MIB if directory else BUFFER, **place)
        policy.exporter.agree(None)  # the ranks' groups are there
        started = time.monotonic()
        with pytest.raises(RefitError) as error:
            policy.refit(Meddling(first, fault))
        seconds, said = time.monotonic() - started, str(error.value)
        del error
        dist.barrier()
        manifest = policy.refit(IpcStream(address, buffer_bytes=BUFFER, **place))
        return {"said": said, "seconds": seconds, "sent": len(manifest.tensors)}


def end_of(process: OtherProcess) -> str:
    """What the engine says of the refit that failed."""
    with pytest.raises(RefitError) as error:
        process.result()
    return str(error.value)


def assert_recovered(results: list[Any], process: OtherProcess, path: Path) -> None:
    weights = tensors_of(path)
    assert process.result() == 0
    held, step, mixed, _ = process.call(engine.state)
    assert held == engine.bits(weights) and step == 0 and not mixed
    assert [result["sent"] for result in results] == [len(weights)] + [0] * (len(results) - 1)
    seconds = [round(result["seconds"]) for result in results]
    assert max(seconds) < 3 * TIMEOUT_S, seconds


@contextmanager
def beside(ranks: RankPool, layout: str, *args: Any) -> Iterator[Future[list[Any]]]:
    """Runs `refits` in another thread, so that this one can look after the engines."""
    world, cfg = LAYOUTS[layout]
    path, *more = args
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ranks.run, world, refits, path, cfg, *more)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2 pp2"])
@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_that_dies_fails_all_ranks_and_another_one_is_served(
    ranks: RankPool, checkpoint: Any, start: Any, address: str, layout: str, staged: bool
) -> None:
    path = checkpoint("qwen2")
    first = start(forms_of(path), die_at_load=1 if staged else 3, staged=staged)
    second = start(forms_of(path), staged=staged)
    first.begin(engine.receive, address)
    with beside(ranks, layout, path, address, "") as trainers:
        with pytest.raises((EOFError, ConnectionResetError)):
            first.result()
        second.begin(engine.receive, address)
        results = trainers.result()
    assert all("rank 0: the engine at" in result["said"] for result in results)
    assert_recovered(results, second, path)


@pytest.mark.parametrize(
    ("fault", "trainers_hear", "engine_hears"),
    [
        ("flip", f"with a wrong digest: {DISTURBED}", "wrong digest"),
        # Who waits a moment longer than another may see it leave.
        (
            "stall",
            "did not take part within 4 s|has left, or was ended",
            "trainer at .* (disconnected|silent)",
        ),
        ("full", r"the trainer cannot get [\d,]+ bytes", "trainer at .* disconnected"),
    ],
)
def test_a_fault_on_the_way_fails_both_sides_and_the_next_refit_succeeds(
    ranks: RankPool,
    checkpoint: Any,
    start: Any,
    address: str,
    tmp_path: Path,
    fault: str,
    trainers_hear: str,
    engine_hears: str,
) -> None:
    path = checkpoint("qwen2", vocab=3000)
    process = start(forms_of(path))
    process.begin(engine.receive, address)
    with small_disk(tmp_path / "tiny") as tiny:
        where = tiny if fault == "full" else None
        with beside(ranks, "tp2", path, address, fault, where) as trainers:
            assert re.search(engine_hears, end_of(process))
            process.begin(engine.receive, address)
            results = trainers.result()
        assert free(tiny) == MIB
    said = [result["said"] for result in results]
    assert all(re.search(trainers_hear, s) for s in said), said
    assert_recovered(results, process, path)


def test_a_rank_that_is_killed_fails_the_engine_and_the_other_rank(
    ranks: RankPool, checkpoint: Any, start: Any, address: str
) -> None:
    path = checkpoint("qwen2")
    process = start(forms_of(path))
    process.begin(engine.receive, address)
    with beside(ranks, "tp2", path, address, "die") as trainers:
        heard = end_of(process)
        with pytest.raises(RankFailure, match="rank0 died"):
            trainers.result()
    assert "disconnected" in heard or "cannot open" in heard
    held, step, mixed, _ = process.call(engine.state)
    assert held == engine.bits(engine.zeros(forms_of(path))) and step is None and not mixed
    assert not os.path.exists(parse_address(address))


def export_by_handle(path: Path, cfg: dict[str, int], directory: str) -> list[str]:
    """Everything at once, for which there is no room on rank 0, and then in parts: what is sent."""
    with serving(path, cfg, refit_timeout_s=TIMEOUT_S) as policy:
        names = list(policy.exporter.plan().info())
        handles = IpcHandles(policy.exporter, *([directory] if policy.rank == 0 else []))
        with pytest.raises(RefitError, match="rank 0: the trainer cannot get"):
            handles.weights(names)
        for name in names:
            handles.weights([name])
        manifest = handles.manifest(7)
        handles.release()
        assert shared_memory_of("self") == []
        return sorted(manifest.tensors)


def test_a_rank_without_room_for_its_handles_fails_all_and_less_at_a_time_succeeds(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    world, cfg = LAYOUTS["tp2"]
    path = checkpoint("qwen2", vocab=3000)
    with small_disk(tmp_path / "tiny") as tiny:
        results = ranks.run(world, export_by_handle, path, cfg, tiny)
        assert free(tiny) == MIB
    assert results == [sorted(tensors_of(path))] * world
