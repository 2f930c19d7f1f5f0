"""Loads a checkpoint from a path into this rank's local shards: everything is found, verified and
agreed on before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.checkpoint.local_shards import WEIGHTS, LocalShard, Slice, locate, state_prefix
from megatron_policy.checkpoint.manifest import CheckpointManifest
from megatron_policy.checkpoint.verifying import check_files, records_share, verify_records
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_files import DistReader
from megatron_policy.converters.formats.dist_keys import OPTIMIZER_STATE
from megatron_policy.converters.formats.stored import Chunk, Stored
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.rows.regions import Box, Region, runs
from megatron_policy.converters.table import Entry, Table
from megatron_policy.coordination.operation import Coordinator
from megatron_policy.device import host_buffer, spare_cores, synchronize
from megatron_policy.errors import CheckpointError
from megatron_policy.formats.tensors import flat_bytes
from megatron_policy.interfaces.engine import MAIN
from megatron_policy.parallel.topology import Placement

T = TypeVar("T")

FRESH = "fresh_optimizer=True (or megatron_cfg.checkpoint.fresh_optimizer) starts a new optimizer"


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that can be loaded, according to its manifests."""

    root: Path
    weights: CheckpointManifest
    optimizer_root: Path | None
    """None: there is no optimizer state to load."""
    optimizer: CheckpointManifest | None
    no_optimizer: str
    """Why there is none."""

    @property
    def directories(self) -> dict[Path, CheckpointManifest]:
        """Each directory to read from, with its manifest."""
        found = {self.root: self.weights}
        if self.optimizer_root is not None and self.optimizer is not None:
            found[self.optimizer_root] = self.optimizer
        return found


class Loader:
    """One rank's end of a checkpoint load."""

    def __init__(
        self, table: Table, place: Placement, coordinator: Coordinator, purpose: str
    ) -> None:
        self._table, self._place, self._coordinator = table, place, coordinator
        self.under = coordinator.begin(purpose)

    def find(
        self,
        weights_path: Path,
        optimizer_path: Path | None,
        *,
        moments: tuple[str, ...] | None,
        fresh: bool,
    ) -> FoundCheckpoint:
        """The checkpoint that rank 0 finds, checked on all ranks.

        `moments` are the kinds of state that the policy's optimizer keeps, None without an
        optimizer; `fresh` allows a new optimizer. CheckpointError for anything missing, damaged,
        of another model or of a newer version, and if ranks find different checkpoints.
        """
        if self._coordinator.rank == 0:
            with self.under.critical_section():
                self.under.publish("where", str(tracker.find(weights_path).absolute()))
        root = Path(self.under.wait_for("where"))

        def step() -> FoundCheckpoint:
            found = self._examine(root, optimizer_path, moments, fresh)
            state = "no state of the optimizer" if found.optimizer is None else "its optimizer"
            self.under.check_same(
                "value",
                f"save {found.weights.id} with {state}",
                "this rank has found {own}, another {first}: all ranks have to see the same "
                "directories",
            )
            return found

        return self.under.run_together("found", step)

    def verify(self, found: FoundCheckpoint) -> None:
        """Compare all records with their digests; each rank checks its share."""
        rank, size = self._coordinator.rank, self._coordinator.size

        def step() -> None:
            for root, stated in found.directories.items():
                share = records_share(stated, rank, size)
                verify_records(root, share, threads=spare_cores())

        self.under.run_together("verified", step)

    @contextmanager
    def open(self, prepare: Callable[[RawFiles], T]) -> Iterator[T]:
        """Yield what `prepare` makes of the open files; CheckpointError on all ranks on failure."""
        with RawFiles() as files:
            yield self.under.run_together("mapped", lambda: prepare(files))

    def _examine(
        self,
        root: Path,
        optimizer_path: Path | None,
        moments: tuple[str, ...] | None,
        fresh: bool,
    ) -> FoundCheckpoint:
        weights = self._check(root)
        if manifest.WEIGHTS not in weights.contains:
            raise CheckpointError(
                f"{root} has no weights, only {', '.join(weights.contains)}: give the directory "
                "that the weights were saved to as weights_path"
            )
        if moments is None:
            return FoundCheckpoint(root, weights, None, None, "the policy has no optimizer")
        try:
            place = self._find_optimizer(root, weights, optimizer_path)
            state = weights if place == root else self._check(place)
            kinds = (key for key in state.tensors if key.startswith(OPTIMIZER_STATE))
            kept = {key.removeprefix(OPTIMIZER_STATE).partition(".")[0] for key in kinds}
            if missing := [kind for kind in moments if kind not in kept]:
                raise manifest.NoOptimizer(
                    f"{place} was saved by a different optimizer: it has "
                    f"{', '.join(sorted(kept)) or 'no state'}, but this policy's "
                    f"needs {', '.join(missing)}; {FRESH}"
                )
        except manifest.NoOptimizer as error:
            if not fresh:
                raise
            return FoundCheckpoint(root, weights, None, None, f"a new one was requested; {error}")
        return FoundCheckpoint(root, weights, place, state, "")

    def _find_optimizer(
        self, root: Path, weights: CheckpointManifest, optimizer_path: Path | None
    ) -> Path:
        there = manifest.OPTIMIZER in weights.contains
        if optimizer_path is None:
            where = "elsewhere" if weights.optimizer_elsewhere else "nowhere"
            hint = f"optimizer_path={root.parent}" if there else f"it was saved {where}"
            raise manifest.NoOptimizer(
                f"no optimizer_path was given to load the optimizer's state from ({hint}); {FRESH}"
            )
        if there and optimizer_path.absolute() in (root, root.parent):
            return root
        return tracker.companion(weights, optimizer_path).absolute()

    def _check(self, root: Path) -> CheckpointManifest:
        stated = manifest.read(root)
        architecture = self._table.architecture
        manifest.check_model(stated, self._table.family, manifest.digest_of(architecture))
        check_files(root, stated)
        return stated


class LoadPlan:
    """Where each of a rank's local shards is in the files."""

    def __init__(
        self,
        found: FoundCheckpoint,
        files: RawFiles,
        table: Table,
        place: Placement,
        shards: Sequence[LocalShard],
    ) -> None:
        self._architecture, self._place = table.architecture, place
        self._owners = {entry.hf: entry for entry in table.exported()}
        self.weights = DistReader(found.root, files)
        self.optimizer: DistReader | None = None
        if found.optimizer_root is not None:
            same = found.optimizer_root == found.root
            self.optimizer = self.weights if same else DistReader(found.optimizer_root, files)
        self._sources = [(shard, self._find_source(shard)) for shard in shards]

    def fill(self) -> None:
        """Read the elements of every local shard; vocabulary padding becomes 0."""
        threads = spare_cores()
        order = sorted(self._sources, key=lambda source: -source[0].tensor.nbytes)
        with ThreadPoolExecutor(threads) as pool:
            # Dealt round-robin, largest first: about as many bytes to each thread.
            list(pool.map(self._fill, [order[n::threads] for n in range(threads)]))

    def _fill(self, sources: Sequence[tuple[LocalShard, Stored]]) -> None:
        with RawFiles() as files, torch.no_grad():
            filler = Filler(files)
            for shard, stored in sources:
                places = list(locate(shard, self._architecture, self._place))
                if sum(piece.elements for piece, _ in places) < shard.tensor.numel():
                    shard.tensor.zero_()
                filler.fill(stored, places)

    def _find_source(self, shard: LocalShard) -> Stored:
        """The tensor in the files that a local shard is filled from.

        What a policy keeps in fp32 comes from the main parameters, whatever the precision of the
        policy that wrote them; if that one had none, its weights are its main parameters.
        """
        # The entry in the files: this one, or the one of which it is a copy or a part.
        entry, kind = shard.entry, shard.kind
        owner = entry.saved if entry.row.owns else self._owners[entry.hf]
        if kind in (WEIGHTS, MAIN):
            own = self._find_stored(self.weights, owner, WEIGHTS)
            if own is None:
                raise CheckpointError(
                    f"{self.weights.root} lacks {owner.megatron}: if the other training engine "
                    "saved it, export_hf there and set policy.model_name to what it writes"
                )
            main = None
            if kind == MAIN or own.dtype != shard.tensor.dtype:
                main = self._find_stored(self.optimizer, owner, MAIN)
            if main is not None and main.dtype == shard.tensor.dtype:
                return main
            if kind == WEIGHTS or own.dtype == shard.tensor.dtype:
                return own
        elif (found := self._find_stored(self.optimizer, owner, kind)) is not None:
            return found
        assert self.optimizer is not None
        raise CheckpointError(
            f"{self.optimizer.root} lacks {kind} of {owner.megatron}: that parameter was not "
            "trained there. Freeze it here too, or leave optimizer_path out and load with "
            "fresh_optimizer=True"
        )

    def _find_stored(self, reader: DistReader | None, entry: Entry, kind: str) -> Stored | None:
        if reader is None:
            return None
        found = reader.parameter(entry, self._architecture, state_prefix(kind))
        return None if found is None else found[1]


BUFFER_BYTES = 32 << 20


class Filler:
    """Fills memory from files, through its own buffer."""

    def __init__(self, files: RawFiles) -> None:
        self._files = files
        self._buffer: Tensor | None = None

    def fill(self, stored: Stored, places: Iterable[tuple[Slice, Tensor]]) -> None:
        """Copy each slice of the stored tensor to its flat memory, casting. ConversionError if a
        file cannot be read.
        """
        for piece, memory in places:
            for chunk in stored.chunks:
                # The elements that both contain, as indices in the whole tensor.
                along = zip(piece.origin, piece.sizes, chunk.origin, chunk.sizes, strict=True)
                box = tuple((max(a, b), min(a + n, b + m)) for a, n, b, m in along)
                if all(low < high for low, high in box):
                    self._fill(stored.dtype, chunk, piece, memory, box)

    def _fill(
        self, dtype: torch.dtype, chunk: Chunk, piece: Slice, memory: Tensor, box: Box
    ) -> None:
        file = _region(box, chunk.origin, chunk.sizes)
        own = _region(box, piece.origin, piece.sizes)
        if memory.device.type == "cpu" and memory.dtype == dtype:
            found = runs(file, own)
            if all(one.hf + one.length == other.hf for one, other in pairwise(found)):
                size, content = dtype.itemsize, flat_bytes(memory)
                views = [content[r.own * size : (r.own + r.length) * size] for r in found]
                self._files.read(chunk.path, chunk.start + found[0].hf * size, views)
                return
        for part in _parts(box, chunk, BUFFER_BYTES // dtype.itemsize):
            file = _region(part, chunk.origin, chunk.sizes)
            own = _region(part, piece.origin, piece.sizes)
            nbytes = _extent(file) * dtype.itemsize
            if self._buffer is None or self._buffer.numel() < nbytes:
                most = max(nbytes, BUFFER_BYTES)
                self._buffer = host_buffer(torch.empty(most, dtype=torch.uint8, device="meta"))
            buffer = self._buffer[:nbytes]
            start = chunk.start + file.offset * dtype.itemsize
            self._files.read(chunk.path, start, [flat_bytes(buffer)])
            source = buffer.view(dtype).as_strided(file.size, file.stride)
            target = memory.as_strided(own.size, own.stride, memory.storage_offset() + own.offset)
            target.copy_(source, non_blocking=True)
            synchronize()  # the buffer is reused


def _region(box: Box, origin: Shape, sizes: Shape) -> Region:
    """Where the box is in a flat box with that origin and those sizes."""
    stride = tuple(math.prod(sizes[n + 1 :]) for n in range(len(sizes)))
    offset = sum(
        (low - first) * step for (low, _), first, step in zip(box, origin, stride, strict=True)
    )
    return Region(tuple(high - low for low, high in box), stride, offset)


def _extent(region: Region) -> int:
    """Elements from the region's first to its last."""
    steps = zip(region.size, region.stride, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _parts(box: Box, chunk: Chunk, most: int) -> Iterator[Box]:
    """Split the box into parts whose extent in the chunk is at most `most` elements."""
    if _extent(_region(box, chunk.origin, chunk.sizes)) <= most:
        yield box
        return
    dim = next(n for n, (low, high) in enumerate(box) if high - low > 1)
    low, high = box[dim]
    middle = (low + high) // 2
    for ends in ((low, middle), (middle, high)):
        yield from _parts((*box[:dim], ends, *box[dim + 1 :]), chunk, most)
