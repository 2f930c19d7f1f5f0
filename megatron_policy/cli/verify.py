"""`verify`: checks a checkpoint against its digests, or compares two bit by bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_policy.cli.options import MAX_MEMORY, AsJson, Config, MaxMemory, arguments_as_options
from megatron_policy.cli.output import transfer
from megatron_policy.cli.report import CommandReport, one_line, one_line_errors, show
from megatron_policy.errors import CheckpointError
from megatron_policy.estimate.sizes import show_size

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
    as_json: AsJson = False,
) -> None:
    """Compare a checkpoint with its own digests, or two checkpoints with each other.

    Two are compared tensor by tensor, in the Hugging Face names and shapes. Exits with 1 if a bit
    differs, and shows the first differences.
    """
    with one_line_errors(as_json), arguments_as_options():
        if b is not None:
            found = _compare(a, b, max_memory, config)
        else:
            saved = _find_saved(a)
            found = _check_saved(saved) if saved else _check_converted(a, max_memory, config)
    show(found, as_json)


def _report(lines: Iterable[str], data: dict[str, Any], error: str | None = None) -> CommandReport:
    return CommandReport(lambda: data | {"error": error and one_line(error)}, lines, error)


def _compare(a: str, b: str, max_memory: int, config: str | None) -> CommandReport:
    from megatron_policy.convert import verify

    saved = [_find_saved(path) for path in (a, b)]
    for directory in filter(None, saved):
        contains = _verify_saved(directory).contains
        if "weights" not in contains:
            raise CheckpointError(
                f"{directory} has no weights to compare, only {' + '.join(contains)}"
            )
    left, right = (root or path for root, path in zip(saved, (a, b), strict=True))
    with transfer("compared") as tell:
        found = verify(left, right, max_memory=max_memory, progress=tell, config=config)
    digests = [bool(root or has) for root, has in zip(saved, found.has_digests, strict=True)]
    data = {
        "a": a,
        "b": b,
        "equal": found.equal,
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "differences": [asdict(each) for each in found.differences],
        "summary": found.summary,
        "skipped": found.skipped,
        "match_digests": digests,
    }
    if not found.equal:
        kinds = ", ".join(f"{kind} {count}" for kind, count in found.summary.items())
        lines = [f"{each.kind}: {each.message}" for each in found.differences]
        return _report(lines, data, f"{a} and {b} differ: tensors by kind: {kinds}")
    lines = [f"equal: {found.tensors} tensors, {show_size(found.nbytes)}"]
    if found.skipped:
        first, *more = found.skipped
        others = f" and {len(more)} more" if more else ""
        lines.append(f"in only one of them, and unused: {first}{others}")
    for path, has in zip((a, b), digests, strict=True):
        lines.append(f"{path} {'matches its digests' if has else 'has no digests'}")
    return _report(lines, data)


def _find_saved(path: str) -> Path | None:
    """The directory of a training checkpoint at or in `path`; None if there is none."""
    from megatron_policy.checkpoint import tracker

    return tracker.find(path) if tracker.is_saved(path) else None


def _verify_saved(root: Path) -> CheckpointManifest:
    from megatron_policy.checkpoint import verifying

    with transfer("checked") as tell:
        return verifying.verify(root, tell)


def _check_saved(root: Path) -> CommandReport:
    found = _verify_saved(root)
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    sizes = {name: size for name, size in found.layout.items() if size is not None}
    files = f"{len(found.records)} file{'s' * (len(found.records) != 1)}"
    lines = [
        f"{root}: {found.family}, step {found.step}, {' + '.join(found.contains)}",
        f"written by {versions.replace('_', '-')}",
        f"layout: {', '.join(f'{name} {size}' for name, size in sizes.items())}",
        f"{len(found.tensors)} tensors, {show_size(found.nbytes)} in {files}",
    ]
    if found.optimizer_elsewhere:
        elsewhere = f"the optimizer state of save {found.id} is in another directory"
        lines.append(f"{elsewhere}: verify it separately")
    data = {
        "path": root,
        "kind": "training",
        "family": found.family,
        "step": found.step,
        "tensors": len(found.tensors),
        "bytes": found.nbytes,
        "complete": True,
        "problems": [],
        "contains": found.contains,
        "layout": sizes,
        "versions": found.versions,
        "optimizer_elsewhere": found.optimizer_elsewhere,
    }
    return _report((*lines, COMPLETE), data)


def _check_converted(path: str, max_memory: int, config: str | None) -> CommandReport:
    from megatron_policy.convert import check

    with transfer("checked") as tell:
        found = check(path, max_memory=max_memory, progress=tell, config=config)
    origin, step = found.manifest.origin, found.manifest.step
    data = {
        "path": found.root,
        "kind": found.kind,
        "family": origin["family"],
        "step": step,
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "complete": not found.problems,
        "problems": found.problems,
        "origin": {key: origin[key] for key in ("package", "direction", "source")},
    }
    if found.problems:
        listed = "".join(f"\n  {words}" for words in found.problems)
        return _report((), data, f"{found.root} does not match its digests:{listed}")
    behind = "" if step is None else f"step {step}, "
    size = f"{found.tensors} tensors, {show_size(found.nbytes)}"
    source = origin["source"]["path"]
    return _report(
        (
            f"{found.root}: {origin['family']}, {found.kind}, {behind}{size}",
            f"written by {origin['package']}, {origin['direction']}, from {source}",
            COMPLETE,
        ),
        data,
    )
