"""Fixtures and markers of the whole suite: rank pools, tiny checkpoints, skips without GPUs."""

from __future__ import annotations

import datetime
import functools
import gc
import os

# Before anybody imports torch, tokenizers or huggingface_hub: few threads, and no network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ray's workers get their share of a busy machine: by default every other process comes before them.
os.environ.setdefault("RAY_worker_niceness", "0")
# What `tests/invariance/drawn.py` draws; set here, so that all processes of a run draw the same.
os.environ.setdefault("LAYOUT_SEED", str(datetime.date.today().toordinal()))

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

from tests import margins
from tests.fork_server import ForkServer
from tests.ranks import RankPool
from tests.tiers import leave_to_the_night

# As in ranks: what a session makes mostly stays, and is not to be looked at again and again.
gc.set_threshold(10_000, 10, 10)

settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


# Files, and folders of them, whose imports need an optional package: they skip where it is missing.
NEED = {
    "PIL": (  # matplotlib's
        "ray/test_tour.py",
        "unit/test_pictures.py",
        "unit/test_quickstart.py",
        "unit/test_shapes.py",
    ),
    "ray": (
        "hosts/real/",
        "hosts/test_generation.py",
        "hosts/test_standin.py",
        "hosts/test_value_worker.py",
        "hosts/test_worker.py",
        "ray/",
        "unit/test_interface_page.py",
        "unit/test_refit_arguments.py",
        "unit/test_process_activity.py",
        "unit/test_quickstart.py",
        "unit/test_site.py",
        "unit/test_timeouts.py",
    ),
}


class WithoutPackage(pytest.Module):
    """A file that needs a package which is missing: it is not imported."""

    package = ""

    def collect(self) -> NoReturn:
        pytest.skip(f"needs {self.package}, which is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    own = Path(__file__).parent
    below = module_path.relative_to(own).as_posix() if module_path.is_relative_to(own) else ""
    for package, files in NEED.items():
        if below.startswith(files) and find_spec(package) is None:
            module = WithoutPackage.from_parent(parent, path=module_path)
            module.package = package
            return module
    return None


def needed_gpus(item: pytest.Item) -> int:
    """How many GPUs the markers of a test ask for."""
    several = item.get_closest_marker("multi_gpu")
    if several is not None:
        return int(several.args[0])
    return 1 if item.get_closest_marker("gpu") is not None else 0


def reason_to_skip(needed: int, visible: int) -> str | None:
    """Why a test that needs `needed` GPUs cannot run where `visible` are, if so."""
    return None if needed <= visible else f"needs {needed} GPU(s), {visible} visible"


def reason_to_fail(wanted: bool, driver: bool, visible: int) -> str | None:
    """Why a run that is meant for GPUs cannot be one, if so: skipping every test would look as if
    all had passed. `driver` says whether the machine has a GPU.
    """
    if not (wanted and driver) or visible:
        return None
    return (
        "this machine has a GPU, but torch sees none: install a CUDA build of torch in this "
        "environment, and look at CUDA_VISIBLE_DEVICES"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The large shares come first: each is one process's work for minutes, and Ray's mostly waits.
    items.sort(key=lambda item: share_of(item.nodeid) not in SHARES)
    skip_without_gpus(items)
    leave_to_the_night(items)


SHARES = {
    "ranks": (
        "tests/dist/",
        "tests/hosts/test_roles.py",
        "tests/hosts/verl/",
        "tests/unit/test_benchmarks.py",
        "tests/unit/test_device.py",
    ),
    "ray": ("tests/hosts/", "tests/ray/"),
}
"""What one process of several starts, the pool of ranks and Ray, and the files that need it."""


def share_of(nodeid: str) -> str:
    """What goes to one process of several: a file, whose fixtures are made once, or all files that
    need what is dear to start.
    """
    file = nodeid.partition("::")[0]
    return next((name for name, files in SHARES.items() if file.startswith(files)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByShare(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    return ByShare(config, log)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Processes that share tests stand back for the one with the ranks, whose work is the longest
    and partly that of one process: then no core waits for it at the end.
    """
    if "PYTEST_XDIST_WORKER" in os.environ and share_of(nodeid) != "ranks":
        stand_back()


@functools.cache
def stand_back() -> None:
    """Once in a process: from now on others of this run come first."""
    os.nice(5)


def skip_without_gpus(items: list[pytest.Item]) -> None:
    wanting = [(item, needed_gpus(item)) for item in items]
    if not any(needed for _, needed in wanting):
        return
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = "FOR_GPUS" in os.environ
    if reason := reason_to_fail(wanted, Path("/dev/nvidia0").exists(), visible):
        raise pytest.UsageError(reason)
    for item, needed in wanting:
        reason = reason_to_skip(needed, visible)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What exists by now stays: no later collection of garbage has to look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _margins(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """How much of their tolerances a test used goes to its report, also from another process."""
    yield
    for quantity, share in margins.taken().items():
        record_property(f"margin {quantity}", share)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The largest difference over its tolerance of each quantity that was compared."""
    worst: dict[str, tuple[float, str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "teardown":
                continue
            for name, share in report.user_properties:
                if name.startswith("margin "):
                    worst[name] = max(worst.get(name, (-1.0, "")), (float(share), report.nodeid))
    if worst:
        terminalreporter.section("largest difference over its tolerance")
    for name, (share, test) in sorted(worst.items()):
        terminalreporter.write_line(f"{share:5.2f}  {name.removeprefix('margin ')}  ({test})")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Rank processes on the CPU, over gloo, also where there are GPUs."""
    pool = RankPool()
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """Rank processes that see the GPUs; for tests marked `gpu` or `multi_gpu(n)`."""
    pool = RankPool(on_gpus=True)
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def ray_instance() -> Iterator[ForkServer | None]:
    """A small Ray: two CPUs, and two GPUs that exist in Ray's books only. Its workers are forks of
    that server, where there is no GPU.
    """
    import torch

    ray = pytest.importorskip("ray")
    from megatron_policy.workers import init_ray

    # A GPU's context does not survive a fork.
    server = None if torch.cuda.is_available() else ForkServer()
    with pytest.MonkeyPatch.context() as patch, server.for_ray() if server else nullcontext():
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        init_ray(num_cpus=2, num_gpus=2, object_store_bytes=150 * 2**20)
    yield server
    ray.shutdown()
    if server:
        server.end()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family, **sizes)`: the path of that tiny checkpoint, made once; read only."""
    made: dict[str, Path] = {}

    def path_of(family: str, **sizes: Any) -> Path:
        from tests.checkpoints import make_checkpoint

        key = repr((family, sorted(sizes.items())))
        if key not in made:
            made[key] = make_checkpoint(
                tmp_path_factory.mktemp(f"{family}-", numbered=True), family, **sizes
            )
        return made[key]

    return path_of


@pytest.fixture(scope="session")
def checkpoints(checkpoint: Callable[..., Path]) -> dict[bool, Path]:
    """The models of the layout table: the tied one and the untied one."""
    from tests.dist.layouts import FAMILIES, SIZES

    return {tied: checkpoint(family, tied=tied, **SIZES) for tied, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def bf16_checkpoints(checkpoint: Callable[..., Path]) -> dict[bool, Path]:
    """The same with weights in bf16."""
    return _in(checkpoint, "bfloat16")


@pytest.fixture(scope="session")
def fp16_checkpoints(checkpoint: Callable[..., Path]) -> dict[bool, Path]:
    """The same with weights in fp16."""
    return _in(checkpoint, "float16")


def _in(checkpoint: Callable[..., Path], dtype: str) -> dict[bool, Path]:
    from tests.dist.layouts import FAMILIES, SIZES

    return {
        tied: checkpoint(family, tied=tied, dtype=dtype, **SIZES)
        for tied, family in FAMILIES.items()
    }
