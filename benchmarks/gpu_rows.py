"""The scorecard of GPUs: rows 8, 10 and 11 where they are meant to run, training steps over the
device's matrix products (row 18), and their memory over the plan's (row 19).

Every program runs in a new process, one for each visible GPU in rows 18 and 19. The same rows run
on the CPU at toy sizes, which proves the code and measures nothing.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.checkpoints import LARGER, SIZES, Size, write_checkpoint, write_config
from benchmarks.head_once import PRODUCT, PRODUCTS, TOLERANCE
from benchmarks.processes import run_fresh, run_ranks
from benchmarks.results import DEVICE, HIGHER, Measurement, Row
from benchmarks.speed_once import Run

TE, LOCAL = "transformer_engine", "local"
RANKS_LIMIT_S = 3600.0
"""For reading, training and everything else that the ranks of one run do."""

_PLAIN_LOGITS = 14
"""Bytes of each logit that the plain loop holds at its peak: bf16, and three times fp32."""


@dataclass(frozen=True)
class Scale:
    """Sizes of everything that is measured."""

    product: int
    """Rows and columns of the matrices whose product is timed."""
    copy_bytes: int
    heads: Mapping[str, tuple[int, int]]
    """Entries and channels of each head."""
    head_tokens: int
    """Of a pass over a head."""
    tokens: int
    """Of a microbatch."""
    chunks: tuple[int, ...]
    trained_chunk: int
    length: int
    microbatches: int
    sizes: Mapping[str, Size]
    """Models in the order of their weights."""
    refitted: str
    turns: int = 3
    """For each repetition that is asked for."""
    cpu_ranks: int = 0
    """On the CPU, by so many processes in place of one for each GPU."""


FULL = Scale(
    product=8192,
    copy_bytes=2 * 2**30,
    heads={"D 896": (151936, 896), "D 3584": (152064, 3584)},
    head_tokens=8192,
    tokens=8192,
    chunks=(128, 512, 1024),
    trained_chunk=1024,
    length=2048,
    microbatches=4,
    sizes=SIZES | LARGER,
    refitted="1.5B",
)
TOY = Scale(
    product=64,
    copy_bytes=2**16,
    heads={"D 16": (97, 16), "D 32": (97, 32)},
    head_tokens=8,
    tokens=32,
    chunks=(4, 8),
    trained_chunk=8,
    length=16,
    microbatches=2,
    sizes={
        "small": Size(hidden=32, ffn=48, layers=1, heads=4, groups=2, vocab=128),
        "large": Size(hidden=32, ffn=48, layers=2, heads=4, groups=2, vocab=128),
    },
    refitted="small",
    turns=1,
    cpu_ranks=2,
)


@dataclass
class GpuBench:
    """The rows at one scale, and what they share."""

    scale: Scale
    _speeds: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)

    @cached_property
    def device(self) -> dict[str, Any]:
        """What the device does at best, measured once."""
        sizes = str(self.scale.product), str(self.scale.copy_bytes), "9"
        return self._fresh("benchmarks.device_once", *sizes)

    @property
    def ranks(self) -> int:
        """One for each visible GPU."""
        return self.scale.cpu_ranks or int(self.device["devices"])

    @property
    def implementations(self) -> list[str]:
        """Of the layers: Transformer Engine's where it is installed, and Megatron-Core's own."""
        installed = importlib.util.find_spec(TE) is not None and not self.scale.cpu_ranks
        return [TE, LOCAL] if installed else [LOCAL]

    @property
    def scorecard(self) -> tuple[Row, ...]:
        """The rows; 8, 10 and 11 mean what they mean elsewhere."""
        return (
            Row(8, _HEAD, limit=1.0, goal=1.7, measure=self.head_over_product),
            Row(10, _STEP, limit=1.0, goal=1.05, measure=self.step_over_plain_loop),
            Row(11, _REFIT, limit=1.0, goal=0.1, better=HIGHER, measure=self.refit_over_copy),
            Row(18, _USED, limit=1.0, goal=0.45, better=HIGHER, measure=self.utilisation),
            Row(19, _MEMORY, limit=0.0, goal=0.1, measure=self.memory_over_plan),
        )

    def head_over_product(self, folder: Path, repetitions: int) -> Measurement:
        """Reading by what the device chooses, over the logits' product: the slowest of all chunks
        and heads.
        """
        seconds: dict[str, tuple[float, ...]] = {}
        beside: dict[str, float] = {}
        worst = 0.0
        for head, (vocab, hidden) in self.scale.heads.items():
            numbers = map(str, (self.scale.head_tokens, vocab, hidden))
            chunks = ",".join(map(str, self.scale.chunks))
            rest = str(self.scale.trained_chunk), str(self.scale.turns * repetitions)
            found = self._fresh("benchmarks.head_once", *numbers, chunks, *rest)
            median = {name: statistics.median(of) for name, of in found["seconds"].items()}
            seconds |= {f"{head}: {name}": tuple(of) for name, of in found["seconds"].items()}
            beside |= {f"{head}: {name}": value for name, value in _head_ratios(median).items()}
            beside[f"{head}: product, TFLOP/s"] = found["product_flops"] / median[PRODUCT] / 1e12
            chosen = "triton" if "triton" in found["implementations"] else "torch"
            reading = [f"{chosen}, chunks of {chunk}" for chunk in self.scale.chunks]
            worst = max(worst, *(median[name] / median[PRODUCT] for name in reading))
        verified = f"log-probabilities and gradients equal those of plain chunks within {TOLERANCE}"
        return Measurement(worst, seconds, verified, _rounded(beside), DEVICE)

    def step_over_plain_loop(self, folder: Path, repetitions: int) -> Measurement:
        """`MegatronPolicy.train` over the loop's step on one device, alternating in one process;
        of the largest model of which two fit.
        """
        scale, rows = self.scale, self.scale.tokens // self.scale.length
        logits = _PLAIN_LOGITS * scale.tokens * max(size.vocab for size in scale.sizes.values())
        implementation = self.implementations[0]
        size = self._largest(implementation, ranks=1, copies=2, further=logits)
        found = self._fresh(
            "benchmarks.train_steps",
            self._checkpoint(folder, size),
            str(self.scale.turns * repetitions),
            *map(str, (scale.microbatches * rows, rows, scale.length)),
            implementation,
        )
        # The first step of either compiles kernels and allocates moments.
        runs = {name: tuple(found[name][1:]) for name in ("plain loop", "ours")}
        ratio = statistics.median(runs["ours"]) / statistics.median(runs["plain loop"])
        seconds = {f"{size}, {implementation}: {name}": of for name, of in runs.items()}
        return Measurement(ratio, seconds, found["verified"], clock=DEVICE)

    def refit_over_copy(self, folder: Path, repetitions: int) -> Measurement:
        """A copy of all weights on the device over a refit to another process on it."""
        path = self._checkpoint(folder, self.scale.refitted)
        seconds: dict[str, tuple[float, ...]] = {}
        beside: dict[str, float] = {}
        found = self._fresh("benchmarks.refit_once", path, str(self.scale.turns * repetitions))
        for name, runs in found["seconds"].items():
            copy, refit = (statistics.median(runs[what]) for what in ("copy", "refit"))
            seconds |= {f"{name}: {what}": tuple(of) for what, of in runs.items()}
            beside |= {name: copy / refit, f"{name}, GB/s": found["bytes"] / refit / 1e9}
        verified = "the engine compared every tensor's digest in every refit"
        return Measurement(beside["piece by piece"], seconds, verified, _rounded(beside), DEVICE)

    def utilisation(self, folder: Path, repetitions: int) -> Measurement:
        """Model FLOPs of a step over those that the measured product does in its time: the best
        implementation of the largest model that fits.
        """
        seconds: dict[str, tuple[float, ...]] = {}
        beside: dict[str, float] = {}
        best = 0.0
        for (size, implementation), ranks in self._trained(folder, repetitions).items():
            name, first = f"{size}, {implementation}", ranks[0]
            spent = [max(each) for each in zip(*map(_step_seconds, ranks), strict=True)]
            speed, median = first["speeds"][-1], statistics.median(spent)
            seconds[name] = tuple(spent)
            flops = speed["model_flops"] / (median * len(ranks))
            beside[f"{name}: of the product"] = used = flops / self.device["product_flops"]
            if first["sheet_flops"]:
                beside[f"{name}: MFU"] = flops / first["sheet_flops"]
            beside[f"{name}: tokens/s"] = speed["tokens"] / median
            beside[f"{name}: seconds / the plan's least"] = median / first["least_seconds"]
            if size == self._largest(implementation, self.ranks):
                best = max(best, used)
        verified = "every loss is finite; model FLOPs are counted, not measured"
        return Measurement(best, seconds, verified, _rounded(beside), DEVICE)

    def memory_over_plan(self, folder: Path, repetitions: int) -> Measurement:
        """How far the fullest rank's peak is from the plan's, as a share of the plan's: the worst
        of row 18's runs.
        """
        beside: dict[str, float] = {}
        worst = 0.0
        for (size, implementation), ranks in self._trained(folder, repetitions).items():
            peak, planned = max(r["peak_bytes"] for r in ranks), ranks[0]["planned_bytes"]
            beside[f"{size}, {implementation}: peak / plan"] = peak / planned
            beside[f"{size}, {implementation}: plan, GiB"] = planned / 2**30
            worst = max(worst, abs(peak / planned - 1))
        return Measurement(worst, {}, "as in row 18", _rounded(beside), DEVICE)

    def _trained(
        self, folder: Path, repetitions: int
    ) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """What every rank printed, by model and implementation; each trains once."""
        for implementation in self.implementations:
            smallest = next(iter(self.scale.sizes))
            for size in {smallest: 0, self._largest(implementation, self.ranks): 0}:
                if (size, implementation) not in self._speeds:
                    run = self._run(
                        self._checkpoint(folder, size),
                        implementation,
                        self.scale.turns * repetitions,
                    )
                    self._speeds[size, implementation] = run_ranks(
                        self.ranks,
                        "benchmarks.speed_once",
                        json.dumps(asdict(run)),
                        limit_s=RANKS_LIMIT_S,
                        gpus=not self.scale.cpu_ranks,
                    )
        return self._speeds

    def _largest(self, implementation: str, ranks: int, copies: int = 1, further: int = 0) -> str:
        """The name of the largest model of which `copies` fit the devices by the plan, beside
        `further` bytes; RuntimeError if none does.
        """
        with TemporaryDirectory() as folder:
            for name in reversed(list(self.scale.sizes)):
                path = write_config(Path(folder, name), self.scale.sizes[name])
                plan = self._run(path, implementation, 1).plan(ranks)
                if plan is not None and copies * plan.peak + further <= plan.usable:
                    return name
        raise RuntimeError(f"no model fits {self.device['device']}: all need more memory")

    def _run(self, path: Path, implementation: str, steps: int) -> Run:
        scale, device = self.scale, self.device
        shape = scale.length, scale.tokens, scale.microbatches, steps, device["device"]
        rates = device["memory_bytes"], device["product_flops"], device["memory_bandwidth"]
        return Run(str(path), implementation, *shape, *rates)

    def _checkpoint(self, folder: Path, size: str) -> Path:
        path = folder / size
        if not path.exists():
            write_checkpoint(path, self.scale.sizes[size], alike=True)
        return path

    def _fresh(self, module: str, *arguments: str | Path) -> dict[str, Any]:
        return run_fresh(module, *arguments, gpus=not self.scale.cpu_ranks)


_HEAD = "log-probabilities (the slowest chunks and head) / the matrix product of the logits"
_STEP = "training step / the same step as a plain Megatron-Core loop"
_REFIT = "refit on one GPU, bytes per second / device-to-device copy"
_USED = "model FLOPs of a training step / what matrix products do in its time"
_MEMORY = "peak memory of a training step: how far from the plan's"


def _head_ratios(median: Mapping[str, float]) -> dict[str, float]:
    """Of everything that reads, over the product; of all that trains, over four products and over
    plain chunks.
    """
    ratios = {}
    for name, seconds in median.items():
        if name.endswith("backward"):
            ratios[f"{name} / {PRODUCTS}"] = seconds / median[PRODUCTS]
            ratios[f"{name} / plain"] = seconds / median["plain, forward and backward"]
        elif name not in (PRODUCT, PRODUCTS):
            ratios[f"{name} / {PRODUCT}"] = seconds / median[PRODUCT]
    return ratios


def _step_seconds(rank: Mapping[str, Any]) -> Sequence[float]:
    return [speed["seconds"] for speed in rank["speeds"]]


def _rounded(ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in ratios.items()}
