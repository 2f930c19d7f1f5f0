"""One rank's policy: about ten verbs over a built model; knows nothing of Ray or hosts.

Shapes: B rows of this data-parallel rank, S positions, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy import device
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.hf_files import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConfigError
from megatron_policy.groups import drop_groups, refuse_second_policy
from megatron_policy.interfaces import LossFunction
from megatron_policy.layout import check_layout, topology_of
from megatron_policy.model.assemble import assemble
from megatron_policy.model.load import held_layers
from megatron_policy.refit.disk import DEFAULT_MAX_SHARD_BYTES, export_checkpoint
from megatron_policy.train import step
from megatron_policy.train.batching import batcher_of
from megatron_policy.train.generate import Continuations, generate
from megatron_policy.train.sampling import Sampling
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
        self._table = bind(read_config(self.config.model_name))
        device.prepare_platform()
        device.place_process()
        refuse_second_policy()
        self._owns_process_group = device.join_process_group(timeout_s)
        self._open = True
        try:
            self.rank = dist.get_rank()
            self.topology = topology_of(self.config, dist.get_world_size())
            self.coords = self.topology.coords(self.rank)
            check_layout(self.config, self._table.architecture, self.topology)
            self._assembly = assemble(
                self.config,
                self._table,
                self.topology,
                init_optimizer=init_optimizer,
                init_reference_model=init_reference_model,
                timeout_s=timeout_s,
            )
        except BaseException:
            self.shutdown()
            raise
        self._pipeline = self._assembly.pipeline
        self._batcher = batcher_of(self.config, self.topology, self._table.architecture.hidden_size)
        self._scorer = Scorer(self._pipeline, self._batcher, self.config.logprob_batch_size)
        self._gather_pending = False
        # Replicas must not draw the same tokens; the ranks of one replica draw once and share.
        self._generator = torch.Generator(device=device.current_device())
        self._generator.manual_seed(self.config.seed + self.coords.dp)

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
        trainable = self._assembly.trainable
        if trainable is None and not eval_mode:
            raise RuntimeError(
                "this policy was made with init_optimizer=False: it can only train in eval_mode"
            )
        self._gather_pending |= not eval_mode
        return step.train(
            self._pipeline,
            None if eval_mode else trainable,
            self._batcher,
            data,
            loss_fn,
            gbs or self.config.train_global_batch_size,
            mbs or self.config.train_micro_batch_size,
        )

    def logprobs(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> torch.Tensor:
        """fp32 `[B, S]`: `log p(token t | those before)`; 0 at t = 0 and beyond `input_lengths`."""
        self._settle()
        return self._scorer.logprobs(data, micro_batch_size)

    def entropy(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> torch.Tensor:
        """fp32 `[B, S]`, in nats: of the distribution token t is drawn from; 0 at t = 0."""
        self._settle()
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
        self._settle()
        return self._scorer.topk_logits(data, k, micro_batch_size)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the policy computes with its starting weights; afterwards its own are
        back, bit for bit.
        """
        reference = self._assembly.reference
        if reference is None:
            raise RuntimeError(
                "this policy was made with init_reference_model=False: it has no reference"
            )
        self._settle()
        with reference.active():
            yield

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> Continuations:
        """Continue right-padded prompts (`input_ids` `[B, S]`, `input_lengths` `[B]`) as
        `config.generation` says.
        """
        self._settle()
        return generate(
            self._pipeline,
            data,
            _sampling(self.config, self.tokenizer, greedy),
            _pad_id(self.tokenizer),
            self.config.max_total_sequence_length,
            self._generator,
            self.config.generation_batch_size,
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters, and buffers that belong to the model as they do, under their
        canonical, global Megatron-Core names.
        """
        self._settle()
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
        self._settle()
        export_checkpoint(path, self._assembly, self.config.model_name, max_shard_bytes, overwrite)

    def _settle(self) -> None:
        """Parameters may still be on their way when their gather overlaps the next step: wait for
        them.
        """
        if self._gather_pending and self._assembly.trainable is not None:
            self._assembly.trainable.finish_parameter_gather()
        self._gather_pending = False

    def shutdown(self) -> None:
        """Leave the process groups this policy made; it is of no use afterwards. A second call does
        nothing: a policy that was made meanwhile keeps its groups.
        """
        if not self._open:
            return
        self._open = False
        if hasattr(self, "_assembly"):  # there is none after a failed start
            self._assembly.let_go()
        drop_groups()
        if self._owns_process_group:
            device.leave_process_group()


def _sampling(config: PolicyConfig, tokenizer: Any, greedy: bool) -> Sampling:
    settings = config.generation
    if settings is None:
        raise ConfigError(
            "policy.generation is missing: generate needs at least generation.max_new_tokens"
        )
    eos = getattr(tokenizer, "eos_token_id", None)
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        greedy=greedy,
        stop_ids=(*settings.stop_token_ids, *([] if eos is None else [int(eos)])),
    )


def _pad_id(tokenizer: Any) -> int:
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        raise ConfigError("generate needs a tokenizer with a pad_token_id; pass one as `tokenizer`")
    return int(pad)
