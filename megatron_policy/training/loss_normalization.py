"""What a step that is accumulated without global counts is divided by at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_policy.errors import ConfigError
from megatron_policy.interfaces import LossFunction, LossType, MetricNormalizer
from megatron_policy.training.checks import loss_kind
from megatron_policy.training.losses import ValidCounts

_OF_LOSS = {
    LossType.TOKEN_LEVEL.value: MetricNormalizer.TOKENS.value,
    LossType.SEQUENCE_LEVEL.value: MetricNormalizer.SEQUENCES.value,
}
_KINDS = tuple(kind.value for kind in MetricNormalizer)


@dataclass(frozen=True)
class LossNormalization:
    """What a loss is divided by, and which of its metrics are divided by something else; each is a
    value of `MetricNormalizer`.
    """

    loss: str
    metrics: Mapping[str, str]

    @classmethod
    def of(cls, loss_fn: LossFunction) -> LossNormalization:
        """Read `loss_type` and `metric_normalizations` of a loss; ConfigError if one is unknown."""
        loss_kind(loss_fn)  # refuse an unsupported input_type this early
        name = type(loss_fn).__name__
        level = _value(getattr(loss_fn, "loss_type", None))
        if level not in _OF_LOSS:
            raise ConfigError(
                f"{name}.loss_type is {level!r}: a step in parts is divided by it in the end, so "
                f"it must be one of {', '.join(_OF_LOSS)}"
            )
        given = getattr(loss_fn, "metric_normalizations", None)
        metrics = {key: _value(value) for key, value in dict(given or {}).items()}
        for key, value in metrics.items():
            if value not in _KINDS:
                raise ConfigError(
                    f"{name}.metric_normalizations has {value!r} for {key!r}; legal: "
                    f"{', '.join(_KINDS)}"
                )
        return cls(_OF_LOSS[level], metrics)

    def gradient(self, counts: ValidCounts) -> float:
        """The divisor of gradient and loss; at least 1, as for a loss that divides itself."""
        return _of(counts)[self.loss]

    def divisors(self, counts: ValidCounts) -> Callable[[str], float]:
        """The divisor of a metric, by its name."""
        numbers = _of(counts)
        return lambda name: numbers[self.metrics.get(name, self.loss)]


def _of(counts: ValidCounts) -> dict[str, float]:
    return {
        MetricNormalizer.TOKENS.value: float(counts.tokens.clamp(min=1)),
        MetricNormalizer.SEQUENCES.value: float(counts.sequences.clamp(min=1)),
        MetricNormalizer.NONE.value: 1.0,
    }


def _value(member: Any) -> Any:
    """A host brings its own enumerations: compare values, not members."""
    return getattr(member, "value", member)
