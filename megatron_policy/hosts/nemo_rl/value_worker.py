"""The actor that NeMo RL starts for one rank of PPO's value model: this package's worker, with a
scalar head and under the host's names. Importing it imports neither Megatron-Core nor the host.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import ray
import torch
import torch.nn.functional as F

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl.host_imports import to_host_batch
from megatron_policy.hosts.nemo_rl.rows import read_host_batch
from megatron_policy.hosts.nemo_rl.worker import ACTOR_OPTIONS, NemoRLWorker
from megatron_policy.memory.states import IDLE, LOGPROB

_HEAD = {"enabled": True, "reward_model_type": "regression"}


class NemoRLValueWorker(NemoRLWorker):
    """One rank under NeMo RL's `Value`.

    Whatever `reward_model_cfg` says, the model has a scalar head with a bias. Values are those of
    the host's own workers: at position t of the tokens before t, 0 at position 0.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        **kwargs: Any,
    ) -> None:
        """See `NemoRLWorker`; there is no reference."""
        raw = config.model_dump() if isinstance(config, PolicyConfig) else dict(config)
        raw["reward_model_cfg"] = _HEAD
        super().__init__(
            raw,
            tokenizer,
            weights_path,
            optimizer_path,
            init_optimizer,
            init_reference_model=False,
            **kwargs,
        )

    def train(  # type: ignore[override]
        self,
        data: Mapping[str, Any],
        loss_fn: Any,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        check_dim_skip_keys: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Train (or evaluate) on this rank's shard with a loss whose `logits` are values [B, S]."""
        return super().train(data, ValueLoss(loss_fn), eval_mode, gbs, mbs, check_dim_skip_keys)

    def begin_train_step(
        self, loss_fn: Any, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step trained in parts with such a loss."""
        super().begin_train_step(ValueLoss(loss_fn), gbs=gbs, mbs=mbs)

    def get_values(self, data: Mapping[str, Any], micro_batch_size: int | None = None) -> Any:
        """`values`, fp32 [B, S], of the tokens before each position."""
        values_BS = self.policy.values(
            read_host_batch(self, data), micro_batch_size=micro_batch_size
        )
        return to_host_batch(BatchedDataDict({"values": shift_values(values_BS)}))

    def prepare_for_inference(self) -> None:
        """Only parameters on the device."""
        self.policy.memory.enter(LOGPROB)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing on the device."""
        self.policy.memory.enter(IDLE)


class ValueLoss:
    """A loss of values, which the host gives as `logits` [B, S] whose position t is of the tokens
    before t. Its own attributes show through.
    """

    def __init__(self, loss_fn: Any) -> None:
        kind = getattr(loss_fn, "input_type", None)
        self.__name__ = getattr(loss_fn, "__name__", None) or type(loss_fn).__name__
        if getattr(kind, "value", kind) != "logit":
            raise ConfigError(
                f"{self.__name__} is no loss of a value model: its input_type must be 'logit', "
                "under which it gets values [B, S]"
            )
        self._loss_fn = loss_fn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loss_fn"], name)

    def __call__(self, *, logits: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        result: tuple[torch.Tensor, dict[str, Any]] = self._loss_fn(
            logits=shift_values(logits.squeeze(-1)), **rest
        )
        return result


def shift_values(values_BS: torch.Tensor) -> torch.Tensor:
    """Values of the tokens before each position, from those of the tokens up to it."""
    return F.pad(values_BS[:, :-1], (1, 0))


MegatronValueWorker = ray.remote(**ACTOR_OPTIONS)(NemoRLValueWorker)
"""`NemoRLValueWorker` as an actor."""
