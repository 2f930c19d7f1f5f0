"""The cells of the invariance table, and the rows they all compute; knows neither oracle nor ranks.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.packing.bins import ALGORITHMS, BALANCED
from tests import oracle
from tests.dist.cases import policy_config
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FAMILIES,
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    VOCAB,
    Layout,
    layout,
)

SEQUENCE_PARALLEL = {"sequence_parallel": True}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
LAYOUTS = {
    "one process": layout(1),
    "TP2": layout(2, tp=2),
    "TP2+SP": layout(2, tp=2, **SEQUENCE_PARALLEL),
    "TP4 over 2 key-value groups": layout(4, tp=4),
    "PP2": layout(2, pp=2),
    "PP2, stages of 1 and 3 layers": layout(2, pp=2, pipeline_model_parallel_layout="Et|t*3L"),
    "PP2, layers recomputed": layout(2, pp=2, activation_checkpointing=True),
    "PP2xVPP2": layout(2, pp=2, vpp=2),
    "DP2": layout(2),
    "DP4": layout(4),
    "DP2, distributed optimizer, overlaps": layout(2, **OVERLAPPED),
    "CP2": layout(2, **CP2),
    "CP4": layout(4, **CP4),
    "CP2xDP2, distributed optimizer, overlaps": layout(4, **CP2, **OVERLAPPED),
    "TP2xCP2+SP": layout(4, tp=2, **CP2, **SEQUENCE_PARALLEL),
    "PP2xCP2": layout(4, pp=2, **CP2),
    "TP2xPP2xDP2+SP, distributed optimizer, overlaps": layout(
        8, tp=2, pp=2, **SEQUENCE_PARALLEL, **OVERLAPPED
    ),
    "PP2xVPP2xCP2xDP2": layout(8, pp=2, vpp=2, **CP2),
    "TP2xPP2xCP2+SP": layout(8, tp=2, pp=2, **CP2, **SEQUENCE_PARALLEL),
}
"""Layouts of dense models; those of experts are `EXPERT_LAYOUTS`."""
BATCHINGS = ("padded", "dynamic", "packed")
LOSSES = ("token", "sequence", "policy gradient")
ROWS, STEPS = 16, 2
FEW = {"DP4": 3, "PP2xVPP2": 1, "PP2xVPP2xCP2xDP2": 3}
"""Rows of a global batch that are fewer than the microbatches that must run."""
FEW_OF_EXPERTS = (("EP4", "dynamic", "qwen3_moe", 3), ("EP2xPP2xVPP2", "packed", "deepseek_v3", 3))
"""The same of experts: a rank without a row of its own still computes for the tokens of others."""
WITH_LOGITS = ("PP2xCP2", "CP2xDP2, distributed optimizer, overlaps", "TP2xCP2+SP")
"""Layouts of the loss that is given all logits, with each way to make microbatches."""
TEMPERATURE = 0.7
TEMPERED = (
    ("TP2xPP2xDP2+SP, distributed optimizer, overlaps", "padded", "sequence"),
    ("PP2xVPP2xCP2xDP2", "dynamic", "token"),
    ("TP2xPP2xCP2+SP", "packed", "policy gradient"),
    ("TP2xCP2+SP", "packed", "entropy of logits"),
)
"""Cells whose rollouts, and so losses, are at that temperature: every loss once."""

EXPERT_LOSSES = {
    "qwen3_moe": ("sequence", "policy gradient"),
    "deepseek_v3": ("policy gradient", "token"),
    "mixtral": ("sequence", "policy gradient"),
    "gpt_oss": ("token", "token"),
}
"""Of each family of experts the loss with clipped gradients, and that without."""
EXPERT_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"seed": 1},
    "deepseek_v3": {"seed": 7},
    "mixtral": {"ffn": 32, "seed": 11},
    "gpt_oss": {"ffn": 32, "seed": 3},
}
MODELS: dict[str, dict[str, Any]] = {
    **{family: SIZES | {"tied": tied} for tied, family in FAMILIES.items()},
    **{family: SIZES | sizes for family, sizes in EXPERT_SIZES.items()},
    "gemma2": SIZES,
}
"""Every family of the table with the keywords of its checkpoint. The seeds of those with experts
are such that no token is about to take another expert (`CLOSEST`).
"""
CLOSEST = 5e-5
"""The score of a chosen expert differs by more than that from the score of the next expert.
Rounding in fp32 moves scores by about 1e-6, so a right computation chooses the same experts.
"""
UNCLIPPED = 0.0
FSDP2_LOSSES = {
    "qwen2": ("token", "sequence", "policy gradient"),
    "qwen3": ("sequence", "policy gradient", "entropy of logits"),
    "gemma2": ("policy gradient", "policy gradient", "sequence"),
    "gpt_oss": ("token", "token", "token"),
}
"""Of each family under FSDP2 the losses of its padded, dynamic and packed cells."""

READ_TOKENS, READ_ROWS = 64, 7
TILE = 5  # positions of one tile of the language-model head: several tiles a microbatch
CANDIDATES = 130  # more than a tensor-parallel rank's slice of the vocabulary has

LENGTHS = (13, 1, 7, 4, 10, 2, 9, 5, 12, 6, 13, 3, 8, 11, 1, 5)  # of the first global batch
LENGTHS += (5, 13, 2, 6, 13, 1, 8, 11, 3, 12, 4, 9, 7, 10, 1, 6)
EMPTY, LEFT_OUT = (4, 20), (6, 25)  # rows with an empty token mask, and rows that do not count


@dataclass(frozen=True)
class Cell:
    """One row of the page: what is run, and in global batches of how many rows."""

    layout: str
    batching: str
    loss: str
    family: str
    rows: int = ROWS
    algorithm: str = BALANCED
    temperature: float = 1.0
    clip: float = oracle.CLIP

    @property
    def name(self) -> str:
        """What a test of this cell is called."""
        return f"{self.layout} | {self.batching_in_words} | {self.loss_in_words} | {self.family}"

    @property
    def loss_in_words(self) -> str:
        """The loss, and whether its gradient is left unclipped."""
        return self.loss + ("" if self.clip else ", not clipped")

    @property
    def batching_in_words(self) -> str:
        """How microbatches are made, of how many rows if few, and any temperature but 1."""
        packer = f" ({self.algorithm})" if self.batching == "packed" else ""
        few = "" if self.rows == ROWS else f", {self.rows} row{'s' * (self.rows > 1)}"
        warm = "" if self.temperature == 1 else f", temperature {self.temperature}"
        return self.batching + packer + few + warm

    @property
    def full(self) -> bool:
        """Whether it is one of the product of layouts, batchings and losses, at temperature 1."""
        return self.rows == ROWS and self.temperature == 1

    @property
    def of(self) -> Layout:
        layouts = LAYOUTS | EXPERT_LAYOUTS | FSDP2_LAYOUTS | FSDP2_TENSOR_LAYOUTS | FSDP1_LAYOUTS
        return layouts[self.layout]

    @property
    def fsdp(self) -> bool:
        """Whether the engine is the one over transformers' own modules."""
        return self.layout in FSDP2_LAYOUTS | FSDP2_TENSOR_LAYOUTS | FSDP1_LAYOUTS

    @property
    def replicas(self) -> int:
        """Data-parallel ranks."""
        sizes = self.of.megatron
        if self.fsdp:
            (section,) = sizes.values()
            split: int = section.get("context_parallel_size", 1)
            return self.of.world // (split * self.of.tp)
        stages, cp = sizes["pipeline_model_parallel_size"], sizes.get("context_parallel_size", 1)
        return self.of.world // (self.of.tp * stages * cp)

    @property
    def train_tokens(self) -> int:
        """Of a microbatch: so few that a replica has several, enough for the longest row."""
        if self.replicas <= 4:
            # Eight rows of one replica would be packed into three microbatches of 17 tokens each.
            return 26 if (self.rows, self.replicas) == (8, 1) else 24
        # Each has a row or two: no more than the longest row, which dynamic microbatches round up.
        return LENGTH + (self.batching == "dynamic")

    @property
    def microbatches(self) -> int:
        """The fewest that all replicas together run: whole rounds of the interleaved schedule."""
        sizes = self.of.megatron
        if self.fsdp:
            return self.replicas
        interleaved = sizes["virtual_pipeline_model_parallel_size"] > 1
        return self.replicas * (sizes["pipeline_model_parallel_size"] if interleaved else 1)


def _cells() -> tuple[Cell, ...]:
    """The cells of dense models, then those of experts, then those under FSDP2."""
    cells = [*_dense_cells(), *_expert_cells(), *_fsdp_cells(further=False)]
    return tuple(map(_tempered, _each_packed_by_another(cells)))


def _dense_cells() -> list[Cell]:
    """Every layout with every batching; losses and families take turns, so that every layout has
    every loss and both families, and every loss every batching and both families.
    """
    cells = [
        Cell(name, batching, LOSSES[(row + column) % 3], FAMILIES[(row + column) % 2 == 0])
        for row, name in enumerate(LAYOUTS)
        for column, batching in enumerate(BATCHINGS)
    ]
    turns = cycle(LOSSES)
    for batching, name in zip(BATCHINGS, WITH_LOGITS, strict=True):
        cells.append(Cell(name, batching, "entropy of logits", FAMILIES[batching == "dynamic"]))
    for name, few in FEW.items():
        for batching in BATCHINGS[1:]:
            cells.append(Cell(name, batching, next(turns), FAMILIES[batching == "packed"], few))
    return cells


def _expert_cells() -> list[Cell]:
    """Every layout of experts with every batching; families and clipping take turns, so that every
    layout has three families, and gradients that are clipped and others that are not.
    """
    families = list(EXPERT_LOSSES)
    cells = []
    for row, name in enumerate(EXPERT_LAYOUTS):
        for column, batching in enumerate(BATCHINGS):
            family = families[(row + column) % len(families)]
            unclipped = (row // 2 + column) % 2
            clip = UNCLIPPED if unclipped else oracle.CLIP
            loss = EXPERT_LOSSES[family][unclipped]
            cells.append(Cell(name, batching, loss, family, clip=clip))
    for name, batching, family, few in FEW_OF_EXPERTS:
        cells.append(Cell(name, batching, EXPERT_LOSSES[family][0], family, few))
    return cells


def _fsdp_cells(further: bool) -> list[Cell]:
    """Every layout of FSDP2 with every batching; families take turns, so that every family meets
    every batching. `further`: the cells of their product that are left.
    """
    families = list(FSDP2_LOSSES)
    return [
        Cell(name, batching, FSDP2_LOSSES[family][column], family)
        for row, name in enumerate(FSDP2_LAYOUTS)
        for column, batching in enumerate(BATCHINGS)
        for number, family in enumerate(families)
        if ((row + column) % len(families) == number) != further
    ]


def _every_cell(layouts: Iterable[str], but: Collection[Cell]) -> tuple[Cell, ...]:
    """Every one of these layouts with every batching and family, `but` these cells."""
    return tuple(
        cell
        for name in layouts
        for column, batching in enumerate(BATCHINGS)
        for family, losses in FSDP2_LOSSES.items()
        if (cell := Cell(name, batching, losses[column], family)) not in but
    )


def _each_packed_by_another(cells: Sequence[Cell]) -> list[Cell]:
    """Every second packed cell by the default algorithm, the others take turns."""
    others = [name for name in ALGORITHMS if name != BALANCED]
    turns = cycle(chain.from_iterable((BALANCED, name) for name in others))
    return [
        replace(cell, algorithm=next(turns)) if cell.batching == "packed" else cell
        for cell in cells
    ]


def _tempered(cell: Cell) -> Cell:
    chosen = (cell.layout, cell.batching, cell.loss) in TEMPERED and cell.rows == ROWS
    return replace(cell, temperature=TEMPERATURE) if chosen else cell


TENSOR_PARALLEL_CELLS = (
    Cell("FSDP2 TP2+SP x 2", "padded", "policy gradient", "gemma2"),
    Cell("FSDP2 TP2+SP x 2", "dynamic", "token", "gpt_oss"),
    Cell("FSDP2 TP2 x 2", "packed", "entropy of logits", "qwen3"),
)
FSDP1_CELLS = (
    Cell("FSDP1 x 2", "packed", "sequence", "gemma2"),
    Cell("FSDP1 2 copies", "dynamic", "policy gradient", "qwen3"),
    Cell("FSDP1 x 4", "padded", "token", "gpt_oss"),
    Cell("FSDP1 x 2, gradients", "packed", "policy gradient", "qwen2"),
)
CELLS = (*_cells(), *TENSOR_PARALLEL_CELLS, *FSDP1_CELLS)
"""The page's table."""
FURTHER_FSDP2_CELLS = tuple(_fsdp_cells(further=True))
"""Beside the page's table: they differ from its cells in nothing but which choices meet."""
FURTHER_TENSOR_PARALLEL_CELLS = _every_cell(FSDP2_TENSOR_LAYOUTS, TENSOR_PARALLEL_CELLS)
"""Beside the page's table as well."""
FURTHER_FSDP1_CELLS = _every_cell(FSDP1_LAYOUTS, FSDP1_CELLS)
"""And these."""


def rows(start_logprobs_BS: torch.Tensor) -> BatchedDataDict:
    """The rows of both global batches, of lengths 1 to S, with whatever the losses read.

    Behind a row's end there is anything but zeros, and its masks have holes. `start_logprobs_BS`
    are the model's before training; those that the policy gradient compares with are drawn around
    them. `row` numbers the rows.
    """
    random = torch.Generator().manual_seed(4)
    lengths_B = torch.tensor(LENGTHS)
    count = len(LENGTHS)
    inside_BS = torch.arange(LENGTH) < lengths_B.unsqueeze(1)
    mask_BS = inside_BS & (torch.rand(count, LENGTH, generator=random) < 0.8)
    mask_BS[list(EMPTY)] = False
    sample_mask_B = torch.ones(count)
    sample_mask_B[list(LEFT_OUT)] = 0.0

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    return BatchedDataDict(
        {
            "input_ids": torch.randint(1, VOCAB, (count, LENGTH), generator=random),
            "input_lengths": lengths_B,
            "token_mask": mask_BS.long(),
            "sample_mask": sample_mask_B,
            "prev_logprobs": start_logprobs_BS + 0.3 * noise(count, LENGTH),
            "reference_logprobs": start_logprobs_BS + 0.2 * noise(count, LENGTH),
            "advantages": (1 + 0.8 * noise(count, 1)).expand(count, LENGTH).contiguous(),
            "row": torch.arange(count),
        }
    )


def config_of(cell: Cell, path: Path) -> dict[str, Any]:
    """The policy's configuration for a cell."""
    tokens = {"train_mb_tokens": cell.train_tokens, "logprob_mb_tokens": READ_TOKENS}
    budget = {"enabled": True, **tokens}
    batching: dict[str, Any] = {"logprob_chunk_size": TILE, "logprob_batch_size": READ_ROWS}
    if cell.batching == "dynamic":
        batching["dynamic_batching"] = budget | {"sequence_length_round": 2}
    if cell.batching == "packed":
        batching["sequence_packing"] = budget | {"algorithm": cell.algorithm}
    if cell.temperature != 1:
        batching["generation"] = {"max_new_tokens": 1, "temperature": cell.temperature}
    sizes = {"train_global_batch_size": cell.rows, "max_grad_norm": cell.clip}
    return policy_config(path, cell.of.megatron, **sizes, **batching)
