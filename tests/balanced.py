"""What routers have to do in training: auxiliary losses, correction biases and counts of a
transformers model over whole global batches, in plain torch.

Shapes: B rows, S positions, E experts, K chosen experts, L layers with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.losses import loss_mask

RATE, COEFFICIENT, Z_COEFFICIENT = 1e-2, 0.3, 0.02
Rows = Sequence[int]
Microbatches = Sequence[Sequence[Rows]]
"""The rows of each replica's i-th microbatch, for each i."""


@dataclass
class Routed:
    """What one model's routers did, layer by layer, in each step."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    """`[L, E]` of each step: how many tokens each expert took."""
    balance: list[float] = field(default_factory=list)
    z: list[float] = field(default_factory=list)
    biases: list[torch.Tensor] = field(default_factory=list)
    """`[L, E]` after each step."""


class Balanced:
    """A loss with auxiliary losses, for `oracle.Learned`; its value is that of the loss alone.

    `routed` has what happened in each training run, in fp64 first.
    """

    def __init__(
        self,
        kind: str,
        loss_of: oracle.LossOf = oracle.token_level,
        *,
        microbatches: Microbatches = (),
        by_sequence: bool = False,
    ) -> None:
        """`by_sequence`: rows weigh the same, in place of as much as their tokens that count."""
        self.kind, self.loss_of, self.microbatches = kind, loss_of, microbatches
        self.by_sequence = by_sequence
        self.routed: list[Routed] = []
        self._models: list[PreTrainedModel] = []

    def __call__(self, model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
        if not self._models or self._models[-1] is not model:
            self._models.append(model)
            self.routed.append(Routed())
        gates = [m for n, m in model.named_modules() if n.endswith("mlp.gate")]
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        hooks = [
            gate.register_forward_hook(lambda *a: seen.append((a[2][0], a[2][2]))) for gate in gates
        ]
        loss = self.loss_of(model, data)
        for hook in hooks:
            hook.remove()
        return loss + self._added(data, gates, seen)

    def _added(
        self,
        data: BatchedDataDict,
        gates: Sequence[torch.nn.Module],
        seen: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        rows, width = data["input_ids"].shape
        real_BS = torch.arange(width) < data["input_lengths"].unsqueeze(1)
        real_BS &= data["sample_mask"].bool().unsqueeze(1)
        weights_B = data["sample_mask"] if self.by_sequence else loss_mask(data).sum(1)
        weights_B = (weights_B / weights_B.sum()).double()
        balances, zs, tokens = [], [], []
        for gate, (logits, taken) in zip(gates, seen, strict=True):
            logits_BSE = logits.unflatten(0, (rows, width))
            chosen_BSK = taken.unflatten(0, (rows, width))
            chosen = chosen_BSK.size(-1)
            balances.append(self._balance(logits_BSE, chosen, gate, real_BS, weights_B))
            squares_BS = logits_BSE.logsumexp(-1).square()
            zs.append(
                sum(
                    weights_B[row] * squares_BS[row][real_BS[row]].mean()
                    for row in range(rows)
                    if weights_B[row]
                )
            )
            tokens.append(chosen_BSK[real_BS].flatten().bincount(minlength=logits_BSE.size(-1)))
        self._record(gates, torch.stack(tokens), balances, zs)
        added = COEFFICIENT * sum(balances) + Z_COEFFICIENT * sum(zs)
        return added - added.detach()

    def _record(
        self,
        gates: Sequence[torch.nn.Module],
        tokens_LE: torch.Tensor,
        balances: Sequence[torch.Tensor],
        zs: Sequence[torch.Tensor],
    ) -> None:
        """Also update the biases, which nothing reads before the next step."""
        routed = self.routed[-1]
        routed.tokens.append(tokens_LE)
        routed.balance.append(float(torch.stack(tuple(balances)).detach().mean()))
        routed.z.append(float(torch.stack(tuple(zs)).detach().mean()))
        biases = []
        for gate, tokens_E in zip(gates, tokens_LE, strict=True):
            bias = getattr(gate, "e_score_correction_bias", None)
            if bias is not None:
                mean = tokens_E.double().mean()
                with torch.no_grad():
                    bias += RATE * torch.sign(mean - tokens_E)
                biases.append(bias.clone())
        routed.biases.append(torch.stack(biases) if biases else torch.zeros(0))

    def _balance(
        self,
        logits_BSE: torch.Tensor,
        chosen: int,
        gate: torch.nn.Module,
        real_BS: torch.Tensor,
        weights_B: torch.Tensor,
    ) -> torch.Tensor:
        experts = logits_BSE.size(-1)
        if hasattr(gate, "e_score_correction_bias"):
            sigmoid_BSE = logits_BSE.sigmoid()
            shares_BSE = sigmoid_BSE / sigmoid_BSE.sum(-1, keepdim=True)
        else:
            shares_BSE = logits_BSE.softmax(-1)
        favoured_BSK = shares_BSE.topk(chosen).indices

        def frequency(rows: Rows) -> torch.Tensor:
            picked = torch.cat([favoured_BSK[row][real_BS[row]].flatten() for row in rows])
            return picked.bincount(minlength=experts) / max(1, picked.numel())

        total = torch.zeros((), dtype=torch.float64)
        for row, scope in self._scopes(range(len(real_BS))):
            if weights_B[row]:
                mean_E = shares_BSE[row][real_BS[row]].mean(0)
                total = total + weights_B[row] * experts * (frequency(scope) * mean_E).sum()
        return total

    def _scopes(self, rows: Rows) -> list[tuple[int, Rows]]:
        """Each row with the rows among which its experts are counted."""
        if self.kind == "seq_aux_loss":
            return [(row, [row]) for row in rows]
        found, before = [], []
        for together in self.microbatches:
            before += [row for part in together for row in part]
            for part in together:
                scope = part if self.kind == "aux_loss" else list(before)
                found += [(row, scope) for row in part]
        assert sorted(row for row, _ in found) == list(rows)
        return found


def side_by_side(replicas: int, per_replica: int, rows: int) -> Microbatches:
    """How padded data are cut: each replica has a contiguous part, in microbatches of `rows`."""
    return [
        [
            range(replica * per_replica + first, replica * per_replica + first + rows)
            for replica in range(replicas)
        ]
        for first in range(0, per_replica, rows)
    ]
