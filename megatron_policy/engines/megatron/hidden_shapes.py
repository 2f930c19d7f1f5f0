"""Shapes of what pipeline stages send each other, derived from the microbatches.

Where microbatches differ in length, Megatron-Core's stages send each other the shape of every
tensor first, and the host waits for it. Every stage of a pipeline has cut the same microbatches, so
here each finds the shapes itself and none is sent. Every tensor that is sent is compared with the
shape that its receiver expects.

Shapes: T positions of a context-parallel rank, divided by the tensor-parallel ranks if they split
sequences; R rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.packing.microbatch import Microbatch

Shape = tuple[int, ...]

NOTHING: Shape = (0, 0, 0)
"""What Megatron-Core has in place of a shape if nothing is received."""


def hidden_shape(microbatch: Microbatch, config: TransformerConfig) -> Shape:
    """`[T, R, D]` of the hidden states of `microbatch` between two stages, on every rank."""
    _, positions, rows = microbatch.layout.sources_CTR.shape
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    assert positions % split == 0, (positions, split)
    return positions // split, rows, config.hidden_size


class StageLink:
    """Tensors that travel between two stages in one direction: the shape of each, in their order.

    The schedule table has the order in which every stage computes microbatches and chunks, and with
    it the order of what it sends forward. What is sent backward has the same order of microbatches,
    from the last chunk to the first. If the link `wraps`, it connects the last stage with the
    first, and one of a microbatch's chunks has nothing to send.
    """

    def __init__(
        self, name: str, shapes: Sequence[Shape], chunks: int, group_size: int, wraps: bool
    ) -> None:
        self.name = name
        table = get_schedule_table(len(shapes), chunks, group_size)
        sending = chunks - 1 if wraps else chunks
        self._shapes = shapes
        self._order = [number for number, chunk in table if chunk < sending]
        self._done = 0

    def next(self) -> tuple[int, Shape]:
        """The next tensor's microbatch and its shape."""
        assert self._done < len(self._order), (
            f"{self.name}: the schedule exchanges more than the {len(self._order)} tensors of "
            f"{len(self._shapes)} microbatches"
        )
        number = self._order[self._done]
        self._done += 1
        return number, self._shapes[number]

    def check_next(self, tensor: torch.Tensor) -> None:
        """AssertionError if `tensor`, which is about to be sent, is not of the next shape."""
        number, shape = self.next()
        assert tuple(tensor.shape) == shape, (
            f"{self.name}: microbatch {number} has the shape {list(tensor.shape)}, but the stage "
            f"that receives it expects {list(shape)}, derived from its layout"
        )

    def finish(self) -> None:
        """AssertionError if the schedule has left out tensors."""
        assert self._done == len(self._order), (
            f"{self.name}: the schedule has exchanged {self._done} of {len(self._order)} tensors"
        )


class DerivedShapes(P2PCommunicator):  # type: ignore[misc]
    """Megatron-Core's communicator for one run of its schedule over microbatches of these `shapes`;
    it sends no shapes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: TransformerConfig,
        shapes: Sequence[Shape],
        forward_only: bool,
    ) -> None:
        super().__init__(pp_group=group, config=config)
        first, last = group.rank() == 0, group.rank() == group.size() - 1
        chunks = config.virtual_pipeline_model_parallel_size or 1
        size = config.microbatch_group_size_per_vp_stage if chunks > 1 else len(shapes)
        backward = () if forward_only else shapes
        self._sent_next = StageLink("sent forward", shapes, chunks, size, last)
        self._received_prev = StageLink("received forward", shapes, chunks, size, first)
        self._sent_prev = StageLink("sent backward", backward, chunks, size, first)
        self._received_next = StageLink("received backward", backward, chunks, size, last)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """The shapes of what is received from the previous and from the next stage.

        Megatron-Core calls this once before every exchange if lengths vary.
        """
        if tensor_send_next is not None:
            self._sent_next.check_next(tensor_send_next)
        if tensor_send_prev is not None:
            self._sent_prev.check_next(tensor_send_prev)
        from_prev = self._received_prev.next()[1] if recv_prev else NOTHING
        from_next = self._received_next.next()[1] if recv_next else NOTHING
        return from_prev, from_next

    def finish(self) -> None:
        """AssertionError unless the schedule has exchanged everything it should have."""
        for link in (self._sent_next, self._received_prev, self._sent_prev, self._received_next):
            link.finish()
