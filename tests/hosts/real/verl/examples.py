"""Which of verl's shipped Megatron examples the translation takes, each at the size of its own
cluster.

A script is run with stand-ins for the programs that it starts, which write down their arguments;
Hydra composes verl's configuration from them. A configuration counts as taken if neither its actor,
nor its reference, nor its critic is refused. `python -m tests.hosts.real.verl.examples` prints the
refused ones by reason; it needs verl's sources, with its `examples` folder, and Hydra.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.config.model_table import model_table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.hosts.verl.translate import Translated, translated
from tests.hosts.real.recipes import LLAMA, QWEN2, QWEN3, SIZES
from tests.unit.published import COMMON, PUBLISHED
from tests.unit.published_experts import PUBLISHED_EXPERTS

FOLDERS = ("examples", "tests/special_e2e")
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
VISION = re.compile(r"-VL-|Qwen3\.5-|Kimi-K2\.6")
"""Models with vision towers by their names."""
SAID = {"actor_rollout_ref.actor.model_engine=megatron": "model_engine=megatron"}
"""Overrides that verl itself refuses, and what they mean."""

DENSE = {
    "Qwen2.5-0.5B": (QWEN2, "896/4864/14/2/24"),
    "Qwen2.5-0.5B-Instruct": (QWEN2, "896/4864/14/2/24"),
    "Qwen2.5-Math-7B": (QWEN2, "3584/18944/28/4/28"),
    "Qwen2.5-32B": (QWEN2, "5120/27648/40/8/64"),
    "Qwen3-8B": (QWEN3, "4096/12288/32/8/36"),
    "deepseek-llm-7b-chat": (LLAMA, "4096/11008/32/32/30"),
}
WITH_EXPERTS = {
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "Qwen3-30B-A3B-Base": "Qwen3-30B-A3B",
    "Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen3-235B-A22B",
    "Qwen3-235B-A22B-Instruct-2507": "Qwen3-235B-A22B",
    "Moonlight-16B-A3B": "Moonlight-16B-A3B",
    "DeepSeek-V3": "DeepSeek-V3 in bf16",
}
OTHERS = {
    "Hy3": {"model_type": "hy_v3", "architectures": ["HYV3ForCausalLM"]},
    "DeepSeek-V4-Flash": {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]},
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
    },
}
"""Models of families that the table of models lacks: what their config.json calls them."""


KEEPS_OLD_WEIGHTS = (
    "verl's trainer with separate rollouts keeps old weights by a handler of its own engines: set "
    "algorithm.rollout_correction.bypass_mode"
)


@dataclass(frozen=True, eq=False)
class Example:
    """A script's configuration as verl composes it."""

    script: str
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


def composed(root: Path, script: Path) -> Example | str:
    """A script's configuration, or why there is none."""
    from hydra.errors import HydraException

    arguments = command_of(script)
    if "-m" not in arguments:
        return "starts no trainer of verl"
    module = arguments[arguments.index("-m") + 1]
    overrides = arguments[arguments.index("-m") + 2 :]
    try:
        document = _compose(root, module, [SAID.get(each, each) for each in overrides])
    except HydraException as error:
        return f"verl does not compose it: {str(error).splitlines()[0]}"
    return Example(str(script.relative_to(root)), document, _ranks(arguments, document))


def _compose(root: Path, module: str, overrides: list[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    trainer = root / "verl" / "trainer" / "config"
    folder, name = trainer, "sft_trainer_engine" if "sft_trainer" in module else "ppo_trainer"
    if not module.startswith("verl.trainer."):
        folder = root.joinpath(*module.split(".")[:-1]) / "config"
    kept = [f"hydra.searchpath=[file://{trainer}]"]
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


def _keeps_old_weights(document: Mapping[str, Any]) -> bool:
    mode = (document["trainer"].get("v1") or {}).get("trainer_mode")
    correction = document["algorithm"].get("rollout_correction") or {}
    return mode == "separate_async" and not correction.get("bypass_mode")


def refusal(example: Example) -> str:
    """What an example is refused for; empty if it is taken."""
    document = example.document
    if not example.sft and _keeps_old_weights(document):
        return KEEPS_OLD_WEIGHTS
    if example.sft:
        roles = [(document, document["engine"], document["optim"], document.get("checkpoint"))]
    else:
        workers = document["actor_rollout_ref"]
        actor = workers["actor"]
        roles = [(workers, actor[MEGATRON], actor["optim"], actor.get("checkpoint"))]
        if document["algorithm"].get("use_kl_in_reward") or actor.get("use_kl_loss"):
            roles.append((workers, workers["ref"][MEGATRON], None, None))
        critic = document["critic"]
        if critic["enable"] or document["algorithm"]["adv_estimator"] == "gae":
            as_critic = {"model": critic["model"] | {"model_type": "value_model"}}
            roles.append((as_critic, critic[MEGATRON], critic["optim"], critic.get("checkpoint")))
    found = (_refused(example, *role) for role in roles)
    return next(filter(None, found), "")


def _refused(
    example: Example, holder: Mapping[str, Any], engine: Any, optim: Any, checkpoint: Any
) -> str:
    fields = fields_of(Path(holder["model"]["path"]).name)
    if fields is None:
        return f"a model that is not in the tables of this module: {holder['model']['path']}"
    model = holder["model"] | {"hf_config": SimpleNamespace(**fields)}
    if optim is None:
        # As verl makes the reference.
        model["mtp"] = {"enable": False}
    engine = engine | {"use_remove_padding": model["use_remove_padding"]}
    try:
        _built(translated(model, engine, optim, checkpoint), fields, example.ranks)
    except (ConfigError, ConversionError) as error:
        return str(error)
    return ""


def _built(found: Translated, fields: Mapping[str, Any], ranks: int) -> None:
    config = found.parsed()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        table = model_table(config.model_copy(update={"model_name": folder}))
    layout = config.megatron_cfg
    tensor = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    experts = layout.expert_model_parallel_size * tensor
    # Megatron-Core too refuses some scripts on as many nodes as they have by default.
    ranks = math.lcm(ranks, layout.pipeline_model_parallel_size * experts)
    check_layout(config, table.architecture, topology_of(config, ranks))


def fields_of(model: str) -> dict[str, Any] | None:
    """A model's config.json, as its maker published it; None if it is not known."""
    if model in DENSE:
        like, sizes = DENSE[model]
        own = dict(zip(SIZES, map(int, sizes.split("/")), strict=True))
        fields = COMMON | PUBLISHED[like][1] | own
        return fields if like == LLAMA else fields | {"max_window_layers": own[SIZES[-1]]}
    if model in PUBLISHED:
        return COMMON | PUBLISHED[model][1]
    if model in WITH_EXPERTS:
        return COMMON | PUBLISHED_EXPERTS[WITH_EXPERTS[model]][1]
    return OTHERS.get(model)


def examples(root: Path) -> tuple[list[Example], dict[str, str]]:
    """The Megatron examples, and why other scripts that name Megatron are none."""
    found, others = [], {}
    for script in scripts(root):
        example = composed(root, script)
        if isinstance(example, str):
            others[str(script.relative_to(root))] = example
        elif example.with_megatron:
            found.append(example)
    return found, others


def main() -> None:
    """Print how many text models' configurations are taken, and the reasons of the others."""
    root = checkout()
    if root is None:
        raise SystemExit("verl's sources, with its examples, are not on the path")
    found, others = examples(root)
    text = [each for each in found if not VISION.search(each.model)]
    refused: dict[str, list[str]] = defaultdict(list)
    for example in text:
        reason = refusal(example)
        if reason:
            refused[reason].append(f"{example.script} ({example.model})")
    taken = len(text) - sum(map(len, refused.values()))
    print(f"{taken} of {len(text)} of text models are taken; {len(found) - len(text)} of vision")
    for reason, names in sorted(refused.items(), key=lambda each: -len(each[1])):
        print(f"{len(names):4d}  {reason}", *names, sep="\n        ")
    for name, reason in others.items():
        print(f"not composed: {name}: {reason}")


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    main()
