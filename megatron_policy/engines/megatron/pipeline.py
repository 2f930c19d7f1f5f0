"""Runs microbatches through this rank's chunks with Megatron-Core's pipeline schedule.

Shapes: T positions that this context-parallel rank computes, S of these on this rank (its share
under sequence parallelism), R rows of them, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_policy.device.timing import BACKWARD, FORWARD, SCORING, TRAINING, Recorder
from megatron_policy.engines.megatron.head import Head
from megatron_policy.engines.megatron.hidden_shapes import DerivedShapes, hidden_shape
from megatron_policy.engines.megatron.layers.balancing import RoutedRows, routing
from megatron_policy.engines.megatron.layers.replay import Recorded, RouterChannel
from megatron_policy.engines.megatron.layers.rope import set_row_lengths, set_text_length
from megatron_policy.engines.megatron.layers.sequences import (
    MicrobatchParams,
    sequence_params,
)
from megatron_policy.engines.megatron.mtp import MegatronMtp, before_final_norm
from megatron_policy.engines.megatron.process_groups import schedule_groups
from megatron_policy.interfaces.embedder import Embedder
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Topology

T = TypeVar("T")
Consume = Callable[[Output], T]
_Input = tuple[Microbatch, torch.Tensor | None, Recorded | None, range, tuple[int, int]]
"""A microbatch for one chunk: what its experts' layers get and leave, the layers, and the numbers
of microbatch and chunk.
"""


@dataclass(frozen=True)
class Pipeline:
    """This rank's chunks in the pipeline, the (global) `layers` of each, and their process groups;
    only the last stage has a `head`, and `mtp` layers if the model has them. Only a model with
    experts has a `channel` to its routers.
    """

    chunks: tuple[torch.nn.Module, ...]
    layers: tuple[range, ...]
    groups: Groups
    topology: Topology
    vocab_size: int
    embedder: Embedder
    head: Head | None
    channel: RouterChannel | None
    mtp: MegatronMtp | None = None
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The chunks without the gradient buffers that can wrap them."""
        return tuple(_model(chunk) for chunk in self.chunks)

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss: Consume[tuple[torch.Tensor, T]],
        forward_only: bool = False,
    ) -> list[T]:
        """Forward and, unless `forward_only`, backward; `loss` returns a scalar to differentiate
        and a value to keep.

        Returns the kept values, in order and without dummies, on the last stage; an empty list on
        the others.
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
        rows = None
        if self.channel is not None and not forward_only:
            rows = RoutedRows.of(microbatches, self.groups.cp.rank())

        def finish(
            microbatch: Microbatch, output: Callable[[], Output]
        ) -> tuple[torch.Tensor, torch.Tensor, Any]:
            value, kept = (output().nothing(), None) if microbatch.dummy else loss(output())
            # This count would divide gradients when they are reduced; ours are sums, so it has no
            # effect.
            return value, torch.ones((), dtype=torch.int, device=value.device), kept

        with torch.set_grad_enabled(not forward_only), routing(self.models, rows):
            return self._run(microbatches, finish, forward_only, False, rows=rows)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch], read: Consume[T]) -> list[T]:
        """Forward only, in eval mode; returns the result of `read` for each microbatch that is not
        a dummy, on the last stage.
        """
        return self._read(microbatches, read, None)

    @torch.no_grad()
    def forward_with_experts(
        self, microbatches: Sequence[Microbatch], read: Consume[T]
    ) -> tuple[list[T], list[torch.Tensor]]:
        """As `forward`, and on every rank the experts that tokens take in each microbatch that is
        not a dummy, int32 `[B, S, L, K]`.
        """
        assert self.channel is not None, "the model has no experts"
        recorded: list[Recorded] = [{} for _ in microbatches]
        kept = self._read(microbatches, read, recorded)
        pairs = zip(microbatches, recorded, strict=True)
        real = [(each, own) for each, own in pairs if not each.dummy]
        return kept, [self.channel.collect(each, own) for each, own in real]

    def _read(
        self,
        microbatches: Sequence[Microbatch],
        read: Consume[T],
        recorded: Sequence[Recorded] | None,
    ) -> list[T]:
        for chunk in self.chunks:
            chunk.eval()

        def finish(microbatch: Microbatch, output: Callable[[], Output]) -> T | None:
            return None if microbatch.dummy else read(output())

        return self._run(microbatches, finish, True, True, recorded)

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        finish: Callable[..., Any],
        forward_only: bool,
        collect: bool,
        recorded: Sequence[Recorded] | None = None,
        rows: RoutedRows | None = None,
    ) -> list[Any]:
        first = microbatches[0]
        set_text_length(self.models, first.text_length)
        several = len(self.chunks) > 1
        records = repeat(None) if recorded is None else recorded
        numbers = repeat(None) if rows is None else rows.numbers
        data = [
            zip(microbatches, numbers, records, repeat(held), zip(count(), repeat(chunk)))
            for chunk, held in enumerate(self.layers)
        ]
        schedule = get_forward_backward_func()
        config: Any = self.models[0].config
        communicator = None
        if config.variable_seq_lengths:
            # Megatron-Core's own would send the shape of each tensor first.
            shapes = [hidden_shape(each, config) for each in microbatches]
            communicator = DerivedShapes(self.groups.pp, config, shapes, forward_only)
        with _recording(self.recorder, self.models[0], SCORING if forward_only else TRAINING):
            kept: list[Any] = schedule(
                forward_step_func=partial(self._forward, finish),
                data_iterator=data if several else data[0],
                model=list(self.chunks) if several else self.chunks[0],
                num_microbatches=len(microbatches),
                # These two are of all microbatches, unless the communicator has the shape of each.
                seq_length=first.layout.full_length,
                micro_batch_size=first.layout.sources_CTR.size(2),
                forward_only=forward_only,
                collect_non_loss_data=collect,
                p2p_communicator=communicator,
                pg_collection=None if communicator is None else schedule_groups(),
            )
        if communicator is not None:
            communicator.finish()
        pairs = zip(kept, microbatches, strict=bool(kept))
        return [value for value, microbatch in pairs if not microbatch.dummy]

    def _forward(
        self,
        finish: Callable[..., Any],
        microbatches: Iterator[_Input],
        chunk: torch.nn.Module,
    ) -> tuple[torch.Tensor, Callable[..., Any]]:
        microbatch, numbers_RT, recorded, held, place = next(microbatches)
        layout, rank = microbatch.layout, self.groups.cp.rank()
        model: Any = _model(chunk)
        tokens_RT = layout.take(microbatch.tokens_BS, rank).T.contiguous()
        hidden_SRD: torch.Tensor | None = None
        deep: tuple[torch.Tensor, ...] = ()
        if model.pre_process:
            hidden_SRD, deep = self.embedder.enter(tokens_RT, microbatch)
            config = model.config
            needed = config.recompute_granularity or config.pipeline_model_parallel_size > 1
            if needed and torch.is_grad_enabled():
                # What is computed again, or by another stage, has gradients only if this needs
                # them, which the output of a frozen embedding does not.
                hidden_SRD.requires_grad_()
        positions_BS = self.embedder.positions(microbatch)
        blocks_B = self.embedder.find_blocks(microbatch)
        sequences = sequence_params(layout, self.groups.cp, positions_BS, deep, blocks_B)
        routers = self.channel and self.channel.params(microbatch, held, recorded)
        params = routers and MicrobatchParams(sequences=sequences, routers=routers)
        set_row_lengths(model, microbatch, rank)
        with hidden_states_of(model), before_final_norm(model) as taken:
            output = chunk(
                tokens_RT,
                None,
                None,
                hidden_SRD,
                packed_seq_params=params or sequences,
                padding_mask=numbers_RT,
            )
        if self.recorder.on:
            self.recorder.label(*place)
            if output.requires_grad:
                # In a backward pass, its output's gradient says which one it is.
                output.register_hook(lambda _: self.recorder.label(*place))

        def consume(hidden_TRD: torch.Tensor, **_: bool) -> Any:
            assert self.head is not None
            mtp = None if self.mtp is None else self.mtp.after(taken)
            made = partial(Output, hidden_TRD, microbatch, self.head, self.groups.cp, mtp)
            return finish(microbatch, made)

        return output, consume


@contextmanager
def _recording(recorder: Recorder, model: Any, name: str) -> Iterator[None]:
    """Record the body, a run of the schedule, as `name`, and each of its passes."""
    if not recorder.on:
        yield
        return
    kinds = {"forward-compute": FORWARD, "backward-compute": BACKWARD}

    def timer(kind: str, log_level: int | None = None) -> SimpleNamespace:
        """What Megatron-Core starts and stops around each pass of this kind."""
        if (recorded := kinds.get(kind)) is None:
            return SimpleNamespace(start=lambda **_: None, stop=lambda **_: None)
        return SimpleNamespace(
            start=lambda **_: recorder.begin(recorded), stop=lambda **_: recorder.end(recorded)
        )

    model.config.timers = timer
    try:
        with recorder.span(name):
            yield
    finally:
        model.config.timers = None


def _model(chunk: torch.nn.Module) -> torch.nn.Module:
    model: torch.nn.Module = getattr(chunk, "module", chunk)
    return model


@contextmanager
def hidden_states_of(model: torch.nn.Module) -> Iterator[None]:
    """Within this context a chunk returns hidden states `[T, R, D]` even if it holds the head."""
    chunk: Any = model
    holds_head = chunk.post_process
    chunk.post_process = False
    try:
        yield
    finally:
        chunk.post_process = holds_head
