"""A Hugging Face config read field by field, so that no field is overlooked.

Every field is translated, found harmless for a stated reason, or refused. Knows no model family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_policy.errors import ConversionError

REQUIRED: Any = object()

_GENERATION = (
    "do_sample",
    "max_length",
    "max_new_tokens",
    "min_length",
    "num_beams",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)

IGNORED: Mapping[str, str] = {
    "_attn_implementation_autoset": "how Hugging Face computes attention",
    "_name_or_path": "where the config came from",
    "architectures": "compared with the family's own",
    "bos_token_id": "the tokenizer's business",
    "dtype": "the precision is chosen by the policy's config",
    "eos_token_id": "the tokenizer's business",
    "gradient_checkpointing": "recomputation is chosen by the policy's config",
    "id2label": "names of a classification head, which is not here",
    "initializer_range": "weights are loaded, never drawn",
    "label2id": "names of a classification head, which is not here",
    "model_type": "chose the family",
    "output_attentions": "what a Hugging Face forward call returns",
    "output_hidden_states": "what a Hugging Face forward call returns",
    "pad_token_id": "the tokenizer's business",
    "return_dict": "what a Hugging Face forward call returns",
    "tokenizer_class": "the tokenizer's business",
    "torch_dtype": "the precision is chosen by the policy's config",
    "torchscript": "how Hugging Face exports",
    "transformers.js_config": "how the model runs in browsers",
    "transformers_version": "which release wrote the config",
    "use_cache": "how Hugging Face generates",
    **dict.fromkeys(
        _GENERATION, "a default for sampling, which takes its settings from the request"
    ),
}
"""Fields of any model without bearing on its weights or its forward pass, and why."""

_HINTS = {
    "quantization_config": "quantised weights cannot be trained; use the unquantised checkpoint"
}


class Fields:
    """The fields of a config, or of a nested section of it; `finish` refuses what nobody took."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix
        self._left = dict.fromkeys(raw)
        self._sections: list[Fields] = []
        self._problems: list[str] = []

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The field's value, or `default` where absent or null; without one, ConversionError."""
        self._left.pop(name, None)
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConversionError(
                f"config.json has no {self._prefix}{name}, which this model family needs"
            )
        return default

    def section(self, name: str) -> Fields | None:
        """A nested mapping as fields of its own, finished with these; None where absent or null."""
        value = self.take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConversionError(f"{self._prefix}{name} must be a mapping, not {value!r}")
        self._sections.append(Fields(value, f"{self._prefix}{name}."))
        return self._sections[-1]

    def expect(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse the field unless it is absent, null or one of `allowed`."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            self.refuse(name, value, f"{why}; can be {' or '.join(map(repr, allowed))}")

    def refuse(self, name: str, value: Any, why: str) -> None:
        """Note that the field's value cannot be honoured, for `finish` to report."""
        self._problems.append(f"{self._prefix}{name} = {value!r}: {why}")

    def ignore(self, name: str, why: str) -> None:
        """Pass over a field that has no bearing on the result, for the stated reason."""
        assert why
        self._left.pop(name, None)

    def finish(self, ignored: Mapping[str, str] = IGNORED) -> None:
        """ConversionError naming every field that was refused, or neither taken nor ignored."""
        problems = self._collect(ignored)
        if problems:
            raise ConversionError(
                "config.json cannot be translated faithfully:\n  " + "\n  ".join(problems)
            )

    def _collect(self, ignored: Mapping[str, str]) -> list[str]:
        unknown = [
            f"{self._prefix}{name} = {self._raw[name]!r}: "
            + _HINTS.get(name, "unknown field; remove it if it has no bearing on the model")
            for name in self._left
            if name not in ignored and self._raw[name] is not None
        ]
        # A section with a refused field is refused whole: what else it says no longer matters.
        nested = [p for s in self._sections for p in s._problems or s._collect({})]
        return self._problems + nested + unknown
