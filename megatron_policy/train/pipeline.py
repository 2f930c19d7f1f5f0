"""Runs microbatches through this rank's chunks with Megatron-Core's pipeline schedule; knows
nothing of losses.

Shapes: B rows of a microbatch, S positions, V this rank's slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import current_device
from megatron_policy.groups import Groups
from megatron_policy.model.rope import set_text_length
from megatron_policy.topology import Topology

# Logit of a padding entry of the vocabulary: its probability is exactly 0 and 0 * logit stays
# finite.
PADDING_LOGIT = -1e9

T = TypeVar("T")
Consume = Callable[[torch.Tensor, BatchedDataDict], T]


@dataclass(frozen=True)
class Pipeline:
    """This rank's chunks in the pipeline and the groups they talk in.

    Sequences are padded to a multiple of `length_multiple`. Losses and readers see logits divided
    by `temperature`: rollouts are drawn from that distribution, so it is the one whose
    log-probabilities count.
    """

    chunks: tuple[torch.nn.Module, ...]
    groups: Groups
    topology: Topology
    vocab_size: int
    padded_vocab_size: int
    length_multiple: int
    temperature: float

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The chunks without the gradient buffers they may be wrapped in."""
        return tuple(getattr(chunk, "module", chunk) for chunk in self.chunks)

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def vocab_start(self) -> int:
        """First vocabulary entry of this rank's slice."""
        return self.groups.tp.rank() * self.vocab_slice

    @property
    def vocab_slice(self) -> int:
        """Width of this rank's slice of the padded vocabulary."""
        return self.padded_vocab_size // self.groups.tp.size()

    def train(
        self,
        microbatches: Sequence[BatchedDataDict],
        loss: Consume[tuple[torch.Tensor, T]],
        forward_only: bool = False,
    ) -> list[T]:
        """Forward and, unless `forward_only`, backward; `loss` gives a scalar to differentiate and
        what to keep.

        Returns what was kept, in order, on the last stage; an empty list on the others.
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            return self._run(microbatches, partial(self._finish_loss, loss), forward_only, False)

    @torch.no_grad()
    def infer(self, microbatches: Sequence[BatchedDataDict], read: Consume[T]) -> list[T]:
        """Forward only, in eval mode; returns what `read` makes of each microbatch's logits, on the
        last stage.
        """
        for chunk in self.chunks:
            chunk.eval()
        padded = self._fill_rounds(microbatches)
        results = self._run(padded, partial(self._finish_read, read), True, True)
        return results[: len(microbatches)]

    def _fill_rounds(self, microbatches: Sequence[BatchedDataDict]) -> list[BatchedDataDict]:
        """The interleaved schedule runs whole rounds of `pp` microbatches: repeat the last one to
        fill up.
        """
        round_size = self.topology.pp if self.topology.vpp > 1 else 1
        missing = -len(microbatches) % round_size
        return [*microbatches, *[microbatches[-1]] * missing]

    def _run(
        self,
        microbatches: Sequence[BatchedDataDict],
        finish: Callable[..., Any],
        forward_only: bool,
        collect: bool,
    ) -> list[Any]:
        rows, length = microbatches[0]["input_ids"].shape
        set_text_length(self.models, length)
        several = len(self.chunks) > 1
        data = [iter(microbatches) for _ in self.chunks]
        schedule = get_forward_backward_func()
        kept: list[Any] = schedule(
            forward_step_func=partial(self._forward, finish),
            data_iterator=data if several else data[0],
            model=list(self.chunks) if several else self.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=self.padded_length(length),
            micro_batch_size=rows,
            forward_only=forward_only,
            collect_non_loss_data=collect,
        )
        return kept

    def _forward(
        self,
        finish: Callable[..., Any],
        microbatches: Iterator[BatchedDataDict],
        model: torch.nn.Module,
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        data = next(microbatches)
        tokens_BS = self.pad_tokens(data["input_ids"])
        positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
        return model(tokens_BS, positions_BS, None), partial(finish, data)

    def _finish_loss(
        self, loss: Consume[tuple[torch.Tensor, Any]], data: BatchedDataDict, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        value, kept = loss(self.clean_logits(output, data["input_ids"].size(1)), data)
        # The count would divide gradients when they are reduced; ours are sums, so it has no
        # effect.
        return value, torch.ones((), dtype=torch.int, device=value.device), kept

    def _finish_read(
        self, read: Consume[Any], data: BatchedDataDict, output: torch.Tensor, non_loss_data: bool
    ) -> Any:
        assert non_loss_data
        return read(self.clean_logits(output, data["input_ids"].size(1)), data)

    def padded_length(self, length: int) -> int:
        """`length` rounded up to what the layout can split."""
        return -(-length // self.length_multiple) * self.length_multiple

    def pad_tokens(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Token ids on the device, padded on the right to a length that the layout can split."""
        tokens_BS = tokens_BS.to(current_device(), non_blocking=True)
        missing = self.padded_length(tokens_BS.size(1)) - tokens_BS.size(1)
        return torch.nn.functional.pad(tokens_BS, (0, missing)) if missing else tokens_BS

    def clean_logits(self, logits_BSV: torch.Tensor, length: int) -> torch.Tensor:
        """fp32 logits of the first `length` positions at the policy's temperature, vocabulary
        padding made impossible.
        """
        logits_BSV = logits_BSV[:, :length].float()
        if self.temperature != 1.0:
            logits_BSV = logits_BSV / self.temperature
        real = max(0, min(self.vocab_size - self.vocab_start, self.vocab_slice))
        if real < self.vocab_slice:
            logits_BSV[..., real:] = PADDING_LOGIT
        return logits_BSV

    def share_tensor(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """What the last stage holds, on every stage; `like` gives shape and dtype where there is
        nothing yet.
        """
        if self.groups.pp.size() == 1:
            assert tensor is not None
            return tensor
        shared = tensor.contiguous() if tensor is not None else torch.empty_like(like)
        dist.broadcast(shared, src=self.groups.last_stage, group=self.groups.pp)
        return shared

    def share_object(self, value: T | None) -> T:
        """The last stage's picklable value on every stage."""
        box: list[Any] = [value]
        if self.groups.pp.size() > 1:
            dist.broadcast_object_list(
                box, src=self.groups.last_stage, group=self.groups.pp, device=current_device()
            )
        result: T = box[0]
        return result
