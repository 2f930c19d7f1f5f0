"""Families whose config.json names code of their makers: none of it runs, and none is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megatron_policy.converters.architecture import Mla
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConversionError
from megatron_policy.parity.reference import read_reference
from megatron_policy.parity.result import Job
from tests.checkpoints import make_checkpoint
from tests.exact import load_hf
from tests.families import PUBLISHED, SAMPLES, draw_experts
from tests.mtp_checkpoints import add_mtp_layers


def put_code(path: Path) -> Path:
    """A file that exists once anything of the code beside the checkpoint has run."""
    ran = path.parent / "ran"
    named = json.loads((path / "config.json").read_text())["auto_map"].values()
    for module in {name.partition(".")[0] for name in named}:
        (path / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    return ran


def test_kimi_k2_is_read_as_a_deepseek_v3_and_no_code_beside_it_runs(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "k2", "kimi_k2", tokenizer=False, **draw_experts("kimi_k2", 1)
    )
    ran = put_code(path)
    found = read_config(path)
    written = json.loads((path / "config.json").read_text())
    assert found["model_type"] == written["model_type"] == "kimi_k2"
    assert found["auto_map"] == written["auto_map"]
    ours, twin = bind(found), bind(found | {"model_type": "deepseek_v3"})
    assert ours.family == "kimi_k2" and ours.architecture == twin.architecture
    assert ours.entries == twin.entries and ours.ignored == twin.ignored
    vocab, layers = ours.architecture.vocab_size, ours.architecture.num_layers
    job = Job(str(path), vocab, layers, 1, 1, False, "float32", 2, 9, 0, False, 60.0)
    reference = read_reference(str(path), job, "float32", per_layer=False)
    with torch.no_grad():
        assert torch.equal(reference.logits, load_hf(path)(job.draw()).logits)
    assert not ran.exists()


def test_mimo_is_read_as_a_qwen2_and_further_layers_change_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "mimo", "mimo", tokenizer=False, layers=2)
    job = Job(str(path), 256, 2, 1, 1, False, "float32", 2, 9, 0, False, 60.0)
    with torch.no_grad():
        logits = load_hf(path)(job.draw()).logits
    add_mtp_layers(path)
    ran = put_code(path)
    ours = bind(read_config(path))
    of_its_own = (*SAMPLES["mimo"].own, "architectures", "num_nextn_predict_layers")
    fields = {n: v for n, v in read_config(path).items() if n not in of_its_own}
    twin = bind(fields | {"model_type": "qwen2"})
    added = {"further_layers": 1, "mtp_before_norm": True}
    assert ours.architecture == replace(twin.architecture, **added)
    assert ours.entries == twin.entries
    assert {name.split(".")[1] for name in ours.carried()} == {"mtp_layers"}
    reference = read_reference(str(path), job, "float32", per_layer=False)
    assert torch.equal(reference.logits, logits)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_bias": False}, "attention_bias = False: queries, keys and values have biases"),
        ({"use_sliding_window": True}, "use_sliding_window = True: the layers that predict"),
    ],
)
def test_a_mimo_that_its_makers_have_not_published_is_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["MiMo-7B-RL"][1] | fields))
    with pytest.raises(ConversionError, match=said):
        bind(read_config(tmp_path))


def test_fields_that_a_kimi_k2_leaves_out_have_the_defaults_of_its_class(tmp_path: Path) -> None:
    _, config = PUBLISHED["Kimi-K2-Instruct in bf16"]
    left_out = ("n_group", "topk_group", "num_experts_per_tok", "q_lora_rank", "rms_norm_eps")
    fields = {name: value for name, value in config.items() if name not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    arch = bind(read_config(tmp_path)).architecture
    defaults = AutoConfig.for_model("deepseek_v3")
    assert arch.moe is not None and isinstance(arch.mixer, Mla)
    assert (arch.moe.groups, arch.moe.groups_chosen) == (defaults.n_group, defaults.topk_group)
    assert arch.moe.chosen == defaults.num_experts_per_tok
    assert arch.mixer.q_lora_rank == defaults.q_lora_rank
    assert arch.layernorm_epsilon == defaults.rms_norm_eps
