"""Which workers a driver of NeMo RL starts once ours are installed, and when it is refused."""

from __future__ import annotations

import importlib
import logging
import os
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_policy.errors import ConfigError
from megatron_policy.hosts import nemo_rl as host
from megatron_policy.hosts.nemo_rl import redirect
from megatron_policy.interfaces.host import Host, find_host
from tests.hosts.conftest import STANDIN, unload
from tests.ranks import ROOT

SINCE_05, UNTIL_04 = redirect.THEIR_WORKERS
OTHERS = (
    "nemo_rl.modelopt.models.policy.workers.megatron_quant_policy_worker.MegatronQuantPolicyWorker",
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",
    "my.extension.Worker",
)


pytest.importorskip("ray")  # which the stand-in imports, as the host does


@pytest.fixture
def groups(nemo_rl_standin: None) -> Iterator[ModuleType]:
    """The host's module that starts workers, as it is before anything is installed."""
    unload("nemo_rl.distributed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", "")
        patch.delenv("TORCH_CUDA_ARCH_LIST")
        patch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])
        redirect.log.setLevel(logging.NOTSET)
        yield importlib.import_module(redirect.GROUPS)
    redirect.log.setLevel(logging.NOTSET)


def test_megatron_workers_of_every_release_become_ours(groups: ModuleType) -> None:
    host.install()
    for theirs, ours in (
        (SINCE_05, redirect.OUR_WORKER),
        (UNTIL_04, redirect.OUR_WORKER),
        (redirect.THEIR_VALUE_WORKER, redirect.OUR_VALUE_WORKER),
    ):
        built = groups.RayWorkerBuilder(theirs, "config", tokenizer="tokenizer")
        assert built.ray_actor_class_fqn == ours
        assert (built.args, built.kwargs) == (("config",), {"tokenizer": "tokenizer"})
        assert groups.get_actor_python_env(ours) == sys.executable
        named = groups.RayWorkerBuilder(ray_actor_class_fqn=theirs)
        assert named.ray_actor_class_fqn == ours
        module, _, name = ours.rpartition(".")
        assert hasattr(getattr(importlib.import_module(module), name), "remote")


@pytest.mark.parametrize("theirs", redirect.THEIR_DTENSOR_WORKERS)
def test_a_dtensor_worker_becomes_ours_where_it_is_asked_for(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    host.install()
    assert groups.RayWorkerBuilder(theirs).ray_actor_class_fqn == theirs
    monkeypatch.setenv("MEGATRON_POLICY_WORKERS", "all")
    host.install()
    assert groups.RayWorkerBuilder(theirs, "config").ray_actor_class_fqn == redirect.OUR_WORKER
    monkeypatch.delenv("MEGATRON_POLICY_WORKERS")
    host.install()
    for name in (theirs, SINCE_05):
        assert groups.RayWorkerBuilder(name).ray_actor_class_fqn == redirect.OUR_WORKER


def test_workers_that_are_not_known_are_refused(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"MEGATRON_POLICY_WORKERS='dtensor'.*or 'all'"):
        host.install("dtensor")
    monkeypatch.setenv("MEGATRON_POLICY_WORKERS", "none")
    with pytest.raises(ConfigError, match="MEGATRON_POLICY_WORKERS='none'"):
        host.install()
    assert not hasattr(groups.RayWorkerBuilder.__init__, "_megatron_policy")


def test_a_dtensor_worker_that_stays_the_hosts_is_named_where_all_are_asked_for(
    groups: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    host.install("all")
    value = "nemo_rl.models.value.workers.dtensor_value_worker_v2.DTensorValueWorkerV2"
    assert groups.RayWorkerBuilder(value).ray_actor_class_fqn == value
    assert [value in record.message for record in caplog.records] == [True]
    with pytest.raises(ConfigError, match=r"it starts nemo_rl\.new\.DTensorPolicyWorker, which"):
        groups.RayWorkerBuilder("nemo_rl.new.DTensorPolicyWorker")


def test_hosts_are_found_by_name_and_installing_again_changes_nothing(groups: ModuleType) -> None:
    found, own = find_host("nemo_rl"), find_host("ray")
    assert found == host.backend() and found.name == "nemo_rl"
    assert found.worker == redirect.OUR_WORKER and hasattr(found.actor_class(), "remote")
    host.install()
    once = groups.RayWorkerBuilder.__init__
    found.install()
    assert groups.RayWorkerBuilder.__init__ is once
    assert isinstance(own, Host) and own.install() is None
    with pytest.raises(ConfigError, match=r"no host 'other'; known hosts: .*nemo_rl"):
        find_host("other")


def test_a_redirect_is_told_in_one_line_which_is_seen_without_logging_and_can_be_silenced(
    groups: ModuleType,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host.install()
    assert not caplog.records
    groups.RayWorkerBuilder(SINCE_05)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert all(word in record.message for word in (SINCE_05, redirect.OUR_WORKER, sys.executable))
    capfd.readouterr()
    monkeypatch.setattr(redirect.log, "propagate", False)
    groups.RayWorkerBuilder(SINCE_05)
    assert capfd.readouterr().err.count("\n") == 1
    redirect.log.setLevel(logging.WARNING)
    groups.RayWorkerBuilder(SINCE_05)
    assert not capfd.readouterr().err


def test_every_other_worker_stays_what_it_is_and_a_megatron_one_of_the_hosts_is_named(
    groups: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    host.install()
    for name in (*OTHERS, "my.extension.MegatronPolicyWorker", redirect.OUR_WORKER):
        assert groups.RayWorkerBuilder(name).ray_actor_class_fqn == name
    told = [record.message for record in caplog.records]
    assert len(told) == 1 and OTHERS[0] in told[0]
    with pytest.raises(ConfigError, match=r"it starts nemo_rl\.new\.MegatronPolicyWorker, which"):
        groups.RayWorkerBuilder("nemo_rl.new.MegatronPolicyWorker")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, sys.executable),
        ("", sys.executable),
        ("sh", "/"),
        ("uv run --extra mcore", "uv run --extra mcore"),
    ],
)
def test_workers_run_in_the_python_that_is_asked_for(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    if given is not None:
        monkeypatch.setenv("MEGATRON_POLICY_PY", given)
    host.install()
    found = groups.get_actor_python_env(redirect.OUR_WORKER)
    assert found == used or (used == "/" and os.path.isabs(found) and os.access(found, os.X_OK))


def test_a_python_that_is_not_there_is_refused(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_POLICY_PY", "/nowhere/python")
    with pytest.raises(ConfigError, match=r"MEGATRON_POLICY_PY=/nowhere/python.*uv run"):
        host.install()


@pytest.mark.parametrize("given", [None, "9.0"])
def test_what_others_compile_for_is_left_to_the_user(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    host.install()
    # torch.utils.cpp_extension takes an empty value like none.
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == (given or "")


class NameComesSecond:
    def __init__(self, options: Any, ray_actor_class_fqn: str) -> None: ...


WORKERS = "ACTOR_ENVIRONMENT_REGISTRY"
MOVED = dict.fromkeys((redirect.THEIR_VALUE_WORKER, "nemo_rl.new.MegatronWorker"), "uv run mcore")


@pytest.mark.parametrize(
    ("builder", "workers", "named"),
    [
        (None, ..., "no class RayWorkerBuilder"),
        (lambda name: name, ..., "no class RayWorkerBuilder"),
        (NameComesSecond, ..., "does not take ray_actor_class_fqn first"),
        (..., {}, "it has none"),
        (..., None, f"no mapping {WORKERS}"),
        (..., (), f"no mapping {WORKERS}"),
        (..., MOVED, r"it has nemo_rl\.\S*MegatronValueWorker, nemo_rl\.new\.MegatronWorker"),
    ],
)
def test_a_host_that_has_changed_is_refused_and_left_alone(
    groups: ModuleType, builder: Any, workers: Any, named: str
) -> None:
    """Where it has None there is nothing of that name, where `...` what there was."""
    registry = importlib.import_module(redirect.ENVIRONMENTS)
    for module, name, changed in (
        (groups, "RayWorkerBuilder", builder),
        (registry, WORKERS, workers),
    ):
        if changed is None:
            delattr(module, name)
        elif changed is not ...:
            setattr(module, name, changed)
    with pytest.raises(
        ConfigError, match=f"differs from those that megatron-policy knows: .*{named}"
    ):
        host.install()
    builder = getattr(groups, "RayWorkerBuilder", None)
    assert not hasattr(getattr(builder, "__init__", None), "_megatron_policy")
    assert redirect.OUR_WORKER not in getattr(registry, "ACTOR_ENVIRONMENT_REGISTRY", ())


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("nemo_rl", r"not installed in \S+.*PYTHONPATH"),
        ("nemo_rl.distributed.worker_groups", "no module nemo_rl.distributed.worker_groups"),
        ("ray", "cannot be imported in .*Install what it needs"),
    ],
)
def test_a_host_that_cannot_be_imported_is_refused_with_what_is_missing(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch, missing: str, named: str
) -> None:
    unload("nemo_rl.distributed")
    unload("nemo_rl")
    # As import itself says it.
    monkeypatch.setattr(sys, "meta_path", [Missing(missing), *sys.meta_path])
    monkeypatch.delitem(sys.modules, missing, raising=False)
    with pytest.raises(ConfigError, match=named):
        host.install()


class Missing:
    """A finder by which one module is nowhere."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_what_calls_ray_when_it_is_collected_is_collected_while_ray_is_there() -> None:
    code = """
import atexit, nemo_rl
atexit.register(print, "Ray leaves")
from megatron_policy.hosts import nemo_rl as host

class Policy:
    def __init__(self): self.generation = self
    def __del__(self): print("a policy calls Ray")

def main(): Policy()

host.install()
main()
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(STANDIN)))}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert told.stdout.splitlines() == ["a policy calls Ray", "Ray leaves"], told.stderr


def test_workers_are_led_to_a_checkout_and_not_to_an_installed_package(
    groups: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(redirect, "_is_found_by_a_new_python", lambda: True)
    host.install()
    assert os.environ["PYTHONPATH"] == "/elsewhere"
    monkeypatch.setattr(redirect, "_is_found_by_a_new_python", lambda: False)
    host.install()
    assert os.environ["PYTHONPATH"] == os.pathsep.join(("/elsewhere", str(ROOT)))


def test_a_folder_that_a_pth_file_adds_is_not_put_onto_pythonpath(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as the site-packages of the environment in which this package is."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "none"))
    file = tmp_path / "neighbour.pth"
    for content, found in ((f"# {ROOT}\nimport sys\n", False), (f"\n{ROOT}\n", True)):
        file.write_text(content)
        assert redirect._is_found_by_a_new_python() is found


def test_a_new_python_finds_a_checkout_by_pythonpath_only() -> None:
    code = "import sys; sys.path.insert(0, {root!r}); {install}; {ask}".format(
        root=str(ROOT),
        install="from megatron_policy.hosts.nemo_rl import redirect",
        ask="print(redirect._is_found_by_a_new_python())",
    )
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for env, answer in ((clean, "False"), (clean | {"PYTHONPATH": str(ROOT)}, "True")):
        told = subprocess.run(
            [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True
        )
        assert told.stdout.strip() == answer, told.stderr
