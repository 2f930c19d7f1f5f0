"""Patches that stock Megatron-Core needs to run without a GPU; each replaces a call that would
raise there.

Megatron-Core names its device literally (`torch.cuda.current_device()`, `device="cuda"`). On a
machine without a GPU the explicit call `apply()` binds those names to the CPU, in this process.
Nothing here runs on a GPU machine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megatron_policy.errors import ConfigError

_CPU = torch.device("cpu")
_applied = False


def apply() -> None:
    """Apply every patch once, before this process makes its first process group or model."""
    global _applied
    if _applied:
        return
    assert not torch.cuda.is_available(), "the CPU platform is for machines without a GPU"
    for patch in PATCHES:
        patch()
    refuse_gpu_optimizers()
    _applied = True


def refuse_gpu_optimizers() -> None:
    """ConfigError if Megatron-Core was imported before this package could keep it from taking
    optimizers of Transformer Engine or Apex, which raise in every step without a GPU.
    """
    import megatron.core.optimizer as mcore_optimizer

    source = mcore_optimizer.Adam.__module__.partition(".")[0]
    if source != "torch":
        raise ConfigError(
            f"Megatron-Core took its optimizer from {source}, which needs a GPU, and no GPU is "
            "visible: import megatron_policy.engines.megatron before anything imports "
            f"megatron.core, or uninstall {source}"
        )


def current_device() -> None:
    """Every Megatron-Core tensor factory is given `device=torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: _CPU


def tensor_factories() -> None:
    """Schedules, gradient clipping and the optimizers write `device="cuda"` and `pin_memory=True`
    literally.

    Plain wrappers, not a TorchFunctionMode: a mode is thread-local and slows every operation.
    """
    # `with torch.device(...)` recognises the factories by identity, from a list made on first use.
    # Make it now, with the originals, which the wrappers call.
    _device_constructors()
    names = (
        "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand "
        "randint randn randperm tensor zeros zeros_like"
    )
    for name in names.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def tensor_moves() -> None:
    """`.cuda()`, `.pin_memory()` and `.record_stream()` have nothing to do if everything is in host
    memory.
    """
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.Tensor.pin_memory = lambda self, *a, **k: self
    torch.Tensor.record_stream = lambda self, *a, **k: None
    torch.nn.Module.cuda = lambda self, *a, **k: self


def tensor_type_names() -> None:
    """The optimizers and gradient clipping compare `tensor.type()` with "torch.cuda.FloatTensor"
    and similar names.

    The only patch that changes a working call: `tensor.type()` without arguments returns the CUDA
    name.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if args or kwargs or result.startswith("torch.cuda."):
            return result
        return result.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name


class _Stream:
    """A stream or event on a machine where all work is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def record(self, *args: Any, **kwargs: Any) -> None: ...

    synchronize = wait = wait_event = wait_stream = record


def streams() -> None:
    """Gradient synchronisation (0.19) and the MoE dispatcher order their work on streams and
    events.
    """
    cuda = torch.cuda
    stream = _Stream()
    cuda.Stream = cuda.Event = _Stream
    # A function for each name: torch.compile has its rules by function, and takes none with two.
    cuda.current_stream = lambda *a, **k: stream
    cuda.default_stream = lambda *a, **k: stream
    cuda.stream = lambda *a, **k: contextlib.nullcontext()
    cuda.synchronize = lambda *a, **k: None
    cuda.set_device = lambda *a, **k: None
    cuda.nvtx.range_push = lambda *a, **k: None
    cuda.nvtx.range_pop = lambda *a, **k: None
    cuda.memory_stats = lambda *a, **k: {}


def compilation() -> None:
    """Megatron-Core's jit fuser is torch.compile, which would need a C++ compiler in every rank:
    run eagerly.
    """
    # What torch.compile imports for the first function takes a second: functions stay as they are.
    compile_ = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda later: later)
    try:
        import megatron.core.jit as jit
    finally:
        torch.compile = compile_
    from torch import _dynamo

    jit.disable_jit_fuser()
    _dynamo.config.disable = True  # for what was decorated before this call


def random_state() -> None:
    """The model-parallel RNG tracker saves and restores the "cuda" generator: here it is the CPU's
    default generator.
    """
    import megatron.core.tensor_parallel.random as mcore_random

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *a, **k: (
        torch.get_rng_state()
    )
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, *a, **k: (
        torch.set_rng_state(state)
    )
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    mcore_random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    mcore_random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    # fork() warns when the CPU generator moves inside the "GPU" context; here that is intended.
    logging.getLogger(mcore_random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


def recomputed_storages() -> None:
    """Newer releases compile a C++ extension to alias storages of recomputed tensors; a plain copy
    needs no compiler.
    """
    import megatron.core.tensor_parallel.random as mcore_random

    def copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            storage = destination.untyped_storage()
            storage.resize_(source.untyped_storage().size())
            storage.copy_(source.untyped_storage())

    if hasattr(mcore_random, "_get_share_storage"):
        mcore_random._get_share_storage = lambda: copy


def expert_splits() -> None:
    """The token dispatcher takes its split sizes as numpy arrays, but converts only GPU tensors to
    them.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    moe_utils.maybe_move_tensor_to_cpu = _as_asked
    if hasattr(dispatcher, "maybe_move_tensor_to_cpu"):
        dispatcher.maybe_move_tensor_to_cpu = _as_asked


def _as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def uneven_shares() -> None:
    """Experts split over tensor-parallel ranks gather a different number of tokens from each rank,
    which gloo does not support: shares are padded to the longest.
    """
    import megatron.core.tensor_parallel.mappings as mappings

    even_gather = mappings._gather_along_first_dim
    even_scatter = mappings._reduce_scatter_along_first_dim

    def gather(input_: Any, group: Any, output_split_sizes: Any = None, *rest: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, *rest)
        sizes = [int(size) for size in output_split_sizes]
        mine = _padded(input_, max(sizes))
        out = mine.new_empty((len(sizes), *mine.shape))
        dist.all_gather_into_tensor(out.flatten(0, 1), mine, group=group)
        return torch.cat([share[:size] for share, size in zip(out, sizes, strict=True)])

    def scatter(input_: Any, group: Any, input_split_sizes: Any = None, *rest: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, *rest)
        sizes = [int(size) for size in input_split_sizes]
        shares = torch.cat([_padded(share, max(sizes)) for share in input_.split(sizes)])
        out = input_.new_empty((max(sizes), *input_.shape[1:]))
        dist.reduce_scatter_tensor(out, shares, group=group)
        return out[: sizes[group.rank()]].contiguous()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


def _padded(share: torch.Tensor, rows: int) -> torch.Tensor:
    padding = share.new_zeros((rows - share.size(0), *share.shape[1:]))
    return torch.cat([share, padding])


# Compilation first: it imports Megatron-Core and torch._dynamo, which lists the functions of
# torch.cuda by identity.
PATCHES: tuple[Callable[[], None], ...] = (
    compilation,
    current_device,
    tensor_factories,
    tensor_moves,
    tensor_type_names,
    streams,
    random_state,
    recomputed_storages,
    expert_splits,
    uneven_shares,
)
