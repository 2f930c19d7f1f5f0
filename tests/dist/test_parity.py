"""Parity holds for models that are the same, under every layout, and shows where others part."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.convert.headers import open_headers
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.errors import ConfigError, WorkerError
from megatron_policy.parity import LIMITS, Deviation, Parity
from megatron_policy.parity import ranks as parity_ranks
from megatron_policy.parity.ranks import join_outputs, read_policy
from megatron_policy.parity.reference import read_reference
from megatron_policy.parity.result import Job, ModelOutputs, count_media, count_room, draw_batch
from tests.dist.test_launch import run_python
from tests.exact import Exact, InDouble, assert_equal
from tests.picture_models import CLIPS, drop_constants, make_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "tp2 x pp2": {"tp": 2, "pp": 2},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2 with sequence parallelism, etp1": {"tp": 2, "etp": 1, "sequence_parallel": True},
    "tp2 x pp2, ep2 x etp1": {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
}


def job_for(path: Path, layout: str = "one rank", **changes: Any) -> Job:
    arch = bind(read_config(path)).architecture
    settings = {
        "model": str(path),
        "vocab_size": arch.vocab_size,
        "num_layers": arch.num_layers,
        **{"tp": 1, "pp": 1, "ep": 1, "etp": None, "sequence_parallel": False},
        **(LAYOUTS | OF_EXPERTS)[layout],
        "dtype": "float32",
        "rows": 2,
        "tokens": 13,
        "seed": 3,
        "per_layer": True,
        "timeout_s": 60.0,
    }
    return Job(**settings | changes)


def read(job: Job) -> ModelOutputs:
    prepare_platform()
    join_process_group(60.0)
    return read_policy(job)


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        pytest.param("llama", LAYOUTS, marks=pytest.mark.daily),
        pytest.param("qwen3_vl", LAYOUTS, marks=pytest.mark.daily),
        ("glm4v", LAYOUTS),
        ("glm4v_moe", OF_EXPERTS),
        ("gemma3", LAYOUTS),
        ("idefics3", LAYOUTS),
        ("internvl", LAYOUTS),
        ("kimi_k25", OF_EXPERTS),
        ("llava", LAYOUTS),
        ("llava_next", LAYOUTS),
        ("llava_onevision", LAYOUTS),
        ("mistral3", LAYOUTS),
        ("nemotron_h_omni", OF_EXPERTS),
        ("smolvlm", LAYOUTS),
        ("qwen2_vl", LAYOUTS),
        ("qwen2_5_omni_thinker", LAYOUTS),
        ("qwen2_5_vl", LAYOUTS),
        ("qwen3_5", LAYOUTS),
        ("qwen3_5_moe", OF_EXPERTS),
        ("qwen3", LAYOUTS),
        ("qwen3_moe", OF_EXPERTS),
        ("qwen3_omni_moe_thinker", OF_EXPERTS),
        ("qwen3_vl_moe", OF_EXPERTS),
        ("gpt_oss", OF_EXPERTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_both_sides_read_the_same_logits_logprobs_and_layers(
    ranks, checkpoint, tmp_path: Path, family: str, layouts: dict[str, dict[str, Any]]
) -> None:
    """Rows have room for a picture of models that see, and for a clip of those that hear."""
    hears = family in CLIPS
    path = make_model(tmp_path, family) if hears else checkpoint(family, vocab=200)
    if family == "nemotron_h_omni":
        drop_constants(path)
    shell = open_headers(str(path))[1].architecture.shell
    job = job_for(path, tokens=13 + count_room(shell, 2))
    seen = {} if shell is None else {"pictures": 2}
    assert count_media(job, shell) == seen | ({"clips": 2} if hears else {})
    rounded = read_reference(str(path), job, "float32", per_layer=True)
    with InDouble():
        theirs = read_reference(str(path), job, "float64", per_layer=True)
    logits = Exact.between(rounded.logits, theirs.logits)
    logprobs = Exact.between(rounded.logprobs, theirs.logprobs)
    for layout in layouts:
        job = job_for(path, layout, tokens=job.tokens)
        ours = join_outputs(job, ranks.run(job.tp * job.pp, read, job))
        assert ours.logits.shape == theirs.logits.shape == (2, job.tokens, job.vocab_size)
        assert_equal("logits", ours.logits, logits)
        assert_equal("logprobs", ours.logprobs, logprobs)
        assert sorted(ours.layers) == sorted(theirs.layers) == [0, 1, 2, 3]
        for number, hidden in theirs.layers.items():
            exact = Exact.between(rounded.layers[number], hidden)
            assert_equal("hidden states", ours.layers[number], exact, (layout, number))


def numbers(said: str) -> dict[str, float]:
    """Of each line, the largest difference."""
    return {
        name.strip(): float(value)
        for name, value in re.findall(r"^(logits|logprobs|layer \d+) +(\S+)", said, re.MULTILINE)
    }


@pytest.mark.nightly
def test_a_weight_that_differs_is_found_with_its_layer_on_several_ranks(
    checkpoints, tmp_path
) -> None:
    other = Path(shutil.copytree(checkpoints[False], tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"].view(-1)[7] += 0.05
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    words = ("--reference", other, "--pp", 2, "--per-layer")
    done = run_python("-m", "megatron_policy", "parity", checkpoints[False], *words)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: the models do not agree: logits differ by ")
    assert done.stderr.endswith("; layer 2 is the first whose output differs\n")
    assert done.stderr.count("\n") == 1
    seen = numbers(done.stdout)
    assert max(seen["layer 0"], seen["layer 1"]) < 1e-5
    assert min(seen["layer 2"], seen["logits"]) > 1e-3


def test_rows_have_room_for_pictures_or_a_line_says_that_none_was_compared(
    checkpoint, monkeypatch
) -> None:
    """A picture of this model is 4 tokens."""
    path, given = checkpoint("gemma3", vocab=200), []

    def read(job: Job) -> ModelOutputs:
        given.append(draw_batch(job, open_headers(job.model)[1].architecture.shell))
        return ModelOutputs(torch.ones(2, job.tokens, 200), torch.ones(2, job.tokens - 1), {})

    module = sys.modules["megatron_policy.parity.compare"]
    monkeypatch.setattr(module, "read_policy", read)
    monkeypatch.setattr(module, "read_reference", lambda model, job, *how: read(job))
    lost = "2 of 2 rows have no picture: a row of 5 tokens has no room for one, give --tokens 6"
    for words, tokens, count in (((), 70, 2), (("--tokens", 5), 5, 0), (("--tokens", 6), 6, 2)):
        done, listed = (
            CliRunner().invoke(app, ["parity", str(path), *map(str, words), *form])
            for form in ((), ("--json",))
        )
        assert done.exit_code == 0, done.output
        first, second, *_ = done.stdout.splitlines()
        head = f"2 rows of {tokens} random tokens, pictures in {count} of them, seed 0"
        assert first.endswith(head)
        assert second == f"WARNING: {lost}" if count == 0 else "WARNING" not in done.stdout
        report = json.loads(listed.stdout)
        assert report["media"] == {"pictures": count}
        assert report["warnings"] == ([] if count else [lost])
        assert [sum(row is not None for row in each["pixel_values"]) for each in given] == [
            count
        ] * 4
        given.clear()


def test_what_a_rank_refuses_is_raised_as_it_was(checkpoints, tmp_path) -> None:
    job = job_for(checkpoints[True], model=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        parity_ranks.read_on_ranks(job)


def test_a_layout_that_does_not_fit_is_one_line_before_any_rank_starts(
    checkpoint, checkpoints
) -> None:
    of_experts = (checkpoint("gpt_oss"), "--tp", 2, "--sequence-parallel")
    for words, said in (
        ((checkpoints[True], "--tp", 3), "--tp 3 does not divide"),
        (of_experts, "--etp 2"),
        ((*of_experts, "--etp", 1, "--ep", 3), "--ep 3 x 1"),
        (
            (checkpoint("qwen2", layers=5), "--pp", 2),
            "error: 5 layers do not split evenly over --pp 2; use one of [1, 5]",
        ),
    ):
        result = CliRunner().invoke(app, ["parity", *map(str, words)])
        assert result.exit_code == 2 and not result.stdout
        assert result.stderr.count("\n") == 1 and said in result.stderr


def test_the_rank_that_died_is_blamed_rather_than_those_that_waited_for_it(tmp_path) -> None:
    report = {"kind": "RuntimeError", "message": "Connection closed by peer"}
    (tmp_path / "rank0.error").write_text(json.dumps(report))
    (tmp_path / "rank0.log").write_text("")
    (tmp_path / "rank1.log").write_text("loading\nterminating\n")
    with pytest.raises(WorkerError) as caught:
        parity_ranks._check(tmp_path, [1, -9])
    assert str(caught.value) == "rank 1 was ended by SIGKILL; its last output: terminating"
    with pytest.raises(WorkerError, match="rank 0 failed: RuntimeError: Connection closed"):
        parity_ranks._check(tmp_path, [1, 0])
    parity_ranks._check(tmp_path, [0, 0])


def test_parity_does_not_hold_where_a_single_value_is_off() -> None:
    reference, limit = torch.zeros(2, 3, 5), LIMITS["float32"]
    fine = Deviation.between(reference, reference)
    job = Job("m", 5, 2, 1, 1, False, "float32", 2, 3, 0, True, 1.0)
    assert Parity(job, "x", fine, fine, {}, limit, limit).holds
    for broken in (float("nan"), float("inf"), 2e-4):
        off = reference.clone()
        off[1, 2, 4] = broken
        wrong = Deviation.between(off, reference)
        for logits, logprobs in ((wrong, fine), (fine, wrong)):
            assert not Parity(job, "x", logits, logprobs, {}, limit, limit).holds
        parity = Parity(job, "x", fine, fine, {0: fine, 1: wrong}, limit, limit)
        assert parity.first_layer_apart == 1
