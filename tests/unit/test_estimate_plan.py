"""Plans of published models from their configs alone: what fits, what is searched, what is said."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.cli.plan_report import lines
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import Table, bind
from megatron_policy.estimate.devices import SHORT
from megatron_policy.estimate.memory import BatchShape, kernels_of
from megatron_policy.estimate.plan import SearchResult, StepPlan, plan_of, search
from megatron_policy.estimate.schedule import Schedule
from megatron_policy.estimate.states import ModelRows
from megatron_policy.estimate.tower import TowerCost
from megatron_policy.refit.planning import RefitModel, plan_refit
from tests.checkpoints import skip_under_older
from tests.families import PUBLISHED
from tests.hybrid_sizes import HYBRIDS
from tests.unit import command_line

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
SMALL = PUBLISHED["Qwen2.5-0.5B"][1]
QWEN_7B = SMALL | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
LLAMA_70B = PUBLISHED["Llama-3.1-8B"][1] | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (PUBLISHED["Llama-3.1-8B"][1], 8),
    "Llama 70B": (LLAMA_70B, 64),
    "Qwen2.5-7B": (QWEN_7B, 8),
    "Qwen3-30B-A3B": (PUBLISHED["Qwen3-30B-A3B"][1], 16),
    "Qwen3-235B-A22B": (PUBLISHED["Qwen3-235B-A22B"][1], 128),
    "DeepSeek-V3": (PUBLISHED["DeepSeek-V3 in bf16"][1], 256),
    "Nemotron-3-Nano-30B-A3B": (PUBLISHED["Nemotron-3-Nano-30B-A3B"][1], 16),
    "Qwen3-Next-80B-A3B-Instruct": (PUBLISHED["Qwen3-Next-80B-A3B-Instruct"][1], 64),
    "Nemotron-3-Super-120B-A12B": (HYBRIDS["Nemotron-3-Super-120B-A12B"][1], 128),
    "Qwen3.5-397B-A17B": (PUBLISHED["Qwen3.5-397B-A17B, text"][1], 512),
}
STACKED = "gpt-oss-20b in bf16"
"""A model with all experts of a layer in one HF tensor."""

BASE = {
    "precision": "bfloat16",
    "train_global_batch_size": 512,
    "train_micro_batch_size": 1,
    "max_total_sequence_length": 4096,
    "sequence_packing": {"enabled": True, "train_mb_tokens": 4096},
    "megatron_cfg": {
        "enabled": True,
        "optimizer": {"use_distributed_optimizer": True},
        "distributed_data_parallel_config": {"grad_reduce_in_fp32": True},
    },
}


@cache
def table_of(name: str) -> Table:
    with TemporaryDirectory() as path:
        config = MODELS[name][0] if name in MODELS else PUBLISHED[name][1]
        return bind(read_config(model(Path(path), config)))


@cache
def rows_of(name: str) -> ModelRows:
    return ModelRows.of(table_of(name))


@cache
def found(name: str) -> SearchResult:
    ranks = MODELS[name][1]
    return search({**BASE, "model_name": name}, rows_of(name), ranks, SHORT["H100"])


@pytest.mark.dear
@pytest.mark.parametrize("name", MODELS)
def test_a_search_finds_plans_that_fit_and_orders_them(name: str) -> None:
    plans = found(name)
    ranks = MODELS[name][1]
    assert plans.fitting
    assert all(plan.peak <= plan.usable for plan in plans.fitting)
    assert all(plan.peak > plan.usable for plan in plans.too_large)
    least = min(plan.time.serial for plan in plans.fitting)
    assert plans.fitting[0].time.serial <= 1.05 * least
    for plan in plans.fitting:
        assert plan.topology.world_size == ranks
        assert 0 < plan.time.overlapped <= plan.time.serial
        assert 0 < plan.time.mfu(ranks, plan.device) < 1


PUBLISHED_PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama 70B": 70_553_706_496,
    "Qwen2.5-7B": 7_615_616_512,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_ranks_hold_all_weights_and_their_states_between_them(name: str) -> None:
    """But for alignment and the padding of the vocabulary, 2 parts in 1,000. Of bf16 parameters
    with fp32 gradients 2 + 4 bytes each, and 12 / replicas of Adam's.
    """
    plan, stated = first(name), PUBLISHED_PARAMETERS[name]
    replicas = plan.topology.dp * plan.topology.cp
    states = [stage.states for stage in plan.stages]
    for held, size in (
        (sum(each.parameters for each in states), 2),
        (sum(each.moments for each in states), 8 / replicas),
        (sum(each.resident for each in states), 6 + 12 / replicas),
    ):
        assert held * plan.topology.tp / size == pytest.approx(stated, rel=2e-3)


def first(name: str) -> StepPlan:
    return found(name).fitting[0]


@pytest.mark.dear
@pytest.mark.parametrize("name", MODELS)
def test_buffers_of_a_refit_are_those_of_its_plan(name: str) -> None:
    """But for rounding of shares, 2 parts in 100 of a bucket."""
    plan, table = first(name), table_of(name)
    dtypes = dict.fromkeys(table.hf_shapes(), torch.bfloat16)
    sent = plan_refit(RefitModel(table, plan.split, dtypes, torch.bfloat16, plan.topology))
    needed = sent.round_bytes + min(sent.bucket_bytes, sent.total_bytes) + sent.largest_bytes
    assert plan.refit_bytes == pytest.approx(needed, rel=0.02)
    assert 0.8 * plan.snapshot_bytes < sent.snapshot_bytes <= plan.snapshot_bytes


@pytest.mark.parametrize("name", [*MODELS, STACKED])
def test_a_refit_sends_what_its_plan_lists(name: str) -> None:
    table = table_of(name)
    elements = [math.prod(shape) for shape in table.hf_shapes().values()]
    assert rows_of(name).hf_elements() == (sum(elements), max(elements))


def head_bytes(chunk: int, **generation: Any) -> int:
    """Of Qwen2.5-7B on 8 ranks, with 4,096 tokens a microbatch."""
    settings = {"logprob_chunk_size": chunk, "generation": {"max_new_tokens": 1} | generation}
    config = PolicyConfig.parse({**BASE, **settings, "model_name": "Qwen2.5-7B"})
    (stage,) = plan_of(config, rows_of("Qwen2.5-7B"), 8, SHORT["H100"]).stages
    return stage.head


def test_filters_of_sampling_add_a_sum_of_the_heads_gradient_where_tiles_are_several() -> None:
    vocab, width, searched = QWEN_7B["vocab_size"], QWEN_7B["hidden_size"], 4 * 2**26
    more = head_bytes(1024, top_p=0.9) - head_bytes(1024)
    assert more == vocab * width * (4 + 2) + (searched - 1024 * vocab) * 4
    assert head_bytes(4096, top_k=9) - head_bytes(4096) == (searched - 2**28) * 4
    for whole in ({"top_p": 1.0}, {"top_p": 0.9, "filter_logprobs": False}):
        assert head_bytes(1024, **whole) == head_bytes(1024)


def by_layout(name: str) -> dict[Any, StepPlan]:
    """All plans by their layout and what is recomputed."""
    plans = [*found(name).fitting, *found(name).too_large]
    return {(plan.topology, plan.config.megatron_cfg.recompute_granularity): plan for plan in plans}


def test_recomputation_trades_memory_for_time() -> None:
    by_kind = by_layout("Llama 70B")
    for topology in {topology for topology, _ in by_kind}:
        none, some, full = (by_kind[topology, kind] for kind in (None, "selective", "full"))
        assert none.peak > some.peak > full.peak
        assert none.time.compute < some.time.compute < full.time.compute


def test_a_scan_beside_attention_is_computed_again_with_core_attention_or_without() -> None:
    base, device = BASE | {"model_name": "Falcon-H1-1.5B"}, SHORT["H100"]
    rows = rows_of("Falcon-H1-1.5B")
    again = {"activation_checkpointing": True, "recompute_granularity": "selective"}
    configs = (base, base | {"megatron_cfg": BASE["megatron_cfg"] | again})
    plans = [plan_of(PolicyConfig.parse(config), rows, 1, device, 4096) for config in configs]
    attention = sum(layer.mixers[0].count_core_flops([4096]) for layer in rows.architecture.layers)
    more = BASE["train_global_batch_size"] * attention / device.bf16_flops
    assert plans[1].time.compute - plans[0].time.compute == pytest.approx(more)


def test_experts_are_not_among_the_mlps_that_are_computed_again() -> None:
    plans = by_layout("Qwen3-30B-A3B")
    for topology in {topology for topology, _ in plans}:
        none, some = plans[topology, None], plans[topology, "selective"]
        assert some.time.compute == none.time.compute
        assert sum(s.activations for s in some.stages) < sum(s.activations for s in none.stages)


def test_expert_parallel_ranks_hold_all_experts_and_reduce_gradients_with_their_copies() -> None:
    plans = by_layout("Qwen3-30B-A3B")
    topologies = {topology for topology, _ in plans if topology.tp == topology.pp == 1}
    assert {topology.ep for topology in topologies} >= {1, 4, 16}
    for topology in topologies:
        plan = plans[topology, None]
        (stage,), arch = plan.stages, plan.architecture
        expert = 3 * arch.hidden_size * arch.moe.ffn_hidden_size * arch.num_layers
        experts = expert * arch.moe.experts // topology.ep
        dense = 30_532_122_624 - expert * arch.moe.experts
        assert stage.states.parameters == pytest.approx(2 * (experts + dense), rel=2e-3)
        # 4 bytes of a gradient and 2 of a parameter.
        share = {n: (n - 1) / n for n in (16, topology.edp)}
        sent = 6 * (experts * share[topology.edp] + dense * share[16])
        assert plan.time.wire_bytes["dp"] == pytest.approx(sent, rel=2e-3)
        staged = plan.staging_bytes - stage.states.main_parameters - stage.states.moments
        assert staged == pytest.approx(2 * (experts / topology.edp + dense / 16), rel=2e-3)


def test_the_stage_with_most_experts_sends_most_to_them() -> None:
    """The first stage has more layers, but three of them are dense."""
    layout = {"pipeline_model_parallel_size": 8, "num_layers_in_first_pipeline_stage": 9}
    layout |= {"num_layers_in_last_pipeline_stage": 4, "expert_model_parallel_size": 32}
    base = {**BASE, "megatron_cfg": BASE["megatron_cfg"] | layout, "model_name": "DeepSeek-V3"}
    plan = plan_of(PolicyConfig.parse(base), rows_of("DeepSeek-V3"), 256, SHORT["H100"])
    arch, tokens = plan.architecture, 512 // 32 * 4096
    each = 2 * 2 * tokens * arch.hidden_size * arch.moe.chosen * 31 // 32
    # Eight layers of stages between; forward and backward.
    assert plan.time.wire_bytes["ep"] == pytest.approx(2 * 8 * each, rel=1e-3)


def test_schedules_hold_what_their_warm_up_runs() -> None:
    assert [Schedule(4, 1, 8).most(stage, [10], [10]) for stage in range(4)] == [40, 30, 20, 10]
    assert Schedule(4, 1, 2).most(0, [10], [10]) == 20
    assert Schedule(1, 1, 8).most(0, [10], [13]) == 13
    # Megatron-Core's interleaved warm-up: 2 x (stages behind) + (chunks - 1) x stages, and one.
    assert Schedule(2, 2, 8).most(0, [10, 10], [10, 10]) == 50
    assert Schedule(2, 2, 8).most(1, [10, 10], [10, 10]) == 30
    # Forward passes are of chunks 0 0 1 1 0 0 ..., backward passes of 1 1 0 0 1 1 ...
    assert Schedule(2, 2, 8).most(1, [100, 1], [100, 1]) == 300
    assert Schedule(2, 2, 8).most(1, [100, 1], [100, 150]) == 350
    assert Schedule(4, 1, 12).bubble == pytest.approx(3 / 15)
    assert Schedule(4, 2, 12).bubble == pytest.approx(1.5 / 13.5)
    assert Schedule(2, 1, 3).seconds([1.0, 2.0]) == pytest.approx(7.0)


def model(tmp_path: Path, fields: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def shipped(tmp_path: Path, **megatron: Any) -> Path:
    """The shipped configuration, of a model that is here."""
    document = yaml.safe_load((CONFIGS / "grpo_qwen2_7b_8h100.yaml").read_text())
    document["policy"]["model_name"] = str(model(tmp_path, QWEN_7B))
    document["policy"]["megatron_cfg"] |= megatron
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def run(*arguments: object) -> tuple[int, str, str]:
    return command_line.run("plan", *arguments)


def plans(*arguments: object) -> Any:
    """What `--json` has of plans."""
    return json.loads(run(*arguments, "--json")[1])


def test_plan_lists_the_best_shows_the_first_and_leaves_memory_to_an_engine(
    tmp_path,
) -> None:
    asked = ("--model", model(tmp_path, QWEN_7B), "--gpus", 8)
    code, said, _ = run(*asked)
    lines = said.splitlines()
    assert code == 0 and "plans fit on 8 H100 of 80 GiB" in lines[0]
    assert lines[2].split()[:6] == ["2", "1", "1", "1", "1", "4"]
    assert any("tp 2 x cp 1 x dp 4 x pp 1" in line for line in lines)
    alone = "an inference engine on the same GPUs would need memory too: --beside-engine GIB"
    assert alone in said
    best, *_ = plans(*asked)
    assert best["layout"]["tp"] == 2 and best["fits"]
    (stage,) = best["stages"]
    assert stage["peak_bytes"] == best["peak_bytes"] <= best["usable_bytes"]
    beside = run(*asked, "--beside-engine", 30)[1]
    assert "an engine beside it keeps 30 GiB of each GPU" in beside
    assert "in 42 GiB that can be planned with" in beside
    assert run(*asked, "--beside-engine", 71)[0] == 1


def test_plan_of_one_layout(tmp_path) -> None:
    path = model(tmp_path, QWEN_7B)
    code, said, _ = run("--model", path, "--tp", 4, "--pp", 2, "--dp", 2, "--seq-len", 8192)
    assert code == 0 and "on 16 H100" in said and "rows of 8192 tokens" in said


def test_plan_says_what_to_change_if_nothing_fits(tmp_path) -> None:
    path = model(tmp_path, QWEN_7B)
    code, said, _ = run("--model", path, "--gpus", 1)
    assert code == 1 and "states alone take" in said and "use more GPUs" in said
    assert "a step: 512 rows of 4096 tokens, 512 microbatches of 4096" in said
    assert "a plan fits on 2 GPUs, the fewest of 2^n and 3 x 2^n" in said
    assert run("--model", path, "--gpus", 2)[0] == 0
    small = tmp_path / "small"
    small.mkdir()
    long = ("--seq-len", 32768, "--mb-tokens", 262144, "--gpu-memory", "12GiB")
    code, said, _ = run("--model", model(small, SMALL), "--gpus", 1, *long)
    assert code == 1 and "--mb-tokens" in said


def test_replicas_of_a_layout_that_does_not_fit_are_counted(tmp_path) -> None:
    path = model(tmp_path, QWEN_7B)
    code, said, _ = run("--model", path, "--tp", 2, "--dp", 1, "--gpu-memory", "40GiB")
    assert code == 1
    assert (found := re.search(r"a plan fits on (\d+) GPUs", said)), said
    assert run("--model", path, "--gpus", found[1], "--gpu-memory", "40GiB")[0] == 0
    code, said, _ = run("--model", path, "--gpus", 1, "--gpu-memory", "1GiB")
    assert code == 1 and "no number of GPUs up to 16,384 is enough for a plan" in said


def test_a_config_that_does_not_fit_names_the_layout_that_would(tmp_path) -> None:
    section = {**BASE, "model_name": str(model(tmp_path, QWEN_7B))}
    keys = {"activation_checkpointing": True, "recompute_num_layers": 2, **BASE["megatron_cfg"]}
    file, room = tmp_path / "policy.yaml", ("--gpu-memory", "50GiB")
    file.write_text(yaml.safe_dump({"policy": {**section, "megatron_cfg": keys}}))
    code, alone, _ = run(file)
    assert code == 1 and "on 1 rank, the fewest" in alone
    assert "no layout that is searched fits on 1 GPU\n" in alone
    code, whole, _ = run(file, "--gpus", 4, *room)
    assert code == 1
    said = re.search(r"another layout fits on 4 GPUs: (.*), recompute .*; give (.*)", whole)
    assert said, whole
    code, again, _ = run(file, *shlex.split(said[2]), "--gpus", 4, *room)
    assert code == 0 and f"4 H100 of 50 GiB: {said[1]}, recompute" in again
    asked = run("--model", tmp_path, "--dp", 4, *room)[1]
    assert f"another layout fits on 4 GPUs: {said[1]}, recompute" in asked
    none = run(file, "--gpus", 4, "--gpu-memory", "1GiB")[1]
    assert none.splitlines()[-3:] == [
        "no layout that is searched fits on 4 GPUs",
        "no number of GPUs up to 16,384 is enough for this layout",
        "no number of GPUs up to 16,384 is enough for a plan",
    ]


def test_the_shipped_configuration_is_the_first_answer_and_its_plan_is_beside_it(tmp_path) -> None:
    file = shipped(tmp_path)
    code, shown, _ = run(file, "--gpus", 8)
    assert (code, shown) == (0, (CONFIGS / "grpo_qwen2_7b_8h100.plan.txt").read_text())
    answer, own = plans("--model", tmp_path, "--gpus", 8)[0], plans(file, "--gpus", 8)[0]
    for key in ("layout", "recompute", "peak_bytes"):
        assert own[key] == answer[key]


@pytest.mark.dear
@pytest.mark.parametrize("name", ["Llama 70B", "DeepSeek-V3"])
def test_the_first_answer_can_be_asked_for_again(tmp_path, name: str) -> None:
    fields, ranks = MODELS[name]
    path = model(tmp_path, fields)
    said = run("--model", path, "--gpus", ranks)[1].splitlines()
    again = next(line for line in said if line.startswith("to ask for it again: "))
    section = yaml.safe_load("\n".join(said[said.index("policy:") :]))["policy"]
    options = again.removeprefix("to ask for it again: ").split()
    answer = plans("--model", path, "--gpus", ranks)[0]
    assert answer["policy"] == section and answer["ranks"] == ranks
    assert plans("--model", path, *options) == [answer]


@pytest.mark.dear
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen2.5-7B", "--gpus 8"),
        ("Qwen2.5-7B", "--gpus 4 --precision float32 --rows 64"),
        ("Qwen2.5-7B", "--gpus 8 --seq-len 1000 --mb-tokens 16384"),
        ("Qwen2.5-7B", "--tp 2 --pp 2 --first-layers 13 --recompute mlp"),
        ("Qwen3-30B-A3B", "--gpus 16"),
        ("DeepSeek-V3", "--pp 16 --ep 16 --tp 8 --etp 1 --dp 2 --last-layers 1"),
    ],
)
def test_a_config_of_what_is_printed_has_the_same_plan(tmp_path, name: str, options: str) -> None:
    path, file = model(tmp_path, MODELS[name][0]), tmp_path / "policy.yaml"
    printed = plans("--model", path, *options.split())
    assert len(printed) == 5 or "--gpus" not in options
    for each in printed:
        file.write_text(yaml.safe_dump({"policy": each.pop("policy")}))
        (again,) = plans(file, "--gpus", each["ranks"])
        assert again.pop("policy") is None
        assert again.pop("megatron_cfg").items() <= each.pop("megatron_cfg").items()
        assert again == each


def test_a_configuration_without_gpus_says_how_many_were_assumed(tmp_path) -> None:
    file = shipped(tmp_path)
    assumed = "on 2 ranks, the fewest that hold the layout"
    assert f"without --gpus: {assumed}" in run(file)[1]
    _, said, errors = run(file, "--json")
    assert assumed in errors and json.loads(said)[0]["ranks"] == 2
    shown = command_line.run("inspect-config", file, COLUMNS="200")[1]
    assert "give --world-size for another number" in shown
    shown = command_line.run("inspect-config", file, "--world-size", "8")[1]
    assert "--world-size" not in shown


def test_printed_parts_add_up_to_the_peak(tmp_path) -> None:
    """Also where the optimizer's step decides, which copies gradients to fp32."""
    for config, step in ((QWEN_7B, False), (SMALL, True)):
        buckets = {"grad_reduce_in_fp32": not step}
        megatron = {"enabled": True, "distributed_data_parallel_config": buckets}
        base = {**BASE, "model_name": "m"}
        if step:
            base |= {"max_total_sequence_length": 32, "sequence_packing": {"enabled": False}}
        bound = bind(read_config(model(tmp_path, config)))
        parsed = PolicyConfig.parse({**base, "megatron_cfg": megatron})
        plan = plan_of(parsed, ModelRows.of(bound), 1, SHORT["H100"])
        table = [line.split() for line in lines(plan, "H100") if line.startswith("  ")]
        shown = dict(zip(table[0], map(float, table[1]), strict=True))
        states = sum(shown[name] for name in ("parameters", "gradients", "main", "moments"))
        computed = shown["activations"] + shown["head"]
        assert (shown["step"] > computed) == step
        assert states + max(computed, shown["step"]) == pytest.approx(shown["peak"], abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give a CONFIG, --model DIR or --refit CHECKPOINT"),
        ("--model {}", "--gpus is missing"),
        ("--model {} --gpus 8 --gpu V100", "--gpu V100 is not known: use one of"),
        ("--model {} --gpus 6 --tp 3", "--tp 3 does not divide"),
        ("--refit {} --seq-len 8", "--seq-len cannot be given with --refit"),
        ("c.yaml --refit {}", "a CONFIG cannot be given with --refit"),
        (
            "c.yaml --rows 16 --tp 2",
            "--rows, --tp cannot be given with a CONFIG, which says it: write "
            "train_global_batch_size=16 megatron_cfg.tensor_model_parallel_size=2 after the file",
        ),
        ("c.yaml --precision float32", "write precision=float32 after the file"),
        (
            "c.yaml --recompute full",
            "write megatron_cfg.activation_checkpointing=true "
            "megatron_cfg.recompute_granularity=full after the file",
        ),
        (
            "c.yaml --dp 2",
            "--dp cannot be given with a CONFIG, which says it: give --gpus, and replicas follow",
        ),
        ("--model {} --gpus 8 --tensors", "--tensors cannot be given without"),
        ("--model {} --gpus 8 --dtype float16", "--dtype cannot be given without"),
        (
            "--model {} --tp 2 --dp 4 --gpus 16",
            "--gpus 16 are not --dp 4 replicas of 2 ranks: leave one of both out, or use --gpus 8",
        ),
        ("--refit {} --tp 3 --gpus 4", "--gpus 4 is not a multiple of the 3 ranks"),
        ("--model {} --gpus 8 --recompute full", "--recompute needs a layout"),
        (
            "--model {} --gpus 8 --seq-len 5000 --mb-tokens 4096",
            "--seq-len 5000 does not fit into microbatches of --mb-tokens 4096",
        ),
        (
            "--model {} --tp 2 --seq-len 40000",
            "rows of 40000 tokens are longer than the model's 32768 positions",
        ),
        (
            "--model {} --gpus 8 --seq-len 40000",
            "rows of 40000 tokens are longer than the model's 32768 positions",
        ),
        (
            "--model {} --gpus 8 --patches 64",
            "64 patches: this model sees no pictures, so leave them out",
        ),
        (
            "--model {} --gpus 8 --frames 64",
            "64 frames: this model hears no sound, so leave them out",
        ),
        ("--model {} --tp 2 --recompute most", "give none, full, or modules of core_attn"),
        ("--model {} --gpus 8 --gpu-memory 80", "write 80GiB"),
    ],
)
def test_plan_refuses_what_it_would_not_apply(tmp_path, arguments: str, message: str) -> None:
    code, _, errors = run(*arguments.format(model(tmp_path, QWEN_7B)).split())
    assert code == 2 and message in " ".join(errors.replace("│", " ").split())


def test_pictures_cost_the_first_stage_memory_and_time(tmp_path) -> None:
    path = model(tmp_path, PUBLISHED["Qwen3-VL-8B-Instruct"][1])
    options = ("--model", path, "--gpus", 8, "--tp", 2, "--pp", 2, "--recompute", "full")
    (text,), (seen,) = plans(*options), plans(*options, "--patches", 4096)
    assert "with pictures of 4096 patches" in run(*options, "--patches", 4096)[1]
    kept = [[stage["activation_bytes"] for stage in found["stages"]] for found in (text, seen)]
    assert kept[1][0] > kept[0][0] + 2**32 and kept[1][1] == kept[0][1]
    # 4096 patches pass 27 layers of 4 x 1152^2 + 2 x 1152 x 4304 weights and meet each other.
    each = 27 * (2 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 4096 * 1152)
    assert seen["model_flops"] - text["model_flops"] == pytest.approx(
        3 * 512 * 4096 * each, rel=0.1
    )
    assert seen["seconds"]["compute"] > text["seconds"]["compute"]
    section = BASE | {"model_name": "m", "max_patches_per_microbatch": 9000}
    section |= {"sequence_packing": {"enabled": True, "train_mb_tokens": 16384}}
    config = PolicyConfig.parse(section)
    assert BatchShape.of(config, 4096, TowerCost(patches=4096)).rows_together == 2
    assert BatchShape.of(config, 4096).rows_together == 4
    code, _, errors = run(*options, "--patches", 6)
    assert code == 2 and "6 patches: the model sees 4 together, so give a multiple of 4" in errors
    for more in ((), ("--seq-len", 4096)):  # searched, or of the layout
        few = options if more else options[:4]
        code, _, errors = run(*few, *more, "--patches", 16388)
        assert code == 2 and "16388 patches make 4097 tokens of a row, which has 4096" in errors


def test_sound_costs_the_first_stage_memory_and_time_too(tmp_path) -> None:
    path = model(tmp_path, PUBLISHED["Qwen2.5-Omni-7B"][1])
    if "install a newer transformers" in run("--model", path, "--gpus", 8)[2]:
        skip_under_older("it builds the thinker in another way")
    options = ("--model", path, "--gpus", 8, "--tp", 2, "--pp", 2, "--recompute", "full")
    (text,), (heard,) = plans(*options), plans(*options, "--frames", 3000)
    assert "with 3000 frames of sound" in run(*options, "--frames", 3000)[1]
    kept = [[stage["activation_bytes"] for stage in found["stages"]] for found in (text, heard)]
    assert kept[1][0] > kept[0][0] + 2**30 and kept[1][1] == kept[0][1]
    # 1500 frames pass 32 layers of 4 x 1280^2 + 2 x 1280 x 5120 weights and meet each 100.
    each = 32 * (2 * (4 * 1280**2 + 2 * 1280 * 5120) + 4 * 100 * 1280)
    assert heard["model_flops"] - text["model_flops"] == pytest.approx(
        3 * 512 * 1500 * each, rel=0.1
    )
    assert heard["seconds"]["compute"] > text["seconds"]["compute"]
    for media, message in (
        (("--frames", 1), "1 frames are too few for a token"),
        (("--frames", 20000), "20000 frames make 5000 tokens of a row, which has 4096"),
        (
            ("--frames", 16000, "--patches", 4096),
            "4096 patches make 1024 tokens of a row, which has 96 beside sound: give 384 patches",
        ),
    ):
        code, _, errors = run(*options, *media)
        assert code == 2 and message in " ".join(errors.replace("│", " ").split())


def test_a_refit_is_of_all_gpus_also_as_json(tmp_path) -> None:
    path = model(tmp_path, SMALL)
    options = ("--refit", path, "--tp", 2, "--gpus", 8)
    assert "on 8 ranks = pp 1 x dp 4 x cp 1 x tp 2" in run(*options)[1]
    data, sent = plans(*options), plans(*options, "--tensors")["sent"]
    assert data["ranks"] == 8 and data["layout"]["dp"] == 4
    total = sum(math.prod(shape) for shape in bind(read_config(path)).hf_shapes().values())
    assert data["bytes"] == 2 * total == sum(each["bytes"] for each in sent)


def test_experts_without_gpus_are_planned_on_the_fewest_ranks(tmp_path) -> None:
    path = model(tmp_path, MODELS["Qwen3-30B-A3B"][0])
    (data,) = plans("--model", path, "--ep", 8)
    assert data["ranks"] == 8


def test_models_beyond_transformer_engine_are_planned_with_torch_modules() -> None:
    for name, with_te in (("Llama-3.1-8B", True), (STACKED, False)):
        config = PolicyConfig.parse({**BASE, "model_name": name})
        kernels = kernels_of(config, rows_of(name).architecture, accelerated=True)
        assert kernels.transformer_engine == with_te and kernels.one_call


def test_more_memory_admits_more_plans() -> None:
    rows, ranks = rows_of("Llama-3.1-8B"), MODELS["Llama-3.1-8B"][1]
    larger = replace(SHORT["H100"], memory_bytes=141 * GIB)
    more = search({**BASE, "model_name": "m"}, rows, ranks, larger)
    assert len(more.fitting) > len(found("Llama-3.1-8B").fitting)


def test_a_reference_takes_host_memory_where_it_is_not_the_base(tmp_path) -> None:
    whole, adapters = model(tmp_path, QWEN_7B), tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    peft = {"enabled": True, "dim": 16, "alpha": 32.0}

    def reference_bytes(reference: Path | None, **megatron: Any) -> tuple[int, int]:
        named = {} if reference is None else {"reference_model_name": str(reference)}
        section = BASE["megatron_cfg"] | megatron
        config = PolicyConfig.parse(
            {**BASE, "model_name": str(whole), "megatron_cfg": section, **named}
        )
        table = bind_tables(config)[1]
        plan = plan_of(config, ModelRows.of(table), 8, SHORT["H100"])
        own = [entry for entry in table.entries if entry.adapts]
        sizes = [math.prod(e.row.local_shape(table.architecture, 1)) for e in own]
        return plan.reference_bytes, 2 * sum(sizes)

    everything = 2 * PUBLISHED_PARAMETERS["Qwen2.5-7B"]
    assert reference_bytes(None)[0] == reference_bytes(whole)[0] == everything
    assert reference_bytes(None, peft=peft)[0] == 0
    assert reference_bytes(whole, peft=peft)[0] == everything
    exchanged, of_adapters = reference_bytes(adapters, peft=peft)
    assert of_adapters <= exchanged < 1.01 * of_adapters
