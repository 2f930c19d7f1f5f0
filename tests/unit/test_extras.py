"""Without the optional packages all else works, and what needs one says how to install it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_policy.errors import MissingPackageError
from megatron_policy.extras import EXTRAS, require

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCKED = f"import sys; sys.modules |= dict.fromkeys({sorted(EXTRAS)!r})\n"

WITHOUT_RAY = """
import torch
from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.cli import app
from tests.losses import SequenceNLL
model, target = {model!r}, {target!r}
for call in (
    ["inspect", model],
    ["plan", "--model", model, "--gpus", "1"],
    ["convert", model, target, "--to", "mcore"],
):
    try:
        app(call)
    except SystemExit as ended:
        assert not ended.code, call
config = {{"model_name": model, "train_global_batch_size": 2, "train_micro_batch_size": 1}}
policy = MegatronPolicy(config | {{"megatron_cfg": {{"enabled": True}}}})
data = BatchedDataDict(
    input_ids=torch.randint(0, 50, (2, 8)), token_mask=torch.ones(2, 8), sample_mask=torch.ones(2)
)
print(policy.train(data, SequenceNLL())["loss"].item() > 0)
"""


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has none of the optional packages."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("package", EXTRAS)
def test_an_extra_brings_what_its_error_tells_to_install(package: str) -> None:
    extra = EXTRAS[package]
    assert PROJECT["optional-dependencies"][extra.name] == [extra.requirement]
    bare = re.split(r"\W", extra.requirement)[0]
    assert not [line for line in PROJECT["dependencies"] if re.split(r"\W", line)[0] == bare]


def test_the_commands_and_a_policy_of_one_process_work_without_ray_and_zmq(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    target = tmp_path / "mcore"
    done = without_extras(WITHOUT_RAY.format(model=str(checkpoint("qwen2")), target=str(target)))
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
    assert target.is_dir()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("from megatron_policy import Policy", 'pip install "ray>=2.40"'),
        ("from megatron_policy.workers import init_ray", 'pip install ".[ray]"'),
        ("import megatron_policy.refit.transports.ipc.transport", 'pip install "pyzmq>=26"'),
    ],
)
def test_what_needs_a_missing_package_names_the_pip_command(line: str, wanted: str) -> None:
    done = without_extras(line)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron_policy.errors.MissingPackageError: ") and wanted in last


def test_a_package_that_lacks_one_of_its_own_keeps_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("import one_of_its_own\n")
    monkeypatch.delitem(sys.modules, "zmq", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="one_of_its_own") as caught:
        require("zmq")
    assert not isinstance(caught.value, MissingPackageError)
