"""The directory of adapters as Hugging Face PEFT writes and reads it: `adapter_config.json` and
`adapter_model.safetensors`; of ours also which base they are of, by its digest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_policy.adapters.base import StatedBase, check_named
from megatron_policy.adapters.peft_config import PeftSettings, read_settings
from megatron_policy.adapters.stacks import name_modules
from megatron_policy.adapters.table import (
    PREFIX,
    A,
    AdapterSpec,
    B,
    strip_leaf,
    unwrap,
)
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.contained import how_to_convert, inside, nearest, read
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_names import ADAPTER_CONFIG as ADAPTER_CONFIG
from megatron_policy.converters.formats.hf_names import ADAPTER_MODEL as ADAPTER_MODEL
from megatron_policy.converters.formats.safetensors_format import Shape
from megatron_policy.converters.scalar_head import TENSORS
from megatron_policy.errors import ConfigError, ConversionError

BASE = "megatron_policy_base.json"
"""Which base the adapters were trained on, by its digest; PEFT does not read it."""
_MAX_BYTES = 2**26
"""Size limit of both: the config lists all modules."""
_SHOWN = 5


@dataclass(frozen=True)
class PeftAdapters:
    """What a directory says of its adapters."""

    root: Path
    config: Mapping[str, Any]
    """All fields of its `adapter_config.json`, and in `settings` their meaning."""
    settings: PeftSettings
    stated: StatedBase | None

    @property
    def model(self) -> str | None:
        """The name of the model that they adapt, if they have it."""
        return self.stated.model if self.stated else self.settings.model

    @property
    def overrides(self) -> Mapping[str, Any]:
        """The fields of that model's config.json that were overridden."""
        return self.stated.overrides if self.stated else {}

    def find_modules(
        self, shapes: Mapping[str, Shape], parameters: Collection[str] = ()
    ) -> dict[str, tuple[int, float]]:
        """Rank and alpha of each linear module that tensors of these shapes adapt, by its path.

        Tensors also adapt `parameters` with stacked experts, and are of a scalar head if the config
        says so. ConversionError, naming tensors, unless each module has both matrices, of the rank
        that the config says, and PEFT adapts it.
        """
        stacks = {strip_leaf(name) for name in parameters}
        head = {PREFIX + name for name in TENSORS} if self.settings.has_head else set[str]()
        sides = ((name, side) for name in shapes for side in (A, B) if name.endswith(side))
        named = (name.removesuffix(side) for name, side in sides if name.startswith(PREFIX))
        modules = list(dict.fromkeys(name.removeprefix(PREFIX) for name in named))
        pairs = {f"{PREFIX}{module}{side}" for module in modules for side in (A, B)}
        self._refuse("has no", sorted(pairs - shapes.keys()), "write both matrices of a module")
        why = "only linear modules' lora_A.weight and lora_B.weight are read: take the others out"
        self._refuse("has", sorted(shapes.keys() - pairs - head), why)
        modules = [module for module in modules if unwrap(module) not in stacks]
        why = f"{ADAPTER_CONFIG} does not name them, so PEFT leaves them out: add them to it"
        self._refuse("adapts", [m for m in modules if not self.settings.names(m)], why)
        found = {m: self.settings.find_scale(m) for m in modules}
        for module, (rank, _) in found.items():
            if (seen := shapes[f"{PREFIX}{module}{A}"])[:1] != (rank,):
                raise ConversionError(
                    f"{self.root} has an A of {list(seen)} for {module}, but rank {rank} in its "
                    f"{ADAPTER_CONFIG}: correct r or rank_pattern there"
                )
        return found

    def find_common_scale(
        self, shapes: Mapping[str, Shape], parameters: Collection[str] = ()
    ) -> tuple[int, float]:
        """Rank and alpha of all adapters; ConversionError, naming modules, if they differ, or if no
        policy has such an alpha. See `find_modules`.
        """
        found = self.find_modules(shapes, parameters)
        found |= {each: self.settings.find_scale(each) for each in parameters}
        if not found:
            raise ConversionError(f"{self.root} has no adapters: its {ADAPTER_MODEL} is empty")
        (first, own), *others = found.items()
        if own[1] <= 0:
            raise ConversionError(
                f"{self.root} has adapters of alpha {own[1]:g} for {first}, but a policy's is "
                "above 0: merge them into their base (megatron-policy convert --merge)"
            )
        for module, other in others:
            if other != own:
                raise ConversionError(
                    f"{self.root} has adapters of rank and alpha {own} for {first} and of {other} "
                    f"for {module}, but a policy's are all alike: merge them into their base "
                    "(megatron-policy convert --merge)"
                )
        return own

    def find_parameters(self, legal: Collection[str], model: object) -> list[str]:
        """The tensors with stacked experts that are adapted, of those that a model has. They have
        no more adapters than one for all experts. ConversionError if it has no such tensor.
        """
        named = self.settings.parameters
        fitting = {name: self.settings.match_parameters(name, legal) for name in named}
        unknown = [name for name, found in fitting.items() if not found]
        why = (
            f"{model} has no such tensors with stacked experts: give the model that they are of, "
            "or start a policy from them, which also reads those that PEFT stacked"
        )
        self._refuse("adapts target_parameters", unknown, why)
        return [each for each in legal if any(each in found for found in fitting.values())]

    def check_base(self, model: str | Path, digest: str, overrides: Mapping[str, Any]) -> None:
        """ConfigError unless they are adapters of `model`, which with these overrides has that
        digest, as far as the directory says of which.
        """
        if self.stated is None:
            check_named(self.root, self.settings, model, overrides)
        else:
            self.stated.check(self.root, model, digest, overrides)

    def _refuse(self, what: str, names: list[str], why: str) -> None:
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            shown = ", ".join(names[:_SHOWN])
            raise ConversionError(f"{self.root} {what} {shown}{more}; {why}")


def read_peft(root: Path) -> PeftAdapters:
    """What a directory of PEFT's `save_pretrained` or of `export_peft` says. ConfigError if it is
    neither, ConversionError for adapters of another kind, or files that are damaged.
    """
    give = "give a directory that PEFT's save_pretrained or export_peft wrote"
    if not root.exists():
        near = nearest(root, directory=True)
        meant = f" (did you mean {near}?)" if near != root else ""
        raise ConfigError(f"{root} does not exist{meant}: {give}")
    if not root.is_dir():
        raise ConfigError(f"{root} is a file: {give}")
    names = (ADAPTER_CONFIG, ADAPTER_MODEL)
    if missing := [name for name in names if not (root / name).is_file()]:
        command = how_to_convert(root)
        made = f"; {command} makes one of a training checkpoint" if command else ""
        raise ConfigError(f"{root} has no {' and no '.join(missing)}: {give}{made}")
    found = read_description(root)
    settings = found.settings
    if not settings.parameters:
        return found
    with HfReader(root, ADAPTER_MODEL) as reader:
        modules, stacked = name_modules(settings.parameters, reader.shapes)
    targets = None if settings.targets is None else settings.targets | modules
    return replace(found, settings=replace(settings, targets=targets, parameters=tuple(stacked)))


def read_description(root: Path) -> PeftAdapters:
    """What the files in `root` say of adapters whose tensors can be elsewhere; see `read_peft`."""
    config = read_object(root, ADAPTER_CONFIG)
    settings = read_settings(config, root)
    stated: StatedBase | None = None
    if (root / BASE).is_file():
        found = read_object(root, BASE)
        model, digest = found.get("model"), found.get("digest")
        overrides = found.get("hf_config_overrides", {})
        if not (isinstance(model, str) and isinstance(digest, str) and isinstance(overrides, dict)):
            raise ConversionError(
                f"{root / BASE} is damaged: it does not name a base and its digest"
            )
        stated = StatedBase(model, digest, overrides)
    return PeftAdapters(root, config, settings, stated)


def read_object(root: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file; ConversionError if it is damaged."""
    try:
        found = strict_json.parse(read(inside(root, name), _MAX_BYTES), finite=False)
    except (OSError, ValueError) as error:
        raise ConversionError(f"{root / name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConversionError(f"{root / name} is not an object")
    return found


def peft_contents(spec: AdapterSpec, config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files that say what adapters are, of these fields of `adapter_config.json`."""
    base: dict[str, Any] = {"model": spec.model, "digest": spec.base}
    if spec.overrides:
        base["hf_config_overrides"] = dict(spec.overrides)
    return {
        ADAPTER_CONFIG: strict_json.encoded(config, indent=2),
        BASE: strict_json.encoded(base, indent=2),
    }
