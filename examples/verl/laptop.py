"""`python examples/verl/laptop.py`: verl's SFT trainer on two CPU processes.

Run it with the Python that has verl. Further arguments go to verl.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUTPUT = Path("outputs/verl")
ROWS, STEPS = 512, 60
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
"""verl wants turns to be tokenized alike alone and together: a special token ends each."""


def prepare(output: Path) -> None:
    """Make the model, its tokenizer and the demonstrations."""
    import pandas
    from transformers import AutoTokenizer

    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    from quickstart.checkpoint import make_checkpoint
    from quickstart.task import Problems

    problems = Problems(0).draw(ROWS)
    texts = [each.prompt + each.answer for each in problems]
    model = make_checkpoint(output / "model", texts, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    rows = [
        {
            "messages": [
                {"role": "user", "content": each.prompt},
                {"role": "assistant", "content": each.answer.strip()},
            ]
        }
        for each in problems
    ]
    pandas.DataFrame(rows).to_parquet(output / "train.parquet")


def command(output: Path) -> list[str]:
    """verl's command; only the engine is named, and sizes that fit a laptop."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
        *("-m", "verl.trainer.sft_trainer"),
        "hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]",
        *("engine=megatron_policy", "optim=megatron"),
        *("engine.dtype=float32", "engine.tensor_model_parallel_size=2"),
        *(f"model.path={output / 'model'}", "model.use_remove_padding=True"),
        *(f"data.train_files={output / 'train.parquet'}", "data.train_batch_size=32"),
        *("data.max_token_len_per_gpu=1024", "data.num_workers=0"),
        *("optim.lr=3e-3", "optim.weight_decay=0"),
        *("trainer.total_epochs=8", f"trainer.total_training_steps={STEPS}"),
        *("trainer.logger=[console]", "trainer.n_gpus_per_node=2", "trainer.device=cpu"),
        *(f"trainer.default_local_dir={output / 'checkpoints'}", "trainer.resume_mode=disable"),
        f"hydra.run.dir={output / 'hydra'}",
    ]


def main() -> int:
    """Prepare, and train by verl; its exit code."""
    output = OUTPUT.resolve()
    output.mkdir(parents=True, exist_ok=True)
    prepare(output)
    paths = (str(HERE), str(ROOT), os.environ.get("PYTHONPATH"))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.run(command(output) + sys.argv[1:], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
