"""A program under our launchers is as under Python, and NeMo RL in it starts our worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.hosts.nemo_rl import redirect
from megatron_policy.interfaces.host import OWN
from tests.ranks import ROOT

LAUNCHERS = {
    "module": ("-m", "megatron_policy.hosts.nemo_rl"),
    "command": ("-m", "megatron_policy", "run"),
}
CONFIGURATION = str(ROOT / "configs" / "grpo_qwen2_cpu.yaml")
THEIRS = redirect.THEIR_WORKERS[0]
HOST = {
    "__init__.py": "",
    "worker_groups.py": """
class RayWorkerBuilder:
    def __init__(self, ray_actor_class_fqn, *args, **kwargs):
        self.ray_actor_class_fqn = ray_actor_class_fqn
""",
    "ray_actor_environment_registry.py": f"ACTOR_ENVIRONMENT_REGISTRY = {{{THEIRS!r}: 'uv run'}}",
}
"""As much of NeMo RL as installing looks at, and no Ray to be waited for."""

REPORT = """
import json, os, pickle, sys

class Here:
    pass

assert pickle.loads(pickle.dumps(Here)) is Here  # found in sys.modules["__main__"]
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "first": sys.path[0],
    "package": __package__, "spec": __spec__ and __spec__.name, "doc": __doc__,
    "names": sorted(name for name in globals() if not name.startswith("__")),
}))
"""
DRIVER = """
import sys
from nemo_rl.distributed.worker_groups import RayWorkerBuilder
print(RayWorkerBuilder(sys.argv[1]).ray_actor_class_fqn)
"""
ENDS = {
    "exits": ("import sys; sys.exit(7)", 7),
    "ends": ("", 0),
    "says_why": ("import sys; sys.exit('because')", 1),
    "fails": ("raise LookupError('where')", 1),
    "is_no_python": ("def", 1),
    "is_interrupted": ("raise KeyboardInterrupt", 130),
}


def python(*words: Any, **env: str | None) -> subprocess.CompletedProcess[str]:
    """A Python with this checkout on its path; variables of None are unset."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "NEMO_RL_MEGATRON_BACKEND": None} | env
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={key: value for key, value in given.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PYTHONPATH with this checkout and the host."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "nemo_rl/distributed").mkdir(parents=True)
    for name, code in HOST.items():
        (folder / "nemo_rl/distributed" / name).write_text(code)
    return os.pathsep.join(map(str, (ROOT, folder)))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of site-packages that has the line, as setup.py writes it, and nothing else."""
    told = python(
        "-c",
        "import setuptools, runpy; setuptools.setup = lambda **_: None;"
        f"found = runpy.run_path({str(ROOT / 'setup.py')!r}); print(found['NAME'], found['LINE'])",
    )
    name, _, line = told.stdout.partition(" ")
    folder = tmp_path_factory.mktemp("site")
    (folder / name).write_text(line)
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, a link to it, a module, a folder to run, and scripts that end."""
    folder = tmp_path_factory.mktemp("programs")
    for place in ("script.py", "package/inner.py", "folder/__main__.py"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(REPORT)
    (folder / "package/__init__.py").touch()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/link.py").symlink_to(folder / "script.py")
    (folder / "driver.py").write_text(DRIVER)
    for name, (code, _) in ENDS.items():
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("words", "launcher"),
    [
        (("script.py", "--host", "x", "-m", "--", "--help"), "module"),
        (("script.py", "--host", "x", "-m", "--", "--help"), "command"),
        (("elsewhere/link.py",), "module"),
        (("HERE/folder", "a"), "module"),
        (("-m", "package.inner", "-q", "--host=x"), "module"),
        (("-m", "package.inner", "-q", "--host=x"), "command"),
    ],
)
def test_a_program_sees_what_it_sees_under_python(
    programs: Path,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    launcher: str,
) -> None:
    monkeypatch.chdir(programs)
    words = tuple(word.replace("HERE", str(programs)) for word in words)
    plain, launched = (
        python(*before, *words, PYTHONPATH=path) for before in ((), LAUNCHERS[launcher])
    )
    assert launched.returncode == 0, launched.stderr
    assert json.loads(launched.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_it_ends_under_python(programs: Path, path: str, name: str) -> None:
    script = programs / f"{name}.py"
    launcher = "module" if name in ("exits", "says_why") else "command"
    before = ((), LAUNCHERS[launcher])
    plain, launched = (python(*first, script, PYTHONPATH=path) for first in before)
    assert launched.returncode == ENDS[name][1]
    assert launched.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_of_nemo_rl_starts_our_worker(programs: Path, path: str, launcher: str) -> None:
    told = python(*LAUNCHERS[launcher], programs / "driver.py", THEIRS, PYTHONPATH=path)
    assert told.stdout == f"{redirect.OUR_WORKER}\n", told.stderr
    assert THEIRS in told.stderr


def test_the_command_asks_for_our_worker_in_place_of_the_dtensor_one(
    programs: Path, path: str
) -> None:
    theirs = redirect.THEIR_DTENSOR_WORKERS[0]
    for words, wanted in ((("--workers", "all"), redirect.OUR_WORKER), ((), theirs)):
        given = (*words, programs / "driver.py", theirs)
        told = python(*LAUNCHERS["command"], *given, PYTHONPATH=path)
        assert told.stdout == f"{wanted}\n", told.stderr


def test_help_names_every_host_of_this_package() -> None:
    shown = python(*LAUNCHERS["command"], "--help", COLUMNS="200").stdout
    (option,) = (line for line in shown.split("--host")[1:2])
    assert all(name in option for name in (*OWN, "verl"))


@pytest.mark.nightly
def test_another_host_can_be_named(programs: Path) -> None:
    told = python(*LAUNCHERS["command"], "--host", "ray", programs / "exits.py")
    assert told.returncode == 7, told.stderr


NO_PYTHON = {"MEGATRON_POLICY_PY": "/no/python"}


@pytest.mark.parametrize(
    ("words", "env", "code", "named"),
    [
        (("module", "nowhere.py"), {}, 2, "there is no script 'nowhere.py'"),
        (("command", "nowhere.py"), {}, 2, "there is no script 'nowhere.py'"),
        (("command", CONFIGURATION), {}, 2, "is a configuration, not a script: give the host's"),
        (("module", "-m", "no.where"), {}, 2, "there is no module 'no.where'"),
        (("module",), {}, 2, "name a script, or a module after -m"),
        (("command", "--host", "other", __file__), {}, 2, "there is no host 'other'; known hosts:"),
        (("command", "--host", "verl", __file__), {}, 2, "model_engine=megatron_policy"),
        (("command", "--host", "verl"), {}, 2, "python -m verl.trainer.main_ppo"),
        (("command",), {}, 2, "as in `megatron-policy run examples/run_grpo.py --config FILE`"),
        (("command", "--workers", "none", __file__), {}, 2, "'megatron', those of policy.megatron"),
        (("command", "--host", "ray", "--workers", "all", __file__), {}, 2, "leave it out with"),
        (("module", __file__), {}, 1, "NeMo RL is not installed in"),
        (("command", __file__), {}, 1, "NeMo RL is not installed in"),
        (("command", __file__), NO_PYTHON, 1, "there is no such program"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(
    path: str, words: tuple[str, ...], env: dict[str, str], code: int, named: str
) -> None:
    if env:
        env = env | {"PYTHONPATH": path}
    told = python(*LAUNCHERS[words[0]], *words[1:], **env)
    assert told.returncode == code
    # The command breaks lines as wide as a terminal, and frames them.
    flat = " ".join(told.stderr.replace("│", " ").split())
    assert named in flat and "Traceback" not in flat


def test_an_import_of_nemo_rl_installs_where_the_environment_asks_for_it(
    path: str, site: Path
) -> None:
    # Twice, as a virtual environment does.
    run = f"import site; site.addsitedir({str(site)!r}); site.addsitedir({str(site)!r})\n"
    asked, other, not_asked = (
        python("-c", run + DRIVER, THEIRS, PYTHONPATH=path, NEMO_RL_MEGATRON_BACKEND=value)
        for value in ("megatron_policy", "mcore", None)
    )
    assert asked.stdout == f"{redirect.OUR_WORKER}\n", asked.stderr
    assert asked.stderr.count("\n") == 1
    assert (not_asked.stdout, not_asked.stderr) == (f"{THEIRS}\n", "")
    assert other.stdout == f"{THEIRS}\n"
    assert "NEMO_RL_MEGATRON_BACKEND='mcore' is not known" in other.stderr
    assert "known: megatron_policy" in other.stderr and other.stderr.count("\n") == 1


def test_a_start_without_nemo_rl_imports_next_to_nothing(site: Path) -> None:
    run = (
        # Where the package is installed its own line has run already.
        f"import sys, site; site.addsitedir({str(site)!r})\n"
        "print(*sorted(name for name in sys.modules if name.startswith('megatron_policy')))\n"
        "print(*(name for name in ('torch', 'ray', 'nemo_rl', 'numpy') if name in sys.modules))"
    )
    asked = python("-c", run, NEMO_RL_MEGATRON_BACKEND="megatron_policy")
    modules, heavy = asked.stdout.split("\n")[:2]
    assert "megatron_policy.hosts.nemo_rl.autoload" in modules and len(modules.split()) < 8
    assert not heavy
    assert python("-c", run).stdout == "\n\n"


def test_a_start_goes_on_when_the_package_is_gone(site: Path) -> None:
    run = f"import site; site.addsitedir({str(site)!r}); print('on')"
    told = python("-S", "-c", run, PYTHONPATH="", NEMO_RL_MEGATRON_BACKEND="megatron_policy")
    assert (told.returncode, told.stdout) == (0, "on\n")


def test_a_changed_nemo_rl_is_refused_where_the_environment_asks_for_ours(
    tmp_path: Path, site: Path
) -> None:
    changed = tmp_path / "nemo_rl/distributed"
    changed.mkdir(parents=True)
    for name in ("__init__", "worker_groups", "ray_actor_environment_registry"):
        (changed / f"{name}.py").touch()
    run = f"import site; site.addsitedir({str(site)!r})\n"
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    asked = {"PYTHONPATH": path, "NEMO_RL_MEGATRON_BACKEND": "megatron_policy"}
    told = python("-c", run + DRIVER, THEIRS, **asked)
    assert "ConfigError: this NeMo RL differs from those that megatron-policy knows" in told.stderr
    assert told.returncode == 1
