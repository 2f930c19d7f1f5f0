"""The scripts for clusters start the right commands on the right nodes: with stand-ins for the
programs that they call, which record who is called where.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "cluster"
WAIT = str(SCRIPTS / "wait_for_nodes.py")
SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_ON_NODE": "32",
}
STANDIN = """
import json, os, sys, time
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
host, records = os.environ.get("STANDIN_HOST", "n1"), os.environ["STANDIN_RECORDS"]

def starts():
    with open(records) as file:
        return sum(json.loads(line)[1:3] == ["ray", "start"] for line in file)

def become(where, command):
    if os.fork() == 0:
        os.execvpe(command[0], command, os.environ | {"STANDIN_HOST": where})
    return os.waitstatus_to_exitcode(os.wait()[1])

if name == "scontrol":
    sys.exit(print("n1", "n2", "n3", sep="\\n"))
if name == "hostname":
    sys.exit(print("10.0.0.1 192.168.0.1"))
while name == "python" and starts() < int(arguments[-1]):
    time.sleep(0.02)
with open(records, "a") as file:
    print(json.dumps([host, name, *arguments]), file=file)
if name == "srun":
    first = next(i for i, word in enumerate(arguments) if not word.startswith("-"))
    options = dict(word.partition("=")[::2] for word in arguments[:first])
    nodes = options.get("--nodelist", "n1 n2 n3").split()
    sys.exit(max(become(node, arguments[first:]) for node in nodes))
elif name == "ssh":
    sys.exit(become(arguments[0], arguments[1:]))
elif name == "driver":
    sys.exit(7 if os.environ["RAY_ADDRESS"].startswith("10.0.0.1:") else 1)
"""


@dataclass(frozen=True)
class Run:
    """What a script has started: lines of host, program, arguments; and its exit code."""

    code: int
    calls: list[list[str]]
    errors: str

    def on(self, host: str, program: str) -> list[list[str]]:
        """The arguments of each call of that program there, in order."""
        return [call[2:] for call in self.calls if call[:2] == [host, program]]


def run(folder: Path, script: str, *arguments: str, **environment: str) -> Run:
    programs, records = folder / "programs", folder / "records"
    programs.mkdir()
    records.touch()
    for name in ("scontrol", "hostname", "srun", "ssh", "ray", "torchrun", "python", "driver"):
        (programs / name).write_text(f"#!{sys.executable} -S\n{STANDIN}")
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPTS / script), *arguments],
        env={
            "PATH": f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "STANDIN_RECORDS": str(records),
            "MEGATRON_POLICY": str(SCRIPTS.parents[1]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    calls = [json.loads(line) for line in records.read_text().splitlines()]
    return Run(done.returncode, calls, done.stderr)


def test_every_script_explains_itself_and_can_be_run() -> None:
    for script in SCRIPTS.glob("*.sh"):
        assert "\n# usage: " in script.read_text() and os.access(script, os.X_OK), script


def test_torchrun_starts_once_on_each_node_and_all_meet_on_the_first(tmp_path) -> None:
    found = run(tmp_path, "slurm_torchrun.sh", "train.py", "--steps", "a b", **SLURM)
    assert found.code == 0, found.errors
    wanted = [
        *("--nnodes=3", "--nproc-per-node=4", "--max-restarts=0", "--rdzv-backend=c10d"),
        *("--rdzv-endpoint=n1:22345", "--rdzv-id=12345", "train.py", "--steps", "a b"),
    ]
    for node in ("n1", "n2", "n3"):
        assert found.on(node, "torchrun") == [wanted]
    (srun,) = found.on("n1", "srun")
    assert srun[:3] == ["--nodes=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]


def test_the_ray_of_a_job_is_complete_before_its_driver_starts_on_the_head(tmp_path) -> None:
    options = {"SRUN_ARGS": "--container-image=image.sqsh --no-container-mount-home"}
    found = run(tmp_path, "slurm_ray.sh", "driver", "x=a b", **SLURM, **options)
    assert found.code == 7, found.errors
    (head,) = found.on("n1", "ray")
    assert head[:3] == ["start", "--block", "--head"]
    assert {"--node-ip-address=10.0.0.1", "--port=22345", "--num-gpus=4"} < set(head)
    for node in ("n2", "n3"):
        (worker,) = found.on(node, "ray")
        assert worker[:2] == ["start", "--block"]
        assert {"--address=10.0.0.1:22345", "--num-gpus=4"} < set(worker)
        assert "--head" not in worker
    assert found.on("n1", "python") == [[WAIT, "10.0.0.1:22345", number] for number in "13"]
    assert found.on("n1", "driver") == [["x=a b"]]
    order = [call[1] for call in found.calls if call[1] != "srun"]
    assert order == ["ray", "python", "ray", "ray", "python", "driver"]
    for step in found.on("n1", "srun"):
        assert step[:4] == ["--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        assert step[5:8] == ["--cpus-per-task=32", *options["SRUN_ARGS"].split()]


def test_without_slurm_ray_starts_by_ssh_and_is_stopped_everywhere_after_the_driver(
    tmp_path,
) -> None:
    found = run(tmp_path, "ray_nodes.sh", "n2", "n3", "--", "driver", "x=a b", RAY_PORT="7000")
    assert found.code == 7, found.errors
    on_head, *_ = found.on("n1", "ray")
    assert on_head[:2] == ["start", "--head"]
    assert {"--node-ip-address=10.0.0.1", "--port=7000"} < set(on_head)
    joined = ["start", "--address=10.0.0.1:7000", "--disable-usage-stats"]
    for node in ("n2", "n3"):
        assert found.on(node, "ray") == [joined, ["stop"]]
    assert found.on("n1", "ray") == [on_head, ["stop"]]
    order = [call[1] for call in found.calls if call[1] != "ssh"]
    assert order == ["ray", "ray", "ray", "python", "driver", "ray", "ray", "ray"]
    assert found.on("n1", "driver") == [["x=a b"]]


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        ("slurm_torchrun.sh", ["train.py"], {}, "submit this script with sbatch"),
        ("slurm_torchrun.sh", [], SLURM, "the program that every rank runs"),
        ("slurm_ray.sh", [], SLURM, "the command that drives the policy"),
        ("ray_nodes.sh", ["n2", "driver"], {}, "usage: ray_nodes.sh HOST... -- COMMAND..."),
    ],
)
def test_a_script_that_misses_something_says_what_and_starts_nothing(
    tmp_path, script: str, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    found = run(tmp_path, script, *arguments, **environment)
    assert found.code != 0 and message in found.errors and found.calls == []
