"""The policy over another training engine, of plain torch (tests/plain_engine.py): what it trains,
reads, hands over and saves is what Hugging Face, and Megatron-Core, make of the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.described import count
from megatron_policy.refit.transports.disk import HfDirectory
from tests import oracle, plain_engine
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, policy_config
from tests.dist.layouts import LENGTH, VOCAB
from tests.exact import load_hf

ROOT = Path(__file__).resolve().parents[2]
LOSS_OF = {"token": oracle.token_level, "logit": oracle.logit_level}


def data() -> BatchedDataDict:
    return oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)


PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}}


def trained(config: dict[str, Any], loss: str, folder: str) -> dict[str, Any]:
    """Two steps of this rank alone, and everything that can be asked for before and after."""
    config = config | {"generation": {"max_new_tokens": 4, "temperature": 1.0}}
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=None)
    with open_policy(config, tokenizer=tokenizer, engine=plain_engine) as policy:
        texts = BatchedDataDict({key: data()[key] for key in ("input_ids", "input_lengths")})
        seen: dict[str, Any] = {"before": policy.logprobs(texts)}
        seen["topk"], seen["entropy"] = policy.topk_logits(texts, 3), policy.entropy(texts)
        seen["steps"] = [
            policy.train(data().get_batch(step, GLOBAL_BATCH), LOSSES[loss](), mbs=2)
            for step in range(2)
        ]
        seen["logprobs"], seen["shown"] = policy.logprobs(texts), repr(policy)
        seen["reference"] = policy.reference_logprobs(texts)
        policy.export_hf(f"{folder}/exported")
        policy.refit(HfDirectory(f"{folder}/refit", config["model_name"]))
        prompts = {
            "input_ids": data()["input_ids"][:, :5],
            "input_lengths": torch.tensor([5, 3] * 8),
        }
        seen["written"] = policy.generate(BatchedDataDict(prompts), greedy=True)
        again = {"input_ids": seen["written"].tokens_BT, "input_lengths": seen["written"].lengths_B}
        seen["read again"] = policy.logprobs(BatchedDataDict(again))
        seen["streamed"] = {name: tensor.clone() for name, tensor in policy.export()}
        policy.memory.offload("gradients")
        policy.memory.onload("gradients")
        policy.save_checkpoint(f"{folder}/saved", f"{folder}/saved")
        return seen


@pytest.mark.parametrize(
    ("tied", "loss", "batching"),
    [(True, "token", {}), (False, "logit", {}), (False, "token", PACKED)],
    ids=["tied, padded", "untied, logits", "untied, packed"],
)
def test_training_reading_and_export_equal_hf(
    ranks, checkpoints, tmp_path, tied: bool, loss: str, batching: dict[str, Any]
) -> None:
    path = checkpoints[tied]
    config = policy_config(path, {}, **batching)
    (seen,) = ranks.run(1, trained, config, loss, str(tmp_path))
    learned = oracle.Learned.of(path, data(), GLOBAL_BATCH, LOSS_OF[loss])
    learned.assert_same_steps(seen["steps"])
    size = sum(parameter.numel() for parameter in load_hf(path, torch.float32).parameters())
    layout = "tp 1 x cp 1 x pp 1 x dp 1, float32, rank 0 of 1, step 2"
    family = json.loads((path / "config.json").read_text())["model_type"]
    assert seen["shown"] == f"MegatronPolicy({family} {count(size)}, {layout})"
    tokens = data()["input_ids"]
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == load_file(tmp_path / "refit" / "model.safetensors").keys()
    for name, weight in learned.exact.weights.items():
        if name in exported:
            learned.assert_same_weight(exported[name], weight, name)
            assert torch.equal(seen["streamed"][name], exported[name])
    written = seen["written"]
    assert written.generated_B.eq(4).all() and written.lengths_B.tolist() == [9, 7] * 8
    new = written.logprobs_BT != 0
    assert new.sum() == 4 * 16
    assert torch.allclose(written.logprobs_BT[new], seen["read again"][new], atol=1e-5)
    start = load_hf(path, torch.float32)
    inside = torch.arange(LENGTH)[1:] < data()["input_lengths"][:, None]
    with torch.no_grad():
        logits = start(tokens).logits
    values, entries = seen["topk"]
    assert torch.allclose(values[:, 1:][inside], logits.topk(3).values[:, 1:][inside], atol=1e-5)
    assert torch.equal(entries[:, 1:][inside], logits.topk(3).indices[:, 1:][inside])
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    assert torch.allclose(seen["entropy"][:, 1:][inside], entropy[inside], atol=1e-5)
    for found, model in (
        (seen["before"], start),
        (seen["reference"], start),
        (seen["logprobs"], load_hf(tmp_path / "exported", torch.float32)),
    ):
        with torch.no_grad():
            expected = oracle.hf_logprobs(model, tokens)
        assert torch.allclose(found[:, 1:][inside], expected[inside], atol=1e-5, rtol=0)


def resumed(config: dict[str, Any], folder: str, plain: bool) -> dict[str, Any]:
    """One step of an engine from what the plain one has saved."""
    with open_policy(config, engine=plain_engine if plain else None) as policy:
        report = policy.load_checkpoint(folder, folder)
        step = policy.train(data().get_batch(0, GLOBAL_BATCH), LOSSES["token"](), mbs=2)
        weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
        return {"report": report, "step": step, "weights": weights}


def test_what_it_saves_is_continued_by_itself_and_by_megatron_core(
    ranks, checkpoints, tmp_path
) -> None:
    config = policy_config(checkpoints[False], {})
    ranks.run(1, trained, config, "token", str(tmp_path))
    (own,) = ranks.run(1, resumed, config, f"{tmp_path}/saved", True)
    (other,) = ranks.run(1, resumed, config, f"{tmp_path}/saved", False)
    assert own["report"].step == other["report"].step == 2
    assert {"weights", "optimizer", "schedule"} <= set(own["report"].restored)
    assert {"weights", "optimizer", "schedule"} <= set(other["report"].restored)
    assert own["step"]["loss"].item() == pytest.approx(other["step"]["loss"].item(), rel=1e-6)
    for name, weight in own["weights"].items():
        assert torch.allclose(weight, other["weights"][name], atol=1e-5, rtol=0), name


WITHOUT_MEGATRON = """
import json, sys
from megatron_policy import BatchedDataDict, MegatronPolicy
from tests import oracle, plain_engine
from tests.losses import TokenNLL

config = json.loads(sys.argv[1])
policy = MegatronPolicy(config, engine=plain_engine)
policy.train(oracle.make_batch(8, 13, 251), TokenNLL(), mbs=2)
policy.shutdown()
assert not [name for name in sys.modules if name.split(".")[0] == "megatron"], "imported"
"""


@pytest.mark.nightly
def test_a_policy_over_another_engine_does_not_import_megatron_core(checkpoints) -> None:
    command = [
        sys.executable,
        "-c",
        WITHOUT_MEGATRON,
        json.dumps(policy_config(checkpoints[1], {})),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
