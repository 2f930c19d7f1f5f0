"""The config.json of a Hugging Face checkpoint, with the defaults of its transformers class."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megatron_policy.converters.architecture import MOST_LAYERS
from megatron_policy.converters.config_fields.quantisation import SECTION, Scheme, scheme_of
from megatron_policy.converters.families.shared.omni import find_prefix, take_part
from megatron_policy.converters.families.shared.pictures import PART, TENSORS, UNREAD
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.contained import (
    expanded,
    how_to_convert,
    inside,
    names_in,
    read,
)
from megatron_policy.converters.registry import FAMILIES, MAKERS, Family, family_of
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import ConfigError, ConversionError

from .hf_location import locate
from .hf_overrides import ROPE, in_kind
from .section_fields import find_unread

CONFIG, VISION = "config.json", "vision_config"
_SHOWN = 10
_FIXED = {"model_type", "architectures", "dtype", "torch_dtype", SECTION, "transformers_version"}
_ALWAYS_KNOWN = ROPE[0] | ROPE[1] | {"pad_token_id"}
MAX_BYTES = 16 * 2**20
DECODERS = ("language_model.", "text_model.")
"""What transformers' composite models call their decoder, with the names of its tensors behind."""
# Fields of a config.json that do not describe the model but that transformers acts on: code to
# run, kernels and files to fetch, the number of labels to make up. Reading a checkpoint must not
# trigger these.
_NOT_THE_MODEL = re.compile(
    r"_?(attn|experts)_implementation.*|auto_map|configuration_files|transformers_weights"
    r"|gguf_file|use_kernels?|kernel_config|_?name_or_path|_commit_hash|num_labels|distributed_config"
)


def read_config(model: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Every field of the model's HF config, class defaults included, with the values of
    `overrides` in place of its own.

    Fields common to all transformers models are left out where they have their common default. The
    config of an added family that transformers does not know is taken from the file unchanged.
    ConfigError when there is no such model, or transformers cannot read its config or is too old
    for it; ConversionError for a model_type without a family, and for a config.json that links to
    somewhere else.
    """
    whole = _parse(model)
    config = take_part(whole)
    if overrides:
        _check_overrides(model, config, overrides)
        config |= overrides
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise _unreadable(model, f"its model_type is {kind!r:.100}, not the name of a family")
    known_as = _known_as(kind)  # importing a package that adds a family may register its class
    from transformers import CONFIG_MAPPING, PretrainedConfig, __version__

    if kind in FAMILIES and known_as not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers {__version__} has no models of the type {known_as!r}, whose defaults a "
            f"config.json of {kind} relies on: install a newer transformers"
        )
    if known_as in CONFIG_MAPPING:
        config = _completed(model, config, _family_of(kind).surrounded)
        if known_as != kind:  # transformers itself changes the type for some values
            config["model_type"] = kind
    common = PretrainedConfig().to_dict()
    common.pop("tie_word_embeddings", None)  # describes the model, so it always counts
    prefix = find_prefix(whole)
    return _without(config, common) | ({PART: prefix} if prefix else {})


def _without(config: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and those of models within it, without the fields that have these values."""
    return {
        name: _without(v, common) if isinstance(v, Mapping) and "model_type" in v else v
        for name, v in config.items()
        if name not in common or v != common[name]
    }


def _check_overrides(
    model: str | Path, config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> None:
    """ConfigError for fields that the model's config does not have or that have to stay."""
    fixed = sorted(name for name in overrides if name in _FIXED or _NOT_THE_MODEL.fullmatch(name))
    if fixed:
        raise ConfigError(f"{', '.join(fixed)} cannot be overridden: it says which model this is")
    known = config.keys() | read_config(model).keys()
    if unknown := sorted(overrides.keys() - known - _ALWAYS_KNOWN):
        close = get_close_matches(unknown[0], known, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"the model's {CONFIG} has no {', '.join(unknown)}{meant}")
    for own, other in (ROPE, ROPE[::-1]):
        if any(config.get(name) for name in own) and (given := other & overrides.keys()):
            raise ConfigError(
                f"the model's {CONFIG} has {', '.join(sorted(own & config.keys()))}: override "
                f"that, as a whole, instead of {', '.join(sorted(given))}"
            )


def written_config(model: str | Path) -> dict[str, Any]:
    """The fields as written in config.json, dtypes by their plain names; ConfigError if it is
    missing or unreadable. Of several models in a checkpoint, those of the one that is trained.
    """
    return take_part(_parse(model))


def _parse(model: str | Path) -> dict[str, Any]:
    """All that config.json says, see `written_config`."""
    path = expanded(model)
    if path.is_dir() or not path.exists():
        path = inside(locate(model, [CONFIG]), CONFIG)
    if not path.exists():
        has = ", ".join(names_in(path.parent, directories=False)[:_SHOWN]) or "nothing"
        command = how_to_convert(path.parent)
        made = f". {command} makes one of it" if command else ""
        raise ConfigError(
            f"{path.parent} has no {CONFIG}: it is not a Hugging Face checkpoint, but has "
            f"{has}{made}"
        )
    try:
        config = strict_json.parse(read(path, MAX_BYTES), finite=False)
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        _check_layers(config)
        for name in ("dtype", "torch_dtype"):
            if isinstance(dtype := config.get(name), str):
                # A tool wrote `torch.bfloat16`, which transformers does not read.
                config[name] = dtype.removeprefix("torch.")
        if isinstance(kind := config.get("model_type"), str):
            config["model_type"] = MAKERS.get(kind, kind)
    except OSError as error:
        raise _unreadable(model, error.strerror) from error
    except ValueError as error:
        raise _unreadable(model, error) from error
    return config


def scheme_in(root: Path) -> Scheme | None:
    """How the weights of the checkpoint at `root` are quantised; None if they are not, or in a way
    that is not read.
    """
    if not (root / CONFIG).is_file():
        return None
    return scheme_of(written_config(root).get(SECTION))


def transformers_config(model: str | Path, overrides: Mapping[str, Any] | None = None) -> Any:
    """The config of a model as an object of its transformers class, with or without a family here,
    and with the values of `overrides` in place of its own.

    ConfigError where transformers cannot read it.
    """
    config = written_config(model)
    config |= in_kind(overrides or {}, config, config)
    with for_transformers(config, families_only=False) as folder:
        try:
            return _read(config, folder)
        except MemoryError:
            raise
        except Exception as error:  # fields of unexpected types can raise anything in there
            raise _unreadable(model, str(error).replace(str(folder), str(model))) from error


@contextmanager
def for_transformers(config: Mapping[str, Any], *, families_only: bool = True) -> Iterator[Path]:
    """A directory with only that config, for transformers to read.

    Leaves out fields that would make it run code, fetch kernels or open files of the checkpoint's
    choice. Its model_type is the one under which transformers has the family's class; without a
    family it stays, unless `families_only`.
    """
    fields = _model_alone(config)
    if isinstance(kind := config.get("model_type"), str) and (families_only or has_family(kind)):
        fields["model_type"] = _known_as(kind)
    with TemporaryDirectory(prefix="config-") as name:
        (Path(name) / CONFIG).write_bytes(strict_json.encoded(fields))
        yield Path(name)


def has_family(kind: str) -> bool:
    """Whether there is a family of this model_type, of this package or of an installed one."""
    try:
        family_of(kind)
    except ConversionError:
        return False
    return True


def _known_as(kind: str) -> str:
    """Under which model_type transformers has it; ConversionError where there is no family."""
    return _family_of(kind).hf_model_type or kind


def _family_of(kind: str) -> Family:
    return FAMILIES.get(kind) or family_of(kind)


def _completed(model: str | Path, config: Mapping[str, Any], surrounded: bool) -> dict[str, Any]:
    """The fields, completed with their class's defaults and, of a decoder that is `surrounded`, the
    tensors of its shell and what nothing reads of its sections.
    """
    if surrounded and config.get(VISION) is None:  # its class would take another tower than any
        raise ConversionError(f"config.json has no {VISION}, which this model family needs")
    with for_transformers(config) as folder:
        try:
            read = _read(config, folder)
            found = read.to_dict()
            states = build_without_values(read).state_dict() if surrounded else {}
            if surrounded:
                found[UNREAD] = find_unread(_model_alone(config), read)
                found[TENSORS] = {
                    name: [*tensor.shape]
                    for name, tensor in states.items()
                    # Whole numbers are no weights.
                    if tensor.is_floating_point() and not name.startswith(DECODERS)
                }
        except MemoryError:
            raise
        except Exception as error:  # fields of unexpected types can raise anything in there
            raise _unreadable(model, str(error).replace(str(folder), str(model))) from error
    if surrounded and not any(name.startswith(DECODERS) for name in states):
        from transformers import __version__

        raise ConfigError(
            f"transformers {__version__} builds models of the type {read.model_type!r} with a "
            "decoder that stands in no module of its own: install a newer transformers"
        )
    # Families state why they do not need the code it names, and which release wrote the weights.
    kept = {name: config[name] for name in ("auto_map", "transformers_version") if name in config}
    return {**found, **kept, "_name_or_path": str(model)}


def _read(config: Mapping[str, Any], folder: Path) -> Any:
    """The config in `folder` as an object of its transformers class. Releases before 5 state in the
    decoder's section alone whether embeddings are tied, but for models that hear whose class says
    it.
    """
    section = config.get(SECTION)
    # At these values transformers fails without naming the field.
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"{SECTION} is {section!r:.40}, not a section of fields")
    for name in ("dtype", "torch_dtype"):
        if (value := config.get(name)) is not None:
            try:
                dtype_named(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    found = _auto_config().from_pretrained(folder, trust_remote_code=False)
    tied: str = "tie_word_embeddings"
    own: Any = getattr(found, "text_config", None)
    stated = {tied, "audio_config"} & config.keys()
    alone = not stated and isinstance(config.get("text_config"), Mapping)
    if (alone or not hasattr(found, tied)) and hasattr(own, tied):
        found.tie_word_embeddings = own.tie_word_embeddings
    return found


def find_composite(config: Any) -> Any:
    """The class whose `from_config` makes the model of a config that has a decoder as a part: that
    without a head, if transformers has one.
    """
    from transformers import AutoModel, AutoModelForImageTextToText

    return AutoModel if type(config) in AutoModel._model_mapping else AutoModelForImageTextToText


def build_without_values(config: Any, **more: Any) -> Any:
    """The model of a config of transformers on the meta device, see `find_composite`. `more` are
    arguments of `from_config`.
    """
    with torch.device("meta"):
        return find_composite(config).from_config(config, **more)


def _auto_config() -> Any:
    """transformers' AutoConfig, imported without its models.

    Its validators of configs import these with torch, to know the names of activations, which takes
    longer than all else that a command imports. Without torch they do not check these names.
    """
    validators = "transformers.utils.type_validators"
    if validators not in sys.modules:
        with suppress(ImportError):  # of a release without validators
            for imported in ("tokenization_utils_base", "video_utils"):
                import_module(f"transformers.{imported}")  # before: they ask for torch as well
            from transformers.utils import import_utils

            asked = import_utils.is_torch_available
            import_utils.is_torch_available = lambda: False
            try:
                import_module(validators)
            finally:
                import_utils.is_torch_available = asked
    from transformers import AutoConfig

    return AutoConfig


def _model_alone(value: Any) -> Any:
    if isinstance(value, list):
        return [_model_alone(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _model_alone(each)
        for name, each in value.items()
        if _NOT_THE_MODEL.fullmatch(name) is None
    }


def _check_layers(config: Mapping[str, Any]) -> None:
    """ValueError for more layers than any model or tower has: transformers would make them."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            _check_layers(value)
        elif not ("layer" in name or name == "depth") or not isinstance(value, int | float):
            continue
        elif value > MOST_LAYERS:
            raise ValueError(f"{name} is {value!r:.40}, and no model has more than {MOST_LAYERS}")


def _unreadable(model: str | Path, error: object) -> ConfigError:
    path = expanded(model)
    return ConfigError(f"{path / CONFIG if path.is_dir() else path} cannot be read: {error}")
