"""An engine of vLLM's with our methods for verl's rollouts, which gets sets of weights from verl's
own sender.

`python -m tests.hosts.real.verl.sent_to_vllm CHECKPOINT FOLDER` prints, in JSON, how far it is from
transformers after each, and what it refuses.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from vllm import LLM

from examples.verl.laptop import ROLLOUT_WORKER
from megatron_policy.inference.vllm.engine import VllmEngine

ROWS = [[5, 9, 23, 7, 40, 2], [11, 30, 8, 60, 1, 3]]
Weights = dict[str, torch.Tensor]


def send(llm: LLM, weights: Weights) -> str:
    """One set by verl's sender, in buckets of a megabyte; the error of vLLM's worker, or nothing.
    The sender has returned in any case.
    """
    address = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
    sender = BucketedWeightSender(zmq_handle=address, bucket_size_mb=1, use_shm=True)
    sending = sender.async_send_weights(iter(weights.items()))
    thread = threading.Thread(target=lambda: asyncio.run(sending), daemon=True)
    thread.start()
    try:
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        thread.join(60)
        assert not thread.is_alive(), "verl's sender still waits"


@torch.no_grad()
def distance(llm: LLM, model: Path) -> float:
    """The largest difference of log-probabilities from those of transformers."""
    rows = torch.tensor(ROWS)
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(rows).logits
    wanted = logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    return (torch.tensor(VllmEngine(llm).logprobs(ROWS)) - wanted).abs().max().item()


def moved(model: Path, weights: Weights, path: Path) -> Path:
    """A model whose every tensor differs from `weights` of `model`."""
    shutil.copytree(model, path)
    generator = torch.Generator().manual_seed(1)
    noise = {k: 0.05 * torch.randn(v.shape, generator=generator) for k, v in weights.items()}
    other = {name: each + noise[name] for name, each in weights.items()}
    save_file(other, path / "model.safetensors", {"format": "pt"})
    return path


def main(model: Path, folder: Path) -> dict[str, Any]:
    os.environ["VERL_RAY_JOB_ID"] = f"tests{os.getpid()}"
    llm = LLM(
        str(model),
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        max_model_len=64,
        skip_tokenizer_init=True,
        worker_extension_cls=ROLLOUT_WORKER,
    )
    weights = load_file(model / "model.safetensors")
    other = moved(model, weights, folder / "moved")
    new = load_file(other / "model.safetensors")
    partial = dict(list(new.items())[:-1])
    found: dict[str, Any] = {"of no weights": distance(llm, model)}
    for name, sent, like in (("first", weights, model), ("second", new, other)):
        assert send(llm, sent) == ""
        found[name] = distance(llm, like)
    found["apart"] = distance(llm, model)
    found["incomplete"] = send(llm, partial)
    found["unknown"] = send(llm, {**new, "model.nothing.weight": torch.zeros(2)})
    assert send(llm, weights) == ""
    found["after"] = distance(llm, model)
    return found


if __name__ == "__main__":
    print("found", json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))), flush=True)
