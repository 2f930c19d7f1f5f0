"""The manifest of a refit: what a complete set of weights consists of, and how to check a set that
arrived.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.formats.manifest import count, text

FORMAT = 1
_NAMED = 8  # most names of one kind that an error lists

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


StagedVersion = tuple[str, int] | None
"""The chain and the version of the weights that an engine has staged, if they are of one."""


def read_version(value: Any) -> StagedVersion:
    """A version from JSON; ValueError for anything else."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"expected a chain and a number, found {value!r:.40}")
    return text(value[0]), count(value[1])


@dataclass(frozen=True)
class WeightVersion:
    """Which weights of a chain of versions a set makes an engine have: it is all of version
    `number`, or what makes any version from `since` on into that.
    """

    chain: str
    number: int
    since: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """What an engine has to know of a set of weights to serve them, besides their tensors."""

    hf_config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json that were given other values in training."""
    adapters: Mapping[str, Any] | None = None
    """The fields of PEFT's `adapter_config.json` (`r`, `lora_alpha`, `target_modules`, ...) if the
    tensors are adapters alone; None for whole models.
    """
    version: WeightVersion | None = None
    """Which weights they are, for engines that take what has changed; None if that is not said."""

    def plain(self) -> dict[str, Any]:
        """The fields that say something, for JSON."""
        of_adapters = {} if self.adapters is None else {"adapters": dict(self.adapters)}
        overrides = dict(self.hf_config_overrides)
        said = of_adapters | ({"hf_config_overrides": overrides} if overrides else {})
        return said | ({"version": asdict(self.version)} if self.version else {})

    @classmethod
    def from_plain(cls, fields: Any) -> ServedModel:
        """The inverse of `plain`; ValueError for anything else."""
        if not isinstance(fields, dict) or not all(isinstance(p, dict) for p in fields.values()):
            raise ValueError("what it says of the model is not fields")
        version = None
        if (stated := fields.get("version")) is not None:
            since = stated.get("since")
            version = WeightVersion(
                text(stated.get("chain")),
                count(stated.get("number")),
                None if since is None else count(since),
            )
        return cls(fields.get("hf_config_overrides", {}), fields.get("adapters"), version)

    def differences(self, other: ServedModel) -> list[str]:
        """Fields that differ from those of `other`, with both values."""
        pairs = (
            ("hf_config_overrides", self.hf_config_overrides, other.hf_config_overrides),
            ("adapters", self.adapters or {}, other.adapters or {}),
        )
        return [
            f"{what}.{name} is {own.get(name)!r:.80} instead of {there.get(name)!r:.80}"
            for what, own, there in pairs
            for name in {**own, **there}
            if own.get(name) != there.get(name)
        ]


class RefitInfo(dict[str, Any]):
    """What a refit sends: shape, dtype and, for some hosts, elements by name; and its `model`, None
    if that was not said.
    """

    model: ServedModel | None = None

    def __init__(self, tensors: Mapping[str, Any], model: ServedModel | None = None) -> None:
        super().__init__(tensors)
        self.model = model


def parse_info(expected: Mapping[str, Sequence[Any]]) -> RefitInfo:
    """Shape and dtype by name, from the (shape, dtype[, elements]) of `prepare_refit_info`.
    ConfigError for anything else.
    """
    try:
        tensors = {name: (tuple(shape), dtype) for name, (shape, dtype, *_) in expected.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected is {expected!r:.80}: give what the trainer's prepare_refit_info or "
            "exporter.plan().info() has returned"
        ) from error
    return RefitInfo(tensors, getattr(expected, "model", None))


@dataclass(frozen=True)
class TensorDigest:
    """One tensor: `digest` is the 64-bit digest of its bytes in row-major order."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def form(self) -> str:
        """Dtype and shape, in words."""
        return f"{name_dtype(self.dtype)} {list(self.shape)}"


def with_digests(forms: Mapping[str, Form], digests: Mapping[str, int]) -> dict[str, TensorDigest]:
    """The tensors of these shapes and dtypes, in their order, each with its digest."""
    return {name: TensorDigest(*form, digests[name]) for name, form in forms.items()}


@dataclass(frozen=True)
class RefitManifest:
    """All tensors of one refit by Hugging Face name, in the order they were sent.

    `step` is the number of optimizer steps taken so far; `algorithm` names the digest. The other
    fields are there in what `MegatronPolicy.refit` returns, and not sent. `seconds` is what it
    took, until all ranks had agreed. Of a refit that sends what has changed there are no tensors,
    but `changed_bytes`, and of one that sends all weights from shards to shards `shard_bytes`.
    `why_whole` says why all weights were sent where what has changed was to be sent.
    """

    step: int
    algorithm: str
    tensors: Mapping[str, TensorDigest]
    model: ServedModel = field(default_factory=ServedModel)
    changed_bytes: int = field(default=0, compare=False)
    shard_bytes: int = field(default=0, compare=False)
    why_whole: str = field(default="", compare=False)
    seconds: float = field(default=0.0, compare=False)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, of their shards, or of what has changed."""
        tensors = sum(sent.nbytes for sent in self.tensors.values())
        return tensors + self.shard_bytes + self.changed_bytes

    @property
    def bytes_per_second(self) -> float:
        """How fast this rank has sent its tensors; 0 without `seconds`."""
        return self.total_bytes / self.seconds if self.seconds else 0.0

    @property
    def speed(self) -> dict[str, float]:
        """`total_bytes`, `seconds` and `bytes_per_second` by name."""
        names = ("total_bytes", "seconds", "bytes_per_second")
        return {name: getattr(self, name) for name in names}

    def encode(self) -> bytes:
        """The manifest as JSON, for another process or a file."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "algorithm": self.algorithm,
            "total_tensors": len(self.tensors),
            "total_bytes": self.total_bytes,
            "model": self.model.plain(),
            "tensors": {
                name: [name_dtype(sent.dtype), list(sent.shape), f"{sent.digest:016x}"]
                for name, sent in self.tensors.items()
            },
        }
        return json.dumps(content, ensure_ascii=False).encode()

    @classmethod
    def decode(cls, content: bytes) -> RefitManifest:
        """The inverse of `encode`; RefitError for anything else or for inconsistent totals."""
        try:
            fields = json.loads(content)
            if (number := fields["format"]) != FORMAT:
                raise ValueError(f"it is of format {number}, but this version reads {FORMAT}")
            tensors = {
                name: TensorDigest(tuple(map(int, shape)), dtype_named(dtype), int(digest, 16))
                for name, (dtype, shape, digest) in fields["tensors"].items()
            }
            model = ServedModel.from_plain(fields.get("model", {}))
            found = cls(int(fields["step"]), str(fields["algorithm"]), tensors, model)
            totals = fields["total_tensors"], fields["total_bytes"]
            if (len(tensors), found.total_bytes) != totals:
                raise ValueError("its totals contradict its tensors")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RefitError(f"the manifest cannot be read: {error}; send the weights again") from (
                error
            )
        return found

    def check(self, arrived: Mapping[str, TensorDigest]) -> None:
        """RefitError, naming tensors, unless exactly these have arrived intact."""
        common = [
            (name, sent, arrived[name]) for name, sent in self.tensors.items() if name in arrived
        ]
        problems = describe_problems(
            {
                "missing": [name for name in self.tensors if name not in arrived],
                "not announced": [name for name in arrived if name not in self.tensors],
                "of another shape or dtype": [
                    f"{name} ({found.form} instead of {sent.form})"
                    for name, sent, found in common
                    if found.form != sent.form
                ],
                "with a wrong digest": [
                    name
                    for name, sent, found in common
                    if found.form == sent.form and found.digest != sent.digest
                ],
            }
        )
        if problems:
            raise RefitError(f"the weights of step {self.step} are refused: {problems}")


def describe_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """`3 missing: a, b, c; 1 unknown: d`, with no more names of a kind than fit on a line."""
    return "; ".join(
        f"{len(names)} {what}: {', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}"
        for what, names in problems.items()
        if names
    )


def compare_forms(expected: Mapping[str, Form], found: Mapping[str, Form]) -> str:
    """How the tensors that were found differ from those that an engine expects; empty if not."""
    differing = {
        name: form for name, form in expected.items() if name in found and found[name] != form
    }
    problems = describe_problems(
        {
            "missing": [name for name in expected if name not in found],
            "unknown to it": [name for name in found if name not in expected],
            "of another shape or dtype": [
                f"{name} {found[name]} instead of {form}" for name, form in differing.items()
            ],
        }
    )
    if any(found[name][1] != dtype for name, (_, dtype) in differing.items()):
        problems += (
            ". Directories have the checkpoint's dtypes, whatever refit_dtype is: for those expect "
            "what exporter.plan(as_stored=True).info() returns, or under Ray the driver's "
            "prepare_refit_info(as_stored=True)"
        )
    return problems
