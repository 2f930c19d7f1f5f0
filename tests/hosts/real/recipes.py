"""Which recipes of the host the configuration takes, each at the size of its own cluster.

`python -m tests.hosts.real.recipes` prints the refused ones by reason. It needs `nemo_rl`, if only
its `utils/config.py`, on the path; models are known by the shapes that their makers published.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.config.model_table import model_table
from megatron_policy.converters.architecture import Architecture
from megatron_policy.errors import ConfigError
from tests.unit.published import COMMON, PUBLISHED
from tests.unit.published_experts import PUBLISHED_EXPERTS

LLAMA, QWEN2, QWEN3 = "Llama-3.1-8B", "Qwen2.5-0.5B", "Qwen3-0.6B"
_OF_1_5B, _OF_7B = "1536/8960/12/2/28", "3584/18944/28/4/28"
DENSE = {
    "meta-llama/Llama-3.1-8B": (LLAMA, "4096/14336/32/8/32"),
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA, "4096/14336/32/8/32"),
    "meta-llama/Llama-3.1-70B": (LLAMA, "8192/28672/64/8/80"),
    "meta-llama/Llama-3.2-1B-Instruct": (LLAMA, "2048/8192/32/8/16"),
    "Qwen/Qwen2.5-0.5B": (QWEN2, "896/4864/14/2/24"),
    "Qwen/Qwen2.5-1.5B": (QWEN2, _OF_1_5B),
    "Qwen/Qwen2.5-1.5B-Instruct": (QWEN2, _OF_1_5B),
    "Qwen/Qwen2.5-Math-1.5B-Instruct": (QWEN2, _OF_1_5B),
    "Qwen/Qwen2.5-7B-Instruct": (QWEN2, _OF_7B),
    "Qwen/Qwen2.5-Math-7B": (QWEN2, _OF_7B),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (QWEN2, _OF_7B),
    "Qwen/Qwen3-0.6B": (QWEN3, "1024/3072/16/8/28"),
    "Qwen/Qwen3-1.7B": (QWEN3, "2048/6144/16/8/28"),
    "Qwen/Qwen3-1.7B-Base": (QWEN3, "2048/6144/16/8/28"),
    "Qwen/Qwen3-8B-Base": (QWEN3, "4096/12288/32/8/36"),
    "Qwen/Qwen3-32B": (QWEN3, "5120/25600/64/8/64"),
}
"""A published config, and what this model has in its place: hidden size, feed-forward channels,
heads, key-value groups, layers.
"""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
WITH_EXPERTS = {
    "Qwen/Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B": "Qwen3-235B-A22B",
    "moonshotai/Moonlight-16B-A3B-Instruct": "Moonlight-16B-A3B",
    "openai/gpt-oss-20b": "gpt-oss-20b in bf16",
    # The recipes tell the reader where to put the weights.
    "Follow instructions in https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/deepseek.md": (
        "DeepSeek-V3 in bf16"
    ),
}
NOT_KNOWN = "a model that is not in the tables of tests/hosts/real/recipes.py"


def sections(file: Path, *names: str) -> dict[str, Any]:
    """Those of these sections that the configuration has, as the host resolves them."""
    from omegaconf import DictConfig, OmegaConf

    loader: Any = importlib.import_module("nemo_rl.utils.config")
    for name, function in {"mul": lambda a, b: a * b, "max": max}.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    if hasattr(loader, "register_omegaconf_resolvers"):
        loader.register_omegaconf_resolvers()
    document = loader.load_config(str(file))
    found = {name: document.get(name) for name in names}
    return {
        name: OmegaConf.to_container(section, resolve=True)
        for name, section in found.items()
        if isinstance(section, DictConfig)
    }


def checkout() -> Path:
    """The host's tree, with its configurations."""
    spec = importlib.util.find_spec("nemo_rl")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def for_our_worker(raw: dict[str, Any]) -> dict[str, Any]:
    """The same with Megatron switched on, and the length of training that the driver adds."""
    megatron = raw.setdefault("megatron_cfg", {}) or {}
    megatron |= {"enabled": True, "train_iters": megatron.get("train_iters", 1000)}
    return raw | {"megatron_cfg": megatron, "dtensor_cfg": {"enabled": False}}


def recipes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, policy and cluster of every recipe for Megatron."""
    root = checkout() / "examples" / "configs" / "recipes"
    for file in sorted(root.glob("**/*.yaml")):
        document = sections(file, "policy", "cluster")
        if (document.get("policy", {}).get("megatron_cfg") or {}).get("enabled"):
            yield str(file.relative_to(root)), document


def ranks_of(document: Mapping[str, Any]) -> int:
    """The ranks that train: those of the cluster but for the engines' own."""
    nodes, gpus = document["cluster"]["num_nodes"], document["cluster"]["gpus_per_node"]
    engines = (document["policy"].get("generation") or {}).get("colocated") or {}
    if engines.get("enabled", True):
        return nodes * gpus
    theirs = engines["resources"]
    if nodes == 1:
        return gpus - theirs["gpus_per_node"]
    return (nodes - theirs["num_nodes"]) * gpus


def architecture_of(config: PolicyConfig) -> Architecture | None:
    """What the model's config.json describes, with what the recipe overrides; None for a model that
    the tables above lack.
    """
    model = config.model_name
    if model in DENSE:
        like, sizes = DENSE[model]
        fields = dict(PUBLISHED[like][1])
        own = dict(zip(SIZES, map(int, sizes.split("/")), strict=True))
        fields |= own | {"max_window_layers": own["num_hidden_layers"]}
        if like == LLAMA:
            del fields["max_window_layers"]
    elif model in WITH_EXPERTS:
        fields = dict(PUBLISHED_EXPERTS[WITH_EXPERTS[model]][1])
    else:
        return None
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | fields))
        return model_table(config.model_copy(update={"model_name": folder})).architecture


def refusal(document: Mapping[str, Any]) -> str:
    """What the configuration of a recipe is refused for; empty if it is taken."""
    try:
        config = PolicyConfig.parse(for_our_worker(document["policy"]))
        architecture = architecture_of(config)
        if architecture is None:
            return f"{NOT_KNOWN}: {config.model_name}"
        check_layout(config, architecture, topology_of(config, ranks_of(document)))
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    """Print how many recipes are taken, and the reasons of the others."""
    refused = {name: said for name, document in recipes() if (said := refusal(document))}
    total = sum(1 for _ in recipes())
    print(f"{total - len(refused)} of {total} are taken")
    for said, count in Counter(refused.values()).most_common():
        print(f"{count:4d}  {said}")


if __name__ == "__main__":
    main()
