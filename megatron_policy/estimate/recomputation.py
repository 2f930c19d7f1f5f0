"""What a model chunk keeps of a microbatch under a recomputation setting, and what its backward
pass holds at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_policy.config import MegatronConfig
from megatron_policy.estimate.activations import LayerActivations, MicrobatchShape


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes of one microbatch."""

    kept: int
    """Between its two passes, of this microbatch alone."""
    most: int
    """The most while its backward pass runs, at least `kept`: what is computed again is held beside
    what layers before it keep, while layers behind it have finished.
    """
    shared: int
    """What all microbatches share."""


def chunk_activations(
    layers: range,
    model: LayerActivations,
    settings: MegatronConfig,
    batch: MicrobatchShape,
    first: bool,
    last: bool,
) -> ChunkActivations:
    """Of a chunk of these layers; `first` has the embedding, `last` the head."""
    kept = model.embedding(batch) + batch.pictures + model.splice(batch) if first else 0
    # Those that are not packed have the same angles.
    angles = model.angles(batch) if settings.recompute_granularity == "full" else 0
    kept, shared = (kept + angles, 0) if batch.packed else (kept, angles)
    most = kept
    # A frozen embedding's output needs gradients only where `Pipeline` in
    # `engines/megatron/pipeline.py` has it need them.
    needed = not first or model.adapters is None or model.adapters.towers
    needed = needed or model.topology.pp > 1
    needed = needed or settings.recompute_granularity is not None
    units = [*_units(layers, model, settings, batch, needed)]
    if last:
        head = model.head(batch)
        units.append((head, head))
        # Layers for further tokens start from what the head takes, and finish before it.
        units += ((own + head, again) for own, again in _further(model, settings, batch))
    for own, again in units:
        most = max(most, kept + again)
        kept += own
    return ChunkActivations(kept, max(most, kept), shared)


def _units(
    layers: range,
    model: LayerActivations,
    settings: MegatronConfig,
    batch: MicrobatchShape,
    needed: bool,
) -> Iterator[tuple[int, int]]:
    """What each layer, or each group that is computed again at once, keeps between the passes, and
    the most during its own backward pass. `needed` says whether what enters needs gradients.
    """
    saved, alike = [], {}
    for layer in layers:
        key = model.kind(layer), needed
        if key not in alike:
            alike[key] = model.saved(layer, batch, needed)
        saved.append(alike[key])
        needed = needed or model.adapts(layer)
    number, hidden = settings.recompute_num_layers or 1, model.hidden(batch)
    if settings.recompute_granularity != "full":
        selective = settings.recompute_granularity == "selective"
        modules = settings.recompute_modules or () if selective else ()
        yield from ((each.kept(modules), each.again(modules)) for each in saved)
    elif settings.recompute_method == "block":
        for at, each in enumerate(saved):
            again = hidden + each.again(()) if at < number else each.again(())
            yield hidden if at < number else each.total, again
    else:
        for start in range(0, len(saved), number):
            # They are computed again at once, and left from the last one on.
            group = saved[start : start + number]
            before = accumulate((each.total for each in group), initial=0)
            most = max(kept + each.again(()) for kept, each in zip(before, group, strict=False))
            yield hidden, hidden + most


def _further(
    model: LayerActivations, settings: MegatronConfig, batch: MicrobatchShape
) -> Iterator[tuple[int, int]]:
    """The same of layers for multi-token prediction, one for each further token."""
    full = settings.recompute_granularity == "full"
    modules = settings.recompute_modules or ()
    selective = settings.recompute_granularity == "selective"
    for number in range(settings.mtp_num_layers):
        layer = model.arch.num_layers + min(number, model.arch.mtp_layers - 1)
        own, again = model.further(batch, layer, full)
        if selective:
            saved = model.saved(layer, batch)
            own += saved.kept(modules) - saved.total
            again += saved.again(modules) - saved.total
        yield own + model.embedding(batch), again + model.embedding(batch)
