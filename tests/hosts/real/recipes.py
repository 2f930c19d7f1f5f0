"""Which recipes of the host the configuration takes, each at the size of its own cluster.

A recipe counts as taken if no model of it is refused, and no method that its driver calls for its
engines. `python -m tests.hosts.real.recipes` prints the refused ones by reason. It needs `nemo_rl`,
if only its `utils/config.py`, on the path; models are known by the shapes that their makers
published.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.converters.architecture import Architecture
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.hosts.nemo_rl.not_implemented import NOT_IMPLEMENTED
from tests.families import PUBLISHED
from tests.hybrid_sizes import HYBRIDS

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
    "Qwen/Qwen2.5-7B": (QWEN2, _OF_7B),
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
FURTHER = {
    "Qwen/Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B": "Qwen3-235B-A22B",
    "moonshotai/Moonlight-16B-A3B-Instruct": "Moonlight-16B-A3B",
    "openai/gpt-oss-20b": "gpt-oss-20b in bf16",
    "deepseek-ai/DeepSeek-V3": "DeepSeek-V3 in bf16",
    # The recipes tell the reader where to put the weights.
    "Follow instructions in https://github.com/NVIDIA-NeMo/RL/blob/main/docs/guides/deepseek.md": (
        "DeepSeek-V3 in bf16"
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "Nemotron-3-Nano-30B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16": "Nemotron-3-Nano-30B-A3B",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "Nemotron-3-Super-120B-A12B",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2": "Nemotron-Nano-12B-v2",
    "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16": "Nemotron-3-Nano-Omni-30B-A3B-Reasoning",
    "Qwen/Qwen2.5-Omni-7B": "Qwen2.5-Omni-7B",
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "Qwen3-Omni-30B-A3B-Instruct",
    "Qwen/Qwen3.5-397B-A17B": "Qwen3.5-397B-A17B",
    "Qwen/Qwen3.5-35B-A3B-Base": "Qwen3.5-35B-A3B",
    "Qwen/Qwen3.5-9B-Base": "Qwen3.5-9B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "Qwen3-VL-30B-A3B-Instruct",
}
_VL_7B = PUBLISHED["Qwen2.5-VL-7B-Instruct"][1]
_VL_3B = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
_OMNI_7B = PUBLISHED["Qwen2.5-Omni-7B"][1]
_OMNI_NANO = PUBLISHED["Nemotron-3-Nano-Omni-30B-A3B-Reasoning"][1]
_SUPER = {
    name: value
    for name, value in HYBRIDS["Nemotron-3-Super-120B-A12B"][1].items()
    if name not in ("architectures", "torch_dtype", "transformers_version")
}
SEEING: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-Omni-3B": _OMNI_7B
    | {
        "text_config": _OMNI_7B["text_config"] | _VL_3B,
        "vision_config": _OMNI_7B["vision_config"] | {"out_hidden_size": 2048},
        "audio_config": _OMNI_7B["audio_config"] | {"output_dim": 2048},
    },
    # Where the recipes have the weights of Nemotron 3 Super Omni.
    "/path/to/nemotron-super-omni-hf-checkpoint": _OMNI_NANO | {"text_config": _SUPER},
    "Qwen/Qwen2.5-VL-3B-Instruct": _VL_7B
    | {
        "text_config": _VL_7B["text_config"] | _VL_3B,
        "tie_word_embeddings": True,
        "vision_config": _VL_7B["vision_config"] | {"out_hidden_size": 2048},
    },
}
"""Models that see pictures or hear sound, of other sizes than those of `tests/families`."""
MODELS = ("policy", "teacher", "value")
DISTILLATION = "on_policy_distillation"
"""The section of teachers with nodes of their own."""
SPLIT_MODEL = [
    f"{axis}_parallel_size"
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
]
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


def recipes(folder: str = "", megatron: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, models and cluster of every recipe below the folder, those in `vlm` see or hear, that
    trains a policy with Megatron, or every one that does not.
    """
    root = checkout() / "examples" / "configs" / "recipes"
    for file in sorted((root / folder).glob("**/*.yaml")):
        document = sections(file, "cluster", DISTILLATION, *MODELS)
        if with_megatron(document, "policy") == megatron:
            yield str(file.relative_to(root)), document


def with_megatron(document: Mapping[str, Any], model: str) -> bool:
    """Whether the recipe has such a model, and a Megatron worker for it."""
    return bool((document.get(model, {}).get("megatron_cfg") or {}).get("enabled"))


def ranks_of(document: Mapping[str, Any]) -> int:
    """The ranks that train: those of the cluster but for the engines' and the teachers' own."""
    nodes, gpus = document["cluster"]["num_nodes"], document["cluster"]["gpus_per_node"]
    distilled = document.get(DISTILLATION) or {}
    apart = distilled.get("non_colocated_teachers") or {}
    if apart.get("enabled"):
        teachers = {*distilled["teacher_model_by_agent_name"].values()}
        nodes -= len(teachers) * apart["default_teacher_cfg"]["num_nodes"]
    engines = (document["policy"].get("generation") or {}).get("colocated") or {}
    if engines.get("enabled", True):
        return nodes * gpus
    theirs = engines["resources"]
    if nodes == 1:
        return gpus - theirs["gpus_per_node"]
    return (nodes - theirs["num_nodes"]) * gpus


def dense_config(like: str, sizes: str) -> dict[str, Any]:
    """The config.json of a model as in `DENSE`."""
    own = dict(zip(SIZES, map(int, sizes.split("/")), strict=True))
    layers = {} if like == LLAMA else {"max_window_layers": own["num_hidden_layers"]}
    return PUBLISHED[like][1] | own | layers


def architecture_of(config: PolicyConfig) -> Architecture | None:
    """What the model's config.json describes, with what the recipe overrides; None for a model that
    the tables above lack.
    """
    model = config.model_name
    if model in DENSE:
        fields = dense_config(*DENSE[model])
    elif model in FURTHER:
        fields = (PUBLISHED | HYBRIDS)[FURTHER[model]][1]
    elif model in SEEING:
        fields = SEEING[model]
    else:
        return None
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        return bind_tables(config.model_copy(update={"model_name": folder}))[0].architecture


def refusal(document: Mapping[str, Any]) -> str:
    """What a recipe is refused for; empty if it is taken."""
    policy = document["policy"]
    if not with_megatron(document, "policy"):
        return refusal_of(policy, document)
    found = (refusal_of(document[m], document) for m in MODELS if with_megatron(document, m))
    return next(filter(None, found), "") or refused_generation(policy)


def refusal_of(raw: dict[str, Any], document: Mapping[str, Any]) -> str:
    """What the configuration of one of its models is refused for."""
    try:
        megatron = with_megatron(document, "policy")
        config = PolicyConfig.parse(for_our_worker(raw) if megatron else raw)
        architecture = architecture_of(config)
        if architecture is None:
            return f"{NOT_KNOWN}: {config.model_name}"
        check_layout(config, architecture, topology_of(config, ranks_of(document)))
    except (ConfigError, ConversionError) as error:
        return str(error)
    return ""


def refused_generation(policy: Mapping[str, Any]) -> str:
    """The method of the worker that the driver calls for the recipe's engines, and why it refuses;
    empty if there is none.
    """
    engines: Mapping[str, Any] = policy.get("generation") or {}
    backend, transport = engines.get("backend"), engines.get("refit_transport")
    megatron = policy["megatron_cfg"]
    called = ""
    if backend == "megatron" and not engines["colocated"]["enabled"]:
        called = "swap_weights_via_reshard"
    elif backend == "megatron" and any(megatron.get(size, 1) > 1 for size in SPLIT_MODEL):
        return "prepare_for_generation: a worker that holds a part of the model does not generate"
    elif backend == "sglang":
        called = "stream_weights_via_http"
    elif transport is not None:
        special = {"nccl_reshard": "nccl_reshard_refit"}
        other = "stream_remote_sparse_weights" if "sparse" in transport else "checkpoint_engine_rpc"
        called = special.get(transport, other)
    elif str((engines.get("vllm_cfg") or {}).get("kv_cache_dtype")).startswith("fp8"):
        called = "calibrate_qkv_fp8_scales"
    return f"{called}: {NOT_IMPLEMENTED[called]}" if called else ""


def main() -> None:
    """Print how many recipes are taken, and the reasons of the others: of all for Megatron, and of
    those for DTensor that see or hear.
    """
    for what, found in (("", recipes()), (" of DTensor that see", recipes("vlm", megatron=False))):
        said = {name: refusal(document) for name, document in found}
        refused: dict[str, list[str]] = defaultdict(list)
        for name, reason in said.items():
            if reason:
                refused[reason].append(name)
        print(f"{len(said) - sum(map(len, refused.values()))} of {len(said)}{what} are taken")
        print_reasons(refused)


def print_reasons(refused: Mapping[str, list[str]]) -> None:
    """Print what is refused for each reason, the most frequent first."""
    for reason, names in sorted(refused.items(), key=lambda each: -len(each[1])):
        print(f"{len(names):4d}  {reason}", *names, sep="\n        ")


if __name__ == "__main__":
    main()
