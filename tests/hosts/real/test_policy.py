"""The host's own Policy with workers of ours, beside one process of Hugging Face transformers that
trains on the same rows with the same losses of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hosts.real import host

ROWS, WIDTH = 8, 24
TOLERANCE = 2e-4
"""Of log-probabilities and, relatively, of losses and gradient norms: fp32, summed in another
order by other kernels; three optimizer steps multiply it.
"""
LAYOUTS = {
    "TP2": ({"tensor_model_parallel_size": 2}, 2),
    "PP2": ({"pipeline_model_parallel_size": 2}, 2),
    "DP2": ({}, 2),
    "CP2": ({"context_parallel_size": 2}, 2),
    "TP2xPP2": ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
}
CELLS = [
    (batching, layout)
    for layout in ("TP2", "PP2", "DP2", "TP2xPP2")
    for batching in ("plain", "dynamic", "packed")
    # The host itself refuses dynamic batching under pipeline parallelism.
    if batching != "dynamic" or "PP2" not in layout
] + [("plain", "CP2"), ("packed", "CP2")]


class Reference:
    """One process of transformers and torch's own optimizer."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-5, weight_decay=0.0
        )

    def logits(self, data: Any) -> torch.Tensor:
        inside = torch.arange(WIDTH) < data["input_lengths"].unsqueeze(-1)
        return self.model(input_ids=data["input_ids"], attention_mask=inside.long()).logits.float()

    @torch.no_grad()
    def logprobs(self, data: Any) -> torch.Tensor:
        chosen = (
            self.logits(data)
            .log_softmax(-1)[:, :-1]
            .gather(-1, data["input_ids"][:, 1:].unsqueeze(-1))
        )
        return torch.nn.functional.pad(chosen.squeeze(-1), (1, 0))

    def step(self, data: Any, loss_fn: Any) -> tuple[float, float]:
        """The loss, and the gradient's norm before it is clipped."""
        self.optimizer.zero_grad()
        loss, _ = host.loss_on(loss_fn, self.logits(data), data)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), norm.item()


def rows(seed: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, the first ones masked in part, one masked out entirely."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([24, 22, 17, 15, 12, 11, 9, 5])
    lengths = lengths[torch.randperm(ROWS, generator=draw)]
    inside = torch.arange(WIDTH) < lengths.unsqueeze(-1)
    answers = inside & (torch.arange(WIDTH) >= 3)
    sample_mask = torch.ones(ROWS)
    sample_mask[seed % ROWS] = 0
    return {
        "input_ids": torch.randint(4, 256, (ROWS, WIDTH), generator=draw) * inside,
        "input_lengths": lengths,
        "token_mask": answers.long(),
        "sample_mask": sample_mask,
    }


def inputs_of(kind: str, seed: int, reference: Reference) -> Any:
    """What the host's algorithm of that kind passes to `train`."""
    data = host.batch(rows(seed))
    draw = torch.Generator().manual_seed(seed + 100)
    now = reference.logprobs(data)
    noise = 0.3 * torch.randn(now.shape, generator=draw)
    if kind == "grpo":
        data["prev_logprobs"] = now + noise
        data["generation_logprobs"] = now + 0.5 * noise
        data["reference_policy_logprobs"] = now - noise
        data["advantages"] = torch.randn(ROWS, 1, generator=draw).expand(ROWS, WIDTH).contiguous()
    if kind == "dpo":
        data["sample_mask"] = torch.ones(ROWS)
        data["reference_policy_logprobs"] = torch.roll(now + noise, -1, dims=-1)
    return data


@pytest.mark.parametrize(("batching", "layout"), CELLS)
def test_the_hosts_policy_trains_reads_and_restores_like_one_process(
    batching: str,
    layout: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    host_policy: Callable[..., Any],
) -> None:
    path = checkpoint("llama", vocab=256, tied=True)
    sizes, world = LAYOUTS[layout]
    config = host.config_of(path, batching, sizes)
    policy, reference = host_policy(config, world), Reference(path)
    read = host.batch(rows(50))
    inside = torch.arange(WIDTH) < read["input_lengths"].unsqueeze(-1)

    def check_reading(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        worst = (found - expected)[inside].abs().max().item()
        print(f"{layout} {batching} {what}: log-probabilities differ by {worst:.2e}")
        assert worst < TOLERANCE

    start = reference.logprobs(read)
    policy.prepare_for_lp_inference()
    check_reading("before", policy.get_logprobs(read)["logprobs"], start)
    # The host's driver keeps pairs of rows together in padded batches only.
    kinds = ["nll", "grpo"] + (["dpo"] if batching == "plain" else [])
    for seed, kind in enumerate(kinds):
        data, loss_fn = inputs_of(kind, seed, reference), host.losses()[kind]
        policy.prepare_for_training()
        found = policy.train(data, loss_fn)
        loss, norm = reference.step(data, loss_fn)
        print(f"{layout} {batching} {kind}: loss {found['loss'].item():.7f} {loss:.7f}")
        assert found["loss"].item() == pytest.approx(loss, rel=TOLERANCE)
        assert float(found["grad_norm"]) == pytest.approx(norm, rel=TOLERANCE)
        assert found["all_mb_metrics"]["lr"][0] == pytest.approx(1e-3)
    if batching != "plain":
        with pytest.raises(Exception, match="does not say which of the caller's rows"):
            policy.train(inputs_of("dpo", 2, reference), host.losses()["dpo"])
    policy.prepare_for_lp_inference()
    trained = policy.get_logprobs(read)["logprobs"]
    check_reading("after", trained, reference.logprobs(read))
    assert not torch.allclose(trained[inside], start[inside], atol=10 * TOLERANCE)
    held = policy.get_reference_policy_logprobs(read, micro_batch_size=2)
    check_reading("of the reference", held["reference_logprobs"], start)
    if batching == "plain":
        check_restored(policy, host_policy, config, world, tmp_path, read, trained)


def check_restored(
    policy: Any,
    host_policy: Callable[..., Any],
    config: dict[str, Any],
    world: int,
    path: Path,
    read: Any,
    trained: torch.Tensor,
) -> None:
    """What was saved comes back in other workers: the same bits, and the reference of the start."""
    weights, optimizer = path / "policy" / "weights", path / "policy" / "optimizer"
    first = policy.get_reference_policy_logprobs(read, micro_batch_size=2)["reference_logprobs"]
    policy.prepare_for_training()
    policy.save_checkpoint(
        str(weights), optimizer_path=str(optimizer), tokenizer_path=str(path / "tokenizer")
    )
    assert [each for each in weights.iterdir() if each.name.startswith("iter_")]
    data, loss_fn = host.batch(rows(60)), host.losses()["nll"]
    went_on = policy.train(data, loss_fn)
    restored = host_policy(config, world, weights_path=str(weights), optimizer_path=str(optimizer))
    restored.prepare_for_lp_inference()
    assert torch.equal(restored.get_logprobs(read)["logprobs"], trained)
    again = restored.get_reference_policy_logprobs(read, micro_batch_size=2)
    assert torch.equal(again["reference_logprobs"], first)
    restored.prepare_for_training()
    resumed = restored.train(data, loss_fn)
    assert torch.equal(resumed["loss"], went_on["loss"])
    assert torch.equal(resumed["grad_norm"], went_on["grad_norm"])
