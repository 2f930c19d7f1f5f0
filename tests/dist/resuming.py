"""What ranks do in the tests of checkpoints: train, save, load, and tell all that they hold."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import resource
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_policy.batch import BatchedDataDict
from megatron_policy.engines.hugging_face.table import local_part
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LENGTH, VOCAB, of_transformers

TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
TRACKER = "latest_checkpointed_iteration.txt"
NEVER_CONSTANT = {
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3},
    "scheduler": {
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 3,
        "lr_decay_iters": 7,
        "lr_warmup_init": 1e-3,
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.7,
        "weight_decay_incr_style": "linear",
    },
}
"""Learning rate and weight decay differ at every step: a counter that is lost is noticed."""
NEVER_CONSTANT_FSDP2 = [
    {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1}},
    {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": {"T_max": 7}},
    {"milestones": [2]},
]
"""A learning rate that differs at every step, through the end of the first schedule."""
CONSTANT = {
    "optimizer": {"lr": oracle.LR, "min_lr": oracle.LR},
    "scheduler": {
        "lr_decay_style": "constant",
        "lr_warmup_iters": 0,
        "lr_warmup_init": oracle.LR,
        "start_weight_decay": oracle.WEIGHT_DECAY,
        "end_weight_decay": oracle.WEIGHT_DECAY,
        "weight_decay_incr_style": "constant",
    },
}
"""What both engines have alike."""
HOST_DATA = {"consumed_samples": 17, "epoch": {"number": 0, "order": [2, 0, 1]}, "name": "né"}


def merged(*sections: dict[str, Any]) -> dict[str, Any]:
    """Sections of megatron_cfg, one over the other, one level deep."""
    result: dict[str, Any] = {}
    for section in sections:
        for key, value in section.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = result[key] | value if both else value
    return result


def config_of(path: Path | str, *megatron: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A policy whose schedule moves at every step, and which can generate."""
    settings: dict[str, Any] = {"generation": {"max_new_tokens": 5}, "checkpoint_timeout_s": 30.0}
    section = merged(NEVER_CONSTANT, *megatron)
    if of_transformers(section) and section["scheduler"] == NEVER_CONSTANT["scheduler"]:
        settings["scheduler"] = NEVER_CONSTANT_FSDP2
    lr = section["optimizer"]["lr"]
    return policy_config(path, section, lr, **(settings | top))


def train(policy: MegatronPolicy, numbers: list[int] | range) -> list[dict[str, Any]]:
    """One step for each number; what came of it, bit by bit."""
    results = []
    for number in numbers:
        data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=number))
        result = policy.train(data, LOSSES["token"](), mbs=2)
        metrics = result["microbatch_metrics"]
        results.append(
            {
                "loss": result["loss"].clone(),
                "grad_norm": torch.as_tensor(result["grad_norm"]).clone(),
                "lr": metrics["lr"][0],
                "wd": metrics["wd"][0],
                "loss_scale": result.get("loss_scale"),
            }
        )
    return results


def prompts() -> BatchedDataDict:
    tokens = torch.randint(1, VOCAB, (3, 6), generator=torch.Generator().manual_seed(5))
    return BatchedDataDict({"input_ids": tokens, "input_lengths": torch.tensor([6, 6, 6])})


def drawn(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """What this rank draws next, from each of its sources of random numbers; draws it."""
    return {
        "continuation": policy.generate(prompts()).tokens_BT,
        "torch": torch.rand(3),
        "numpy": torch.tensor(numpy.random.rand(3)),
        "python": torch.tensor([random.random() for _ in range(3)], dtype=torch.float64),
    }


def weights_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def optimizers(policy: MegatronPolicy) -> list[torch.optim.Optimizer]:
    """Torch's own, in whatever the engine wraps them."""
    whole = policy._engine.trainable.optimizer
    if isinstance(whole, torch.optim.Optimizer):
        return [whole]
    parts = getattr(whole, "chained_optimizers", [whole])
    return [part.optimizer for part in parts if part.optimizer is not None]


def modules(policy: MegatronPolicy) -> list[torch.nn.Module]:
    """The model of this rank, in as many parts as it has."""
    if not policy.config.megatron_cfg.enabled:
        return [policy._engine.decoder]
    return list(policy._engine.pipeline.models)


def optimizer_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """This rank's main parameters and moments, and the optimizer's own count of steps."""
    held: dict[str, torch.Tensor] = {}
    for number, each in enumerate(optimizers(policy)):
        for at, group in enumerate(each.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = f"{number}.{at}.{index}"
                held[name] = local_part(parameter).clone()
                for kind, value in each.state[parameter].items():
                    held[f"{name}.{kind}"] = local_part(torch.as_tensor(value)).clone()
            held[f"{number}.{at}.step"] = torch.as_tensor(group.get("step", -1))
    return held


def random_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """The state of each source of random numbers; draws nothing."""
    return {
        "sampling": policy._continue._generator.get_state(),
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor(numpy.random.get_state()[1].astype("int64")),
        "python": torch.tensor(random.getstate()[1]),
    }


def everything_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """All that this rank would continue with."""
    found = {f"weight {name}": p for name, p in weights_of(policy).items()}
    if policy._engine.trainable is not None:
        found |= {f"optimizer {name}": p for name, p in optimizer_of(policy).items()}
        found |= {
            f"schedule {name}": torch.tensor(float(value), dtype=torch.float64)
            for name, value in policy._engine.trainable.schedule_state().items()
            if not isinstance(value, str)
        }
        for number, each in enumerate(optimizers(policy)):
            for at, group in enumerate(each.param_groups):
                rates = [float(group["lr"]), float(group["weight_decay"])]
                found[f"rates {number}.{at}"] = torch.tensor(rates, dtype=torch.float64)
    found["steps"] = torch.tensor([policy.steps])
    return found | {f"random {name}": p for name, p in random_of(policy).items()}


def prints(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A fingerprint of each: dtype, shape and every bit, so that -0 and NaN are themselves."""
    return {name: _print(tensor) for name, tensor in tensors.items()}


def _print(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of what the two do not both have alike."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def iteration(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def read_disk(root: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an `iter_*` directory by its key, as torch itself reads them."""
    reader = dcp.FileSystemReader(root)
    held = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(found.size, dtype=found.properties.dtype)
        for key, found in held.items()
        if isinstance(found, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def leftovers(root: Path) -> list[str]:
    """Names below `root` that are neither checkpoints nor what names the last one."""
    known = ("iter_*", TRACKER)
    return sorted(p.name for p in root.iterdir() if not any(p.match(name) for name in known))


def paths(root: Path) -> dict[str, Path]:
    """As a host names them."""
    return {"weights_path": root / "weights", "optimizer_path": root / "optimizer"}


@contextmanager
def resumed(config: dict[str, Any], root: Path, **kwargs: Any) -> Iterator[MegatronPolicy]:
    """A policy that starts from the last checkpoint below `root`."""
    with open_policy(config, tokenizer=TOKENIZER, **paths(root), **kwargs) as policy:
        yield policy


@contextmanager
def logged(module: ModuleType) -> Iterator[list[str]]:
    """What a module logs in this process, also what is only said if asked for."""
    words: list[str] = []
    log, handler = logging.getLogger(module.__name__), logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield words
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within this context `module.name` is what `make` makes of it, in this process."""
    original = getattr(module, name)
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def large_files_forbidden(forbidden: bool) -> Iterator[None]:
    """Within this context files of this process cannot grow."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if forbidden else unlimited, unlimited))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def writers_held() -> Iterator[threading.Event]:
    """No file of this process is complete before the event is set, or the body has ended."""
    allowed = threading.Event()

    def late(fsync: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            assert allowed.wait(60), "the training waits for the writer"
            fsync(fd)

        return call

    with replaced(os, "fsync", late):
        try:
            yield allowed
        finally:
            allowed.set()
