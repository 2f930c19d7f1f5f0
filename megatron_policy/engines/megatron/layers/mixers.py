"""Gated delta nets, Mamba2 and short convolutions as a Megatron-Core layer's mixer.

Shapes: N tokens, R rows, S positions, Q sequences, F columns of the first projection, D channels of
the convolution, W taps, H heads, G key heads or groups, K key channels or state, V value channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_policy.converters.architecture import (
    Beside,
    ChannelDeltaNet,
    DeltaNet,
    Mamba2,
    Recurrence,
    ShortConvolution,
    channel_delta_net,
    delta_net,
    mamba2,
    short_convolution,
)
from megatron_policy.device import current_device
from megatron_policy.engines.megatron.layers.norm import WholeLinear, make_shard, sum_over_ranks
from megatron_policy.engines.megatron.layers.recurrent import (
    HeadShare,
    RecurrentMixer,
    State,
    TokenSpan,
)
from megatron_policy.recurrence.convolution import convolve_step, gated_convolve
from megatron_policy.recurrence.delta_rule import delta_rule, delta_step
from megatron_policy.recurrence.gates import (
    Activation,
    gate_then_normalise,
    log_decay,
    normalise,
    normalise_then_gate,
    sum_squares,
    time_steps,
    write_strength,
)
from megatron_policy.recurrence.state_space import state_space, state_space_step


def mixer_spec(part: Recurrence) -> ModuleSpec:
    """The spec that Megatron-Core builds a layer's mixer from."""
    return ModuleSpec(module=MIXERS[type(part)], params={"part": part})


class MixerLayer(TransformerLayer):
    """A decoder layer whose mixer goes by another name than `self_attention`, in checkpoints too;
    Megatron-Core's forward pass finds it by both.
    """

    def __init__(self, *args: Any, place: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules[place] = self._modules.pop("self_attention")
        self._place = place

    @property
    def self_attention(self) -> Any:
        """The mixer."""
        return self._modules[self._place]


class SideBySideLayer(TransformerLayer):
    """A decoder layer with a second mixer, which reads what its attention reads."""

    def __init__(self, *args: Any, beside: Beside, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = {"config": self.config, "pg_collection": kwargs.get("pg_collection")}
        # Generation keeps its state under this number, and attention's keys under the layer's.
        given["layer_number"] = -self.layer_number
        self.mixer = build_module(mixer_spec(beside.mixer), **given)
        self._beside = beside
        self.self_attention.register_forward_hook(self._add_mixer, with_kwargs=True)

    def _add_mixer(
        self, _attention: Any, args: Any, given: Any, attended: Any
    ) -> tuple[torch.Tensor, None]:
        """What both mixers give, for what attention gives; neither has a bias."""
        (first, bias), (second, other_bias) = attended, self.mixer(*args, **given)
        assert bias is None and other_bias is None
        return self._beside.scale_of_first * first + self._beside.scale * second, None


class DeltaNetMixer(RecurrentMixer):
    """A gated delta net; see `converters.architecture.DeltaNet`."""

    part: DeltaNet
    sections = (
        delta_net.QUERY,
        delta_net.KEY,
        delta_net.VALUE,
        delta_net.GATE,
        delta_net.BETA,
        delta_net.ALPHA,
    )
    convolved = slice(0, 3)

    def __init__(self, config: TransformerConfig, part: DeltaNet, **given: Any) -> None:
        super().__init__(config=config, part=part, **given)
        heads = part.num_value_heads // self.tp.size()
        self.A_log, self.dt_bias = make_shard(config, heads), make_shard(config, heads)
        epsilon = part.norm_epsilon or config.layernorm_epsilon
        self.out_norm = HeadNorm(config, part.value_head_dim, epsilon, self.tp)

    def mix(
        self, projected_NF: torch.Tensor, share: HeadShare, span: TokenSpan
    ) -> tuple[torch.Tensor, State]:
        convolved_ND, gate_NHV, beta_NH1, alpha_NH1 = share.split(projected_NF, self.convolved)
        (q_NGK, k_NGK, v_NHV), recent_QWD = self.convolve(convolved_ND, share, span)
        A_log_H, dt_bias_H = share.of_heads(self.A_log), share.of_heads(self.dt_bias)
        decay_NH = log_decay(alpha_NH1.squeeze(-1), A_log_H, dt_bias_H)
        strength_NH = write_strength(beta_NH1.squeeze(-1), self.part.doubled)
        inputs = (q_NGK, k_NGK, v_NHV, decay_NH, strength_NH)
        out_NHV, memory_QHKV = _apply_delta_rule(inputs, span)
        return self.out_norm(out_NHV, gate_NHV).flatten(1), (recent_QWD, memory_QHKV)


class ChannelDeltaNetMixer(RecurrentMixer):
    """Kimi delta attention; see `converters.architecture.ChannelDeltaNet`."""

    part: ChannelDeltaNet
    sections = (
        channel_delta_net.QUERY,
        channel_delta_net.KEY,
        channel_delta_net.VALUE,
        channel_delta_net.BETA,
        channel_delta_net.GATE,
        channel_delta_net.ALPHA,
    )
    convolved = slice(0, 3)

    def __init__(self, config: TransformerConfig, part: ChannelDeltaNet, **given: Any) -> None:
        super().__init__(config=config, part=part, **given)
        ranks = self.tp.size()
        self.gate_down, self.gate_up = self._make_gate()
        self.decay_down, self.decay_up = self._make_gate()
        self.A_log = make_shard(config, part.num_heads // ranks)
        self.dt_bias = make_shard(config, part.inner_size // ranks)
        epsilon = config.layernorm_epsilon
        self.out_norm = HeadNorm(config, part.head_dim, epsilon, self.tp, torch.sigmoid)

    def _make_gate(self) -> tuple[WholeLinear, ColumnParallelLinear]:
        """Projections of low rank, of which each rank has the whole first one."""
        up = ColumnParallelLinear(
            self.part.head_dim,
            self.part.inner_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            is_expert=False,
            tp_group=self.tp,
        )
        return WholeLinear(self.config, self.config.hidden_size, self.part.head_dim), up

    def project(self, hidden_TRD: torch.Tensor) -> torch.Tensor:
        gates = (self.gate_down, self.gate_up), (self.decay_down, self.decay_up)
        expanded = [up(down(hidden_TRD)[0])[0] for down, up in gates]
        return torch.cat([super().project(hidden_TRD), *expanded], -1)

    def mix(
        self, projected_NF: torch.Tensor, share: HeadShare, span: TokenSpan
    ) -> tuple[torch.Tensor, State]:
        convolved_ND, beta_NH1, gate_NHV, alpha_NHK = share.split(projected_NF, self.convolved)
        (q_NHK, k_NHK, v_NHV), recent_QWD = self.convolve(convolved_ND, share, span)
        dt_bias_HK = share.of_heads(self.dt_bias.unflatten(0, (-1, self.part.head_dim)))
        decay_NHK = log_decay(alpha_NHK, share.of_heads(self.A_log).unsqueeze(-1), dt_bias_HK)
        inputs = (q_NHK, k_NHK, v_NHV, decay_NHK, write_strength(beta_NH1.squeeze(-1)))
        out_NHV, memory_QHKV = _apply_delta_rule(inputs, span)
        return self.out_norm(out_NHV, gate_NHV).flatten(1), (recent_QWD, memory_QHKV)


def _apply_delta_rule(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    span: TokenSpan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What heads read `[N, H, V]`, and the states after the span; `inputs` are queries, keys,
    values, decays and the strengths of corrections.
    """
    if span.is_step:
        return delta_step(*inputs, span.before_step[1])
    return delta_rule(*inputs, span.chunks, span.memory)


class Mamba2Mixer(RecurrentMixer):
    """Mamba2; see `converters.architecture.Mamba2`."""

    part: Mamba2
    sections = (mamba2.GATE, mamba2.INPUT, mamba2.INTO, mamba2.OUT, mamba2.STEP)
    convolved = slice(1, 4)

    def __init__(self, config: TransformerConfig, part: Mamba2, **given: Any) -> None:
        biases = {"proj_bias": part.proj_bias, "conv_bias": part.conv_bias}
        super().__init__(config=config, part=part, **biases, **given)
        heads = part.num_heads // self.tp.size()
        self.A_log, self.D = make_shard(config, heads), make_shard(config, heads)
        self.dt_bias = make_shard(config, heads)
        self.norm = GroupNorm(config, heads * part.head_dim) if part.norm else None

    def mix(
        self, projected_NF: torch.Tensor, share: HeadShare, span: TokenSpan
    ) -> tuple[torch.Tensor, State]:
        if self.part.factors:
            columns = zip(share.sizes, self.part.factors, strict=True)
            made = [projected_NF.new_full((heads * width,), f) for (heads, width), f in columns]
            projected_NF = projected_NF * torch.cat(made)
        gate_NHV, convolved_ND, dt_NH1 = share.split(projected_NF, self.convolved)
        (x_NHV, *shared), recent_QWD = self.convolve(convolved_ND, share, span)
        b_NGK, c_NGK = self._complete(*shared)
        least, largest = self.part.least_step, self.part.largest_step
        limit = (least, math.inf if largest is None else largest)
        steps_NH = time_steps(dt_NH1.squeeze(-1), share.of_heads(self.dt_bias), limit)
        A_log_H, D_H = share.of_heads(self.A_log), share.of_heads(self.D)
        inputs = (x_NHV, steps_NH, A_log_H, b_NGK, c_NGK, D_H)
        if span.is_step:
            y_NHV, memory_QHKV = state_space_step(*inputs, span.before_step[1])
        else:
            y_NHV, memory_QHKV = state_space(*inputs, span.chunks, span.memory)
        y, gate = y_NHV, gate_NHV
        weight_GV = None  # where groups are not whole, `finish` normalises
        if self.norm is not None and self._has_groups(share):
            weight_GV = self._weight_by_group(self.norm)
            y, gate = (x.flatten(1).unflatten(1, (weight_GV.size(0), -1)) for x in (y, gate))
        gated = gate_then_normalise(y, gate, weight_GV, self.config.layernorm_epsilon)
        return gated.flatten(1), (recent_QWD, memory_QHKV)

    def finish(self, mixed_TRV: torch.Tensor, share: HeadShare) -> torch.Tensor:
        if self.norm is None or self._has_groups(share):
            return mixed_TRV
        weight_GV = self._weight_by_group(self.norm)
        by_group = mixed_TRV.unflatten(-1, (weight_GV.size(0), -1))
        mean_square = None
        if self.tp.size() > self.part.groups:
            # Over the ranks that share a group.
            others = self._group, self.part.groups - 1 - self._group
            sums_TR1G = sum_over_ranks(F.pad(sum_squares(by_group), others), self.tp)
            sum_TR11 = sums_TR1G[..., self._group, None]
            mean_square = sum_TR11 * self.part.groups / self.part.inner_size
        epsilon = self.config.layernorm_epsilon
        return normalise(by_group, weight_GV, epsilon, mean_square).flatten(-2)

    def _has_groups(self, share: HeadShare) -> bool:
        """Whether groups are whole where the recurrence is computed."""
        return share is self.whole and self.tp.size() <= self.part.groups

    def _complete(
        self, into_NGK: torch.Tensor, out_NGK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a group's states take tokens, and where they are read: ranks that share the group
        have some channels of both, and exchange them.
        """
        if self.tp.size() <= self.part.groups:
            return into_NGK, out_NGK
        both_N2K = torch.cat([into_NGK, out_NGK], 1)
        all_N2F = all_gather_last_dim_from_tensor_parallel_region(both_N2K, self.tp)
        both_N2K = all_N2F.unflatten(-1, (self.part.groups, -1))[:, :, self._group]
        into_N1K, out_N1K = both_N2K.split(1, 1)
        return into_N1K, out_N1K

    @property
    def _group(self) -> int:
        """The one that this rank shares with others."""
        return int(self.tp.rank()) * self.part.groups // int(self.tp.size())

    def _weight_by_group(self, norm: GroupNorm) -> torch.Tensor:
        groups = max(1, self.part.groups // self.tp.size())
        weight_GV: torch.Tensor = norm.weight.unflatten(0, (groups, -1))
        return weight_GV


class ShortConvolutionMixer(RecurrentMixer):
    """A gated short convolution; see `converters.architecture.ShortConvolution`."""

    part: ShortConvolution
    sections = (short_convolution.INTO, short_convolution.OUT, short_convolution.INPUT)
    convolved = slice(2, 3)

    def __init__(self, part: ShortConvolution, **given: Any) -> None:
        super().__init__(part=part, proj_bias=part.bias, conv_bias=part.bias, **given)

    def mix(
        self, projected_NF: torch.Tensor, share: HeadShare, span: TokenSpan
    ) -> tuple[torch.Tensor, State]:
        before_ND, after_ND, x_ND = projected_NF.chunk(3, -1)
        taps_DW, bias_D = self.find_taps(share)
        if span.is_step:
            (past_QWD,) = span.before_step
            y_ND, recent_QWD = convolve_step(
                before_ND * x_ND, taps_DW, bias_D, past_QWD, silu=False
            )
            return after_ND * y_ND, (recent_QWD,)
        windows = span.windows(self.part.taps)
        given = (taps_DW, bias_D, windows, span.recent)
        y_ND, recent_QWD = gated_convolve(before_ND, after_ND, x_ND, *given)
        return y_ND, (recent_QWD,)


class HeadNorm(torch.nn.Module):
    """Normalises the output of each head and gates it. All heads, those of other ranks too, have
    one weight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        channels: int,
        epsilon: float,
        group: dist.ProcessGroup,
        activation: Activation = F.silu,
    ) -> None:
        super().__init__()
        self.epsilon, self.group, self.activation = epsilon, group, activation
        self.weight = torch.nn.Parameter(
            torch.empty(channels, device=current_device(), dtype=config.params_dtype)
        )

    def forward(self, out_NHV: torch.Tensor, gate_NHV: torch.Tensor) -> torch.Tensor:
        # Each rank has some of the heads: gradients of the weight are summed.
        weight_V = copy_to_tensor_model_parallel_region(self.weight, self.group)
        return normalise_then_gate(out_NHV, gate_NHV, weight_V, self.epsilon, self.activation)


class GroupNorm(torch.nn.Module):
    """The weight of a norm over groups of channels, those of this rank."""

    def __init__(self, config: TransformerConfig, channels: int) -> None:
        super().__init__()
        self.weight = make_shard(config, channels)


MIXERS: dict[type[Recurrence], type[RecurrentMixer]] = {
    DeltaNet: DeltaNetMixer,
    ChannelDeltaNet: ChannelDeltaNetMixer,
    Mamba2: Mamba2Mixer,
    ShortConvolution: ShortConvolutionMixer,
}
