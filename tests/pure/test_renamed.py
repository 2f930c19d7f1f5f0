"""Import paths of the last release work, and say where the module is now."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.renamed import PACKAGE, RENAMED
from megatron_policy.training.results import TrainResult

FAMILIES = (
    *("cohere", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt_oss", "granite", "llama"),
    *("mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("smollm3", "starcoder2"),
)
"""Those of that release."""
SHOWN = {
    "conversion": ("convert", "verify"),
    **{f"converters.{name}": ("TABLE", "architecture") for name in FAMILIES},
    "converters.blocks": ("Block", "Row"),
    "converters.dense": ("BLOCK", "ENDS", "architecture"),
    "converters.expert_rows": ("StackedGateUp", "StackedRows", "StackedWhole"),
    "converters.experts": ("routed", "shared", "with_experts"),
    "converters.joined_rows": ("Joined",),
    "converters.mla": ("ATTENTION", "with_latent_attention"),
    "converters.norm_rows": ("AFTER", "ALL_HEADS", "AROUND", "EACH_HEAD"),
    "converters.rope_fields": ("take_rope", "take_ropes_by_window"),
    "converters.rotary": ("Rope",),
    "converters.traits": ("Activation", "Mla", "Moe", "Norm", "QkNorm", "Scoring"),
    "hosts.registry": ("Host", "find_host"),
    "layout": ("check_layout", "topology_of"),
    "refit.collective": ("Collective",),
    "refit.collective_receiving": ("CollectiveGroup", "join_collective"),
    "refit.disk": ("HfDirectory",),
    "refit.ipc_handles": ("IpcHandles",),
    "refit.ipc_stream": ("IpcStream",),
    "refit.receiver": ("Receiver",),
    "rendezvous": ("reserved_port",),
    "topology": ("Placement", "Topology"),
    "train": (),
    "train.logprobs": ("vocab_parallel_logprobs",),
}
"""What the documents of that release import from each path, or a family like theirs needs."""


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_path_gives_what_the_new_one_has_and_warns(old: str) -> None:
    sys.modules.pop(f"{PACKAGE}.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to .*{RENAMED[old]}"):
        found = importlib.import_module(f"{PACKAGE}.{old}")
    new = importlib.import_module(f"{PACKAGE}.{RENAMED[old]}")
    for name in SHOWN[old]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the name may be an old one too
            assert getattr(found, name) is getattr(new, name)


def test_every_old_path_of_the_documents_is_tried() -> None:
    assert RENAMED.keys() == SHOWN.keys()


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"megatron_policy\.train\.nothing"):
        importlib.import_module("megatron_policy.train.nothing")


NAMES = [
    ("refit.delivery", "Sink", "refit.delivery", "Transport"),
    ("refit.delivery", "Outlet", "refit.delivery", "TransportSession"),
    ("refit.buffers", "Room", "refit.buffers", "BufferSlice"),
    ("parity", "Difference", "parity", "Deviation"),
    ("converters.mla", "with_latent_attention", "converters.families.shared.mla", "with_mla"),
    ("device", "prepare_platform", "engines.megatron.platform", "prepare_platform"),
]


@pytest.mark.parametrize(("home", "old", "now", "new"), NAMES, ids=[each[1] for each in NAMES])
def test_an_old_name_gives_the_new_one_and_warns(home: str, old: str, now: str, new: str) -> None:
    module, other = (importlib.import_module(f"{PACKAGE}.{each}") for each in (home, now))
    with pytest.warns(DeprecationWarning, match=f"{old} is .*{now}.{new} now"):
        assert getattr(module, old) is getattr(other, new)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_old_names_of_methods_and_attributes_lead_to_the_new_ones_and_warn() -> None:
    policy = object.__new__(MegatronPolicy)
    policy.accumulator = object()
    with pytest.warns(DeprecationWarning, match=r"MegatronPolicy\.split is `accumulator` now"):
        assert policy.split is policy.accumulator
    group = object.__new__(Collective)
    with pytest.warns(DeprecationWarning, match=r"Collective\.sink is `transport` now"):
        old = group.sink(512, torch.bfloat16)
    assert vars(old) == vars(group.transport(512, torch.bfloat16))


def test_the_old_name_of_the_argument_of_refit_works_and_warns(monkeypatch) -> None:
    policy: Any = object.__new__(MegatronPolicy)
    policy.memory = SimpleNamespace(ready=lambda *_: None)
    policy.exporter, policy.steps = "exporter", 7
    policy._metrics = SimpleNamespace(sent=lambda _: None)
    monkeypatch.setattr("megatron_policy.policy.handover.deliver", lambda *given, **_: given)
    with pytest.warns(
        DeprecationWarning, match=r"`sink` of HandsOverWeights\.refit is `transport`"
    ):
        assert policy.refit(sink="a transport") == ("exporter", "a transport", 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy.refit("a transport") == policy.refit(transport="a transport")
    with pytest.raises(TypeError, match="both `sink` and `transport`"):
        policy.refit(sink="one", transport="another")
    with pytest.raises(TypeError, match="transport"), pytest.warns(DeprecationWarning):
        policy.refit("one", sink="another")


def test_the_page_of_the_interface_has_every_name_of_the_last_release() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "interface.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Names of the last release")
    old = {f"{home}.{old}" for home, old, _, _ in NAMES} | set(TrainResult.RENAMED)
    old |= {"MegatronPolicy.split", "Collective.sink", "refit(sink=...)"}
    assert old - set(re.findall(r"`([^`]+)`", section)) == set()
