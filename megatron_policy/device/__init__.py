"""The machine: the only place that names a device type or a communication backend. Read
`process_groups.py` for the groups of its ranks, `shared.py` for memory that two processes share,
`exchange.py` for swaps with host memory.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch

_chosen: int | None = None


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the current device: `free` and `total` as the driver sees them, `peak` since the
    last reset.
    """

    free: int
    total: int
    peak: int


def accelerators() -> int:
    """Number of GPUs this process can see."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_accelerated() -> bool:
    """Whether this process computes on a GPU."""
    return torch.cuda.is_available()


def compute_capability() -> tuple[int, int]:
    """The CUDA compute capability of this process's GPU; (0, 0) without a GPU."""
    return torch.cuda.get_device_capability() if is_accelerated() else (0, 0)


def can_compile() -> bool:
    """Whether torch can compile kernels for a GPU: Triton is installed and does not interpret them
    (TRITON_INTERPRET), and its launchers can be built: a C compiler is found (CC, or gcc or clang
    on the path), and Python's headers are.
    """
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return False
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return importlib.util.find_spec("triton") is not None and bool(compiler) and _headers().exists()


def _headers() -> Path:
    """Python's C headers, which slim images lack."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels can work on this tensor: it is on a GPU, and they can be compiled."""
    return tensor.device.type == "cuda" and can_compile()


def varlen_kernel() -> Callable[..., Any] | None:
    """torch's attention kernel for sequences of different lengths, `varlen_attn`; None where this
    process's GPU or torch lacks it.

    It is flash attention, which needs compute capability 8.0 and a build of torch that has it.
    Windows, grouped heads and a scale were added to its arguments after its first release.
    """
    if torch.version.cuda is None or compute_capability() < (8, 0):
        return None
    return _varlen_attn()


@cache
def _varlen_attn() -> Callable[..., Any] | None:
    """The function if this torch has it with all arguments that are used.

    Keys and values may have fewer heads than queries: torch 2.11 hands such heads to the kernel
    unasked; later releases want to be told.
    """
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    try:
        function: Callable[..., Any] = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    parameters = signature(function).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None
    return partial(function, enable_gqa=True) if "enable_gqa" in parameters else function


def trains_packed_cudnn() -> bool:
    """Whether cuDNN's attention computes packed sequences forward and backward on this process's
    GPU, with values of another head size, and Transformer Engine's environment allows it.

    Packing needs compute capability 9. Two head sizes on 10.x need cuDNN 9.11, which is asked of
    9.0 as well; 12.x has no backward pass for them. Deterministic algorithms exclude it on some.
    """
    major, minor = compute_capability()
    allowed = ("NVTE_FUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    if any(os.environ.get(name, "1") == "0" for name in allowed):
        return False
    built = (major, minor) == (9, 0) or major == 10
    return built and (torch.backends.cudnn.version() or 0) >= 91100


def prefer_flash_attention() -> None:
    """Let `scaled_dot_product_attention` choose among its kernels without cuDNN's.

    cuDNN builds a plan for every new pair of lengths, which takes host time; lengths of sequences
    hardly repeat, and the keys of a cache grow by one with each token.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def load_torchs_cudnn() -> None:
    """Load every part of the cuDNN that torch's wheels bring; call it before the first import of
    Transformer Engine. Without such a cuDNN do nothing.

    Transformer Engine's libraries name cuDNN's parts, and the loader takes those of the system
    where no part of that name is loaded. A process with parts of two releases fails: symbols are
    missing, or torch refuses the version.
    """
    wheels = Path(torch.__file__).parents[1]
    for library in sorted(wheels.glob("nvidia/cudnn/lib/libcudnn*.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def prepare_for_other_engines() -> None:
    """Allow communicators that also include engines' GPUs; call it before the first is made.

    Without it vLLM's communicators fail to reach their peers (NeMo RL, issue 564).
    """
    os.environ["NCCL_CUMEM_ENABLE"] = "1"


def choose_gpu(index: int) -> None:
    """Let `place_process` take this one of the visible GPUs, in place of LOCAL_RANK's."""
    global _chosen
    _chosen = index


def place_process(in_launch_order: bool = False) -> torch.device:
    """Bind this process to its GPU and return its device: the one that `choose_gpu` was told, else
    number LOCAL_RANK modulo the visible GPUs.

    `in_launch_order`: kernels start in the order of their launches, whatever their streams, unless
    CUDA_DEVICE_MAX_CONNECTIONS is set already. It has no effect once CUDA has started.
    """
    if is_accelerated():
        if in_launch_order:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        index = int(os.environ.get("LOCAL_RANK", "0")) if _chosen is None else _chosen
        torch.cuda.set_device(index % torch.cuda.device_count())
    return current_device()


def use(where: torch.device) -> None:
    """Let this thread compute on a device that another thread of this process uses."""
    if where.type == "cuda":
        torch.cuda.set_device(where)


def current_device() -> torch.device:
    """The device on which this process holds its parameters."""
    if is_accelerated():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on this process's device. From host memory it is copied through pinned memory, so
    that the host does not wait for the copy.
    """
    device = current_device()
    if tensor.device.type == "cpu" and device.type != "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


DEVICE_TYPES = ("cuda", "cpu")
"""torch's names of the devices that policies run on."""


def device_id() -> str:
    """An identifier of the physical device: the GPU's UUID, or host name and process id on CPU."""
    if is_accelerated():
        return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return f"CPU-{os.uname().nodename}-{os.getpid()}"


def memory_info() -> MemoryInfo:
    """Free, total and peak bytes of the current device (on CPU, of the host's memory and this
    process).
    """
    if is_accelerated():
        free, total = torch.cuda.mem_get_info()
        return MemoryInfo(free=free, total=total, peak=torch.cuda.max_memory_allocated())
    import resource

    page = os.sysconf("SC_PAGE_SIZE")
    return MemoryInfo(
        free=os.sysconf("SC_AVPHYS_PAGES") * page,
        total=os.sysconf("SC_PHYS_PAGES") * page,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def shareable_bytes() -> int:
    """Free bytes that this process can share with another: the device's memory, or on the CPU the
    host memory left in /dev/shm.
    """
    free = memory_info().free
    if is_accelerated() or not os.path.isdir("/dev/shm"):
        return free
    shared = os.statvfs("/dev/shm")
    return min(free, shared.f_bavail * shared.f_frsize)


def allocated() -> int:
    """Bytes of device memory that live tensors of this process occupy; 0 on the CPU, which does not
    count them.
    """
    return torch.cuda.memory_allocated() if is_accelerated() else 0


def release_cached() -> None:
    """Return cached, unused device memory to the driver, so that other processes can use it; on the
    CPU do nothing: freed memory is returned by itself.
    """
    if is_accelerated():
        gc.collect()
        # An exported buffer that no process has opened would keep its memory.
        torch.cuda.ipc_collect()
        return_unused()


def return_unused() -> None:
    """The same for what is unused already: unreachable cycles and exported buffers stay."""
    if is_accelerated():
        torch.cuda.empty_cache()


def reset_peak_memory() -> None:
    """Reset the peak so far; on CPU do nothing: that peak is the operating system's."""
    if is_accelerated():
        torch.cuda.reset_peak_memory_stats()


def random_state() -> torch.Tensor | None:
    """The state of the device's default generator, in host memory; None if there is only the CPU's,
    which torch itself returns.
    """
    return torch.cuda.get_rng_state() if is_accelerated() else None


def set_random_state(state: torch.Tensor) -> None:
    """Set the device's default generator to what `random_state` returned."""
    torch.cuda.set_rng_state(state)


def host_buffer(like: torch.Tensor) -> torch.Tensor:
    """An uninitialised host tensor of the same shape and dtype, pinned if a GPU will copy to and
    from it.
    """
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_accelerated())


def spare_cores(most: int = 4) -> int:
    """How many threads this rank may use beside its own: its share of the machine's cores."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(most, len(os.sched_getaffinity(0)) // ranks_here))


def queued() -> Any:
    """An event after all work that this thread has queued on the device, for `on_side_stream`."""
    return torch.cuda.current_stream().record_event() if is_accelerated() else None


def make_side_stream() -> Any:
    """A stream of this thread's device, for `on_side_stream`; None where there are none. The device
    keeps memory for each stream, so that whoever works beside others makes one and keeps it.
    """
    return torch.cuda.Stream() if is_accelerated() else None


@contextmanager
def on_side_stream(point: Any, stream: Any) -> Iterator[None]:
    """Within this context the thread's device work starts after `point` and runs in parallel to
    that of other threads; all of it is done at the end.
    """
    if point is None:
        yield
        return
    stream.wait_event(point)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def synchronize() -> None:
    """Wait until the device has finished what was queued."""
    if is_accelerated():
        torch.cuda.synchronize()
