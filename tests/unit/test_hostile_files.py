"""Files that are made to hurt whoever reads them: one line, exit 1, and nothing is reached."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_policy.checkpoint.common_state import OURS, source_dtypes
from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.convert import convert
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.formats.dist_writing import COMMON
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.converters.formats.hf_names import INDEX, MANIFEST, SINGLE
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.formats.digests import UNSEALED, seal
from megatron_policy.parity.reference import read_reference
from megatron_policy.parity.result import Job
from tests.floors import package_modules
from tests.unit.test_conversion_damage import write_raw
from tests.unit.training_checkpoints import make_save

SMALL = {"layers": 2, "vocab": 250, "hidden": 32, "heads": 2, "groups": 1, "ffn": 48}


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen2", **SMALL), tmp_path / "model"))


def refused(*arguments: object, codes: tuple[int, ...] = (1, 2)) -> str:
    """The one line that a command leaves; 2 is of a config.json that cannot be read."""
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code in codes, (arguments, result.output, result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert len(result.stderr) < 5000
    return result.stderr


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=40)
@given(value=values)
def test_plain_json_is_read_as_it_was_written(value: Any) -> None:
    assert strict_json.parse(strict_json.encoded(value), finite=False) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "deep"),
        ("[" * 65 + "]" * 65, "deep"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, "deep"),
        ('{"b": [{"a": 1, "a": 2}]}', "duplicate keys: a$"),
        ("[NaN]", "NaN"),
        ("[1, -Infinity]", "-Infinity"),
        ("[1e999]", "1e999"),
        ("9" * 5000, "digits"),
        ("", "Expecting value"),
        ("\udcff", "decode"),
    ],
)
def test_what_is_no_json_or_hurts_is_a_value_error(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        strict_json.parse(text.encode("utf-8", "surrogateescape"))


def test_names_that_stand_twice_are_found_in_one_pass_and_those_that_steer_terminals_escaped(
    model: Path,
) -> None:
    """Of 200,000 pairs, each name against all names would be 40 thousand million comparisons."""
    entry = '{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    header = ", ".join(f'"n{number % 100_000}": {entry}' for number in range(200_000))
    write_raw(model / SINGLE, f"{{{header}}}", bytes(4))
    assert "n0, n1, " in (said := refused("inspect", model)) and "and 99980 more." in said
    write_raw(model / SINGLE, json.dumps({"x\x1b]0;evil\x07\ny": json.loads(entry)}), bytes(4))
    result = CliRunner().invoke(app, ["inspect", str(model)])
    assert result.exit_code == 1 and "\x1b" not in result.output and r"\x1b" in result.output
    assert result.stderr.count("\n") == 1


def test_a_shape_that_no_tensor_has_is_refused(model: Path) -> None:
    for shape in ([1] * 100, [2**63, 0], [10**4000, 0], [True]):
        entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        write_raw(model / SINGLE, json.dumps({"x": entry}), b"")
        assert SINGLE in refused("inspect", model), shape


def bomb(levels: int) -> str:
    """Nine times nine times nine ... values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]")
    return "\n".join([*lines, f"policy: {{model_name: *a{levels - 1}}}"])


def merges(levels: int) -> str:
    lines = ["a0: &a0 {k: 1}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}")
    return "\n".join([*lines, f"policy: *a{levels - 1}"])


YAML = {
    "aliases of aliases": (bomb(10), "more than 100000 values"),
    "merges of merges": (merges(30), "more than 100000 values"),
    "a mapping in itself": ("policy: &p {model_name: m, x: *p}", "contains itself"),
    "a list in itself": ("policy: {model_name: &l [*l]}", "contains itself"),
    "lists in lists": ("policy: " + "[" * 50_000, "deep"),
    "blocks in blocks": ("".join(" " * n + "a:\n" for n in range(400)), "deep"),
    "sixty levels": ("policy: " + "[" * 60 + "]" * 60, "deep"),
    "a large file": ("policy: {}\n" + "#" * 2**18, "bytes"),
    "no day": ("policy: {model_name: 2001-99-99}", "month"),
    "an endless number": ("policy: {model_name: " + "9" * 5000 + "}", "digits"),
    "no text": ("policy: \udcff", "not valid YAML"),
    "a key twice": ("policy: {model_name: m, model_name: n}", "'model_name' a second time"),
    "no truth": ("policy: {model_name: !!bool abc}", "not valid YAML"),
    "a number of nothing": ("policy: {model_name: !!int ''}", "not valid YAML"),
    "a time of no day": ("policy: {model_name: !!timestamp abc}", "not valid YAML"),
    "a number too long to write": (
        "policy: {train_micro_batch_size: 0x" + "f" * 9000 + "}",
        "a int too long to write",
    ),
    "a call": ("policy: !!python/object/apply:os.mkdir [evil-was-here]", "not valid YAML"),
}


@pytest.mark.parametrize(("text", "said"), YAML.values(), ids=YAML)
def test_a_configuration_that_hurts_is_one_line(
    tmp_path: Path, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "policy.yaml"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=said):
        PolicyConfig.from_yaml(file)
    assert said in refused("inspect-config", file, codes=(2,))
    assert os.listdir(tmp_path) == ["policy.yaml"]


def test_aliases_within_bounds_are_read_as_ever_and_messages_about_them_are_bounded(
    tmp_path: Path,
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "base: &base {train_micro_batch_size: 1, megatron_cfg: {enabled: true}}\n"
        "policy: {<<: *base, model_name: m, train_global_batch_size: 2, "
        "train_micro_batch_size: 2}\n"
    )
    config = PolicyConfig.from_yaml(file)
    assert config.train_micro_batch_size == 2 and config.megatron_cfg.enabled
    many = ", ".join(["*a"] * 5000)
    file.write_text(f"a: &a {'x' * 20_000}\npolicy: {{train_micro_batch_size: [{many}]}}\n")
    with pytest.raises(ConfigError) as caught:
        PolicyConfig.from_yaml(file)
    assert len(str(caught.value)) < 10_000


CONFIGS = (
    '{"model_type": "qwen2", "x": ' + "[" * 50_000,
    '{"model_type": "qwen2", "x": ' + '{"a": ' * 90 + "1" + "}" * 91,
    '{"model_type": "qwen2", "hidden_size": 32, "hidden_size": 64}',
    '{"model_type": ["qwen2"]}',
    '{"model_type": {"qwen2": 1}}',
    '{"model_type": "qwen2", "num_hidden_layers": 1000000000}',
    '{"model_type": "qwen2", "hidden_size": 1152921504606846976}',
    '{"model_type": "qwen2", "vocab_size": 1000000000000000000000000}',
    '{"model_type": "qwen2", "num_attention_heads": 4194304, "head_dim": 64}',
    '{"model_type": "qwen3_moe", "moe_intermediate_size": 1152921504606846976}',
    '{"model_type": "qwen2", "num_hidden_layers": Infinity}',
    '{"model_type": "qwen3_moe", "num_experts": 1000000000}',
    '{"model_type": "qwen2", "to_dict": 3, "__class__": "x"}',
    '{"model_type": "timm_backbone", "backbone": "evil/repo"}',  # of transformers alone
    "\udcff",
)


@pytest.mark.parametrize("command", [("inspect",), ("plan", "--refit"), ("parity",)])
def test_a_config_that_hurts_is_one_line(model: Path, command: tuple[str, ...]) -> None:
    for text in CONFIGS:
        (model / "config.json").write_text(text, errors="surrogateescape")
        refused(*command, model)


@pytest.mark.dear
@pytest.mark.parametrize(
    "value", [None, [], {}, "x", -1, 1e308, float("inf"), True, [[]]], ids=repr
)
def test_any_field_of_a_config_may_have_any_value_and_inspect_says_so_or_takes_it(
    model: Path, value: Any
) -> None:
    whole = json.loads((model / "config.json").read_text())
    for name in whole:
        (model / "config.json").write_text(json.dumps(whole | {name: value}))
        result = CliRunner().invoke(app, ["inspect", str(model)])
        assert result.exit_code in (0, 1, 2), (name, value, result.exception)
        assert result.stderr.count("\n") == bool(result.exit_code), (name, result.stderr)


INTERNAL = (
    {"_attn_implementation": "evil/kernel"},
    {"attn_implementation": "evil/kernel"},
    {"_attn_implementation_internal": "evil/kernel"},
    {"_attn_implementation": {"": "evil/kernel"}},
    {"_attn_implementation": "sdpa"},
    {"_experts_implementation": "evil/kernel"},
    {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
    {"auto_map": {"AutoConfig": "evil/repo--evil.C", "AutoModelForCausalLM": "evil/repo--e.M"}},
    {"transformers_weights": "../elsewhere.safetensors"},
    {"configuration_files": ["config.4.0.0.json"]},
    {"torch_dtype": "load"},
    {"num_labels": 10**12},
)


def test_the_reference_computes_eagerly_and_runs_nothing_whatever_the_config_asks_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import hub_kernels

    def reached(*arguments: Any, **settings: Any) -> Any:
        raise AssertionError("a kernel was asked for")

    def logits() -> Any:
        job = Job(str(model), 250, 2, 1, 1, False, "float32", 2, 8, 0, False, 60.0)
        return read_reference(str(model), job, "float32", per_layer=False).logits

    for name in ("load_and_register_attn_kernel", "get_kernel", "lazy_load_kernel"):
        monkeypatch.setattr(hub_kernels, name, reached, raising=False)
    plain, own = logits(), (model / "config.json").read_text()
    (model / "config.4.0.0.json").write_text("{}")
    (model / "evil.py").write_text(f"open({str(model / 'was-run')!r}, 'w')")
    (model / "generation_config.json").write_text("[" * 50_000)
    for fields in INTERNAL:
        change(model / "config.json", **fields)
        assert (logits() == plain).all(), fields
        (model / "config.json").write_text(own)
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/repo"}')
    with pytest.raises(ConversionError, match=r"adapter_config\.json beside whole weights"):
        logits()
    change(model / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="quantised to fp8"):
        logits()
    assert not (model / "was-run").exists()


MANIFESTS: tuple[dict[str, Any], ...] = (
    *({"files": files} for files in (None, [], {"config.json": None})),
    *({"files": {name: "0" * 16}} for name in ("../model/config.json", "/etc/passwd")),
    *({"tensors": tensors} for tensors in (None, {"x": 3})),
    {"tensors": {"x": ["float32", [1.5], "00"]}},
    {"tensors": {"x": ["load", [1], "00"]}},
    {"tensors": {"x": ["float32", [1], "not a digest"]}},
    *({"step": step} for step in (float("inf"), "3", -1)),
    *({"source": source} for source in (None, "x")),
    {"family": 3},
    {"digest": None},
    {"format": []},
)


def test_a_manifest_of_another_form_is_one_line(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "mcore", "mcore")
    path = tmp_path / "mcore" / MANIFEST
    whole = json.loads(path.read_text()) | {"digest": UNSEALED}
    for fields in MANIFESTS:
        path.write_bytes(seal(json.dumps(whole | fields).encode()))
        for command in (
            ("inspect", tmp_path / "mcore"),
            ("verify", tmp_path / "mcore"),
            ("convert", tmp_path / "mcore", tmp_path / "out", "--to", "hf"),
        ):
            said = refused(*command)
            assert f"{path} is damaged: " in said or "../" in said, (fields, command)
    assert sorted(os.listdir(tmp_path)) == ["mcore", "model"]


def test_a_manifest_that_is_none_is_refused_by_every_command(model: Path, tmp_path: Path) -> None:
    for content in ("[]", "3", "{", '{"files": {"../x": "0"}}', "null"):
        (model / MANIFEST).write_text(content)
        for command in (
            ("inspect", model),
            ("verify", model),
            ("verify", model, model),
            ("convert", model, tmp_path / "out", "--to", "mcore"),
            ("plan", "--refit", model),
        ):
            said = refused(*command)
            assert f"{model / MANIFEST} is damaged: " in said, (content, command)


NAMES = ("load", "Tensor", "__name__", "float32()", "", 3, None, ["float32"])


@pytest.mark.parametrize(
    "fields",
    [
        *({"source_dtypes": {"x": "bfloat16", "y": name}} for name in NAMES),
        *({"source_dtypes": dtypes} for dtypes in (["float32"], {3: "float32"}, None)),
        {"host_data": 3},
        {"adapters_of": []},
        {"schedule": [1]},
        {"optimizer_step": "3"},
        {"optimizer_step": -1},
    ],
    ids=repr,
)
def test_the_common_state_of_another_form_or_with_other_dtypes_is_damaged(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    torch.save({OURS: {"host_data": {}, "source_dtypes": {}} | fields}, tmp_path / COMMON)
    named = ".* not the name of a dtype" if "bfloat16" in repr(fields) else ""
    with pytest.raises(CheckpointError, match=f"{COMMON} is damaged: {named}"):
        source_dtypes(tmp_path)


def test_no_name_is_looked_up_among_the_attributes_of_torch() -> None:
    """What a file or a message names is found in `megatron_policy.dtypes` alone."""
    found = {
        module.name
        for module in package_modules(Path(__file__).parents[2])
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "getattr"
        and ast.unparse(node.args[0]) == "torch"
        and not isinstance(node.args[1], ast.Constant)
    }
    assert found == {"engines.megatron.cpu_platform"}, "its names are its own"


def test_a_manifest_of_a_training_of_another_form_is_one_line(tmp_path: Path) -> None:
    make_save(tmp_path, 3)
    path = tmp_path / "iter_0000003" / "checkpoint.json"
    whole = json.loads(path.read_text()) | {"digest": UNSEALED}
    for fields in (
        {"files": None},
        *({"step": step} for step in (float("inf"), 1e999)),
        *({"layout": layout} for layout in (None, {"tp": []})),
        {"records": {"a": [[0, float("inf"), "x"]]}},
        {"tensors": {"a": ["float32", [1e3]]}},
    ):
        path.write_bytes(seal(json.dumps(whole | fields).encode()))
        assert f"{path} is damaged: " in refused("verify", tmp_path), fields


@pytest.mark.parametrize(
    "name", ["config.json", SINGLE, INDEX, MANIFEST, "tokenizer.json", "metadata.json", ".metadata"]
)
def test_nobody_waits_for_a_pipe_that_stands_where_a_file_belongs(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    if name == INDEX:
        (model / SINGLE).unlink()
    os.mkfifo(model / name)
    harmless = name in ("tokenizer.json", "metadata.json", ".metadata")
    for command in (("inspect", model), ("verify", model, model)):
        result = CliRunner().invoke(app, [str(each) for each in command])
        looks = command[0] == "inspect" or name in (MANIFEST, SINGLE, INDEX)
        assert bool(result.exit_code) == (looks and not harmless), (command, result.output)
        assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_tracker_or_a_manifest_that_is_a_pipe_is_one_line(tmp_path: Path) -> None:
    make_save(tmp_path, 3)
    make_save(tmp_path, 2)
    for name, place in (
        ("iter_0000003/checkpoint.json", tmp_path / "iter_0000003"),
        ("latest_checkpointed_iteration.txt", tmp_path),
    ):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        assert str(place) in refused("verify", place)


def test_a_loop_of_links_or_a_home_that_nobody_has_is_one_line(model: Path, tmp_path: Path) -> None:
    for name, target in (("itself", "itself"), ("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(target)
    before = sorted(os.listdir(tmp_path))
    for loop in (tmp_path / "itself", tmp_path / "a"):
        for more in ((), ("--overwrite",)):
            said = refused("convert", model, loop, "--to", "mcore", *more)
            assert "leads back to itself" in said
        assert sorted(os.listdir(tmp_path)) == before
        refused("convert", loop, tmp_path / "out", "--to", "mcore")
    home = "~nobody-of-that-name/x"
    for command in (("inspect", home), ("convert", model, home, "--to", "mcore"), ("verify", home)):
        assert home in refused(*command)


def test_a_name_that_is_no_text_is_carried_along_and_printed_as_one(
    model: Path, tmp_path: Path
) -> None:
    name = os.fsdecode(b"no\xfftes.txt")
    (model / name).write_text("x")
    out = tmp_path / os.fsdecode(b"o\xffut")
    for command in (
        ("convert", model, out, "--to", "mcore", "--dry-run"),
        ("convert", model, out, "--to", "mcore"),
        ("verify", out),
        ("verify", out, model),
        ("convert", out, tmp_path / "back", "--to", "hf"),
    ):
        result = CliRunner().invoke(app, [str(each) for each in command])
        assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "back" / name).read_text() == "x"
    (out / "hf" / name).write_text("y")
    result = CliRunner().invoke(app, ["verify", str(out)])
    assert result.exit_code == 1 and r"no\udcfftes.txt is damaged" in result.stderr
    assert r"\udcff" in refused("inspect", out / "nothing")


def test_a_directory_with_nothing_but_pickled_weights_is_one_line(
    model: Path, tmp_path: Path
) -> None:
    (model / SINGLE).rename(model / "pytorch_model.bin")
    for _ in range(2):
        for command in (
            *((each, model) for each in ("inspect", "verify", "parity")),
            ("convert", model, tmp_path / "out", "--to", "mcore"),
            ("verify", model, model),
            ("plan", "--refit", model),
        ):
            assert "pytorch_model.bin" in refused(*command)
        (model / "pytorch_model.bin.index.json").write_text("{}")


def asked(*arguments: Any, **settings: Any) -> Any:
    raise AssertionError("the hub was asked")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`huggingface_hub`, which says so when it asks for a model."""
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", asked)
    return huggingface_hub


def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(hub, name, asked)
    paths = ("/no/such/dir", "./no/such", "no/such/dir", "../../no/such", "no/", "a b", "~/no/x")
    for path in paths:
        with pytest.raises(ConfigError, match="is not a directory"):
            read_config(path)
    with pytest.raises(AssertionError, match="asked"):
        read_config("org/name")


def test_a_typo_in_a_path_is_answered_with_the_nearest_directory_and_without_the_hub(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs" / "run1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typo, said in (
        ("output", "did you mean 'outputs'"),
        ("output/run1", "did you mean 'outputs/run1'"),
        ("outputs/run2", "did you mean 'outputs/run1'"),
        ("./output/run1/x", "did you mean 'outputs'"),
        ("other", "this directory has outputs. A hub repository is named owner/name"),
        ("a/b/c", "there is no a/b"),
    ):
        with pytest.raises(ConfigError, match=f"{typo}' is not a directory.*{said}"):
            locate(typo)


def test_a_hub_that_does_not_answer_is_asked_once(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, said in (
        (ConnectionError("no route"), r"the hub cannot be asked \(no route\)"),
        (OfflineModeIsEnabled("off"), "HF_HUB_OFFLINE forbids"),
    ):
        model_info = Mock(side_effect=error)
        monkeypatch.setattr(hub.HfApi, "model_info", model_info)
        with pytest.raises(ConfigError, match=f"'an-owner/a-name'.*{said}"):
            locate("an-owner/a-name")
        (call,) = model_info.call_args_list
        assert call.args == ("an-owner/a-name",) and 0 < call.kwargs["timeout"] <= 30


def test_a_repository_in_the_cache_is_found_beside_a_directory_of_its_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, here = tmp_path / "cache", tmp_path / "here"
    snapshot = cache / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (here / "org" / "other").mkdir(parents=True)
    monkeypatch.chdir(here)
    fetch = partial(huggingface_hub.snapshot_download, cache_dir=cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert locate("org/name").resolve() == snapshot.resolve()
    with pytest.raises(
        ConfigError, match=r"org has other\. If a hub repository .* hf download org/x"
    ):
        locate("org/x")
