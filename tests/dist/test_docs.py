"""The code in the documents runs as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_policy.coordination.rendezvous import reserved_port
from tests.dist.test_launch import ROOT, run_python


def python_blocks(document: str) -> list[str]:
    """The Python blocks of a document, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


@pytest.fixture
def train(checkpoints, tmp_path) -> str:
    """The README's program, in a directory with the checkpoint that it names."""
    program, _ = python_blocks("README.md")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen2.5-0.5B").symlink_to(checkpoints[True])
    (tmp_path / "train.py").write_text(program)
    return program


def run(tmp_path: Path, *command: str) -> str:
    """What a program of Python prints; it has to end well."""
    done = run_python(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
def test_the_readmes_program_trains_on_the_ranks_of_torchrun(train: str, tmp_path) -> None:
    with reserved_port() as port:
        pass
    where = ("--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    printed = run(tmp_path, "-m", "torch.distributed.run", *where, "train.py")
    # One step of all rows on both ranks, whose lines can run into one another.
    assert len(re.findall(r"tensor\(\[\d+\.\d+\]\)", printed)) == 2, printed
    assert (tmp_path / "trained" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_the_readmes_programs_train_alone_and_under_ray_with_the_loss_of_the_loss_document(
    train: str, tmp_path
) -> None:
    _, under_ray = python_blocks("README.md")
    loss, *_ = python_blocks("docs/losses.md")
    (tmp_path / "my_losses.py").write_text(loss)
    # One policy at a time in a process: the first is closed before workers take over.
    program = train + "policy.shutdown()\nfrom my_losses import NLL\n" + under_ray
    (tmp_path / "ray_train.py").write_text(program)
    printed = run(tmp_path, "ray_train.py")
    assert printed.count("tensor([") == 2 and "torch.Size([2, 16])" in printed
