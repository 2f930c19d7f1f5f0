"""Makes NeMo RL's driver start our worker instead of its own."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import logging
import os
import shutil
import site
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from megatron_policy.errors import ConfigError

OUR_WORKER = "megatron_policy.hosts.nemo_rl.worker.MegatronPolicyWorker"
THEIR_WORKERS = (
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",  # since 0.5
    "nemo_rl.models.policy.megatron_policy_worker.MegatronPolicyWorker",  # until 0.4
)
"""The workers that ours replaces. NeMo RL's other workers that use Megatron are left alone."""

OUR_VALUE_WORKER = "megatron_policy.hosts.nemo_rl.value_worker.MegatronValueWorker"
THEIR_VALUE_WORKER = "nemo_rl.models.value.workers.megatron_value_worker.MegatronValueWorker"
_OF_MEGATRON = dict.fromkeys(THEIR_WORKERS, OUR_WORKER) | {THEIR_VALUE_WORKER: OUR_VALUE_WORKER}

THEIR_DTENSOR_WORKERS = (
    "nemo_rl.models.policy.workers.dtensor_policy_worker.DTensorPolicyWorker",  # since 0.5
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
    "nemo_rl.models.policy.dtensor_policy_worker.DTensorPolicyWorker",  # until 0.4
    "nemo_rl.models.policy.dtensor_policy_worker_v2.DTensorPolicyWorkerV2",
)
"""Ours replaces them where it is asked for: it chooses its engine by the configuration."""

WORKERS_VARIABLE = "MEGATRON_POLICY_WORKERS"
WORKERS = {
    "megatron": _OF_MEGATRON,
    "all": _OF_MEGATRON | dict.fromkeys(THEIR_DTENSOR_WORKERS, OUR_WORKER),
}
"""What is replaced, by the values of the variable."""

_SAME_CLASS = (".MegatronPolicyWorker", ".DTensorPolicyWorker", ".DTensorPolicyWorkerV2")

GROUPS = "nemo_rl.distributed.worker_groups"
CLASS_NAME = "ray_actor_class_fqn"
"""The first argument of RayWorkerBuilder in all releases: the full name of a worker's class."""
ENVIRONMENTS = "nemo_rl.distributed.ray_actor_environment_registry"
PYTHON_VARIABLE = "MEGATRON_POLICY_PY"

log = logging.getLogger("megatron_policy.hosts.nemo_rl")


def install(workers: str | None = None) -> None:
    """See `megatron_policy.hosts.nemo_rl.install`."""
    replaced = choose_workers(workers)
    builder = _find_builder()
    environments = getattr(_import(ENVIRONMENTS), "ACTOR_ENVIRONMENT_REGISTRY", None)
    if not isinstance(environments, MutableMapping):
        _refuse(f"{ENVIRONMENTS} has no mapping ACTOR_ENVIRONMENT_REGISTRY")
    if not any(name in environments for name in THEIR_WORKERS):
        similar = ", ".join(sorted(name for name in environments if "Megatron" in name)) or "none"
        _refuse(f"its Megatron worker is not one of {', '.join(THEIR_WORKERS)}; it has {similar}")
    environments[OUR_WORKER] = environments[OUR_VALUE_WORKER] = find_worker_python()
    if os.environ.get(PYTHON_VARIABLE, "").strip():
        # Processes in other folders inherit it, and may run this code too.
        os.environ[PYTHON_VARIABLE] = environments[OUR_WORKER]
    if hasattr(builder.__init__, "_megatron_policy"):
        builder.__init__._megatron_policy.update(replaced)
    else:
        builder.__init__ = _redirect(builder.__init__, dict(replaced), environments)
        # NeMo RL's policies call Ray when they are collected. Those in reference cycles would be
        # collected after Ray has left the process, which can crash at the end of a complete run.
        atexit.register(gc.collect)
    # NeMo RL passes PYTHONPATH on to its workers. They find an installed package anyway, and its
    # neighbours are better left off the path.
    if not _is_found_by_a_new_python():
        entries = (os.environ.get("PYTHONPATH"), str(Path(__file__).resolve().parents[3]))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, entries))
    # NeMo RL refuses to use Megatron unless this is set to something. Builds for a GPU treat an
    # empty value like none, and target the GPU that they find.
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "")


def choose_workers(workers: str | None = None) -> dict[str, str]:
    """Our worker by the name of each of theirs that it replaces: those that `workers` names, by
    default MEGATRON_POLICY_WORKERS, or else those of Megatron. ConfigError for another value.
    """
    wanted = workers or os.environ.get(WORKERS_VARIABLE, "").strip() or "megatron"
    if wanted not in WORKERS:
        raise ConfigError(
            f"{WORKERS_VARIABLE}={wanted!r}: NeMo RL's workers that are replaced are 'megatron', "
            "those of policy.megatron_cfg, or 'all', those of policy.dtensor_cfg too"
        )
    return WORKERS[wanted]


def find_worker_python() -> str:
    """The Python that runs the workers: MEGATRON_POLICY_PY, or else the Python of this process.

    A path, or a `uv run ...` command, from which NeMo RL makes an environment. ConfigError if the
    path is not an executable.
    """
    wanted = os.environ.get(PYTHON_VARIABLE, "").strip() or sys.executable
    if wanted.split()[0] == "uv":
        return wanted
    found = shutil.which(wanted)
    if found is None:
        raise ConfigError(
            f"{PYTHON_VARIABLE}={wanted}: there is no such program. Give the path of a Python that "
            "has megatron-policy and the nemo_rl of this run, or a command that begins with "
            "'uv run'; without the variable, workers run in this Python."
        )
    return os.path.abspath(found)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == "nemo_rl":
            raise ConfigError(
                f"NeMo RL is not installed in {sys.executable}: {error}. Install it there, or put "
                "its checkout on PYTHONPATH."
            ) from error
        if missing and name.startswith(missing):
            _refuse(f"there is no module {missing}")
        raise ConfigError(
            f"NeMo RL cannot be imported in {sys.executable}: {error}. Install what it needs."
        ) from error


def _find_builder() -> Any:
    """The class that starts workers."""
    builder = getattr(_import(GROUPS), "RayWorkerBuilder", None)
    if not inspect.isclass(builder):
        _refuse(f"{GROUPS} has no class RayWorkerBuilder")
    parameters = list(inspect.signature(builder.__init__).parameters.values())[1:]
    if not parameters or parameters[0].name != CLASS_NAME:
        _refuse(f"RayWorkerBuilder does not take {CLASS_NAME} first")
    return builder


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"this NeMo RL differs from those that megatron-policy knows: {what}. Its workers cannot "
        "be replaced: use a megatron-policy that knows this NeMo RL, or run without it."
    )


def _redirect(
    original: Callable[..., None],
    replaced: dict[str, str],
    environments: MutableMapping[str, str],
) -> Callable[..., None]:
    """`original`, the constructor of RayWorkerBuilder, with our worker in place of those that
    `replaced` names.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            args = (_replace(args[0], replaced, environments), *args[1:])
        elif CLASS_NAME in kwargs:
            kwargs[CLASS_NAME] = _replace(kwargs[CLASS_NAME], replaced, environments)
        original(self, *args, **kwargs)

    cast(Any, __init__)._megatron_policy = replaced
    return __init__


def _replace(name: Any, replaced: Mapping[str, str], environments: MutableMapping[str, str]) -> Any:
    if name in replaced:
        ours = replaced[name]
        _tell(f"{ours} is started instead of {name}, by {environments[ours]}")
        return ours
    if not isinstance(name, str):
        return name
    kind = name.rpartition(".")[2]
    known = [other for other in replaced if other.rpartition(".")[2] == kind]
    theirs = name.startswith("nemo_rl.")
    if known and theirs and name.endswith(_SAME_CLASS):
        _refuse(f"it starts {name}, which is not one of {', '.join(known)}")
    dtensor = THEIR_DTENSOR_WORKERS[0] in replaced
    if theirs and kind.startswith(("Megatron", "DTensor") if dtensor else "Megatron"):
        _tell(f"{name} is NeMo RL's own: megatron-policy has no replacement for it")
    return name


def _tell(message: str) -> None:
    """Log the message, or print it to stderr without a log; a level above INFO silences both."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    log.info(message)
    if log.isEnabledFor(logging.INFO) and not log.hasHandlers():
        print(message, file=sys.stderr)


def _is_found_by_a_new_python() -> bool:
    """Whether a new Python like this one imports this very package from any working directory."""
    lasting = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        lasting.append(folder)
        for file in sorted(Path(folder).glob("*.pth")):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            added = [line.rstrip() for line in lines if line.strip()]
            lasting += [
                os.path.join(folder, line)
                for line in added
                if not line.startswith(("#", "import ", "import\t"))
            ]
    here = Path(__file__).resolve().parents[2] / "__init__.py"
    found = PathFinder.find_spec("megatron_policy", lasting)
    for finder in sys.meta_path:
        # The finder of an editable install comes before or after all paths, and knows one place.
        if found is None and getattr(finder, "__module__", "").startswith("__editable__"):
            found = finder.find_spec("megatron_policy", None)
    return found is not None and Path(found.origin or "").resolve() == here
