"""What the samples of a family have to have, so that no test leaves a new family out."""

from __future__ import annotations

from inspect import signature
from random import Random
from typing import Any

from transformers import CONFIG_MAPPING

from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.registry import FAMILIES
from megatron_policy.converters.rows import Ignore
from tests.dist import test_fsdp2_unlisted as unlisted
from tests.dist.test_dense_models import draw
from tests.families import DENSE, EXPERTS, SAMPLES
from tests.pure.test_table import list_rows, small
from tests.samples import draw_scaling

WITHOUT_WINDOW = {"mimo": "a config with windows is refused"}
SIZES_ALONE = ("apertus", "ernie4_5_moe")
"""Of their published configs only sizes are here, in `larger`."""


def class_of(family: str) -> Any:
    """The class that transformers has of the config of the family's decoder."""
    return type(CONFIG_MAPPING[SAMPLES[family].hf_model_type or family]().get_text_config())


def test_every_family_has_a_file_of_samples_with_all_that_its_kind_needs() -> None:
    assert SAMPLES.keys() == FAMILIES.keys(), "give each family a file in tests/families"
    for family, samples in SAMPLES.items():
        where = f"of tests/families/{family}.py"
        # The makers' code of the others has its tests in tests/unit/test_makers_code.py.
        assert samples.read or samples.hf_model_type, f"give `read` {where} an entry"
        known = samples.published or family in SIZES_ALONE
        assert known, f"give `published` {where} a config of its makers"
    for family, samples in DENSE.items():
        assert samples.variants, f"give `variants` of tests/families/{family}.py every mode"
        assert all(name.startswith(family) for name in samples.variants), family
    for family, samples in EXPERTS.items():
        assert samples.draw is not draw_scaling, f"let tests/families/{family}.py draw experts"


def test_tiny_checkpoints_set_the_epsilon_and_the_head_size_that_a_config_has() -> None:
    for family, samples in SAMPLES.items():
        known = signature(class_of(family)).parameters
        assert samples.epsilon in known, (
            f"name the `epsilon` of {family}: {[name for name in known if 'eps' in name]}"
        )
        assert "head_dim" not in known or samples.head_dim, f"{family} has a head_dim: say so"


def test_every_row_of_a_dense_family_applies_under_its_full_settings() -> None:
    for family in DENSE:
        applying = {
            entry.row.megatron
            for tied in (False, True)
            for entry in small(family, tie_word_embeddings=tied).entries
            if not entry.megatron.startswith(PARAMETERS)
        }
        rows = {row.megatron for row in list_rows(family) if not isinstance(row, Ignore)}
        assert rows == applying, (
            f"add to `full` of tests/families/{family}.py what switches these rows on: "
            f"{sorted(rows - applying)}"
        )


def test_random_models_of_a_dense_family_have_windows_and_partial_rotation_if_it_has() -> None:
    for family, samples in DENSE.items():
        fields = vars(class_of(family)())
        assert (
            "sliding_window" not in fields
            or samples.windows is not None
            or family in WITHOUT_WINDOW
        ), f"give {family} `windows`: its config has a sliding_window"
        if "partial_rotary_factor" in str(fields):
            drawn = [draw(family, Random(seed)) for seed in range(20)]
            assert any("partial_rotary_factor" in sizes for sizes in drawn), (
                f"let `draw` of {family} draw its partial_rotary_factor"
            )


def test_models_without_a_family_have_none() -> None:
    known = sorted(unlisted.MODELS.keys() & FAMILIES.keys())
    assert known == [], f"take {known} out of MODELS of tests/dist/test_fsdp2_unlisted.py"
