"""A CPU platform for verl, which has none of its own, registered from outside.

verl imports this module in each of its processes where `VERL_USE_EXTERNAL_MODULES` names it. That
happens within `import verl`: only `verl.plugin` can be imported here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

NAME = "cpu"
GIB = 1 << 30
NOTHING = (
    "empty_cache",
    "ipc_collect",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "set_device",
    "set_per_process_memory_fraction",
    "synchronize",
)
"""Functions of `torch.cuda` that have nothing to do on a CPU."""
SIZES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
"""Functions of `torch.cuda` whose result is a number of bytes."""


def device_module() -> ModuleType:
    """The functions of `torch.cuda` that verl calls on its device's module."""
    stream = SimpleNamespace(
        synchronize=_nothing, wait_stream=_nothing, record_event=_nothing, wait_event=_nothing
    )
    functions: dict[str, Any] = {
        **dict.fromkeys(NOTHING, _nothing),
        **dict.fromkeys(SIZES, lambda *_, **__: 0),
        "Stream": lambda *_, **__: stream,
        "current_device": lambda: NAME,
        "current_stream": lambda *_: stream,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: NAME,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "is_available": lambda: False,
        "is_initialized": lambda: False,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "mem_get_info": lambda *_: (GIB, GIB),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "stream": lambda *_: nullcontext(),
    }
    module = ModuleType("verl_cpu_device")
    vars(module).update(functions)
    return module


def _nothing(*_: Any, **__: Any) -> None: ...


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):
    """Plain CPU tensors, and gloo between processes."""

    device_name = NAME
    vendor_name = NAME
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override]
        # It ends in Tensor.to(), where a number means a GPU.
        return NAME

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def one_backend() -> None:
    """verl joins `cpu:gloo,<device>:<backend>`, which torch refuses where both are the CPU."""
    join = dist.init_process_group

    @functools.wraps(join)
    def init_process_group(backend: str | None = None, *args: Any, **keywords: Any) -> None:
        return join("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **keywords)

    dist.init_process_group = init_process_group


def nothing_pinned() -> None:
    """verl's own engine keeps a reference's weights in pinned memory, which is a GPU's."""
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor


set_platform(PlatformCPU())
# verl has registered its own engines for GPUs alone.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
one_backend()
nothing_pinned()
