"""Every transport under every layout: the engine, another process, has the trainer's export bit by
bit, before and after a training step.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.dist.layouts import of_transformers
from tests.dist.mailbox import WAIT_S, Mailbox
from tests.dist.test_export import tensors_of
from tests.dist.test_refit_export import LAYOUTS, config_of
from tests.losses import TokenNLL
from tests.oracle import make_batch
from tests.ranks import RankPool

VOCAB, ROWS, LENGTH = 256, 4, 12
BUCKET = 48 * 1024
ROUNDS = 2
COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
Ports = tuple[int, int]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tied": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
}
DENSE = ("llama tied", "qwen2", "qwen3")
OF_EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep4": (4, {"expert_model_parallel_size": 4}),
    "ep2 pp2": (4, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "ep2 tp2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}


def adam(cfg: dict[str, Any]) -> dict[str, Any]:
    if of_transformers(cfg):
        return cfg | {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}}}
    return cfg | {"optimizer": {"optimizer": "adam", "lr": 0.01, "use_distributed_optimizer": True}}


def trainer(world: int, path: Path, cfg: dict[str, Any], box: Path, ports: Ports) -> dict[str, Any]:
    """One training rank: refits over all transports, a step, and all again."""
    os.environ["WORLD_SIZE"] = str(world)
    config = config_of(path, adam(cfg)) | {
        "train_global_batch_size": ROWS,
        "refit_timeout_s": WAIT_S,
        "refit_bucket_bytes": BUCKET,
    }
    policy = MegatronPolicy(config, init_reference_model=False)
    try:
        return _refits(policy, Mailbox(box), box, ports)
    finally:
        policy.shutdown()


def _refits(policy: MegatronPolicy, mail: Mailbox, box: Path, ports: Ports) -> dict[str, Any]:
    world, place, calls = policy.topology.world_size, policy._engine.place.topology, {}
    mail.put(f"info {policy.rank}", policy.exporter.plan().info())
    groups = {
        "collective": Collective.join(policy.exporter, "127.0.0.1", ports[0], 2, timeout_s=WAIT_S),
        "by stage": Collective.join(
            policy.exporter, "127.0.0.1", ports[1], world + 1, world, timeout_s=WAIT_S
        ),
    }
    # Each rank knows both; the engines are told by the first.
    mail.put(f"secrets {policy.rank}", [group.secret for group in groups.values()])
    handles = IpcHandles(policy.exporter)
    for number in range(ROUNDS):
        policy.export_hf(box / f"export {number}")
        steps = {
            "ipc stream": lambda n=number: policy.refit(
                IpcStream(
                    {rank: f"ipc://{box}/{n}.{rank}" for rank in range(world)}, buffer_bytes=BUCKET
                )
            ),
            "ipc handles": lambda n=number: _lend(policy, handles, mail, n),
            "collective": lambda: policy.refit(groups["collective"].transport()),
            "by stage": lambda: policy.refit(groups["by stage"].transport()),
            "disk": lambda n=number: policy.refit(
                HfDirectory(box / f"disk {n}", policy.config.model_name)
            ),
        }
        for name, step in steps.items():
            before = _calls(policy, groups)
            with _counted_calls() as outside:
                step()
            calls[name, number] = _calls(policy, groups) - before, outside
            if name == "disk":
                dist.barrier()
                if policy.rank == 0:
                    mail.put(f"published {number}")
        if number + 1 < ROUNDS:
            batch = make_batch(ROWS, LENGTH, VOCAB)
            share = ROWS // policy.topology.dp
            own = policy.coords.dp * share
            policy.train(batch.slice(own, own + share), TokenNLL(), gbs=ROWS, mbs=1)
    for group in groups.values():
        group.close()
    return {
        "calls": calls,
        "bytes": policy.exporter.plan().total_bytes + _padding(policy),
        "experts": place.ep > 1,
        "groups": (place.tp > 1 or place.ep > 1) + (place.pp > 1),
        "sources": place.pp * place.ep,
    }


def _padding(policy: MegatronPolicy) -> int:
    """Bytes beside those of tensors, at most: FSDP2 splits a parameter of several HF tensors, and
    one of these can be whole on one rank, but the streams of all ranks have the same length. FSDP1
    can leave any tensor whole on one rank.
    """
    if policy.config.megatron_cfg.enabled:
        return 0
    least = 0 if policy.config.fsdp_cfg.enabled else 1
    held = policy._engine.held
    joined = {name for entry, _ in held if len(entry.hf) > least for name in entry.hf}
    sizes = (each.nbytes for each in policy.exporter.plan().tensors if each.name in joined)
    return sum(sizes) * (policy._engine.place.topology.tp - 1)


def _lend(policy: MegatronPolicy, handles: IpcHandles, mail: Mailbox, number: int) -> None:
    names = list(policy.exporter.plan().info())
    third = math.ceil(len(names) / 3)
    for part in range(3):
        exported = handles.weights(names[part * third : (part + 1) * third], policy.steps)
        mail.put(f"handles {number}.{policy.rank}.{part}", exported)
        mail.get(f"taken {number}.{policy.rank}.{part}")
    mail.put(f"manifest {number}.{policy.rank}", handles.manifest(policy.steps))
    handles.release()


def _calls(policy: MegatronPolicy, groups: dict[str, Collective]) -> int:
    """Of refits' own collectives, and of broadcasts to engines."""
    return policy.exporter.calls + sum(group.broadcasts for group in groups.values())


@contextmanager
def _counted_calls() -> Iterator[list[str]]:
    """Names of torch.distributed's collectives, as they are called within this context."""
    names = [name for name in dist.distributed_c10d.__all__ if name in COLLECTIVES]
    assert len(names) == len(COLLECTIVES)
    seen: list[str] = []

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, watched(name, getattr(dist, name)))
        yield seen


class Holder:
    """An engine's weights, by name, as they were loaded."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.loads = 0

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        names = [name for name, _ in weights]
        assert len(set(names)) == len(names)
        self.weights = {name: tensor.clone() for name, tensor in weights}


def engines(world: int, box: Path, ports: Ports) -> list[tuple[str, int, bool, int]]:
    """One engine per training rank or group, all in this process; what differed, and steps."""
    mail = Mailbox(box)
    with ThreadPoolExecutor(2 * world + 3) as threads:
        futures = [
            *(threads.submit(_stream_engine, mail, box, rank) for rank in range(world)),
            *(threads.submit(_handles_engine, mail, box, rank) for rank in range(world)),
            threads.submit(_group_engine, mail, box, ports[0], 1, 2, None),
            threads.submit(_group_engine, mail, box, ports[1], world, world + 1, world),
            threads.submit(_disk_engine, mail, box),
        ]
        for done in as_completed(futures):
            if done.exception() is not None:
                traceback.print_exception(done.exception())
                sys.stderr.flush()
                os._exit(7)  # the other engines wait for trainers that wait for this one
        return [row for future in futures for row in future.result()]


def _engine(mail: Mailbox) -> tuple[Holder, Receiver]:
    holder = Holder()
    return holder, Receiver(holder.load, expected=mail.get("info 0"), timeout_s=WAIT_S)


def _compared(
    name: str, number: int, holder: Holder, box: Path, step: int
) -> tuple[str, int, bool, int]:
    expected = tensors_of(box / f"export {number}")
    same = holder.loads == number + 1 and holder.weights.keys() == expected.keys()
    same = same and all(
        torch.equal(tensor, expected[n]) and tensor.dtype == expected[n].dtype
        for n, tensor in holder.weights.items()
    )
    return name, number, same, step


def _stream_engine(mail: Mailbox, box: Path, rank: int) -> Any:
    holder, receiver = _engine(mail)
    rows = []
    for number in range(ROUNDS):
        manifest = receiver.receive_ipc_stream(f"ipc://{box}/{number}.{rank}")
        rows.append(_compared(f"ipc stream {rank}", number, holder, box, manifest.step))
    return rows


def _handles_engine(mail: Mailbox, box: Path, rank: int) -> Any:
    holder, receiver = _engine(mail)
    rows = []
    for number in range(ROUNDS):
        for part in range(3):
            receiver.receive_ipc_handles(mail.get(f"handles {number}.{rank}.{part}"))
            mail.put(f"taken {number}.{rank}.{part}")
        manifest = receiver.finish_ipc(mail.get(f"manifest {number}.{rank}"))
        rows.append(_compared(f"ipc handles {rank}", number, holder, box, manifest.step))
    return rows


def _group_engine(
    mail: Mailbox, box: Path, port: int, rank: int, size: int, trains: int | None
) -> Any:
    holder, receiver = _engine(mail)
    secret = mail.get("secrets 0")[trains is not None]
    group = join_collective("127.0.0.1", port, rank, size, trains, timeout_s=WAIT_S, secret=secret)
    rows = []
    for number in range(ROUNDS):
        manifest = receiver.receive_collective(group)
        rows.append(_compared(f"group {trains}", number, holder, box, manifest.step))
    group.close()
    return rows


def _disk_engine(mail: Mailbox, box: Path) -> Any:
    holder, receiver = _engine(mail)
    rows = []
    for number in range(ROUNDS):
        mail.get(f"published {number}")
        manifest = receiver.receive_directory(box / f"disk {number}")
        rows.append(_compared("disk", number, holder, box, manifest.step))
    return rows


def play(world: int, path: Path, cfg: dict[str, Any], box: Path, ports: Ports) -> Any:
    """The ranks train, the one after them holds the engines."""
    if int(os.environ["RANK"]) == world:
        return engines(world, box, ports)
    return trainer(world, path, cfg, box, ports)


CELLS = [
    *(
        (model, layout)
        for model in DENSE
        for layout in ("tp2", "pp2", "tp2 pp2", "pp2 vpp2", "dp2")
    ),
    ("qwen3_moe", "tp2 pp2"),
    ("qwen3_moe", "ep4"),
    ("deepseek_v3", "ep2 tp2"),
    ("gpt_oss", "ep2 pp2"),
    *((model, "fsdp2") for model in ("qwen2", "qwen3_moe", "gpt_oss")),
    ("qwen2", "fsdp2 tp2"),
    *((model, "fsdp1") for model in ("gpt_oss", "qwen2")),
]
SWEPT = [(model, "fsdp2 tp2 x 2") for model in ("qwen2", "qwen3_moe", "gpt_oss")]


@pytest.mark.parametrize(
    ("model", "layout"),
    [*CELLS, *SWEPT],
)
def test_engines_have_the_export_bit_by_bit_over_every_transport(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, model: str, layout: str
) -> None:
    world, cfg = (LAYOUTS | OF_EXPERTS)[layout]
    family, options = MODELS[model]
    with reserved_port() as one, reserved_port() as other:
        *trained, rows = ranks.run(
            world + 1, play, world, checkpoint(family, **options), cfg, tmp_path, (one, other)
        )
    assert len(rows) == ROUNDS * (2 * world + 3)
    assert [row for row in rows if not row[2]] == []
    assert {(number, step) for _, number, _, step in rows} == {(0, 0), (1, 1)}
    first, second = (tensors_of(tmp_path / f"export {number}") for number in (0, 1))
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert all(name.endswith("e_score_correction_bias") for name in same), "nothing was trained"
    for result in trained:
        for (name, number), (calls, outside) in result["calls"].items():
            # Engines that joined are a group more; a directory is made, filled and agreed on.
            groups = result["groups"] + (name in ("collective", "by stage", "disk"))
            if name != "ipc handles":  # its calls are the caller's: three here
                rounds = math.ceil(result["bytes"] / BUCKET)
                if result["experts"]:  # a round that ends one owner's experts begins the next's
                    rounds += 1 + result["sources"]
                assert calls <= 2 + rounds * groups, (name, number)
            assert outside == [], (name, number)
