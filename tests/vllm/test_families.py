"""Every family in a real vLLM: it computes what transformers computes before a refit, and what the
policy computes after one; and each tensor in it is that of an engine that loads the same weights
from files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import RefitError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests import margins, oracle
from tests.dist.cases import open_policy, policy_config
from tests.exact import ROOM, Exact, furthest
from tests.losses import TokenNLL
from tests.picture_models import KEYS, hf_logprobs
from tests.vllm import family_page
from tests.vllm.computed import Digests
from tests.vllm.engines import EngineError
from tests.vllm.family_cases import CASES, LENGTH, REFUSED_HERE, ROWS, UNUSED, VOCAB, Case
from tests.vllm.forks import ForkedEngine
from tests.vllm.picture_cases import SEEDS, draw_prompts, join_rendered

LR = 0.02
MOVED = 1e-2
"""How far, relative to its length, the step has to move each tensor."""

DRAFTS = r"(model\.(layers\.2|mtp_layers)|mtp)\."
"""What vLLM leaves out: layers for multi-token prediction, behind the two ordinary ones."""

COMPUTED = ("_rope_by_thw_cache", "_rot_pos_ids_cache", "deepstack_input_embeds")
CONSTANTS = ("act_fn.beta", "act_fn.eps")
"""Which `apertus` has among its weights, and no gradient."""

TEXTS = oracle.make_batch(8, 32, VOCAB)

Seen = dict[str, Any]


@pytest.fixture(scope="session")
def measured() -> Iterator[family_page.Measured]:
    """What was found out of each case that was run."""
    found = family_page.Measured()
    yield found
    if os.environ.get(family_page.WRITE):
        family_page.write(found)


def follow(forks: str, case: Case, folder: Path) -> Seen:
    """What a policy of this case, and engines that follow it, say and compute; or why not."""
    try:
        return watch(forks, case, folder)
    except (EngineError, RefitError) as error:
        return {"reason": str(error)}


def watch(forks: str, case: Case, folder: Path) -> Seen:
    source, new = case.make(folder), folder / "new"
    with open_policy(config_of(case, source), init_reference_model=False) as policy:
        old = source
        if case.quantised:  # what an engine for unquantised weights can read
            policy.export_hf(old := folder / "old")
        with ForkedEngine(forks, old, **case.options) as engine:
            seen = {"class": engine.call("describe"), "versions": engine.call("versions")}
            asked, rows = make_rows(case, engine)
            seen["before"] = compare(policy, old, engine, asked, rows, case.dtype)
            first = read_digests(engine)
            refit(policy, engine, rows if case.sees else TEXTS, f"ipc://{folder}/s")
            policy.export_hf(new)
            seen["after"] = compare(policy, new, engine, asked, rows, case.dtype)
            second = read_digests(engine)
    with ForkedEngine(forks, new, **case.options) as engine:
        third = read_digests(engine)
        seen["unread"] = engine.call("load_each", str(new))
        fourth = read_digests(engine)
    return seen | {
        "names": len(load_file(new / "model.safetensors")),
        "unmoved": find_unmoved(old, new),
        "stale": [n for n in second if not differ(n, first, second) and not is_constant(n, second)],
        "unlike": [name for name in second | third if differ(name, second, third)],
        "unlike one by one": [name for name in fourth | third if differ(name, fourth, third)],
    }


def config_of(case: Case, path: Path) -> dict[str, Any]:
    """Adam moves every weight that has a gradient by the learning rate."""
    section = {
        "optimizer": {"adam_eps": 1e-12, "weight_decay": 0.0},
        "moe_router_bias_update_rate": 0.05,
        "mtp_num_layers": int(case.mtp),
    }
    config = policy_config(path, section, lr=LR, max_total_sequence_length=128)
    config["precision"] = case.options["dtype"]
    return config


def make_rows(case: Case, engine: ForkedEngine) -> tuple[list[Any], BatchedDataDict]:
    """What the engine is asked about, and the same as the policy reads it: of a family that sees,
    what vLLM's processor has made of some pictures.
    """
    if case.sees:
        asked = draw_prompts(case.family)
        return asked, join_rendered(case.family, engine.call("render", asked))
    random = torch.Generator().manual_seed(SEEDS.get(case.family, 1))
    tokens = torch.randint(VOCAB, (ROWS, LENGTH), generator=random)
    lengths = torch.full((ROWS,), LENGTH)
    return tokens.tolist(), BatchedDataDict({"input_ids": tokens, "input_lengths": lengths})


def refit(
    policy: MegatronPolicy, engine: ForkedEngine, rows: BatchedDataDict, address: str
) -> None:
    """Train one step, and send the weights."""
    engine.call("prepare", policy.exporter.plan().info(), 60.0)
    policy.train(rows, TokenNLL(), gbs=rows.size, mbs=rows.size // 2)
    engine.begin("receive_stream", address)
    policy.refit(IpcStream(address, 64 * 1024))
    assert engine.result() == 1


def compare(
    policy: MegatronPolicy,
    path: Path,
    engine: ForkedEngine,
    asked: list[Any],
    rows: BatchedDataDict,
    dtype: torch.dtype,
) -> dict[str, float]:
    """Log-probabilities of these rows: how far the engine's and the policy's are from those of
    transformers with this checkpoint in fp64, the engine's from the policy's, and what rounding
    in `dtype` explains.
    """
    exact = Exact.of(path, lambda model: hf_logprobs(model, rows), dtype)
    read = ("input_ids", "input_lengths", *KEYS)
    own = policy.logprobs(BatchedDataDict({key: rows[key] for key in read if key in rows}))
    inside = torch.arange(own.size(1)) < rows["input_lengths"].unsqueeze(1)
    own = (own * inside)[:, 1:].cpu()
    found = [torch.tensor(row) for row in engine.call("logprobs", asked)]
    engines = pad_sequence(found, batch_first=True)
    return {
        "engine": furthest(engines, exact.value),
        "policy": furthest(own, exact.value),
        "apart": furthest(engines, own),
        "tolerance": ROOM * exact.rounding,
    }


def read_digests(engine: ForkedEngine) -> Digests:
    """Those of all tensors that an engine holds, but for what it has computed of pictures."""
    found: Digests = engine.call("digests")
    return {name: each for name, each in found.items() if not any(map(name.count, COMPUTED))}


def differ(name: str, one: Digests, other: Digests) -> bool:
    """Whether a tensor of two models differs, or is in one of them alone."""
    return one.get(name) != other.get(name)


def is_constant(name: str, digests: Digests) -> bool:
    """Whether it is of no checkpoint, or empty since a kernel has packed it."""
    parts = ("_scale", "cos_sin_cache", "inv_freq", "model.normalizer", "mup_vector")
    parts += ("position_ids", *CONSTANTS)
    return 0 in digests[name][1] or any(part in name.replace("/", "") for part in parts)


def find_unmoved(old: Path, new: Path) -> list[str]:
    """Names of tensors that differ too little in two checkpoints."""
    before, after = load_file(old / "model.safetensors"), load_file(new / "model.safetensors")
    return [
        name
        for name, tensor in before.items()
        if not (after[name].float() - tensor.float()).norm() >= MOVED * tensor.float().norm()
        and not name.endswith(CONSTANTS)
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_family_in_vllm_is_the_policys_after_a_refit(
    ranks: Any, forks: str, measured: family_page.Measured, case: Case, tmp_path: Path
) -> None:
    (seen,) = ranks.run(1, follow, forks, case, tmp_path)
    if case.name in REFUSED_HERE:
        assert REFUSED_HERE[case.name][0] in (why_not(seen) or "it fits"), (case.name, seen)
    else:
        assert "reason" not in seen, seen
        check_numbers(case, seen)
    measured.lines[case.name] = line_of(case, seen)
    if "reason" in seen:
        return
    measured.engine.update(seen["versions"])
    left_out = UNUSED.get(case.family, DRAFTS)
    unread = [name for name in seen["unread"] if not re.match(left_out, name)]
    expected = case.mtp or case.family in UNUSED
    assert not unread and bool(seen["unread"]) == expected, seen["unread"]
    assert not [name for name in seen["unmoved"] if not re.match(left_out, name)], seen["unmoved"]
    assert not seen["stale"] and not seen["unlike"] and not seen["unlike one by one"], seen


def check_numbers(case: Case, seen: Seen) -> None:
    """Engine and policy compute what transformers computes; of what an export has rounded, not
    the policy.
    """
    for when in ("before", "after"):
        for whose in ("engine", "policy"):
            if whose == "engine" or not case.quantised:
                margins.check(f"{whose} {when}", seen[when][whose], seen[when]["tolerance"], seen)


def why_not(seen: Seen) -> str:
    """What was said of a case that does not fit, or how far vLLM is from transformers at once."""
    if "reason" in seen:
        return str(seen["reason"])
    before = seen["before"]
    far = before["engine"] > before["tolerance"]
    return f"off by {before['engine']:.1g} before any refit" if far else ""


def line_of(case: Case, seen: Seen) -> family_page.Line:
    """What the page says of a case."""
    if case.name in REFUSED_HERE:
        said = why_not(seen).rpartition("RefitError: ")[2]
        for end in (": it computes", ". Please check", " [type="):
            said = said.partition(end)[0]
        return family_page.Line(reason=f"{REFUSED_HERE[case.name][1]}: `{' '.join(said.split())}`")
    return family_page.Line(
        model=seen["class"],
        names=seen["names"],
        read=seen["names"] - len(seen["unread"]),
        before=seen["before"]["engine"],
        after=seen["after"]["engine" if case.quantised else "apart"],
    )
