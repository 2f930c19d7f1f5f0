"""A policy's weights through consumers that are built as vLLM's trainer engines are: complete and
bit-equal, in the order that was declared, and all ranks fail together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.weight_source import RefitSource, group_by_layer
from tests.dist.refits import LAYOUTS, serving
from tests.ranks import RankPool
from tests.refit_engine import bits

STEP = 7


class Client:
    """An engine's control plane: notes each call, and refuses one."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: list[Any] = []
        self._refuses = refuses

    def _note(self, call: str, value: Any = None) -> None:
        self.calls.append(call if value is None else (call, value))
        if call == self._refuses:
            raise ConnectionError(f"no {call} today")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._note("init", init_info)

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, update_info: Any) -> None:
        self._note("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note("finish", weight_version)


class Dense:
    """Rank 0 sends what it has declared, one tensor an update; the others only iterate."""

    def __init__(self, source: Any, client: Client | None, fails_at: int = -1) -> None:
        self.source, self.client, self._fails_at = source, client, fails_at
        self.arrived: dict[str, Tensor] = {}

    def send_weights(self) -> None:
        declared = iter(self.source.metadata())
        client = self.source.check(self.client) if self.client else None
        if client:
            client.start_weight_update()
        for number, (name, tensor) in enumerate(self.source):
            if number == self._fails_at:
                raise MemoryError("this rank has no room")
            if client:
                form = next(declared)
                assert (name, tensor.dtype, tuple(tensor.shape)) == (
                    form.name,
                    form.dtype,
                    tuple(form.shape),
                )
                client.update_weights(name)
                self.arrived[name] = tensor
        if client:
            assert next(declared, None) is None
            client.finish_weight_update()


class ByLayer:
    """Every rank keeps what it holds, and asks for no more groups than it owns."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.arrived: dict[str, Tensor] = {}

    def send_weights(self) -> None:
        owned, batches = self.source.groups(), self.source.iter_groups()
        held = self.source.held_names()
        for group in owned:
            names, tensors = next(batches)
            assert names == group
            for name, tensor in zip(names, tensors, strict=True):
                assert (tensor is not None) == (held is None or name in held), name
                if tensor is not None:
                    self.arrived[name] = tensor


def send(path: Path, cfg: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """What each kind of holder gives out, beside the export; and what is declared of it."""
    with serving(path, cfg, **top) as policy:
        exporter, seen = policy.exporter, dict[str, Any]()
        whole = RefitSource(exporter)
        seen["names"] = [tensor.name for tensor in whole.metadata()]
        for held in ("all", "rank 0", "stage"):
            source = RefitSource(exporter, held=held)
            assert source.metadata() == whole.metadata()
            client = Client() if policy.rank == 0 else None
            dense = held == "rank 0"
            for engine in (
                (Dense(source, client), Dense(source, client)) if dense else (ByLayer(source),)
            ):
                source.send(engine, STEP)
            names = source.held_names()
            seen[held] = bits(engine.arrived), None if names is None else sorted(names)
            if client:
                seen[f"{held}, calls"] = client.calls
        seen["export"] = bits(dict(policy.export()))
        seen["groups"] = whole.groups()
        return seen


CASES = [
    ("qwen2", "tp2", {}),
    ("qwen3_moe", "ep2 pp2", {"refit_bucket_bytes": 16384}),
    ("qwen2", "pp2", {"refit_dtype": "bfloat16"}),
    ("qwen3_moe", "ep2 tp2", {}),
    ("gpt_oss", "ep2", {}),
    ("llama", "tp2 pp2", {}),
    ("qwen2", "dp2", {}),
    ("qwen2", "pp2 vpp2", {}),
    ("qwen2", "fsdp2", {}),
    ("qwen2", "one", {}),
]


@pytest.mark.parametrize(("family", "layout", "top"), CASES)
def test_a_trainer_engine_gets_the_export_in_the_order_that_was_declared(
    ranks: RankPool, checkpoint: Any, family: str, layout: str, top: dict[str, Any]
) -> None:
    world, cfg = LAYOUTS[layout]
    path = checkpoint(family, layers=4)
    seen = ranks.run(world, send, path, cfg, top)
    export = seen[0]["export"]
    for rank, each in enumerate(seen):
        assert each["names"] == seen[0]["names"] == [n for g in each["groups"] for n in g]
        assert sorted(each["names"]) == sorted(export)
        assert each["groups"] == group_by_layer(each["names"])
        assert each["all"] == (export, None)
        assert each["rank 0"] == ((export, None) if rank == 0 else ({}, []))
        given, names = each["stage"]
        assert sorted(given) == names and given == {name: export[name] for name in names}
    assert set().union(*(each["stage"][1] for each in seen)) == set(export)
    update = ["start", *(("update", name) for name in seen[0]["names"]), ("finish", str(STEP))]
    assert seen[0]["rank 0, calls"] == update * 2


def fail(path: Path, cfg: dict[str, Any], who: int, refuses: str, at: int) -> dict[str, Any]:
    """What a failing transfer raises here, and whether the next one succeeds."""
    with serving(path, cfg, refit_timeout_s=20.0) as policy:
        source = RefitSource(policy.exporter, held="all")
        client = Client(refuses) if policy.rank == 0 else None
        engine = Dense(source, client, at if policy.rank == who else -1)
        with pytest.raises(RefitError) as raised:
            source.send(engine, STEP)
        calls = policy.exporter.ranks.calls
        client = Client() if policy.rank == 0 else None
        source.send(Dense(source, client), STEP)
        seen = {"error": str(raised.value), "calls": policy.exporter.ranks.calls - calls}
        return seen | ({"finished": client.calls[-1]} if client else {})


REFUSALS = [
    (-1, "update", -1, "rank 0: ConnectionError: no update today"),
    (-1, "start", -1, "rank 0: ConnectionError: no start today"),
    (-1, "finish", -1, "rank 0: ConnectionError: no finish today"),
    (1, "", 3, "rank 1: MemoryError: this rank has no room"),
    (1, "", 0, "rank 1: MemoryError: this rank has no room"),
]


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
@pytest.mark.parametrize(("who", "refuses", "at", "words"), REFUSALS)
def test_a_failure_on_any_rank_is_raised_on_all_and_the_next_transfer_succeeds(
    ranks: RankPool,
    checkpoint: Any,
    layout: str,
    who: int,
    refuses: str,
    at: int,
    words: str,
) -> None:
    world, cfg = LAYOUTS[layout]
    seen = ranks.run(world, fail, checkpoint("qwen2"), cfg, who, refuses, at)
    assert [each["error"] for each in seen] == [words] * world
    assert seen[0]["finished"] == ("finish", str(STEP))
    # Nothing was given up: the process groups are still those of before.
    assert len({each["calls"] for each in seen}) == 1


def leave_early(path: Path, cfg: dict[str, Any]) -> list[str]:
    """Rank 0 leaves an iteration that nothing watches; then both iterate."""
    with serving(path, cfg, refit_timeout_s=20.0) as policy:
        source, words = RefitSource(policy.exporter), []
        try:
            for _ in source:
                if policy.rank == 0:
                    break
        except RefitError as error:
            words.append(str(error))
        count = sum(1 for _ in source)
        return [*words, f"{count - len(source.metadata())} missing"]


def test_a_rank_that_leaves_an_iteration_early_fails_the_others(
    ranks: RankPool, checkpoint: Any
) -> None:
    left, other = ranks.run(2, leave_early, checkpoint("qwen2"), LAYOUTS["tp2"][1])
    assert left == ["0 missing"]
    assert len(other) == 2 and other[1] == "0 missing", other
    assert "rank 0" in other[0], other


def unfinished(path: Path, cfg: dict[str, Any]) -> list[str]:
    """What becomes of engines that ask for too little, or finish too early."""

    class Idle:
        def send_weights(self) -> None:
            pass

    class Early(Dense):
        def send_weights(self) -> None:
            if self.client:
                self.source.check(self.client).finish_weight_update()
            super().send_weights()

    with serving(path, cfg) as policy:
        source, words = RefitSource(policy.exporter), []
        client = Client() if policy.rank == 0 else None
        for engine in (Idle(), Early(source, client)):
            with pytest.raises(RefitError) as raised:
                source.send(engine, STEP)
            words.append(str(raised.value))
        assert client is None or client.calls == []
        return words


def test_an_update_is_not_finished_before_every_rank_has_sent_its_weights(
    ranks: RankPool, checkpoint: Any
) -> None:
    idle, early = ranks.run(2, unfinished, checkpoint("qwen2"), LAYOUTS["tp2"][1])[0]
    words = "the trainer engine has not asked for all weights"
    assert idle == f"rank 0: {words}; rank 1: {words}"
    assert early.startswith("rank 0: an update may not be finished")
