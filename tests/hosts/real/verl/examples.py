"""Which of verl's shipped Megatron examples are taken, each at the size of its own cluster.

A configuration counts as taken if the engines of its actor, reference and critic are what verl
would make in one process: none is refused, the first two can share a model, and the last has their
layout. `python -m tests.hosts.real.verl.examples` prints the refused ones by reason, and those that
Megatron-Core itself refuses at that size.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.config.model_table import bind_model
from megatron_policy.engines.megatron.process_groups import check_same_layout
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.hosts.roles import check_alike
from megatron_policy.hosts.verl.translate import translate
from megatron_policy.parallel.topology import Topology
from tests.families import PUBLISHED
from tests.hosts.real.recipes import (
    LLAMA,
    QWEN2,
    QWEN3,
    SIZES,
    dense_config,
    print_reasons,
)
from tests.hosts.real.verl.shipped import MEGATRON, Example, checkout, examples

SPLIT = (
    "tensor_model",
    "pipeline_model",
    "virtual_pipeline_model",
    "context",
    "expert_model",
    "expert_tensor",
)
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
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "Nemotron-3-Nano-30B-A3B",
}


def _resized(model: str, **text: Any) -> dict[str, Any]:
    """The config.json of a model that sees pictures, with these fields of its decoder."""
    fields = PUBLISHED[model][1]
    vision = fields["vision_config"] | {"out_hidden_size": text["hidden_size"]}
    return fields | {"text_config": fields["text_config"] | text, "vision_config": vision}


_VL_2B = _resized(
    "Qwen3-VL-8B-Instruct",
    **dict(zip(SIZES, (2048, 6144, 16, 8, 28), strict=True)),
)
SEEING: dict[str, dict[str, Any]] = {
    "Qwen3-VL-2B-Instruct": _VL_2B
    | {
        "tie_word_embeddings": True,
        "vision_config": _VL_2B["vision_config"]
        | {"deepstack_visual_indexes": [5, 11, 17], "depth": 24}
        | {"hidden_size": 1024, "intermediate_size": 4096},
    },
    "Qwen3-VL-235B-A22B-Instruct": _resized(
        "Qwen3-VL-30B-A3B-Instruct",
        **dict(zip(SIZES, (4096, 12288, 64, 4, 94), strict=True)),
        moe_intermediate_size=1536,
    ),
    "Qwen3.5-122B-A10B": _resized(
        "Qwen3.5-35B-A3B",
        hidden_size=3072,
        num_hidden_layers=48,
        num_attention_heads=32,
        linear_num_value_heads=64,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
}
"""Models that see pictures, of other sizes than those of `tests/families`."""
OTHERS = {
    "Hy3": {"model_type": "hy_v3", "architectures": ["HYV3ForCausalLM"]},
    "DeepSeek-V4-Flash": {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]},
}
"""Models of families that the table of models lacks: what their config.json calls them."""

KEEPS_OLD_WEIGHTS = (
    "verl's trainer with separate rollouts keeps old weights by a handler of its own engines: set "
    "algorithm.rollout_correction.bypass_mode"
)


@dataclass(frozen=True)
class Role:
    """verl's sections of an engine."""

    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    optim: Any = None
    checkpoint: Any = None


@dataclass(frozen=True)
class Made:
    """What an engine has before it builds its policy."""

    config: PolicyConfig
    topology: Topology


def _keeps_old_weights(document: Mapping[str, Any]) -> bool:
    mode = (document["trainer"].get("v1") or {}).get("trainer_mode")
    correction = document["algorithm"].get("rollout_correction") or {}
    return mode == "separate_async" and not correction.get("bypass_mode")


def roles(example: Example) -> dict[str, Role]:
    """The engines that verl makes in each process, by their names: "trained", "reference" and
    "critic".
    """
    document = example.document
    if example.sft:
        sections = (document["model"], document["engine"], document["optim"])
        return {"trained": Role(*sections, document.get("checkpoint"))}
    workers, critic = document["actor_rollout_ref"], document["critic"]
    actor, model, algorithm = workers["actor"], workers["model"], document["algorithm"]
    found = {"trained": Role(model, actor[MEGATRON], actor["optim"], actor.get("checkpoint"))}
    adapted = model["lora"].get("rank") or model.get("lora_rank") or model.get("lora_adapter_path")
    # With adapters the reference is the actor without them.
    if (algorithm.get("use_kl_in_reward") or actor.get("use_kl_loss")) and not adapted:
        found["reference"] = Role(model | {"mtp": {"enable": False}}, workers["ref"][MEGATRON])
    values = critic["enable"]
    if algorithm["adv_estimator"] == "gae" if values is None else values:
        of_values = critic["model"] | {"model_type": "value_model"}
        sections = (of_values, critic[MEGATRON], critic["optim"])
        found["critic"] = Role(*sections, critic.get("checkpoint"))
    return found


def refusal(example: Example) -> str:
    """What an example is refused for; empty if it is taken."""
    if not example.sft and _keeps_old_weights(example.document):
        return KEEPS_OLD_WEIGHTS
    for role in roles(example).values():
        if fields_of(_name(role)) is None:
            return f"a model that is not in the tables of this module: {role.model['path']}"
    try:
        made = {name: _made(role, example.ranks) for name, role in roles(example).items()}
        trained = made["trained"]
        if "reference" in made:
            check_alike(trained.config, made["reference"].config)
        if "critic" in made:
            check_same_layout(trained.topology, made["critic"].topology)
    except (ConfigError, ConversionError) as error:
        return str(error)
    return ""


def _name(role: Role) -> str:
    return Path(role.model["path"]).name


def _made(role: Role, ranks: int) -> Made:
    fields = fields_of(_name(role)) or {}
    text = (
        {"text_config": SimpleNamespace(**fields["text_config"])} if "text_config" in fields else {}
    )
    model = {**role.model, "hf_config": SimpleNamespace(**fields | text)}
    engine = {**role.engine, "use_remove_padding": model["use_remove_padding"]}
    config = translate(model, engine, role.optim, role.checkpoint).parse()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        table = bind_model(config.model_copy(update={"model_name": folder}))
    topology = topology_of(config, ranks)
    check_layout(config, table.architecture, topology, planned=True)
    return Made(config, topology)


def refused_upstream(example: Example) -> str:
    """Why Megatron-Core does not make the process groups that verl's own engine asks it for, with
    as many ranks as the example has; empty if it does.
    """
    engine = roles(example)["trained"].engine
    sizes = {f"{name}_parallel_size": engine[f"{name}_parallel_size"] for name in SPLIT}
    dist.init_process_group("fake", rank=0, world_size=example.ranks, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    except (RuntimeError, AssertionError) as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return ""


def enlarged(example: Example) -> Example:
    """The example on the fewest multiples of its ranks that hold its experts."""
    engine = roles(example)["trained"].engine
    tensor = engine["expert_tensor_parallel_size"] or engine["tensor_model_parallel_size"]
    experts = engine["expert_model_parallel_size"] * tensor
    ranks = math.lcm(example.ranks, engine["pipeline_model_parallel_size"] * experts)
    return replace(example, ranks=ranks)


def sees(example: Example) -> bool:
    """Whether the example's model has a tower."""
    return "vision_config" in (fields_of(example.model) or {})


def fields_of(model: str) -> dict[str, Any] | None:
    """A model's config.json, as its maker published it; None if it is not known."""
    if model in DENSE:
        return dense_config(*DENSE[model])
    if model in PUBLISHED:
        return PUBLISHED[model][1]
    if model in WITH_EXPERTS:
        return PUBLISHED[WITH_EXPERTS[model]][1]
    return (SEEING | OTHERS).get(model)


def main() -> None:
    """Print how many configurations are taken, and the reasons of the others."""
    root = checkout()
    if root is None:
        raise SystemExit("verl's sources, with its examples, are not on the path")
    found, others = examples(root)
    nowhere: dict[Example, str] = {}
    refused: dict[str, list[str]] = defaultdict(list)
    for example in found:
        reason = refusal(example)
        upstream = reason and refused_upstream(example)
        if upstream:
            nowhere[example] = upstream
        elif reason:
            refused[reason].append(f"{example.source} ({example.model})")
    taken = len(found) - len(nowhere) - sum(map(len, refused.values()))
    print(
        f"{taken} of {len(found)} are taken, {sum(map(sees, found))} of models that see; "
        f"Megatron-Core itself refuses {len(nowhere)}"
    )
    print_reasons(refused)
    for example, why in nowhere.items():
        larger = enlarged(example)
        then = refusal(larger) or "taken"
        print(f"Megatron-Core: {example.source}, {example.ranks} ranks: {why}")
        print(f"        on {larger.ranks} ranks: {then}")
    for name, reason in others.items():
        print(f"not composed: {name}: {reason}")


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    main()
