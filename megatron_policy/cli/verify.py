"""`verify`: checks a checkpoint against its digests, or compares two bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_policy.cli.failures import fail, one_line_errors
from megatron_policy.cli.options import MAX_MEMORY, Config, MaxMemory, arguments_as_options
from megatron_policy.cli.output import say
from megatron_policy.cli.progress import transfer
from megatron_policy.cli.sizes import show_size

if TYPE_CHECKING:
    from megatron_policy.checkpoint.manifest import CheckpointManifest

COMPLETE = "complete: every digest matches"


def verify(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A checkpoint of either format, or a training checkpoint."
        ),
    ],
    b: Annotated[str | None, typer.Argument(metavar="B", help="Another one.")] = None,
    max_memory: MaxMemory = MAX_MEMORY,  # type: ignore[assignment]
    config: Config = None,
) -> None:
    """Compare a checkpoint with its own digests, or two checkpoints with each other.

    Two are compared tensor by tensor, in the Hugging Face names and shapes. Exits with 1 if a bit
    differs, and shows the first differences.
    """
    with one_line_errors(), arguments_as_options():
        if b is not None:
            _compare(a, b, max_memory, config)
            return
        saved = _saved_at(a)
        for line in _saved(saved) if saved else _converted(a, max_memory, config):
            say(line)
        say(COMPLETE)


def _compare(a: str, b: str, max_memory: int, config: Path | None) -> None:
    from megatron_policy.convert import verify

    saved = [_saved_at(path) for path in (a, b)]
    for directory in filter(None, saved):
        contains = _verify_saved(directory).contains
        if "weights" not in contains:
            fail(f"{directory} has no weights to compare, only {' + '.join(contains)}")
    left, right = (root or path for root, path in zip(saved, (a, b), strict=True))
    with transfer("compared") as tell:
        found = verify(left, right, max_memory=max_memory, progress=tell, config=config)
    for difference in found.differences:
        say(f"{difference.kind}: {difference.message}")
    if not found.equal:
        kinds = ", ".join(f"{kind} {count}" for kind, count in found.summary.items())
        fail(f"{a} and {b} differ: tensors by kind: {kinds}")
    say(f"equal: {found.tensors} tensors, {show_size(found.nbytes)}")
    if found.skipped:
        first, *more = found.skipped
        others = f" and {len(more)} more" if more else ""
        say(f"in only one of them, and unused: {first}{others}")
    for path, root, has in zip((a, b), saved, found.has_digests, strict=True):
        say(f"{path} {'matches its digests' if root or has else 'has no digests'}")


def _saved_at(path: str) -> Path | None:
    """The directory of a training checkpoint at or in `path`; None if there is none."""
    from megatron_policy.checkpoint import tracker

    return tracker.find(path) if tracker.is_saved(path) else None


def _verify_saved(root: Path) -> CheckpointManifest:
    from megatron_policy.checkpoint import verifying

    with transfer("checked") as tell:
        return verifying.verify(root, tell)


def _saved(root: Path) -> Iterator[str]:
    found = _verify_saved(root)
    yield f"{root}: {found.family}, step {found.step}, {' + '.join(found.contains)}"
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    yield f"written by {versions.replace('_', '-')}"
    sizes = (f"{name} {size}" for name, size in found.layout.items() if size is not None)
    yield f"layout: {', '.join(sizes)}"
    files = f"{len(found.records)} file{'s' * (len(found.records) != 1)}"
    yield f"{len(found.tensors)} tensors, {show_size(found.nbytes)} in {files}"
    if found.optimizer_elsewhere:
        elsewhere = f"the optimizer state of save {found.id} is in another directory"
        yield f"{elsewhere}: verify it separately"


def _converted(path: str, max_memory: int, config: Path | None) -> Iterator[str]:
    from megatron_policy.convert import check

    with transfer("checked") as tell:
        found = check(path, max_memory=max_memory, progress=tell, config=config)
    if found.problems:
        listed = "".join(f"\n  {words}" for words in found.problems)
        fail(f"{found.root} does not match its digests:{listed}")
    origin, step = found.manifest.origin, found.manifest.step
    behind = "" if step is None else f"step {step}, "
    size = f"{found.tensors} tensors, {show_size(found.nbytes)}"
    yield f"{found.root}: {origin['family']}, {found.kind}, {behind}{size}"
    yield f"written by {origin['package']}, {origin['direction']}, from {origin['source']['path']}"
