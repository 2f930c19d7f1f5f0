"""A detached refit is of the moment in which it was begun, whatever the policy does meanwhile: no
engine sees a mixture, and no failure of one side reaches the other.

Engines are held up in the middle of a refit until the policy is done with what it does meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import LossError, RefitError
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.memory.states import IDLE, TRAIN
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests import refit_engine as engine
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.mailbox import WAIT_S, Mailbox
from tests.dist.refits import LAYOUTS
from tests.dist.resuming import replaced
from tests.dist.test_export import tensors_of
from tests.losses import TokenNLL
from tests.other_process import OtherProcess
from tests.ranks import RankPool

BUFFER = 8 * 1024
"""Much less than the model: most of it is not gathered yet when the engine is held up."""
VOCAB = 128
SIZES = {"hidden": 32, "layers": 2, "heads": 4, "groups": 2, "ffn": 48, "vocab": VOCAB}
TIMEOUT_S = 20.0
PEFT = {"peft": {"enabled": True, "dim": 4, "alpha": 6.0}}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2": ("qwen2", *LAYOUTS["tp2"]),
    "pp2": ("qwen2", *LAYOUTS["pp2"]),
    "ep2": ("qwen3_moe", *LAYOUTS["ep2"]),
    "fsdp2": ("qwen2", *LAYOUTS["fsdp2"]),
    "one": ("qwen2", *LAYOUTS["one"]),
    "tp2, merged adapters": ("qwen2", 2, LAYOUTS["tp2"][1] | PEFT),
}
"""A family, the number of ranks, and their section."""
DAILY = ("tp2", "ep2", "fsdp2")


class Broken(TokenNLL):
    """A loss that cannot be trained on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, metrics = super().__call__(*args, **kwargs)
        return loss * float("nan"), metrics


class HeldUp(engine.SmallEngine):
    """Says that it has begun to load, and goes on when it is let."""

    def __init__(self, weights: dict[str, torch.Tensor], box: Mailbox) -> None:
        super().__init__(weights)
        self._box = box

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if not self.loads:
            self._box.put("loading")
            self._box.get("go on")
        super().load(tensors)


def start_held_up(forms: Any, folder: Path) -> None:
    """Make this process such an engine, which takes every pack as it comes."""
    held = HeldUp(engine.zeros(forms), Mailbox(folder))
    receiver = Receiver(held.load, expected=forms, staged=False, timeout_s=WAIT_S)
    engine._here |= {"engine": held, "receiver": receiver}


def step_on(policy: MegatronPolicy, number: int, loss: Any = TokenNLL) -> float:
    """One optimizer step, on rows of its own."""
    generator = torch.Generator().manual_seed(number)
    data = BatchedDataDict(
        input_ids=torch.randint(VOCAB, (GLOBAL_BATCH, 16), generator=generator),
        input_lengths=torch.full((GLOBAL_BATCH,), 16),
        token_mask=torch.ones(GLOBAL_BATCH, 16),
        sample_mask=torch.ones(GLOBAL_BATCH),
    )
    return float(policy.train(own_share(policy, data), loss())["grad_norm"])


def config_of(path: Path, section: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    times = {"refit_timeout_s": timeout_s, "refit_bucket_bytes": BUFFER}
    return policy_config(path, section, **times)


def bits_of(policy: MegatronPolicy) -> engine.Bits:
    return engine.bits({name: tensor.cpu() for name, tensor in policy.export()})


def train_meanwhile(path: Path, section: dict[str, Any], address: str, box: Path) -> dict[str, Any]:
    """A step, a detached refit, two steps while its engine is held up."""
    letters, taken = Mailbox(box), []

    def counted(take: Callable[..., Any]) -> Callable[..., Any]:
        def call(pool: Any, nbytes: int) -> Any:
            taken.append(nbytes)
            return take(pool, nbytes)

        return call

    with open_policy(config_of(path, section, WAIT_S), init_reference_model=False) as policy:
        step_on(policy, 0)
        then = bits_of(policy)
        with replaced(PinnedMemoryPool, "take", counted):
            policy.begin_refit(IpcStream(address, buffer_bytes=BUFFER))
        letters.get("loading")
        steps = [step_on(policy, number) for number in (1, 2)]
        later = bits_of(policy)
        dist.barrier()
        if policy.rank == 0:
            letters.put("go on")
        sent = policy.finish_refit()
        assert sent is not None and policy.finish_refit() is None
        return {
            "then": then,
            "later": later,
            "steps": steps,
            "sent": (sent.step, sent.total_bytes),
            "taken": sum(taken),
            "planned": policy.exporter.plan().snapshot_bytes,
        }


@pytest.fixture
def start() -> Iterator[Callable[..., OtherProcess]]:
    """`start(function, *args)`: a process that has called it, for an engine."""
    running: list[OtherProcess] = []

    def started(function: Callable[..., Any], *args: Any) -> OtherProcess:
        running.append(OtherProcess())
        running[-1].call(function, *args)
        return running[-1]

    yield started
    for process in running:
        process.kill()


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('s')}/t.sock"


def forms_of(path: Path) -> dict[str, Any]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}


def check_moment(process: OtherProcess, seen: list[dict[str, Any]]) -> None:
    """The engine has what was there when its refit was begun, after what `train_meanwhile` saw."""
    assert process.result() == 1
    held, step, mixed, loads = process.call(engine.state)
    first = seen[0]
    assert held == first["then"] and (step, mixed) == (1, False) and len(loads) > 2
    changed = {name for name, of in first["then"].items() if of != first["later"][name]}
    assert len(changed) > len(held) // 2, "a mixture would be seen"
    assert [each["sent"][0] for each in seen] == [1] * len(seen)
    assert first["sent"][1] == sum(len(content) for _, _, content in held.values())
    assert max(each["taken"] for each in seen) == first["planned"]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.daily] * (c in DAILY)) for c in CASES]
)
def test_an_engine_gets_the_weights_of_the_moment_although_training_goes_on(
    ranks: RankPool, checkpoint: Any, start: Any, address: str, tmp_path: Path, case: str
) -> None:
    family, world, section = CASES[case]
    path = checkpoint(family, **SIZES)
    process = start(start_held_up, forms_of(path), tmp_path)
    process.begin(engine.receive, address)
    seen = ranks.run(world, train_meanwhile, path, section, address, tmp_path)
    check_moment(process, seen)


def outlive(path: Path, section: dict[str, Any], address: str) -> dict[str, Any]:
    """Two steps beside an engine that dies; what becomes of the refit, and of the policy."""
    with open_policy(config_of(path, section), init_reference_model=False) as policy:
        before = time.monotonic()
        policy.begin_refit(IpcStream(address, buffer_bytes=BUFFER))
        steps = [step_on(policy, number) for number in (1, 2)]
        with pytest.raises(RefitError, match=r"^the refit of step 0 has failed: ") as error:
            policy.finish_refit()
        seconds = time.monotonic() - before
        policy.begin_refit(IpcStream(f"{address}2", buffer_bytes=BUFFER))
        policy.finish_refit()
        seen = {
            "said": str(error.value),
            "seconds": seconds,
            "steps": steps,
            "bits": bits_of(policy),
        }
    with open_policy(config_of(path, section), init_reference_model=False) as policy:
        alone = [step_on(policy, number) for number in (1, 2)]
        return seen | {"alone": (alone, bits_of(policy))}


@pytest.mark.parametrize("case", ["tp2", "pp2", "fsdp2"])
def test_an_engine_that_dies_fails_its_refit_on_all_ranks_and_nothing_else(
    ranks: RankPool, checkpoint: Any, start: Any, address: str, case: str
) -> None:
    family, world, section = CASES[case]
    path = checkpoint(family, **SIZES)
    dying = start(engine.start, forms_of(path), 2, {"staged": False})
    other = start(engine.start, forms_of(path), 0, {})
    dying.begin(engine.receive, address)
    other.begin(engine.receive, f"{address}2")
    seen = ranks.run(world, outlive, path, section, address)
    assert not dying.alive and other.result() == 2
    assert other.call(engine.state)[0] == seen[0]["bits"]
    assert len({each["said"] for each in seen}) == 1
    for each in seen:
        assert each["seconds"] < 2 * TIMEOUT_S
        assert (each["steps"], each["bits"]) == each["alone"]


def meet_everything(path: Path, section: dict[str, Any], address: str, box: Path) -> dict[str, Any]:
    """All other calls while an engine is held up."""
    letters = Mailbox(box)
    config = config_of(path, section, WAIT_S)
    with open_policy(config, init_reference_model=False) as policy:
        then = bits_of(policy)
        policy.begin_refit(IpcStream(address, buffer_bytes=BUFFER))
        letters.get("loading")
        with pytest.raises(LossError):
            step_on(policy, 1, Broken)
        step_on(policy, 2)
        policy.save_checkpoint(box / "saved", box / "saved")
        policy.export_hf(box / "exported")
        policy.memory.enter(IDLE)
        policy.memory.enter(TRAIN)
        policy.load_checkpoint(box / "saved", box / "saved")
        later = bits_of(policy)
        with ThreadPoolExecutor(1) as thread:
            # The next one waits for this one, and then for an engine of its own.
            next_one = thread.submit(policy.refit, IpcStream(f"{address}2", buffer_bytes=BUFFER))
            time.sleep(0.2)
            assert not next_one.done()
            if policy.rank == 0:
                letters.put("go on")
            steps = next_one.result().step, policy.steps
        policy.begin_refit(HfDirectory(box / "published"))
        step_on(policy, 3)
        assert policy.finish_refit() is not None
        last = bits_of(policy)
        policy.begin_refit(IpcStream(f"{address}3", buffer_bytes=BUFFER))
    # The shutdown has waited for the last one.
    return {"then": then, "later": later, "last": last, "steps": steps}


def test_saves_exports_memory_and_failed_steps_go_beside_it_and_refits_and_the_end_wait(
    ranks: RankPool, checkpoint: Any, start: Any, address: str, tmp_path: Path
) -> None:
    family, world, section = CASES["tp2"]
    path = checkpoint(family, **SIZES)
    held = start(start_held_up, forms_of(path), tmp_path)
    others = [start(engine.start, forms_of(path), 0, {"timeout_s": WAIT_S}) for _ in range(2)]
    for number, process in enumerate([held, *others], 1):
        process.begin(engine.receive, address if number == 1 else f"{address}{number}")
    first, _ = ranks.run(world, meet_everything, path, section, address, tmp_path)
    assert [process.result() for process in (held, *others)] == [0, 1, 2]
    states = [process.call(engine.state)[0] for process in (held, *others)]
    assert states == [first["then"], first["later"], first["last"]]
    assert first["steps"] == (1, 1)
    for name in ("exported", "published"):
        assert engine.bits(tensors_of(tmp_path / name)) == first["later"], name
    assert os.listdir(Path(address.removeprefix("ipc://")).parent) == []


def fail_here_and_there(path: Path, section: dict[str, Any], address: str) -> list[str]:
    """What is said of refits that fail: at their beginning, and in calls after them."""
    said = []
    with open_policy(config_of(path, section, 2.0), init_reference_model=False) as policy:
        transport = IpcStream(address, buffer_bytes=BUFFER)

        def full(take: Callable[..., Any]) -> Callable[..., Any]:
            def call(pool: Any, nbytes: int) -> Any:
                if policy.rank == 1:
                    raise MemoryError("no memory is left")
                return take(pool, nbytes)

            return call

        with replaced(PinnedMemoryPool, "take", full), pytest.raises(RefitError) as error:
            policy.begin_refit(transport)
        said.append(str(error.value))
        assert policy.finish_refit() is None

        def stray(stream: Callable[..., Any]) -> Callable[..., Any]:
            def call(exporter: Exporter, *args: Any) -> Any:
                if policy.rank == 1:
                    raise RuntimeError("this rank cannot go on")
                return stream(exporter, *args)

            return call

        for call in (policy.refit, policy.begin_refit):
            policy.begin_refit(transport)  # no engine comes
            with pytest.raises(RefitError) as error:
                call(transport)
            said.append(str(error.value))
        with replaced(Exporter, "_exchange", stray):
            policy.begin_refit(transport)
            with pytest.raises(RefitError) as error:
                policy.finish_refit()
            said.append(str(error.value))
        dist.barrier()  # the other one has waited for an engine
        policy.begin_refit(transport)
        with pytest.raises(RefitError) as error:
            policy.shutdown()
        return [*said, str(error.value)]


def test_a_failure_is_raised_on_all_ranks_by_the_next_call_that_sends_or_ends(
    ranks: RankPool, checkpoint: Any, address: str
) -> None:
    family, world, section = CASES["tp2"]
    seen = ranks.run(world, fail_here_and_there, checkpoint(family, **SIZES), section, address)
    memory, *silent, _, last = seen[0]
    assert memory == "rank 1: MemoryError: no memory is left"
    for said in (*silent, last):
        assert said.startswith("the refit of step 0 has failed: rank 0: no engine"), said
    here, there = (each.pop(3) for each in seen)
    assert here.startswith("the refit of step 0 has failed: ")
    assert there == "the refit of step 0 has failed: RuntimeError: this rank cannot go on"
    assert seen[0] == seen[1]
