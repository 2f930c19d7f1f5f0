"""All samples of the families that tests walk, by the family's name, which is that of its file."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from random import Random
from typing import Any

from tests.samples import Samples

SAMPLES: dict[str, Samples] = {
    module.name: import_module(f"{__name__}.{module.name}").SAMPLES
    for module in iter_modules(__path__)
}
DENSE = {family: samples for family, samples in SAMPLES.items() if not samples.experts}
EXPERTS = {family: samples for family, samples in SAMPLES.items() if samples.experts}

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {}
"""By the name of the model: its parameters, and its config as its maker published it."""
for _family, _samples in SAMPLES.items():
    _class = {"model_type": _family, "architectures": [_samples.architecture]}
    for _name, _fields in _samples.published.items():
        _config = COMMON | _class | _samples.own | _fields
        PUBLISHED[_name] = _config.pop("parameters"), _samples.surround(_config)


def draw_experts(family: str, seed: int) -> dict[str, Any]:
    """Random keywords for `make_checkpoint`: sizes, heads, experts and how they are chosen."""
    random = Random(f"{family} {seed}")
    heads = random.choice([2, 4, 6])
    groups = random.choice([n for n in (1, 2, 3, 6) if heads % n == 0])
    sizes: dict[str, Any] = {
        "hidden": random.choice([24, 48]),
        "layers": random.choice([2, 3]),
        "heads": heads,
        "groups": groups,
        "head_dim": random.choice([8, 16]),
        "ffn": random.choice([24, 40]),
        "vocab": random.choice([131, 150, 200]),
        "tied": random.random() < 0.3,
        EXPERTS[family].epsilon: random.choice([1e-5, 1e-6]),
        "seed": seed,
    }
    return sizes | EXPERTS[family].draw(random, sizes)
