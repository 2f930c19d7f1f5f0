"""A second training engine, of plain torch and one process: it proves that policy, training,
checkpoint and refit need nothing of Megatron-Core but what `interfaces.engine` says.

It computes dense decoders with RMS norms, rotary embeddings, grouped queries and gated SiLU MLPs.
Module as a whole is an `EngineBuilder`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split
from megatron_policy.converters.architecture.traits import QkNorm
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.rows import Role
from megatron_policy.converters.table import Table
from megatron_policy.device.timing import Recorder, Stopwatch
from megatron_policy.errors import CheckpointError
from megatron_policy.interfaces.engine import NotFiniteError, StateTensor
from megatron_policy.lm_head.output import Output
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.memory.states import Kind, Storages
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.packing.tokens import TokenLayout, padded_layout
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement, Topology
from megatron_policy.weights.load import (
    DTYPES,
    Held,
    held_entries,
    load_parameters,
    mark_unfilled,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


def prepare() -> None:
    """Nothing: any number of such policies can be in a process."""


def build(
    config: PolicyConfig,
    table: Table,
    topology: Topology,
    *,
    init_optimizer: bool,
    timeout_s: float,
    source_dtypes: Mapping[str, torch.dtype] | None = None,
) -> PlainEngine:
    """See `EngineBuilder`."""
    place = Placement(
        topology, topology.coords(0), layer_split(config, table.architecture, topology)
    )
    model = Decoder(table, DTYPES[config.precision])
    held = held_entries([model], table, place)
    if source_dtypes is None:
        with HfReader(config.model_name) as reader:
            load_parameters(held, reader, table, place)
            source_dtypes = dict(reader.dtypes)
    else:
        mark_unfilled(held)
    trainable = Trainable(config, held) if init_optimizer else None
    temperature = (config.generation and config.generation.temperature) or 1.0
    group = dist.group.WORLD
    assert group is not None
    groups = Groups(group, group, group, group, group)
    return PlainEngine(
        place, groups, table, held, source_dtypes, DTYPES[config.precision], model, trainable,
        PendingReads(), temperature,
    )  # fmt: skip


class Decoder(torch.nn.Module):
    """Parameters under Megatron-Core's names, since those are the table's."""

    def __init__(self, table: Table, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = table.architecture
        for entry in table.entries_of(range(self.shape.num_layers), first=True, last=True):
            *path, leaf = entry.megatron.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            size = entry.row.local_shape(self.shape, 1)
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(size, dtype=dtype)))

    def forward(self, tokens_RT: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        """Hidden states `[T, R, D]`."""
        lengths = torch.tensor([segment.length for segment in layout.segments])
        segment_T = torch.arange(len(lengths)).repeat_interleave(lengths)
        mask_TT = (segment_T[:, None] == segment_T[None]).tril()
        positions_T = layout.positions_CT[0]
        x = F.embedding(tokens_RT, self._weight("embedding.word_embeddings.weight"))
        for layer in range(self.shape.num_layers):
            name = f"decoder.layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm.weight")
            x = x + self._attention(normed, f"{name}.self_attention", mask_TT, positions_T)
            x = x + self._mlp(self._norm(x, f"{name}.pre_mlp_layernorm.weight"), f"{name}.mlp")
        return self._norm(x, "decoder.final_layernorm.weight").transpose(0, 1)

    def head(self) -> torch.Tensor:
        """`[V, D]`, without what pads the vocabulary."""
        name = "embedding.word_embeddings.weight" if self.shape.tied else "output_layer.weight"
        return self._weight(name)[: self.shape.vocab_size]

    def _weight(self, name: str) -> torch.Tensor:
        return self.get_parameter(name)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        biases = dict(self.named_parameters())
        return F.linear(x, self._weight(f"{name}.weight"), biases.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weight(name), self.shape.layernorm_epsilon)

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = self._linear(x, f"{name}.linear_fc1").chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, f"{name}.linear_fc2")

    def _attention(
        self, x: torch.Tensor, name: str, mask_TT: torch.Tensor, positions_T: torch.Tensor
    ) -> torch.Tensor:
        shape = self.shape
        mixer = shape.mixer
        groups, size = mixer.num_query_groups, mixer.kv_channels
        each = mixer.num_attention_heads // groups  # queries of a group, then its key, its value
        heads = self._linear(x, f"{name}.linear_qkv").unflatten(-1, (groups, each + 2, size))
        q, k, v = heads.split([each, 1, 1], dim=-2)
        if mixer.qk_norm is QkNorm.PER_HEAD:
            q = self._norm(q, f"{name}.q_layernorm.weight")
            k = self._norm(k, f"{name}.k_layernorm.weight")
        q, k, v = (
            t.movedim(1, 3) for t in (self._turn(q, positions_T), self._turn(k, positions_T), v)
        )
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(size)
        weights = scores.masked_fill(~mask_TT, -math.inf).softmax(-1)
        return self._linear((weights @ v).movedim(3, 1).flatten(2), f"{name}.linear_proj")

    def _turn(self, x: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotary embedding (Su et al. 2021) of `[R, T, groups, heads, size]`."""
        half = torch.arange(0, x.size(-1), 2).double() / x.size(-1)
        angles = positions_T[:, None].double() / self.shape.mixer.rope.base**half
        angles = torch.cat([angles, angles], -1)[:, None, None]
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


@dataclass(frozen=True)
class Head:
    """See `LanguageModelHead`; never a scalar one."""

    weight: torch.Tensor
    temperature: float
    scalar: None = None

    def at(self, temperature: float) -> Head:
        return replace(self, temperature=temperature)

    @property
    def plain(self) -> Head:
        return replace(self, temperature=1.0)

    @property
    def unfiltered(self) -> Head:
        return self

    def whole(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        return hidden_SRD

    def logits(self, hidden_SRD: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_SRD, self.weight).float() / self.temperature

    def scores(
        self, hidden_ND: torch.Tensor, targets: torch.Tensor, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs_NV = self.logits(hidden_ND).log_softmax(-1)
        wanted = targets if targets.dim() == 2 else targets[:, None]
        found = logprobs_NV.gather(-1, wanted).view(targets.shape)
        return found, -(logprobs_NV.exp() * logprobs_NV).sum(-1) if entropy else None

    def topk(self, hidden_ND: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(self.logits(hidden_ND).topk(k))  # type: ignore[return-value]


class Trainable:
    """See `interfaces.engine.Trainable`: torch's AdamW, and a constant learning rate."""

    def __init__(self, config: PolicyConfig, held: Held) -> None:
        settings = config.megatron_cfg.optimizer
        self._parameters = [p for _, p in held]
        self.stopwatch = Stopwatch()
        self._clip, self._samples = settings.clip_grad, 0
        decaying = [p for entry, p in held if entry.row.role is Role.MATRIX]
        others = [p for entry, p in held if entry.row.role is not Role.MATRIX]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decaying, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )

    @property
    def state(self) -> OptimizerState:
        return OptimizerState(self.optimizer, self._parameters)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        return float(self.optimizer.param_groups[0]["weight_decay"])

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad()

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_gradients(self, factor: float) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def step(self) -> float:
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self._parameters]))
        if not math.isfinite(norm):
            raise NotFiniteError(norm)
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self.optimizer.step()
        return norm

    @property
    def loss_scale(self) -> None:
        return None

    def skip_step(self) -> bool:
        return False

    def routing_metrics(self) -> dict[str, float]:
        return {}

    def advance_schedule(self, samples: int) -> None:
        self._samples += samples

    def settle(self) -> None:
        pass

    def schedule_state(self) -> dict[str, Any]:
        return {"num_steps": self._samples}

    def restore_schedule(self, state: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
        if not isinstance(state.get("num_steps"), int):
            raise CheckpointError("the checkpoint does not say how far its schedule has advanced")
        self._samples = state["num_steps"]
        return {}


@dataclass(frozen=True)
class OptimizerState:
    """See `interfaces.engine.OptimizerState`."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[torch.Tensor]
    distributed: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        return MOMENTS

    @property
    def nbytes(self) -> int:
        return sum(len(MOMENTS) * parameter.nbytes for parameter in self.parameters)

    def tensors(self) -> list[StateTensor]:
        return [
            StateTensor(p, kind, self.optimizer.state[p][kind].view(-1), 0, p.numel())
            for p in self.parameters
            for kind in MOMENTS
            if kind in self.optimizer.state[p]
        ]

    def materialize(self) -> None:
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for kind in MOMENTS:
                state.setdefault(kind, torch.zeros_like(parameter))

    @property
    def step(self) -> int | None:
        (count,) = {int(self.optimizer.state[p].get("step", 0)) for p in self.parameters}
        return count

    def set_step(self, step: int) -> None:
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"].fill_(step)

    def restart(self) -> None:
        self.optimizer.state.clear()


@dataclass(frozen=True)
class PlainEngine:
    """See `TrainingEngine`."""

    place: Placement
    groups: Groups
    table: Table
    held: Held
    source_dtypes: Mapping[str, torch.dtype]
    precision: torch.dtype
    model: Decoder
    trainable: Trainable | None
    pending_reads: PendingReads
    temperature: float
    is_last_stage: bool = True
    joins_replicas: bool = False
    adapters: None = None

    @property
    def recorder(self) -> Recorder:
        return Recorder() if self.trainable is None else self.trainable.stopwatch.recorder

    @property
    def vocab_size(self) -> int:
        return self.table.architecture.vocab_size

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss: Callable[[Output], tuple[torch.Tensor, Any]],
        forward_only: bool = False,
    ) -> list[Any]:
        kept = []
        with torch.set_grad_enabled(not forward_only):
            for microbatch in microbatches:
                output = self._output(microbatch)
                value, found = (output.nothing(), None) if microbatch.dummy else loss(output)
                kept += [] if microbatch.dummy else [found]
                if not forward_only:
                    value.backward()
        return kept

    @torch.no_grad()
    def forward(
        self, microbatches: Sequence[Microbatch], read: Callable[[Output], Any]
    ) -> list[Any]:
        return [read(self._output(each)) for each in microbatches if not each.dummy]

    def forward_with_experts(
        self, microbatches: Sequence[Microbatch], read: Callable[[Output], Any]
    ) -> tuple[list[Any], list[torch.Tensor]]:
        raise AssertionError("no model here has experts")

    def _output(self, microbatch: Microbatch) -> Output:
        layout = microbatch.layout
        hidden_TRD = self.model(layout.take(microbatch.tokens_BS, 0).T, layout)
        return Output(hidden_TRD, microbatch, self._head(), self.groups.cp)

    def _head(self) -> Head:
        return Head(self.model.head(), self.temperature)

    def share_tensor(self, tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        assert tensor is not None
        return tensor

    def share_object(self, value: Any) -> Any:
        return value

    @contextmanager
    def inference(self) -> Iterator[Callable[[int, int], PlainEngine]]:
        yield lambda rows, positions: self

    def logits_after(self, tokens_BT: torch.Tensor, position: int) -> torch.Tensor:
        """Without a cache: each text from its beginning for every token."""
        layout = padded_layout(len(tokens_BT), position, 1, 1)
        return self._head().plain.logits(self.model(tokens_BT[:, :position], layout)[-1])

    def decoder_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        layers = self.model.get_submodule("decoder.layers")
        return ((int(name), layer) for name, layer in layers.named_children())

    def volatile_buffers(self) -> Iterator[torch.Tensor]:
        return iter(())

    def random_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        assert not states

    def storages(self) -> Storages:
        state = [] if self.trainable is None else self.trainable.state.tensors()
        tensors = {
            Kind.PARAMETERS: [p for _, p in self.held],
            Kind.GRADIENTS: [p.grad for _, p in self.held if p.grad is not None],
            Kind.OPTIMIZER: [each.tensor for each in state],
        }
        return {kind: [t.untyped_storage() for t in found] for kind, found in tensors.items()}

    def forget_gradients(self) -> None:
        if self.trainable is not None:
            self.trainable.zero_gradients()

    def manages(self, model: object) -> bool:
        return model is self.model

    def close(self) -> None:
        pass
