"""`verify`: are two checkpoints the same, bit by bit, whatever their formats?"""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_policy.cli.failures import fail, one_line_errors
from megatron_policy.cli.options import MAX_MEMORY, Config, MaxMemory
from megatron_policy.cli.progress import transfer
from megatron_policy.cli.sizes import show_size


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of either format.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    max_memory: MaxMemory = MAX_MEMORY,  # type: ignore[assignment]
    config: Config = None,
) -> None:
    """Compare two checkpoints tensor by tensor, in the Hugging Face names and shapes.

    Exits with 1 if a bit differs, and shows the first differences.
    """
    with one_line_errors():
        from megatron_policy.conversion import verify

        with transfer("compared") as tell:
            found = verify(a, b, max_memory=max_memory, progress=tell, config=config)
        for difference in found.differences:
            typer.echo(f"{difference.kind}: {difference.words}")
        if not found.equal:
            kinds = ", ".join(f"{kind} {count}" for kind, count in found.summary.items())
            fail(f"{a} and {b} differ: tensors by kind: {kinds}")
        typer.echo(f"equal: {found.tensors} tensors, {show_size(found.nbytes)}")
        if found.passed_over:
            first, *more = found.passed_over
            others = f" and {len(more)} more" if more else ""
            typer.echo(f"in one of them only, and feeding nothing: {first}{others}")
        for path, has in zip((a, b), found.has_digests, strict=True):
            typer.echo(f"{path} {'is what its digests say' if has else 'has no digests'}")
