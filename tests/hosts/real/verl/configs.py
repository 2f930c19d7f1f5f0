"""The configurations of the comparisons: verl's own files, composed by Hydra with few overrides, so
that an engine is chosen as its users choose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module

ORACLE = "fsdp2"
OURS = "megatron_policy"
BUILT_IN = "megatron"
"""verl's name of its own engine for Megatron, in whose place ours can stand."""
SEARCH = "hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]"
OPTIMIZER = {"lr": 3e-4, "weight_decay": 0.0, "total_training_steps": 100}
EPSILON = 1e-6
"""Added to the denominator of Adam: with verl's 1e-8, first steps make whole updates of gradients
that are nothing but rounding.
"""
LAYOUTS: dict[str, dict[str, int | bool]] = {
    "one": {},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
WORLD = {"one": 1}
"""Ranks of a layout, where they are not two."""


@dataclass(frozen=True)
class Case:
    """An engine in a layout, with the way in which rows become microbatches."""

    engine: str = OURS
    layout: str = "one"
    packed: bool = False
    dynamic: bool = False
    rows: int = 2
    tokens: int = 48
    dtype: str = "float32"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return WORLD.get(self.layout, 2)

    @property
    def oracle(self) -> Case:
        """verl's own engine on the same rows: as many data-parallel ranks, padded."""
        layout = self.layout if self.layout == "dp2" else "one"
        return Case(ORACLE, layout, False, self.dynamic, self.rows, self.tokens)

    @property
    def id(self) -> str:
        cut = "dynamic" if self.dynamic else "fixed"
        return f"{self.layout}-{'packed' if self.packed else 'padded'}-{cut}"


def _written(overrides: Mapping[str, Any]) -> list[str]:
    return [f"++{key}={_value(value)}" for key, value in overrides.items()]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_value, value)) + "]"
    return "null" if value is None else str(value)


def _model(case: Case, model: Path) -> dict[str, Any]:
    return {
        "path": model,
        "use_remove_padding": case.packed,
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "sdpa"},
    }


def _engine(case: Case) -> dict[str, Any]:
    if case.engine != ORACLE:
        return {"dtype": case.dtype, **LAYOUTS[case.layout]}
    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return {
        "strategy": ORACLE,
        "model_dtype": "fp32",
        "mixed_precision": fp32,
        "use_torch_compile": False,
    }


def _optimizer(case: Case) -> dict[str, Any]:
    name = "eps" if case.engine == ORACLE else "adam_eps"
    return {**OPTIMIZER, "override_optimizer_config": {name: EPSILON}}


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{key}": value for key, value in values.items()}


def sft_overrides(case: Case, model: Path) -> list[str]:
    """What follows `python -m verl.trainer.sft_trainer`, all but data and trainer."""
    if case.engine == ORACLE:
        groups = ["engine=fsdp", "optim=fsdp"]
    elif case.engine == BUILT_IN:
        groups = [f"engine={BUILT_IN}", "optim=megatron"]
    else:
        groups = [SEARCH, f"engine={OURS}", "optim=megatron"]
    values = {
        **_prefixed("model", _model(case, model)),
        **_prefixed("engine", _engine(case)),
        **_prefixed("optim", _optimizer(case)),
        **_prefixed(
            "data",
            {
                "use_dynamic_bsz": case.dynamic,
                "max_token_len_per_gpu": case.tokens,
                "micro_batch_size_per_gpu": case.rows,
                "num_workers": 0,
            },
        ),
        **case.overrides,
    }
    return [*groups, *_written(values)]


def sft_config(case: Case, model: Path) -> Any:
    """The configuration of verl's SFT trainer."""
    return _composed("sft_trainer_engine", sft_overrides(case, model))


SECTIONS = {ORACLE: "fsdp_config", BUILT_IN: "megatron", OURS: "engine"}
"""Where verl's actor has the keys of its engine."""


def ppo_config(case: Case, model: Path) -> Any:
    """The configuration of verl's PPO trainer."""
    return _composed("ppo_trainer", ppo_overrides(case, model))


def ppo_overrides(case: Case, model: Path) -> list[str]:
    """What follows `python -m verl.trainer.main_ppo`, all but data, critic, rollout and trainer."""
    groups = {
        ORACLE: [],
        BUILT_IN: [f"model_engine={BUILT_IN}"],
        OURS: [SEARCH, f"model_engine={OURS}"],
    }
    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    engine = SECTIONS[case.engine]
    read = {
        "log_prob_use_dynamic_bsz": case.dynamic,
        "log_prob_micro_batch_size_per_gpu": case.rows,
        "log_prob_max_token_len_per_gpu": case.tokens,
    }
    values = {
        **_prefixed("actor_rollout_ref.model", _model(case, model)),
        **_prefixed(f"{actor}.{engine}", _engine(case)),
        **_prefixed(f"{ref}.{engine}", _engine(case)),
        **_prefixed(f"{actor}.optim", _optimizer(case)),
        **_prefixed(
            actor,
            {
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": case.rows,
                "ppo_max_token_len_per_gpu": case.tokens,
                "use_dynamic_bsz": case.dynamic,
                "ppo_epochs": 2,
                "entropy_coeff": 0.01,
                "use_kl_loss": True,
                "kl_loss_coef": 0.1,
                "use_torch_compile": False,
            },
        ),
        **_prefixed(ref, {**read, "use_torch_compile": False}),
        **_prefixed(
            "actor_rollout_ref.rollout", {**read, "name": "vllm", "tensor_model_parallel_size": 1}
        ),
        **({f"{each}.strategy": ORACLE for each in (actor, ref)} if case.engine == ORACLE else {}),
        **case.overrides,
    }
    return [*groups[case.engine], *_written(values)]


def critic_overrides(case: Case, model: Path) -> list[str]:
    """The critic of a PPO trainer, in the actor's layout."""
    engine = SECTIONS[case.engine].removesuffix("_config")
    values = {
        **_prefixed("critic.model", _model(case, model)),
        **_prefixed(f"critic.{engine}", _engine(case)),
        **_prefixed("critic.optim", _optimizer(case)),
        "critic.ppo_micro_batch_size_per_gpu": case.rows,
        "critic.ppo_max_token_len_per_gpu": case.tokens,
        "critic.ppo_infer_max_token_len_per_gpu": case.tokens,
        **({"critic.strategy": ORACLE} if case.engine == ORACLE else {}),
    }
    return _written(values)


def _composed(name: str, overrides: list[str]) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides)
