"""The model families: the built-in ones and those of installed packages.

An installed package adds one by an entry point of the group `megatron_policy.models`: its name is
the model_type, its object a `Family`.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import (
    apertus,
    cohere,
    deepseek_v3,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3_text,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v,
    glm4v_moe,
    gpt_oss,
    granite,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_dense,
    idefics3,
    internvl,
    kimi_k25,
    kimi_linear,
    lfm2,
    lfm2_moe,
    llama,
    llava,
    llava_next,
    llava_onevision,
    mimo,
    minimax_m2,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    nemotron_h,
    nemotron_h_omni,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_omni_thinker,
    qwen2_5_vl,
    qwen2_moe,
    qwen2_vl,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_omni_moe_thinker,
    qwen3_vl,
    qwen3_vl_moe,
    seed_oss,
    smollm3,
    smolvlm,
    starcoder2,
)
from megatron_policy.converters.families.shared import omni
from megatron_policy.converters.families.shared.dense import rename
from megatron_policy.converters.families.shared.pictures import take_text
from megatron_policy.converters.rows import Ignore, Row
from megatron_policy.errors import ConversionError

from .family import Family as Family

GROUP = "megatron_policy.models"


def _built_in(module: ModuleType, hf_architecture: str, name: str = "", **more: Any) -> Family:
    """The family of a module in `families/`, which has its name unless another is given."""
    name = name or module.__name__.rpartition(".")[2]
    return Family(name, module.TABLE, module.architecture, (hf_architecture,), **more)


def _surrounding(
    module: ModuleType,
    hf_architecture: str,
    *decoders: str,
    makers: tuple[str, ...] = (),
    beside: tuple[Ignore, ...] = (),
    **more: Any,
) -> Family:
    """The family of a module in `families/` whose decoder is one of these families', as its config
    says; its `makers` have other names of the class, and files what is `beside` the weights.
    """
    name = module.__name__.rpartition(".")[2]

    def choose(fields: Fields) -> tuple[Fields, Family]:
        text = take_text(fields)
        kind = text.take("model_type")
        if kind not in decoders:
            raise ConversionError(
                f"text_config.model_type = {kind!r}: the decoder can be {' or '.join(decoders)}"
            )
        return text, FAMILIES[kind]

    def architecture(fields: Fields) -> Architecture:
        text, decoder = choose(fields)
        return replace(decoder.architecture(text), **module.take_shell(fields))

    def find_rows(fields: Fields) -> tuple[Row | Ignore, ...]:
        return (*rename(choose(fields)[1].table, module.NAMES), *beside)

    return Family(
        name,
        (),
        architecture,
        (hf_architecture, *makers),
        other_names=module.OTHER_NAMES,
        hf_prefix=hf_architecture.removesuffix("ForConditionalGeneration"),
        surrounded=True,
        paths=module.PATHS,
        find_rows=find_rows,
        **more,
    )


def _thinker(module: ModuleType, hf_architecture: str) -> Family:
    """The family of a module in `families/` whose models are published with others beside them."""
    return _built_in(
        module,
        hf_architecture,
        hf_prefix=hf_architecture.removesuffix("ForConditionalGeneration"),
        surrounded=True,
        paths=omni.PATHS,
        find_rows=lambda fields: omni.name_rows(module.TABLE, fields, module.BESIDE),
    )


_OF_LLAVA = ("llama", "mistral", "qwen2")
FAMILIES = {
    family.name: family
    for family in (
        _built_in(apertus, "ApertusForCausalLM"),
        _built_in(cohere, "CohereForCausalLM"),
        _built_in(deepseek_v3, "DeepseekV3ForCausalLM"),
        _built_in(ernie4_5, "Ernie4_5ForCausalLM"),
        _built_in(ernie4_5_moe, "Ernie4_5_MoeForCausalLM"),
        _built_in(exaone4, "Exaone4ForCausalLM"),
        _built_in(falcon_h1, "FalconH1ForCausalLM"),
        _built_in(gemma2, "Gemma2ForCausalLM"),
        _surrounding(gemma3, "Gemma3ForConditionalGeneration", "gemma3_text"),
        _built_in(gemma3_text, "Gemma3ForCausalLM", hf_prefix="Gemma3Text"),
        _built_in(glm4, "Glm4ForCausalLM"),
        _built_in(glm4_moe, "Glm4MoeForCausalLM"),
        _built_in(glm4_moe_lite, "Glm4MoeLiteForCausalLM"),
        _built_in(glm4v, "Glm4vForConditionalGeneration", hf_prefix="Glm4v", surrounded=True),
        _built_in(
            glm4v_moe, "Glm4vMoeForConditionalGeneration", hf_prefix="Glm4vMoe", surrounded=True
        ),
        _built_in(gpt_oss, "GptOssForCausalLM"),
        _built_in(granite, "GraniteForCausalLM"),
        _built_in(granitemoe, "GraniteMoeForCausalLM", paths=granitemoe.PATHS),
        _built_in(granitemoehybrid, "GraniteMoeHybridForCausalLM", paths=granitemoe.PATHS),
        _built_in(hunyuan_v1_dense, "HunYuanDenseV1ForCausalLM"),
        _surrounding(idefics3, "Idefics3ForConditionalGeneration", "llama"),
        _surrounding(internvl, "InternVLForConditionalGeneration", "llama", "qwen2", "qwen3"),
        _built_in(
            deepseek_v3, "DeepseekV3ForCausalLM", hf_model_type="deepseek_v3", name="kimi_k2"
        ),
        _surrounding(
            kimi_k25,
            "Kimi_K25ForConditionalGeneration",
            "deepseek_v3",
            "kimi_k2",
            makers=("KimiK25ForConditionalGeneration",),
            make_shell_rows=kimi_k25.make_rows,
        ),
        _built_in(
            kimi_linear,
            "KimiLinearForCausalLM",
            other_names=kimi_linear.OTHER_NAMES,
            paths=kimi_linear.PATHS,
        ),
        _built_in(lfm2, "Lfm2ForCausalLM"),
        _built_in(lfm2_moe, "Lfm2MoeForCausalLM"),
        _built_in(llama, "LlamaForCausalLM"),
        _surrounding(llava, "LlavaForConditionalGeneration", *_OF_LLAVA),
        _surrounding(llava_next, "LlavaNextForConditionalGeneration", *_OF_LLAVA),
        _surrounding(llava_onevision, "LlavaOnevisionForConditionalGeneration", "qwen2"),
        _built_in(mimo, "MiMoForCausalLM", hf_model_type="qwen2", hf_prefix="Qwen2"),
        _built_in(minimax_m2, "MiniMaxM2ForCausalLM"),
        _built_in(ministral3, "Ministral3ForCausalLM"),
        _built_in(mistral, "MistralForCausalLM"),
        _surrounding(mistral3, "Mistral3ForConditionalGeneration", "mistral", "ministral3"),
        _built_in(mixtral, "MixtralForCausalLM"),
        _built_in(nemotron_h, "NemotronHForCausalLM", paths=(("backbone.", "model."),)),
        _surrounding(
            nemotron_h_omni,
            "NemotronH_Omni_Reasoning_V3",
            "nemotron_h",
            makers=nemotron_h_omni.MODEL_TYPES,
            beside=nemotron_h_omni.BESIDE,
            make_shell_rows=nemotron_h_omni.make_rows,
        ),
        _built_in(olmo2, "Olmo2ForCausalLM"),
        _built_in(olmo3, "Olmo3ForCausalLM"),
        _built_in(olmo_hybrid, "OlmoHybridForCausalLM", other_names=olmo_hybrid.OTHER_NAMES),
        _built_in(olmoe, "OlmoeForCausalLM"),
        _built_in(phi3, "Phi3ForCausalLM"),
        _built_in(qwen2, "Qwen2ForCausalLM"),
        _thinker(qwen2_5_omni_thinker, "Qwen2_5OmniThinkerForConditionalGeneration"),
        _built_in(
            qwen2_5_vl,
            "Qwen2_5_VLForConditionalGeneration",
            hf_prefix="Qwen2_5_VL",
            surrounded=True,
            other_names=qwen2_5_vl.PATHS,
            paths=qwen2_5_vl.PATHS,
        ),
        _built_in(qwen2_moe, "Qwen2MoeForCausalLM"),
        _built_in(
            qwen2_vl,
            "Qwen2VLForConditionalGeneration",
            hf_prefix="Qwen2VL",
            surrounded=True,
            other_names=qwen2_5_vl.PATHS,
            paths=qwen2_5_vl.PATHS,
        ),
        _built_in(qwen3, "Qwen3ForCausalLM"),
        _built_in(qwen3_5, "Qwen3_5ForConditionalGeneration", hf_prefix="Qwen3_5", surrounded=True),
        _built_in(
            qwen3_5_moe,
            "Qwen3_5MoeForConditionalGeneration",
            hf_prefix="Qwen3_5Moe",
            surrounded=True,
        ),
        _built_in(qwen3_5_moe_text, "Qwen3_5MoeForCausalLM", other_names=qwen3_5_text.OTHER_NAMES),
        _built_in(
            qwen3_5_text,
            "Qwen3_5ForCausalLM",
            hf_prefix="Qwen3_5Text",
            other_names=qwen3_5_text.OTHER_NAMES,
        ),
        _built_in(qwen3_moe, "Qwen3MoeForCausalLM"),
        _built_in(qwen3_next, "Qwen3NextForCausalLM"),
        _thinker(qwen3_omni_moe_thinker, "Qwen3OmniMoeThinkerForConditionalGeneration"),
        _built_in(
            qwen3_vl, "Qwen3VLForConditionalGeneration", hf_prefix="Qwen3VL", surrounded=True
        ),
        _built_in(
            qwen3_vl_moe,
            "Qwen3VLMoeForConditionalGeneration",
            hf_prefix="Qwen3VLMoe",
            surrounded=True,
        ),
        _built_in(seed_oss, "SeedOssForCausalLM"),
        _built_in(smollm3, "SmolLM3ForCausalLM"),
        _surrounding(smolvlm, "SmolVLMForConditionalGeneration", "llama"),
        _built_in(starcoder2, "Starcoder2ForCausalLM"),
    )
}

MAKERS = dict.fromkeys(nemotron_h_omni.MODEL_TYPES, "nemotron_h_omni")
"""The model_type of checkpoints whose makers have another name than transformers for a family."""

REFUSED = {
    "phi4_multimodal": "it also reads images and sound; text-only Phi-4 is of model_type phi3",
    **{
        f"{whole}_text": f"it is the decoder of a {whole} alone; use the whole model"
        for whole in ("glm4v", "glm4v_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    },
    **{
        f"{whole}_{part}": f"it is the {name} of a {whole} alone; use its thinker, which is trained"
        for whole in ("qwen2_5_omni", "qwen3_omni_moe")
        for part, name in (("text", "decoder"), ("talker", "talker"))
    },
}
"""Relatives of supported families, and why they are not supported."""


def family_of(model_type: str) -> Family:
    """The family of a config's model_type; ConversionError listing the known ones."""
    family = added_family(model_type) or FAMILIES.get(model_type)
    if family is not None:
        return family
    if model_type in REFUSED:
        raise ConversionError(f"{model_type} cannot be converted: {REFUSED[model_type]}")
    known = sorted({*FAMILIES, *(entry.name for entry in entry_points(group=GROUP))})
    close = difflib.get_close_matches(model_type, known, n=1)
    raise ConversionError(
        f"there is no model family {model_type!r}; known are {', '.join(known)}"
        + (f" (did you mean {close[0]}?)" if close else "")
        + ". policy.dtensor_cfg trains models without one (FSDP2); docs/add-a-model.md says how to "
        f"add one, also from a package, through the entry point group {GROUP}."
    )


def added_family(model_type: str) -> Family | None:
    """The family that an installed package adds under this name; None if there is none.

    ConversionError naming package and entry point if it cannot be imported, is not a Family, or
    its name is already taken by another package or this one.
    """
    found = [entry for entry in entry_points(group=GROUP) if entry.name == model_type]
    if not found:
        return None
    if model_type in FAMILIES:
        raise ConversionError(
            f"{_described(found[0])} has a built-in name: rename it, or uninstall its package"
        )
    if len(found) > 1:  # which one counts would depend on the order of the path
        raise ConversionError(
            f"{_described(found[0])} has the same name as one in {_package(found[1])}: "
            "uninstall one of the two"
        )
    try:
        value = found[0].load()
    except Exception as error:  # importing a third-party package can raise anything
        raise ConversionError(
            f"{_described(found[0])} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, Family):
        raise ConversionError(
            f"{_described(found[0])} is not a Family but a {type(value).__name__}"
        )
    return value


def _described(entry: EntryPoint) -> str:
    """Which entry point of which package, for messages."""
    return f"entry point {entry.name} = {entry.value} ({entry.group}) in {_package(entry)}"


def _package(entry: EntryPoint) -> str:
    if entry.dist is None:
        return "an unnamed package"
    return f"package {entry.dist.metadata['Name']} {entry.dist.version}"
