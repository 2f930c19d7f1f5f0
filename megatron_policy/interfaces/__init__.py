"""Protocols between policies, losses, hosts and training engines. Read `loss.py` first, then
`engine.py`.
"""

from megatron_policy.interfaces.loss import (
    LossFunction,
    LossInputType,
    LossType,
    MetricNormalizer,
)
from megatron_policy.interfaces.policy import (
    ColocatablePolicyInterface,
    GenerationInterface,
    GenerationOutputSpec,
    LogprobOutputSpec,
    PolicyInterface,
    ReferenceLogprobOutputSpec,
)

__all__ = [
    "ColocatablePolicyInterface",
    "GenerationInterface",
    "GenerationOutputSpec",
    "LogprobOutputSpec",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MetricNormalizer",
    "PolicyInterface",
    "ReferenceLogprobOutputSpec",
]
