"""A Megatron-Core policy for reinforcement learning; importing it imports nothing heavy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_policy.version import VERSION as __version__

if TYPE_CHECKING:
    from megatron_policy.batch import BatchedDataDict as BatchedDataDict
    from megatron_policy.config import PolicyConfig as PolicyConfig
    from megatron_policy.errors import BatchError as BatchError
    from megatron_policy.errors import CheckpointError as CheckpointError
    from megatron_policy.errors import ConfigError as ConfigError
    from megatron_policy.errors import ConversionError as ConversionError
    from megatron_policy.errors import ExportError as ExportError
    from megatron_policy.errors import LossError as LossError
    from megatron_policy.errors import MissingPackageError as MissingPackageError
    from megatron_policy.errors import RefitError as RefitError
    from megatron_policy.errors import TransitionError as TransitionError
    from megatron_policy.errors import WorkerError as WorkerError
    from megatron_policy.interfaces import (
        ColocatablePolicyInterface as ColocatablePolicyInterface,
    )
    from megatron_policy.interfaces import GenerationInterface as GenerationInterface
    from megatron_policy.interfaces import GenerationOutputSpec as GenerationOutputSpec
    from megatron_policy.interfaces import LogprobOutputSpec as LogprobOutputSpec
    from megatron_policy.interfaces import LossFunction as LossFunction
    from megatron_policy.interfaces import LossInputType as LossInputType
    from megatron_policy.interfaces import LossType as LossType
    from megatron_policy.interfaces import MetricNormalizer as MetricNormalizer
    from megatron_policy.interfaces import PolicyInterface as PolicyInterface
    from megatron_policy.interfaces import (
        ReferenceLogprobOutputSpec as ReferenceLogprobOutputSpec,
    )
    from megatron_policy.policy import MegatronPolicy as MegatronPolicy
    from megatron_policy.refit.receive.receiver import Receiver as Receiver
    from megatron_policy.workers.cluster.environment import init_ray as init_ray
    from megatron_policy.workers.cluster.virtual_cluster import (
        RayVirtualCluster as RayVirtualCluster,
    )
    from megatron_policy.workers.policy import MegatronPolicyWorker as MegatronPolicyWorker
    from megatron_policy.workers.policy import Policy as Policy

# The module from which a name is imported on first use.
_HOME = {
    "BatchError": "errors",
    "BatchedDataDict": "batch",
    "CheckpointError": "errors",
    "ColocatablePolicyInterface": "interfaces",
    "ConfigError": "errors",
    "ConversionError": "errors",
    "ExportError": "errors",
    "GenerationInterface": "interfaces",
    "GenerationOutputSpec": "interfaces",
    "LogprobOutputSpec": "interfaces",
    "LossError": "errors",
    "LossFunction": "interfaces",
    "LossInputType": "interfaces",
    "LossType": "interfaces",
    "MegatronPolicy": "policy",
    "MegatronPolicyWorker": "workers.policy",
    "MetricNormalizer": "interfaces",
    "MissingPackageError": "errors",
    "Policy": "workers.policy",
    "PolicyConfig": "config",
    "PolicyInterface": "interfaces",
    "RayVirtualCluster": "workers.cluster.virtual_cluster",
    "Receiver": "refit.receive.receiver",
    "ReferenceLogprobOutputSpec": "interfaces",
    "RefitError": "errors",
    "TransitionError": "errors",
    "WorkerError": "errors",
    "init_ray": "workers.cluster.environment",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
