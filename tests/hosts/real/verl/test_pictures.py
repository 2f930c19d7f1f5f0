"""verl's own worker with pictures: what our engine reads of its rows is what transformers reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.checkpoints import make_tokenizer
from tests.exact import Exact, InDouble, assert_equal
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import PAD, jagged
from tests.hosts.real.verl.worker import exported, in_its_own_job, made_worker, mine, text_of
from tests.picture_models import MEDIA, VOCAB, hf_logprobs, load_model, make_model, make_rows

FAMILY = "qwen3_vl"


def verl_rows() -> TensorDict:
    """Rows of text, pictures and videos as verl's workers get them."""
    rows = make_rows(FAMILY)
    texts = [(row, int(length)) for row, length in enumerate(rows["input_lengths"])]
    media = [
        {key: rows[key][row] for key in MEDIA if rows[key][row] is not None} for row, _ in texts
    ]
    fields = {
        "input_ids": jagged([rows["input_ids"][row, :length] for row, length in texts]),
        "loss_mask": jagged([rows["token_mask"][row, :length] for row, length in texts]),
        # Those of text, of which rows of text alone have no others.
        "position_ids": jagged([torch.arange(length).repeat(4, 1) for _, length in texts]),
        "multi_modal_inputs": np.array(media, dtype=object),
    }
    settings = {"pad_mode": "no_padding", "pad_token_id": PAD, "global_batch_size": len(texts)}
    return tu.get_tensordict(fields, settings | {"temperature": 1.0})


@in_its_own_job
def train_on_pictures(case: Case, model: Path) -> dict[str, Any]:
    """Log-probabilities, a step, and the tower's weights before and after it."""
    worker = made_worker(case, model)
    engine, data = worker.engine, mine(worker, verl_rows())
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
    read = text_of(engine, worker.infer_batch(data), "log_probs")
    before = exported(engine)
    worker.train_batch(mine(worker, verl_rows()))
    after = exported(engine)
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    return {"log_probs": [row.numpy() for row in read.unbind()], "moved": moved, "all": set(after)}


@pytest.mark.parametrize(
    "case", [Case(layout="tp2_sp", packed=True, dynamic=True, tokens=80), Case(layout="dp2")]
)
def test_rows_of_verl_with_pictures_are_read_as_transformers_reads_them(
    run: Callable[..., Any], tmp_path: Path, case: Case
) -> None:
    path, rows = make_model(tmp_path / "hf", FAMILY), make_rows(FAMILY)
    make_tokenizer(VOCAB).save_pretrained(path)
    with torch.no_grad():
        rounded, exact = hf_logprobs(load_model(path), rows), load_model(path, torch.float64)
        with InDouble():
            wanted = Exact.between(rounded, hf_logprobs(exact, rows))
    seen = run(train_on_pictures, case, model=path)
    for row, found in enumerate(seen["log_probs"]):
        counted = rows["token_mask"][row, 1 : len(found)] != 0
        own = torch.from_numpy(found)[:-1][counted]
        assert_equal("log_probs", own, wanted[row, : len(found) - 1][counted], case.id)
    assert seen["moved"] == seen["all"] and any("visual" in name for name in seen["all"])
