"""The recipes are what their plans and pages say: checked from configurations alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_policy.config import PolicyConfig
from tests.families import PUBLISHED
from tests.hosts.test_examples import RECIPES, composed, resolved
from tests.unit.test_estimate_plan import MODELS, model, run

ROOT = Path(__file__).parents[2]
INDEX = ROOT / "docs" / "recipes.md"
PUBLISHED_AS = {
    "Qwen2.5-VL": "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL": "Qwen3-VL-30B-A3B-Instruct",
    "Qwen2.5": "Qwen2.5-7B",
    "Qwen3-30B": "Qwen3-30B-A3B",
    "DeepSeek": "DeepSeek-V3",
    "Nemotron-3": "Nemotron-3-Nano-30B-A3B",
    "Qwen3-Next": "Qwen3-Next-80B-A3B-Instruct",
}


def planned(policy: dict[str, Any], options: str, folder: Path) -> str:
    """What the command prints of a policy whose model is a config.json and nothing else."""
    name = policy["model_name"].rpartition("/")[2]
    known = {name: fields for name, (_, fields) in PUBLISHED.items()}
    known |= {name: fields for name, (fields, _) in MODELS.items()}
    fields = known[next(PUBLISHED_AS[maker] for maker in PUBLISHED_AS if maker in name)]
    local = folder / "policy.yaml"
    local.write_text(
        yaml.safe_dump({"policy": policy | {"model_name": str(model(folder, fields))}})
    )
    code, said, errors = run(local, *options.split())
    assert code == 0, errors
    return said


def options_of(file: Path) -> str:
    """What the command for the plan of a recipe is told, as its page shows it."""
    page = file.with_name("README.md").read_text()
    (said,) = re.findall(r"megatron-policy plan examples/recipes/\S+ (.*)\n", page)
    return str(said)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.parent.name)
def test_the_plan_of_a_recipe_is_what_the_command_prints_also_of_all_that_the_host_adds(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEMO_RL", "/checkout")
    document = composed(file)
    policy = resolved(document["policy"], document["policy"])
    options = options_of(file)
    own = yaml.safe_load(file.with_name("policy.yaml").read_text())["policy"]
    plan = file.with_name("plan.txt").read_text()
    assert planned(own, options, tmp_path) == plan
    assert planned(policy, options, tmp_path) == plan
    # Under a host that uses the GPUs too, more has to be free than the reserve of a plan.
    free = min(float(row.split()[-1]) for row in re.findall(r"^ +\d+ .*$", plan, re.MULTILINE))
    assert free > 20


def test_the_command_for_7b_is_shown_with_its_plan_with_and_without_transformer_engine(
    tmp_path: Path,
) -> None:
    folder = ROOT / "examples" / "recipes" / "qwen2.5_7b_grpo"
    page, plan = (ROOT / "docs" / "nemo-rl.md").read_text(), (folder / "plan.txt").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"```\n{plan}```\n" in page
    assert "--config $MEGATRON_POLICY/examples/recipes/qwen2.5_7b_grpo/nemo_rl.yaml" in page
    own = yaml.safe_load((folder / "policy.yaml").read_text())["policy"]
    local = own | {"megatron_cfg": own["megatron_cfg"] | {"transformer_impl": "local"}}
    with_te, without = (
        float(re.findall(r"^fits: ([\d.]+) GiB", each, re.MULTILINE)[0])
        for each in (plan, planned(local, "--gpus 8", tmp_path))
    )
    assert f"the peak is {without} GiB" in page and f"{with_te} GiB on each" in readme
    assert f"{without - with_te:.1f} GiB more" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.parent.name)
def test_the_page_of_a_recipe_says_first_that_it_has_not_run_then_its_plan_and_commands(
    file: Path,
) -> None:
    page = file.with_name("README.md").read_text()
    title, first, *_ = page.split("\n\n")
    assert title.startswith("# ") and first.startswith("**No GPU has run this.**")
    plan = file.with_name("plan.txt").read_text().splitlines()
    assert all(line in page for line in plan if line.startswith(("fits:", "a step takes")))
    cluster = yaml.safe_load(file.read_text())["cluster"]
    gpus, folder = cluster["gpus_per_node"] * cluster["num_nodes"], file.parent.name
    policy = f"examples/recipes/{folder}/policy.yaml"
    patches = PolicyConfig.from_yaml(file.with_name("policy.yaml")).max_patches_per_microbatch
    seen = f" --patches {patches}" if patches else ""
    assert f"$ megatron-policy plan {policy} --gpus {gpus}{seen}\n" in page
    assert f"$ megatron-policy inspect-config {policy} --world-size {gpus}\n" in page
    assert f"--config $MEGATRON_POLICY/examples/recipes/{folder}/nemo_rl.yaml" in page
    assert PolicyConfig.from_yaml(file.with_name("policy.yaml")).model_name in page
    assert "\n## What to watch\n" in page
    (row,) = (line for line in INDEX.read_text().splitlines() if f"/{folder}/README.md" in line)
    peak = next(line for line in plan if line.startswith("fits:")).split()[1]
    assert row.endswith(f"| {float(peak):.1f} |")
