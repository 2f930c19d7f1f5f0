"""The life of one rank process of the pool: runs what the pipe brings and cleans up after it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any


def serve(pipe: Connection, log: str) -> None:
    """The life of a rank: does what the pipe says until it closes or the test process is gone."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    pipe.send(_attempt(_prepare))
    while True:
        try:
            task, *details = pipe.recv()
        except EOFError:
            return
        pipe.send(_attempt(_run, *details) if task == "run" else _attempt(_leave))


def _end_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _attempt(step: Callable[..., bytes], *args: Any) -> tuple[str, Any]:
    try:
        return "ok", step(*args)
    except BaseException:
        # Skips, exits and interrupts too: whatever ends a rank's function is the test's to see.
        return "raised", traceback.format_exc()


def _prepare() -> bytes:
    import torch

    from megatron_policy.engines.megatron.platform import prepare_platform

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    prepare_platform()
    return b""


def _run(rendezvous: dict[str, str], call: bytes) -> bytes:
    import torch

    torch.manual_seed(0)
    with environment(rendezvous):
        fn, args = pickle.loads(call)
        return dumps(fn(*args))


def _leave() -> bytes:
    """Destroy what a run may have left behind: groups, Megatron-Core's module globals, and the
    process of the queue with which it saves checkpoints.
    """
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    if dist.is_initialized():
        dist.destroy_process_group()
    saving = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if saving is not None:
        saving._results_queue = None
    gc.collect()
    gc.freeze()  # imports and caches: later collections need not look at them again
    for child in mp.active_children():
        child.terminate()
    return b""


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _ByValue(pickle.Pickler):
    """Pickles a tensor as its own elements: no shared memory, and not all that it is a view of."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) is not torch.Tensor:
            return NotImplemented
        plain = obj.detach().cpu()
        return plain.clone(memory_format=torch.contiguous_format).__reduce_ex__(2)


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()
