"""verl's shipped configurations for Megatron, as verl composes them.

A script is run with stand-ins for the programs that it starts, which write down their arguments;
Hydra composes verl's configuration from them, or from a YAML file that is one by itself. It needs
verl's sources, with its `examples` folder, and Hydra.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDERS = ("examples", "tests/special_e2e")
"""Of scripts and YAML files. Recipes are a repository of their own, each for its own release."""
TRAINERS = "verl/trainer/config"
"""Where the YAML files of verl's trainers are."""
NEEDED = {
    "HDFS_ROOT": "/hdfs",
    "RAY_DATA_HOME": "/data",
    "DATA_ROOT": "/data",
    "ckpts_home": "/checkpoints",
    "PYTHONPATH": "",
    "COMMAND": "torchrun --nnodes=1 --nproc-per-node=8 -m verl.trainer.sft_trainer",
}
"""Variables without a default in some script."""
CHOICES = {"BACKEND": "megatron", "ACTOR_STRATEGY": "megatron", "VERL_USE_UV": "0"}
"""What scripts for several engines are asked for."""
STARTED = ("python", "python3", "torchrun", "uv")
LEFT_OUT = ("rm", "hf", "huggingface-cli", "pip", "curl", "wget", "ray", "tee", "sleep")
USED = ("awk", "basename", "bash", "cat", "date", "dirname", "env", "mkdir", "nproc", "sed", "tr")
RECORDER = """#!{bash}
# `-c` asks for a module that only other devices have, `-` for the device.
case "$1" in -c) exit 1 ;; -) echo cuda; exit 0 ;; esac
printf '%s\\0' "$@" >"$RECORD"
"""
CLONER = """#!{bash}
if [ "$1" = clone ]; then mkdir "$(basename "$2")"; fi
"""
MEGATRON = "megatron"
SECTIONS = (
    {"trainer", "model", "engine", "optim"},
    {"trainer", "actor_rollout_ref", "critic", "algorithm"},
)
"""Of supervised training, and of reinforcement learning."""
SAID = {"actor_rollout_ref.actor.model_engine=megatron": "model_engine=megatron"}
"""Overrides that verl itself refuses, and what they mean."""


@dataclass(frozen=True, eq=False)
class Example:
    """A configuration as verl composes it, and the script or YAML file that it comes from."""

    source: str
    document: dict[str, Any]
    ranks: int

    @property
    def sft(self) -> bool:
        return "actor_rollout_ref" not in self.document

    @property
    def model(self) -> str:
        """The model's name, without its folder."""
        section = self.document if self.sft else self.document["actor_rollout_ref"]
        return Path(section["model"]["path"]).name

    @property
    def with_megatron(self) -> bool:
        if self.sft:
            return "Mcore" in self.document["engine"]["_target_"]
        return bool(self.document["actor_rollout_ref"]["actor"]["strategy"] == MEGATRON)


def checkout() -> Path | None:
    """verl's tree with its examples, if that is what is importable."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parents[1]
    return root if (root / FOLDERS[0] / "grpo_trainer").is_dir() else None


def scripts(root: Path) -> Iterator[Path]:
    """Every shell script that names Megatron, but for those of another device."""
    for folder in FOLDERS:
        for file in sorted((root / folder).glob("**/*.sh")):
            if "ascend" not in str(file) and MEGATRON in file.read_text(encoding="utf-8"):
                yield file


def command_of(script: Path) -> list[str]:
    """The arguments of the last program that the script starts; empty if it starts none."""
    with TemporaryDirectory() as folder:
        programs, home = Path(folder) / "bin", Path(folder) / "home"
        for each in (programs, home):
            each.mkdir()
        _fill(programs)
        record = Path(folder) / "record"
        subprocess.run(
            [str(programs / "bash"), str(script)],
            env=NEEDED | CHOICES | _path_of(script) | {
                "PATH": str(programs), "HOME": str(home), "RECORD": str(record)
            },
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )  # fmt: skip
        return record.read_text().split("\0")[:-1] if record.exists() else []


def _path_of(script: Path) -> dict[str, str]:
    """The model's path, where the script insists on being told it."""
    asked = re.search(r"MODEL_PATH:\?", script.read_text(encoding="utf-8"))
    return {"MODEL_PATH": "/models/told"} if asked else {}


def _fill(programs: Path) -> None:
    bash = shutil.which("bash")
    said = dict.fromkeys(STARTED, RECORDER) | dict.fromkeys(LEFT_OUT, "#!{bash}\n")
    for name, text in (said | {"git": CLONER}).items():
        (programs / name).write_text(text.format(bash=bash))
        (programs / name).chmod(0o755)
    for name in USED:
        found = shutil.which(name)
        if found:
            (programs / name).symlink_to(found)


def yaml_files(root: Path) -> Iterator[Path]:
    """Every YAML file that names Megatron and can be a configuration by itself, but for generated
    ones, which repeat others.
    """
    for pattern in (*(f"{each}/**/*.yaml" for each in FOLDERS), f"{TRAINERS}/*.yaml"):
        for file in sorted(root.glob(pattern)):
            text = file.read_text(encoding="utf-8")
            if MEGATRON in text and not file.name.startswith("_"):
                yield file


def composed(root: Path, source: Path) -> Example | str:
    """The configuration of a script or YAML file, or why there is none."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if source.suffix == ".yaml":
        arguments: list[str] = []
        folder, overrides = source.parent, [f"--config-name={source.name}"]
    else:
        arguments = command_of(source)
        if "-m" not in arguments:
            return "starts no trainer of verl"
        folder, overrides = _asked(root, arguments)
    try:
        document = document_of(root, folder, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        return f"verl does not compose it: {str(error).splitlines()[0]}"
    if not any(document.keys() >= sections for sections in SECTIONS):
        return "lacks sections of verl's trainers"
    return Example(str(source.relative_to(root)), document, _ranks(arguments, document))


def _asked(root: Path, arguments: list[str]) -> tuple[Path, list[str]]:
    """The folder of the configuration that a trainer is started with, and its overrides."""
    at = arguments.index("-m") + 1
    module, overrides = arguments[at], [SAID.get(each, each) for each in arguments[at + 1 :]]
    name = "sft_trainer_engine" if "sft_trainer" in module else "ppo_trainer"
    folder = root / TRAINERS
    if not module.startswith("verl.trainer."):
        folder = root.joinpath(*module.split(".")[:-1]) / "config"
    return folder, [f"--config-name={name}", *overrides]


def document_of(root: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The sections of engines, algorithm and trainer of what Hydra composes in a folder;
    `overrides` begin with its `--config-name=`.
    """
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    name, kept = "", [f"hydra.searchpath=[file://{root / TRAINERS}]"]
    for each in overrides:
        if each.startswith("--config-name="):
            name = each.partition("=")[2].removesuffix(".yaml")
        elif not each.startswith(("--", "hydra.")):
            kept.append(each)
    with initialize_config_dir(str(folder), version_base=None):
        document = compose(name, overrides=kept)
    found: Any = OmegaConf.to_container(document, resolve=False)
    keys = [key for key in ("actor_rollout_ref", "critic", "algorithm", "trainer") if key in found]
    keys += [key for key in ("model", "engine", "optim", "checkpoint") if key in found]
    return {key: OmegaConf.to_container(document[key], resolve=True) for key in keys}


def _ranks(arguments: list[str], document: Mapping[str, Any]) -> int:
    """The processes that train."""
    text = " ".join(arguments)
    per_node = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", text)
    if per_node:
        nodes = re.search(r"--nnodes[= ](\d+)", text)
        return int(per_node[1]) * int(nodes[1] if nodes else 1)
    trainer = document["trainer"]
    return int(trainer["nnodes"]) * int(trainer["n_gpus_per_node"])


def examples(root: Path) -> tuple[list[Example], dict[str, str]]:
    """The Megatron examples, and why other scripts and files that name Megatron are none."""
    found, others = [], {}
    for source in (*scripts(root), *yaml_files(root)):
        example = composed(root, source)
        if isinstance(example, str):
            others[str(source.relative_to(root))] = example
        elif example.with_megatron:
            found.append(example)
    return found, others
