"""One rank's policy: about ten verbs over a built model; knows nothing of Ray or hosts.

Shapes: B rows of this data-parallel rank, S positions, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.continuing import Continuing
from megatron_policy.interfaces import LossFunction
from megatron_policy.model.load import held_layers
from megatron_policy.model.residency import (
    TO_EXCHANGE,
    TO_READ,
    TO_REFIT,
    TO_TRAIN,
    MemoryState,
    Need,
)
from megatron_policy.refit.delivery import Sink, deliver
from megatron_policy.refit.disk import DEFAULT_MAX_SHARD_BYTES, export_checkpoint
from megatron_policy.refit.iterate import tensors
from megatron_policy.refit.manifest import Manifest
from megatron_policy.session import Session
from megatron_policy.train import step
from megatron_policy.train.batching import batcher_of
from megatron_policy.train.generate import Continuations
from megatron_policy.train.score import Scorer


class MegatronPolicy:
    """A Hugging Face checkpoint as a Megatron-Core model: train it, read it, write it back.

    Every rank of the layout makes one, wherever torch.distributed runs: under torchrun, inside Ray
    workers, or alone in one process. Every method is collective: all ranks call it, in the same
    order, each data-parallel replica with rows of its own and all ranks of a replica with the same
    rows.
    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: Any = None,
        *,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        timeout_s: float = device.DEFAULT_TIMEOUT_S,
    ) -> None:
        """Join the process group, build this rank's part of the model and load its weights.

        `tokenizer` is anything with `pad_token_id` and `eos_token_id`; only `generate` needs one.
        No collective waits longer than `timeout_s` seconds. Raises ConfigError for a layout that is
        not legal, naming the legal values, and ConversionError for a checkpoint that does not match
        its family's table, naming both sides.
        """
        self.config = PolicyConfig.parse(config)
        self.tokenizer = tokenizer
        self._session = Session(
            self.config,
            init_optimizer=init_optimizer,
            init_reference_model=init_reference_model,
            timeout_s=timeout_s,
        )
        self.rank, self.topology = self._session.rank, self._session.topology
        self.coords, self._assembly = self._session.coords, self._session.assembly
        self._pipeline = self._assembly.pipeline
        self._batcher = batcher_of(
            self.config, self.topology, self._assembly.table.architecture.hidden_size
        )
        self._scorer = Scorer(self._pipeline, self._batcher, self.config.logprob_batch_size)
        self.steps = 0
        self.exporter, self.memory = self._session.exporter, self._session.memory
        self._continue = Continuing(self.config, tokenizer, self._pipeline, self.coords.dp)

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each global batch of `gbs` samples (over all replicas), in
        microbatches of `mbs`.

        `data` is this replica's share: `input_ids` int64 `[B, S]` right padded, `sample_mask`
        `[B]`, `token_mask` `[B, S]` and whatever the loss reads. Returns `global_loss`,
        `grad_norm`, `all_mb_metrics` and `rank`, as `train.step.train` describes them. `eval_mode`
        computes the loss only.
        """
        trainable = None if eval_mode else self._session.trainable
        self.memory.check("train()", TO_READ if eval_mode else TO_TRAIN)
        if not eval_mode:
            self._session.stepped()
        result = step.train(
            self._pipeline,
            trainable,
            self._batcher,
            data,
            loss_fn,
            gbs or self.config.train_global_batch_size,
            mbs or self.config.train_micro_batch_size,
        )
        self.steps += 0 if eval_mode else len(result["global_loss"])
        return result

    def logprobs(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> torch.Tensor:
        """fp32 `[B, S]`: `log p(token t | those before)`; 0 at t = 0 and beyond `input_lengths`."""
        self.settle("logprobs()")
        return self._scorer.logprobs(data, micro_batch_size)

    def entropy(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> torch.Tensor:
        """fp32 `[B, S]`, in nats: of the distribution token t is drawn from; 0 at t = 0."""
        self.settle("entropy()")
        return self._scorer.entropy(data, micro_batch_size)

    def reference_logprobs(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> torch.Tensor:
        """`logprobs` under the weights this policy started from."""
        with self.reference():
            return self.logprobs(data, micro_batch_size=micro_batch_size)

    def topk_logits(
        self, data: BatchedDataDict, k: int, *, micro_batch_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits at each position and their token ids: fp32 and int64, both `[B, S,
        K]`.
        """
        self.settle("topk_logits()")
        return self._scorer.topk_logits(data, k, micro_batch_size)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the policy computes with its starting weights; afterwards its own are
        back, bit for bit.
        """
        reference = self._session.reference
        self.settle("reference_logprobs()", TO_EXCHANGE)
        with reference.active(), self.memory.held("the reference policy"):
            yield

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> Continuations:
        """Continue right-padded prompts (`input_ids` `[B, S]`, `input_lengths` `[B]`) as
        `config.generation` says.
        """
        self.settle("generate()")
        return self._continue(data, greedy)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters, and buffers that belong to the model as they do, under their
        canonical, global Megatron-Core names.
        """
        self.settle("named_parameters()")
        return ((entry.megatron, parameter) for entry, parameter in self._assembly.held)

    def decoder_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """This rank's decoder layers by global number. They pass on `[S, B, D]`; under sequence
        parallelism S is this tensor-parallel rank's share of the positions.
        """
        return held_layers(self._pipeline.models, self._assembly.place)

    def export_hf(
        self,
        path: str | PathLike[str],
        *,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        overwrite: bool = False,
    ) -> None:
        """Write a Hugging Face checkpoint: config, tokenizer, sharded safetensors with index, each
        rank its part.

        Tensors keep the dtype they had in `config.model_name`, so that what was not trained comes
        back bit-equal. The directory appears when it is complete; one that exists is refused unless
        `overwrite`.
        """
        self.settle("export_hf()", TO_REFIT)
        source = self.config.model_name
        export_checkpoint(path, self.exporter, source, self.steps, max_shard_bytes, overwrite)

    def export(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights as Hugging Face tensors by name, on every rank, one after another, on the
        device; in the checkpoint's dtypes unless `dtype` is given. Iterate to the end: the other
        ranks do.
        """
        self.settle("export()", TO_REFIT)
        stream = tensors(self.exporter, self.exporter.plan(dtype=dtype))
        return self.memory.during("export()", TO_REFIT, stream)

    def refit(self, sink: Sink) -> Manifest:
        """Hand the weights to an engine; returns what this rank has sent. RefitError, on every
        rank, when any rank's engine refused or did not answer in time; the policy goes on.
        """
        self.settle("refit()", TO_REFIT)
        return deliver(self.exporter, sink, self.steps)

    def enter(self, state: MemoryState) -> None:
        """Move parameters, gradients and optimizer state to where `state` has them, TRAIN, LOGPROB,
        REFIT or IDLE of `model.residency`; a second time does nothing.
        """
        self._session.settle()
        self.memory.enter(state)

    def offload(self, what: str | Iterable[str]) -> None:
        """Move "parameters", "gradients", "optimizer" or several of them to host memory."""
        self._session.settle()
        self.memory.offload(what)

    def onload(self, what: str | Iterable[str]) -> None:
        """Bring back what `offload` has moved."""
        self.memory.onload(what)

    def settle(self, operation: str, need: Need = TO_READ) -> None:
        """Make the weights ready for `operation`; ConfigError where the memory state forbids it."""
        self.memory.check(operation, need)
        self._session.settle()

    def shutdown(self) -> None:
        """Leave the process groups; the policy is of no use afterwards. May be called again."""
        self._session.close()
