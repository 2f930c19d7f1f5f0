"""A probe finds what an engine computes with, in every layout and for every kind of weights, and
leaves the policy as it was.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy import MegatronPolicy
from megatron_policy.errors import RefitError
from megatron_policy.refit.probe import EngineProbe, find_kind
from tests import peft_models
from tests.dist.refits import LAYOUTS, config_of

DENSE = {"hidden": 32, "layers": 2, "heads": 4, "groups": 2, "ffn": 48, "vocab": 128}


class ModelEngine:
    """An engine of transformers, which computes with what it has received, but for `stale`
    tensors.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        shutil.copytree(path, folder)
        self._file = folder / "model.safetensors"
        self.weights, self.folder = load_file(self._file), folder
        self.stale: set[str] = set()
        self.marks = 0

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self.stale:
            assert name in self.weights, name
            self.weights[name] = tensor.clone()

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        from transformers import AutoModelForCausalLM

        save_file(self.weights, self._file, metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        tokens = torch.tensor(rows)
        found = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
        return found.gather(-1, tokens[:, 1:, None])[..., 0].tolist()

    def mark_mixed(self) -> None:
        self.marks += 1


class Pair:
    """A policy with an engine on rank 0, and a probe of it."""

    def __init__(self, policy: MegatronPolicy, path: Path, folder: Path, **options: Any) -> None:
        self.policy, self.refits = policy, 0
        self.engine = ModelEngine(path, folder / "engine") if policy.rank == 0 else None
        asked = self.engine and self.engine.logprobs
        mark = self.engine and self.engine.mark_mixed
        self.probe = EngineProbe(asked, self.hand_over, mark, **options)

    def hand_over(self) -> int:
        for name, tensor in self.policy.export():
            if self.engine is not None:
                self.engine.load(name, tensor)
        self.refits += 1
        return self.refits

    def bits(self) -> dict[str, bytes]:
        held = self.policy.named_parameters()
        plain = {name: p.detach().contiguous().reshape(-1) for name, p in held}
        return {name: p.view(torch.uint8).numpy().tobytes() for name, p in plain.items()}

    def be_stale(self, kind: str | None) -> None:
        """The engine keeps what it has of that kind."""
        if self.engine is not None:
            entries = self.policy.exporter.table.entries
            named = [entry.hf for entry in entries if find_kind(entry) == kind]
            self.engine.stale = {name for names in named for name in names}

    def move(self) -> None:
        """As a step of training would: every weight, a little."""
        with torch.no_grad():
            for _, parameter in self.policy.named_parameters():
                parameter.mul_(1.25)

    def refusal(self) -> str:
        """What the probe says after a refit."""
        with pytest.raises(RefitError) as refused:
            self.probe.refit(self.policy)
        return str(refused.value)


def policy_of(path: Path, cfg: dict[str, Any]) -> MegatronPolicy:
    unused = {"init_optimizer": False, "init_reference_model": False}
    return MegatronPolicy(config_of(path, cfg), **unused)


def find_stale_kinds(
    path: Path, cfg: dict[str, Any], folder: Path, kinds: Sequence[str]
) -> dict[str, tuple[str, int]]:
    """For each kind, on each rank, what is said when the engine keeps the old weights of it."""
    policy, said = policy_of(path, cfg), {}
    try:
        pair = Pair(policy, path, folder / f"of-{policy.rank}", every=1)
        assert set(policy.probing.probe_facts().kinds) >= set(kinds)
        assert pair.probe.refit(policy) == 1
        for kind in kinds:
            pair.be_stale(kind)
            pair.move()
            before = pair.bits()
            words = pair.refusal()
            assert pair.bits() == before
            said[kind] = words, pair.engine.marks if pair.engine else 0
            pair.be_stale(None)
            pair.probe.refit(policy)  # right again
    finally:
        policy.shutdown()
    return said


KINDS = {
    "qwen2": ("embedding", "attention", "norms", "mlp", "biases", "head"),
    "qwen3_moe": ("router", "experts"),
    "gpt_oss": ("attention sinks", "biases", "experts"),
    "deepseek_v3": ("shared experts", "biases", "norms"),
}


@pytest.mark.parametrize("family", KINDS)
def test_the_stale_kind_is_named(
    ranks: Any, checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    path = checkpoint(family, **(DENSE if family == "qwen2" else {"layers": 2}))
    (said,) = ranks.run(1, find_stale_kinds, path, {}, tmp_path, KINDS[family])
    for number, (kind, (words, marks)) in enumerate(said.items()):
        assert f"It does not follow its {kind}: these arrive" in words, (kind, words)
        assert "weights of step 0: the log-probabilities of 248 tokens differ by" in words
        assert marks == 2 * (number + 1)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "ep2", "fsdp2", "fsdp1", "tp2 cp2"])
def test_all_ranks_of_a_layout_say_the_same(
    ranks: Any, checkpoint: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    world, cfg = LAYOUTS[layout]
    family, kinds = ("qwen3_moe", ("experts",)) if layout == "ep2" else ("qwen2", ("mlp", "head"))
    path = checkpoint(family, **(DENSE if family == "qwen2" else {"layers": 2}))
    first, *others = ranks.run(world, find_stale_kinds, path, cfg, tmp_path, kinds)
    for kind in kinds:
        assert f"It does not follow its {kind}: these arrive" in first[kind][0]
        assert all(other[kind][0] == first[kind][0] for other in others)


def try_the_rest(path: Path, cfg: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One changed element, cadence, answers that are none, and a refit that fails midway."""
    policy, seen = policy_of(path, cfg), {}
    try:
        pair = Pair(policy, path, folder / f"of-{policy.rank}", every=3)
        engine, probe = pair.engine, pair.probe
        counts = []
        for _ in range(5):
            probe.refit(policy)
            counts.append(probe.probes)
        seen["counts"] = counts
        if engine is not None:
            engine.weights["lm_head.weight"][7, 3] += 0.25
        with pytest.raises(RefitError) as refused:
            policy.probe(probe)
        seen["element"], seen["after it"] = str(refused.value), policy.probe(probe).agrees
        before = pair.bits()

        def break_down() -> None:
            pair.hand_over()
            if pair.refits % 3 == 0 and engine is not None:
                raise OSError("the wire broke")

        pair.be_stale("mlp")
        pair.move()
        moved = pair.bits()
        pair.refits = 0
        pair.probe = EngineProbe(probe.ask, break_down, probe.mark_mixed)
        seen["midway"] = pair.refusal(), pair.bits() == moved != before
        pair.be_stale(None)
        pair.probe.hand_over = pair.hand_over
        pair.probe.refit(policy)
        seen["due after a failure"] = pair.probe.probes
        answers: dict[str, Any] = {
            "nan": lambda rows: [[float("nan")] * (len(row) - 1) for row in rows],
            "shape": lambda rows: [[0.0] * len(row) for row in rows],
            "nothing": lambda rows: None,
            "death": lambda rows: {}["the engine died"],
        }
        for name, answer in answers.items():
            other = EngineProbe(answer if policy.rank == 0 else None)
            with pytest.raises(RefitError) as refused:
                policy.probe(other)
            seen[name] = str(refused.value)
    finally:
        policy.shutdown()
    return seen


@pytest.mark.parametrize("layout", ["one", "pp2"])
def test_other_faults(
    ranks: Any, checkpoint: Callable[..., Path], tmp_path: Path, layout: str
) -> None:
    world, cfg = LAYOUTS[layout]
    seen, *others = ranks.run(world, try_the_rest, checkpoint("qwen2", **DENSE), cfg, tmp_path)
    assert seen["counts"] == [1, 1, 1, 2, 2]
    assert "token 7 at position" in seen["element"] and seen["after it"]
    assert "Another refit has put it right" in seen["element"]
    words, restored = seen["midway"]
    assert "The search for the reason failed: rank 0: OSError: the wire broke" in words and restored
    assert seen["due after a failure"] == 1
    assert "the engine says nan of token" in seen["nan"]
    assert "the engine has answered 8 rows of 32 + 32 + 32 + 32 + ..." in seen["shape"]
    assert "the engine has answered no log-probabilities" in seen["nothing"]
    assert "the engine could not be asked: KeyError: 'the engine died'" in seen["death"]
    for other in others:
        assert other == seen


def be_thorough(path: Path, folder: Path) -> tuple[str, int]:
    """Without a step in between the experts are right, and yet they are not read."""
    policy = policy_of(path, {})
    try:
        pair = Pair(policy, path, folder, thorough=True)
        pair.be_stale("experts")
        words = pair.refusal()
        pair.be_stale(None)
        pair.probe.refit(policy)
        return words, pair.refits
    finally:
        policy.shutdown()


def test_a_thorough_probe_needs_no_training(
    ranks: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("qwen3_moe", layers=2)
    ((words, refits),) = ranks.run(1, be_thorough, path, tmp_path)
    assert "It does not follow its experts: these arrive" in words
    assert refits == 2 * (1 + 2 + 7)


def probe_adapters(path: Path, folder: Path) -> tuple[str, ...]:
    """The kinds of adapters, and what is said of merged weights in an engine that keeps its own."""
    section = config_of(path, {"peft": {"enabled": True, "dim": peft_models.RANK, "alpha": 6}})
    policy = MegatronPolicy(section, init_optimizer=False)
    try:
        pair = Pair(policy, path, folder, every=1)
        pair.probe.refit(policy)
        pair.be_stale("mlp")
        before = pair.bits()
        pair.move()
        words = pair.refusal()
        assert pair.bits().keys() == before.keys()
        return words, *policy.probing.probe_facts(adapters=True).kinds
    finally:
        policy.shutdown()


def test_policies_with_adapters(
    ranks: Any, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    ((words, *kinds),) = ranks.run(1, probe_adapters, checkpoint("qwen2", **DENSE), tmp_path)
    assert kinds == ["attention", "mlp"]
    assert "It does not follow its mlp" in words
