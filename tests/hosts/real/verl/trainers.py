"""verl's own SFT trainers as processes, by torchrun and by Ray, on a few conversations."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from megatron_policy.coordination.rendezvous import reserved_port
from tests.hosts.real.processes import Ended, environment, run_to_its_end
from tests.hosts.real.verl.configs import Case, sft_overrides

MODULES = {"torchrun": "verl.trainer.sft_trainer", "ray": "verl.trainer.sft_trainer_ray"}
FAULTS = "tests.hosts.real.verl.faults"
LIMIT_S = 240.0
SWITCH = {
    "MEGATRON_POLICY_VERL": "megatron",
    # An entry point where this package is installed, which it need not be here.
    "VERL_USE_EXTERNAL_MODULES": ("examples.verl.cpu_platform,megatron_policy.hosts.verl.plugin"),
    "VERL_ENGINE_VENDOR": "nvidia",
}
"""The switch, as it takes effect on GPUs."""
WORDS = ("licence", "of", "the", "work", "must", "mean", "any", "form", "and", "copies")
ROWS, BATCH = 40, 8


def write_conversations(path: Path) -> Path:
    """A parquet file of rows that ask and answer."""
    draw = random.Random(5)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))

    rows = [
        [{"role": "user", "content": text(6)}, {"role": "assistant", "content": text(9)}]
        for _ in range(ROWS)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(path)
    return path


@dataclass(frozen=True)
class Trainers:
    """What a trainer is started with: a model, its data, and the address of a Ray instance."""

    model: Path
    data: Path
    address: str

    def run(
        self,
        way: str,
        case: Case,
        folder: Path,
        *overrides: str,
        steps: int = 3,
        fault: str = "",
        switch: bool = False,
        limit_s: float = LIMIT_S,
    ) -> Ended:
        """Run a trainer to its end, with checkpoints and `log.jsonl` in `folder`. With a fault,
        verl's loss is one that has it. With `switch`, ours stands in the place of verl's own engine
        for Megatron.
        """
        folder.mkdir(parents=True, exist_ok=True)
        script = [FAULTS, MODULES[way]] if fault else [MODULES[way]]
        command = [
            *(_torchrun(case.world) if way == "torchrun" else [sys.executable]),
            *("-m", *script, *sft_overrides(case, self.model)),
            *self._trainer(case, folder, steps),
            *overrides,
        ]
        env = environment(
            RAY_ADDRESS=self.address,
            VERL_FILE_LOGGER_PATH=str(folder / "log.jsonl"),
            TESTS_FAULT=fault,
            **(SWITCH if switch else {}),
        )
        return run_to_its_end(command, env, folder, limit_s)

    def _trainer(self, case: Case, folder: Path, steps: int) -> Sequence[str]:
        return (
            f"data.train_files={self.data}",
            f"data.train_batch_size={BATCH}",
            "data.max_length=64",
            "trainer.device=cpu",
            f"trainer.n_gpus_per_node={case.world}",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[console,file]",
        )


def _torchrun(world: int) -> list[str]:
    with reserved_port() as port:
        pass
    where = ("--master-addr=127.0.0.1", f"--master-port={port}")
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", *where]


def logged(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{"step": each["step"], **each["data"]} for each in found]
