"""`python -m examples.pictures.draw [FOLDER]`: makes the pictures of docs/pictures again.

A plan needs no weights: its model is a config. A step is recorded on two CPU processes, as pipeline
stages of a small model with random weights. The demo's curves are drawn from its last run, and the
answers to pictures are those of the last run of examples/shapes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.quickstart.journal import Records
from examples.quickstart.losses import ImitationLoss
from examples.quickstart.plot import draw_curves
from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.estimate.timeline import read_trace
from megatron_policy.pictures.timeline import draw_timeline

FOLDER = Path("docs/pictures")
DEMO, SHAPES = Path("outputs/quickstart"), Path("outputs/shapes")
STAGES, MICROBATCHES, LENGTH = 2, 8, 64

# A model of 70 billion parameters, as Llama's.
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
LAYOUT = ("--tp", "4", "--pp", "4", "--vpp", "2", "--recompute", "layernorm+mlp")
BATCH = ("--gpus", "64", "--rows", "64")
SMALL = Qwen2Config(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1024,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def main(folder: Path) -> None:
    """Write layout.png, expected.png, recorded.png and, after runs of the examples, curves.png and
    answers.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        draw_plan(Path(name), folder)
        model = Path(name) / "small"
        torch.manual_seed(0)
        Qwen2ForCausalLM(SMALL).save_pretrained(model)
        launch = f"-m torch.distributed.run --standalone --nproc-per-node {STAGES}"
        command = [sys.executable, *launch.split(), "-m", "examples.pictures.draw"]
        subprocess.run([*command, str(model), str(Path(name) / "profile")], check=True)
        draw_recorded(Path(name) / "profile" / "timeline.json", folder / "recorded.png")
    if (DEMO / "metrics.jsonl").is_file():
        records = Records.read(DEMO / "metrics.jsonl")
        summary = json.loads((DEMO / "summary.json").read_text())
        draw_curves(records, folder / "curves.png", summary["reward_after_sft"])
    else:
        print("no curves: run `make demo` first")
    if (SHAPES / "answers.png").is_file():
        shutil.copy(SHAPES / "answers.png", folder)
    else:
        print("no answers: run `python examples/shapes/run.py` first")


def draw_plan(work: Path, folder: Path) -> None:
    """The layout of a large model on 64 GPUs, and its step."""
    (work / "config.json").write_text(json.dumps(LARGE))
    files = ["--picture", str(folder / "layout.png"), "--timeline", str(folder / "expected.png")]
    command = [sys.executable, "-m", "megatron_policy", "plan", "--model", str(work)]
    subprocess.run([*command, *LAYOUT, *BATCH, *files], check=True)


def draw_recorded(trace: Path, picture: Path) -> None:
    """A recorded step, from the trace that a profile has written."""
    timeline = read_trace(json.loads(trace.read_text()))
    note = f"{MICROBATCHES} microbatches of {LENGTH} tokens on {STAGES} CPU processes"
    draw_timeline(timeline, picture, "Recorded: a training step", note)


def record(model: str, folder: str) -> None:
    """Profile one step, as one of the ranks."""
    config = {
        "model_name": model,
        "precision": "float32",
        "train_global_batch_size": MICROBATCHES,
        "train_micro_batch_size": 1,
        "megatron_cfg": {"enabled": True, "pipeline_model_parallel_size": STAGES},
    }
    torch.manual_seed(0)
    tokens = torch.randint(SMALL.vocab_size, (MICROBATCHES, LENGTH))
    rows = {"input_ids": tokens, "token_mask": torch.ones_like(tokens)}
    data = BatchedDataDict(rows | {"sample_mask": torch.ones(MICROBATCHES)})
    policy = MegatronPolicy(config, init_reference_model=False)
    policy.train(data, ImitationLoss())
    with policy.profile(folder) as profile:
        policy.train(data, ImitationLoss())
    if policy.rank == 0:
        print(profile)
    policy.shutdown()


if __name__ == "__main__":
    if "RANK" in os.environ:
        record(*sys.argv[1:])
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
