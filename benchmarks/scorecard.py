"""The scorecard: what is measured, its limit and our goal."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import (
    checkpointing,
    converting,
    deltas,
    exporting,
    fsdp,
    importing,
    lockstep,
    logprob_rows,
    packing,
    pictures,
    recurrent,
    shards,
    training,
)
from benchmarks.results import HIGHER, Row

SCORECARD: tuple[Row, ...] = (
    Row(
        1,
        "import of an HF checkpoint (0.5B, 1.5B: the worse) / reading it and one copy",
        limit=1.0,
        goal=1.2,
        measure=importing.over_floor,
    ),
    Row(
        2,
        "peak anonymous memory of that import / bytes of the weights",
        limit=1.0,
        goal=1.05,
        measure=importing.peak_memory,
    ),
    Row(
        3,
        "import of 400 layers / of 50 layers",
        limit=8.0,
        goal=8.5,
        measure=importing.growth,
    ),
    Row(
        4,
        "export into a flat buffer (0.5B, 1.5B: the worse) / one memcpy of the same bytes",
        limit=1.0,
        goal=1.05,
        measure=exporting.over_memcpy,
    ),
    Row(
        5,
        "microseconds of export per HF tensor, of 4802, beyond the copies",
        limit=0.0,
        goal=10.0,
        measure=exporting.per_tensor,
    ),
    Row(
        6,
        "collectives per exported HF tensor (TP2, PP2: the more; of 99)",
        limit=0.0101,
        goal=0.02,
        measure=exporting.collectives,
    ),
    Row(
        7,
        "peak memory of log-probabilities (chunks of 128; alone, packed, CP 2) / bf16 logits",
        limit=0.031,
        goal=0.17,
        measure=logprob_rows.peak_memory,
    ),
    Row(
        8,
        "log-probabilities (chunks of 128 and 512: the slower) / the matrix product of the logits",
        limit=1.0,
        goal=1.7,
        measure=logprob_rows.over_product,
    ),
    Row(
        9,
        "tokens that count x balance over 32 replicas, log-normal lengths",
        limit=1.0,
        goal=0.98,
        better=HIGHER,
        measure=packing.step_efficiency,
    ),
    Row(
        10,
        "training step / the same step as a plain Megatron-Core loop",
        limit=1.0,
        goal=1.05,
        measure=training.over_plain_loop,
    ),
    Row(
        11,
        "refit on one GPU, bytes per second / device-to-device copy",
        limit=1.0,
        goal=0.1,
        better=HIGHER,
        skipped="needs a GPU: make bench-gpu",
    ),
    Row(
        12,
        "checkpoints: a save / writing the same bytes, a load / reading them (the worse)",
        limit=1.0,
        goal=1.3,
        measure=checkpointing.over_plain_files,
    ),
    Row(
        13,
        "conversion (1.5B, 64 MiB of memory; the worse direction) / reading and writing the bytes",
        limit=1.0,
        goal=1.8,
        measure=converting.over_copying,
    ),
    Row(
        14,
        "lockstep: mean / costliest rank in each microbatch, 32 replicas, over the most possible",
        limit=1.0,
        goal=0.95,
        better=HIGHER,
        measure=lockstep.lockstep_efficiency,
    ),
    Row(
        15,
        "import of an fp8 checkpoint (0.5B, 1.5B: the worse) / reading, dequantising, one copy",
        limit=1.0,
        goal=1.3,
        measure=importing.dequantising,
    ),
    Row(
        16,
        "training step with experts / the same step as a plain Megatron-Core loop",
        limit=1.0,
        goal=1.05,
        measure=training.experts_over_plain_loop,
    ),
    Row(
        17,
        "import of 48 layers of 128 experts, per tensor / of a dense model, per tensor",
        limit=0.0,
        goal=1.0,
        measure=importing.experts_per_tensor,
    ),
    Row(
        20,
        "bytes exchanged to hand adapters over (TP2, PP2: the more) / bytes of the adapters",
        limit=1.0,
        goal=1.01,
        measure=exporting.adapters_moved,
    ),
    Row(
        21,
        "FSDP2: training step of two ranks / the same step as a plain loop of torch",
        limit=1.0,
        goal=1.05,
        measure=fsdp.over_plain_loop,
    ),
    Row(
        22,
        "FSDP2: import of an HF checkpoint (0.5B) / reading it and one copy",
        limit=1.0,
        goal=1.3,
        measure=fsdp.import_over_floor,
    ),
    Row(
        23,
        "FSDP2: export into a flat buffer (0.5B) / one memcpy of the same bytes",
        limit=1.0,
        goal=1.1,
        measure=fsdp.export_over_memcpy,
    ),
    Row(
        24,
        "finding and packing 1 % of what has changed of a share (bf16) / one memcpy of the share",
        limit=1.0,
        goal=1.5,
        measure=deltas.over_memcpy,
    ),
    Row(
        25,
        "bytes sent of changed weights (the most of 1, 3 and 5 %) / bytes of the changed elements",
        limit=1.0,
        goal=2.0,
        measure=deltas.bytes_over_changed,
    ),
    Row(
        26,
        "training step with gated delta nets / the same step as a plain loop of torch",
        limit=1.0,
        goal=1.1,
        measure=recurrent.delta_nets_over_plain_loop,
    ),
    Row(
        27,
        "training step with Mamba2 and attention / the same step as a plain loop of torch",
        limit=1.0,
        goal=1.1,
        measure=recurrent.mamba2_over_plain_loop,
    ),
    Row(
        28,
        "what a scan holds beyond what it is given and gives, of 32768 tokens / of 4096 tokens",
        limit=1.0,
        goal=1.1,
        measure=recurrent.growth_of_memory,
    ),
    Row(
        29,
        "training step with pictures / the same step as a plain loop of torch",
        limit=1.0,
        goal=1.1,
        measure=pictures.pictures_over_plain_loop,
    ),
    Row(
        30,
        "seconds before the first byte of a refit of 1.03e12 parameters from 512 shards to 128",
        limit=0.0,
        goal=5.0,
        measure=shards.seconds_before_first_byte,
    ),
    Row(
        31,
        "shard to shard: bytes that an engine rank receives (the most of 128) / its own bytes",
        limit=1.0,
        goal=1.01,
        measure=shards.received_over_own,
    ),
    Row(
        32,
        "seconds in which an engine that follows each training step cannot answer / of the steps",
        limit=0.0,
        goal=0.1,
        measure=training.paused_share,
    ),
)


def chosen(scorecard: Sequence[Row], numbers: Sequence[int] | None) -> list[Row]:
    """The rows with these numbers, or all, in the scorecard's order; ValueError for unknown
    numbers.
    """
    known = {row.number for row in scorecard}
    if unknown := set(numbers or ()) - known:
        raise ValueError(f"no row {sorted(unknown)} in the scorecard; it has {sorted(known)}")
    return [row for row in scorecard if not numbers or row.number in numbers]
