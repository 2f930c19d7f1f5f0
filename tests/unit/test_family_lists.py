"""Lists of tests that a family has to be in, so that none of them leaves a new family out."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from random import Random
from typing import Any

from transformers import CONFIG_MAPPING

from megatron_policy.converters.registry import FAMILIES as OF_THE_PACKAGE
from megatron_policy.converters.rows import Ignore
from tests.checkpoints import ALL_FAMILIES, EPSILON, FAMILIES, HEAD_DIM, MAKERS_OWN
from tests.dist import test_fsdp2_unlisted as unlisted
from tests.dist.test_dense_models import WINDOWED, draw
from tests.dist.test_families import VARIANTS
from tests.dist.test_generate import KINDS
from tests.pure.test_table import small
from tests.unit.published import PUBLISHED
from tests.unit.test_families import MODELS
from tests.unit.test_family_configs import READ

MAKERS_CODE = "transformers has no class of that name; tests/unit/test_makers_code.py has its tests"
AS_CHECKPOINTS = "its layers are those of `checkpoints`, or of a family that is in the list"
SHOULD_HAVE: dict[str, tuple[Iterable[str], dict[str, str]]] = {
    "VARIANTS of tests/dist/test_families.py": (
        {str(sizes["family"]) for sizes in VARIANTS.values()},
        {},
    ),
    "KINDS of tests/dist/test_generate.py": (
        KINDS,
        dict.fromkeys(("llama", "mimo", "mistral", "qwen2", "qwen3", "seed_oss"), AS_CHECKPOINTS),
    ),
    "MODELS of tests/unit/test_families.py": (
        {family for family, _ in MODELS.values()},
        {"mimo": MAKERS_CODE},
    ),
    "READ of tests/unit/test_family_configs.py": (
        {family for family, _, _ in READ},
        {"mimo": MAKERS_CODE},
    ),
    "PUBLISHED of tests/unit/published.py": (
        {config["model_type"] for _, config in PUBLISHED.values()},
        {"apertus": "of its published config only sizes are here: tests/fake_device/models.py"},
    ),
}
"""The dense families that a list has, and those that need no entry, each with the reason."""
WITHOUT_WINDOW = {"mimo": "a config with windows is refused"}


def fields_of(family: str) -> dict[str, Any]:
    """The fields of the class that transformers has for the family, with their defaults."""
    return vars(class_of(family)())


def class_of(family: str) -> Any:
    return CONFIG_MAPPING[MAKERS_OWN.get(family, (family,))[0]]


def test_every_dense_family_is_in_every_list_or_has_a_reason_not_to_be() -> None:
    wrong = []
    for name, (listed, exempt) in SHOULD_HAVE.items():
        for family in FAMILIES:
            if family not in listed and family not in exempt:
                wrong.append(f"give {family} an entry in {name}, or a reason in SHOULD_HAVE")
            if family in listed and family in exempt:
                wrong.append(f"{family} is in {name}: it needs no reason not to be")
    assert wrong == [], "; ".join(wrong)


def test_every_family_has_a_tiny_checkpoint() -> None:
    for family in OF_THE_PACKAGE:
        assert family in ALL_FAMILIES, (
            f"give {family} an entry in FAMILIES of tests/checkpoints.py or, with experts, in "
            "EXPERTS of tests/expert_families.py"
        )


def test_tiny_checkpoints_set_the_epsilon_and_the_head_size_that_a_config_has() -> None:
    for family in ALL_FAMILIES:
        known = signature(class_of(family)).parameters
        own = EPSILON.get(family, "rms_norm_eps")
        assert own in known, (
            f"give {family} an entry in EPSILON of tests/checkpoints.py: "
            f"{[name for name in known if 'eps' in name]}"
        )
        assert "head_dim" not in known or family in HEAD_DIM, (
            f"put {family} into HEAD_DIM of tests/checkpoints.py: its config has a head_dim"
        )


def test_every_row_of_a_dense_family_applies_under_its_entry_in_full() -> None:
    for family in FAMILIES:
        applying = {
            entry.row.megatron
            for tied in (False, True)
            for entry in small(family, tie_word_embeddings=tied).entries
        }
        rows = {row.megatron for row in OF_THE_PACKAGE[family].table if not isinstance(row, Ignore)}
        assert rows == applying, (
            f"add to FULL[{family!r}] of tests/pure/test_table.py what switches these rows on: "
            f"{sorted(rows - applying)}"
        )


def test_random_models_of_a_dense_family_have_windows_and_partial_rotation_if_it_has() -> None:
    where = "of tests/dist/test_dense_models.py"
    for family in FAMILIES:
        fields = fields_of(family)
        assert "sliding_window" not in fields or family in (*WINDOWED, *WITHOUT_WINDOW), (
            f"give {family} an entry in WINDOWED {where}: its config has a sliding_window"
        )
        if "partial_rotary_factor" in str(fields):
            drawn = [draw(family, Random(seed)) for seed in range(20)]
            assert any("partial_rotary_factor" in sizes for sizes in drawn), (
                f"let draw_rope {where} draw the partial_rotary_factor of {family}"
            )


def test_models_without_a_family_have_none() -> None:
    known = sorted(unlisted.MODELS.keys() & OF_THE_PACKAGE.keys())
    assert known == [], f"take {known} out of MODELS of tests/dist/test_fsdp2_unlisted.py"
