"""`plan --refit` says what a refit moves, from the headers of a checkpoint and a layout alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from tests.families import SAMPLES
from tests.unit.command_line import run
from tests.unit.edited import edit


def plan(path: Path, *options: str) -> tuple[int, str, str]:
    return run("plan", "--refit", path, *options)


def cells(said: str) -> dict[str, list[str]]:
    """The lines of `--tensors` by name, each in its columns."""
    listed = said.split("tensors, in the order in which they are sent\n")[1]
    rows = [line.strip().split("  ") for line in listed.splitlines()]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.dear
@pytest.mark.parametrize("family", SAMPLES)
def test_every_tensor_of_a_family_is_planned_once_with_its_shape(checkpoint, family: str) -> None:
    path = checkpoint(family)
    code, said, errors = plan(path, "--tensors", "--pp", "2")
    assert (code, errors) == (0, "")
    shapes = bind(read_config(path)).hf_shapes()
    found = cells(said)
    assert {name: json.loads(row[0]) for name, row in found.items()} == {
        name: list(shape) for name, shape in shapes.items()
    }
    assert {row[3] for row in found.values()} == {"stage 0", "stage 1"}


def test_stages_own_their_layers_and_ranks(checkpoint) -> None:
    path = checkpoint("qwen2", tied=True, dtype="bfloat16")
    code, said, _ = plan(path, "--tp", "2", "--pp", "2", "--vpp", "2", "--dp", "2", "--tensors")
    assert code == 0
    assert said.splitlines()[0] == (
        "qwen2, 4 layers: 50 tensors, 330 kB, on 8 ranks = pp 2 x dp 2 x cp 1 x tp 2"
    )
    stages = [line for line in said.splitlines() if line.startswith("  stage")]
    assert stages == [
        "  stage 0: ranks 0-3, layers 0, 2, 25 tensors, 181 kB",
        "  stage 1: ranks 4-7, layers 1, 3, 25 tensors, 149 kB",
    ]
    found = cells(said)
    assert found["model.embed_tokens.weight"][3] == "stage 0"
    assert found["model.layers.2.mlp.up_proj.weight"][3] == "stage 0"
    assert found["model.layers.1.mlp.up_proj.weight"][3] == "stage 1"
    assert "lm_head.weight" not in found
    assert found["model.layers.0.self_attn.k_proj.weight"] == [
        "[32, 64]",
        "bfloat16",
        "4,096 bytes",
        "stage 0",
        "Qkv, split along dimension 0 in decoder.layers.0.self_attention.linear_qkv.weight",
        "bucket 0",
    ]
    assert "Whole, held whole in decoder.final_layernorm" in found["model.norm.weight"][4]


@pytest.mark.parametrize(
    ("options", "exchange"),
    [
        ("", "no collective, every rank holds whole tensors"),
        ("--dp 2", "no collective, every rank holds whole tensors; 1 to agree at the end"),
        ("--tp 2", "1 round of 330 kB, 1 collective on each rank; 1 to agree at the end"),
        (
            "--pp 2 --bucket-size 100kB",
            "4 rounds of 82.5 kB, 4 collectives on each rank; 1 to agree at the end",
        ),
        (
            "--tp 2 --pp 2 --bucket-size 100kB",
            "4 rounds of 82.5 kB, 8 collectives on each rank; 1 to agree at the end",
        ),
    ],
)
def test_collectives_go_by_bytes_and_groups(checkpoint, options: str, exchange: str) -> None:
    code, said, _ = plan(checkpoint("qwen2", tied=True, dtype="bfloat16"), *options.split())
    assert code == 0 and f"exchange: {exchange}" in said.splitlines()


def test_every_tensor_is_in_a_bucket_and_the_last_one_in_the_last(checkpoint) -> None:
    options = ("--tp", "2", "--bucket-size", "20kB", "--tensors")
    code, said, _ = plan(checkpoint("qwen2", tied=True, dtype="bfloat16"), *options)
    assert code == 0
    counts = [int(count) for count in re.findall(r"^  \d+: (\d+) tensors?, ", said, re.M)]
    bucket = [row[5].removeprefix("bucket ") for row in cells(said).values()]
    first = [int(numbers.split("-")[0]) for numbers in bucket]
    last = [int(numbers.split("-")[-1]) for numbers in bucket]
    assert first == sorted(first) and last == sorted(last) and last[-1] == len(counts) - 1
    assert counts == [
        sum(low <= number <= high for low, high in zip(first, last, strict=True))
        for number in range(len(counts))
    ]
    # 32 kB in rounds of at most 20 kB.
    assert bucket[0] == "0-1"


def test_a_rank_that_holds_all_packs_whole_tensors(checkpoint) -> None:
    path = checkpoint("qwen2", tied=True, dtype="bfloat16")
    code, said, _ = plan(path, "--bucket-size", "20kB", "--tensors")
    assert code == 0
    assert "  0: 1 tensor, model.embed_tokens.weight\n" in said
    assert all(row[5].removeprefix("bucket ").isdigit() for row in cells(said).values())
    assert "largest tensor: model.embed_tokens.weight, 32.8 kB" in said
    assert (
        "at most 52.8 kB = 0 B of the exchange + 20 kB of a transport's buffers + 32.8 kB of the "
        "largest tensor" in said
    )


def test_weights_can_be_handed_over_and_exchanged_in_another_dtype(checkpoint) -> None:
    path = checkpoint("qwen2", tied=True)
    as_they_are = plan(path, "--tensors")[1]
    cast = plan(path, "--tensors", "--dtype", "bfloat16")[1]
    assert {row[1] for row in cells(as_they_are).values()} == {"float32"}
    assert {row[1] for row in cells(cast).values()} == {"bfloat16"}
    assert "50 tensors, 660 kB" in as_they_are and "50 tensors, 330 kB" in cast
    # The exchange is in the narrower of both.
    assert "1 round of 330 kB" in plan(path, "--tp", "2")[1]
    assert "1 round of 660 kB" in plan(path, "--tp", "2", "--precision", "float32")[1]


def test_no_weight_is_read(checkpoint, tmp_path) -> None:
    path = edit(checkpoint("qwen2"), tmp_path / "copy")
    before = plan(path, "--tensors", "--tp", "2")
    file = path / "model.safetensors"
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    file.write_bytes(content[:header] + bytes(len(content) - header))
    assert plan(path, "--tensors", "--tp", "2") == before and before[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--tp 3", "--tp 3 does not divide 4 attention heads"),
        ("--pp 3", "4 layers do not split evenly over --pp 3; use one of [1, 2, 4]"),
        ("--vpp 2", "--vpp 2 needs --pp of at least 2"),
        ("--bucket-size 1kB", "a refit bucket of 1000 bytes is too small: give 4096"),
        ("--bucket-size much", "'much' is not a size"),
        ("--dtype int8", "int8"),
        ("--tp 0", "--tp"),
    ],
)
def test_what_cannot_be_is_refused_in_the_commands_own_words(checkpoint, options, words) -> None:
    found, said, errors = plan(checkpoint("qwen2"), *options.split())
    assert (found, said) == (2, "")
    assert words in re.sub(r"[\s│]+", " ", errors)
    assert "policy." not in errors


def test_a_model_that_is_split_under_sequence_parallelism_only_has_a_plan(checkpoint) -> None:
    code, said, errors = plan(checkpoint("qwen3_moe"), "--tp", "2")
    assert (code, errors) == (0, "") and said.startswith("qwen3_moe, 4 layers: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--pp 2",
            "5 layers do not split evenly over --pp 2; use one of [1, 5], or set --first-layers or "
            "--last-layers",
        ),
        ("--last-layers 2", "--first-layers and --last-layers need --pp of at least 2"),
        (
            "--pp 2 --first-layers 5",
            "5 layers do not split over --pp 2 with --first-layers 5: the 1 other stages need the "
            "same number of layers each, at least 1; --first-layers can be one of [1, 2, 3, 4]",
        ),
    ],
)
def test_layers_that_do_not_split_are_refused_with_the_options_that_split_them(
    checkpoint, options: str, said: str
) -> None:
    code, _, errors = plan(checkpoint("qwen2", layers=5), *options.split())
    assert (code, errors.strip()) == (2, f"error: {said}")


def test_outer_stages_take_the_layers_that_are_asked_for(checkpoint) -> None:
    path = checkpoint("qwen2", layers=5)
    code, said, _ = plan(path, "--pp", "3", "--first-layers", "1", "--last-layers", "3")
    assert code == 0
    found = re.findall(r"stage (\d): ranks \d+, layers ([\d-]+),", said)
    assert found == [("0", "0"), ("1", "1"), ("2", "2-4")]


def test_a_checkpoint_that_is_not_what_its_config_says_is_refused(checkpoint, tmp_path) -> None:
    code, said, errors = plan(edit(checkpoint("qwen2"), tmp_path / "copy", intermediate_size=96))
    assert (code, said) == (1, "")
    assert errors.startswith("error: ") and "mlp.up_proj.weight" in errors


def test_a_plan_needs_to_know_what_for() -> None:
    code, said, errors = run("plan")
    assert code == 2 and "--refit" in said + errors


def test_shards_of_an_engine_are_planned(checkpoint) -> None:
    options = (checkpoint("qwen2", tied=True, dtype="bfloat16"), "--tp", "2", "--dp", "2")
    code, said, _ = plan(*options, "--engine-layout", "tp=2,dp=2")
    assert code == 0 and "to an engine on 4 ranks = pp 1 x dp 2 x cp 1 x tp 2, shard to" in said
    found = json.loads(plan(*options, "--engine-layout", "tp=2,dp=2", "--json")[1])
    norms = 9 * 64 * 2  # which every rank of the engine has
    own = norms + (found["bytes"] - norms) // 2
    assert found["shards"]["received_bytes"] == [own] * 4
    sent = found["shards"]["sent_bytes"]
    assert sum(sent) == 4 * own and max(sent) - min(sent) <= norms
    assert found["shards"]["pairs"] <= 16
    kept = found["shards"]["kept_bytes"]
    assert kept == sent  # whose tensors are multiples of 16 bytes here
    most = rf"deltas to shards: at most .* of a trainer \(rank {kept.index(max(kept))}\)"
    assert re.search(most, said), said


def test_the_time_of_a_refit_between_shards_is_bound_by_the_busiest_port(checkpoint) -> None:
    options = (checkpoint("qwen2", dtype="bfloat16"), "--tp", "2", "--gpu", "A100")
    for grid, busiest in (("tp=4", r"trainer rank \d"), ("tp=1", "engine rank 0")):
        code, said, _ = plan(*options, "--engine-layout", grid)
        bound = rf"at least \S+ s: {busiest}'s network, .* at 25 GB/s"
        assert code == 0 and re.search(bound, said), said
        found = json.loads(plan(*options, "--engine-layout", grid, "--json")[1])["shards"]
        most = max(*found["sent_bytes"], *found["received_bytes"])
        assert found["links"]["seconds_at_least"] == most / 25e9
        assert re.fullmatch(f"{busiest}'s network", found["links"]["bottleneck"])
    code, _, said = plan(*options)
    assert code == 2 and "--gpu cannot be given with --refit without --engine-layout" in said


def test_a_machine_says_what_goes_over_its_links(checkpoint) -> None:
    options = (checkpoint("qwen2", dtype="bfloat16"), "--tp", "2", "--engine-layout", "tp=2")
    options += ("--delta", "0.03", "--machine", "gpus_per_node=3,nvlink_GBps=4,network_GBps=0.5")
    code, said, _ = plan(*options, "--shared-nodes")
    # Engine rank 0 is beside both trainers, engine rank 1 on a node of its own.
    assert code == 0 and said.count("trainers and engine on nodes of 3 GPUs: ") == 2, said
    assert said.count("s: engine rank 1's network, ") == 2 and " in 2 of 2 rounds" in said
    assert said.count("at most between nodes: node 0 sends") == 2
    found = json.loads(plan(*options, "--shared-nodes", "--json")[1])
    near, far = found["shards"]["received_bytes"]
    whole, changed = found["shards"]["links"], found["deltas"]["links"]
    assert (whole["nvlink_bytes"], whole["network_bytes"]) == (near, far)
    assert whole["busiest"]["node"]["receiver"] == {"name": "node 1", "bytes": far}
    assert (whole["rounds"], whole["seconds_at_least"]) == (2, far / 5e8)
    assert changed["network_bytes"] == pytest.approx(far * 0.045, rel=1e-3)
    assert changed["busiest"]["nvlink"]["receiver"]["bytes"] == changed["nvlink_bytes"] > 0
    apart = json.loads(plan(*options, "--json")[1])["shards"]["links"]
    assert (apart["nvlink_bytes"], apart["network_bytes"]) == (0, near + far)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--machine gpus=8", "--machine gpus=8: give gpus_per_node, nvlink_GBps, network_GBps"),
        ("--machine network_GBps=0", "--machine network_GBps=0: give"),
        ("--machine network_GBps=inf", "--machine network_GBps=inf: give"),
        ("--machine gpus_per_node=2.5", "--machine gpus_per_node=2.5: give"),
        ("--machine network_GBps=1,network_GBps=2", "each once and above 0"),
        ("--machine network_GBps=25", "25: gpus_per_node, nvlink_GBps not given: give all of"),
        ("--shared-nodes", "--shared-nodes needs --machine, or --gpu"),
    ],
)
def test_a_machine_that_cannot_be_read_is_refused(checkpoint, options: str, said: str) -> None:
    code, _, errors = plan(checkpoint("qwen2"), "--engine-layout", "tp=2", *options.split())
    assert code == 2 and said in errors


def test_figures_of_a_machine_replace_those_of_its_gpus(checkpoint) -> None:
    options = ("--engine-layout", "tp=2", "--gpu", "H100", "--machine", "network_GBps=12.5")
    code, said, _ = plan(checkpoint("qwen2"), *options)
    assert code == 0 and "on nodes of their own of 8 GPUs" in said and " at 12.5 GB/s" in said


def test_a_refit_of_what_has_changed_is_planned(checkpoint) -> None:
    options = (checkpoint("qwen2", dtype="bfloat16"), "--tp", "2", "--delta", "0.03")
    to = ("--engine-layout", "tp=2", "--gpu", "A100")
    code, said, _ = plan(*options, *to)
    assert code == 0 and "where 0.03 of all elements has changed" in said
    assert ", 4.5% of all bytes" in said
    assert re.search(r"to an engine rank, .* at most\n  trainers and engine on", said)
    found = json.loads(plan(*options, *to, "--json")[1])
    # Values of 2 bytes, and a byte for each gap, of which 0.97 ** 255 take another.
    assert found["deltas"]["sent_bytes"] == pytest.approx(found["bytes"] * 0.015 * 3, rel=1e-3)
    code, _, said = plan(options[0], "--delta", "0")
    assert code == 2 and "--delta" in said


@pytest.mark.parametrize("sizes", ["tp", "tp=2,tp=2", "cp=2", "tp=two", ""])
def test_a_layout_of_an_engine_that_cannot_be_read_is_refused(checkpoint, sizes: str) -> None:
    code, _, said = plan(checkpoint("qwen2"), "--engine-layout", sizes)
    assert code == 2 and f"--engine-layout {sizes}: give sizes of tp, pp" in said


@pytest.mark.parametrize(("sizes", "why"), [("tp=3", "cannot be split"), ("ep=2", "ep 2 does not")])
def test_a_layout_that_the_model_or_the_ranks_do_not_fit_is_named(
    checkpoint, sizes: str, why: str
) -> None:
    code, _, said = plan(checkpoint("qwen2"), "--engine-layout", sizes)
    assert code and f"--engine-layout {sizes}: " in said and why in said
