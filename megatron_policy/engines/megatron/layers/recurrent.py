"""Mixers that hand a state on from token to token, between Megatron-Core's linear layers.

Tensor-parallel ranks share their heads. So do context-parallel ones, which exchange tokens for
heads before the recurrence and back after it: each then has all tokens of some heads.

Shapes: T positions of a context-parallel rank, S positions of all, R rows, N tokens of all rows, Q
sequences, F columns of the first projection, D channels of the convolution, W taps, H heads, V
inputs of the last projection.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_policy.converters.architecture import HeadRows, Recurrence
from megatron_policy.converters.architecture.part import Slabs
from megatron_policy.device import current_device, is_accelerated, to_device
from megatron_policy.engines.megatron.layers.norm import make_shard
from megatron_policy.engines.megatron.layers.sequences import SequenceParams
from megatron_policy.errors import ConfigError
from megatron_policy.extras import EXTRAS
from megatron_policy.recurrence.chunks import (
    SIZE,
    TOGETHER,
    Chunks,
    count_together,
    sequences_of,
)
from megatron_policy.recurrence.context_parallel import HeadExchange, share_heads
from megatron_policy.recurrence.convolution import Windows, convolve, convolve_step
from megatron_policy.recurrence.kernels import LARGEST_KEY, PACKAGE, Line

_log = logging.getLogger(__name__)

Sizes = tuple[tuple[int, int], ...]
"""Of each section of a projection its heads, and the columns of a head."""

State = tuple[torch.Tensor, ...]
"""What later tokens need of a sequence: the last inputs of the convolution `[Q, W - 1, D]` and, of
a mixer that has one, its memory `[Q, H, K, V]`.
"""


@dataclass(frozen=True)
class TokenSpan:
    """The tokens of a forward pass: where its sequences are, and what was before them."""

    lengths: tuple[int, ...]
    """Of the sequences of each row, with their filler."""
    rows: int
    past: State | None
    """None: the sequences begin here."""
    by_kernels: bool = False
    """Whether kernels go through them, of which one token has no need."""
    together: int = TOGETHER
    """Chunks that a scan computes at once."""

    @property
    def is_step(self) -> bool:
        """Whether there is one more token of each sequence."""
        return self.past is not None and self.lengths == (1,)

    @property
    def before_step(self) -> State:
        """What a step goes on from."""
        assert self.past is not None
        return self.past

    @property
    def recent(self) -> torch.Tensor | None:
        """The last inputs of the convolution."""
        return None if self.past is None else self.past[0]

    @property
    def memory(self) -> torch.Tensor | None:
        return None if self.past is None else self.past[1]

    @property
    def chunks(self) -> Chunks | Line:
        """What a scan goes through."""
        if self.by_kernels:
            return _make_line(self.lengths, self.rows, current_device())
        return _make_chunks(self.lengths, self.rows, self.together, current_device())

    def windows(self, taps: int) -> Windows | Line:
        """What a convolution with so many taps goes through."""
        if self.by_kernels:
            return _make_line(self.lengths, self.rows, current_device())
        return _make_windows(self.lengths, self.rows, taps, current_device())


# All layers of a microbatch, and those of one stage of several microbatches, ask for the same.
@lru_cache(maxsize=16)
def _make_chunks(
    lengths: tuple[int, ...], rows: int, together: int, device: torch.device
) -> Chunks:
    return Chunks.of(sequences_of(lengths, rows), together=together).moved(to_device)


@lru_cache(maxsize=16)
def _make_line(lengths: tuple[int, ...], rows: int, device: torch.device) -> Line:
    return Line.of(sequences_of(lengths, rows)).moved(to_device)


@lru_cache(maxsize=16)
def _make_windows(lengths: tuple[int, ...], rows: int, taps: int, device: torch.device) -> Windows:
    return Windows.of(sequences_of(lengths, rows), taps).moved(to_device)


@dataclass(frozen=True)
class HeadShare:
    """The heads that this rank computes, of those of its tensor-parallel rank."""

    sizes: Sizes
    """Of the first projection's sections."""
    channels_D: torch.Tensor | None = None
    """Which channels of the convolution they have; None: all."""
    heads_H: torch.Tensor | None = None

    def split(self, projected_NF: torch.Tensor, convolved: slice) -> tuple[torch.Tensor, ...]:
        """The sections by heads, `[N, H, columns]`; those that are convolved as one, `[N, D]`."""
        before, after = self.sizes[: convolved.start], self.sizes[convolved.stop :]
        channels = (1, sum(heads * width for heads, width in self.sizes[convolved]))
        sizes = (*before, channels, *after)
        parts = projected_NF.split([heads * width for heads, width in sizes], -1)
        return tuple(
            part if size is channels else part.unflatten(-1, size)
            for part, size in zip(parts, sizes, strict=True)
        )

    def of_channels(self, parameter_D: torch.Tensor) -> torch.Tensor:
        """The part of a parameter of the convolution."""
        return parameter_D if self.channels_D is None else parameter_D[self.channels_D]

    def of_heads(self, parameter_H: torch.Tensor) -> torch.Tensor:
        """The part of a parameter of the heads."""
        return parameter_H if self.heads_H is None else parameter_H[self.heads_H]


class RecurrentMixer(MegatronModule, ABC):
    """A mixer in the place of Megatron-Core's attention."""

    sections: ClassVar[tuple[HeadRows, ...]]
    """Those of its first projection."""
    convolved: ClassVar[slice]
    """Which of them pass through the convolution."""
    by_kernels = False
    """Whether kernels compute it; `choose_kernels` says so."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        part: Recurrence,
        pg_collection: ProcessGroupCollection | None = None,
        proj_bias: bool = False,
        conv_bias: bool = False,
        **_: Any,
    ) -> None:
        """`part` says its sizes; biases are those of both projections, and of the convolution."""
        super().__init__(config=config)
        self.layer_number, self.part = layer_number, part
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp, self.cp = groups.tp, groups.cp
        ranks = self.tp.size()
        given: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": proj_bias,
            "is_expert": False,
            "tp_group": self.tp,
        }
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, part.projected_size, gather_output=False, **given
        )
        self.out_proj = RowParallelLinear(
            part.inner_size,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **given,
        )
        self.conv1d = Taps(config, part.convolved_size // ranks, part.taps, conv_bias)
        sizes = tuple(self._cut(section) for section in self.sections)
        self.whole = HeadShare(sizes)
        self.columns_CF, self.own = self._share(sizes)
        held = part.split(ranks, self.cp.size()).count_slab(Slabs(1, SIZE, 1, 0))
        self.together = count_together(held)

    def _cut(self, section: HeadRows) -> tuple[int, int]:
        """This rank's part of a section; where heads are fewer than ranks, some rows of a head."""
        ranks, heads = self.tp.size(), getattr(self.part, section.heads)
        rows = section.rows if isinstance(section.rows, int) else getattr(self.part, section.rows)
        return (heads // ranks, rows) if heads >= ranks else (1, heads * rows // ranks)

    def _share(self, sizes: Sizes) -> tuple[torch.Tensor | None, HeadShare]:
        """The columns of the first projection for each context-parallel rank, and what this one
        computes.
        """
        ranks, rank = self.cp.size(), self.cp.rank()
        if ranks == 1:
            return None, self.whole
        device = current_device()

        def choose(sections: Sequence[tuple[int, int]]) -> torch.Tensor:
            return share_heads(sections, ranks)[rank].to(device)

        own = tuple((max(1, heads // ranks), width) for heads, width in sizes)
        channels_D = choose(sizes[self.convolved])
        heads_H = choose([(max(heads for heads, _ in sizes), 1)])
        return share_heads(sizes, ranks).to(device), HeadShare(own, channels_D, heads_H)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: SequenceParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[T, R, hidden]` to the same, and a bias to be added, as attention of Megatron-Core;
        under sequence parallelism at this rank's positions.
        """
        projected_TRF = self.project(hidden_states)
        exchange, share = None, self.whole
        if packed_seq_params is not None and packed_seq_params.order is not None:
            assert self.columns_CF is not None
            exchange = HeadExchange(packed_seq_params.order, packed_seq_params.context_group)
            projected_TRF, share = exchange.to_heads(projected_TRF, self.columns_CF), self.own
        positions, rows, _columns = projected_TRF.shape
        lengths = (positions,) if packed_seq_params is None else packed_seq_params.lengths
        past: State | None = None
        if inference_context is not None and inference_context.sequence_len_offset:
            past = inference_context.key_value_memory_dict[self.layer_number]
        span = TokenSpan(lengths, rows, past, self.by_kernels, self.together)
        mixed_NV, state = self.mix(projected_TRF.flatten(0, 1), share, span)
        if inference_context is not None:
            inference_context.key_value_memory_dict[self.layer_number] = state
        mixed_TRV = mixed_NV.unflatten(0, (positions, rows))
        if exchange is not None:
            mixed_TRV = exchange.to_tokens(mixed_TRV)
        mixed_TRV = self.finish(mixed_TRV, share)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.out_proj(mixed_TRV)
        return output

    def project(self, hidden_TRD: torch.Tensor) -> torch.Tensor:
        """What the mixer reads of `[T, R, hidden]`, in its sections."""
        projected: torch.Tensor
        projected, _bias = self.in_proj(hidden_TRD)
        return projected

    @abstractmethod
    def mix(
        self, projected_NF: torch.Tensor, share: HeadShare, span: TokenSpan
    ) -> tuple[torch.Tensor, State]:
        """What the heads of `share` make of the first projection's output, `[N, V]`, and what later
        tokens need.
        """

    def finish(self, mixed_TRV: torch.Tensor, share: HeadShare) -> torch.Tensor:
        """What `mix` leaves to do, when this rank has all of its channels of its tokens again."""
        return mixed_TRV

    def find_taps(self, share: HeadShare) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The convolution's weights `[D, W]` of these heads, and its biases `[D]`."""
        bias_D = self.conv1d.bias
        taps_DW = share.of_channels(self.conv1d.weight).squeeze(1)
        return taps_DW, None if bias_D is None else share.of_channels(bias_D)

    def convolve(
        self, x_ND: torch.Tensor, share: HeadShare, span: TokenSpan
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The convolved sections by heads, `[N, H, columns]`, after SiLU, and the last inputs of
        the convolution.
        """
        taps_DW, bias_D = self.find_taps(share)
        if span.is_step:
            mixed_ND, recent_QWD = convolve_step(x_ND, taps_DW, bias_D, span.before_step[0])
        else:
            windows = span.windows(self.part.taps)
            mixed_ND, recent_QWD = convolve(x_ND, taps_DW, bias_D, windows, span.recent)
        sizes = share.sizes[self.convolved]
        parts = mixed_ND.split([heads * width for heads, width in sizes], -1)
        by_heads = tuple(part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True))
        return by_heads, recent_QWD

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For Megatron-Core's checkpoints: parameters as ranks share them, with sections apart."""
        state = self.state_dict(prefix="", keep_vars=True)
        split = {
            name: cast(Any, parameter).partition_dim
            for name, parameter in self.named_parameters()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, split, sharded_offsets
        )
        parts = [
            (section.name, heads * width)
            for section, (heads, width) in zip(self.sections, self.whole.sizes, strict=True)
        ]
        for module, own in (("in_proj", parts), ("conv1d", parts[self.convolved])):
            for name in (f"{prefix}{module}.weight", f"{prefix}{module}.bias"):
                if name in sharded:
                    sharded[name] = _divide_rows(sharded[name], own)
        return sharded


def _divide_rows(tensor: ShardedTensor, parts: list[tuple[str, int]]) -> ShardedTensorFactory:
    """The tensor as one for each of these names, with so many rows of this rank each, as far as it
    reaches: later sections come from other projections.
    """
    empty = tensor.without_data()

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        whole, first, found = replace(empty, key=key, data=data, replica_id=replica_id), 0, []
        for name, rows in parts:
            if first == len(data):
                break
            (part,) = whole.narrow(0, first, rows)
            found.append(replace(part, key=f"{key}.{name}"))
            first += rows
        return found

    return ShardedTensorFactory(tensor.key, tensor.data, build, torch.cat, tensor.replica_id)


def choose_kernels(models: Iterable[torch.nn.Module], implementation: str) -> None:
    """Have the recurrences of `models` computed as policy.megatron_cfg.recurrence_impl says.
    ConfigError if kernels are asked for and cannot compute them.
    """
    modules = (module for model in models for module in model.modules())
    for mixer in (each for each in modules if isinstance(each, RecurrentMixer)):
        mixer.by_kernels = implementation == PACKAGE
        if not mixer.by_kernels:
            if is_accelerated():
                _say_that_recurrences_are_slow()
        elif lacking := _find_lacking(mixer):
            raise ConfigError(
                f"policy.megatron_cfg.recurrence_impl is '{PACKAGE}', but {lacking}; use 'torch'"
            )


def _find_lacking(mixer: RecurrentMixer) -> str | None:
    """Why kernels cannot compute the mixer; None if they can."""
    key, dtype = mixer.part.memory_size // mixer.part.inner_size, mixer.config.params_dtype
    if not is_accelerated():
        return "no GPU is visible"
    if find_spec(PACKAGE) is None:
        return f"{EXTRAS[PACKAGE].requirement} is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"in {dtype} they would multiply with fewer bits"
    return f"they have at most {LARGEST_KEY} channels of a key" if key > LARGEST_KEY else None


@cache
def _say_that_recurrences_are_slow() -> None:
    """Once."""
    _log.warning(
        "layers that hand on a state are computed by torch's operators, which is slow on a GPU: "
        "policy.megatron_cfg.recurrence_impl '%s' takes kernels (pip install '%s')",
        PACKAGE,
        EXTRAS[PACKAGE].requirement,
    )


class Taps(torch.nn.Module):
    """The parameters of a convolution of each channel alone, of this rank's channels."""

    def __init__(self, config: TransformerConfig, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = make_shard(config, channels, 1, taps)
        self.bias = make_shard(config, channels) if bias else None
