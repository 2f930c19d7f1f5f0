"""Every transport under every layout: the engine, another process, has the trainer's export bit by
bit, before and after a training step; of adapters first these alone, and all it needs to load them.
"""

from __future__ import annotations

import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file

from megatron_policy.adapters.peft_files import ADAPTER_MODEL
from megatron_policy.batch import BatchedDataDict
from megatron_policy.convert import verify
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.manifest import ServedModel
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.collective.stream import Stream
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream
from megatron_policy.refit.transports.peft import PeftDirectory
from tests.dist.layouts import of_transformers
from tests.dist.mailbox import WAIT_S, Mailbox
from tests.dist.refits import LAYOUTS, config_of
from tests.dist.test_adapter_handover import ANEW
from tests.dist.test_export import tensors_of
from tests.exact import Exact, InDouble, assert_equal, load_hf
from tests.losses import TokenNLL
from tests.oracle import hf_logprobs, make_batch
from tests.peft_models import ALPHA, RANK
from tests.ranks import RankPool
from tests.refit_engine import bits

VOCAB, ROWS, LENGTH = 256, 4, 12
BATCH = make_batch(ROWS, LENGTH, VOCAB)
TEXT = BatchedDataDict({"input_ids": BATCH["input_ids"].clamp(min=16)})
"""Without the ids of placeholders for pictures."""
BUCKET = 48 * 1024
ROUNDS = 2
COLLECTIVE = re.compile("all_|barrier|broadcast|gather|i?(recv|send)|scatter|reduce(_scatter|$)")
"""How names of torch.distributed's begin."""
OVERRIDES = {"rms_norm_eps": 0.1}
LORA = {"peft": {"enabled": True, "dim": RANK, "alpha": ALPHA, **ANEW}}
Ports = tuple[int, int]
DENSE = ("llama", "qwen2", "qwen3")
STACKS = {"gate_up_proj", "down_proj"}


def adam(cfg: dict[str, Any]) -> dict[str, Any]:
    if of_transformers(cfg):
        return cfg | {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.01}}}
    return cfg | {"optimizer": {"optimizer": "adam", "lr": 0.01, "use_distributed_optimizer": True}}


def trainer(world: int, path: Path, cfg: dict[str, Any], box: Path, ports: Ports) -> dict[str, Any]:
    """One training rank: refits over all transports, a step, and all again."""
    os.environ["WORLD_SIZE"] = str(world)
    config = config_of(path, adam(cfg)) | {
        "hf_config_overrides": OVERRIDES if "peft" in cfg else {},
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
    groups = {
        "collective": Collective.join(policy.exporter, "127.0.0.1", ports[0], 2, timeout_s=WAIT_S),
        "by stage": Collective.join(
            policy.exporter, "127.0.0.1", ports[1], world + 1, world, timeout_s=WAIT_S
        ),
    }
    # Each rank knows both; the engines are told by the first.
    mail.put(f"secrets {policy.rank}", [group.secret for group in groups.values()])
    handles = IpcHandles(policy.exporter)
    sent, chunks = {}, [0, 0]
    logprobs = policy.logprobs(TEXT)
    for number in range(ROUNDS):
        adapters = number == 0 and policy.config.megatron_cfg.peft.enabled
        plan_of = partial(policy.exporter.select(adapters=adapters).plan, bucket_bytes=BUCKET)
        mail.put(f"info {number}.{policy.rank}", plan_of().info())
        (policy.export_peft if adapters else policy.export_hf)(box / f"export {number}")
        disk = PeftDirectory(box / "disk 0")
        if not adapters:
            disk = HfDirectory(box / f"disk {number}")
        addresses = {rank: f"ipc://{box}/{number}.{rank}" for rank in range(world)}
        transports = {
            "ipc stream": IpcStream(addresses, buffer_bytes=BUCKET),
            "collective": groups["collective"].transport(),
            "by stage": groups["by stage"].transport(),
            "disk": disk,
        }
        with _counted_calls() as outside:
            _lend(policy, handles, mail, number, adapters)
        calls["ipc handles", number] = 0, outside  # how often it calls is the caller's
        for name, transport in transports.items():
            before = _calls(policy, groups)
            with _counted_calls() as outside:
                sent[name, number] = list(policy.refit(transport, adapters=adapters).tensors)
            calls[name, number] = _calls(policy, groups) - before, outside
        if not adapters:
            own = disk.plan(policy.exporter).collectives
            calls["files", number] = calls["disk", number][0] - own, []
        for at in (0, 1):
            nbytes = Stream.of(plan_of(own_stage=at == 1).tensors).nbytes
            chunks[at] += math.ceil(nbytes / BUCKET)
        dist.barrier()
        if policy.rank == 0:
            mail.put(f"published {number}")
        if number + 1 < ROUNDS:
            share = ROWS // policy.topology.dp
            own = policy.coords.dp * share
            policy.train(BATCH.slice(own, own + share), TokenNLL(), gbs=ROWS, mbs=1)
    for group in groups.values():
        group.close()
    return {
        "calls": calls,
        "sent": sent,
        "broadcasts": [group.broadcasts for group in groups.values()],
        "chunks": chunks,
        "logprobs": logprobs,
        "bytes": policy.exporter.plan().total_bytes + _padding(policy),
        "experts": place.ep > 1,
        "groups": (place.tp > 1 or place.ep > 1) + (place.pp > 1),
        "sources": place.pp * place.ep,
        "stages": place.pp,
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


def _lend(
    policy: MegatronPolicy, handles: IpcHandles, mail: Mailbox, number: int, adapters: bool
) -> None:
    names = list(policy.exporter.select(adapters=adapters).plan().info())
    third = math.ceil(len(names) / 3)
    for part in range(3):
        group = names[part * third : (part + 1) * third]
        exported = handles.weights(group, policy.steps, adapters=adapters)
        mail.put(f"handles {number}.{policy.rank}.{part}", exported)
        mail.get(f"taken {number}.{policy.rank}.{part}")
    mail.put(f"manifest {number}.{policy.rank}", handles.manifest(policy.steps))
    handles.release()


def _calls(policy: MegatronPolicy, groups: dict[str, Collective]) -> int:
    """Of refits' own collectives, and of broadcasts to engines."""
    return policy.exporter.ranks.calls + sum(group.broadcasts for group in groups.values())


@contextmanager
def _counted_calls() -> Iterator[list[str]]:
    """Names of torch.distributed's collectives, as they are called within this context."""
    names = [name for name in dist.distributed_c10d.__all__ if COLLECTIVE.match(name)]
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


class Engine:
    """Weights, by name, as they were loaded, and what was known of the model at that time."""

    def __init__(self, expected: Any) -> None:
        self.expected = expected
        self.receiver = Receiver(self._load, expected=expected, timeout_s=WAIT_S)
        self.weights: dict[str, torch.Tensor] = {}
        self.model: ServedModel | None = None
        self.loads = 0

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        names = [name for name, _ in weights]
        assert len(set(names)) == len(names)
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.model = self.receiver.model


Row = tuple[str, int, bool, int, ServedModel | None]


def engines(world: int, box: Path, ports: Ports) -> list[Row]:
    """One engine per training rank or group, all in this process; what differed, and steps."""
    mail = Mailbox(box)
    receivers = {"disk": partial(_from_disk, mail, box)}
    for rank in range(world):
        receivers[f"stream {rank}"] = partial(_from_stream, box, rank)
        receivers[f"handles {rank}"] = partial(_from_handles, mail, rank)
    with ThreadPoolExecutor(2 * world + 3) as threads:
        futures = [
            *(threads.submit(_follow, mail, box, *each) for each in receivers.items()),
            threads.submit(_follow_group, mail, box, ports[0], 1, 2, None),
            threads.submit(_follow_group, mail, box, ports[1], world, world + 1, world),
        ]
        for done in as_completed(futures):
            if done.exception() is not None:
                traceback.print_exception(done.exception())
                sys.stderr.flush()
                os._exit(7)  # the other engines wait for trainers that wait for this one
        return [row for future in futures for row in future.result()]


def exported(box: Path, number: int) -> dict[str, torch.Tensor]:
    place = box / f"export {number}"
    adapters = place / ADAPTER_MODEL
    return load_file(adapters) if adapters.exists() else tensors_of(place)


def _follow(
    mail: Mailbox, box: Path, name: str, receive: Callable[[Receiver, int], Any]
) -> list[Row]:
    """Be one engine, or two if there are adapters; whether it has what was exported, and steps."""
    engine, rows = Engine(mail.get("info 0.0")), []
    for number in range(ROUNDS):
        expected = mail.get(f"info {number}.0")
        if engine.expected != expected:
            engine = Engine(expected)
        loads = engine.loads
        step = receive(engine.receiver, number).step
        weights = exported(box, number)
        same = engine.loads == loads + 1 and bits(engine.weights) == bits(weights)
        rows.append((name, number, same, step, engine.model))
    return rows


def _from_stream(box: Path, rank: int, receiver: Receiver, number: int) -> Any:
    return receiver.receive_ipc_stream(f"ipc://{box}/{number}.{rank}")


def _from_handles(mail: Mailbox, rank: int, receiver: Receiver, number: int) -> Any:
    for part in range(3):
        receiver.receive_ipc_handles(mail.get(f"handles {number}.{rank}.{part}"))
        mail.put(f"taken {number}.{rank}.{part}")
    return receiver.finish_ipc(mail.get(f"manifest {number}.{rank}"))


def _from_disk(mail: Mailbox, box: Path, receiver: Receiver, number: int) -> Any:
    mail.get(f"published {number}")
    return receiver.receive_directory(box / f"disk {number}")


def _follow_group(
    mail: Mailbox, box: Path, port: int, rank: int, size: int, trains: int | None
) -> Any:
    secret = mail.get("secrets 0")[trains is not None]
    group = join_collective("127.0.0.1", port, rank, size, trains, timeout_s=WAIT_S, secret=secret)
    rows = _follow(mail, box, f"group {trains}", lambda own, _: own.receive_collective(group))
    group.close()
    return rows


def play(world: int, path: Path, cfg: dict[str, Any], box: Path, ports: Ports) -> Any:
    """The ranks train, the one after them holds the engines."""
    if int(os.environ["RANK"]) == world:
        return engines(world, box, ports)
    return trainer(world, path, cfg, box, ports)


CELLS = [
    *((model, layout) for model in DENSE for layout in ("tp2", "pp2 vpp2", "dp2")),
    *((model, "tp2 pp2") for model in ("qwen3", "qwen3_moe", "mixtral")),
    ("qwen2", "pp2"),
    ("qwen2", "tp2 cp2"),
    ("qwen3_moe", "ep4"),
    ("deepseek_v3", "ep2 tp2"),
    ("gpt_oss", "ep2 pp2"),
    ("apertus", "pp2 vpp2"),  # which has tensors without dimensions
    ("qwen2_5_vl", "tp2"),
    ("qwen3_vl", "pp2"),
    ("qwen3_vl_moe", "ep2 tp2"),
    *((model, layout) for model in ("qwen2", "gpt_oss") for layout in ("fsdp1", "fsdp2")),
    ("qwen3_moe", "fsdp2"),
    ("qwen2", "fsdp2 tp2"),
    *((model, "fsdp2 tp2 x 2") for model in ("qwen2", "qwen3_moe", "gpt_oss")),
]


@pytest.mark.parametrize(
    ("model", "layout", "adapters"),
    [
        pytest.param("llama", "tp2 pp2", False, marks=pytest.mark.daily),
        *((*cell, False) for cell in CELLS),
        pytest.param("qwen2", "tp2", True, marks=pytest.mark.daily),
        ("qwen2", "pp2", True),
        ("qwen3_moe", "ep2", True),
    ],
)
def test_engines_have_the_export_bit_by_bit_over_every_transport(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, model: str, layout: str, adapters: bool
) -> None:
    (world, cfg), path = LAYOUTS[layout], checkpoint(model, tied=model == "llama")
    cfg = cfg | LORA if adapters else cfg
    with reserved_port() as one, reserved_port() as other:
        *trained, rows = ranks.run(world + 1, play, world, path, cfg, tmp_path, (one, other))
    assert len(rows) == ROUNDS * (2 * world + 3)
    assert [row for row in rows if not row[2]] == []
    assert {(number, step) for _, number, _, step, _ in rows} == {(0, 0), (1, 1)}
    names = [exported(tmp_path, number).keys() for number in range(ROUNDS)]
    for (name, number), sent in trained[0]["sent"].items():
        if name != "ipc stream":  # which has an engine for each rank
            others = (n for each in trained[1:] for n in each["sent"][name, number])
            assert sorted([*sent, *others]) == sorted(names[number]), name
    for at, senders in enumerate((1, trained[0]["stages"])):
        counts = [(each["broadcasts"][at], each["chunks"][at]) for each in trained]
        assert all(broadcasts in (0, chunks) for broadcasts, chunks in counts)
        assert sum(broadcasts > 0 for broadcasts, _ in counts) == senders
    for result in trained:
        for (name, number), (calls, outside) in result["calls"].items():
            # Engines that joined are a group more; a directory is made, filled and agreed on.
            groups = result["groups"] + (name in ("collective", "by stage", "disk"))
            rounds = math.ceil(result["bytes"] / BUCKET)
            if result["experts"]:  # a round that ends one owner's experts begins the next's
                rounds += 1 + result["sources"]
            allowed = 3 if name == "files" else 2 + rounds * groups
            assert calls <= allowed, (name, number)
            assert outside == [], (name, number)
    if adapters:
        assert_loadable(path, tmp_path, rows, trained[0]["logprobs"])
    else:
        assert_trained(path, tmp_path)
        assert all(served == ServedModel() for *_, served in rows)


def assert_trained(path: Path, box: Path) -> None:
    first, second = (exported(box, number) for number in (0, 1))
    assert bits(first) == bits(tensors_of(path)), "what was not trained comes back bit-equal"
    found = verify(box / "disk 0", path)
    assert found.equal and found.has_digests == (True, False)
    same = {name for name in first if torch.equal(first[name], second[name])}
    same -= {name for name in same if "visual." in name}  # no row has a picture
    constant = ("e_score_correction_bias", "act_fn.beta", "act_fn.eps")
    assert all(name.endswith(constant) for name in same), "nothing was trained"


def assert_loadable(path: Path, box: Path, rows: list[Row], logprobs: torch.Tensor) -> None:
    """Engines know the overridden fields, and of adapters all that PEFT needs, before they load."""
    for _, number, _, _, served in rows:
        assert served is not None and served.hf_config_overrides == OVERRIDES
        assert (served.adapters is None) == (number == 1)
    served_by = {name: served.adapters for name, number, _, _, served in rows if number == 0}
    of_files = served_by.pop("disk")
    adapters, *others = served_by.values()
    assert all(each == adapters for each in others)
    tensors = exported(box, 0)
    modules = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    assert adapters["lora_alpha"] / adapters["r"] == ALPHA / RANK
    assert set(adapters["target_modules"]) == modules
    assert adapters["base_model_name_or_path"] == str(path)
    if any(".experts." in name for name in modules):  # PEFT adapts their stacks
        assert {name.rpartition(".")[2] for name in of_files["target_parameters"]} >= STACKS
        return
    assert of_files == adapters

    def read(dtype: torch.dtype) -> torch.Tensor:
        base = load_hf(path, dtype)
        for norm in base.modules():
            if hasattr(norm, "variance_epsilon"):
                norm.variance_epsilon = OVERRIDES["rms_norm_eps"]
        adapted: Any = get_peft_model(base, LoraConfig(**adapters)).to(dtype)
        set_peft_model_state_dict(adapted, tensors)
        return hf_logprobs(adapted, TEXT["input_ids"]).detach()

    rounded = read(torch.float32)
    with InDouble():
        exact = Exact.between(rounded, read(torch.float64))
    assert_equal("logprobs of peft", logprobs[:, 1:], exact)
