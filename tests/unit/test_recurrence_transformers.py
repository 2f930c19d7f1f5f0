"""Layers made of the recurrences equal those of transformers, each sequence alone there and all in
one row here: outputs, and gradients of the input and of every parameter.

In fp64 there is nothing between them but the order of sums. In fp32 ours may be as far from the
truth as `tests/exact.py` says: transformers' own rounding error, times 8.

Shapes: N tokens, D hidden, K and V channels of keys and values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_policy.recurrence.chunks import Chunks, sequences_of
from megatron_policy.recurrence.convolution import Windows, convolve, gated_convolve
from megatron_policy.recurrence.delta_rule import delta_rule
from megatron_policy.recurrence.gates import (
    gate_then_normalise,
    log_decay,
    normalise_then_gate,
    time_steps,
    write_strength,
)
from megatron_policy.recurrence.state_space import state_space
from tests.exact import Exact, InDouble, assert_equal, furthest

HIDDEN, LENGTHS = 32, (70, 1, 63, 3, 64, 65)
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
}
OLMO = {**GDN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "layers_block_type": ["linear_attention"],
    "time_step_min": 1e-30,
}
FALCON = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "num_hidden_layers": 1,
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
}
MAMBA = {"num_heads": 8, "head_dim": 8, "n_groups": 4, "state_size": 16, "num_hidden_layers": 1}
GRANITE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "num_hidden_layers": 1,
}
KIMI = {
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
}
LFM = {"num_hidden_layers": 1, "layer_types": ["conv"], "conv_bias": True, "conv_L_cache": 3}
# The model's folder, its configuration and its layer there, and its sizes.
LAYERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet", GDN),
    "qwen3_5": ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", GDN),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridGatedDeltaNet", OLMO),
    "kimi_linear": ("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention", KIMI),
    "mamba2": ("mamba2", "Mamba2Config", "Mamba2Mixer", MAMBA),
    "nemotron_h": ("nemotron_h", "NemotronHConfig", "NemotronHMamba2Mixer", NEMOTRON),
    "granitemoehybrid": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridMambaLayer",
        GRANITE,
    ),
    "falcon_h1": ("falcon_h1", "FalconH1Config", "FalconH1Mixer", FALCON),
    "falcon_h1, normalised": (
        "falcon_h1",
        "FalconH1Config",
        "FalconH1Mixer",
        {**FALCON, "mamba_rms_norm": True},
    ),
    "lfm2": ("lfm2", "Lfm2Config", "Lfm2ShortConv", LFM),
}


def make_layer(name: str) -> nn.Module:
    """A layer with random parameters, in fp32; skips where transformers has no such model."""
    folder, config, layer, sizes = LAYERS[name]
    models = "transformers.models"
    modeling = pytest.importorskip(f"{models}.{folder}.modeling_{folder}", exc_type=ImportError)
    configuration = importlib.import_module(f"{models}.{folder}.configuration_{folder}")
    torch.manual_seed(1)
    module: nn.Module = getattr(modeling, layer)(
        getattr(configuration, config)(hidden_size=HIDDEN, **sizes), layer_idx=0
    )
    if folder == "falcon_h1":
        multipliers = modeling.compute_mup_vector(getattr(configuration, config)(**sizes))
        module.register_buffer("mup_vector", multipliers, persistent=False)
    for key, parameter in module.named_parameters():
        value = parameter.data
        if key.endswith("A_log"):
            value.uniform_(0.1, 16).log_()
        elif value.ndim > 1:
            value.normal_(0, 1.5 * value[0].numel() ** -0.5)
        else:
            value.normal_(1.0 if "norm" in key else 0.0, 0.5)
    return module.train()


def delta_net(m: Any, x_ND: torch.Tensor, sequences: tuple[range, ...]) -> torch.Tensor:
    qkv_ND, z, b, a = _project_delta(m, x_ND)
    widths = [m.key_dim, m.key_dim, m.value_dim]
    qkv_ND = _convolved(m, qkv_ND, sequences)
    q, k, v = qkv_ND.split(widths, -1)
    q, k = (y.unflatten(-1, (-1, m.head_k_dim)) for y in (q, k))
    beta = write_strength(b, getattr(m, "allow_neg_eigval", False))
    g, v = log_decay(a, m.A_log, m.dt_bias), v.unflatten(-1, (-1, m.head_v_dim))
    out, _ = delta_rule(q, k, v, g, beta, Chunks.of(sequences))
    norm = m.o_norm if hasattr(m, "o_norm") else m.norm
    out = normalise_then_gate(out, z.view_as(out), norm.weight, norm.variance_epsilon)
    return F.linear(out.flatten(1), (m.o_proj if hasattr(m, "o_proj") else m.out_proj).weight)


def _project_delta(m: Any, x_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values; the gates z, b and a."""
    if hasattr(m, "in_proj_qkvz"):
        parts = m.fix_query_key_value_ordering(m.in_proj_qkvz(x_ND)[None], m.in_proj_ba(x_ND)[None])
        q, k, v, z, b, a = (y[0] for y in parts)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1), z, b, a
    if hasattr(m, "in_proj_qkv"):
        return m.in_proj_qkv(x_ND), m.in_proj_z(x_ND), m.in_proj_b(x_ND), m.in_proj_a(x_ND)
    qkv = torch.cat([m.q_proj(x_ND), m.k_proj(x_ND), m.v_proj(x_ND)], -1)
    return qkv, m.g_proj(x_ND), m.b_proj(x_ND), m.a_proj(x_ND)


def kimi_net(m: Any, x_ND: torch.Tensor, sequences: tuple[range, ...]) -> torch.Tensor:
    qkv_ND = torch.cat([m.q_proj(x_ND), m.k_proj(x_ND), m.v_proj(x_ND)], -1)
    heads = (m.num_heads, m.head_dim)
    q, k, v = _convolved(m, qkv_ND, sequences).unflatten(-1, (3, *heads)).unbind(1)
    gate = m.forget_gate
    a = gate.f_b_proj(gate.f_a_proj(x_ND)).unflatten(-1, heads)
    g = log_decay(a, gate.A_log.view(-1, 1), gate.dt_bias.view(heads))
    out, _ = delta_rule(q, k, v, g, write_strength(m.b_proj(x_ND)), Chunks.of(sequences))
    z = m.g_b_proj(m.g_a_proj(x_ND)).view_as(out)
    norm = m.o_norm
    out = normalise_then_gate(out, z, norm.weight, norm.variance_epsilon, torch.sigmoid)
    return F.linear(out.flatten(1), m.o_proj.weight)


def mamba(m: Any, x_ND: torch.Tensor, sequences: tuple[range, ...]) -> torch.Tensor:
    features = m.in_proj(x_ND) * getattr(m, "mup_vector", torch.ones(1))[0].to(x_ND.dtype)
    z, xbc, dt = features.split([m.intermediate_size, m.conv_dim, m.num_heads], -1)
    shared = m.n_groups * m.ssm_state_size
    x, b, c = _convolved(m, xbc, sequences).split([m.intermediate_size, shared, shared], -1)
    b, c = (y.unflatten(-1, (m.n_groups, -1)) for y in (b, c))
    x, dt = x.unflatten(-1, (m.num_heads, -1)), time_steps(dt, m.dt_bias, (1e-30, torch.inf))
    y, _ = state_space(x, dt, m.A_log, b, c, m.D, Chunks.of(sequences))
    weight, groups = getattr(m.norm, "weight", None), m.n_groups
    y, z = (value.flatten(1).unflatten(-1, (groups, -1)) for value in (y, z.unsqueeze(-1)))
    weight = None if weight is None else weight.view(groups, -1)
    after = getattr(m.norm, "norm_before_gate", False)
    compute = normalise_then_gate if after else gate_then_normalise
    epsilon = getattr(m.norm, "variance_epsilon", 0.0)
    return F.linear(compute(y, z, weight, epsilon).flatten(1), m.out_proj.weight)


def short_convolution(m: Any, x_ND: torch.Tensor, sequences: tuple[range, ...]) -> torch.Tensor:
    before, after, x = m.in_proj(x_ND).chunk(3, -1)
    windows = Windows.of(sequences, m.conv_kernel_size)
    weight = m.conv.weight.squeeze(1)
    out, _ = gated_convolve(before, after, x, weight, m.conv.bias, windows)
    return m.out_proj(out)


def _convolved(m: Any, x_ND: torch.Tensor, sequences: tuple[range, ...]) -> torch.Tensor:
    windows = Windows.of(sequences, m.conv_kernel_size)
    return convolve(x_ND, m.conv1d.weight.squeeze(1), m.conv1d.bias, windows)[0]


OURS: dict[str, Callable[..., torch.Tensor]] = dict.fromkeys(LAYERS, mamba)
OURS |= dict.fromkeys(("qwen3_next", "qwen3_5", "olmo_hybrid"), delta_net)
OURS |= {"kimi_linear": kimi_net, "lfm2": short_convolution}


def compute_all(
    module: nn.Module, compute: Callable[[torch.Tensor], torch.Tensor], hidden_ND: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Outputs, and gradients of the input and of all parameters, for a fixed direction."""
    hidden_ND = hidden_ND.detach().requires_grad_()
    push = torch.randn(hidden_ND.shape, generator=torch.Generator().manual_seed(3))
    out_ND = compute(hidden_ND)
    leaves = {"input": hidden_ND, **dict(module.named_parameters())}
    grads = torch.autograd.grad(out_ND, list(leaves.values()), push.to(out_ND.dtype))
    return {"output": out_ND.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_that_of_transformers_with_each_sequence_alone(name: str) -> None:
    module, sequences = make_layer(name), sequences_of(LENGTHS)
    random = torch.Generator().manual_seed(2)
    hidden_ND = torch.randn(sum(LENGTHS), HIDDEN, generator=random)

    def theirs(x_ND: torch.Tensor) -> torch.Tensor:
        return torch.cat([module(x.unsqueeze(0))[0] for x in x_ND.split(LENGTHS)])

    def ours(x_ND: torch.Tensor) -> torch.Tensor:
        return OURS[name](module, x_ND, sequences)

    rounded, found = (compute_all(module, each, hidden_ND) for each in (theirs, ours))
    module, hidden_ND = module.double(), hidden_ND.double()
    with InDouble():
        true = compute_all(module, theirs, hidden_ND)
    precise = compute_all(module, ours, hidden_ND)
    for quantity, value in true.items():
        size = float(value.abs().max())
        assert furthest(precise[quantity], value) <= 1e-11 * size, quantity
        exact = Exact.between(rounded[quantity], value)
        assert_equal(f"{name}: {quantity}", found[quantity], exact)
