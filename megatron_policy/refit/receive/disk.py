"""The engine's side of refits from a directory that a trainer has published: a checkpoint, or a
chain of versions.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    read_peft,
)
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_files import HfReader, is_peft
from megatron_policy.converters.formats.hf_names import MANIFEST, SINGLE
from megatron_policy.errors import ConfigError, ConversionError, RefitError
from megatron_policy.formats.manifest import read_manifest
from megatron_policy.refit.deltas.chain import MANIFEST as CHAIN
from megatron_policy.refit.deltas.chain import Chain, decode_chain, read_chain, read_messages
from megatron_policy.refit.deltas.folder import Directory, ObjectFolder, open_folder
from megatron_policy.refit.digest import HOST
from megatron_policy.refit.manifest import (
    RefitInfo,
    RefitManifest,
    ServedModel,
    StagedVersion,
    TensorDigest,
)
from megatron_policy.refit.receive.assembler import KEEPS, EngineState, WeightAssembler

_PORTION = 256 * 2**20  # bytes given to the engine at a time
_ATTEMPTS = 3  # what is read can be replaced meanwhile, by what is newer
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two looks for a newer version


def receive_directory(
    assembler_of: Callable[[str], WeightAssembler],
    path: str | os.PathLike[str],
    end: Callable[[WeightAssembler, RefitManifest], RefitManifest] = WeightAssembler.finish,
) -> RefitManifest:
    """Receive one refit: the weights now in `path`; does not wait for new ones. `end` is called
    when all have been taken.

    `assembler_of` takes the name of the digest algorithm. RefitError if there is no complete
    directory of a policy, or it is older than the engine's weights, damaged, or of another model.
    """
    root = expanded(path)
    try:
        manifest = _read_manifest(root)
        with HfReader(root, ADAPTER_MODEL if is_peft(root) else SINGLE) as reader:
            assembler = assembler_of(manifest.algorithm)
            forms = {name: (s.shape, s.dtype) for name, s in manifest.tensors.items()}
            assembler.announce(RefitInfo(forms, manifest.model))
            for names in _portions(reader):
                assembler.take([(name, reader.tensor(name)) for name in names])
            return end(assembler, manifest)
    except (ConfigError, ConversionError, OSError) as error:
        raise RefitError(f"the weights in {root} are refused: {error}") from error


def receive_deltas(
    engine: EngineState,
    assembler_of: Callable[..., WeightAssembler],
    path: str | os.PathLike[str],
    wait_s: float = 0.0,
    found: str | None = None,
) -> int:
    """Bring an engine to the newest version in `path`, or to the one that `find_deltas` has
    `found`; returns its step. With `wait_s`, wait at most so many seconds for one that it does not
    have. See `Receiver`.
    """
    if not engine.staged:
        raise ConfigError(
            "deltas change weights that the receiver has staged: make it with staged=True, or "
            "receive whole weights"
        )
    folder, failure = open_folder(path), None
    if wait_s:
        for pause_s in look_for_newer(None if engine.mixed else engine.version, path, wait_s):
            time.sleep(pause_s)
    for _ in range(_ATTEMPTS):
        chain = decode_chain(found.encode(), CHAIN) if found else _read_chain(folder, path)
        try:
            return _follow(engine, assembler_of, folder, chain)
        except OSError as error:
            failure = error
            if read_chain(folder) == chain:
                break
            if found:
                raise assembler_of().refusal(
                    f"version {chain.newest.number} is gone, others have taken its place: call "
                    "again, to receive the newest"
                ) from error
    raise assembler_of().refusal(
        f"a file of the newest version is gone or cannot be read: {failure}. Bring it back, or "
        f"remove {CHAIN} to have the next refit write whole weights"
    )


def find_deltas(path: str | os.PathLike[str]) -> str:
    """The newest version in `path`, for engines that are all to take this one."""
    return _read_chain(open_folder(path), path).encode().decode()


def _read_chain(folder: Directory | ObjectFolder, path: object) -> Chain:
    if (chain := read_chain(folder)) is None:
        raise RefitError(_describe_missing_chain(folder, path))
    return chain


def look_for_newer(
    held: StagedVersion, path: str | os.PathLike[str], timeout_s: float
) -> Iterator[float]:
    """Look for a version other than the one that an engine holds, or for a checkpoint, until there
    is one: how long to pause before each next look. RefitError after `timeout_s` seconds without.
    """
    folder, pause_s = open_folder(path), _SHORTEST_PAUSE_S
    end = time.monotonic() + timeout_s
    while True:
        chain = read_chain(folder)
        if chain is None:
            over = _has_checkpoint(folder)
        else:
            over = held != (chain.name, chain.newest.number)
        if over or ((left_s := end - time.monotonic()) <= 0 and chain is None):
            return
        if chain is not None and left_s <= 0:
            raise RefitError(
                f"{path} has had nothing newer than step {chain.newest.step} for {timeout_s:g} s. "
                "See whether the trainer still refits, and call again, or wait longer: "
                f"timeout_s of the Receiver, or of prepare. {KEEPS}"
            )
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _follow(
    engine: EngineState,
    assembler_of: Callable[..., WeightAssembler],
    folder: Directory | ObjectFolder,
    chain: Chain,
) -> int:
    name, number = engine.version or ("", 0)
    last, continues = chain.whole[-1].number, name == chain.name and chain.leads_from(number)
    if continues and number < last:  # else a whole version helps
        continues = _can_read(folder, chain, number)
    if continues and number == chain.newest.number and not engine.mixed:
        return chain.newest.step
    if not continues:
        number = last
        engine.model = _receive_whole(assembler_of, folder, chain.name_whole(last)).model
    assembler_of().patch(read_messages(folder, chain, number), chain.newest.step)
    engine.version = (chain.name, chain.newest.number)
    return chain.newest.step


def _receive_whole(
    assembler_of: Callable[..., WeightAssembler], folder: Directory | ObjectFolder, name: str
) -> RefitManifest:
    """Stage all weights of a version; a store's files are copied to this machine for that."""
    if isinstance(folder, Directory):
        if not (folder.root / name).is_dir():
            raise FileNotFoundError(folder.root / name)
        _check_files(folder.root / name, folder.locate(name))
        return receive_directory(assembler_of, folder.root / name, WeightAssembler.stage)
    with tempfile.TemporaryDirectory() as copy:
        folder.download(name, Path(copy))
        _check_files(Path(copy), folder.locate(name))
        return receive_directory(assembler_of, copy, WeightAssembler.stage)


def _check_files(root: Path, place: str) -> None:
    """FileNotFoundError for a file that the manifest of `root` names and that is not there."""
    stated = None
    with suppress(ConversionError):  # who reads it refuses it
        stated = read_manifest(root)
    for name in (MANIFEST, *(stated.files if stated else ())):
        if not (root / name).is_file():
            raise FileNotFoundError(f"{place}/{name}")


def _describe_missing_chain(folder: Directory | ObjectFolder, path: object) -> str:
    if _has_checkpoint(folder):
        return f"{path} is of an HfDirectory or a PeftDirectory: call receive_directory"
    return (
        f"{path} has no {CHAIN} yet: the trainer has published nothing there until now. Call again "
        "after its first refit to this DeltaDirectory"
    )


def _has_checkpoint(folder: Directory | ObjectFolder) -> bool:
    """Whether this is a published checkpoint itself."""
    with suppress(OSError):
        folder.read(MANIFEST)
        return True
    return False


def _can_read(folder: Directory | ObjectFolder, chain: Chain, number: int) -> bool:
    """Whether all that makes that version the newest one is as it was written."""
    try:
        for _ in read_messages(folder, chain, number):
            pass
    except (OSError, RefitError):
        return False
    return True


def _portions(reader: HfReader) -> Iterator[list[str]]:
    """Batches of tensor names in file order. The files are mapped: a tensor is read when its
    digest is computed.
    """
    names: list[str] = []
    nbytes = 0
    for name, shape in reader.shapes.items():
        names.append(name)
        nbytes += math.prod(shape) * reader.dtypes[name].itemsize
        if nbytes >= _PORTION:
            yield names
            names, nbytes = [], 0
    yield names


def _read_manifest(root: Path) -> RefitManifest:
    """The manifest of what the directory should hold."""
    if not root.is_dir():
        raise RefitError(f"{root} is not a directory: the trainer has published nothing there")
    stated = read_manifest(root)
    if stated is None and (root / CHAIN).exists():
        raise RefitError(f"{root} is of a DeltaDirectory: call receive_deltas")
    if stated is None or stated.step is None:
        raise RefitError(
            f"{root} has no {MANIFEST} that names a step: write it with policy.export_hf or "
            "export_peft, or refit with HfDirectory or PeftDirectory"
        )
    tensors = {
        name: TensorDigest(info.shape, info.dtype, int(digest, 16))
        for name, (info, digest) in stated.tensors.items()
    }
    adapters = read_peft(root).config if is_peft(root) else None
    if adapters not in (None, stated.origin["config"]):
        raise RefitError(
            f"{root / ADAPTER_CONFIG} is not what was written with its {MANIFEST}: publish the "
            "adapters again"
        )
    model = ServedModel(stated.overrides, adapters)
    return RefitManifest(stated.step, HOST, tensors, model)
