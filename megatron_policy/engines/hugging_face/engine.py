"""A sharded transformers model, as `interfaces.engine.TrainingEngine`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_policy.attention.causal import sequences_in
from megatron_policy.converters.table import Table
from megatron_policy.device.process_groups import forget_groups
from megatron_policy.device.timing import BACKWARD, FORWARD, SCORING, TRAINING, Recorder
from megatron_policy.engines.hugging_face.attention import attending
from megatron_policy.engines.hugging_face.head import FusedHead, OwnHead
from megatron_policy.engines.hugging_face.module import Decoder
from megatron_policy.engines.hugging_face.optimizer import FsdpTrainable
from megatron_policy.engines.hugging_face.process_groups import FsdpGroups
from megatron_policy.engines.hugging_face.sharding import Sharding
from megatron_policy.engines.hugging_face.table import local_part
from megatron_policy.engines.hugging_face.text_length import TextLength
from megatron_policy.engines.shared import GrowingRows, collect_storages
from megatron_policy.interfaces.embedder import Embedder, Entering
from megatron_policy.interfaces.engine import Loss, NewCache
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.memory.states import Kind, Storages
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.packing.tokens import padded_layout
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held

T = TypeVar("T")


@dataclass
class CachedDecoder:
    """See `CachedModel`."""

    decoder: Decoder
    rows: GrowingRows
    head: FusedHead | OwnHead
    cache: Any
    positions: torch.Tensor
    """`[B, T]`, or `[3, B, T]` if tokens have three, which models want first."""
    cp_group: dist.ProcessGroup
    read: int = 0

    @classmethod
    def new(
        cls,
        decoder: Decoder,
        rows: GrowingRows,
        head: FusedHead | OwnHead,
        cp_group: dist.ProcessGroup,
    ) -> CachedDecoder:
        """With an empty cache, which grows."""
        from transformers import DynamicCache

        positions_TR = rows.prompts.layout.take_positions(0, rows.positions)
        positions = positions_TR.permute(*reversed(range(positions_TR.ndim)))
        cache = DynamicCache(config=decoder.model.config)
        return cls(decoder, rows, head, cache, positions, cp_group)

    def logits_after(self, tokens_BT: torch.Tensor, position: int) -> torch.Tensor:
        """See `CachedModel`; all ranks that share weights call it together."""
        first, self.read = self.read, position
        blocks_B = () if first else self.rows.blocks
        layout = padded_layout(len(tokens_BT), position, 1, 1)
        with attending(sequences_in(layout, self.cp_group, blocks_B) if blocks_B else None):
            logits_BV: torch.Tensor = self.decoder(
                tokens_BT[:, first:position],
                self.positions[..., first:position],
                lambda tokens_BS: self.rows.enter(tokens_BS, first),
                self.head.next_logits,
                self.cache,
            )
        return logits_BV


@dataclass(frozen=True)
class FsdpEngine:
    """A rank's place among the shards and everything it holds there. For the methods see
    `TrainingEngine`.
    """

    place: Placement
    fsdp: FsdpGroups
    table: Table
    held: Held
    source_dtypes: Mapping[str, torch.dtype]
    precision: torch.dtype
    decoder: Decoder
    sharding: Sharding
    embedder: Embedder
    head: FusedHead | OwnHead
    trainable: FsdpTrainable | None
    pending_reads: PendingReads
    recorder: Recorder
    text: TextLength
    adapters: None = None
    is_last_stage: bool = True

    @property
    def groups(self) -> Groups:
        return self.fsdp.batch

    @property
    def joins_replicas(self) -> bool:
        """See `TrainingEngine`: all ranks gather each layer's weights together."""
        return self.fsdp.fsdp.size() > 1

    @property
    def vocab_size(self) -> int:
        return self.table.architecture.vocab_size

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: Loss[T], forward_only: bool = False
    ) -> list[T]:
        self.sharding.root.train(not forward_only)
        kept: list[T] = []
        with self.recorder.span(SCORING if forward_only else TRAINING):
            for number, microbatch in enumerate(microbatches):

                def finish(output: Output, dummy: bool = microbatch.dummy) -> torch.Tensor:
                    if dummy and forward_only:
                        return output.hidden_TRD.new_zeros(())
                    if dummy:
                        return output.nothing()
                    value, found = loss(output)
                    kept.append(found)
                    return value

                # Layers that are recomputed attend again, during the backward pass.
                layout, blocks_B = microbatch.layout, self.embedder.find_blocks(microbatch)
                plain = layout.plain and not blocks_B
                sequences = None if plain else sequences_in(layout, self.groups.cp, blocks_B)
                with attending(sequences), self.sharding.adding_gradients(not forward_only):
                    with self.recorder.span(FORWARD, number):
                        value = self._run(microbatch, finish, gradients=not forward_only)
                    if not forward_only:
                        with self.recorder.span(BACKWARD, number):
                            value.backward()
        return kept

    def forward(self, microbatches: Sequence[Microbatch], read: Callable[[Output], T]) -> list[T]:
        def keep(output: Output) -> tuple[torch.Tensor, T]:
            return output.hidden_TRD.new_zeros(()), read(output)

        return self.forward_backward(microbatches, keep, forward_only=True)

    def _run(
        self,
        microbatch: Microbatch,
        finish: Callable[[Output], torch.Tensor],
        gradients: bool,
    ) -> torch.Tensor:
        layout, rank = microbatch.layout, self.groups.cp.rank()
        tokens_RT = layout.take(microbatch.tokens_BS, rank).T.contiguous()
        positions_BS = self.embedder.positions(microbatch)
        positions_TR = layout.take_positions(rank, positions_BS)
        # Models that have three positions of a token want these first of all.
        positions = positions_TR.permute(*reversed(range(positions_TR.ndim))).contiguous()

        def made(hidden_TRD: torch.Tensor) -> torch.Tensor:
            return finish(Output(hidden_TRD, microbatch, self.head, self.groups.cp))

        def embed(tokens_RT: torch.Tensor) -> Entering:
            return self.embedder.enter(tokens_RT, microbatch)

        try:
            with (
                nullcontext() if gradients else torch.no_grad(),
                self.text.of_batch(microbatch.text_length),
            ):
                value: torch.Tensor = self.sharding.root(tokens_RT, positions, embed, made)
        except BaseException:
            self.sharding.reshard()
            raise
        if not gradients:
            self.sharding.reshard()
        return value

    def forward_with_experts(
        self, microbatches: Sequence[Microbatch], read: Callable[[Output], T]
    ) -> tuple[list[T], list[torch.Tensor]]:
        """Refused before: `config/resolve.py`."""
        raise AssertionError("transformers' routers are not watched")

    def share_tensor(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        assert tensor is not None
        return tensor

    def share_object(self, value: T | None) -> T:
        return value  # type: ignore[return-value]

    @contextmanager
    def inference(self) -> Iterator[NewCache]:
        """See `TrainingEngine`; ranks that share weights run forward passes together."""
        self.sharding.root.eval()
        try:
            with self.head.whole_sequences():
                rows_of = partial(GrowingRows.of, self.embedder, time=1)
                yield lambda *given: CachedDecoder.new(
                    self.sharding.root, rows_of(*given), self.head, self.groups.cp
                )
        finally:
            self.sharding.reshard()

    def decoder_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """See `TrainingEngine`; their outputs are transformers'."""
        return enumerate(self.decoder.layers)

    def volatile_buffers(self) -> Iterator[torch.Tensor]:
        return iter(())

    def random_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        assert not states

    def storages(self) -> Storages:
        parameters = list(self.decoder.parameters())
        optimizer = {} if self.trainable is None else self.trainable.optimizer.state
        tensors = (
            *((Kind.PARAMETERS, each) for each in (*parameters, *self.decoder.buffers())),
            *((Kind.GRADIENTS, each.grad) for each in parameters),
            *((Kind.OPTIMIZER, each) for state in optimizer.values() for each in state.values()),
        )
        return collect_storages(
            (kind, local_part(each)) for kind, each in tensors if isinstance(each, torch.Tensor)
        )

    def forget_gradients(self) -> None:
        if self.trainable is not None:
            self.trainable.zero_gradients()

    def manages(self, model: object) -> bool:
        own = (self.sharding.root, self.decoder, self.decoder.model)
        return any(model is each for each in own)

    def close(self) -> None:
        """Leave the process groups."""
        self.fsdp.close()
        forget_groups(self)
