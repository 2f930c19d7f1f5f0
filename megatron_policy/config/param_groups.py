"""Finds the group of each parameter: a group says how parameters are trained, or freezes them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from typing import Any, get_args

from megatron_policy.config import MegatronConfig, PolicyConfig
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.trained import ParamGroupConfig, ParamRole
from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.rows import Role
from megatron_policy.converters.rows.blocks import of_expert
from megatron_policy.converters.scalar_head import TENSORS as SCALAR_HEAD
from megatron_policy.converters.table import EMBEDDING, HEAD, Entry, Table
from megatron_policy.errors import ConfigError

_KEY = "policy.megatron_cfg.optimizer.param_groups"
_TORCH_KEY = "policy.optimizer.param_groups"
_ROUTER = ".mlp.router."
_SHOWN = 4
_ROLES: tuple[ParamRole, ...] = get_args(ParamRole)
_BASE = ParamGroupConfig(roles=tuple(r for r in _ROLES if r != "adapter"), freeze=True)
"""What adapters leave as it is: all else but a scalar head."""
_ROUTERS = ParamGroupConfig(roles=("router",), freeze=True)
_TOWER = ParamGroupConfig(roles=("vision",), freeze=True)
_OF_PROJECTORS = (
    *("*merger*", "*multi_modal_projector*", "*.connector.*", "*mm_projector.*", "mlp1.*"),
    "*image_newline",
)
_OF_EARS, _OF_SOUND_PROJECTORS = ("*audio_tower.*", "sound_encoder.*"), ("sound_projection.*",)
_BESIDE_TOWER = (*_OF_PROJECTORS, *_OF_EARS, *_OF_SOUND_PROJECTORS)
_EARS = ParamGroupConfig(names=_OF_EARS, roles=("vision",), freeze=True)
_SOUND_PROJECTORS = ParamGroupConfig(names=_OF_SOUND_PROJECTORS, roles=("vision",), freeze=True)
_PROJECTORS = ParamGroupConfig(names=_OF_PROJECTORS, roles=("vision",), freeze=True)
_DECODER = ParamGroupConfig(roles=tuple(r for r in _ROLES if r != "vision"), freeze=True)
_SEEING = ParamGroupConfig(
    names=("*vision*", "*visual*", "*image_encoder*"), roles=("vision",), freeze=True
)
_HEARING = ParamGroupConfig(
    names=("*audio*", "*speech*", "*sound*"), roles=("vision",), freeze=True
)
_BODY = ParamGroupConfig(roles=tuple(r for r in _ROLES if r not in ("vision", "head")), freeze=True)
_BUT = {
    **dict.fromkeys(map(id, (_BASE, _DECODER, _BODY)), SCALAR_HEAD),
    id(_TOWER): _BESIDE_TOWER,
}
"""Patterns of names that are not in the group all the same."""
_OF_KEYS = (
    *(_BASE, _ROUTERS, _TOWER, _PROJECTORS, _EARS, _SOUND_PROJECTORS, _DECODER),
    *(_SEEING, _HEARING, _BODY),
)
_IMPLIED = [id(group) for group in _OF_KEYS]
"""Groups that other keys ask for, which say themselves whether the model has to have them: `peft`,
`freeze_moe_router`, those of `freeze_config`, and what freezes parts beside it.
"""


@dataclass(frozen=True)
class FreezeKeys:
    """Keys that freeze a part of a model without naming its tensors."""

    section: str = ""
    parts: Mapping[str, tuple[bool, ParamGroupConfig]] = field(default_factory=dict)
    """Of each key of the section whether it is set, and what it freezes."""
    optional: frozenset[str] = frozenset()
    """Those that may ask for a part which the model lacks."""

    @property
    def asked(self) -> list[str]:
        """Those that are set."""
        return [key for key, (on, _) in self.parts.items() if on]

    @property
    def groups(self) -> list[ParamGroupConfig]:
        """What is frozen."""
        return [self.parts[key][1] for key in self.asked]

    def list_idle(self, table: Table) -> list[str]:
        """The keys that ask in vain and may."""
        asked = (key for key in self.asked if key in self.optional)
        return [key for key in asked if not self._finds(key, table)]

    def check(self, table: Table) -> None:
        """ConfigError for a key that asks for a part which the model lacks, and has to find it."""
        for key in self.asked:
            if key not in self.optional and not self._finds(key, table):
                parts = ", ".join(each for each in self.parts if self._finds(each, table))
                raise ConfigError(
                    f"{self.section}.{key}=True would keep nothing: {table.family} has no such "
                    f"part. Leave the key out; those for parts that the model has are {parts}"
                )

    def _finds(self, key: str, table: Table) -> bool:
        return any(map(ParamGroups([self.parts[key][1]]).frozen, table.entries))


def role_of(entry: Entry) -> str:
    """The role of a parameter, as `ParamGroupConfig.roles` names it."""
    if entry.adapts:
        return "adapter"
    if _ROUTER in entry.megatron:
        return "router"
    if entry.megatron.startswith(PARAMETERS):
        return "vision"
    if entry.row.role is not Role.MATRIX:
        return str(entry.row.role.value)
    if of_expert(entry.row.megatron):
        return "expert"
    # A tied head is a copy of the embedding.
    if entry.where == EMBEDDING or not entry.row.owns:
        return "embedding"
    return "head" if entry.where == HEAD and entry.megatron.startswith("output_layer") else "linear"


class ParamGroups:
    """The groups of a configuration over the parameters of a table. The first that fits counts."""

    def __init__(
        self,
        groups: Sequence[ParamGroupConfig] = (),
        key: str = _KEY,
        freezing: FreezeKeys = FreezeKeys(),
    ) -> None:
        self._groups, self._key, self.freezing = tuple(groups), key, freezing
        self._patterns = [
            None if group.names is None else re.compile("|".join(map(translate, group.names)))
            for group in groups
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParamGroups) and self._groups == other._groups

    def __hash__(self) -> int:
        return hash(self._groups)

    @classmethod
    def of(cls, settings: MegatronConfig) -> ParamGroups:
        """The groups that `settings` ask for."""
        part = settings.freeze_config
        keys = FreezeKeys(
            "policy.megatron_cfg",
            {
                "freeze_vision_model": (settings.freeze_vision_model, _TOWER),
                "freeze_vision_projection": (settings.freeze_vision_projection, _PROJECTORS),
                "freeze_sound_encoder": (settings.freeze_sound_encoder, _EARS),
                "freeze_sound_projection": (settings.freeze_sound_projection, _SOUND_PROJECTORS),
                "freeze_config.freeze_vision_model": (part.freeze_vision_model, _TOWER),
                "freeze_config.freeze_vision_projection": (
                    part.freeze_vision_projection,
                    _PROJECTORS,
                ),
                "freeze_config.freeze_language_model": (part.freeze_language_model, _DECODER),
            },
        )
        routers = [_ROUTERS] if settings.freeze_moe_router else []
        first = [_BASE] if settings.peft.enabled else [*routers, *keys.groups]
        return cls([*first, *settings.optimizer.param_groups], freezing=keys)

    @classmethod
    def of_policy(cls, config: PolicyConfig) -> ParamGroups:
        """The groups that the optimizer of the engine has."""
        if engine_of(config) is Engine.MEGATRON_CORE:
            return cls.of(config.megatron_cfg)
        part, own = config.dtensor_cfg.automodel_kwargs.freeze_config, config.optimizer
        keys = FreezeKeys()
        if part is not None and engine_of(config) is Engine.FSDP2:
            parts = {
                "freeze_vision_tower": (part.freeze_vision_tower, _SEEING),
                "freeze_audio_tower": (part.freeze_audio_tower, _HEARING),
                "freeze_language_model": (part.freeze_language_model, _BODY),
            }
            # NeMo RL's recipes ask for the tower that hears whatever the model, the section's
            # default for the one that sees.
            optional = parts.keys() - part.model_fields_set | {"freeze_audio_tower"}
            section = "policy.dtensor_cfg.automodel_kwargs.freeze_config"
            keys = FreezeKeys(section, parts, frozenset(optional))
        return cls([*keys.groups, *(() if own is None else own.param_groups)], _TORCH_KEY, keys)

    def group_of(self, entry: Entry) -> ParamGroupConfig | None:
        """The group of a parameter; None where none fits: it is trained as the optimizer says."""
        if not self._groups:
            return None
        return self._group(role_of(entry), entry.hf[0])

    def described(self, entry: Entry) -> str:
        """In a few words, how the parameter is trained."""
        group = self.group_of(entry)
        if group is None:
            return "as the optimizer says"
        rates = group.model_dump(include={"lr", "min_lr", "weight_decay"}, exclude_none=True)
        said = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        return "frozen" if group.freeze else f"with {said}"

    def frozen(self, entry: Entry) -> bool:
        """Whether the parameter keeps its value."""
        group = self.group_of(entry)
        return group is not None and group.freeze

    def _group(self, role: str, name: str) -> ParamGroupConfig | None:
        for group, pattern in zip(self._groups, self._patterns, strict=True):
            fits = pattern is None or pattern.fullmatch(name) is not None
            if fits and any(fnmatchcase(name, each) for each in _BUT.get(id(group), ())):
                continue
            if fits and (group.roles is None or role in group.roles):
                return group
        return None

    def check(self, table: Table) -> None:
        """ConfigError if a pattern or a group fits no tensor of the table, if tensors that make one
        parameter are in different groups, if experts of a layer are, if nothing is trained, or if a
        group has none of the adapters beside which all else is frozen.
        """
        if not self._groups:
            return
        if not table.entries:
            raise ConfigError(
                f"{self._key} needs a family of this package, and {table.family} is none: leave it "
                "out"
            )
        self.freezing.check(table)
        names = [name for entry in table.entries for name in entry.hf]
        for group in self._groups:
            for pattern in () if id(group) in _IMPLIED else group.names or ():
                if not any(map(re.compile(translate(pattern)).fullmatch, names)):
                    close = get_close_matches(pattern, names, _SHOWN, 0.0)
                    raise ConfigError(
                        f"{self._key}: no tensor of the model has a name like {pattern!r}; it has "
                        f"{', '.join(close)} and others"
                    )
        self._refuse_empty(table)
        experts: dict[tuple[int | None, str], set[int]] = defaultdict(set)
        trained = False
        for entry in table.entries:
            role = role_of(entry)
            own = {id(self._group(role, name)) for name in entry.hf}
            if len(own) > 1:
                raise ConfigError(
                    f"{self._key}: {', '.join(entry.hf)} are one parameter in training, "
                    f"{entry.megatron}, but only some of them are in a group: name all of them"
                )
            if entry.expert is not None:
                alike = experts[entry.layer, entry.row.megatron]
                alike |= own
                if len(alike) > 1:
                    raise ConfigError(
                        f"{self._key}: experts of a layer are trained alike, but "
                        f"{', '.join(entry.hf)} is in another group than that of another expert: "
                        "put * where the expert's number is"
                    )
            trained = trained or (entry.row.learnt and not self.frozen(entry))
        if not trained:
            raise ConfigError(f"{self._key} freezes every parameter: leave some to be trained")
        self._refuse_idle(table)

    def _refuse_empty(self, table: Table) -> None:
        """ConfigError for a group with roles that no tensor of its names has."""
        for group, pattern in zip(self._groups, self._patterns, strict=True):
            if group.roles is None or id(group) in _IMPLIED:
                continue
            named = (
                role_of(entry)
                for entry in table.entries
                if pattern is None or any(map(pattern.fullmatch, entry.hf))
            )
            found = dict.fromkeys(named)
            if not found.keys() & set(group.roles):
                whose = "the model" if pattern is None else "what names fits"
                fix = ", or set policy.megatron_cfg.peft" if "adapter" in group.roles else ""
                raise ConfigError(
                    f"{self._key}: no parameter is in the group {_show(group)}: {whose} has "
                    f"the roles {', '.join(found)}; name one of these{fix}, or leave the group out"
                )

    def _refuse_idle(self, table: Table) -> None:
        """ConfigError for a group with rates that nothing trained is in, if there are adapters."""
        adapters = [entry for entry in table.entries if entry.adapts]
        head = [entry for entry in table.entries if entry.hf[0] in SCALAR_HEAD]
        used = {id(self.group_of(entry)) for entry in [*adapters, *head]}
        for group in self._groups if adapters else ():
            if not group.freeze and id(group) not in used:
                raise ConfigError(
                    f"{self._key}: no adapter is in the group {_show(group)}, and all else is "
                    "frozen beside adapters: use roles: [adapter], or their names in PEFT, as "
                    f"{adapters[0].hf[0]!r}"
                )


def _show(group: ParamGroupConfig) -> dict[str, Any]:
    """How the configuration chooses the group."""
    chosen = group.model_dump(exclude_none=True, include={"names", "roles"})
    return {name: list(values) for name, values in chosen.items()}
