"""The methods of the host's workers that this one does not implement, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

Class = TypeVar("Class", bound=type)

_FP8 = "an fp8 key-value cache is not supported"
_HTTP = "refits to SGLang over HTTP are not supported; use vLLM"
_CROSS_TOKENIZER = "the teacher needs the same tokenizer, and is then read by get_topk_logits"
_MEGATRON_GENERATION = "generation by Megatron's inference engine is not supported; use vLLM"
_RESHARD = (
    "its map of layouts is the host's own; use the default transport, or without the host "
    "Collective.join(..., of_shards=True)"
)
_ENGINES = "checkpoint engines as a refit transport are not supported; use the default transport"
_SPARSE = (
    "the host's own format of differences is not supported; use the default transport, or without "
    "the host DeltaStream"
)

NOT_IMPLEMENTED: dict[str, str] = {
    "calibrate_qkv_fp8_scales": _FP8,
    "get_full_logits_ipc": _CROSS_TOKENIZER,
    "release_ipc_buffer": _CROSS_TOKENIZER,
    "stream_weights_via_http": _HTTP,
    "set_rollout_num_gpus_per_engine": _HTTP,
    "init_collective_mcore_generation": _MEGATRON_GENERATION,
    "preinit_nvshmem_collective": _MEGATRON_GENERATION,
    "swap_weights_via_reshard": _MEGATRON_GENERATION,
    "report_dp_openai_server_base_url": _MEGATRON_GENERATION,
    "suspend_for_refit": _MEGATRON_GENERATION,
    "resume_after_refit": _MEGATRON_GENERATION,
    "init_nccl_reshard_comm_group": _RESHARD,
    "prepare_nccl_reshard_refit_info": _RESHARD,
    "nccl_reshard_refit": _RESHARD,
    "checkpoint_engine_rpc": _ENGINES,
    "send_weights_via_checkpoint_engine": _ENGINES,
    "init_remote_sparse_delta_baseline": _SPARSE,
    "stream_remote_sparse_weights": _SPARSE,
    "finish_remote_sparse_delta_sync": _SPARSE,
}
"""Reason by method. Each raises NotImplementedError."""


def refuses(methods: Mapping[str, str]) -> Callable[[Class], Class]:
    """A class decorator: each of these methods raises NotImplementedError with its reason."""

    def add(cls: Class) -> Class:
        for name, reason in methods.items():
            setattr(cls, name, _refusing(cls, name, reason))
        return cls

    return add


def _refusing(cls: type, name: str, reason: str) -> Callable[..., NoReturn]:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not implemented: {reason}.")

    # As if defined in `cls`, so that it pickles as a reference.
    method.__module__, method.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    method.__name__ = name
    # One string for all methods with the same reason: Ray pickles docstrings with an actor class.
    method.__doc__ = sys.intern(f"Not built: {reason}.")
    return method
