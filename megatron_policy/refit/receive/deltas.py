"""The engine's side of refits by deltas: follows a chain of versions in a directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_policy.converters.files.contained import expanded
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.deltas.chain import MANIFEST, Chain, Version, read_chain, read_file
from megatron_policy.refit.deltas.message import decode_message
from megatron_policy.refit.deltas.patching import OtherWeightsError, Patches
from megatron_policy.refit.receive.assembler import EngineState, WeightAssembler
from megatron_policy.refit.receive.disk import receive_directory

_ATTEMPTS = 3  # what is read can be replaced meanwhile, by what is newer


def receive_deltas(
    engine: EngineState,
    assembler_of: Callable[..., WeightAssembler],
    path: str | os.PathLike[str],
) -> int:
    """Bring an engine to the newest version in `path`; returns its step. See `Receiver`."""
    if not engine.staged:
        raise ConfigError(
            "deltas change weights that the receiver has staged: make it with staged=True, or "
            "receive whole weights"
        )
    root, failure = expanded(path), None
    for _ in range(_ATTEMPTS):
        chain = read_chain(root)
        if chain is None:
            raise RefitError(f"{root} has no {MANIFEST}: the trainer has published nothing there")
        try:
            return _follow(engine, assembler_of, root, chain)
        except FileNotFoundError as error:
            failure = error
            if read_chain(root) == chain:
                break
    raise assembler_of().refusal(f"a file of the newest version is gone: {failure}")


def _follow(
    engine: EngineState, assembler_of: Callable[..., WeightAssembler], root: Path, chain: Chain
) -> int:
    name, number = engine.version or ("", 0)
    pending = chain.after(number) if name == chain.name else None
    newer = number < chain.whole[-1].number
    if pending is None or (newer and not _can_read(root, chain, pending)):
        number = chain.whole[-1].number
        at = chain.place_whole(root, number)
        if not at.is_dir():
            raise FileNotFoundError(at)
        receive_directory(assembler_of, at, WeightAssembler.stage)
        pending = chain.after(number)
        assert pending is not None, "a chain leads from its whole versions to the newest"
    elif not pending and not engine.mixed:
        return chain.newest.step
    _apply(engine, assembler_of(), root, chain, pending)
    engine.version = (chain.name, chain.newest.number)
    return chain.newest.step


def _can_read(root: Path, chain: Chain, pending: Sequence[Version]) -> bool:
    """Whether these deltas are as they were written."""
    try:
        for version in pending:
            for file in version.files:
                read_file(root, chain, version.number, file)
    except (OSError, RefitError):
        return False
    return True


def _apply(
    engine: EngineState,
    assembler: WeightAssembler,
    root: Path,
    chain: Chain,
    pending: Sequence[Version],
) -> None:
    """Change what is staged, and load it; after a failure, what is staged is what it was."""
    patches = Patches(engine.kept)
    try:
        for version in pending:
            for file in version.files:
                patches.apply(decode_message(read_file(root, chain, version.number, file)))
        patches.check()
    except BaseException as error:
        patches.undo()
        if isinstance(error, OtherWeightsError):
            engine.version = None  # whole ones are taken next
        if isinstance(error, RefitError):
            raise assembler.refusal(str(error)) from error
        raise
    try:
        assembler.reload(chain.newest.step)
    except BaseException:
        patches.undo()
        raise
