"""A policy that trains, and an engine that it hands its weights to: what ranks run, over every
transport that reaches another process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.delta_stream import DeltaStream
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream
from megatron_policy.refit.transports.peft import PeftDirectory
from tests.dist.cases import policy_config
from tests.dist.refits import LAYOUTS as OF_REFITS
from tests.losses import TokenNLL
from tests.vllm.engines import EngineCaller

VOCAB, LENGTH, NEW, ROWS = 256, 16, 12, 4
PROMPTS = [[5, 6, 7, 8], [11, 200, 3, 99], [42, 43, 17, 0]]
FIXED = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(5)).tolist()
SIZES = {"hidden": 128, "layers": 2}
"""vLLM's attention on CPUs wants heads of 32 or more."""

BUFFER = 64 * 1024
"""Less than a layer: its tensors come in several packs."""

TIMEOUT_S = 60.0
TIMES = {"refit_timeout_s": TIMEOUT_S, "refit_bucket_bytes": BUFFER}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 48, "logprob_mb_tokens": 48}}
PEFT = {"enabled": True, "dim": 4, "alpha": 6.0}

MOST = ["model.embed_tokens.*", "model.layers.0.*", "lm_head.*"]
"""What is frozen where less than half of the weights is to change."""

FROZEN = {"optimizer": {"param_groups": [{"names": MOST, "freeze": True}]}}

LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "tp2": (2, "qwen2", OF_REFITS["tp2"][1], {}),
    "pp2": (2, "qwen2", OF_REFITS["pp2"][1], {}),
    "ep2": (2, "qwen3_moe", OF_REFITS["ep2"][1], {}),
    "fsdp2": (2, "qwen2", OF_REFITS["fsdp2"][1], {}),
    "packed": (2, "qwen2", {}, PACKED),
    "frozen": (2, "qwen2", OF_REFITS["tp2"][1] | FROZEN, {}),
}
"""The number of ranks, the family, and its sections of the configuration."""


@dataclass
class Handed:
    """What the engine computes after one refit, and what the policy does."""

    transport: str
    exported: Path
    """The same weights, for transformers."""
    said: tuple[int, tuple[int | None, bool]]
    """The step that the refit returned, and the engine's state."""
    rows: list[list[int]]
    """The engine's own samples after `PROMPTS`, then the fixed rows."""
    policy: torch.Tensor
    """The policy's log-probabilities of all tokens of `rows` but their first."""
    scored: torch.Tensor
    """The engine's."""
    drawn: torch.Tensor
    """The engine's of the tokens that it has sampled, as it said while it did."""
    greedy: list[list[int]]


@dataclass
class Session:
    """One policy and one engine with so many workers, on each of the policy's ranks; the engine is
    called by rank 0.
    """

    policy: MegatronPolicy
    engine: EngineCaller | None
    workers: int
    folder: Path
    group: Collective | None = None
    handles: IpcHandles | None = None
    refits: int = 0
    step: int = field(default=0)

    def train(self) -> None:
        """One step on rows of several lengths, of which each data-parallel rank has its share."""
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        tokens = torch.randint(VOCAB, (ROWS, 24), generator=generator)
        lengths = torch.tensor([24, 9, 15, 20])
        mask = (torch.arange(24) < lengths[:, None]).float()
        batch = BatchedDataDict(
            input_ids=tokens,
            input_lengths=lengths,
            token_mask=mask,
            sample_mask=torch.ones(ROWS),
        )
        shares = batch.shard_by_batch_size(self.policy.topology.dp, batch_size=ROWS)
        self.policy.train(shares[self.policy.coords.dp], TokenNLL())

    def prepare(self, staged: bool, base: bool = False) -> None:
        """Let the engine expect this policy's weights; give it those under adapters, which change
        nothing before the first step, as its own can be of another policy.
        """
        self.call("prepare", self.policy.exporter.plan().info(), TIMEOUT_S, staged)
        if base:
            by_stream(self)

    def hand_over(self, transport: str) -> Any:
        """One refit; rank 0's result is what the engine returned."""
        self.refits += 1
        return TRANSPORTS[transport](self)

    def call(self, method: str, *arguments: Any) -> Any:
        """The engine's answer, on rank 0."""
        return None if self.engine is None else self.engine.call(method, *arguments)

    def begin(self, method: str, *arguments: Any, **named: Any) -> None:
        """Let the engine begin; `result` follows."""
        if self.engine is not None:
            self.engine.begin(method, *arguments, **named)

    def result(self) -> Any:
        """What the engine has returned, on rank 0."""
        return None if self.engine is None else self.engine.result()

    def look(self, transport: str, returned: Any) -> Handed | None:
        """What both compute now; None on other ranks."""
        exported = self.folder / f"exported-{self.refits}"
        self.policy.export_hf(exported)
        sampled: list[Any] = [None]
        if self.engine is not None:
            sampled = [self.engine.call("sample", PROMPTS, NEW, temperature=1.0, seed=3)]
        dist.broadcast_object_list(sampled)
        rows = [p + tokens for p, (tokens, _) in zip(PROMPTS, sampled[0], strict=True)] + FIXED
        own = self.policy.logprobs(
            BatchedDataDict(
                input_ids=torch.tensor(rows), input_lengths=torch.full((len(rows),), LENGTH)
            )
        )
        if self.engine is None:
            return None
        return Handed(
            transport,
            exported,
            (returned, self.engine.call("state")),
            rows,
            own[:, 1:].cpu(),
            torch.tensor(self.engine.call("logprobs", rows)),
            torch.tensor([logprobs for _, logprobs in sampled[0]]),
            [t for t, _ in self.engine.call("sample", PROMPTS, NEW, temperature=0.0)],
        )

    def close(self) -> None:
        """Let go of what was exported, and of the group."""
        if self.handles is not None:
            self.handles.release()
        if self.group is not None:
            dist.barrier()
            self.group.close()


def by_stream(session: Session) -> Any:
    """A pack after the other; each of several workers from a rank of its own."""
    session.policy.refit(begin_stream(session))
    return session.result()


def by_delta_stream(session: Session) -> Any:
    """What has changed since what the engine has staged, by a stream; all weights at first."""
    sent = session.policy.refit(DeltaStream(begin_stream(session)))
    if session.engine is not None:  # rank 0, which sends in all cells
        assert bool(sent.changed_bytes) == (session.refits > 1), sent.changed_bytes
    return session.result()


def begin_stream(session: Session) -> IpcStream:
    """Let the engine receive, and what reaches it."""
    addresses = [f"ipc://{session.folder}/{rank}" for rank in range(session.workers)]
    session.begin("receive_stream", addresses)
    return IpcStream(dict(enumerate(addresses)), BUFFER)


def by_handles(session: Session) -> Any:
    """Some names at a time; each of several workers takes a rank's."""
    if session.handles is None:
        session.handles = IpcHandles(session.policy.exporter)
    names = [tensor.name for tensor in session.policy.exporter.plan().tensors]
    for first in range(0, len(names), 7):
        own = session.handles.weights(names[first : first + 7], session.step)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        united = {device: of for rank in every[: session.workers] for device, of in rank.items()}
        session.call("receive_handles", united)
        dist.barrier()  # the engine has read it
    manifest = session.handles.manifest(session.step)
    return session.call("finish_handles", manifest)


def by_group(session: Session) -> Any:
    """Broadcasts to all workers: of rank 0, or of each stage's first."""
    if session.group is None:
        trainers = dist.get_world_size() if session.policy.exporter.topology.pp > 1 else 1
        sizes = (trainers + session.workers, trainers if trainers > 1 else None)
        port: list[Any] = [None]
        if session.engine is not None:
            with reserved_port() as free:
                port = [free]
        dist.broadcast_object_list(port)
        session.group = Collective.join(session.policy.exporter, "127.0.0.1", port[0], *sizes)
        session.call("join", trainers, "127.0.0.1", port[0], *sizes, session.group.secret)
    session.begin("receive_group")
    session.policy.refit(session.group.transport(BUFFER))
    return session.result()


def by_directory(session: Session) -> Any:
    """A checkpoint that all workers read."""
    path = session.folder / "published"
    session.policy.refit(HfDirectory(path, session.policy.config.model_name, overwrite=True))
    return session.call("receive_directory", str(path))


def by_deltas(session: Session) -> Any:
    """What has changed, of which all workers read what each rank has written. The engine waits for
    the second of them.
    """
    path, waits = session.folder / "chain", session.refits == 2
    if waits:
        session.begin("receive_deltas", str(path), wait=True)
    session.policy.refit(DeltaDirectory(path))
    return session.result() if waits else session.call("receive_deltas", str(path))


def by_adapters(session: Session) -> Any:
    """Adapters alone, through vLLM's own loader of them."""
    path = session.folder / "adapters"
    session.policy.refit(PeftDirectory(path, overwrite=True), adapters=True)
    return session.call("receive_adapters", str(path))


TRANSPORTS: dict[str, Callable[[Session], Any]] = {
    "stream": by_stream,
    "handles": by_handles,
    "collective": by_group,
    "directory": by_directory,
    "deltas": by_deltas,
    "delta stream": by_delta_stream,
    "adapters": by_adapters,
}


def make_config(layout: str, path: Path, *, adapters: bool = False) -> dict[str, Any]:
    """The policy's; with adapters on attention alone, which every engine has."""
    _, _, section, top = LAYOUTS[layout]
    if adapters:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        section = {**section, "peft": {**PEFT, "target_modules": targets}}
    sizes = {"train_global_batch_size": ROWS, "max_total_sequence_length": 32}
    return policy_config(path, section, **sizes, **TIMES, **top)


def follow(
    address: str,
    layout: str,
    path: Path,
    transports: list[str],
    workers: int,
    folder: Path,
    staged: bool,
) -> list[Handed]:
    """Train, hand over and look, once for each transport. Rank 0 has seen it."""
    adapters = "adapters" in transports
    policy = MegatronPolicy(
        make_config(layout, path, adapters=adapters), init_reference_model=False
    )
    seen = []
    try:
        with EngineCaller(address) if policy.rank == 0 else nullcontext() as engine:
            session = Session(policy, engine, workers, folder)
            session.prepare(staged, base=adapters)
            try:
                for transport in transports:
                    session.train()
                    seen.append(session.look(transport, session.hand_over(transport)))
            finally:
                session.close()
    finally:
        policy.shutdown()
    return [handed for handed in seen if handed is not None]
