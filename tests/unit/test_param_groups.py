"""Groups of parameters: which parameter is in which, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.config.megatron_sections import MegatronConfig
from megatron_policy.config.param_groups import ParamGroups, role_of
from megatron_policy.config.trained import ParamRole
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.stored import tiled_in_part
from megatron_policy.converters.rows import Role
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConfigError
from tests.dist.cases import policy_config
from tests.picture_models import TINY, make_model


def groups_of(*groups: dict[str, Any], **settings: Any) -> ParamGroups:
    return ParamGroups.of(
        MegatronConfig.model_validate({"optimizer": {"param_groups": groups}, **settings})
    )


def table_of(path: Path) -> Table:
    return bind(read_config(path))


ROLES = {
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "model.norm.weight": "norm",
    "model.layers.0.input_layernorm.weight": "norm",
    "model.layers.0.self_attn.q_norm.weight": "norm",
    "model.layers.0.self_attn.q_proj.weight": "linear",
    "model.layers.0.self_attn.o_proj.weight": "linear",
    "model.layers.1.mlp.gate.weight": "router",
    "model.layers.1.mlp.experts.1.up_proj.weight": "expert",
}


def test_groups_can_name_and_adapters_freeze_every_role_of_a_row() -> None:
    assert {role.value for role in Role if role is not Role.MATRIX} <= {*get_args(ParamRole)}


def test_every_tensor_has_the_role_that_its_name_says_and_frozen_routers_are_a_group(
    checkpoint,
) -> None:
    found = {n: role_of(e) for e in table_of(checkpoint("qwen3_moe")).entries for n in e.hf}
    assert {name: found[name] for name in ROLES} == ROLES
    biased = table_of(checkpoint("qwen2", tied=True)).entries
    assert {role_of(e) for e in biased if e.hf[0].endswith("bias")} == {"bias"}
    copies = {role_of(e) for e in biased if "embed_tokens" in e.hf[0]}
    assert copies == {"embedding"}, "a tied head is a copy of the embedding"
    groups = groups_of({"roles": ["router"], "lr": 1e-3}, freeze_moe_router=True)
    frozen = {e.hf[0] for e in table_of(checkpoint("qwen3_moe")).entries if groups.frozen(e)}
    assert frozen and all(name.endswith("mlp.gate.weight") for name in frozen)


def test_the_first_group_that_fits_counts(checkpoint) -> None:
    groups = groups_of(
        {"names": ["model.layers.0.*"], "roles": ["linear"], "lr": 1e-4},
        {"names": ["model.layers.*", "model.norm.*"], "freeze": True},
        {"roles": ["norm"], "weight_decay": 0.1},
    )
    table = table_of(checkpoint("qwen3"))
    groups.check(table)
    for entry in table.entries:
        name, group = entry.hf[0], groups.group_of(entry)
        first = name.startswith("model.layers.0.") and "norm" not in name
        inside = name.startswith(("model.layers.", "model.norm."))
        assert groups.frozen(entry) == (inside and not first), name
        assert (group.lr if group else None) == (1e-4 if first else None), name


REFUSED: dict[str, dict[str, Any]] = {
    "no tensor of the model has a name like 'model.layer.0.*'; it has model.layers.0.": {
        "names": ["model.layer.0.*"]
    },
    "q_proj.weight, model.layers.0.self_attn.k_proj.weight, model.layers.0.self_attn.v_proj"
    ".weight are one parameter in training": {"names": ["*.q_proj.weight"]},
    "put \\* where the expert's number is": {"names": ["*.experts.1.*"]},
    "freezes every parameter": {"names": ["*"]},
    r"in the group {'roles': \['adapter'\]}: the model has the roles .*, or set policy.mega": {
        "roles": ["adapter"]
    },
    "what names fits has the roles head; name one of these, or leave the group out": {
        "names": ["lm_head.weight"],
        "roles": ["embedding"],
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_groups_that_no_model_can_have_are_refused(checkpoint, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups_of(REFUSED[message] | {"freeze": True}).check(table_of(checkpoint("qwen3_moe")))


def test_a_group_of_a_role_that_the_model_lacks_is_refused(checkpoint) -> None:
    dense = table_of(checkpoint("qwen3"))
    with pytest.raises(
        ConfigError, match=r"in the group {'roles': \['router'\]}: the model has the"
    ):
        groups_of({"roles": ["router"], "lr": 1e-3}).check(dense)
    groups_of({"roles": ["router", "norm"], "lr": 1e-3}).check(dense)
    groups_of(freeze_moe_router=True).check(dense)


@pytest.mark.parametrize(
    ("family", "tower_of", "projector"),
    [
        ("qwen3_vl", "model.visual", r"merger|deepstack_merger_list"),
        ("internvl", "(vision_tower|multi_modal_projector)", "layer_norm|linear_[12]"),
        ("smolvlm", r"model.(vision_model|connector)", "modality_projection"),
    ],
)
def test_parts_are_frozen_by_the_keys_of_the_host(
    checkpoint, tmp_path: Path, family: str, tower_of: str, projector: str
) -> None:
    table = table_of(make_model(tmp_path / "hf", family))
    names = [entry.hf[0] for entry in table.entries]
    tower = {name for name in names if re.match(rf"{tower_of}\.", name)}
    mergers = {name for name in tower if re.match(rf"{tower_of}\.({projector})\.", name)}
    assert mergers and tower > mergers
    parts = {"vision_model": tower - mergers, "vision_projection": mergers}
    parts["language_model"] = {*names} - tower
    for part, frozen in parts.items():
        groups = groups_of(freeze_config={f"freeze_{part}": True})
        groups.check(table)
        assert {e.hf[0] for e in table.entries if groups.frozen(e)} == frozen, part
    hearing = table_of(make_model(tmp_path / "omni", "qwen2_5_omni_thinker"))
    both = groups_of(freeze_config={"freeze_vision_model": True, "freeze_vision_projection": True})
    frozen = {e.hf[0] for e in hearing.entries if both.frozen(e)}
    assert frozen == {n for e in hearing.entries if (n := e.hf[0]).startswith("visual.")}
    assert {e.hf[0] for e in table.entries if both.frozen(e)} == tower
    omni = table_of(make_model(tmp_path / "nemotron", "nemotron_h_omni"))
    parts = {
        "vision_model": "vision_model.",
        "vision_projection": "mlp1.",
        "sound_encoder": "sound_encoder.",
        "sound_projection": "sound_projection.",
    }
    for part, start in parts.items():
        groups = groups_of(**{f"freeze_{part}": True})
        groups.check(omni)
        frozen = {e.hf[0] for e in omni.entries if groups.frozen(e)}
        assert frozen == {n for e in omni.entries if (n := e.hf[0]).startswith(start)}, part


LACKING: dict[str, tuple[str, dict[str, Any], str]] = {
    "sees nothing": (
        "qwen3",
        {"freeze_vision_model": True},
        r"megatron_cfg.freeze_vision_model=True would keep nothing: qwen3 has no such part. .*"
        r"that the model has are freeze_config.freeze_language_model$",
    ),
    "has no projector": (
        "qwen3",
        {"freeze_config": {"freeze_vision_projection": True}},
        r"megatron_cfg.freeze_config.freeze_vision_projection=True would",
    ),
    "hears nothing": (
        "qwen3_vl",
        {"freeze_sound_encoder": True},
        r"freeze_sound_encoder=True would .* are freeze_vision_model, freeze_vision_projection, "
        r"freeze_config",
    ),
    "projects sound within its tower": (
        "qwen2_5_omni_thinker",
        {"freeze_sound_projection": True},
        r"freeze_sound_projection=True would .* freeze_vision_projection, freeze_sound_encoder, ",
    ),
    "is adapted": (
        "qwen3",
        {"freeze_vision_model": True, "peft": {"enabled": True, "dim": 4, "alpha": 8}},
        "megatron_cfg.freeze_vision_model=True would",
    ),
}


@pytest.mark.parametrize("model", LACKING)
def test_a_key_that_freezes_a_part_which_the_model_lacks_is_refused(
    checkpoint, tmp_path: Path, model: str
) -> None:
    family, keys, message = LACKING[model]
    found = checkpoint(family) if family == "qwen3" else make_model(tmp_path / "hf", family)
    with pytest.raises(ConfigError, match=message):
        groups_of(**keys).check(table_of(found))


def test_of_keys_for_the_hosts_other_worker_only_those_it_always_sets_may_find_nothing(
    checkpoint,
) -> None:
    """Its recipes freeze the tower that hears of models without one."""
    text = checkpoint("qwen3")

    def groups_for(**said: bool) -> ParamGroups:
        keys = {"dtensor_cfg": {"automodel_kwargs": {"freeze_config": said}}}
        return ParamGroups.of_policy(PolicyConfig.parse(policy_config(text, keys)))

    table = table_of(text)
    hosts = groups_for(freeze_audio_tower=True)
    hosts.check(table)
    assert hosts.freezing.list_idle(table) == ["freeze_vision_tower", "freeze_audio_tower"]
    with pytest.raises(ConfigError, match=r"freeze_config.freeze_vision_tower=True would keep"):
        groups_for(freeze_vision_tower=True).check(table)


def test_keys_of_the_host_freeze_the_projectors_of_every_family_apart_from_its_towers(
    tmp_path: Path,
) -> None:
    towers = r"visual\.|vision_(tower|model)\.|(audio_tower|sound_(encoder|projection))\."
    for family in TINY:
        table = table_of(make_model(tmp_path / family, family))
        both = groups_of(
            freeze_config={"freeze_vision_model": True, "freeze_vision_projection": True}
        )
        beside = groups_of(freeze_config={"freeze_vision_projection": True})
        seeing = {e.hf[0] for e in table.entries if both.frozen(e)}
        projector = {e.hf[0] for e in table.entries if beside.frozen(e)}
        assert projector and seeing > projector, family
        # What is in no module of a tower's name belongs to a projector.
        others = {name for name in seeing if not re.search(rf"(^|\.)({towers})", name)}
        assert others <= projector, (family, others - projector)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen3_vl", {"vision_tower": r"model\.visual\."}),
        ("internvl", {"vision_tower": r"vision_tower\.", "audio_tower": "nothing"}),
        ("qwen2_5_omni_thinker", {"vision_tower": r"visual\.", "audio_tower": r"audio_tower\."}),
        ("qwen3_omni_moe_thinker", {"language_model": r"thinker\.model\.|model\."}),
        ("gemma3", {"language_model": r"language_model\."}),
    ],
)
def test_parts_are_frozen_by_the_keys_of_the_hosts_other_worker(
    tmp_path: Path, family: str, parts: dict[str, str]
) -> None:
    """What NeMo Automodel freezes by the names of modules, its default with them."""
    table = table_of(make_model(tmp_path / "hf", family))

    def list_frozen(**said: bool) -> set[str]:
        keys = {"dtensor_cfg": {"automodel_kwargs": {"freeze_config": said}}}
        groups = ParamGroups.of_policy(PolicyConfig.parse(policy_config(tmp_path / "hf", keys)))
        groups.check(table)
        return {e.hf[0] for e in table.entries if groups.frozen(e)}

    for part, pattern in parts.items():
        said = {"freeze_vision_tower": False, f"freeze_{part}": True}
        wanted = {n for e in table.entries if re.match(pattern, n := e.hf[0])}
        assert list_frozen(**said) == wanted, part
    assert list_frozen() == list_frozen(freeze_vision_tower=True)


def test_groups_of_a_model_without_a_family_are_refused(checkpoint) -> None:
    table = replace(table_of(checkpoint("qwen3")), entries=())
    with pytest.raises(ConfigError, match="needs a family of this package, and qwen3 is none"):
        groups_of({"roles": ["norm"], "lr": 1e-3}).check(table)


def test_groups_that_say_nothing_are_refused() -> None:
    for group, message in (
        ({"freeze": True}, "names or roles are missing"),
        ({"roles": ["norm"], "freeze": True, "lr": 0.1}, "leave out the rates"),
        ({"roles": ["norm"]}, "changes nothing"),
        ({"roles": ["normal"], "freeze": True}, "'norm'"),
        ({"role": ["norm"], "freeze": True}, "role"),
    ):
        with pytest.raises(ValueError, match=message):
            groups_of(group)


def test_inspect_config_shows_what_is_trained_and_how(checkpoint, tmp_path: Path) -> None:
    path, file = checkpoint("qwen3"), tmp_path / "policy.yaml"

    def shown(groups: list[dict[str, Any]]) -> Any:
        section = policy_config(path, {"optimizer": {"param_groups": groups}})
        file.write_text(yaml.safe_dump({"policy": section}))
        return CliRunner().invoke(app, ["inspect-config", str(file)])

    frozen = shown([{"roles": ["embedding"], "freeze": True}, {"roles": ["norm"], "lr": 1e-4}])
    assert frozen.exit_code == 0, frozen.output
    for words in ("%) frozen", "%) with lr 0.0001", "%) as the optimizer says"):
        assert words in frozen.stdout, words
    wrong = shown([{"names": ["nothing"], "freeze": True}])
    assert wrong.exit_code == 2 and "'nothing'" in wrong.stderr.replace("\n", " ")


def test_layers_without_state_are_left_out_whole() -> None:
    whole = [((0, 0), (1, 4)), ((2, 0), (1, 4))], [((0, 0), (1, 2)), ((0, 2), (1, 2))], []
    assert all(tiled_in_part((4, 4), boxes) for boxes in whole)
    for boxes in (
        [((0, 0), (1, 2))],
        [((0, 0), (2, 4)), ((1, 0), (1, 4))],
        [((4, 0), (1, 4))],
        [((0, 0), (1, 3)), ((0, 2), (1, 2))],
    ):
        assert not tiled_in_part((4, 4), boxes), boxes
