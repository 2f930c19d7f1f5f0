"""What a driver has its workers compute: it splits batches over them and joins the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.packing.microbatch import ROUTED_EXPERTS
from megatron_policy.training.loss_calls import check_loss
from megatron_policy.training.replay import NOT_RECORDED, Replay
from megatron_policy.training.sharding import BatchDispatcher, merged_training
from megatron_policy.training.step import NEEDS_OPTIMIZER
from megatron_policy.workers.cluster.group import WorkerGroup

if TYPE_CHECKING:
    from megatron_policy.interfaces import LossFunction
    from megatron_policy.training.dry_run import DryRun
    from megatron_policy.training.results import TrainResult


class BatchDriver:
    """Trains on batches, scores and continues them, and moves to the workers' devices what the
    next phase needs.

    Rows are split over the data-parallel ranks; every rank of a replica gets its rows, and the one
    with pipeline, context and tensor index 0 answers. Results are in the caller's order.
    """

    def __init__(
        self,
        config: PolicyConfig,
        workers: WorkerGroup,
        dispatcher: BatchDispatcher,
        metrics: MetricsLog,
        tokenizer: Any,
        *,
        can_train: bool,
        has_reference: bool,
    ) -> None:
        self._config, self._metrics = config, metrics
        self._workers, self._dispatcher = workers, dispatcher
        self._can_train, self._has_reference = can_train, has_reference
        self._pad_id = getattr(tokenizer, "pad_token_id", None) or 0
        self._open_step: tuple[LossFunction, int] | None = None

    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per global batch of `gbs` rows of `data`, in microbatches of `mbs`.

        Both default to the config's; microbatches of tokens need no `mbs`. Returns a
        `TrainResult`, with the microbatches of all ranks. `eval_mode` computes the loss only.
        """
        if not (eval_mode or self._can_train):
            raise ConfigError(f"train() {NEEDS_OPTIMIZER}")
        gbs = gbs or self._config.train_global_batch_size
        mbs = mbs or self._config.train_micro_batch_size
        shards = self._dispatcher.to_train(_batch(data), loss_fn, gbs, mbs)
        options = {"loss_fn": loss_fn, "eval_mode": eval_mode, "gbs": gbs, "mbs": mbs}
        return self._record(self._workers.run_sharded("train", data=shards, **options), eval_mode)

    def dry_run(self, data: Mapping[str, Any], loss_fn: LossFunction) -> DryRun:
        """Try a loss on the first rows of `data` before training; see `MegatronPolicy.dry_run`."""
        few, rows = self._dispatcher.to_dry_run(_batch(data), loss_fn)
        found: DryRun = self._workers.run_all("dry_run", data=few, loss_fn=loss_fn)[0]
        return replace(found, rows=tuple(rows))

    def begin_train_step(
        self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step that advances the schedule by `gbs` samples, however many are passed;
        microbatches have `mbs` rows. Both default to the config's; token-based microbatches need no
        `mbs`. The loss is called with global counts of 1 and divided at the end: docs/losses.md.

        Between the parts, log-probabilities can be computed. Anything that needs the step to be
        over (`train`, saving and loading, a refit, freeing gradient buffers) is refused with a
        ConfigError, and so is this while a step is open, without an optimizer, and for a loss
        without `loss_type`.
        """
        check_loss(loss_fn, self._dispatcher.head)
        self._workers.run_all("begin_train_step", loss_fn=loss_fn, gbs=gbs, mbs=mbs)
        self._open_step = loss_fn, mbs or self._config.train_micro_batch_size

    def train_microbatch(self, data: Mapping[str, Any]) -> None:
        """Add the gradients of all rows of `data`, which are split over the data-parallel ranks.

        The rows must be whole microbatches, but need not split evenly. After a BatchError or
        ConfigError the step can continue with other data.
        """
        if self._open_step is None:
            raise ConfigError(
                "train_microbatch(): no training step is open, call begin_train_step() first"
            )
        shards = self._dispatcher.to_train_part(_batch(data), *self._open_step)
        self._workers.run_sharded("train_microbatch", data=shards)

    def finish_train_step(self) -> dict[str, Any]:
        """Take the step; return what `train` does for one global batch. ConfigError if no part was
        trained: the step stays open.
        """
        refs = self._workers.submit_all("finish_train_step")
        reporters = self._workers.topology.reporters()
        results = self._workers.collect("finish_train_step", refs, reporters)
        self._open_step = None
        return self._record(results)

    def abort_train_step(self) -> None:
        """Drop the open step, if any, and its gradients: the policy is as it was before."""
        self._workers.run_all("abort_train_step")
        self._open_step = None

    def get_logprobs(
        self, data: Mapping[str, Any], return_routed_experts: bool = False
    ) -> BatchedDataDict:
        """`logprobs` fp32 [B, S]: of each token given the preceding ones; 0 at position 0. On
        request also `routed_experts`, see `MegatronPolicy.logprobs`.
        """
        if not return_routed_experts:
            return self._ask("get_logprobs", data, Replay.REQUIRED)
        return self._ask("get_logprobs", data, return_routed_experts=True)

    def get_reference_policy_logprobs(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs` fp32 [B, S], under the weights the policy started from."""
        if not self._has_reference:
            raise ConfigError("made with init_reference_model=False, this policy has no reference")
        method, size = "get_reference_policy_logprobs", {"micro_batch_size": micro_batch_size}
        return self._ask(method, data, Replay.NEVER, **size)

    def get_topk_logits(
        self, data: Mapping[str, Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`topk_logits` fp32 and `topk_indices` int64, both [B, S, k], largest first."""
        return self._ask("get_topk_logits", data, k=k, micro_batch_size=micro_batch_size)

    def get_entropy(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`entropy` fp32 [B, S], in nats, of each token's distribution; 0 at position 0."""
        return self._ask("get_entropy", data, micro_batch_size=micro_batch_size)

    def get_values(
        self, data: Mapping[str, Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`values` fp32 [B, S]: what a scalar head makes of the tokens up to each position; 0
        beyond `input_lengths`.
        """
        return self._ask("get_values", data, micro_batch_size=micro_batch_size)

    def score(self, data: Mapping[str, Any]) -> BatchedDataDict:
        """`scores` fp32 [B]: what a scalar head makes of each row."""
        return self._ask("score", data)

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict:
        """Continue right-padded prompts `input_ids` [B, S], `input_lengths` [B]; see
        `GenerationOutputSpec` for the result.
        """
        sharded = self._dispatcher.to_generate(_batch(data))
        answers = self._workers.run_sharded("generate", data=sharded.shards, greedy=greedy)
        return sharded.restored(answers, {"output_ids": self._pad_id})

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything on the devices: parameters, gradient buffers, optimizer state."""
        self._workers.run_all("prepare_for_training")

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Free gradient buffers and optimizer state; parameters stay for inference."""
        self._workers.run_all("finish_training")

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Only parameters on the devices; with `keep_train_buffers` training state on them stays
        too.
        """
        self._workers.run_all("prepare_for_lp_inference", keep_train_buffers=keep_train_buffers)

    def finish_inference(self) -> None:
        """Parameters leave the devices; training state stays where it is."""
        self._workers.run_all("finish_inference")

    def offload_before_refit(self) -> None:
        """Only parameters on the devices: memory for transfers to the engines."""
        self._workers.run_all("offload_before_refit")

    def offload_after_refit(self) -> None:
        """Nothing on the devices: all of them are free for the engines."""
        self._workers.run_all("offload_after_refit")

    def offload_to_cpu(self) -> None:
        """Same as `offload_after_refit`."""
        self.offload_after_refit()

    def get_free_memory_bytes(self) -> int:
        """The smallest number of free bytes on any worker's device."""
        free: list[int] = self._workers.run_all("get_free_memory_bytes")
        return min(free)

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Move the weights that the policy generates with to the devices; return True."""
        self._workers.run_all("prepare_for_generation")
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Return True; there is nothing to clean up after generation."""
        return True

    def _ask(
        self,
        method: str,
        data: Mapping[str, Any],
        replay: Replay = Replay.IF_GIVEN,
        **options: Any,
    ) -> BatchedDataDict:
        """The ranks' results of `method` for all rows, which read `routed_experts` by `replay`."""
        sharded = self._dispatcher.to_score(_batch(data), replay)
        answers = self._workers.run_sharded(method, data=sharded.shards, **options)
        return sharded.restored(answers, {ROUTED_EXPERTS: NOT_RECORDED})

    def _record(self, results: list[Mapping[str, Any]], eval_mode: bool = False) -> TrainResult:
        """The results of all data-parallel ranks as one, once it is recorded."""
        result = merged_training(results)
        self._metrics.trained(result, result["microbatch_metrics"], eval_mode=eval_mode)
        return result


def _batch(data: Mapping[str, Any]) -> BatchedDataDict:
    if not isinstance(data, Mapping):
        raise ConfigError(f"data is a {type(data).__name__}; pass a BatchedDataDict")
    return data if isinstance(data, BatchedDataDict) else BatchedDataDict(data)
