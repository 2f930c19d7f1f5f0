"""What a run refuses for the sake of its configuration and the number of its ranks, the check of a
configuration refuses before: every place of the code that refuses is caused here by the check, or
is among `OTHERWISE` with what it needs besides.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import checked_topology
from megatron_policy.engines.hugging_face.assemble import check_build
from megatron_policy.errors import ConfigError
from tests.unit.test_package import ROOT

PLAN = {"model.layers.*.self_attn": "colwise"}
STYLES: dict[str, Any] = {"model.layers.*.mlp.gate_proj": "unheard of"}
HALF = {"model.layers.*.self_attn.q_proj": "colwise"}
NOWHERE = {"model.nothing": "colwise"}
NO_PLAN = 1

MEGATRON: dict[str, Any] = {"enabled": True}
ADAPTERS = {"enabled": True, "dim": 2, "alpha": 2}


def megatron(**keys: Any) -> dict[str, Any]:
    return {"megatron_cfg": MEGATRON | keys}


def adapters(**keys: Any) -> dict[str, Any]:
    return megatron(peft=ADAPTERS | keys)


def groups(*groups: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return megatron(optimizer={"param_groups": list(groups)}, **keys)


def fsdp(top: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    return {"dtensor_cfg": {"enabled": True, **keys}, **(top or {})}


def packed(tokens: int = 64, **keys: Any) -> dict[str, Any]:
    return {"sequence_packing": {"enabled": True, "train_mb_tokens": tokens, **keys}}


def planned(name: str) -> dict[str, Any]:
    path = f"tests.unit.test_refusals.{name}"
    return fsdp(tensor_parallel_size=2, custom_parallel_plan=path)


def overrides(**fields: Any) -> dict[str, Any]:
    return {"hf_config_overrides": fields}


def optimizer(name: str, **settings: Any) -> dict[str, Any]:
    return fsdp({"optimizer": {"name": f"torch.optim.{name}", "kwargs": settings}})


EXPERT = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1"
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {}}
POLYNOMIAL = {"name": "torch.optim.lr_scheduler.PolynomialLR", "kwargs": {"total_iters": "many"}}
FROZEN = {"names": ["*"], "freeze": True}

# Model, number of ranks, and keys of the policy.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "packed rows that ranks do not share": ("qwen2", 2, megatron() | packed() | {"rows": 9}),
    "padded rows that ranks do not share": ("qwen2", 3, megatron()),
    "rows that FSDP's ranks do not share": ("qwen2", 3, fsdp() | packed()),
    "no replicas": ("qwen2", 3, megatron(tensor_model_parallel_size=2)),
    "no tensor-parallel heads": ("qwen2", 3, megatron(tensor_model_parallel_size=3)),
    "no ranks for experts": ("mixtral", 2, megatron(expert_model_parallel_size=4)),
    "uneven stages": ("qwen2", 3, megatron(pipeline_model_parallel_size=3) | {"rows": 12}),
    "chunks of no stages": ("qwen2", 1, megatron(virtual_pipeline_model_parallel_size=2)),
    "letters of no layout": ("qwen2", 1, megatron(pipeline_model_parallel_layout="t")),
    "chunks without ranks": ("qwen2", 1, megatron(pipeline_model_parallel_layout="Et|tL")),
    "another model's layout": ("qwen2", 1, megatron(pipeline_model_parallel_layout="EtL")),
    "no room": ("qwen2", 4, megatron(context_parallel_size=4) | packed(tokens=4)),
    "a bucket": ("qwen2", 2, megatron(tensor_model_parallel_size=2) | {"refit_bucket_bytes": 5000}),
    "sinks": ("gpt_oss", 1, megatron(transformer_impl="transformer_engine")),
    "no such module": ("qwen2", 1, adapters(target_modules=["nothing"])),
    "all modules excluded": ("qwen2", 1, adapters(exclude_modules=["*"])),
    "a rank that no weight has": ("qwen2", 1, adapters(dim=1000)),
    "one expert of a stack": ("gpt_oss", 1, adapters(target_modules=[EXPERT])),
    "parts of stacked experts": ("qwen3_5_moe", 1, adapters(target_modules=["up_proj"])),
    "no such group": ("qwen2", 1, groups({"names": ["nothing"], "lr": 0.1})),
    "an empty group": ("qwen2", 1, groups({"roles": ["router"], "lr": 0.1})),
    "an idle group": ("qwen2", 1, groups({"roles": ["norm"], "lr": 0.1}, peft=ADAPTERS)),
    "nothing trained": ("qwen2", 1, groups(FROZEN)),
    "a tower to freeze that is not there": ("qwen2", 1, megatron(freeze_vision_model=True)),
    "parts of one parameter": ("qwen2", 1, groups({"names": ["*.q_proj.weight"], "lr": 0.1})),
    "one expert of a layer": ("mixtral", 1, groups({"names": ["*.experts.1.*"], "lr": 0.1})),
    "variables of ranks": ("qwen2", 1, megatron(env_vars={"RANK": "1"})),
    "no such algorithm": ("qwen2", 1, megatron() | packed(algorithm="best")),
    "no such engine": ("qwen2", 1, {}),
    "a word for a number": ("qwen2", 1, megatron(pipeline_model_parallel_size="two")),
    "an unknown key": ("qwen2", 1, megatron(tensor_parallel=2)),
    "a coefficient below 0": ("qwen2", 1, megatron() | overrides(router_aux_loss_coef=-1)),
    "other weights": ("qwen2", 1, megatron() | overrides(hidden_size=32)),
    "an override that no model has": ("qwen2", 1, megatron() | overrides(hidden_act="nothing")),
    "another reference": ("qwen2", 1, megatron() | {"reference": "llama"}),
    "a reference that is not there": ("qwen2", 1, megatron() | {"reference": "nowhere"}),
    "no tensor-parallel plan's heads": ("qwen2", 3, fsdp({"rows": 12}, tensor_parallel_size=3)),
    "a plan of odd styles": ("qwen2", 2, planned("STYLES")),
    "a plan of half a block": ("qwen2", 2, planned("HALF")),
    "a plan for nothing": ("qwen2", 2, planned("NOWHERE")),
    "a plan for what is not linear": ("qwen2", 2, planned("PLAN")),
    "no plan": ("qwen2", 2, planned("NO_PLAN")),
    "a plan that is not there": ("qwen2", 2, planned("UNHEARD_OF")),
    "draws": ("llama", 2, fsdp(overrides(attention_dropout=0.5), tensor_parallel_size=2)),
    "ranks that no expert's weights divide": ("mixtral", 7, fsdp({"rows": 7})),
    "frequencies of each row": ("llama", 1, fsdp({"rope_length": "row"})),
    "an attention that the model lacks": ("gpt_oss", 1, fsdp(attn_implementation="sdpa")),
    "masks of text alone": ("gemma3", 1, fsdp(attn_implementation="sdpa")),
    "no such optimizer": ("qwen2", 1, optimizer("Nothing")),
    "an optimizer with an odd state": ("qwen2", 1, optimizer("NAdam")),
    "an optimizer of other settings": ("qwen2", 1, optimizer("AdamW", lr=-1.0)),
    "schedules without a milestone": ("qwen2", 1, fsdp({"scheduler": [LINEAR, LINEAR]})),
    "a schedule that cannot step": ("qwen2", 1, fsdp({"scheduler": POLYNOMIAL})),
}


OTHERWISE: dict[str, str] = {
    "the arguments, the order or the data of a call": """
        adapters.stacks:fit_to_peft checkpoint.report:* config.model_table:check_reference
        config.model_table:check_source
        config.policy_config:PolicyConfig.parse coordination.*:* inference.*:* memory.*:*
        monitoring.metrics_log:checked_metrics parallel.topology:Topology.__post_init__
        policy.checkpointing:* policy.generation:* policy.profiling:* policy.session:*
        policy.weight_exports:* refit.*:*
        training.accumulate:* training.checks:check_head training.losses:LossNormalization.*
        training.pieces:* training.sharding:* training.step:* workers.*:*
    """,
    "files, which are read later, or the disk": """
        checkpoint.kept_files:* converters.files.*:* monitoring.writers:JsonlWriter.__init__
        training.reference:* adapters.loading:*
    """,
    "what is installed or visible on a machine": """
        engines.hugging_face.assemble:_shared_out engines.megatron.cpu_platform:*
        engines.megatron.layer_spec:resolve_implementation
        engines.megatron.layers.experts:dispatcher_of engines.composite:take_surroundings
        engines.composite:DecoderRecorder.forward
        engines.megatron.layers.recurrent:choose_kernels interfaces.host:find_host
    """,
    "other policies of the process": "engines.megatron.process_groups:*",
    "the program of a host, or its own configuration, which its own check reads": "hosts.*:*",
    "a command's options or what it is given": """
        cli.*:* convert.*:* estimate.plan:* estimate.tower:* parity.*:* pictures.*:*
    """,
    "what a model's code passes to its attention": "engines.hugging_face.attention:*",
    "what a family's code declares and no engine reads": "engines.shared:check_embedder",
    "what the modules of a model's towers are, which are made with it": """
        engines.megatron.adapters:_check_linear
    """,
    "a file of keys, which the check reads too": "config.composed:*",
    "the model's files, which the check reads too": """
        config.model_table:_make_unlisted_table converters.formats.*:*
        adapters.base:* adapters.opening:* adapters.peft_files:*
        engines.hugging_face.assemble:_refuse_mixing engines.hugging_face.assemble:_tensor_parallel
        engines.hugging_face.module:Decoder.base
    """,
    "the cuts that `check_build` makes too: tests/unit/test_tensor_parallel.py": """
        engines.hugging_face.tensor_plan:_translate_style
        engines.hugging_face.tensor_split:_Splitting.*
    """,
}
"""What a refusal is about, and where it is: `module:function`, patterns of both."""


def places() -> Iterator[str]:
    """Every function that makes a ConfigError, as `module:function`."""

    def functions(node: ast.AST, name: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and ast.unparse(child.func) == "ConfigError":
                yield ".".join(name)
            yield from functions(child, (*name, child.name) if inner else name)

    for folder in (ROOT / "megatron_policy", ROOT / "converters"):
        for file in sorted(folder.rglob("*.py")):
            inside = file.relative_to(ROOT).with_suffix("").parts
            module = ".".join(inside).removeprefix("megatron_policy.").removesuffix(".__init__")
            if module.startswith("converters") == (folder.name == "converters"):
                tree = ast.parse(file.read_text())
                yield from (f"{module}:{name}" for name in functions(tree, ()))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Where ConfigErrors are made, whether or not they are raised further."""
    found: set[str] = set()

    def note(self: ConfigError, *args: object) -> None:
        ValueError.__init__(self, *args)
        frame = sys._getframe(1)
        module = frame.f_globals["__name__"].removeprefix("megatron_policy.")
        found.add(f"{module}:{frame.f_code.co_qualname.replace('.<locals>', '')}")

    monkeypatch.setattr(ConfigError, "__init__", note, raising=False)
    return found


def policy_section(checkpoint: Any, model: str, keys: dict[str, Any]) -> dict[str, Any]:
    keys = {"train_global_batch_size": keys.get("rows", 8), **keys}
    reference = keys.pop("reference", None)
    if reference is not None:
        there = reference != "nowhere"
        keys["reference_model_name"] = str(checkpoint(reference)) if there else "/nowhere"
    keys.pop("rows", None)
    return {"model_name": str(checkpoint(model)), "train_micro_batch_size": 1, **keys}


def check(raw: dict[str, Any], ranks: int) -> None:
    """What `inspect-config` asks."""
    config = PolicyConfig.parse(raw)
    table, _ = bind_tables(config)
    topology = checked_topology(config, table.architecture, ranks)
    if not config.megatron_cfg.enabled:
        check_build(config, table, topology)


def test_every_refusal_is_the_checks_too_or_needs_more_than_it_knows(
    checkpoint: Any, made: set[str]
) -> None:
    for name, (model, ranks, keys) in CASES.items():
        with pytest.raises(ConfigError):
            check(policy_section(checkpoint, model, keys), ranks)
            pytest.fail(f"{name}: accepted")
    found = set(places())
    assert len(found) > 150 and "config.layout:equal_share" in found
    caused = {place for place in found if place in made}
    known = " ".join(OTHERWISE.values()).split()
    explained = {place for place in found for each in known if fnmatchcase(place, each)}
    assert sorted(found - caused - explained) == []
    idle = [each for each in known if not any(fnmatchcase(place, each) for place in found)]
    assert idle == [], "no code is like this any more"


@pytest.mark.parametrize("name", list(CASES)[:4])
def test_both_commands_say_so(checkpoint: Any, tmp_path: Path, name: str) -> None:
    model, ranks, keys = CASES[name]
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump({"policy": policy_section(checkpoint, model, keys)}))
    for command, option in (("inspect-config", "--world-size"), ("plan", "--gpus")):
        result = CliRunner().invoke(app, [command, str(file), option, str(ranks)])
        assert result.exit_code == 2, result.output
        said = result.stderr.replace("\n", " ")
        if "FSDP" in name and command == "plan":
            assert "plans are of Megatron-Core" in said
        else:
            assert "is not a multiple of" in said or "whole replicas" in said
