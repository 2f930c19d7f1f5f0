"""Opens a checkpoint of either format: its tensors under HF names, its config, its digests.

Reads headers and indices, but no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_policy.adapters.opening import read_saved_adapters
from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    BASE,
    PeftAdapters,
    read_peft,
)
from megatron_policy.adapters.table import AdapterSpec
from megatron_policy.convert.blockwise import BlockBuffer, cut
from megatron_policy.convert.training_checkpoint import is_saved, saved_state
from megatron_policy.converters.files.contained import expanded, inside
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats import dist_files, dist_metadata, hf_files, hf_names
from megatron_policy.converters.formats.dequantising import QuantisedTensor
from megatron_policy.converters.formats.dist_keys import readable
from megatron_policy.converters.formats.hf_location import SIDE_FILES, instead_of, locate
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.formats.quantised import Inventory, as_read
from megatron_policy.converters.formats.side_files import side_paths
from megatron_policy.converters.formats.stored import Stored
from megatron_policy.converters.mismatch import list_problems
from megatron_policy.converters.table import Entry, Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats import digests
from megatron_policy.formats.manifest import DirectoryManifest, read_manifest
from megatron_policy.formats.tensors import (
    FileTensors,
    Info,
    ParameterTensors,
    Tensors,
    shares_of,
)

HF, MCORE, PEFT = "hf", "mcore", "peft"
"""Formats; the last is of adapters alone."""

SIDE = "hf"
"""Directory inside a Megatron-Core checkpoint for the files that only Hugging Face has: config,
tokenizer.
"""

Extents = Mapping[Path, Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint to read from; `table` is None if its model is not needed."""

    root: Path
    kind: str
    infos: Mapping[str, Info]
    """Of each tensor, in the best order for reading."""
    tensors: Tensors
    table: Table | None
    side_files: Mapping[str, Path]
    """Config, tokenizer and generation settings, by their relative names in HF format."""
    manifest: DirectoryManifest | None
    extents: Extents
    """For each file with tensors, the bytes of these: (first, end) each."""
    keys: Mapping[str, str]
    """For a Megatron-Core checkpoint, where each parameter is: canonical name -> key."""
    problems: Mapping[str, str]
    """Files whose bytes contradict the manifest, by relative path, with a message for each."""
    quantised: Mapping[str, QuantisedTensor] = field(default_factory=dict)
    """The tensors that are stored quantised, and read as bfloat16."""
    step: int | None = None
    """Optimizer steps taken so far, if a policy wrote it."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that were given other values in training."""
    adapters: PeftAdapters | None = None
    """What it says of adapters, if it has these alone."""
    spec: AdapterSpec | None = None
    """What they are, if their base is known."""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Further side files, by their names in HF format."""
    targets: tuple[str, ...] = ()
    """Names of `target_modules` with which a policy has these adapters, if they were bound."""
    merged: Path | None = None
    """The checkpoint of adapters that are added to its weights."""

    def check(self) -> None:
        """Raise ConversionError if a file is damaged."""
        if self.problems:
            raise ConversionError("\n".join(self.problems.values()))


def open_checkpoint(
    path: str | Path, files: RawFiles, config: str | Path | None = None
) -> OpenCheckpoint:
    """Open the checkpoint at `path`, or of that name on the HF hub.

    ConfigError when there is none, ConversionError when it is too damaged to read. `config` is the
    config.json of a Megatron-Core checkpoint that does not have its own, its directory, or the
    model's name on the hub.
    """
    if (found := dist_files.find(path)) is not None:
        given = None if config is None else config_place(config)
        return _opened(found, files, lambda manifest: _open_mcore(found, files, manifest, given))
    if hf_files.is_peft(folder := expanded(path)):
        return _opened(folder, files, lambda manifest: _open_peft(folder, files, manifest))
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; a checkpoint is a directory{instead_of(folder)}")
    if folder.is_dir() and not any((folder / name).is_file() for name in _HF_MARKS):
        raise ConfigError(
            f"{folder} is not a checkpoint: it has neither {', '.join(_HF_MARKS)} (Hugging Face) "
            f"nor {dist_files.FORMAT} (Megatron-Core)"
        )
    root = hf_files.locate(path)
    return _opened(root, files, lambda manifest: _open_hf(root, files, manifest))


def _opened(
    root: Path, files: RawFiles, read: Callable[[DirectoryManifest | None], OpenCheckpoint]
) -> OpenCheckpoint:
    manifest = read_manifest(root)
    problems = _damaged(root, manifest, files, None)
    if unfit := [words for name, words in problems.items() if Path(name).name in _READ]:
        raise ConversionError("\n".join(unfit))
    checkpoint = read(manifest)
    if manifest is not None:
        checkpoint = replace(checkpoint, step=manifest.step, overrides=manifest.overrides)
    return replace(
        checkpoint, problems=problems | _damaged(root, manifest, files, checkpoint.extents)
    )


_READ = ("config.json", hf_names.INDEX, dist_metadata.METADATA, dist_files.FORMAT)
"""Files without which a checkpoint cannot be read: if damaged, they are not parsed."""
_WITH_TENSORS = (".safetensors", ".distcp")
_HF_MARKS = ("config.json", hf_names.SINGLE, hf_names.INDEX)


def _open_hf(root: Path, files: RawFiles, manifest: DirectoryManifest | None) -> OpenCheckpoint:
    inventory = hf_files.inventory(root)
    table: Table | None = None
    quantised = hf_files.quantised_in(root, inventory)
    infos = {name: Info(*read) for name, read in as_read(inventory, quantised).items()}
    stored, extents = _placed(inventory)
    with suppress(ConversionError, ConfigError):  # this family or config cannot be converted
        table = open_model(root, tensors={n: info.shape for n, info in infos.items()}).table
    return OpenCheckpoint(
        root,
        HF,
        infos,
        FileTensors(stored, files, quantised),
        table,
        side_paths(root),
        manifest,
        extents,
        {},
        {},
        quantised,
    )


def _open_peft(root: Path, files: RawFiles, manifest: DirectoryManifest | None) -> OpenCheckpoint:
    adapters = read_peft(root)
    inventory = hf_files.inventory(root, ADAPTER_MODEL)
    infos = {name: Info(*read) for name, read in as_read(inventory, {}).items()}
    stored, extents = _placed(inventory)
    tensors = FileTensors(stored, files)
    return OpenCheckpoint(
        root, PEFT, infos, tensors, None, {}, manifest, extents, {}, {}, adapters=adapters
    )


def _placed(inventory: Inventory) -> tuple[dict[str, Stored], dict[Path, list[tuple[int, int]]]]:
    """The tensors of safetensors files, and the bytes of them in each file."""
    stored: dict[str, Stored] = {}
    extents: dict[Path, list[tuple[int, int]]] = {}
    for file, held in inventory.items():
        for name, at in held.items():
            stored[name] = Stored.in_one_piece(at.shape, at.dtype, file, at.start)
            extents.setdefault(file, []).append((at.start, at.end))
    return stored, extents


def _open_mcore(
    root: Path, files: RawFiles, manifest: DirectoryManifest | None, config: Path | None
) -> OpenCheckpoint:
    side_files = _side_files(root, config)
    reader = dist_files.DistReader(root, files)
    saved = saved_state(root) if is_saved(root) else None
    stated = {} if manifest is None else manifest.tensors
    named: Collection[str] = {name: info.shape for name, (info, _) in stated.items()}
    if saved is not None:
        named = [*saved.dtypes]
    layers = reader.mtp_layers
    table = open_model(_config_of(root, config), mtp_layers=layers, named=named).table
    adapters, spec = None, None
    if saved is not None and saved.of_adapters:
        adapters, spec, table = read_saved_adapters(root, SIDE, reader, table)
        side_files = {name: inside(root, f"{SIDE}/{name}") for name in (ADAPTER_CONFIG, BASE)}
    entries = table.exported()
    stored, keys = _parameters(reader, table, entries)
    sent = table.sent(table.ignored)
    shares = shares_of(sent, table.architecture, {n: (s,) for n, s in stored.items()})
    infos = {
        name: Info(stored[entry.megatron].dtype, shape)
        for entry in entries
        for name, shape in zip(entry.hf, entry.row.hf_shapes(table.architecture), strict=True)
    }
    if manifest is not None:
        infos = _as_stated(infos, manifest, root)
    elif saved is not None:
        if unknown := sorted(infos.keys() - saved.dtypes.keys()):
            raise ConversionError(
                f"{root} does not say in which dtype {unknown[0]} was, nor {len(unknown) - 1} "
                "others: its source_dtypes are not those of its model; restore it from a copy, or "
                "convert another checkpoint"
            )
        infos = {name: replace(info, dtype=saved.dtypes[name]) for name, info in infos.items()}
    for entry in sent[len(entries) :]:
        infos[entry.hf[0]] = infos[table.ignored[entry.hf[0]].equals]
    extents: dict[Path, list[tuple[int, int]]] = {}
    for held in stored.values():
        for file, begin, end in held.extents():
            extents.setdefault(file, []).append((begin, end))
    tensors = ParameterTensors(shares, files)
    found = OpenCheckpoint(
        root, MCORE, infos, tensors, table, side_files, manifest, extents, keys, {}
    )
    if saved is not None:
        found = replace(found, step=saved.step, overrides=saved.overrides)
    return replace(found, adapters=adapters, spec=spec)


def _parameters(
    reader: dist_files.DistReader, table: Table, entries: Sequence[Entry]
) -> tuple[dict[str, Stored], dict[str, str]]:
    """The entries' parameters and their keys, by canonical name."""
    arch = table.architecture
    stored: dict[str, Stored] = {}
    keys: dict[str, str] = {}
    missing = []
    for entry in entries:
        found = reader.parameter(entry, arch)
        if found is None:
            place = next(iter(readable(entry, arch)))
            missing.append(f"missing: {place.key}, which holds {' + '.join(entry.hf)}")
        else:
            keys[entry.megatron], stored[entry.megatron] = found
    extra = reader.unused(entries, arch)
    if missing or extra:
        lines = [f"unexpected: {key}, no row of {table.family} uses it" for key in extra]
        raise ConversionError(
            f"{reader.root} is not the {table.family} model of its config.json:\n"
            + list_problems(missing + lines)
        )
    return stored, keys


def digest_of(checkpoint: OpenCheckpoint, name: str, buffer: BlockBuffer, max_memory: int) -> str:
    """The digest of a tensor's elements in HF order."""
    info, digest = checkpoint.infos[name], digests.Digest()
    plan = cut(info, (info.dtype,), checkpoint.tensors.scratch(name, info.dtype), max_memory)
    for first, (values,), spare in buffer.blocks(plan):
        checkpoint.tensors.read(name, first, values, spare)
        digest.update(values)
    return digest.text()


def damaged_tensor(root: Path, name: str) -> ConversionError:
    """The error for a tensor whose bytes are not those that were written."""
    return ConversionError(
        f"{root}: {name} is damaged: its bytes contradict the digest in {hf_names.MANIFEST} "
        "(remove that file if you changed the checkpoint on purpose)"
    )


def _as_stated(
    infos: Mapping[str, Info], manifest: DirectoryManifest, root: Path
) -> dict[str, Info]:
    """The tensors in the dtypes they had in HF format: tensors that share a key share its dtype
    there.
    """
    stated = {name: info for name, (info, _) in manifest.tensors.items()}
    for name in {*infos, *stated}:
        if name not in stated or name not in infos or stated[name].shape != infos[name].shape:
            raise ConversionError(
                f"{root}: {name} of its {hf_names.MANIFEST} is not the {name} of its config.json"
            )
    return {name: replace(info, dtype=stated[name].dtype) for name, info in infos.items()}


def _damaged(
    root: Path, manifest: DirectoryManifest | None, files: RawFiles, extents: Extents | None
) -> dict[str, str]:
    """The files whose bytes, other than those of tensors, contradict the manifest.

    With `extents`, of the files that hold tensors; without, of the others.
    """
    problems = {}
    for name, stated in (manifest.files if manifest else {}).items():
        path = root / name
        if (path.suffix in _WITH_TENSORS) != (extents is not None):
            continue
        own = extents.get(path, ()) if extents else ()
        if not path.is_file():
            problems[name] = f"{root} lacks {name}, which its {hf_names.MANIFEST} names"
        elif digests.digest_file(files, path, digests.find_size(path), own) != stated:
            problems[name] = (
                f"{path} is damaged: its bytes contradict the digest in {hf_names.MANIFEST} "
                "(remove that file if you changed the checkpoint on purpose)"
            )
    return problems


def config_place(config: str | Path, files: Sequence[str] = SIDE_FILES) -> Path:
    """The config.json that was given with --config, or the directory it is in; of a model on the
    hub, these `files` are fetched if needed.
    """
    given = expanded(config)
    return given if given.exists() else locate(config, list(files))


def _side_files(root: Path, config: Path | None) -> dict[str, Path]:
    given = config or inside(root, SIDE)
    if given.is_dir():
        return side_paths(given)
    return {"config.json": given} if config else {}


def _config_of(root: Path, config: Path | None) -> Path:
    """Where the config.json is that a Megatron-Core checkpoint is read by."""
    if config is not None:
        return config
    if (root / SIDE / "config.json").is_file():
        return inside(root, SIDE)
    raise ConfigError(
        f"{root} has no {SIDE}/config.json: Megatron-Core wrote it, and it does not say which "
        "model this is; give the model (its name, HF directory or config.json) with --config"
    )
