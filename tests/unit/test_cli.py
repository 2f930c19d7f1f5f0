"""The command line: what it says of a configuration that fits, and of one that does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import megatron_policy
from megatron_policy.cli import app
from megatron_policy.cli.config_report import legal_world_sizes, show_sizes
from megatron_policy.config import PolicyConfig
from tests.pure.test_config import minimal
from tests.unit import command_line

Section = dict[str, Any]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "policy.yaml"


def write(file: Path, model: Path, more: Section | None = None, **megatron: Any) -> None:
    """A configuration with these keys of the policy, and of its section megatron_cfg."""
    policy = minimal(model_name=str(model)) | (more or {})
    policy["megatron_cfg"] |= megatron
    file.write_text(yaml.safe_dump({"policy": policy}))


def run(*arguments: object, **environment: str) -> tuple[int, str]:
    """The exit code, and all that is said, on one line."""
    code, said, errors = command_line.run(*arguments, **environment)
    return code, re.sub(r"\s+", " ", said + errors)


def test_a_layout_is_shown_with_the_layers_and_ranks_of_each_stage(checkpoint, file) -> None:
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    write(file, checkpoint("qwen2"), **layout, num_layers_in_first_pipeline_stage=1)
    code, said = run("inspect-config", file, "--world-size", "8")
    assert code == 0, said
    assert "8 = pp=2 x dp=2 x cp=1 x tp=2" in said
    assert "8 samples = 2 data-parallel ranks x 2 microbatches of 2" in said
    assert "ranks that fit 4, 8, 16" in said
    assert "0 │ 0-3 │ 0-0" in said and "1 │ 4-7 │ 1-3" in said


def test_microbatches_of_tokens_are_shown_as_such_and_fit_replicas_that_share_rows_equally(
    checkpoint, file
) -> None:
    packed = {"sequence_packing": {"enabled": True, "train_mb_tokens": 4096}}
    write(file, checkpoint("qwen2"), packed, tensor_model_parallel_size=2)
    code, said = run("inspect-config", file, "--world-size", "6")
    assert code == 2 and "is not a multiple of 3 data-parallel ranks" in said
    assert "the nearest --world-size that fits is 4 or 8" in said
    code, said = run("inspect-config", file, "--world-size", "1")
    assert code == 2 and "the nearest --world-size that fits is 2" in said
    three = ("megatron_cfg.tensor_model_parallel_size=3", "--world-size", "4")
    code, said = run("inspect-config", file, *three)
    assert code == 2 and "nearest" not in said
    code, said = run("inspect-config", file, "--world-size", "8")
    assert code == 0, said
    assert "8 samples on 4 data-parallel ranks in packed microbatches of 4096 tokens" in said
    assert "ranks that fit 2, 4, 8, 16" in said


def test_what_is_trained_and_the_reference_are_shown(checkpoint, file) -> None:
    def shown(**top: Any) -> tuple[int, str]:
        peft = {"enabled": True, "dim": 4, "alpha": 8.0, "target_modules": ["o_proj"]}
        write(file, checkpoint("qwen2"), top, peft=peft)
        return run("inspect-config", file)

    code, said = shown(reference_model_name=str(checkpoint("qwen2", seed=3)))
    assert code == 0 and "reference" in said, said
    assert f" {4 * 4 * (64 + 64):,} parameters" in said
    code, said = shown(reward_model_cfg={"enabled": True, "reward_model_type": "regression"})
    assert code == 0 and "reference" not in said, said
    assert f" {4 * 4 * (64 + 64) + 64 + 1:,} parameters" in said
    code, said = shown(reference_model_name=str(checkpoint("qwen2", layers=2)))
    assert code != 0 and "num_layers is 2, not 4" in said


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("tensor_model_parallel_size", "tensor_model_parallel_size=3 [1, 2, 4]"),
        ("tensor_parallel_model_size", "tensor_parallel_model_size"),
        (None, "policy.yaml"),
    ],
)
def test_a_layout_that_does_not_fit_an_unknown_key_and_a_missing_file_are_errors(
    checkpoint, file, key: str | None, said: str
) -> None:
    if key is not None:
        write(file, checkpoint("qwen2"), **{key: 3})
    code, found = run("inspect-config", file)
    assert code == 2 and found.startswith("error: ") and "Traceback" not in found
    assert all(word in found for word in said.split(maxsplit=1))


def test_the_version_is_the_packages() -> None:
    assert run("--version") == (0, f"megatron-policy {megatron_policy.__version__} ")


def test_of_many_ranks_that_fit_only_the_first_are_looked_for() -> None:
    many = minimal(train_global_batch_size=10**9, train_micro_batch_size=1)
    asked = legal_world_sizes(PolicyConfig.parse(many))
    assert show_sizes(asked) == "1, 2, 4, 5, 8, 10, 16, 20, ..."
    assert next(asked) == 32


def test_a_hosts_file_for_dtensor_is_said_to_be_its_own_workers(checkpoint, file) -> None:
    said_of: dict[str, str] = {}
    for chosen in ("megatron_cfg", "dtensor_cfg"):
        sections = {name: {"enabled": name == chosen} for name in ("megatron_cfg", "dtensor_cfg")}
        for other in ("", "grpo: {}\n"):
            write(file, checkpoint("qwen2"), sections)
            file.write_text(other + file.read_text())
            code, said_of[chosen + other] = run("inspect-config", file)
            assert code == 0, said_of
    told = "NeMo RL's own worker trains it, except under `run --workers all`"
    assert [key for key, said in said_of.items() if told in said] == ["dtensor_cfggrpo: {}\n"]
    assert "not read the file's other sections: grpo" in said_of["megatron_cfggrpo: {}\n"]


def test_overrides_change_what_is_inspected_and_planned(checkpoint, file) -> None:
    write(file, checkpoint("qwen2"))
    code, said = run("inspect-config", file, "megatron_cfg.tensor_model_parallel_size=2")
    assert code == 0 and "2 = pp=1 x dp=1 x cp=1 x tp=2" in said, "one replica is shown"
    code, said = run("plan", file, "megatron_cfg.tensor_model_parallel_size=2", "--gpus", "2")
    assert code == 0 and "tp 2 x cp 1 x dp 1 x pp 1" in said, said
    code, said = run("plan", "--model", checkpoint("qwen2"), "--gpus", "2", file)
    assert code == 2 and "--model cannot be given with a CONFIG" in said


def test_keys_without_effect_are_counted_and_listed_whole_with_why(checkpoint, file) -> None:
    ignored = {"dtensor_cfg": {"enabled": False, "tensor_parallel_size": 4}}
    precise = {"use_precision_aware_optimizer": True}
    named = {"optimizer": {"name": "torch.optim.AdamW"}}
    write(file, checkpoint("qwen2"), ignored | named, optimizer=precise)
    code, said = run("inspect-config", file)
    assert code == 0 and "3 keys; --ignored lists them" in said, said
    code, said = run("inspect-config", file, "--ignored", COLUMNS="30")
    assert code == 0 and "dtensor_cfg │ affects the engine of this section only" in said, said
    assert "set megatron_cfg.optimizer" in said
    assert "megatron_cfg.optimizer.use_precision_aware_optimizer" in said, "this is no terminal"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("ins", ["inspect", "inspect-config"]), ("plan --re", ["--refit", "--recompute"])],
)
def test_a_shell_completes_commands_and_options(words: str, expected: list[str]) -> None:
    asked = {"_M_COMPLETE": "complete_bash", "COMP_WORDS": f"m {words}"}
    asked["COMP_CWORD"] = str(len(words.split()))
    assert CliRunner().invoke(app, env=asked, prog_name="m").stdout.split() == expected


def test_the_package_is_a_command_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_policy", "--help"],
        cwd=Path(megatron_policy.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m megatron_policy" in done.stdout and "inspect-config" in done.stdout
