"""An engine of vLLM's with our methods for verl's rollouts, which gets sets of weights from verl's
own sender.

`python -m tests.hosts.real.verl.sent_to_vllm whole|adapters CHECKPOINT FOLDER` prints, in JSON, how
far it is from transformers after each, and what it refuses.
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
from verl.workers.rollout.vllm_rollout.utils import (
    VLLM_LORA_INT_ID,
    VLLM_LORA_NAME,
    VLLM_LORA_PATH,
)
from vllm import LLM
from vllm.lora.request import LoRARequest

from examples.verl.laptop import ROLLOUT_WORKER
from megatron_policy.inference.vllm.engine import VllmEngine

RANK, ALPHA = 4, 8
ADAPTED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj")
"""Some of what vLLM computes together has no adapters (`v_proj`, `up_proj`)."""
PEFT = {"r": RANK, "lora_alpha": ALPHA, "target_modules": [n.split(".")[1] for n in ADAPTED]}
ROWS = [[5, 9, 23, 7, 40, 2], [11, 30, 8, 60, 1, 3]]
Weights = dict[str, torch.Tensor]


def send(llm: LLM, weights: Weights, **told: Any) -> str:
    """One set by verl's sender, in buckets of a megabyte, with what verl tells of it; the error of
    vLLM's worker, or nothing. The sender has returned in any case.
    """
    address = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
    sender = BucketedWeightSender(zmq_handle=address, bucket_size_mb=1, use_shm=True)
    sending = sender.async_send_weights(iter(weights.items()))
    thread = threading.Thread(target=lambda: asyncio.run(sending), daemon=True)
    thread.start()
    try:
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True, **told})
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        thread.join(60)
        assert not thread.is_alive(), "verl's sender still waits"


@torch.no_grad()
def distance(engine: VllmEngine, model: Path) -> float:
    """The largest difference of log-probabilities from those of transformers."""
    rows = torch.tensor(ROWS)
    logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(rows).logits
    wanted = logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    return (torch.tensor(engine.logprobs(ROWS)) - wanted).abs().max().item()


def changed(model: Path, changes: Weights, path: Path) -> Path:
    """The model with something added to tensors."""
    shutil.copytree(model, path)
    weights = load_file(model / "model.safetensors")
    other = {name: each + changes.get(name, 0.0) for name, each in weights.items()}
    save_file(other, path / "model.safetensors", {"format": "pt"})
    return path


def moved(model: Path, path: Path) -> Path:
    """The model with every tensor changed."""
    generator = torch.Generator().manual_seed(1)
    weights = load_file(model / "model.safetensors")
    noise = {k: 0.05 * torch.randn(v.shape, generator=generator) for k, v in weights.items()}
    return changed(model, noise, path)


def adapted(model: Path, path: Path, seed: int) -> tuple[Weights, Path]:
    """Adapters by PEFT's names, and the model merged with them."""
    generator = torch.Generator().manual_seed(seed)
    adapters: Weights = {}
    changes: Weights = {}
    for name, each in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(ADAPTED)):
            continue
        down = 0.1 * torch.randn((RANK, each.shape[1]), generator=generator)
        up = 0.1 * torch.randn((each.shape[0], RANK), generator=generator)
        adapters[f"base_model.model.{module}.lora_A.weight"] = down
        adapters[f"base_model.model.{module}.lora_B.weight"] = up
        changes[name] = ALPHA / RANK * up @ down
    return adapters, changed(model, changes, path)


def sent_whole(engine: VllmEngine, model: Path, folder: Path) -> dict[str, Any]:
    """Two whole sets, and what is refused between the second and the first again."""
    weights, other = load_file(model / "model.safetensors"), moved(model, folder / "moved")
    new = load_file(other / "model.safetensors")
    partial = dict(list(new.items())[:-1])
    found: dict[str, Any] = {"of no weights": distance(engine, model)}
    for name, sent, like in (("first", weights, model), ("second", new, other)):
        assert send(engine.llm, sent) == ""
        found[name] = distance(engine, like)
    found["apart"] = distance(engine, model)
    found["incomplete"] = send(engine.llm, partial)
    found["unknown"] = send(engine.llm, {**new, "model.nothing.weight": torch.zeros(2)})
    assert send(engine.llm, weights) == ""
    return found | {"after": distance(engine, model)}


def sent_adapters(engine: VllmEngine, model: Path, folder: Path) -> dict[str, Any]:
    """The base, two sets of adapters, and what is refused between the second and the first again.
    Requests name the adapters as verl's do.
    """
    found: dict[str, Any] = {"of no weights": distance(engine, model)}
    whole = load_file(model / "model.safetensors")
    assert send(engine.llm, whole, peft_config=PEFT, base_sync_done=False) == ""
    found["base"] = distance(engine, model)
    engine._adapters = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)
    sets = [adapted(model, folder / f"adapted-{seed}", seed) for seed in (1, 2)]

    def hand_over(adapters: Weights, peft: dict[str, Any] = PEFT) -> str:
        said = send(engine.llm, adapters, peft_config=peft, base_sync_done=True)
        engine.forget_cached()  # as verl does
        return said

    for name, (adapters, like) in zip(("first", "second"), sets, strict=True):
        assert hand_over(adapters) == ""
        found[name] = distance(engine, like)
    found["apart"] = distance(engine, sets[0][1])
    elsewhere = {name.replace("q_proj", "nothing"): each for name, each in sets[0][0].items()}
    found["unknown"] = hand_over(elsewhere)
    found["too large"] = hand_over(sets[0][0], PEFT | {"r": 16})
    assert hand_over(sets[0][0]) == ""
    return found | {"after": distance(engine, sets[0][1])}


def main(kind: str, model: Path, folder: Path) -> dict[str, Any]:
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
        **({"enable_lora": True, "max_loras": 1, "max_lora_rank": 8} if kind == "adapters" else {}),
    )
    sent = sent_adapters if kind == "adapters" else sent_whole
    return sent(VllmEngine(llm), model, folder)


if __name__ == "__main__":
    print("found", json.dumps(main(sys.argv[1], *map(Path, sys.argv[2:]))), flush=True)
