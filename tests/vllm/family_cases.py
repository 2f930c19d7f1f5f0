"""The tiny models with which tests show vLLM each family: as small as its kernels for CPUs take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.checkpoints import make_checkpoint
from tests.families import SAMPLES
from tests.families.deepseek_v3 import SCALED
from tests.mtp_checkpoints import NUMBERED, add_mtp_layers
from tests.quantised import quantise_fp8, quantise_mxfp4
from tests.vllm.picture_cases import SEEING, add_processor, publish

VOCAB = 256
ROWS, LENGTH = 4, 24  # what models are compared on
SIZES: dict[str, Any] = {"hidden": 128, "heads": 4, "groups": 2, "ffn": 64, "vocab": VOCAB}
"""Heads of 32, and all widths multiples of 32."""
EXPERTS = {"moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
"""The compressed keys and values have the only sizes for which there is a kernel."""
PUBLISHED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What published configs say, vLLM needs, and transformers takes for granted. So are fields of
`lfm2` and `minimax_m2` below.
"""
MIMO = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""In place of the makers' code, for which vLLM looks in the checkpoint."""
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Heads of the one size for which there is a kernel."""
DENSE_PARTS = ["linear_attention", "mlp", "full_attention", "linear_attention"]
EPSILON = {"rms_norm_eps": 1e-5}
"""As published: vLLM's model has that number in its code."""
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS | LATENT | PUBLISHED | {"rope_scaling": SCALED},
    "ernie4_5_moe": EXPERTS,
    "falcon_h1": {"mamba_d_head": 32, "mamba_d_ssm": 256, "mamba_d_state": 32},
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": EXPERTS | LATENT,
    "gpt_oss": EPSILON,
    # The seed is one with which no token is about to take another expert.
    "granitemoehybrid": {"mamba_d_state": 32, "shared_intermediate_size": 64, "seed": 1},
    "kimi_k2": EXPERTS
    | LATENT
    | PUBLISHED
    | {"rope_scaling": SCALED | {"beta_fast": 1.0, "beta_slow": 1.0}},
    "lfm2": {"block_multiple_of": 32} | dict.fromkeys(("block_dim", "conv_dim"), SIZES["hidden"]),
    "lfm2_moe": EXPERTS,
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "nemotron_h": EXPERTS
    | {
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmoe": EPSILON,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_moe": EXPERTS,
    "qwen3_vl_moe": EXPERTS | {"norm_topk_prob": True},
    "qwen3_5": DELTA_NET,
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_5_moe_text": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_next": DELTA_NET
    | EXPERTS
    | {"shared_expert_intermediate_size": 64, "mlp_only_layers": []},
}
OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM's rotary kernel for CPUs takes the heads of queries to follow each other in memory, but
    # those of latent attention have parts that do not rotate between them. Scaled rotations do not
    # use that kernel, and neither do any without the custom operator.
    "glm4_moe_lite": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}},
    "mimo": {"trust_remote_code": True},
}


BF16_ALONE = (
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "nemotron_h_omni",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
"""Families whose recurrences vLLM's kernels for CPUs compute in bf16 alone."""

UNUSED = dict.fromkeys(("llava", "llava_next"), r".*vision_tower.*\.(layers\.1|post_layernorm)\.")
UNUSED["llava_onevision"] = r".*vision_tower.*\.post_layernorm\."
"""What a tower has behind the layer whose features are taken, the last but one of two, or its norm:
no gradient reaches it, and vLLM leaves it out.
"""

SEES = {"skip_tokenizer_init": False, "max_model_len": 128, "mm_device_do_normalize": False}
"""What an engine is started with whose rows have pictures, of pixels as the policy reads them."""


@dataclass(frozen=True)
class Case:
    """A checkpoint of a family; `kind` says what it has that the family's plain one has not."""

    family: str
    kind: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    mtp: bool = False
    quantised: str = ""
    published: bool = True
    """Whether files have the names, the fields and the order of experts of published ones."""

    @property
    def name(self) -> str:
        return f"{self.family} {self.kind}".rstrip()

    @property
    def dtype(self) -> torch.dtype:
        """Of the checkpoint, the policy and the engine."""
        return torch.bfloat16 if self.family in BF16_ALONE else torch.float32

    def make(self, folder: Path) -> Path:
        """Write the checkpoint below `folder`."""
        path = folder / "source"
        fields = SIZES | {"layers": 2, "tied": is_tied(self.family)} | OWN.get(self.family, {})
        given = {"dtype": self.dtype, "tokenizer": False}
        make_checkpoint(path, self.family, **fields | self.fields | given)
        if self.family == "mimo":
            (path / "configuration_mimo.py").write_text(MIMO)
        if self.sees:
            if self.published:
                publish(path, self.family)
            add_processor(path, self.family, VOCAB)
        if self.mtp:
            add_mtp_layers(path)
        if self.quantised:
            quantise = {"fp8": quantise_fp8, "mxfp4": quantise_mxfp4}[self.quantised]
            return quantise(path, folder / self.quantised)
        return path

    @property
    def options(self) -> dict[str, Any]:
        """What an engine is started with."""
        sees = SEES if self.sees else {}
        dtype = {"dtype": str(self.dtype).removeprefix("torch.")}
        return OPTIONS.get(self.family, {}) | sees | dtype

    @property
    def sees(self) -> bool:
        """Whether the model is compared on rows with pictures."""
        return self.family in SEEING


def is_tied(family: str) -> bool:
    """Whether the family's embedding is its head, as published."""
    samples = SAMPLES[family]
    fields = next(iter(samples.published.values()), {})
    plain = AutoConfig.for_model(samples.hf_model_type or family)
    plain = getattr(plain, "tie_word_embeddings", False)
    return bool(fields.get("tie_word_embeddings", plain))


def list_cases() -> Iterator[Case]:
    """Every family as published, and again with what only some of its models have."""
    for family, samples in SAMPLES.items():
        yield Case(family)
        fields = {name: value for name, value in samples.full.items() if "bias" in name}
        if fields and family not in ("glm4", "starcoder2"):  # which have them as published
            yield Case(family, "with biases", fields)
        if family in (*NUMBERED, "qwen3_next"):
            yield Case(family, "with MTP layers", mtp=True)
    yield Case("qwen3", "untied", {"tied": False})
    yield Case("llama", "tied", {"tied": True})
    yield Case("nemotron_h", "without experts", {"layers_block_type": DENSE_PARTS})
    yield Case("qwen3_vl_moe", "as transformers 5 saves it", published=False)
    yield Case("qwen3_moe", "from fp8", quantised="fp8")
    yield Case("deepseek_v3", "from fp8", quantised="fp8")
    yield Case("gpt_oss", "from mxfp4", quantised="mxfp4")


CASES = [*list_cases()]
UNREAD = "has no parameters for tensors like"
FAR = "before any refit"
OF_WHOLE = (
    "Failed to load the processor",
    "vLLM needs the processor of a published checkpoint, which these have not",
)
CAUSAL = "vLLM's attention for CPUs has no tokens of a picture that see those behind them"
BF16 = "vLLM computes with the numbers of this activation in bf16, whatever the model's dtype"
KERNEL = ("has no attribute 'set_allocator'", "vLLM's delta nets of this family need Triton")
REFUSED: dict[str, tuple[str, str]] = {
    "apertus": (FAR, BF16),
    "apertus with biases": (FAR, BF16),
    "cohere with biases": (UNREAD, "vLLM's attention of this family has no biases"),
    "ernie4_5 with biases": (UNREAD, "vLLM's layers of this family have no biases"),
    "ernie4_5_moe": (
        FAR,
        "vLLM's router for CPUs leaves out correction biases of a softmax, without an error",
    ),
    "gemma3": (FAR, CAUSAL),
    "gemma3 with biases": (FAR, CAUSAL),
    "granitemoe with biases": (UNREAD, "vLLM's attention of this family has no biases"),
    "kimi_linear": (
        "--mamba-block-size can only be set with",
        "vLLM has models of this family for NVIDIA's and AMD's GPUs alone",
    ),
    "kimi_k25": (
        "Failed to load the processor",
        "vLLM reads pictures of this family with its makers' processor",
    ),
    "minimax_m2": (
        "AssertionError",
        "vLLM's router for CPUs has no sigmoid of experts without groups, and an empty message",
    ),
    "nemotron_h": (
        "is_act_and_mul=False is supported only",
        "vLLM has experts without gates on GPUs alone",
    ),
    "nemotron_h_omni": (
        "does not recognize this architecture",
        "the transformers beside vLLM has no models of this family",
    ),
    "olmo_hybrid": KERNEL,
    "olmo_hybrid with biases": KERNEL,
    "olmoe with biases": (UNREAD, "vLLM's attention of this family has no biases"),
    "qwen2_5_omni_thinker": OF_WHOLE,
    "qwen3 with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_5 with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_5_moe with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_5_moe_text with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_5_text with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_vl with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_vl_moe as transformers 5 saves it": (
        "must match the size of tensor",
        "vLLM reads experts as transformers 4 saved them, and published files have them",
    ),
    "qwen3_vl_moe with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_moe with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_next with biases": (UNREAD, "vLLM's output projection of this family has no bias"),
    "qwen3_omni_moe_thinker": OF_WHOLE,
    "qwen3_omni_moe_thinker with biases": OF_WHOLE,
    "seed_oss with biases": (UNREAD, "vLLM's layers of this family have no such biases"),
}
"""By the names of cases: what vLLM or the refit says, and why."""
PACKED = (
    "support only width of 4",
    "vLLM packs convolutions for CPUs with AVX-512 in bf16, and only those of four taps",
)
REFUSED_WITH_AVX512 = {
    f"{family}{kind}": PACKED for family in ("lfm2", "lfm2_moe") for kind in ("", " with biases")
}
"""What such CPUs add."""
REFUSED_HERE = REFUSED | (REFUSED_WITH_AVX512 if torch.cpu._is_avx512_bf16_supported() else {})
