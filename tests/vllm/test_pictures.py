"""A real vLLM that has seen pictures sees them again with a tower that a refit has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests.exact import ROOM, Exact, furthest
from tests.picture_models import hf_logprobs
from tests.vllm.family_cases import Case
from tests.vllm.forks import ForkedEngine
from tests.vllm.picture_cases import draw_prompts, join_rendered
from tests.vllm.trainers import BUFFER, info_of, send, weights_of

FAMILY = "qwen2_5_vl"


def change_tower(path: Path, changed: Path) -> Path:
    """A copy of a checkpoint that differs from it in weights of the tower alone."""
    shutil.copytree(path, changed)
    random = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=random) * name.count("visual")
        for name, tensor in weights_of(path).items()
    }
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    return changed


@pytest.mark.daily
def test_pictures_are_seen_with_the_tower_of_the_last_refit(forks: str, tmp_path: Path) -> None:
    case = Case(FAMILY)
    path = case.make(tmp_path)
    changed = change_tower(path, tmp_path / "changed")
    asked, address = draw_prompts(FAMILY), f"ipc://{tmp_path}/s"
    with ForkedEngine(forks, path, **case.options) as engine:
        rows = join_rendered(FAMILY, engine.call("render", asked))
        engine.call("prepare", info_of(weights_of(path)), 60.0)
        found = [engine.call("logprobs", asked)]
        for forgets in (False, True):
            engine.call("forget", forgets)
            engine.begin("receive_stream", address)
            send(weights_of(changed), IpcStream(address, BUFFER), 1 + forgets)
            assert engine.result() == 1 + forgets
            found.append(engine.call("logprobs", asked))
    old, new = (Exact.of(each, lambda m: hf_logprobs(m, rows)) for each in (path, changed))
    before, stale, after = (
        pad_sequence([torch.tensor(row) for row in each], batch_first=True) for each in found
    )
    assert furthest(before, old.value) <= ROOM * old.rounding
    assert furthest(after, new.value) <= ROOM * new.rounding
    # The decoder is the same: what has moved them is the tower, as far as it is not remembered.
    assert furthest(old.value, new.value) > 0.01 < furthest(stale, new.value)
    assert furthest(before[0], after[0]) == 0.0, "a row of text"
