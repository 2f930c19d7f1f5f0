"""The host's own losses give the same through this policy's core as through the host's own code,
on the same logits: value, metrics and gradient.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.megatron.head import Head
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.engines.megatron.process_groups import make_groups
from megatron_policy.hosts.nemo_rl.host_imports import find_part
from megatron_policy.hosts.nemo_rl.losses import adapt_loss
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.fused import HeadShape
from megatron_policy.lm_head.output import Output
from megatron_policy.packing.microbatch import Microbatch, packed_microbatch, padded_microbatch
from megatron_policy.packing.multiples import Multiples
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.loss_faults import LossFault
from megatron_policy.training.losses import ValidCounts, evaluate_loss
from tests.hosts.real import host

VOCAB, WIDTH, K = 32, 12, 5
LENGTHS = (7, 12, 5, 9)
DISTILLATION = {"kl_type": "mixed", "mixed_kl_weight": 0.4, "zero_outside_topk": True}
LOCAL = "positive_nll_loss"
"""A mean over the rows of one call, which the host's two ways of packing do not agree on either."""


class Layer(torch.nn.Module):
    """A head that passes hidden states on as logits."""

    sequence_parallel = False

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.eye(VOCAB)

    def forward(self, hidden: torch.Tensor, weight: None) -> tuple[torch.Tensor, None]:
        return hidden @ self.weight.T, None


@dataclass(frozen=True)
class Found:
    """A loss, its metrics, and its gradient by the logits of every row [B, S, V]."""

    loss: float
    metrics: dict[str, float]
    gradient: torch.Tensor


def losses() -> dict[str, Any]:
    utils = "nemo_rl.algorithms.loss.loss_functions" if host.newer() else None
    module = importlib.import_module(utils or "nemo_rl.algorithms.loss_functions")
    distillation = module.DistillationLossFn(
        host._settings(module, "DistillationLoss", DISTILLATION)
    )
    return host.losses() | {"distillation": distillation}


def rows() -> dict[str, torch.Tensor]:
    """Prompts are masked out, and one row is; what is masked out was read as unlikely."""
    made = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), WIDTH)

    def scores() -> torch.Tensor:
        return -torch.rand(shape, generator=made) * 4 - 1

    inside = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    mask = (inside & (torch.arange(WIDTH) >= 2)).long()
    return {
        "input_ids": torch.randint(0, VOCAB, shape, generator=made) * inside,
        "input_lengths": torch.tensor(LENGTHS),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0]),
        "advantages": torch.randn(shape, generator=made),
        "prev_logprobs": torch.where(mask != 0, scores(), -30.0),
        "generation_logprobs": scores(),
        "reference_policy_logprobs": scores(),
        "teacher_topk_logits": torch.randn(*shape, K, generator=made),
        "teacher_topk_indices": torch.randint(0, VOCAB, (*shape, 64), generator=made)[..., :K],
    }


def counts_of(data: dict[str, torch.Tensor]) -> ValidCounts:
    mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    return ValidCounts(sequences=data["sample_mask"].sum(), tokens=mask.sum())


def ours(
    loss_fn: Any,
    data: dict[str, torch.Tensor],
    packed: int,
    groups: Any,
    filters: Filters | None = None,
) -> Found:
    """Through the core, as the worker calls it; `packed` is the multiple, 0 of padded rows."""
    multiples = Multiples(row=1, sequence=packed or 1, context_ranks=1)
    batch = BatchedDataDict(data)
    if packed:
        microbatch = packed_microbatch(batch, WIDTH, LENGTHS, multiples)
    else:
        microbatch = padded_microbatch(batch, WIDTH, WIDTH, multiples)
    hidden_TRD = placed(microbatch).requires_grad_()
    model = SimpleNamespace(share_embeddings_and_output_weights=False, output_layer=Layer())
    head = Head(HeadShape(vocab_start=0, real=VOCAB, filters=filters), groups.tp, 8, model)
    output = Output(hidden_TRD, microbatch, head, groups.cp)
    faults: list[LossFault] = []
    counts = counts_of(data)
    loss, metrics = evaluate_loss(adapt_loss(loss_fn), output, counts, VOCAB, groups, faults)
    assert not faults
    loss.backward()
    return Found(loss.item(), plain(metrics), microbatch.layout.put(hidden_TRD.grad[None]))


def logits() -> torch.Tensor:
    made = torch.Generator().manual_seed(6)
    return torch.randn(len(LENGTHS), WIDTH, VOCAB, generator=made)


def placed(microbatch: Microbatch) -> torch.Tensor:
    """The rows' logits where the microbatch has their tokens."""
    return microbatch.layout.take(logits(), 0).clone()


def theirs(
    loss_fn: Any,
    data: dict[str, torch.Tensor],
    packed: int,
    groups: Any,
    fused: bool = False,
    filters: Filters | None = None,
) -> Found:
    """Through the host's own code for a worker of Megatron's."""
    logits_BSV = logits().requires_grad_()
    counts = counts_of(data)
    numbers = {"global_valid_seqs": counts.sequences, "global_valid_toks": counts.tokens}
    where = {"vocab_parallel_rank": 0, "vocab_parallel_group": groups.tp}
    if packed:
        how = packed, fused, filters
        loss, metrics = in_one_row(how, loss_fn, logits_BSV, data, numbers, where)
    elif host.newer():
        utils = importlib.import_module("nemo_rl.algorithms.loss.utils")
        given, prepared = utils.prepare_loss_input(
            logits=logits_BSV,
            data=host.batch(data),
            loss_fn=loss_fn,
            **where,
            **sampling_of(filters),
        )
        loss, metrics = loss_fn(data=prepared, **numbers, **given)
    else:
        loss, metrics = loss_fn(logits_BSV, host.batch(data), **numbers, **where)
    loss.backward()
    return Found(loss.item(), plain(metrics), logits_BSV.grad)


def sampling_of(filters: Filters | None) -> dict[str, Any]:
    """The host's argument for these filters."""
    if filters is None:
        return {}
    module = importlib.import_module("nemo_rl.algorithms.logits_sampling_utils")
    made = module.TrainingSamplingParams(top_k=filters.top_k, top_p=filters.top_p)
    return {"sampling_params": made}


def in_one_row(
    how: tuple[int, bool, Filters | None],
    loss_fn: Any,
    logits_BSV: torch.Tensor,
    data: Any,
    numbers: Any,
    where: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """By the host's wrapper for packed sequences."""
    multiple, fused, filters = how
    lengths = torch.tensor(LENGTHS)
    padded = (lengths + multiple - 1) // multiple * multiple
    ends, padded_ends = (
        torch.cat([torch.zeros(1).int(), each.cumsum(0).int()]) for each in (lengths, padded)
    )
    row = torch.cat(
        [
            torch.nn.functional.pad(logits[:length], (0, 0, 0, int(size - length)))
            for logits, length, size in zip(logits_BSV, LENGTHS, padded.tolist(), strict=True)
        ]
    )[None]
    if not host.newer():
        module = importlib.import_module("nemo_rl.algorithms.loss_functions")
        wrapper = module.SequencePackingLossWrapper(loss_fn, ends, padded_ends)
        return wrapper(row, host.batch(data), **numbers, **where)
    module = importlib.import_module("nemo_rl.algorithms.loss.wrapper")
    utils = importlib.import_module("nemo_rl.algorithms.loss.utils")
    kind = "SequencePackingFusionLossWrapper" if fused else "SequencePackingLossWrapper"
    prepare = utils.prepare_packed_loss_input if fused else utils.prepare_loss_input
    prepare = partial(prepare, **sampling_of(filters))
    wrapper = getattr(module, kind)(loss_fn, prepare, ends, padded_ends, **where)
    return wrapper(row, host.batch(data), **numbers)


def plain(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def compared(name: str, packed: int, filters: Filters | None = None) -> None:
    prepare_platform()
    join_process_group(60.0)
    groups = make_groups(Topology(), 60.0)
    data = rows()
    own = ours(losses()[name], data, packed, groups, filters)
    # The host's way of packing gives a loss single rows, which leaves nothing of its pairs.
    apart = 0 if name == "dpo" else packed
    expected = [theirs(losses()[name], data, apart, groups, filters=filters)]
    if packed and name in ("nll", "grpo") and host.newer():
        expected.append(theirs(losses()[name], data, packed, groups, fused=True, filters=filters))
    for each in expected:
        assert own.loss == pytest.approx(each.loss, rel=1e-5), name
        torch.testing.assert_close(own.gradient, each.gradient, rtol=1e-4, atol=1e-7)
        assert own.metrics.keys() == each.metrics.keys()
        for key in own.metrics.keys() - {LOCAL}:
            assert own.metrics[key] == pytest.approx(each.metrics[key], rel=1e-4, abs=1e-6), key
    assert own.loss != 0 and own.gradient.abs().sum() > 0
    dist.destroy_process_group()


# The host's distillation from packed sequences takes only such as need not be filled up.
CASES = [("nll", 0), ("grpo", 0), ("dpo", 0), ("distillation", 0)]
CASES += [("nll", 4), ("grpo", 4), ("dpo", 4), ("distillation", 1)]


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_a_loss_of_the_host_gives_what_the_host_makes_of_it(
    ranks: Any, name: str, packed: int
) -> None:
    ranks.run(1, compared, name, packed)


def test_the_hosts_losses_of_preferences_are_recognised_by_their_pairs() -> None:
    known = losses()
    assert {name for name in known if adapt_loss(known[name]).rows_per_group == 2} == {"dpo"}
    assert {name for name in known if adapt_loss(known[name]).rows_per_group == 1} == {*known} - {
        "dpo"
    }


KEPT = {
    "top-k": Filters(top_k=12),
    "top-p": Filters(top_p=0.7),
    "both": Filters(top_k=20, top_p=0.8),
}


@pytest.mark.parametrize("packed", [0, 4])
@pytest.mark.parametrize("kept", KEPT)
def test_a_loss_on_what_filters_keep_is_what_the_host_makes_of_it(
    ranks: Any, kept: str, packed: int
) -> None:
    if find_part("nemo_rl.algorithms.logits_sampling_utils", "TrainingSamplingParams") is None:
        pytest.skip("this NeMo RL filters no log-probabilities")
    for name in ("nll", "grpo"):
        ranks.run(1, compared, name, packed, KEPT[kept])
