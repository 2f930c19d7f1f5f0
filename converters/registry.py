"""What a model family is, the built-in ones, and those of installed packages.

An installed package adds one by an entry point of the group `megatron_policy.models`: its name is
the model_type, its object a `Family`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from megatron_policy.converters import families
from megatron_policy.converters.architecture import Architecture, Shell
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families import nemotron_h_omni
from megatron_policy.converters.families.shared import omni
from megatron_policy.converters.families.shared.dense import rename
from megatron_policy.converters.families.shared.pictures import make_rows, take_text
from megatron_policy.converters.rows import Ignore, Row
from megatron_policy.converters.rows.expert_rows import STACKED, has_order
from megatron_policy.converters.scalar_head import SEQUENCE, TOKEN
from megatron_policy.errors import ConversionError

GROUP = "megatron_policy.models"
_WHOLE = "ForConditionalGeneration"
"""What the names of transformers' classes end with whose decoder is one part of them."""


@dataclass(frozen=True)
class Family:
    """Its rows, how to read its config, and the HF classes whose checkpoints it converts."""

    name: str
    table: tuple[Row | Ignore, ...]
    architecture: Callable[[Fields], Architecture]
    hf_architectures: tuple[str, ...]
    hf_model_type: str | None = None
    """The model_type of transformers' class that has the same fields, if it is not `name`: the
    makers' own class comes with their checkpoints, and no code of a checkpoint is executed.
    """
    other_names: tuple[tuple[str, str], ...] = ()
    """Parts of names of HF tensors, each with what some checkpoints have in its place."""
    hf_prefix: str = ""
    """What the names of transformers' classes with a scalar head begin with, if not as those of
    `hf_architectures`.
    """
    surrounded: bool = False
    """Whether its models have a shell: the decoder is a part of transformers' composite model."""
    paths: tuple[tuple[str, str], ...] = ()
    """What names of HF tensors begin with, or have in them if it begins with a dot, and what the
    paths of transformers' modules have in its place.
    """
    find_rows: Callable[[Fields], tuple[Row | Ignore, ...]] | None = None
    """Finds its rows, in place of `table`, where these depend on the config."""
    make_shell_rows: Callable[[Shell], tuple[Row, ...]] = make_rows
    """Makes the rows of what surrounds its decoder."""

    def list_rows(self, fields: Fields, tensors: Collection[str] = ()) -> tuple[Row | Ignore, ...]:
        """Its rows for a model of this config; see `name_rows`."""
        rows = self.table if self.find_rows is None else self.find_rows(fields)
        return self.name_rows(rows, tensors)

    def name_rows(
        self, rows: Iterable[Row | Ignore], tensors: Collection[str]
    ) -> tuple[Row | Ignore, ...]:
        """The rows by the names that a checkpoint with these HF tensors has, if any are."""
        others = [pair for pair in self.other_names if _have_other(tensors, *pair)]
        return rename(rows, dict(others))

    def list_shell_rows(
        self, shell: Shell, names: Collection[str]
    ) -> tuple[Shell, tuple[Row | Ignore, ...]]:
        """The shell of a checkpoint with HF tensors of these names, if any are given, and its rows:
        without what it can lack, where all of that is lacking.
        """
        rows = self.name_rows(self.make_shell_rows(shell), names)
        optional = [
            row
            for row in rows
            if not isinstance(row, Ignore)
            and shell.optional
            and row.megatron.endswith(shell.optional)
        ]
        if not names or not optional or any(n in names for row in optional for n in row.hf):
            return shell, rows
        return shell.leave_out_optional(), tuple(row for row in rows if row not in optional)

    @property
    def has_forms(self) -> bool:
        """Whether its checkpoints differ in the names of the same tensors, or have others too."""
        return bool(self.other_names or (self.table and self.find_rows)) or any(
            not isinstance(row, Ignore) and row.when == STACKED for row in self.table
        )

    @property
    def has_orders(self) -> bool:
        """Whether its checkpoints differ in the shapes of the same tensors."""
        return any(not isinstance(row, Ignore) and has_order(row) for row in self.table)

    @property
    def scalar_classes(self) -> tuple[str, str]:
        """The HF classes with one number for each sequence, and for each token."""
        prefix = self.hf_prefix or self.hf_architectures[0].removesuffix("ForCausalLM")
        return (prefix + SEQUENCE, prefix + TOKEN)


def _have_other(names: Collection[str], part: str, other: str) -> bool:
    """Whether names have `other`, and none the `part` but as a piece of it."""
    others = [name for name in names if other in name]
    rest = names if part not in other else {*names} - {*others}
    return bool(others) and not any(f".{part.removeprefix('.')}" in f".{name}" for name in rest)


def _find_module(family: str) -> tuple[ModuleType, dict[str, Any]]:
    """The module of a family in `families/`, and the fields of `Family` that it states, if any."""
    module = import_module(f"{families.__name__}.{family}")
    stated = {"OTHER_NAMES": "other_names", "PATHS": "paths", "make_shell_rows": "make_shell_rows"}
    return module, {stated[name]: value for name, value in vars(module).items() if name in stated}


def _built_in(name: str, hf_architecture: str, of: str = "", **more: Any) -> Family:
    """The family whose module has its name, or that `of` another one."""
    module, given = _find_module(of or name)
    if hf_architecture.endswith(_WHOLE):
        given |= {"hf_prefix": hf_architecture.removesuffix(_WHOLE), "surrounded": True}
    return Family(name, module.TABLE, module.architecture, (hf_architecture,), **given | more)


def _surrounding(
    name: str,
    hf_architecture: str,
    *decoders: str,
    of: str = "",
    makers: tuple[str, ...] = (),
    beside: tuple[Ignore, ...] = (),
) -> Family:
    """The family whose decoder is one of these families', as its config says, and whose module has
    its name, or that `of` another one; its `makers` have other names of the class, and files what
    is `beside` the weights.
    """
    module, given = _find_module(of or name)

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
        hf_prefix=hf_architecture.removesuffix(_WHOLE),
        surrounded=True,
        find_rows=find_rows,
        **given,
    )


def _thinker(name: str, hf_architecture: str) -> Family:
    """The family whose models are published with others beside them."""
    module, _ = _find_module(name)

    def find_rows(fields: Fields) -> tuple[Row | Ignore, ...]:
        return omni.name_rows(module.TABLE, fields, module.BESIDE)

    return _built_in(name, hf_architecture, paths=omni.PATHS, find_rows=find_rows)


_OF_LLAVA = ("llama", "mistral", "qwen2")
FAMILIES = {
    family.name: family
    for family in (
        _built_in("apertus", "ApertusForCausalLM"),
        _built_in("cohere", "CohereForCausalLM"),
        _built_in("deepseek_v3", "DeepseekV3ForCausalLM"),
        _built_in("ernie4_5", "Ernie4_5ForCausalLM"),
        _built_in("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        _built_in("exaone4", "Exaone4ForCausalLM"),
        _built_in("falcon_h1", "FalconH1ForCausalLM"),
        _built_in("gemma2", "Gemma2ForCausalLM"),
        _surrounding("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
        _built_in("gemma3_text", "Gemma3ForCausalLM", hf_prefix="Gemma3Text"),
        _built_in("glm4", "Glm4ForCausalLM"),
        _built_in("glm4_moe", "Glm4MoeForCausalLM"),
        _built_in("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
        _built_in("glm4v", "Glm4vForConditionalGeneration"),
        _built_in("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
        _built_in("gpt_oss", "GptOssForCausalLM"),
        _built_in("granite", "GraniteForCausalLM"),
        _built_in("granitemoe", "GraniteMoeForCausalLM"),
        _built_in("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        _built_in("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
        _surrounding("idefics3", "Idefics3ForConditionalGeneration", "llama"),
        _surrounding("internvl", "InternVLForConditionalGeneration", "llama", "qwen2", "qwen3"),
        _built_in(
            "kimi_k2", "DeepseekV3ForCausalLM", of="deepseek_v3", hf_model_type="deepseek_v3"
        ),
        _surrounding(
            "kimi_k25",
            "Kimi_K25ForConditionalGeneration",
            "deepseek_v3",
            "kimi_k2",
            makers=("KimiK25ForConditionalGeneration",),
        ),
        _built_in("kimi_linear", "KimiLinearForCausalLM"),
        _built_in("lfm2", "Lfm2ForCausalLM"),
        _built_in("lfm2_moe", "Lfm2MoeForCausalLM"),
        _built_in("llama", "LlamaForCausalLM"),
        _surrounding("llava", "LlavaForConditionalGeneration", *_OF_LLAVA),
        _surrounding("llava_next", "LlavaNextForConditionalGeneration", *_OF_LLAVA),
        _surrounding("llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2"),
        _built_in("mimo", "MiMoForCausalLM", hf_model_type="qwen2", hf_prefix="Qwen2"),
        _built_in("minimax_m2", "MiniMaxM2ForCausalLM"),
        _built_in("ministral3", "Ministral3ForCausalLM"),
        _built_in("mistral", "MistralForCausalLM"),
        _surrounding("mistral3", "Mistral3ForConditionalGeneration", "mistral", "ministral3"),
        _built_in("mixtral", "MixtralForCausalLM"),
        _built_in("nemotron_h", "NemotronHForCausalLM"),
        _surrounding(
            "nemotron_h_omni",
            "NemotronH_Omni_Reasoning_V3",
            "nemotron_h",
            makers=nemotron_h_omni.MODEL_TYPES,
            beside=nemotron_h_omni.BESIDE,
        ),
        _built_in("olmo2", "Olmo2ForCausalLM"),
        _built_in("olmo3", "Olmo3ForCausalLM"),
        _built_in("olmo_hybrid", "OlmoHybridForCausalLM"),
        _built_in("olmoe", "OlmoeForCausalLM"),
        _built_in("phi3", "Phi3ForCausalLM"),
        _built_in("qwen2", "Qwen2ForCausalLM"),
        _thinker("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration"),
        _built_in("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        _built_in("qwen2_moe", "Qwen2MoeForCausalLM"),
        _built_in("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        _built_in("qwen3", "Qwen3ForCausalLM"),
        _built_in("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        _built_in("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        _built_in("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        _built_in("qwen3_5_text", "Qwen3_5ForCausalLM", hf_prefix="Qwen3_5Text"),
        _built_in("qwen3_moe", "Qwen3MoeForCausalLM"),
        _built_in("qwen3_next", "Qwen3NextForCausalLM"),
        _thinker("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        _built_in("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        _built_in("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"),
        _built_in("seed_oss", "SeedOssForCausalLM"),
        _built_in("smollm3", "SmolLM3ForCausalLM"),
        # Its videos are pictures, one for each frame.
        _surrounding("smolvlm", "SmolVLMForConditionalGeneration", "llama", of="idefics3"),
        _built_in("starcoder2", "Starcoder2ForCausalLM"),
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
