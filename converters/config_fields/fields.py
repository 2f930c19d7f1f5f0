"""A Hugging Face config read field by field, so that no field is overlooked.

Every field is translated, ignored for a stated reason, or refused; what became of each can be
listed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_policy.errors import ConversionError

from . import quantisation

REQUIRED: Any = object()

TRANSLATED, IGNORED_FIELD, REFUSED, UNREAD = "translated", "ignored", "refused", "unread"

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
    "_flash_attn_2_enabled": "how Hugging Face computes attention",
    "_name_or_path": "where the config came from",
    "architectures": "compared with the family's own",
    "bos_token_id": "belongs to the tokenizer",
    "dtype": "the precision is chosen by the policy's config",
    "eos_token_id": "belongs to the tokenizer",
    "gradient_checkpointing": "recomputation is chosen by the policy's config",
    "id2label": "names of the labels of a classification head",
    "initializer_range": "weights are loaded, never initialised at random",
    "label2id": "names of the labels of a classification head",
    "model_max_length": "belongs to the tokenizer",
    "model_type": "chose the family",
    "output_attentions": "what a Hugging Face forward call returns",
    "output_hidden_states": "what a Hugging Face forward call returns",
    "pad_token_id": "belongs to the tokenizer",
    "return_dict": "what a Hugging Face forward call returns",
    "tokenizer_class": "belongs to the tokenizer",
    "torch_dtype": "the precision is chosen by the policy's config",
    "torchscript": "how Hugging Face exports",
    "transformers.js_config": "how the model runs in browsers",
    "transformers_version": "which release wrote the config",
    "unsloth_fixed": "a mark of the tool that wrote the config",
    "unsloth_version": "a mark of the tool that wrote the config",
    "use_cache": "how Hugging Face generates",
    "use_flash_attn": "how a model's own code computes attention",
    **dict.fromkeys(
        _GENERATION, "a default for sampling, which takes its settings from the request"
    ),
}
"""Fields of any model that affect neither its weights nor its forward pass, and why."""

# Explains a field that no family takes, given its value.
_HINTS: Mapping[str, Callable[[Any], str]] = {quantisation.SECTION: quantisation.refusal}
_UNKNOWN = (
    "unknown field; if it does not affect the model, {what} leaves it out and the file as it is "
    "(in a family of yours: take, expect or ignore it)"
)
SHOWN_CHARACTERS = 120
"""Of a value in a message: lists in configs can name every layer and expert."""


@dataclass(frozen=True)
class FieldUse:
    """What became of one field: its dotted name, its value, the outcome and the reason."""

    name: str
    value: Any
    outcome: str
    why: str


class Fields:
    """The fields of a config, or of a nested section; `finish` refuses those that nobody took."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix
        self._left = dict.fromkeys(raw)
        self._sections: dict[str, Fields] = {}
        self._problems: list[str] = []
        self._notes: dict[str, tuple[str, str]] = {}
        if not prefix and quantisation.scheme_of(raw.get(quantisation.SECTION)) is not None:
            self.ignore(quantisation.SECTION, quantisation.READ_AS)

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The field, or `default` if absent or null; ConversionError if there is no default."""
        self._left.pop(name, None)
        value = self._raw.get(name)
        if value is not None:
            self._note(name, TRANSLATED, "")
            return value
        if default is REQUIRED:
            self._note(name, REFUSED, "this model family needs it")
            raise ConversionError(
                f"config.json has no {self._prefix}{name}, which this model family needs"
            )
        self._note(name, TRANSLATED, "" if default is None else f"taken as {shown(default)}")
        return default

    def section(self, name: str, inherited: Collection[str] = ()) -> Fields | None:
        """A nested mapping as Fields, finished together with these; None if absent or null. It has
        the `inherited` fields of this one, which precede its own. That of a model has fields which
        are ignored as these are.
        """
        value = self.take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConversionError(f"{self._prefix}{name} must be a mapping, not {value!r}")
        if name not in self._sections:
            above = {each: self.take(each) for each in inherited}
            self._sections[name] = Fields({**value, **above}, f"{self._prefix}{name}.")
        return self._sections[name]

    def expect(self, name: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse the field unless it is absent, null or one of `allowed`."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            self.refuse(name, value, f"{why}; it can be {' or '.join(map(repr, allowed))}")
        elif value is not None:
            self._note(name, TRANSLATED, why)

    def refuse(self, name: str, value: Any, why: str) -> None:
        """Record that the field's value cannot be honoured; `finish` reports it."""
        self._problems.append(f"{self._prefix}{name} = {shown(value)}: {why}")
        self._note(name, REFUSED, why)

    def ignore(self, name: str, why: str) -> None:
        """Skip a field that does not affect the result, for the stated reason."""
        assert why
        self._left.pop(name, None)
        self._note(name, IGNORED_FIELD, why)

    def finish(self, ignored: Mapping[str, str] = IGNORED) -> None:
        """Raise ConversionError naming every field that was refused or neither taken nor
        ignored.
        """
        problems = self._collect(ignored)
        if problems:
            raise ConversionError(
                "config.json cannot be translated faithfully:\n  " + "\n  ".join(problems)
            )

    def uses(self, ended: str = "", ignored: Mapping[str, str] = IGNORED) -> Iterator[FieldUse]:
        """What became of every field so far, in the config's order, sections field by field.

        `ended` says what stopped the translation early; fields not reached by then are unread.
        """
        for name in dict.fromkeys((*self._raw, *self._notes)):
            section = self._sections.get(name)
            outcome, why = self._use(name, ended, ignored)
            if section is not None and outcome != REFUSED:
                refused = "its section is refused" if section._problems else ""
                yield from section.uses(ended or refused, section._of_any(ignored))
            elif name in self._raw or outcome == REFUSED:
                yield FieldUse(f"{self._prefix}{name}", self._raw.get(name), outcome, why)

    def _use(self, name: str, ended: str, ignored: Mapping[str, str]) -> tuple[str, str]:
        if name in self._notes:
            outcome, why = self._notes[name]
            return outcome, why or ignored.get(name, "")
        if name in ignored:
            return IGNORED_FIELD, ignored[name]
        if self._raw[name] is None:
            return IGNORED_FIELD, "null"
        return (UNREAD, ended) if ended else (REFUSED, self._hint(name))

    def _note(self, name: str, outcome: str, why: str) -> None:
        """Record what became of a field; once refused it stays refused, with all reasons."""
        before, reasons = self._notes.get(name, ("", ""))
        if before != REFUSED:
            self._notes[name] = (outcome, why or reasons)
        elif outcome == REFUSED and why not in reasons:
            self._notes[name] = (REFUSED, f"{reasons}; {why}")

    def _collect(self, ignored: Mapping[str, str]) -> list[str]:
        unknown = [
            f"{self._prefix}{name} = {shown(self._raw[name])}: {self._hint(name)}"
            for name in self._left
            if name not in ignored and self._raw[name] is not None
        ]
        # A section with a refused field is refused as a whole: its other fields no longer matter.
        sections = self._sections.values()
        nested = [p for s in sections for p in s._problems or s._collect(s._of_any(ignored))]
        return self._problems + nested + unknown

    def _of_any(self, ignored: Mapping[str, str]) -> Mapping[str, str]:
        """The fields of any model that this section can have: it is the config of one, or not."""
        return ignored if "model_type" in self._raw else {}

    def _hint(self, name: str) -> str:
        """What to do about a field that nobody took; sections are overridden as a whole."""
        if name in _HINTS:
            return _HINTS[name](self._raw[name])
        section = self._prefix.partition(".")[0]
        what = f"a whole {section} without it in hf_config_overrides"
        return _UNKNOWN.format(what=what if section else f"hf_config_overrides {{{name}: null}}")


def shown(value: object) -> str:
    """A field's value in a message: its repr, cut if long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
