"""What a policy needs from a training engine on one rank: its part of the model, microbatches
through it, gradients, optimizer, and state as ranges of tensors.

Policy, training, checkpoint, refit and memory use these protocols only; `engines/` has the
implementations. Every method marked "collective" is called by all ranks of the policy in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from megatron_policy.adapters.table import AdapterSpec
from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.table import Entry, Table
from megatron_policy.device.timing import Recorder, Stopwatch
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.memory.states import Storages
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement, Topology
from megatron_policy.weights.load import Held

T = TypeVar("T")
Loss = Callable[[Output], tuple[torch.Tensor, T]]
"""For one microbatch: a scalar to differentiate, and a value to keep."""

REDUCE = "reduce"
"""The part of a step in which gradients are reduced, as far as nothing else runs meanwhile."""

MAIN = "fp32_param"
KINDS = (MAIN, "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Kinds of optimizer state, in the order in which a parameter's are returned."""


class NotFiniteError(ArithmeticError):
    """The gradient norm, the same on every rank, is NaN or infinite: `norm`."""

    def __init__(self, norm: float) -> None:
        super().__init__(f"the gradient's norm is {norm}")
        self.norm = norm


@dataclass(frozen=True)
class StateTensor:
    """One kind of optimizer state of a part of one parameter."""

    parameter: torch.Tensor
    """The model's parameter itself: callers compare it by identity."""
    kind: str
    """`MAIN`, or what the optimizer calls it: one of `KINDS` for those of Megatron-Core."""
    tensor: torch.Tensor
    """`[last - first]`, contiguous and live: writing to it changes the optimizer."""
    first: int
    last: int
    """The range of elements of the flattened parameter to which it belongs."""


class OptimizerState(Protocol):
    """The optimizer's state on this rank, of all parameters that this rank trains."""

    @property
    def distributed(self) -> bool:
        """Whether data-parallel ranks hold different ranges of it; the same on every rank."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state that the optimizer keeps for each parameter, besides `MAIN`; the same
        on every rank.
        """

    @property
    def nbytes(self) -> int:
        """The bytes of all that `tensors` returns once all state exists."""

    def tensors(self) -> list[StateTensor]:
        """The state that exists now; without parameters of which this rank has no range."""

    def materialize(self) -> None:
        """Make the state that the first step would make: moments of zeros and counts of 0."""

    @property
    def step(self) -> int | None:
        """The optimizer's own step count; None if it has none."""

    def set_step(self, step: int) -> None:
        """Continue the count from here; call `materialize` first."""

    def restart(self) -> None:
        """Reset to a new optimizer over the current parameters: no moments, no steps."""


class Trainable(Protocol):
    """What trains an engine's model: gradient buffers, optimizer and learning-rate schedule."""

    @property
    def state(self) -> OptimizerState:
        """The optimizer's state."""

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""

    @property
    def weight_decay(self) -> float:
        """The weight decay of the next step."""

    @property
    def loss_scale(self) -> float | None:
        """The factor on the losses of the next step, by which gradients are divided again; None
        unless the precision is float16.
        """

    @property
    def stopwatch(self) -> Stopwatch:
        """Where training has its parts timed; the engine itself times `REDUCE`. Its recorder is
        the engine's.
        """

    def zero_gradients(self) -> None:
        """Drop all gradients."""

    def accumulating(self) -> AbstractContextManager[None]:
        """In this context `forward_backward` adds to each rank's own gradients and reduces
        nothing.
        """

    def reduce_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients by `factor` and reduce them once; collective."""

    def step(self) -> float:
        """Clip, update the parameters, and return the whole model's gradient norm before clipping;
        collective. NotFiniteError, on every rank and before anything has changed, if that norm is
        not finite.
        """

    def skip_step(self) -> bool:
        """After a NotFiniteError: lower the factor on losses, in whose gradients float16 has
        overflowed. False if a lower one would not help: none is used, or it is fixed, or the least.
        """

    def routing_metrics(self) -> dict[str, float]:
        """What the routers of experts did in the step just taken, by name, the same on every rank;
        empty without experts; collective.
        """

    def advance_schedule(self, samples: int) -> None:
        """Advance the learning-rate schedule by this many samples."""

    def settle(self) -> None:
        """Wait for parameters that an overlapped gather has not delivered yet."""

    def schedule_state(self) -> dict[str, Any]:
        """Where the schedule is, and its settings: numbers and strings."""

    def restore_schedule(self, state: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
        """Continue from where `state` was taken, by the configuration's own schedule.

        Returns the settings that differ, each as (in `state`, configured). CheckpointError if
        `state` has no count.
        """


class Adapters(Protocol):
    """Low-rank adapters on a rank's part of a model: all that is trained of it, but for a scalar
    head, which belongs to them here.
    """

    @property
    def table(self) -> Table:
        """Their entries, with the tensors that PEFT has for them. Those of a scalar head adapt
        nothing.
        """

    @property
    def held(self) -> Held:
        """This rank's adapters, and its scalar head."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes in which they are handed over, by PEFT's names."""

    @property
    def spec(self) -> AdapterSpec:
        """Their rank and scale, and the weights that they adapt."""

    def merged(self, entry: Entry, weight: torch.Tensor) -> torch.Tensor | None:
        """A new tensor: the weight of `entry` on this rank with its adapter's product added; None
        if no adapter adapts it. The weight is unchanged. While adapters are `off` it is itself
        returned.
        """

    def off(self) -> AbstractContextManager[None]:
        """In this context the model computes without its adapters, with the base's scalar head."""


class CachedModel(Protocol):
    """A model that keeps the keys and values of the tokens that it has read."""

    def logits_after(self, tokens_BT: torch.Tensor, position: int) -> torch.Tensor | None:
        """The logits `[B, V]`, at temperature 1, of the token at `position`, which grows from call
        to call; None on ranks without the head. Collective over the ranks that share the model, and
        over replicas if it `joins_replicas`.
        """


NewCache = Callable[[BatchedDataDict, int], CachedModel]
"""Opens a model with an empty cache for prompts that grow to that many positions: `input_ids`
`[B, S]`, `input_lengths` `[B]` and the architecture's `attachments`. Collective as `logits_after`.
"""


class TrainingEngine(Protocol):
    """One rank's part of a model, built and loaded."""

    @property
    def place(self) -> Placement:
        """This rank's place among those that hold the weights: which part of each it has. Shards
        count as tensor-parallel ranks there, whatever they do with a batch.
        """

    @property
    def joins_replicas(self) -> bool:
        """Whether ranks of one data-parallel replica need weights that another's hold: then all
        replicas must run their forward passes together.
        """

    @property
    def groups(self) -> Groups:
        """The process groups it belongs to."""

    @property
    def table(self) -> Table:
        """The names and shapes of the model, on both sides of the conversion."""

    @property
    def held(self) -> Held:
        """This rank's parameters and persistent buffers with their rows, in the table's order."""

    @property
    def source_dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each Hugging Face tensor in the checkpoint."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype of the parameters in training."""

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, not counting padding."""

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes losses."""

    @property
    def trainable(self) -> Trainable | None:
        """Gradients and optimizer; None if the policy has no optimizer."""

    @property
    def adapters(self) -> Adapters | None:
        """Adapters of `held`, which then keeps its values; None without any."""

    @property
    def recorder(self) -> Recorder:
        """Where the engine records, while it is on, each run over microbatches and each pass, and
        `REDUCE`.
        """

    @property
    def pending_reads(self) -> PendingReads:
        """Threads that read this memory; whatever changes or moves it waits for them."""

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: Loss[T], forward_only: bool = False
    ) -> list[T]:
        """Run the microbatches in training mode; collective. Gradients are accumulated and, unless
        `accumulating`, summed over data-parallel ranks.

        Returns what `loss` kept, in order and without dummies, on the last stage; nothing on the
        others.
        """

    def forward(self, microbatches: Sequence[Microbatch], read: Callable[[Output], T]) -> list[T]:
        """Run the microbatches in evaluation mode; collective. Returns the result of `read` for
        each, as `forward_backward` does.
        """

    def forward_with_experts(
        self, microbatches: Sequence[Microbatch], read: Callable[[Output], T]
    ) -> tuple[list[T], list[torch.Tensor]]:
        """As `forward`; also, on every rank, the experts that tokens take in each microbatch that
        is not a dummy: int32 `[B, S, L, K]` for its B rows of S positions, the L layers with
        experts of the model and the K experts of a token; -1 beyond `input_lengths`. Only for
        models with experts.
        """

    def share_tensor(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """The last stage's tensor, on every stage; `like` gives its shape and dtype; collective."""

    def share_object(self, value: T | None) -> T:
        """The last stage's picklable value, on every stage; collective."""

    def inference(self) -> AbstractContextManager[NewCache]:
        """A context in which tokens are read one after another."""

    def decoder_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """This rank's decoder layers by global number."""

    def volatile_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers that forward passes change before it is known whether a step is taken: what
        routers have counted.
        """

    def random_states(self) -> dict[str, torch.Tensor]:
        """The engine's own random number generators, besides the process's, by name."""

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set them to what `random_states` returned."""

    def storages(self) -> Storages:
        """The device memory of each kind, each storage once, in the same order at every call."""

    def forget_gradients(self) -> None:
        """Drop gradients outside the buffers, which a step recreates."""

    def manages(self, model: object) -> bool:
        """Whether `model` is one of this engine's modules, wrapped for training or not."""

    def close(self) -> None:
        """Release what outlives the objects: process groups, and references in cycles."""


class EngineBuilder(Protocol):
    """Builds an engine."""

    def prepare(self) -> None:
        """Prepare this process before it joins any process group."""

    def build(
        self,
        config: PolicyConfig,
        table: Table,
        topology: Topology,
        *,
        init_optimizer: bool,
        timeout_s: float,
        source_dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> TrainingEngine:
        """Build and load this rank's part of the model; the default process group exists and fits
        `topology`. No collective waits longer than `timeout_s` seconds. ConfigError if this process
        holds a policy that this one cannot be beside.

        With `source_dtypes`, which gives the export dtype of each HF tensor, no weights are read:
        parameters and persistent buffers are as `mark_unfilled` leaves them. CheckpointError if a
        tensor has no dtype there. After an error no process group made here is left.
        """
