"""Published models with experts at the layouts that clusters train them in, from configs alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout, layer_split, topology_of
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConfigError
from tests.families import PUBLISHED
from tests.hybrid_sizes import HYBRIDS

MODELS = PUBLISHED | HYBRIDS
BUCKET = 512 * 2**20
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8 |= {"activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@dataclass(frozen=True)
class Cell:
    """A layout; `first` and `last` are the layers of the outer stages, `biases` those in fp32."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int
    first: int | None = None
    last: int | None = None
    biases: int = 0
    quantised: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def layers(self, total: int) -> list[int]:
        """Of each stage."""
        if self.first is None or self.last is None:
            return [total // self.pp] * self.pp
        inner = (total - self.first - self.last) // max(self.pp - 2, 1)
        return [self.first, *[inner] * (self.pp - 2), self.last]


CELLS = {
    "Qwen3-30B-A3B": Cell(1, 16, 1, 2, 16),
    "Qwen3-235B-A22B": Cell(8, 8, 2, 2, 16, first=11, last=11),
    "DeepSeek-V3 in bf16": Cell(16, 32, 1, 1, 32, 3, 2, biases=58 * 256, quantised=FP8),
    "gpt-oss-20b in bf16": Cell(1, 16, 1, 4, 8, quantised=MXFP4),
    "gpt-oss-120b in bf16": Cell(1, 128, 1, 1, 64, quantised=MXFP4),
    "GLM-4.5": Cell(4, 8, 1, 8, 32, biases=89 * 160),
    "Kimi-K2-Instruct in bf16": Cell(8, 8, 1, 8, 64, 7, 6, biases=60 * 384, quantised=FP8),
    "Nemotron-3-Nano-30B-A3B": Cell(1, 32, 1, 2, 16, biases=23 * 128),
    "Nemotron-3-Super-120B-A12B": Cell(1, 64, 1, 4, 64, biases=40 * 512),
    "Qwen3-Next-80B-A3B-Instruct": Cell(4, 16, 1, 2, 32),
    "Qwen3.5-397B-A17B, text": Cell(8, 8, 1, 8, 64, first=6, last=6),
}
"""Expert parallelism of 8 to 64 on up to 512 ranks; where NeMo RL has recipes for the model, one of
their layouts. DeepSeek-V3, Kimi-K2 and gpt-oss are quantised as published.
"""


def write_config(path: Path, name: str, **changes: Any) -> Path:
    """The file of a published config; None among the changes leaves a field out."""
    fields = MODELS[name][1] | changes
    left_out = {key for key, value in changes.items() if value is None}
    written = {key: value for key, value in fields.items() if key not in left_out}
    (path / "config.json").write_text(json.dumps(written))
    return path / "config.json"


@pytest.fixture(scope="module", params=CELLS)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, Cell, Path]:
    """The name of a model, its cell, and the directory of its config."""
    cell, path = CELLS[request.param], tmp_path_factory.mktemp("model")
    write_config(path, request.param, quantization_config=cell.quantised or None)
    return request.param, cell, path


def policy_of(cell: Cell, path: Path) -> dict[str, Any]:
    """The `policy` section of a configuration."""
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": cell.tp,
        "pipeline_model_parallel_size": cell.pp,
        "context_parallel_size": cell.cp,
        "expert_model_parallel_size": cell.ep,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": cell.tp > 1,
        "num_layers_in_first_pipeline_stage": cell.first,
        "num_layers_in_last_pipeline_stage": cell.last,
    }
    return {
        "model_name": str(path),
        "precision": "bfloat16",
        "train_global_batch_size": 2048,
        "train_micro_batch_size": 1,
        "megatron_cfg": megatron,
    }


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def size(text: str) -> float:
    """Bytes of a printed size."""
    number, unit = text.split()
    return float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


@pytest.mark.dear
def test_every_field_and_tensor_of_a_config_alone_is_understood(
    model: tuple[str, Cell, Path],
) -> None:
    name, _, path = model
    said = command("inspect", path / "config.json")
    assert said.splitlines()[1].startswith("only config.json was read")
    assert "0 without their tensors; 0 tensors ignored, 0 unmatched" in said.splitlines()[-1]
    fields = MODELS[name][1]
    assert all(re.search(rf"^  (translated|ignored) +{each}\b", said, re.M) for each in fields)


@pytest.mark.dear
def test_a_refit_at_a_clusters_layout_is_planned_by_bytes(model: tuple[str, Cell, Path]) -> None:
    name, cell, path = model
    parameters, fields = MODELS[name]
    options = {"pp": cell.pp, "dp": cell.dp, "cp": cell.cp, "tp": cell.tp, "ep": cell.ep, "etp": 1}
    options |= {"first-layers": cell.first, "last-layers": cell.last}
    asked = [word for key, n in options.items() if n for word in (f"--{key}", n)]
    said = command("plan", "--refit", path / "config.json", *asked)
    head, note, *rest = said.splitlines()
    nbytes = 2 * parameters + 2 * cell.biases  # correction biases keep their fp32
    tensors, total = re.search(r"layers: (\d+) tensors, (\S+ \S+), on", head).groups()
    assert size(total) == pytest.approx(nbytes, rel=5e-3)  # three digits are printed
    axes = f"pp {cell.pp} x dp {cell.dp} x cp {cell.cp} x tp {cell.tp}"
    assert head.endswith(f"on {cell.ranks} ranks = {axes}, experts ep {cell.ep} x etp 1")
    assert note.startswith("only config.json was read")
    stages = [line for line in rest if line.startswith("  stage ")]
    held = [re.search(r"layers (\d+)(?:-(\d+))?, (\d+) tensors", line).groups() for line in stages]
    layers = [int(last or first) - int(first) + 1 for first, last, _ in held]
    assert layers == cell.layers(fields["num_hidden_layers"])
    assert sum(int(count) for *_, count in held) == int(tensors)
    found = re.search(r"^exchange: (\d+) rounds of .*?(\d+) collectives on each rank", said, re.M)
    rounds, collectives = map(int, found.groups())
    # A round carries a bucket, rounded up by at most 3 %. Experts and all else have rounds of their
    # own; experts, without which there may be no exchange, are at least nine tenths of the bytes.
    fewest = nbytes / BUCKET
    assert math.floor(0.9 * fewest / 1.03) <= rounds <= math.ceil(fewest) + 2
    # A round is exchanged between stages and within one, and another time where its owner changes,
    # unless the experts of all ranks are in one tensor.
    changes = 0 if fields["model_type"] == "gpt_oss" else cell.pp * cell.ep
    assert rounds <= collectives <= (1 + (cell.pp > 1)) * (rounds + changes)


@pytest.mark.dear
def test_a_configuration_at_a_clusters_layout_is_inspected(
    model: tuple[str, Cell, Path], tmp_path: Path
) -> None:
    name, cell, path = model
    policy = policy_of(cell, path)
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump({"policy": policy}))
    said = command("inspect-config", tmp_path / "policy.yaml", "--world-size", cell.ranks)
    axes = f"pp={cell.pp} x dp={cell.dp} x cp={cell.cp} x tp={cell.tp}"
    assert f"{cell.ranks} = {axes}" in said
    layers, first = cell.layers(MODELS[name][1]["num_hidden_layers"]), 0
    for stage, count in enumerate(layers):
        per_stage = cell.ranks // cell.pp
        ranks = f"{stage * per_stage}-{(stage + 1) * per_stage - 1}"
        cells = [rf"\b{stage}\b", ranks, rf"\b{first}-{first + count - 1}\b"]
        assert re.search(r"[^\n\d]+".join(cells), said), (stage, said)
        first += count


RECIPES = {
    "Qwen3-30B-A3B": """8/1/1/1/8 16/1/1/1/8 16/1/1/1/16 32/1/1/1/8 128/1/1/1/8 16/1/2/1/8
        16/2/1/1/8 32/2/1/1/16 32/2/2/1/2 64/2/1/1/8 64/2/2/4/8 8/4/1/2/8 32/4/1/1/8 32/4/1/8/8
        64/4/2/2/4 64/4/4/1/4""",
    "Qwen3-235B-A22B": """64/2/4/2/16/23/23 128/2/4/2/16/23/23 128/2/8/2/16/11/11
        256/2/8/2/16/11/11 64/4/4/1/16/23/23 128/4/8/1/16/11/11""",
    "DeepSeek-V3 in bf16": """128/1/8/1/16/7/6 256/1/8/1/32/7/6 256/1/16/1/16/3/2
        512/1/16/1/32/3/2 128/4/8/4/16/7/6 256/8/8/4/32/7/6 512/8/8/4/32/7/6""",
    "gpt-oss-20b in bf16": "32/1/1/1/8 64/4/1/1/8",
    "Moonlight-16B-A3B": "16/1/2/1/2/14/13 32/1/4/1/4/7/6",
    "Nemotron-3-Nano-30B-A3B": "16/2/1/1/8",
    "Nemotron-3-Super-120B-A12B": "128/4/1/1/32 64/4/1/1/32 16/2/1/1/16",
    "Qwen3.5-35B-A3B, text": "16/2/1/2/16 16/1/1/1/16",
    "Qwen3.5-397B-A17B, text": "256/8/8/1/32/6/6",
}
"""Layouts of NeMo RL's recipes for models with experts: ranks/TP/PP/CP/EP, and where stages differ
the layers of the first and of the last. Experts are never tensor parallel in these.
"""


@pytest.mark.parametrize("name", RECIPES)
def test_the_layouts_of_recipes_fit_their_models(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, name)
    architecture = bind(read_config(tmp_path)).architecture
    assert architecture.moe is not None
    for layout in RECIPES[name].split():
        ranks, tp, pp, cp, ep, *ends = map(int, layout.split("/"))
        first, last = ends or (None, None)
        cell = Cell(pp, ranks // (tp * pp * cp), cp, tp, ep, first, last)
        config = PolicyConfig.parse(policy_of(cell, tmp_path))
        topology = topology_of(config, ranks)
        check_layout(config, architecture, topology)
        split = layer_split(config, architecture, topology)
        held = [sum(map(len, chunks)) for chunks in split.stages]
        assert held == cell.layers(architecture.num_layers), layout
        worse = dict(policy_of(cell, tmp_path)["megatron_cfg"], expert_model_parallel_size=7)
        with pytest.raises(ConfigError, match="expert_model_parallel_size=7"):
            other = PolicyConfig.parse(policy_of(cell, tmp_path) | {"megatron_cfg": worse})
            check_layout(other, architecture, topology_of(other, 7 * ranks))


def test_a_directory_without_weights_is_its_config_for_a_plan_and_names_it_to_inspect(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, "Mixtral-8x7B-v0.1")
    assert command("plan", "--refit", tmp_path) == command("plan", "--refit", config)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert f"has a config and no weights; give {config}" in result.stderr


@pytest.mark.parametrize("arguments", [["convert", "{}", "out", "--to", "mcore"], ["verify", "{}"]])
def test_a_config_alone_is_no_checkpoint_to_convert_or_verify(
    tmp_path: Path, arguments: list[str]
) -> None:
    config = write_config(tmp_path, "Mixtral-8x7B-v0.1")
    result = CliRunner().invoke(app, [each.format(config) for each in arguments])
    assert result.exit_code == 2 and "config.json is a file" in result.stderr


@pytest.mark.parametrize(
    ("dtype", "said"), [("float32", "float32"), (None, "bfloat16"), ("int4", None)]
)
def test_tensors_of_a_config_have_the_dtype_that_it_names(
    tmp_path: Path, dtype: str | None, said: str | None
) -> None:
    config = write_config(tmp_path, "OLMoE-1B-7B-0924", torch_dtype=None, dtype=dtype)
    result = CliRunner().invoke(app, ["inspect", str(config), "--json"])
    if said is None:
        assert result.exit_code == 2 and "int4" in result.stderr
        return
    found = json.loads(result.stdout)
    assert found["config_only"] is True and found["problems"] == []
    assert {each for weight in found["weights"] for each in weight["found"]} == {said}
