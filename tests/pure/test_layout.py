"""A layout that does not fit is refused before any process starts, with the legal values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import (
    check_layout,
    layer_split,
    microbatch_round,
    microbatches,
    pads,
    topology_of,
)
from megatron_policy.config.parallel_sizes import read_layout
from megatron_policy.converters.architecture import (
    Architecture,
    Mla,
    Moe,
    QkNorm,
    Rope,
    Scoring,
    Shell,
    stack,
)
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import LayerSplit, Topology
from tests.pure.test_config import minimal
from tests.pure.test_rows import model


def shape(**changes: Any) -> Architecture:
    """A model of 8 layers, 8 attention heads, 4 key-value heads and 96 feed-forward channels."""
    counts = {"num_layers": 8, "num_attention_heads": 8, "num_query_groups": 4}
    return model(**counts | {"ffn_hidden_size": 96} | changes)


def config(gbs: int = 16, mbs: int = 2, **megatron: Any) -> PolicyConfig:
    """A policy with these keys in its megatron_cfg."""
    sizes = {"train_global_batch_size": gbs, "train_micro_batch_size": mbs}
    return PolicyConfig.parse(minimal(**sizes, megatron_cfg={"enabled": True, **megatron}))


def test_data_parallelism_is_what_the_other_axes_leave() -> None:
    policy = config(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    assert topology_of(policy, 8) == Topology(tp=2, pp=2, dp=2, vpp=2)


@pytest.mark.parametrize("world", [0, 2, 6])
def test_ranks_that_hold_no_whole_replica_are_told_how_many_do(world: int) -> None:
    policy = config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"start 4, 8, 12, \.\.\. ranks"):
        topology_of(policy, world)
    with pytest.raises(ConfigError, match=r"^1 rank does not hold whole replicas .*start 2, 4, 6"):
        topology_of(config(tensor_model_parallel_size=2), 1)


def refusal(policy: PolicyConfig, model: Any, world: int) -> str:
    """What the layout check says, one problem a line."""
    with pytest.raises(ConfigError) as raised:
        check_layout(policy, model, topology_of(policy, world))
    return str(raised.value)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallelism_fits_fewer_and_more_ranks_than_key_value_heads(tp: int) -> None:
    policy = config(tensor_model_parallel_size=tp)
    check_layout(policy, shape(), topology_of(policy, tp))


@pytest.mark.parametrize(
    ("tp", "model", "legal"),
    [
        (3, shape(), r"[1, 2, 4, 8]"),
        (16, shape(), r"[1, 2, 4, 8]"),
        (8, shape(ffn_hidden_size=12), r"[1, 2, 4]"),
        (3, shape(num_attention_heads=12, num_query_groups=4), r"[1, 2, 4, 12]"),
        (8, shape(qk_norm=QkNorm.ALL_HEADS), r"[1, 2, 4]"),
        (8, shape(qk_norm=QkNorm.EACH_HEAD), r"[1, 2, 4]"),
    ],
)
def test_tensor_parallelism_that_splits_nothing_evenly_names_the_legal_sizes(
    tp: int, model: Any, legal: str
) -> None:
    message = refusal(config(tensor_model_parallel_size=tp), model, tp)
    assert f"tensor_model_parallel_size={tp} " in message
    assert f"use one of {legal}" in message


def test_sequence_parallelism_without_tensor_parallelism_is_refused() -> None:
    message = refusal(config(sequence_parallel=True), shape(), 1)
    assert "tensor_model_parallel_size to 2 or more, or sequence_parallel to false" in message


@pytest.mark.parametrize(
    ("keys", "legal"),
    [
        ({"pipeline_model_parallel_size": 3}, "use one of [1, 2, 4, 8]"),
        (
            {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 3},
            "num_layers_in_first_pipeline_stage can be one of [2, 5]",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
            "use one of [1, 2, 4]",
        ),
        ({"virtual_pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size of at least 2"),
    ],
)
def test_layers_that_do_not_split_name_the_legal_sizes(keys: dict[str, int], legal: str) -> None:
    world = keys.get("pipeline_model_parallel_size", 1)
    assert legal in refusal(config(gbs=48, **keys), shape(), world)


def test_the_layer_split_is_that_of_the_configuration() -> None:
    policy = config(pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=3)
    split = layer_split(policy, shape(), topology_of(policy, 2))
    assert split == LayerSplit(stages=((range(0, 5),), (range(5, 8),)))


PP2 = {"pipeline_model_parallel_size": 2}
MTP2 = PP2 | {"mtp_num_layers": 2}
UNEVEN = {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 6}


def test_chunks_have_the_layers_that_megatrons_letters_give_them() -> None:
    counts = {
        "Et*3|t*5L": ((3, 5), 0),
        "E, ttt | ttttt, L": ((3, 5), 0),
        "Et|(tt|)*2t*3m*2L": ((1, 2, 2, 3), 2),
    }
    for text, (expected, predicting) in counts.items():
        assert read_layout(text) == (expected, predicting)
        keys = PP2 | {"mtp_num_layers": predicting}
        policy = config(pipeline_model_parallel_layout=text, **keys)
        topology = topology_of(policy, 2)
        assert topology.vpp == len(expected) // 2
        split = layer_split(policy, shape(), topology)
        assert tuple(map(len, split.chunks)) == expected
        check_layout(policy, shape(), topology)


@pytest.mark.parametrize(
    ("text", "keys", "told"),
    [
        ("Ettt|tttL", PP2, "has 6 layers (t), but the model has 8: give it as many"),
        ("Et*4|t*4L", MTP2, "has 0 layers for multi-token prediction (m), but mtp_num_layers is 2"),
        ("Et*4|t*4mL", PP2, "has 1 layers for multi-token prediction (m), but mtp_num_layers is 0"),
        ("E|t*8L", PP2, "give each chunk one t or more"),
        ("Et*4|t*4|mL", PP2, "give each chunk one t or more"),
        ("Et*4|t*2|t*2L", PP2, "has 3 chunks for pipeline_model_parallel_size=2"),
        ("Et*4|t*4L", {}, "has 2 chunks for pipeline_model_parallel_size=1"),
        ("Et*4|t*4L", UNEVEN, "leave out virtual_pipeline_model_parallel_size"),
    ],
)
def test_letters_of_no_possible_split_are_refused(
    text: str, keys: dict[str, int], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        asked = config(pipeline_model_parallel_layout=text, **keys)
        check_layout(asked, shape(), topology_of(asked, 2))
    assert told in str(raised.value)


def test_stages_of_layers_of_one_part_have_equally_much_to_compute() -> None:
    keys, dear, cheap = {"pipeline_model_parallel_size": 2}, shape().feed, shape().mixer
    layers = stack(7, [None] * 2 + [cheap] * 5, [dear] * 2 + [None] * 5)
    model = replace(shape(), layers=layers)
    costs = model.cost_layers()
    least, most = sorted({*costs[:-1]})
    head = model.hidden_size * model.vocab_size
    assert costs == (most, most, *[least] * 4, least + head)
    split = layer_split(config(**keys), model, topology_of(config(**keys), 2))
    assert split == LayerSplit.balance(costs, 2)
    *others, last = model.cost_layers(further=3)
    projection = 2 * model.hidden_size**2
    assert (*others, last - 3 * (least + most + projection + head)) == costs
    model = replace(model, further_layers=1, mtp_layers=1)
    predicting = config(**keys, mtp_num_layers=3, mtp_use_repeated_layer=True)
    split = layer_split(predicting, model, topology_of(predicting, 2))
    assert split == LayerSplit.balance((*others, last), 2) != LayerSplit.balance(costs, 2)
    asked = config(**keys, num_layers_in_first_pipeline_stage=5)
    split = layer_split(asked, model, topology_of(asked, 2))
    assert split == LayerSplit(stages=((range(0, 5),), (range(5, 7),)))
    assert "use one of [1, 7]" in refusal(config(pipeline_model_parallel_size=8), model, 8)


CHUNKS = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("method", "layout", "legal", "named"),
    [
        ("uniform", {}, [1, 2, 4, 8], "has 8: use one of [1, 2, 4, 8]"),
        ("uniform", UNEVEN, [1, 2], "has 2 or 6: use one of [1, 2]"),
        ("uniform", CHUNKS, [1, 2], "has 2: use one of [1, 2]"),
        ("block", {}, range(1, 9), "has 8: use 1 to 8"),
        ("block", UNEVEN, range(1, 7), "has 2 or 6: use 1 to 6"),
        ("block", CHUNKS, [1, 2], "has 2: use 1 to 2"),
    ],
)
def test_layers_to_recompute_are_those_that_a_model_chunk_has(
    method: str, layout: dict[str, int], legal: list[int], named: str
) -> None:
    world = layout.get("pipeline_model_parallel_size", 1)
    for number in (*range(1, 10), 99):
        keys = {"recompute_method": method, "recompute_num_layers": number}
        policy = config(activation_checkpointing=True, **keys, **layout)
        if number in legal:
            check_layout(policy, shape(), topology_of(policy, world))
        else:
            said = refusal(policy, shape(), world)
            assert f"policy.megatron_cfg.recompute_num_layers={number} " in said and named in said
    off = config(recompute_num_layers=99, **layout)
    check_layout(off, shape(), topology_of(off, world))


def test_the_first_chunk_has_all_layers_that_features_of_pictures_are_added_to() -> None:
    shell = Shell(tensors=(("tower.weight", (4, 4)),), prefix="", media=(), deep=3)
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    check_layout(config(), shape(shell=shell), Topology(pp=2))
    with pytest.raises(ConfigError, match=r"first 3 layers.* has 2: give it 3 or more"):
        check_layout(config(**layout), shape(shell=shell), Topology(pp=2, vpp=2))


def test_batch_sizes_that_do_not_divide_name_the_next_ones_that_do() -> None:
    policy = config(gbs=18, mbs=2)
    said = refusal(policy, shape(), 4)
    assert "global batch size 18 (train_global_batch_size, or gbs)" in said
    assert "micro batch size 2 (train_micro_batch_size, or mbs)" in said
    assert "x 4 data-parallel ranks = 8: use 16 or 24" in said
    with pytest.raises(ConfigError, match=r"= 8: use 8$"):
        microbatches(2, 2, Topology(dp=4))
    assert microbatches(24, 2, Topology(dp=4)) == 3


def test_interleaved_stages_need_whole_rounds_of_microbatches() -> None:
    grid = Topology(pp=2, vpp=2)
    assert microbatches(8, 2, grid) == 4
    with pytest.raises(ConfigError, match="2 interleaved pipeline stages = 4: use 4 or 8"):
        microbatches(6, 2, grid)


EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({EP: 2}, 2, f"{EP}=2 needs a model with experts, and this one has none: use 1"),
        ({EP: 3}, 6, rf"{EP}=3 does not divide the 4 experts .* use one of \[1, 2, 4\]"),
        ({ETP: 5}, 5, rf"{ETP}=5 does not divide the 12 feed-forward .* \[1, 2, 3, 4, 6, 12\]"),
        ({EP: 4}, 6, rf"{EP}=4 x 1 .* divide the 6 ranks .* use one of \[1, 2, 3, 6\]"),
        ({EP: 2, ETP: 4}, 2, rf"{EP}=2 x 4 \({ETP}\) .* set {ETP} to one of \[1\]"),
        (
            {"tensor_model_parallel_size": 2, EP: 2, "sequence_parallel": True},
            2,
            rf"{EP}=2 x 2 \(as many as tensor_model_parallel_size\) .* use one of \[1\]",
        ),
    ],
)
def test_sizes_that_do_not_divide_experts_or_ranks_are_refused_with_legal_ones(
    sizes: dict[str, Any], world: int, message: str
) -> None:
    model = shape() if "has none" in message else shape(moe=MOE)
    assert re.search(message, refusal(config(gbs=world * 4, **sizes), model, world))


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ({EP: 4}, 4),
        ({EP: 2}, 8),
        ({"tensor_model_parallel_size": 2, EP: 2, ETP: 1, "sequence_parallel": True}, 2),
        ({"tensor_model_parallel_size": 2, EP: 2, "sequence_parallel": True}, 4),
        ({"context_parallel_size": 2, EP: 4, ETP: 2}, 8),
    ],
)
def test_experts_spread_over_the_ranks_of_a_stage(sizes: dict[str, Any], world: int) -> None:
    policy = config(gbs=world * 4, **sizes)
    grid = topology_of(policy, world)
    assert (grid.ep, grid.etp) == (sizes[EP], sizes.get(ETP))
    check_layout(policy, shape(moe=MOE), grid)


def test_context_parallel_ranks_are_part_of_a_replica() -> None:
    policy = config(context_parallel_size=2, tensor_model_parallel_size=2)
    grid = topology_of(policy, 8)
    assert grid == Topology(tp=2, cp=2, dp=2)
    check_layout(policy, shape(), grid)


def batched(section: str, gbs: int, **megatron: Any) -> PolicyConfig:
    tokens = {"enabled": True, "train_mb_tokens": 64}
    return PolicyConfig.parse(config(gbs, **megatron).model_dump() | {section: tokens})


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_microbatches_of_tokens_ask_for_equal_shares_unless_a_driver_plans(section: str) -> None:
    policy = batched(section, gbs=7, **CHUNKS)
    assert not pads(policy) and pads(config())
    check_layout(policy, shape(), topology_of(policy, 8), planned=True)
    assert "is not a multiple of 4 data-parallel ranks" in (said := refusal(policy, shape(), 8))
    assert "use 4 or 8. Only `Policy`, " in said
    check_layout(policy, shape(), topology_of(policy, 14))
    assert microbatch_round(topology_of(policy, 8)) == 2
    assert microbatch_round(Topology(pp=2)) == 1


def test_every_misfit_is_said_at_once() -> None:
    policy = config(gbs=17, tensor_model_parallel_size=3, pipeline_model_parallel_size=3)
    assert len(refusal(policy, shape(), 9).splitlines()) == 3


MOE = Moe(experts=4, chosen=2, ffn_hidden_size=12, scoring=Scoring.SIGMOID, correction_bias=True)
MLA = Mla(
    num_attention_heads=8,
    rope=Rope(1e4),
    q_lora_rank=None,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
)


def test_experts_need_sequence_parallelism_to_be_split_and_biases_never_are() -> None:
    split = config(tensor_model_parallel_size=2)
    assert "sequence_parallel=true: set it" in refusal(split, shape(moe=MOE), 2)
    biased = shape(moe=replace(MOE, mlp_bias=True))
    message = refusal(split, biased, 2)
    assert f"{ETP}=2 (not set, so it is tensor_model_parallel_size) does not fit experts" in message
    assert "cannot split: set it to 1" in message
    with_it = config(tensor_model_parallel_size=2, sequence_parallel=True)
    check_layout(with_it, shape(moe=MOE), topology_of(with_it, 2))
    whole = config(tensor_model_parallel_size=2, sequence_parallel=True, **{ETP: 1})
    check_layout(whole, biased, topology_of(whole, 2))
    check_layout(config(), biased, topology_of(config(), 1))


def test_latent_attention_needs_sequence_parallelism_to_be_split() -> None:
    split = config(tensor_model_parallel_size=2)
    assert "with latent attention needs" in refusal(split, shape(mixers=MLA), 2)
    with_it = config(tensor_model_parallel_size=2, sequence_parallel=True)
    check_layout(with_it, shape(mixers=MLA), topology_of(with_it, 2))


@pytest.mark.parametrize(
    ("key", "value"),
    [("moe_router_load_balancing_type", "sinkhorn"), ("moe_router_dtype", "bf16")],
)
def test_wishes_about_routers_that_are_not_supported_are_refused_where_there_are_routers(
    key: str, value: Any
) -> None:
    policy = config(**{key: value})
    assert f"policy.megatron_cfg.{key}=" in refusal(policy, shape(moe=MOE), 1)
    check_layout(policy, shape(), topology_of(policy, 1))


@pytest.mark.parametrize("kind", ["none", "aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("dtype", [None, "fp32", "fp64"])
def test_the_hosts_own_settings_of_routers_are_taken(kind: str, dtype: str | None) -> None:
    host = config(
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=0.0 if kind == "none" else 1e-3,
        moe_z_loss_coeff=1e-4,
        moe_router_bias_update_rate="1e-3",
        moe_router_dtype=dtype,
        freeze_moe_router=True,
        moe_expert_capacity_factor=None,
        moe_pad_expert_input_to_capacity=False,
    )
    check_layout(host, shape(moe=MOE), topology_of(host, 1))


@pytest.mark.parametrize("kind", [None, "none"])
def test_a_coefficient_of_no_loss_is_refused_with_the_losses_there_are(kind: str | None) -> None:
    policy = config(moe_aux_loss_coeff=1e-3, moe_router_load_balancing_type=kind)
    said = refusal(policy, shape(moe=MOE), 1)
    assert "moe_aux_loss_coeff=0.001 has no effect" in said
    assert "one of 'aux_loss', 'seq_aux_loss', 'global_aux_loss'" in said
    check_layout(policy, shape(), topology_of(policy, 1))


def test_a_balancing_loss_takes_the_models_coefficient_and_is_refused_without_any() -> None:
    policy = config(moe_router_load_balancing_type="aux_loss")
    said = refusal(policy, shape(moe=MOE), 1)
    assert "='aux_loss' needs a coefficient" in said and "set moe_aux_loss_coeff" in said
    for published in (0.0, 1e-3):
        moe = replace(MOE, aux_loss_coeff=published)
        check_layout(policy, shape(moe=moe), topology_of(policy, 1))
    given = config(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.0)
    check_layout(given, shape(moe=MOE), topology_of(given, 1))


def test_correction_biases_are_those_of_the_model() -> None:
    """Where a switch against the model would count."""
    key, rate = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
    plain = replace(MOE, correction_bias=False)
    said = refusal(config(**{key: False}), shape(moe=MOE), 1)
    assert f"{key}=false drops the correction biases that the model has: leave it out" in said
    said = refusal(config(**{key: True, rate: 1e-3}), shape(moe=plain), 1)
    assert f"{key}=true trains correction biases, which the model does not have" in said
    for asked, step, moe in ((True, 1e-3, MOE), (True, 0.0, plain), (False, 1e-3, plain)):
        fits = config(**{key: asked, rate: step})
        check_layout(fits, shape(moe=moe), topology_of(fits, 1))


def test_a_capacity_that_cannot_be_is_refused() -> None:
    none, pads = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
    assert f"{none}=0 leaves experts without tokens" in refusal(
        config(**{none: 0}), shape(moe=MOE), 1
    )
    for factor in (None, -1):
        padded = config(**{pads: True, none: factor})
        assert f"{pads}=true pads to a capacity: set {none}" in refusal(padded, shape(moe=MOE), 1)
    for wrong in (float("nan"), float("inf"), True):
        with pytest.raises(ConfigError, match=none):
            config(**{none: wrong})
    fits = config(**{pads: True, none: 1.5})
    check_layout(fits, shape(moe=MOE), topology_of(fits, 1))


@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_microbatches_of_fewer_tokens_than_the_layout_can_split_are_refused(section: str) -> None:
    small = {section: {"enabled": True, "train_mb_tokens": 8, "logprob_mb_tokens": 16}}
    policy = PolicyConfig.parse(minimal(make_sequence_length_divisible_by=16, **small))
    with pytest.raises(ConfigError, match=rf"{section}.train_mb_tokens=8 is less than 16"):
        check_layout(policy, shape(), Topology())
