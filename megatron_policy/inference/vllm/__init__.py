"""vLLM: what its workers are told, and what the process that owns an `LLM` calls.

Read `engine.py` first, then `worker.py` and `reload.py`; for vLLM's own weight transfer,
`transfer.py`.
"""

from __future__ import annotations

from contextlib import suppress


def register() -> None:
    """Make the backend `megatron_policy` known to vLLM's weight transfer. It is a general plug-in,
    which vLLM calls in all of its processes.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        return  # a release of vLLM without it
    with suppress(ValueError):  # a process may load plug-ins more than once
        WeightTransferEngineFactory.register_engine(
            "megatron_policy",
            "megatron_policy.inference.vllm.transfer_engine",
            "PolicyTransferEngine",
        )
