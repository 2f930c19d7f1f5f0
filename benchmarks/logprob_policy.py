"""Peak memory of log-probabilities of a packed policy: `python -m benchmarks.logprob_policy
CHECKPOINT CHUNK RANKS`.

Starts RANKS context-parallel ranks, each of which computes as many tokens as logprob_once.py.
Prints the most CPU seconds of a rank, and the most bytes beyond the loaded policy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.logprob_once import READ, memory, start_of_peak
from megatron_policy.batch import BatchedDataDict
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.policy import MegatronPolicy

# Per rank; uneven, and multiples of 4, so that two ranks need no padding.
LENGTHS = (1500, 1000, 800, 500, 248, 48)
assert sum(LENGTHS) == READ


def measure(path: str, chunk: int, ranks: int) -> dict[str, Any]:
    """One pass over a batch that fills one packed row."""
    policy = MegatronPolicy(
        _config(path, chunk, ranks), init_optimizer=False, init_reference_model=False
    )
    policy.logprobs(_batch((4 * ranks,)))  # warm-up: loads the code and touches its pages
    data = _batch(LENGTHS * ranks)
    before = start_of_peak()
    started = time.process_time()
    found_BS = policy.logprobs(data)
    seconds = time.process_time() - started
    if int((found_BS != 0).sum()) != ranks * (READ - len(LENGTHS)):
        raise RuntimeError("not every token but the first of each sequence has a log-probability")
    sample = found_BS[0, : LENGTHS[0]].tolist()
    peak = memory("VmHWM") - before
    policy.shutdown()
    return {"cpu_s": seconds, "peak_bytes": peak, "samples": {"logprobs": sample}}


def start(path: str, chunk: int, ranks: int) -> dict[str, Any]:
    """Run `measure` on every rank; RuntimeError if one of them fails."""
    numbers = (str(chunk), str(ranks))
    with reserved_port() as port:
        place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.logprob_policy", path, *numbers, "a rank"],
                env=os.environ | place | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise RuntimeError(f"a rank ended with {[child.returncode for child in children]}")
    found = [json.loads(output.splitlines()[-1]) for output in said]
    most = {key: max(result[key] for result in found) for key in ("cpu_s", "peak_bytes")}
    return found[0] | most


def _config(path: str, chunk: int, ranks: int) -> dict[str, Any]:
    return {
        "model_name": path,
        "precision": "bfloat16",
        "train_global_batch_size": 1,
        "train_micro_batch_size": 1,
        "logprob_chunk_size": chunk,
        "max_total_sequence_length": READ,
        "sequence_packing": {"enabled": True, "logprob_mb_tokens": READ * ranks},
        "megatron_cfg": {"enabled": True, "context_parallel_size": ranks},
    }


def _batch(lengths: tuple[int, ...]) -> BatchedDataDict:
    random = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(1000, (len(lengths), max(lengths)), generator=random)
    lengths_B = torch.tensor(lengths)
    return BatchedDataDict({"input_ids": tokens_BS, "input_lengths": lengths_B})


if __name__ == "__main__":
    run = measure if len(sys.argv) > 4 else start
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
