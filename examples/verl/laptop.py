"""`python examples/verl/laptop.py`: verl's SFT, then its GRPO trainer, on two CPU processes.

Run it with the Python that has verl. `sft` or `grpo` as the first argument runs that one alone;
GRPO starts from what SFT has exported. `grpo-vllm` is GRPO with vLLM's CPU build as the rollout.
Arguments after it go to verl.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OUTPUT = Path("outputs/verl")
ROWS, SFT_STEPS = 2048, 120
PROMPTS, GRPO_STEPS = 640, 20
BATCH, SAMPLES = 32, 8
RESPONSE = 16
"""Tokens of a response at most; a right one has ten."""
END = "<|im_end|>"
"""verl's tokenization of Qwen's turns wants this token, and one for the end of a line."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
"""verl wants turns to be tokenized alike alone and together: a special token ends each."""
KEY_VALUE_BYTES = 64 << 20
ROLLOUT_WORKER = "megatron_policy.hosts.verl.rollout_worker.RolloutWorker"
SEARCHED = "hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]"


def prepare(output: Path) -> None:
    """Make the model, its tokenizer, demonstrations of which one in four is right, and prompts."""
    import pandas
    from transformers import AutoTokenizer

    sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]
    from quickstart.checkpoint import make_checkpoint
    from quickstart.task import Problem, Problems

    problems = Problems(0)
    shown = problems.draw(ROWS)
    texts = [f"{each.prompt}\n{each.answer}" for each in shown]
    model = make_checkpoint(output / "model", texts, seed=0, end=END)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)

    def asked(problem: Problem) -> dict[str, str]:
        return {"role": "user", "content": problem.prompt}

    def row(problem: Problem) -> dict[str, Any]:
        truth = {"style": "rule", "ground_truth": problem.answer}
        return {"prompt": [asked(problem)], "data_source": "sorting", "reward_model": truth}

    answers = [problems.demonstrate(each).strip() for each in shown]
    demonstrations = [
        [asked(each), {"role": "assistant", "content": answer}]
        for each, answer in zip(shown, answers, strict=True)
    ]
    pandas.DataFrame({"messages": demonstrations}).to_parquet(output / "sft.parquet")
    prompts = [row(each) for each in problems.draw(PROMPTS)]
    pandas.DataFrame(prompts).to_parquet(output / "train.parquet")
    held_out = [row(each) for each in problems.held_out]
    pandas.DataFrame(held_out).to_parquet(output / "test.parquet")


def sft(output: Path) -> list[str]:
    """verl's command; only the engine is named, and sizes that fit a laptop."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"),
        *("-m", "verl.trainer.sft_trainer", SEARCHED, "engine=megatron_policy", "optim=megatron"),
        *("engine.dtype=float32", "engine.tensor_model_parallel_size=2"),
        *(f"model.path={output / 'model'}", "model.use_remove_padding=True"),
        *(f"data.train_files={output / 'sft.parquet'}", "data.train_batch_size=64"),
        *("data.max_token_len_per_gpu=2048", "data.num_workers=0"),
        *("optim.lr=3e-3", "optim.weight_decay=0"),
        *("trainer.total_epochs=8", f"trainer.total_training_steps={SFT_STEPS}"),
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *("trainer.logger=[console]", "trainer.n_gpus_per_node=2", "trainer.device=cpu"),
        *(f"trainer.default_local_dir={output / 'sft'}", "trainer.resume_mode=disable"),
        f"hydra.run.dir={output / 'hydra'}",
    ]


def grpo(output: Path) -> list[str]:
    """verl's command, with transformers as the rollout (`cpu_rollout.py`)."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", SEARCHED, "model_engine=megatron_policy"),
        *("algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={start_of(output)}"),
        *(f"data.train_files={output / 'train.parquet'}", f"data.train_batch_size={BATCH}"),
        *(f"data.val_files={output / 'test.parquet'}", "data.dataloader_num_workers=0"),
        *("data.max_prompt_length=16", f"data.max_response_length={RESPONSE}"),
        *(f"{actor}.engine.dtype=float32", f"{actor}.engine.tensor_model_parallel_size=2"),
        *(f"{actor}.optim.lr=5e-4", f"{actor}.optim.weight_decay=0"),
        *(f"{actor}.ppo_mini_batch_size={BATCH}", f"{actor}.use_dynamic_bsz=True"),
        f"{actor}.ppo_max_token_len_per_gpu=4096",
        *(f"{actor}.use_kl_loss=True", f"{actor}.kl_loss_coef=0.001"),
        *(f"{rollout}.name=transformers", f"{rollout}.n={SAMPLES}"),
        *(f"{rollout}.tensor_model_parallel_size=2", f"{rollout}.agent.num_workers=1"),
        *("reward.num_workers=1", "reward.custom_reward_function.name=compute_score"),
        f"reward.custom_reward_function.path={HERE / 'sorting_reward.py'}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        *("trainer.n_gpus_per_node=2", "trainer.nnodes=1", "trainer.device=cpu"),
        *("trainer.total_epochs=9", f"trainer.total_training_steps={GRPO_STEPS}"),
        *(f"trainer.test_freq={GRPO_STEPS}", f"trainer.save_freq={GRPO_STEPS}"),
        *("trainer.logger=[console]", "trainer.resume_mode=disable"),
        *(f"trainer.default_local_dir={output / 'grpo'}", f"hydra.run.dir={output / 'hydra'}"),
        # verl counts GPUs before it starts workers, which then ask for CPUs alone. Most only wait.
        *("+ray_kwargs.ray_init.address=local", "ray_kwargs.ray_init.num_cpus=8"),
        "+ray_kwargs.ray_init.num_gpus=2",
    ]


def with_vllm() -> list[str]:
    """Overrides of `grpo`: a server of vLLM's CPU build for each rank (`cpu_vllm.py`)."""
    rollout = "actor_rollout_ref.rollout"
    return [
        *(f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=1"),
        *(f"{rollout}.dtype=float32", f"{rollout}.enforce_eager=True"),
        *(f"{rollout}.max_model_len=64", f"{rollout}.max_num_seqs=64"),
        # Of CPUs, vLLM gives no memory back between steps.
        *(f"{rollout}.free_cache_engine=False", f"+{rollout}.enable_sleep_mode=False"),
        f"+{rollout}.engine_kwargs.vllm.worker_extension_cls={ROLLOUT_WORKER}",
        f"+{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={KEY_VALUE_BYTES}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=16",
    ]


def start_of(output: Path) -> Path:
    """The model that SFT has exported last."""
    steps = sorted(output.glob("sft/global_step_*"), key=lambda each: int(each.name.split("_")[-1]))
    if not steps:
        raise SystemExit(f"there is nothing to start from in {output / 'sft'}: run `sft` first")
    return steps[-1] / "huggingface"


def environment(rollout: str = "cpu_rollout") -> dict[str, str]:
    """What verl's processes need to run on CPUs, and to find this package. `rollout` is the module
    that their rollouts need: `cpu_rollout` or `cpu_vllm`.
    """
    paths = (str(HERE), str(ROOT), os.environ.get("PYTHONPATH"))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VERL_USE_EXTERNAL_MODULES": f"cpu_platform,{rollout}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def run(arguments: Sequence[str], output: Path) -> int:
    """Train by verl; the exit code of the first command that fails, or 0."""
    alone, *overrides = arguments or [""]
    if alone not in ("", "sft", "grpo", "grpo-vllm"):
        raise SystemExit(
            f"unknown argument {alone!r}: pass sft, grpo or grpo-vllm first, then verl's overrides"
        )
    output.mkdir(parents=True, exist_ok=True)
    if alone in ("", "sft"):
        shutil.rmtree(output / "sft", ignore_errors=True)
        prepare(output)
        code = subprocess.run([*sft(output), *overrides], env=environment(), check=False).returncode
        if code or alone:
            return code
    vllm = alone == "grpo-vllm"
    command = [*grpo(output), *(with_vllm() if vllm else []), *overrides]
    env = environment("cpu_vllm" if vllm else "cpu_rollout")
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], OUTPUT.resolve()))
