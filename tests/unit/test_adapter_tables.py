"""The tables of adapters: which modules are adapted, and where the elements of A and B are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.adapters.stacks import stack_adapters
from megatron_policy.adapters.table import join_adapters, list_target_parameters
from megatron_policy.adapters.targets import choose_adapters, name_targets
from megatron_policy.config import MegatronConfig, PolicyConfig
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.rows.blocks import fill_parts, fill_shard
from megatron_policy.converters.rows.shards import spans
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConfigError
from tests.pure.test_config import minimal

SIZES = {"layers": 2, "heads": 8, "groups": 4, "hidden": 64, "ffn": 96}


@pytest.fixture(scope="module")
def table(checkpoint) -> Table:
    return bind(read_config(checkpoint("qwen2", tied=False, **SIZES)))


def adapters(table: Table, **peft: Any) -> Table:
    section = {"enabled": True, "dim": 4, "alpha": 8.0, **peft}
    found = choose_adapters(PolicyConfig.parse(minimal(**{"megatron_cfg.peft": section})), table)
    assert found is not None
    return found


def modules(table: Table) -> set[str]:
    """What PEFT would call the adapted modules of layer 1."""
    at = "base_model.model.model.layers.1."
    names = [name for name in table.hf_shapes() if name.startswith(at) and ".lora_B" in name]
    return {name.removeprefix(at).removesuffix(".lora_B.weight") for name in names}


ATTENTION = {f"self_attn.{each}_proj" for each in "qkvo"}
MLP = {f"mlp.{each}_proj" for each in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ATTENTION | MLP),
        ({"target_modules": ["linear_qkv"]}, ATTENTION - {"self_attn.o_proj"}),
        ({"target_modules": ["q_proj", "linear_v"]}, {"self_attn.q_proj", "self_attn.v_proj"}),
        ({"target_modules": ["linear_fc1_up", "linear_fc2"]}, {"mlp.up_proj", "mlp.down_proj"}),
        ({"target_modules": ["self_attn.o_proj"]}, {"self_attn.o_proj"}),
        ({"target_modules": ["*.layers.1.*.linear_fc1"]}, {"mlp.gate_proj", "mlp.up_proj"}),
        ({"target_modules": ["decoder.layers.0.mlp.linear_fc1"]}, set()),
        (
            {"exclude_modules": ["linear_qkv", "down_proj"]},
            MLP - {"mlp.down_proj"} | {"self_attn.o_proj"},
        ),
        (
            {"target_modules": ["linear_qkv"], "exclude_modules": ["k_proj"]},
            {"self_attn.q_proj", "self_attn.v_proj"},
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_modules_are_named_as_megatron_core_or_hugging_face_names_them(
    table: Table, asked: dict[str, Any], expected: set[str]
) -> None:
    assert modules(adapters(table, **asked)) == expected


def test_a_fused_module_has_one_a_and_each_part_has_its_own_if_it_is_named(table: Table) -> None:
    fused, parts = adapters(table), adapters(table, target_modules=["q_proj", "k_proj", "v_proj"])
    a = "base_model.model.model.layers.0.self_attn.{}_proj.lora_A.weight"
    assert fused.copies()[a.format("k")] == fused.copies()[a.format("v")] == a.format("q")
    assert parts.copies() == {}
    assert {a.format(each) for each in "qkv"} <= parts.hf_shapes().keys()


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_module_that_the_model_lacks_is_named_with_the_legal_ones(table: Table, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"peft\.{key}: .*'c_attn'; legal are linear_qkv, q_proj"
    ):
        adapters(table, **{key: ["q_proj", "c_attn"]})
    with pytest.raises(ConfigError, match="leaves no module to adapt"):
        adapters(table, exclude_modules=["model.layers.*"])


def groups_of(*groups: dict[str, Any]) -> ParamGroups:
    section = {"peft": {"enabled": True, "dim": 4, "alpha": 8.0}}
    settings = section | {"optimizer": {"param_groups": groups}}
    return ParamGroups.of(MegatronConfig.model_validate(settings))


def test_groups_of_parameters_have_to_have_adapters(table: Table) -> None:
    whole = join_adapters(table, adapters(table))
    for fitting in ({"roles": ["adapter"]}, {"names": ["*.lora_B.weight"]}):
        groups_of(fitting | {"lr": 0.1}).check(whole)
    for idle in ({"roles": ["norm"]}, {"names": ["model.layers.*"]}):
        with pytest.raises(ConfigError, match=r"no adapter is in the group .*roles: \[adapter\]"):
            groups_of(idle | {"lr": 0.1}).check(whole)


def test_a_scalar_head_is_trained_beside_adapters_and_can_have_a_group(checkpoint) -> None:
    head = ScalarHead(per_token=True)
    table = bind(read_config(checkpoint("qwen2", tied=False, **SIZES)), head=head)
    own = adapters(table, target_modules=["q_proj"])
    scores = {f"base_model.model.score.{each}" for each in ("weight", "bias")}
    assert scores <= own.hf_shapes().keys()
    whole = join_adapters(table, own)
    assert len({entry.megatron for entry in whole.entries}) == len(whole.entries)

    def trained(*groups: dict[str, Any]) -> set[str]:
        found = groups_of(*groups)
        found.check(whole)
        return {e.hf[0] for e in whole.entries if not (found.frozen(e) or e.adapts)}

    assert trained() == trained({"roles": ["head"], "lr": 0.1}) == {"score.weight", "score.bias"}
    assert trained({"names": ["score.*"], "freeze": True}) == set()
    with pytest.raises(ConfigError, match=r"no adapter is in the group"):
        trained({"roles": ["norm"], "lr": 0.1})


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2", []),
        ("qwen2", ["q_proj", "v_proj", "up_proj"]),
        ("qwen2", ["k_proj"]),
        ("qwen2", ["q_proj", "k_proj", "v_proj", "gate_proj"]),
        ("gpt_oss", ["down_proj", "gate_up_proj"]),  # experts that are stacked
        ("granitemoe", ["*.experts.*"]),
        ("nemotron_h", ["*.experts.*"]),
        ("qwen3_moe", ["*.experts.*"]),
    ],
    ids=str,
)
def test_shards_give_the_tensors_they_were_filled_from(checkpoint, family, targets, size) -> None:
    found = adapters(
        bind(read_config(checkpoint(family, tied=False, **SIZES))), target_modules=targets
    )
    if family == "qwen3_moe":
        found = stack_adapters(found)
    arch = found.architecture
    wholes = {name: torch.randn(shape) for name, shape in found.hf_shapes().items()}
    backs = {name: torch.full_like(whole, torch.nan) for name, whole in wholes.items()}
    for entry in found.entries:
        for rank in range(size):
            shard = torch.empty(entry.row.local_shape(arch, size))
            fill_shard(entry.row, arch, shard, [wholes[name] for name in entry.hf], rank, size)
            fill_parts(entry.row, arch, [backs[name] for name in entry.hf], shard, rank, size)
            assert spans(entry.row, arch, rank, size)
    assert [n for n, whole in wholes.items() if not torch.equal(backs[n], whole)] == []


STACKED = "base_model.model.model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([], {"gate_up_proj": ".base_layer", "down_proj": ""}),
        (["q_proj", "linear_fc1"], {"gate_up_proj": ""}),
        (["mlp.experts.down_proj"], {"down_proj": ""}),
        (["model.layers.*.mlp.experts.*"], {"gate_up_proj": ".base_layer", "down_proj": ""}),
        (["q_proj"], {}),
    ],
    ids=str,
)
def test_stacked_experts_have_the_adapters_of_a_parameter(checkpoint, asked, expected) -> None:
    """As PEFT has them, which wraps the module once for each of its parameters."""
    own = adapters(bind(read_config(checkpoint("gpt_oss", layers=2))), target_modules=asked)
    found = {name: shape for name, shape in own.hf_shapes().items() if name.startswith(STACKED)}
    moe = own.architecture.moe
    assert moe is not None
    rank, hidden = 4 * moe.experts, own.architecture.hidden_size
    sizes = {"gate_up_proj": (hidden, 2 * moe.ffn_hidden_size)}
    sizes["down_proj"] = (moe.ffn_hidden_size, hidden)
    assert found == {
        f"{STACKED}{inside}.lora_{side}.weight": shape
        for name, inside in expected.items()
        for side, shape in (("A", (rank, sizes[name][0])), ("B", (sizes[name][1], rank)))
    }
    assert list_target_parameters(own) == sorted(
        f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in expected
    )


def test_towers_have_adapters_where_they_are_named(checkpoint) -> None:
    model = bind(read_config(checkpoint("qwen3_vl", layers=2)))
    prefix = "base_model.model.model.visual."

    def of_tower(**asked: Any) -> set[str]:
        names = (n for n in adapters(model, **asked).hf_shapes() if n.startswith(prefix))
        return {name.removeprefix(prefix).rpartition(".lora_")[0] for name in names}

    assert of_tower() == of_tower(target_modules=["q_proj"]) == set()
    assert of_tower(target_modules=["merger.linear_fc1"]) == {"merger.linear_fc1"}
    assert of_tower(target_modules=["*.blocks.0.*", "o_proj"], exclude_modules=["qkv"]) == {
        f"blocks.0.{name}" for name in ("attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    own = adapters(model, target_modules=["qkv", "q_proj"])
    assert adapters(model, target_modules=[*name_targets(own, model)]) == own
    for name in ("patch_embed.proj", "pos_embed", "merger.norm"):
        with pytest.raises(ConfigError, match=f"that can be adapted is called '{name}'; legal are"):
            adapters(model, target_modules=[name])


def test_experts_of_a_stack_are_adapted_together(checkpoint) -> None:
    table = bind(read_config(checkpoint("gpt_oss", layers=2)))
    with pytest.raises(ConfigError, match=r"experts.down_proj are in one tensor.*put \*"):
        adapters(table, target_modules=["*.layers.0.*.local_experts.1.linear_fc2"])
    with pytest.raises(ConfigError, match=r"called 'router'; legal are .*gate_up_proj"):
        adapters(table, target_modules=["router"])


@pytest.mark.parametrize(
    ("family", "path", "into"),
    [
        ("granitemoe", "model.layers.1.block_sparse_moe", "gate_up_proj"),
        ("nemotron_h", "model.layers.1.mixer", "up_proj"),
        ("qwen3_5_moe", "model.language_model.layers.1.mlp", "gate_up_proj"),
    ],
)
def test_experts_have_the_adapters_of_transformers_parameters(
    checkpoint, family: str, path: str, into: str
) -> None:
    """Whatever files call them, or have of each expert."""
    model = bind(read_config(checkpoint(family, layers=2)))
    for asked in (["*.experts.*"], [f"{path}.experts.{into}", "experts.down_proj"]):
        own = adapters(model, target_modules=asked)
        stacks = {name.rpartition(".lora_")[0] for name in own.hf_shapes() if path in name}
        prefix = f"base_model.model.{path}.experts"
        assert stacks == {prefix, f"{prefix}.base_layer"}
        assert {f"{path}.experts.{leaf}" for leaf in (into, "down_proj")} <= {
            *list_target_parameters(own)
        }
    names = set(name_targets(own, model))
    assert adapters(model, target_modules=[*names]) == own
    with pytest.raises(ConfigError, match=rf"experts of {path}.* are in one tensor"):
        adapters(model, target_modules=["*.layers.1.*.local_experts.1.*"])


def test_files_that_stack_experts_or_do_not_have_the_same_adapters(checkpoint) -> None:
    """In PEFT's format; of a family whose makers and whose class differ in it."""
    fields = read_config(checkpoint("qwen3_5_moe", layers=2))
    stack = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    apart, stacked = bind(fields), bind(fields, tensors=[stack])
    assert stack in stacked.hf_shapes() and stack not in apart.hf_shapes()
    one, other = (adapters(each, target_modules=["*.experts.*"]) for each in (apart, stacked))
    assert one.hf_shapes() == other.hf_shapes()
    assert list_target_parameters(one) == list_target_parameters(other)
    arch = one.architecture
    of_one, of_other = ({e.megatron: e.row for e in each.entries} for each in (one, other))
    assert of_one.keys() == of_other.keys()
    for name, row in of_one.items():
        for rank in range(2):
            assert row.blocks(arch, rank, 2) == of_other[name].blocks(arch, rank, 2)


def test_a_joined_projection_has_one_adapter(checkpoint) -> None:
    table = bind(read_config(checkpoint("phi3", layers=2)))
    names = {n.rpartition(".lora_")[0].rpartition(".")[2] for n in adapters(table).hf_shapes()}
    assert {"qkv_proj", "gate_up_proj", "o_proj"} <= names
    assert adapters(table, target_modules=["qkv_proj"]) == adapters(
        table, target_modules=["linear_qkv"]
    )


def test_a_rank_above_that_of_every_adapted_weight_is_refused(table: Table) -> None:
    adapters(table, dim=64)
    with pytest.raises(
        ConfigError, match=r"dim is 65, but no weight .* above 64: set it to that or"
    ):
        adapters(table, dim=65)
    adapters(table, dim=32, target_modules=["linear_v"])
    with pytest.raises(ConfigError, match=r"dim is 1000000000, but .* a rank above"):
        adapters(table, dim=10**9)
