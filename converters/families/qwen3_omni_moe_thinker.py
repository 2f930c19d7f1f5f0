"""The thinker of Qwen3-Omni: Qwen3-MoE that also sees pictures and videos and hears sound, with
three positions of a token.
"""

from __future__ import annotations

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared import dense, experts, omni

from . import qwen3_vl
from .qwen3_moe import TABLE as TABLE

BESIDE = ("talker", "code2wav")
"""What names of tensors of the other models in a checkpoint begin with."""
_WINDOW = 50


def architecture(fields: Fields) -> Architecture:
    """The architecture a Qwen3OmniMoeThinkerConfig describes. Its class has no windows, whatever
    the config says, and norms of queries and keys in all layers.
    """
    text = omni.take_text(fields)
    for name in ("sliding_window", "use_sliding_window", "max_window_layers"):
        text.ignore(name, "the class has no windows")
    text.expect("use_qk_norm", (True,), "queries and keys have norms")
    text.expect("shared_expert_intermediate_size", (0,), "experts have no shared MLP beside them")
    moe, layers = experts.take_softmax_moe(text), experts.take_sparse_layers(text)
    window = fields.take("audio_config")["n_window"]
    if window != _WINDOW:
        why = f"the class counts 13 tokens for each {2 * _WINDOW} frames"
        fields.refuse("audio_config.n_window", window, f"{why}; it can be {_WINDOW}")
    shell = omni.take_shell(fields, "id", stride=8, spare=7, chunk=2 * _WINDOW, mixed=True)
    feed = experts.place(text, moe, layers)
    return dense.architecture(text, qwen3_vl.take_attention(text), feed, **shell)
