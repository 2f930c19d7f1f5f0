"""Builds every family on ranks of every layout, and runs it forward on a GPU that is not there.

`python -m tests.fake_device.sweep DIRECTORY [FAMILY...]` prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.engines.megatron import assemble, pipeline
from megatron_policy.engines.megatron.engine import MegatronEngine
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.training import step
from megatron_policy.training.batching import Batcher
from megatron_policy.training.losses import count_valid
from megatron_policy.training.scoring import Scorer
from tests.fake_device.cases import FOUND, HIDDEN, WAITING, Case, cases
from tests.fake_device.collectives import WrongCallError
from tests.fake_device.faults import FAULTS
from tests.fake_device.gpu import GPU, fake_gpu
from tests.fake_device.layouts import Layout
from tests.fake_device.models import published, with_layers, written
from tests.fake_device.values import DeviceRules

LONG, SHORT, WIDTH = 700, 300, 720
TOKENS = 1024
"""Of a packed microbatch: one long and one short row each, so that all have the same shape."""


class EntropyLoss:
    """A token-level loss of log-probabilities and entropies."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    needs_entropy = True

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
        next_token_entropy: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = ((next_token_entropy - next_token_logprobs) * mask).sum() / global_valid_toks
        return loss, {"loss": loss.detach()}


def policy_config(path: Path, layout: Layout, packed: bool) -> PolicyConfig:
    """The policy section, in bf16."""
    return PolicyConfig.parse(
        {
            "model_name": str(path),
            "precision": "bfloat16",
            "train_global_batch_size": layout.world * 8,
            "train_micro_batch_size": 2,
            "logprob_batch_size": 2,
            "logprob_chunk_size": TOKENS,
            "max_total_sequence_length": WIDTH,
            "sequence_packing": {
                "enabled": packed,
                "train_mb_tokens": TOKENS,
                "logprob_mb_tokens": TOKENS,
                "algorithm": "first_fit_decreasing",
            },
            "megatron_cfg": layout.section(),
        }
    )


def batch(microbatches: int, vocab: int) -> BatchedDataDict:
    """Rows of text for so many microbatches of a long and a short row."""
    rows = 2 * microbatches
    lengths = torch.tensor([LONG, SHORT] * microbatches)
    columns = torch.arange(WIDTH)
    inside = (columns > 0) & (columns < lengths.unsqueeze(1))
    return BatchedDataDict(
        input_ids=(1 + torch.arange(rows * WIDTH)).view(rows, WIDTH) % vocab,
        input_lengths=lengths,
        token_mask=inside.float(),
        mm_token_type_ids=torch.zeros(rows, WIDTH, dtype=torch.long),
        sample_mask=torch.ones(rows),
    )


@contextmanager
def objects() -> Iterator[None]:
    """Within this context torch can send objects as fake tensors; all ranks send this rank's."""

    def packed(value: Any, device: torch.device, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        content = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8, device=device)
        return content, torch.tensor([content.numel()], device=device)

    def unpacked(tensor: torch.Tensor, size: Any, *_: Any) -> Any:
        return pickle.loads(bytes(tensor[: int(size)].tolist()))

    with mock.patch.multiple(
        distributed_c10d, _object_to_tensor=packed, _tensor_to_object=unpacked
    ):
        yield


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """Within this context the process is one of `world` ranks, whose collectives do nothing."""
    member = dist.new_group

    def own_groups_only(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # As with NCCL, a rank has nothing of a group that it is not in.
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return member(ranks, *args, **kwargs)

    dist.init_process_group("cuda:fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with mock.patch.object(dist, "new_group", own_groups_only), objects():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def forward_only() -> Iterator[None]:
    """Within this context schedules run no backward pass: autograd needs a driver for it."""
    chosen, expecting = pipeline.get_forward_backward_func, pipeline.DerivedShapes

    def without_backward() -> Callable[..., Any]:
        schedule = chosen()
        return lambda **given: schedule(**given | {"forward_only": True})

    def without_gradients(group: Any, config: Any, shapes: Any, _: bool) -> Any:
        return expecting(group, config, shapes, True)

    with (
        mock.patch.object(pipeline, "get_forward_backward_func", without_backward),
        mock.patch.object(pipeline, "DerivedShapes", without_gradients),
    ):
        yield


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Build the rank and run it forward, in training and in scoring. Returns how often each
    collective was called, and where the host waited while it trained.
    """
    layout = case.layout
    fields = with_layers(published()[case.family], layout.all_layers)
    path, table, architecture = written(fields, directory)
    config = policy_config(path, layout, layout.packed)
    topology = topology_of(config, layout.world)
    check_layout(config, architecture, topology)
    planted = FAULTS[case.fault]() if case.fault else nullcontext()
    with (
        rank_of(case.rank, layout.world),
        fake_gpu() as fake,
        DeviceRules(fake, GPU) as rules,
        planted,
    ):
        assemble.prepare()
        engine = assemble.build(
            config,
            table,
            topology,
            init_optimizer=layout.optimizer,
            timeout_s=60.0,
            source_dtypes=dict.fromkeys(table.hf_shapes(), torch.bfloat16),
        )
        try:
            _check_model(engine)
            data = batch(layout.microbatches, architecture.vocab_size)
            if case.train:
                _train(engine, Batcher.of(config, topology, table), data, rules)
            if case.score:
                padded = policy_config(path, layout, packed=False)
                _score(engine, Batcher.of(padded, topology, table), data)
        finally:
            engine.close()
    return {"collectives": rules.collectives.counts, "waits": sorted(rules.waits.found)}


def _check_model(engine: MegatronEngine) -> None:
    """A parameter elsewhere can work: some modules move theirs when they run."""
    for chunk in engine.pipeline.models:
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            if tensor.device != GPU:
                raise WrongCallError(f"{name} {list(tensor.shape)} is on {tensor.device}")


def _train(
    engine: MegatronEngine,
    batcher: Batcher,
    data: BatchedDataDict,
    rules: DeviceRules,
) -> None:
    """Training's forward pass, with gradients recorded, to the loss."""
    loss_fn = EntropyLoss()
    (cut,) = batcher.for_training(data, data.size * engine.place.topology.dp, 2)
    with rules.waits.watching(), forward_only():
        counts = count_valid(cut.data, engine.groups.dp)
        kept = step.run(engine, cut.microbatches, loss_fn, counts, None, forward_only=False)
    faults = [fault for _, _, each, _ in kept for fault in each]
    if faults:
        raise RuntimeError(f"{faults[0].what}\n{faults[0].trace}")
    expected = len(cut.microbatches) if engine.is_last_stage else 0
    assert len(kept) == expected, (len(kept), expected)


def _score(engine: MegatronEngine, batcher: Batcher, data: BatchedDataDict) -> None:
    """Log-probabilities, as scoring returns them."""
    found = Scorer(engine, batcher, 2, lambda: False).logprobs(data, None)
    assert found.shape == data["input_ids"].shape and found.device.type == "cpu"


def main(directory: Path, words: Sequence[str]) -> None:
    """Run the cases of these families and layouts, and "planted" faults; without words all."""
    assert os.environ.get("TORCHDYNAMO_DISABLE") == "1", "nothing can be compiled here"
    own = [c for c in cases() if not words or c.family in words or c.layout.name in words]
    planted = (*FOUND, *WAITING, HIDDEN) if not words or "planted" in words else ()
    for case in (*own, *planted):
        before = time.process_time()
        line: dict[str, Any] = {"case": case.name}
        try:
            line |= run_case(case, directory)
        except Exception:
            line["error"] = traceback.format_exc()
        line["seconds"] = round(time.process_time() - before, 2)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
