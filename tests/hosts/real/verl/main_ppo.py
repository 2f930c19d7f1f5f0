"""verl's own PPO trainer as a process, with its colocated workers in Ray: actor, reference, critic
and a rollout by transformers, on a few prompts.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas

from tests.checkpoints import make_tokenizer
from tests.fork_server import ForkServer
from tests.hosts.real.processes import Ended, environment, ray_head, run_to_its_end
from tests.hosts.real.verl.configs import Case, critic_overrides, ppo_overrides
from tests.hosts.real.verl.trainers import SWITCH, WORDS
from tests.ranks import ROOT

STEPS, BATCH = 2, 8
TEMPERATURE = 0.7
VOCAB, ENDS = 256, ["<|im_end|>", "\n"]
MODULES = ("examples.verl.cpu_platform", "examples.verl.cpu_rollout")
VALUE_MODELS = "tests.hosts.real.verl.value_models"
PLUGS = "tests.hosts.real.verl.plugs"
LIMIT_S = 1200.0
INHERITED = environment(OMP_NUM_THREADS="1")


def write_prompts(path: Path) -> Path:
    """A parquet file of prompts: in each batch, no two are of the same length."""
    rows = [
        {
            "prompt": [{"role": "user", "content": " ".join(WORDS[first : first + length])}],
            "data_source": "tests",
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for first in range(STEPS)
        for length in range(1, BATCH + 1)
    ]
    pandas.DataFrame(rows).to_parquet(path)
    return path


def with_turns(model: Path, path: Path) -> Path:
    """A copy of a Qwen2 whose tokenizer has the tokens that verl ends Qwen's turns with."""
    shutil.copytree(model, path)
    tokenizer = make_tokenizer(VOCAB - len(ENDS))
    tokenizer.add_tokens(ENDS)
    tokenizer.save_pretrained(path)
    return path


@dataclass(frozen=True)
class Trainer:
    """What the trainer is started with: models, prompts, and the address of a Ray instance."""

    model: Path
    critic: Path
    data: Path
    address: str

    @classmethod
    @contextmanager
    def started(cls, model: Path, critic: Path, folder: Path) -> Iterator[Trainer]:
        """Trainers in a Ray instance that ends with this context."""
        data = write_prompts(folder / "prompts.parquet")
        model, critic = (with_turns(each, folder / each.name) for each in (model, critic))
        # verl counts GPUs before it starts workers, which then ask for CPUs alone.
        forks = ForkServer()
        try:
            with ray_head(INHERITED, folder, gpus=2, cpus=16, forks=forks) as address:
                yield cls(model, critic, data, address)
        finally:
            forks.end()

    def run(
        self,
        case: Case,
        folder: Path,
        *overrides: str,
        fault: str = "",
        switch: bool = False,
        limit_s: float = LIMIT_S,
    ) -> Ended:
        """Run the trainer to its end, with checkpoints and `log.jsonl` in `folder`. With a fault,
        verl's policy loss is one that has it. With `switch`, ours stands in the place of verl's own
        engine for Megatron.
        """
        modules = [*MODULES, VALUE_MODELS]
        own = {"VERL_FILE_LOGGER_PATH": str(folder / "log.jsonl"), "TESTS_FAULT": fault}
        if switch:
            own |= SWITCH
            modules.append("megatron_policy.hosts.verl.plugin")
        own["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *ppo_overrides(case, self.model),
            *critic_overrides(case, self.critic),
            *self._trainer(case, folder),
            *(_faulty() if fault else ()),
            *overrides,
            f"++ray_kwargs.ray_init.address={self.address}",
            *(f"++ray_kwargs.ray_init.runtime_env.env_vars.{k}='{v}'" for k, v in own.items()),
        ]
        return run_to_its_end(command, {**INHERITED, **own}, folder, limit_s)

    def _trainer(self, case: Case, folder: Path) -> Sequence[str]:
        rollout = "actor_rollout_ref.rollout"
        plugs = ROOT / f"{PLUGS.replace('.', '/')}.py"
        return (
            "algorithm.adv_estimator=gae",
            *(f"data.train_files={self.data}", f"data.val_files={self.data}"),
            *(f"data.train_batch_size={BATCH}", "data.shuffle=False"),
            *("data.max_prompt_length=48", "data.max_response_length=8"),
            "data.dataloader_num_workers=0",
            # Rollouts take the likeliest token, so that runs have the same.
            *(f"++{rollout}.name=transformers", f"{rollout}.top_k=1"),
            *(f"{rollout}.temperature={TEMPERATURE}", f"{rollout}.agent.num_workers=1"),
            f"++{rollout}.tensor_model_parallel_size={case.world}",
            *(f"reward.custom_reward_function.path={plugs}", "reward.num_workers=1"),
            "reward.custom_reward_function.name=compute_score",
            f"trainer.v1.sampler.custom_sampler.path=pkg://{PLUGS}",
            "trainer.v1.sampler.custom_sampler.name=InOrder",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            *("trainer.device=cpu", f"trainer.n_gpus_per_node={case.world}", "trainer.nnodes=1"),
            *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=False"),
            *("trainer.logger=[console,file]", f"trainer.default_local_dir={folder}"),
            f"hydra.run.dir={folder / 'hydra'}",
        )


def _faulty() -> Sequence[str]:
    return (
        f"actor_rollout_ref.model.external_lib={PLUGS}",
        "actor_rollout_ref.actor.policy_loss.loss_mode=faulty",
    )
