"""The engine's side of a refit from a directory that a trainer has published."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
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
from megatron_policy.refit.digest import HOST
from megatron_policy.refit.manifest import RefitInfo, RefitManifest, ServedModel, TensorDigest
from megatron_policy.refit.receive.assembler import WeightAssembler

_PORTION = 256 * 2**20  # bytes given to the engine at a time


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
