"""Rows of tensors and lists that travel together, and the plan of their microbatches.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_PLAN = ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb")


class BatchedDataDict(UserDict[str, Any]):
    """A dict of tensors (dimension 0 is the row) and lists (one item per row), all of equal length.
    NumPy arrays are taken: those of numbers become tensors, others lists.

    Methods that cut or select rows return a new batch; slices share memory with this one.
    ValueError names the key and both sizes when something does not fit.

    A batch can carry a plan of its microbatches in three attributes, with the host's names and
    format (`packing.plan.Plan` reads and writes them): `micro_batch_indices`, per global batch a
    list of [start, end] rows; `micro_batch_lengths`, the positions of each;
    `elem_counts_per_gb`, the rows of each global batch if sequences are packed. They are kept
    when a batch is made from another, copied or pickled, and are None after rows were cut,
    selected or moved. The same goes for `caller_rows`: which rows of another batch these are,
    for messages.
    """

    micro_batch_indices: list[list[list[int]]] | None
    micro_batch_lengths: list[list[int]] | None
    elem_counts_per_gb: list[int] | None
    caller_rows: list[int] | None

    def __init__(self, data: Any = None, /, **kwargs: Any) -> None:
        super().__init__(data, **kwargs)
        for name in (*_PLAN, "caller_rows"):
            setattr(self, name, getattr(data, name, None))

    def __setitem__(self, key: str, item: Any) -> None:
        super().__setitem__(key, _of_array(item) if isinstance(item, np.ndarray) else item)

    @property
    def size(self) -> int:
        """Number of rows B, 0 without keys. ValueError if the keys disagree."""
        first: tuple[str, int] | None = None
        for key, value in self.data.items():
            rows = value.size(0) if isinstance(value, torch.Tensor) else len(value)
            if first is None:
                first = (key, rows)
            elif rows != first[1]:
                raise ValueError(f"{first[0]!r} has {first[1]} rows, but {key!r} has {rows}")
        return 0 if first is None else first[1]

    def get_dict(self) -> dict[str, Any]:
        """The underlying dict itself, not a copy."""
        return self.data

    def slice(self, start: int, end: int) -> BatchedDataDict:
        """Rows `start` to `end` (exclusive); both must lie within the batch."""
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"rows {start} to {end} are not within the batch's {self.size} rows")
        return self._each(lambda value: value[start:end])

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> BatchedDataDict:
        """The `batch_idx`-th global batch, with its part of the plan as a plan of one global batch.

        Without `elem_counts_per_gb` all global batches have `batch_size` rows.
        """
        counts = self.elem_counts_per_gb
        if counts is not None:
            start = sum(counts[:batch_idx])
            batch = self.slice(start, start + counts[batch_idx])
        elif batch_size is None:
            raise ValueError("without elem_counts_per_gb a part needs its batch_size")
        else:
            batch = self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)
        for name in _PLAN:
            if (values := getattr(self, name)) is not None:
                setattr(batch, name, [values[batch_idx]])
        return batch

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[BatchedDataDict]:
        """Parts of `microbatch_size` rows in order; the size must divide the number of rows."""
        if microbatch_size < 1 or self.size % microbatch_size:
            raise ValueError(
                f"{self.size} rows cannot be cut into microbatches of {microbatch_size}"
            )
        return (self.slice(i, i + microbatch_size) for i in range(0, self.size, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[BatchedDataDict]:
        """The planned microbatches of this global batch, with tensors cut to the length of each in
        dimension `sequence_dim`.
        """
        for start, end, length in _spans(self):
            part = self.slice(start, end)
            part.truncate_tensors(sequence_dim, length)
            yield part

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """The number of microbatches of that iterator."""
        return len(_spans(self))

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[BatchedDataDict]:
        """The planned microbatches of this global batch, with rows unchanged: not yet packed."""
        return (self.slice(start, end) for start, end, _ in _spans(self))

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """The number of microbatches of that iterator, and the positions of the longest one."""
        spans = _spans(self)
        return len(spans), max((length for _, _, length in spans), default=0)

    def chunk(self, rank: int, chunks: int) -> BatchedDataDict:
        """The `rank`-th of `chunks` equal parts."""
        if not 0 <= rank < chunks:
            raise ValueError(f"shard {rank} of {chunks} is out of range for {self.size} rows")
        if self.size % chunks:
            raise ValueError(f"{self.size} rows cannot be cut into {chunks} equal shards")
        share = self.size // chunks
        return self.slice(rank * share, (rank + 1) * share)

    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None
    ) -> list[BatchedDataDict]:
        """Split each group of `batch_size` rows (default all) evenly over `shards`, in order.

        A shard holds its part of every group, one after another, so that the n-th parts of all
        shards form the n-th group, a global batch.
        """
        batch_size = self.size if batch_size is None else batch_size
        if batch_size < 1 or self.size % batch_size or batch_size % shards:
            raise ValueError(
                f"{self.size} rows cannot be split over {shards} shards in groups of {batch_size}: "
                f"rows must be a multiple of the group, and the group a multiple of {shards}"
            )
        share = batch_size // shards
        starts = range(0, self.size, batch_size)

        def part(shard: int) -> BatchedDataDict:
            pieces = [self.slice(s + shard * share, s + (shard + 1) * share) for s in starts]
            return pieces[0] if len(pieces) == 1 else type(self).from_batches(pieces)

        return [part(shard) for shard in range(shards)]

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> BatchedDataDict:
        """The rows at `indices`, in that order; a row can be selected more than once."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        rows = chosen.tolist()
        bad = [row for row in rows if not -self.size <= row < self.size]
        if bad:
            raise ValueError(f"row {bad[0]} is not within the batch's {self.size} rows")
        return self._each(lambda value: _pick(value, chosen, rows))

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Move row i to position `reorded_indices[i]`, in place; undoes `select_indices`."""
        if sorted(reorded_indices) != list(range(self.size)):
            raise ValueError(
                f"a new order of {self.size} rows must name each once, not {list(reorded_indices)}"
            )
        order = sorted(range(self.size), key=lambda row: reorded_indices[row])
        self.data = self.select_indices(order).data
        for name in (*_PLAN, "caller_rows"):
            setattr(self, name, None)

    def repeat_interleave(self, num_repeats: int) -> BatchedDataDict:
        """Every row repeated `num_repeats` times; items of lists are copied, so they can
        diverge.
        """

        def repeat(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.repeat_interleave(num_repeats, dim=0)
            return [copy.deepcopy(item) for item in value for _ in range(num_repeats)]

        return self._each(repeat)

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut tensors that have dimension `dim` to the first `truncated_len` entries, in place."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.ndim > dim:
                if value.size(dim) < truncated_len:
                    raise ValueError(
                        f"{key!r} has {value.size(dim)} entries in dimension {dim}, fewer than "
                        f"{truncated_len}"
                    )
                self.data[key] = value.narrow(dim, 0, truncated_len)

    def to(self, device: str | torch.device) -> BatchedDataDict:
        """Move the tensors to `device`, in place; return this batch."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> BatchedDataDict:
        """All rows of `batches` in order.

        Tensors of two or more dimensions are padded on the right of dimension 1 to the longest,
        with 0 or with `pad_value_dict[key]`. All batches must have the same keys, or none at all.
        """
        filled = [batch for batch in batches if len(batch)]
        joined: BatchedDataDict = cls()
        for key in filled[0] if filled else ():
            for index, batch in enumerate(filled):
                if batch.keys() != filled[0].keys():
                    odd = sorted(batch.keys() ^ filled[0].keys())
                    raise ValueError(f"batches 0 and {index} differ in their keys: {odd}")
            pad = (pad_value_dict or {}).get(key, 0)
            joined[key] = _concatenate(key, [batch[key] for batch in filled], pad)
        return joined

    def _each(self, change: Any) -> BatchedDataDict:
        return type(self)({key: change(value) for key, value in self.data.items()})


def _spans(batch: BatchedDataDict) -> list[tuple[int, int, int]]:
    """Start, end and length of each microbatch; ValueError without a plan of one global batch."""
    indices, lengths = batch.micro_batch_indices, batch.micro_batch_lengths
    if indices is None or lengths is None or len(indices) != 1 or len(lengths) != 1:
        raise ValueError(
            "the batch has no plan for a single global batch; select one with get_batch()"
        )
    return [(s, e, length) for (s, e), length in zip(indices[0], lengths[0], strict=True)]


def _of_array(array: np.ndarray[Any, Any]) -> Any:
    """Numbers as a tensor, which shares the array's memory where torch can; else a list."""
    if array.dtype.kind not in "biufc":
        return array.tolist()
    writable = array if array.flags.writeable else array.copy()
    # Torch takes neither negative strides nor another machine's order of bytes.
    native = np.ascontiguousarray(writable, dtype=writable.dtype.newbyteorder("="))
    return torch.from_numpy(native)


def _pick(value: Any, chosen: torch.Tensor, rows: Sequence[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return value[chosen.to(value.device)]
    return [value[row] for row in rows]


def _concatenate(key: str, values: list[Any], pad: float) -> Any:
    tensors = [isinstance(value, torch.Tensor) for value in values]
    if not any(tensors):
        return [item for value in values for item in value]
    if not all(tensors):
        raise ValueError(f"{key!r} is a tensor in some batches and a list in others")
    shapes = [tuple(value.shape) for value in values]
    if any(shape[2:] != shapes[0][2:] or len(shape) != len(shapes[0]) for shape in shapes):
        raise ValueError(f"{key!r} has shapes that cannot be joined: {shapes}")
    if len(shapes[0]) < 2:
        return torch.cat(values)
    # One allocation: all rows, the longest sequence, and the remaining dimensions.
    longest = max(shape[1] for shape in shapes)
    whole = values[0].new_full((sum(s[0] for s in shapes), longest, *shapes[0][2:]), pad)
    start = 0
    for value in values:
        whole[start : start + value.size(0), : value.size(1)] = value
        start += value.size(0)
    return whole
