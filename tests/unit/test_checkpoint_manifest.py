"""A training checkpoint's manifest is read as it was written, or refused with what is wrong; what a
caller may give to a save, and what a load tells.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_policy.checkpoint import manifest as manifests
from megatron_policy.checkpoint.manifest import (
    NAME,
    ByteRange,
    CheckpointManifest,
    current_versions,
    digest_of,
)
from megatron_policy.checkpoint.report import LoadReport, check_host_data
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.formats.digests import UNSEALED, seal
from tests.checkpoints import IS_OLDER
from tests.families import PUBLISHED

MANIFEST = CheckpointManifest(
    id="00ff",
    step=12,
    contains=("weights", "random"),
    optimizer_elsewhere=True,
    versions={"megatron_policy": "0.1.0"},
    layout={"tp": 2, "vpp": None},
    family="qwen2",
    config="abcd",
    tensors={"größe.weight": (torch.bfloat16, (3, 4)), "scalar": (torch.float32, ())},
    records={"__0_0.distcp": (ByteRange(0, 10, "aa"), ByteRange(10, 5, "bb")), "__1_0.distcp": ()},
    files={"hf/config.json": "cc"},
)


def write(root: Path, change: Callable[[dict[str, Any]], object] = lambda content: None) -> Path:
    """The manifest with a change and the digest that belongs to it."""
    content = json.loads(MANIFEST.encode())
    change(content)
    content["digest"] = UNSEALED
    (root / NAME).write_bytes(seal(json.dumps(content).encode()))
    return root / NAME


def refused(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        manifests.read(root)
    assert str(root / NAME) in str(caught.value)
    return str(caught.value)


def test_a_manifest_is_read_as_it_was_written(tmp_path) -> None:
    (tmp_path / NAME).write_bytes(MANIFEST.encode())
    found = manifests.read(tmp_path)
    assert found == MANIFEST and found.root == tmp_path and found.nbytes == 15
    assert isinstance(found.records["__0_0.distcp"][0], ByteRange)
    empty = dataclasses.replace(MANIFEST, tensors={}, records={}, files={})
    (tmp_path / NAME).write_bytes(empty.encode())
    assert manifests.read(tmp_path) == empty
    write(tmp_path, lambda content: content.update(comment="from a later version"))
    assert manifests.read(tmp_path) == MANIFEST


def test_a_manifest_with_a_flipped_bit_cut_or_of_another_form_is_damaged(tmp_path) -> None:
    text = MANIFEST.encode()
    flips = (text[:n] + bytes([text[n] ^ 1 << n % 8]) + text[n + 1 :] for n in range(len(text)))
    cuts = (text[:length] for length in (0, 1, 30, 300, -2))
    others = (b"[]", b"3", b"{}", b'{"digest": 3}', b"[" * 100_000, b'{"format": 2}')
    for content in (*flips, *cuts, *others):
        (tmp_path / NAME).write_bytes(content)
        assert "damaged" in refused(tmp_path), content


def test_a_missing_manifest_asks_whether_the_save_was_finished(tmp_path) -> None:
    assert "missing: is the checkpoint complete, and was it written by" in refused(tmp_path)
    assert "missing" in refused(tmp_path / "nowhere")
    (tmp_path / NAME).mkdir()
    assert "cannot be read: Is a directory" in refused(tmp_path)


def test_a_newer_format_names_the_version_to_install_whatever_else_it_has(tmp_path) -> None:
    def newer(content: dict[str, Any]) -> None:
        del content["records"], content["model"], content["step"]
        content.update(format=2, tensors="elsewhere", versions={"megatron_policy": "3.1"})

    path = write(tmp_path, newer)
    said = refused(tmp_path)
    assert "written by megatron-policy 3.1: install that or a newer one" in said
    assert "damaged" not in said
    # Edited by hand, or sealed in a way that only the newer version knows.
    path.write_bytes(path.read_bytes().replace(b"elsewhere", b"elsewhen!"))
    said = refused(tmp_path)
    assert "3.1: install that or a newer one" in said and "or it is damaged" in said
    write(tmp_path, lambda content: content.update(format=2, versions=None))
    assert "of a newer version: install" in refused(tmp_path)
    write(tmp_path, lambda content: content.update(format=0))
    assert "its format is 0" in refused(tmp_path)


def test_a_missing_field_is_named(tmp_path) -> None:
    for field in [*json.loads(MANIFEST.encode())][2:]:
        write(tmp_path, lambda content, field=field: content.pop(field))
        assert f"it lacks '{field}'" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": "twelve"}, "twelve"),
        ({"tensors": {"a": ["float31", [2]]}}, "float31"),
        ({"tensors": {"a": ["Tensor", [2]]}}, "'Tensor' is not the name of a dtype"),
        ({"tensors": [1]}, "damaged"),
        ({"records": {"a": [[1, 2]]}}, "damaged"),
        ({"records": {"a": [[1, -2, "x"]]}}, "-2 bytes from 1 on"),
        ({"records": {"../a": []}}, "'../a', which is not in its directory"),
        ({"files": {"/etc/passwd": "00"}}, "'/etc/passwd', which is not in its directory"),
    ],
)
def test_a_field_of_another_form_is_damaged(tmp_path, change: Any, said: str) -> None:
    write(tmp_path, lambda content: content.update(change))
    assert said in refused(tmp_path)


def test_another_model_is_refused_by_family_and_by_config(tmp_path) -> None:
    write(tmp_path)
    found = manifests.read(tmp_path)
    manifests.check_model(found, "qwen2", "abcd")
    with pytest.raises(CheckpointError, match=f"{tmp_path} is of a qwen2 model.* is llama"):
        manifests.check_model(found, "llama", "abcd")
    with pytest.raises(CheckpointError, match=f"{tmp_path} is of a different qwen2 model"):
        manifests.check_model(found, "qwen2", "abce")


def test_the_digest_of_a_model_is_that_of_its_numbers(tmp_path) -> None:
    digests, read = set(), 0
    for _, config in PUBLISHED.values():
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            found = bind(read_config(tmp_path)).architecture
        except ConfigError as error:
            assert IS_OLDER and "install a newer transformers" in str(error)
            continue
        read += 1
        digests.add(digest_of(found))
        wider = dataclasses.replace(found, hidden_size=2 * found.hidden_size)
        assert digest_of(wider) != digest_of(found)
        assert digest_of(dataclasses.replace(wider, hidden_size=found.hidden_size)) in digests
    assert len(digests) == read > 0.9 * len(PUBLISHED)
    assert IS_OLDER or read == len(PUBLISHED)


@dataclasses.dataclass
class Old:
    width: int


@dataclasses.dataclass
class New(Old):
    depth: int | None = None
    names: list[str] = dataclasses.field(default_factory=list)
    rate: float = dataclasses.field(default=0.0, compare=False)


def test_a_field_that_a_later_version_adds_with_a_default_changes_no_digest() -> None:
    assert digest_of(New(3)) == digest_of(Old(3)) != digest_of(Old(4))
    assert len({digest_of(new) for new in (New(3), New(3, 0), New(3, names=["a"]))}) == 3
    assert digest_of(New(3, rate=0.5)) == digest_of(New(3))


def test_versions_are_those_of_what_writes() -> None:
    found = current_versions()
    assert found["torch"] == torch.__version__ and re.match(r"0\.1\d", found["megatron_core"])
    assert set(found) == {"megatron_policy", "megatron_core", "torch", "python"}


SAVED_DIGESTS = {
    "Llama-3.1-8B": "9bb8716034c5c2a0",
    "Mistral-7B-v0.1": "61723b6574d21e40",
    "DeepSeek-V3 in bf16": "39d2ea74435ede90",
    "GLM-4.5-Air": "dc1a7e35311a09d2",
}
"""What checkpoints of these models have in their manifests since November 2026."""
FULL, WINDOWED = "full_attention", "sliding_attention"
DIGESTS_OF_ROPES = {
    ("Olmo-3-1025-7B", None, None): "09cb1e9ca5a59c96",
    ("Olmo-3-1025-7B", None, WINDOWED): "594f34aaf0f3d54f",
    ("gemma-3-1b-it", None, WINDOWED): "64065408fab3ea59",
    ("EXAONE-4.0-32B", 4096, FULL): "c1c5ba9c807578d1",
}
"""The same of models with another window, and layers of one kind, without scaled positions."""


def test_checkpoints_of_before_are_of_the_same_model() -> None:
    """The digest has the names of an architecture's fields: a field that is renamed would make
    every checkpoint of its models one of another model.
    """
    configs = {model: PUBLISHED[model][1] for model in SAVED_DIGESTS}
    tables = {model: bind({"hidden_act": "silu"} | config) for model, config in configs.items()}
    assert {
        model: digest_of(table.architecture) for model, table in tables.items()
    } == SAVED_DIGESTS


@pytest.mark.parametrize("case", DIGESTS_OF_ROPES)
def test_rotary_embeddings_that_no_layer_shows_are_in_the_digest(case: Any, tmp_path: Path) -> None:
    model, window, kind = case
    config = PUBLISHED[model][1] | ({} if window is None else {"sliding_window": window})
    if kind is None:
        config = {name: value for name, value in config.items() if name != "rope_scaling"}
    else:
        config["layer_types"] = [kind] * config["num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert digest_of(bind(read_config(tmp_path)).architecture) == DIGESTS_OF_ROPES[case]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {"b": {2}}]}, r"host_data\['a'\]\[1\]\['b'\] is a set"),
        ({"path": Path("x")}, r"host_data\['path'\] is a PosixPath"),
        ({"n": numpy.float64(1.0)}, r"host_data\['n'\] is a float64"),
        ({"f": (print,)}, r"host_data\['f'\]\[0\] is a builtin_function_or_method"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
        ([1], "host_data is a list: give a dict"),
        (0, "host_data is a int: give a dict"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_place(value: Any, place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        check_host_data(value)


def test_plain_values_and_tensors_pass() -> None:
    check_host_data({"a": [1, 2.0, None, True, "x", b"y"], 3: {"t": torch.ones(2), "u": (1, ())}})


def test_a_report_says_line_by_line_what_is_not_restored() -> None:
    report = LoadReport("run/iter_0000003", 3, ("weights",), {"optimizer": "it has none"}, {})
    assert str(report).splitlines() == [
        "run/iter_0000003, step 3: restored weights",
        "  not restored: optimizer (it has none)",
    ]
