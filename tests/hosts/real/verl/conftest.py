"""verl itself, where it is installed (`make test-verl`): everything in this folder skips with a
reason where it is not.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool

# Before anybody imports verl, here and in every process that is started from here.
os.environ["VERL_USE_EXTERNAL_MODULES"] = "examples.verl.cpu_platform"

LIMIT_S = 240.0


def verl_is_there() -> bool:
    """Whether `import verl` finds verl, not another package of that name."""
    spec = importlib.util.find_spec("verl")
    return bool(spec and spec.origin) and (Path(spec.origin).parent / "workers/engine").is_dir()


class Missing(pytest.Module):
    """A module of tests that is not imported, since its drivers import verl."""

    def collect(self) -> list[pytest.Item]:
        pytest.skip("verl is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    return None if verl_is_there() else Missing.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def verl_ranks() -> Iterator[RankPool]:
    """Rank processes that have imported verl with the CPU platform."""
    pool = RankPool(preload="tests.hosts.real.verl.preload")
    yield pool
    pool.end()


@pytest.fixture(scope="session")
def qwen2(checkpoint: Callable[..., Path]) -> Path:
    """The model of the comparisons: four layers of Qwen2, with a tokenizer."""
    return checkpoint("qwen2")


@pytest.fixture(scope="session")
def critic(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a head of one number for each token, of the size of the returns: rounding
    errors grow with it.
    """
    from safetensors.torch import load_file, save_file

    from tests import scalar_oracle
    from tests.checkpoints import make_tokenizer

    path = scalar_oracle.make("regression", qwen2, tmp_path_factory.mktemp("critic"))
    weights = load_file(path / "model.safetensors")
    for name in ("score.weight", "score.bias"):
        weights[name] *= 0.1
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    make_tokenizer(256).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def run(verl_ranks: RankPool, qwen2: Path) -> Callable[..., Any]:
    """`run(driver, case, *arguments, model=None)`: what rank 0 of the case returns; what verl's own
    engine returned is kept.
    """
    from tests.hosts.real.verl.configs import ORACLE

    known: dict[Any, Any] = {}

    def of(
        driver: Callable[..., Any], case: Any, *arguments: Any, model: Path | None = None
    ) -> Any:
        key = (driver.__qualname__, repr(case), arguments, model)
        if key in known:
            return known[key]
        call = (driver, case, model or qwen2, *arguments)
        result = verl_ranks.run(case.world, *call, timeout=LIMIT_S)[0]
        if case.engine == ORACLE:
            known[key] = result
        return result

    return of
