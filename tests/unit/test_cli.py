"""The command line: what it says of a configuration that fits, and of one that does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

import megatron_policy
from megatron_policy.cli import app
from megatron_policy.cli.config_report import legal_world_sizes, listed
from megatron_policy.config import PolicyConfig
from tests.unit.test_package import ROOT


def write(path: Path, model: Path, **megatron: Any) -> str:
    policy = {
        "model_name": str(model),
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "megatron_cfg": {"enabled": True, **megatron},
    }
    file = path / "policy.yaml"
    file.write_text(yaml.safe_dump({"policy": policy}))
    return str(file)


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, args)
    return result.exit_code, re.sub(r"\s+", " ", result.output)


def test_a_layout_is_shown_with_the_layers_and_ranks_of_each_stage(checkpoint, tmp_path) -> None:
    file = write(
        tmp_path,
        checkpoint("qwen2"),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=1,
    )
    code, said = run("inspect-config", file, "--world-size", "8")
    assert code == 0, said
    assert "8 = pp=2 x dp=2 x cp=1 x tp=2" in said
    assert "8 samples = 2 data-parallel ranks x 2 microbatches of 2" in said
    assert "ranks that fit 4, 8, 16" in said
    assert "0 │ 0-3 │ 0-0" in said and "1 │ 4-7 │ 1-3" in said


def test_microbatches_of_tokens_are_shown_as_such_and_fit_replicas_that_share_rows_equally(
    checkpoint, tmp_path
) -> None:
    file = Path(write(tmp_path, checkpoint("qwen2"), tensor_model_parallel_size=2))
    document = yaml.safe_load(file.read_text())
    document["policy"]["sequence_packing"] = {"enabled": True, "train_mb_tokens": 4096}
    file.write_text(yaml.safe_dump(document))
    code, said = run("inspect-config", str(file), "--world-size", "6")
    assert code == 2 and "is not a multiple of 3 data-parallel ranks" in said
    assert "the nearest --world-size that fits is 4 or 8" in said
    code, said = run("inspect-config", str(file), "--world-size", "1")
    assert code == 2 and "the nearest --world-size that fits is 2" in said
    three = ("megatron_cfg.tensor_model_parallel_size=3", "--world-size", "4")
    code, said = run("inspect-config", str(file), *three)
    assert code == 2 and "nearest" not in said
    code, said = run("inspect-config", str(file), "--world-size", "8")
    assert code == 0, said
    assert "8 samples on 4 data-parallel ranks in packed microbatches of 4096 tokens" in said
    assert "ranks that fit 2, 4, 8, 16" in said


def test_what_is_trained_and_the_reference_are_shown(checkpoint, tmp_path) -> None:
    path, other = checkpoint("qwen2"), checkpoint("qwen2", seed=3)
    peft = {"enabled": True, "dim": 4, "alpha": 8.0, "target_modules": ["o_proj"]}
    file = Path(write(tmp_path, path, peft=peft))
    document = yaml.safe_load(file.read_text())

    def shown(**top: Any) -> tuple[int, str]:
        file.write_text(yaml.safe_dump({"policy": document["policy"] | top}))
        return run("inspect-config", str(file))

    code, said = shown(reference_model_name=str(other))
    assert code == 0 and "reference" in said, said
    assert f" {4 * 4 * (64 + 64):,} parameters" in said
    code, said = shown(reward_model_cfg={"enabled": True, "reward_model_type": "regression"})
    assert code == 0 and "reference" not in said, said
    assert f" {4 * 4 * (64 + 64) + 64 + 1:,} parameters" in said
    code, said = shown(reference_model_name=str(checkpoint("qwen2", layers=2)))
    assert code != 0 and "num_layers is 2, not 4" in said


def test_without_a_world_size_one_replica_is_shown(checkpoint, tmp_path) -> None:
    file = write(tmp_path, checkpoint("qwen2"), tensor_model_parallel_size=2)
    code, said = run("inspect-config", file)
    assert code == 0, said
    assert "2 = pp=1 x dp=1 x cp=1 x tp=2" in said


def test_a_layout_that_does_not_fit_is_an_error_with_the_legal_values(checkpoint, tmp_path) -> None:
    file = write(tmp_path, checkpoint("qwen2"), tensor_model_parallel_size=3)
    code, said = run("inspect-config", file)
    assert code == 2
    assert "tensor_model_parallel_size=3" in said and "[1, 2, 4]" in said


def test_an_unknown_key_and_a_missing_file_are_errors_without_a_traceback(
    checkpoint, tmp_path
) -> None:
    file = write(tmp_path, checkpoint("qwen2"), tensor_parallel_model_size=2)
    for code, said in [run("inspect-config", file), run("inspect-config", str(tmp_path / "no"))]:
        assert code == 2
        assert said.startswith("error: ") and "Traceback" not in said


def test_the_version_is_the_packages() -> None:
    assert run("--version") == (0, f"megatron-policy {megatron_policy.__version__} ")


def test_of_many_ranks_that_fit_only_the_first_are_looked_for() -> None:
    policy = {
        "model_name": "m",
        "train_global_batch_size": 10**9,
        "train_micro_batch_size": 1,
        "megatron_cfg": {"enabled": True},
    }
    asked = legal_world_sizes(PolicyConfig.parse(policy))
    assert listed(asked) == "1, 2, 4, 5, 8, 10, 16, 20, ..."
    assert next(asked) == 32


def test_a_hosts_file_for_dtensor_is_said_to_be_its_own_workers(checkpoint, tmp_path) -> None:
    file = Path(write(tmp_path, checkpoint("qwen2")))
    policy = yaml.safe_load(file.read_text())["policy"]
    said_of: dict[str, str] = {}
    for chosen in ("megatron_cfg", "dtensor_cfg"):
        sections = {name: {"enabled": name == chosen} for name in ("megatron_cfg", "dtensor_cfg")}
        for other in ({}, {"grpo": {}}):
            file.write_text(yaml.safe_dump({"policy": policy | sections} | other))
            code, said = run("inspect-config", str(file))
            assert code == 0, said
            said_of[f"{chosen}{len(other)}"] = said
    told = "NeMo RL's own worker trains it, except under `run --workers all`"
    assert [key for key, said in said_of.items() if told in said] == ["dtensor_cfg1"]


def test_overrides_change_what_is_inspected_and_planned(checkpoint, tmp_path) -> None:
    file = write(tmp_path, checkpoint("qwen2"))
    code, said = run("inspect-config", file, "megatron_cfg.tensor_model_parallel_size=2")
    assert code == 0 and "2 = pp=1 x dp=1 x cp=1 x tp=2" in said, said
    code, said = run("plan", file, "megatron_cfg.tensor_model_parallel_size=2", "--gpus", "2")
    assert code == 0 and "tp 2 x cp 1 x dp 1 x pp 1" in said, said
    code, said = run("plan", "--model", str(checkpoint("qwen2")), "--gpus", "2", file)
    assert code == 2 and "--model cannot be given with a CONFIG" in said


def test_other_sections_of_a_whole_file_are_named_as_not_read(checkpoint, tmp_path) -> None:
    file = Path(write(tmp_path, checkpoint("qwen2")))
    file.write_text(f"grpo: {{}}\ndata: {{}}\n{file.read_text()}")
    code, said = run("inspect-config", str(file))
    assert code == 0 and "not read the file's other sections: grpo, data" in said, said


def test_keys_without_effect_are_counted_and_listed_with_why(checkpoint, tmp_path) -> None:
    file = Path(write(tmp_path, checkpoint("qwen2")))
    text = file.read_text().replace(
        "policy:\n",
        "policy:\n  optimizer: {name: torch.optim.AdamW}\n"
        "  dtensor_cfg: {enabled: false, tensor_parallel_size: 4}\n",
    )
    file.write_text(text)
    code, said = run("inspect-config", str(file))
    assert code == 0 and "2 keys; --ignored lists them" in said, said
    code, said = run("inspect-config", str(file), "--ignored")
    assert code == 0 and "dtensor_cfg │ affects the engine of this section only" in said, said
    assert "set megatron_cfg.optimizer" in said


def completions(*words: str) -> list[str]:
    """What the shell's script gets to complete the last of these words with."""
    done = subprocess.run(
        [sys.executable, "-c", "from megatron_policy.cli import app; app(prog_name='m')"],
        cwd=Path(megatron_policy.__file__).parents[1],
        env=os.environ
        | {"_M_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("m", *words))}
        | {"COMP_CWORD": str(len(words))},
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def test_a_shell_completes_commands_and_options() -> None:
    assert completions("ins") == ["inspect", "inspect-config"]
    assert completions("plan", "--re") == ["--refit", "--recompute"]


def test_the_package_is_a_command_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_policy", "--help"],
        cwd=Path(megatron_policy.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m megatron_policy" in done.stdout and "inspect-config" in done.stdout


def test_names_of_ignored_keys_are_not_cut_where_output_is_no_terminal(
    checkpoint, tmp_path
) -> None:
    file = Path(write(tmp_path, checkpoint("qwen2")))
    document = yaml.safe_load(file.read_text())
    document["policy"]["megatron_cfg"]["optimizer"] = {"use_precision_aware_optimizer": True}
    file.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "megatron_policy", "inspect-config", str(file), "--ignored"]
    env = os.environ | {"COLUMNS": "30"}
    told = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert "megatron_cfg.optimizer.use_precision_aware_optimizer" in told.stdout, told.stderr
