"""A rank that fails or stalls in a refit: the others hear of it in time, and the next one works.
What would send wrong weights, or train what is not there, is refused and costs nothing.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.plan import RefitPlan, RefitTensor
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from tests.checkpoints import make_checkpoint
from tests.dist.refits import LAYOUTS, config_of, serving
from tests.dist.resuming import replaced
from tests.dist.test_export import tensors_of
from tests.losses import TokenNLL
from tests.oracle import make_batch
from tests.ranks import RankPool

TIMEOUT_S = 2.0
ROWS = 2


class KeepingSession:
    """Keeps what comes; does `act` at the tensor number `at`, or when it is finished or opened."""

    def __init__(self, device: torch.device, at: Any, act: Any) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.closed = self.placed = 0
        self._device, self._at, self._act = device, at, act

    def place(self, tensor: RefitTensor) -> BufferSlice:
        if len(self.found) == self._at:
            self._act()
        assert self.placed == len(self.found), "placed before the last one was complete"
        self.placed += 1
        return BufferSlice(Buffer.on(self._device, tensor.nbytes), 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        self.found[tensor.name] = target.tensor(tensor.shape, tensor.dtype)

    def finish(self, manifest: RefitManifest) -> None:
        if self._at == "finish":
            self._act()

    def close(self) -> None:
        self.closed += 1


class KeepingTransport:
    def __init__(self, at: Any = None, act: Any = None) -> None:
        self._at, self._act = at, act
        self.session: KeepingSession | None = None

    def plan(self, exporter: Any) -> RefitPlan:
        return exporter.plan(bucket_bytes=16384)

    def open(self, exporter: Any, plan: RefitPlan) -> KeepingSession:
        if self._at == "open":
            self._act()
        self.session = KeepingSession(exporter.device, self._at, self._act)
        return self.session


def _fail() -> None:
    raise OSError("the engine is out of ink")


def _stall() -> None:
    time.sleep(2.5 * TIMEOUT_S)


def refit_after_fault(path: Path, cfg: dict[str, int], at: Any, act: Any) -> dict[str, Any]:
    """What this rank hears of a refit in which rank 1 does `act`, and what the next one brings."""
    with serving(path, cfg, refit_timeout_s=TIMEOUT_S) as policy:
        culprit = policy.rank == 1
        if at != "before the first":
            policy.refit(KeepingTransport())  # the groups are there
        elif culprit:
            act()
        transport = KeepingTransport(at, act) if culprit else KeepingTransport()
        started = time.monotonic()
        with pytest.raises(RefitError) as error:
            policy.refit(transport)
        seconds = time.monotonic() - started
        assert not transport.session or transport.session.closed == 1
        dist.barrier()  # the one that was away is back
        after = KeepingTransport()
        manifest = policy.refit(after)
        assert list(manifest.tensors) == list(after.session.found)
        return {"said": str(error.value), "seconds": seconds, "tensors": after.session.found}


def assert_recovered(results: list[dict[str, Any]], path: Path) -> None:
    expected = tensors_of(path)
    for result in results:
        assert result["tensors"].keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in result["tensors"].items())


@pytest.mark.parametrize("at", [0, 5, "open", "finish"])
@pytest.mark.parametrize("layout", ["dp2", "tp2 pp2", "fsdp2"])
def test_a_rank_that_cannot_send_fails_all_with_its_reason(
    ranks: RankPool, checkpoint: Any, layout: str, at: Any
) -> None:
    world, cfg = LAYOUTS[layout]
    path = checkpoint("qwen2")
    results = ranks.run(world, refit_after_fault, path, cfg, at, _fail)
    for result in results:
        assert "rank 1: OSError: the engine is out of ink" in result["said"]
    assert_recovered(results, path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "at"),
    [
        ("tp2", 5),
        ("pp2", "before the first"),
        ("dp2", 5),
        ("dp2", "before the first"),
        ("fsdp2", 5),
    ],
)
def test_a_rank_that_stalls_fails_the_others_in_time_and_itself_when_it_is_back(
    ranks: RankPool, checkpoint: Any, layout: str, at: Any
) -> None:
    world, cfg = LAYOUTS[layout]
    path = checkpoint("qwen2")
    results = ranks.run(world, refit_after_fault, path, cfg, at, _stall)
    # Not as a measurement: without a bound the others would wait for the whole stall, and more.
    assert results[0]["seconds"] < 2.4 * TIMEOUT_S
    assert "did not take part within 2 s" in results[0]["said"]
    if at == "before the first":
        who_and_why = "rank 0: .*did not take part within 2 s"
        assert re.search(who_and_why, results[1]["said"]), "it hears who gave up, and why"
    assert_recovered(results, path)


def long_refit(path: Path) -> list[str]:
    """Rank 1 is at work for longer than the timeout, rank 0 has nothing to do but wait."""

    def slow(place: Any) -> Any:
        def call(*args: Any) -> BufferSlice:
            if policy.rank == 1:
                time.sleep(1.25 * TIMEOUT_S / number)
            return place(*args)

        return call

    with serving(path, {}, refit_timeout_s=TIMEOUT_S / 2) as policy:
        number = len(policy.exporter.plan().tensors)
        with replaced(KeepingSession, "place", slow):
            return list(policy.refit(KeepingTransport()).tensors)


def test_a_rank_at_work_is_waited_for_longer_than_the_timeout(
    ranks: RankPool, checkpoint: Any
) -> None:
    waiting, working = ranks.run(2, long_refit, checkpoint("qwen2"))
    assert waiting == working


def two_policies(path: Path, cfg: dict[str, int]) -> list[list[str]]:
    """One after the other in a process group that outlives both."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    sent = []
    for _ in range(2):
        with serving(path, cfg, refit_timeout_s=20.0) as policy:
            sent.append(list(policy.refit(KeepingTransport()).tensors))
    return sent


def test_a_second_policy_in_the_same_process_group_meets_anew(
    ranks: RankPool, checkpoint: Any
) -> None:
    world, cfg = LAYOUTS["tp2 pp2"]
    for first, second in ranks.run(world, two_policies, checkpoint("qwen2"), cfg):
        assert first == second != []


def misuse(path: Path) -> dict[str, torch.Tensor]:
    optimizer = {"optimizer": {"optimizer": "adam", "lr": 0.01}}
    policy = MegatronPolicy(config_of(path, optimizer))
    batch = make_batch(ROWS, 8, 256)
    try:
        policy.train(batch, TokenNLL())
        with policy.reference():
            for call in (
                lambda: policy.refit(KeepingTransport()),
                lambda: next(policy.export()),
                lambda: policy.export_hf(path.with_name("never")),
                lambda: policy.train(batch, TokenNLL()),
            ):
                with pytest.raises(ConfigError, match="has to wait until the reference policy"):
                    call()
            policy.logprobs(batch)
        assert policy.steps == 1
        half_read = policy.export()
        next(half_read)
        with pytest.raises(ConfigError, match=r"train\(\) has to wait until export\(\)"):
            policy.train(batch, TokenNLL())
        with pytest.raises(ConfigError, match="has to wait until"), policy.reference():
            pass
        half_read.close()
        _mixed_handles(policy, batch)
        transport = KeepingTransport()
        assert policy.refit(transport).step == policy.steps == 2
        with pytest.raises(ConfigError, match=r"cannot be handed over as torch\.int8"):
            next(policy.export(torch.int8))
        assert transport.session is not None
        return {"sent": transport.session.found, "exported": dict(policy.export())}
    finally:
        policy.shutdown()


def _mixed_handles(policy: MegatronPolicy, batch: Any) -> None:
    handles = IpcHandles(policy.exporter)
    names = list(policy.exporter.plan().info())
    with pytest.raises(RefitError, match="nothing was exported"):
        handles.manifest(policy.steps)
    handles.weights(names[:3], policy.steps)
    policy.train(batch, TokenNLL())
    with pytest.raises(RefitError, match=r"exported at step 1, and this is step 2.*Begin again"):
        handles.weights(names[3:], policy.steps)
    handles.weights(names, policy.steps)
    assert list(handles.manifest(policy.steps).tensors) == names
    handles.release()


def test_neither_reference_weights_nor_those_of_two_steps_are_sent(
    ranks: RankPool, checkpoint: Any
) -> None:
    (result,) = ranks.run(1, misuse, checkpoint("qwen2"))
    assert result["sent"].keys() == result["exported"].keys()
    for name, tensor in result["sent"].items():
        assert torch.equal(tensor, result["exported"][name])


def handed_over(path: Path) -> Any:
    with serving(path, {}, refit_dtype="bfloat16") as policy:
        transport = KeepingTransport()
        policy.refit(transport)
        policy.export_hf(path.with_name("as-stored"))
        told = {name: dtype for name, (_, dtype) in policy.exporter.plan().info().items()}
        return told, {name: tensor.dtype for name, tensor in transport.session.found.items()}


def test_one_setting_says_what_engines_are_told_and_handed(ranks: RankPool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "deepseek_v3", tokenizer=False)
    ((told, found),) = ranks.run(1, handed_over, path)
    assert told == found
    bias = {name for name in found if name.endswith("e_score_correction_bias")}
    assert bias and {found[name] for name in bias} == {torch.float32}
    assert {found[name] for name in found.keys() - bias} == {torch.bfloat16}
    stored = tensors_of(tmp_path / "as-stored")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
