"""What a worker process starts with: Ray, import path, environment."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from megatron_policy.config.parallel_sizes import check_env_vars
from megatron_policy.converters.files import contained
from megatron_policy.errors import WorkerError


def init_ray(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_bytes: int | None = None,
    log_to_driver: bool = True,
) -> None:
    """Connect this process to Ray, unless it is connected already.

    It connects to `address`, else to RAY_ADDRESS, else to a new local instance without dashboard;
    the sizes apply only to the latter (None: Ray's defaults). Workers get the driver's import
    path; see `make_python_path`. WorkerError if Ray cannot be started.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    common: dict[str, Any] = {
        "log_to_driver": log_to_driver,
        "runtime_env": {"env_vars": {"PYTHONPATH": make_python_path()}},
    }
    if address:
        ray.init(address=address, **common)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # It warns about the access token that Ray itself makes for the new instance.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            logging_level=logging.WARNING,
            **common,
        )
    except Exception as error:  # whatever starts Ray's processes can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise WorkerError(
            f"Ray could not be started on this machine: {reason:.500}. Its logs are in the newest "
            "folder session_... of /tmp/ray (RAY_TMPDIR names another); a Ray that is left over "
            "ends by `ray stop --force`, and RAY_ADDRESS names one that runs already"
        ) from error


def make_python_path() -> str:
    """The driver's import path as PYTHONPATH, without the interpreter's own entries.

    This makes a plain checkout, an editable install and the user's own modules (such as a loss
    function) importable in workers; a folder that is missing on another node does no harm.
    """
    own = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    package_root = Path(__file__).resolve().parents[3]
    entries = [str(package_root), *sys.path]
    kept: dict[str, None] = {}
    for entry in entries:
        path = Path(entry or os.curdir).resolve()
        if path.is_dir() and not any(path.is_relative_to(prefix) for prefix in own):
            kept[str(path)] = None
    inherited = os.environ.get("PYTHONPATH", "")
    kept.update(dict.fromkeys(p for p in inherited.split(os.pathsep) if p))
    return os.pathsep.join(kept)


# Megatron-Core warns at every import about what a worker without a GPU lacks.
EXPECTED_WARNINGS = (
    "ignore:Transformer Engine and Apex are not installed:UserWarning",
    "ignore:Apex is not installed:UserWarning",
)


def make_worker_env(
    rank: Mapping[str, object], user: Mapping[str, str], *, accelerated: bool, threads: int
) -> dict[str, str]:
    """Environment of one worker process: the variables of its `rank`, from which torch.distributed
    starts, and those of the `user`. ConfigError if the latter are among the former.

    `threads` applies to workers on the CPU unless the driver's OMP_NUM_THREADS is set.
    """
    check_env_vars("env_vars", user)
    env = dict(rank)
    if not accelerated:
        env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or threads
        # Without this, Ray leaves the machine's GPUs visible to a worker that requested none.
        env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "1"
        env["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS") or ",".join(EXPECTED_WARNINGS)
    if contained.LINKS in os.environ:
        env[contained.LINKS] = os.environ[contained.LINKS]
    env.update(user)
    first = [user["PYTHONPATH"]] if user.get("PYTHONPATH") else []
    env["PYTHONPATH"] = os.pathsep.join([*first, make_python_path()])
    return {name: str(value) for name, value in env.items()}
