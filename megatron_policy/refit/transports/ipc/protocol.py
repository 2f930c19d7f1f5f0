"""The protocol between trainer and engine in the stream over a socket.

The trainer sends requests (ZeroMQ REQ, bound at `ipc:///tmp/<device id>.sock`), the engine replies
(REP). To our own receiver a request is one JSON object, which has a digest of its own besides:

    {"say": "announce", "version": 4, "tensors": {name: [dtype, shape]}, "model": ..}
    {"say": "pack", "handle": .., "names": [..], "used_bytes": ..}
    {"say": "complete", "manifest": ..}     the end: `RefitManifest.encode()`
    {"say": "ask"}                          before a refit, over a connection of its own

A pack is the tensors of these names, in this order, row-major, each at a multiple of 512 bytes in
the memory that the handle opens; `used_bytes` is where the next one would start. The reply `ack`
means that a pack was consumed, or the end accepted; `refused: ` and a reason in UTF-8 ends the
refit. A pack's memory is reused after the reply to it. The reply to a question is `at: ` and the
version of the weights that the engine has staged, `[chain, number]`, or null.

A host's own receiver gets pickles, as it expects (NeMo RL 0.5 and later,
`stream_weights_via_ipc_zmq`): `(handle, names, used_bytes)`, and an end marker. We never read
pickles.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from megatron_policy.device import shared as on_gpu
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import RefitError
from megatron_policy.formats.digests import UNSEALED, is_sealed, seal
from megatron_policy.formats.manifest import xxh3
from megatron_policy.refit.manifest import (
    Form,
    RefitInfo,
    RefitManifest,
    ServedModel,
    StagedVersion,
    read_version,
)
from megatron_policy.refit.transports.ipc.shared_memory import Handle, make_rebuild, read_handle

VERSION = 4
ACK = b"ack"
_ANNOUNCE, _PACK, _COMPLETE, _ASK = "announce", "pack", "complete", "ask"
_REFUSED, _AT = b"refused: ", b"at: "
_HOST_MEMORY = "host memory"
_SAME = "Use the same version of megatron_policy on both sides"


@dataclass(frozen=True)
class PackMessage:
    """Tensors in exported memory."""

    handle: Any
    names: Sequence[str]
    used_bytes: int


class Question:
    """Which weights the engine has staged."""


@dataclass(frozen=True)
class Dialect:
    """How requests are written.

    With `end` None they are our own, with an announcement and a manifest that our receiver checks.
    A host's own receiver has neither: `end` is the object that it takes as the end, and it does its
    own checking.
    """

    end: object | None = None

    def encode_opening(self, announced: Mapping[str, Form], model: ServedModel) -> bytes | None:
        """The first request, if there is one."""
        if self.end is not None:
            return None
        tensors = {n: [name_dtype(dtype), list(shape)] for n, (shape, dtype) in announced.items()}
        return _encode(_ANNOUNCE, version=VERSION, tensors=tensors, model=model.plain())

    def encode_pack(self, pack: PackMessage) -> bytes:
        """The request for a pack."""
        handle, names = pack.handle, list(pack.names)
        if self.end is None:
            plain = _plain_handle(handle)
            return _encode(_PACK, handle=plain, names=names, used_bytes=pack.used_bytes)
        own = (_HOST_MEMORY, *astuple(handle)) if isinstance(handle, Handle) else handle
        return pickle.dumps((own, names, pack.used_bytes))

    def encode_closing(self, manifest: RefitManifest) -> bytes:
        """The last request."""
        if self.end is None:
            return _encode(_COMPLETE, manifest=manifest.encode().decode())
        return pickle.dumps(self.end)


def encode_question() -> bytes:
    """The request that asks for the engine's version."""
    return _encode(_ASK)


def encode_version(version: StagedVersion) -> bytes:
    """The reply to a question."""
    return _AT + json.dumps(version).encode()


def parse_version(answer: bytes) -> StagedVersion:
    """The inverse of `encode_version`; RefitError for anything else."""
    if not answer.startswith(_AT):
        check_answer(answer)
    try:
        return read_version(json.loads(answer.removeprefix(_AT)))
    except (ValueError, RecursionError) as error:
        raise RefitError(f"the engine's answer cannot be read: {answer[:80]!a}. {_SAME}") from error


def parse_request(content: bytes) -> PackMessage | RefitInfo | RefitManifest | Question:
    """Decode a request of our dialect. RefitError for anything else."""
    try:
        fields = json.loads(content)
        if (version := fields.get("version", VERSION)) != VERSION:
            raise ValueError(f"it is of version {version!r}, but this side reads {VERSION}")
        if not is_sealed(content, xxh3(fields.get("digest"))):
            raise ValueError("its content contradicts its digest")
        match fields:
            case {"say": "announce", "version": _, "tensors": dict(tensors), **rest}:
                model = ServedModel.from_plain(rest.get("model"))
                forms = {
                    name: (tuple(map(_parse_count, shape)), dtype_named(dtype))
                    for name, (dtype, shape) in tensors.items()
                }
                return RefitInfo(forms, model)
            case {"say": "ask"}:
                return Question()
            case {"say": "complete", "manifest": str(manifest)}:
                return RefitManifest.decode(manifest.encode())
            case {"say": "pack", "handle": handle, "names": list(names), "used_bytes": size}:
                if not all(isinstance(name, str) for name in names):
                    raise ValueError("a tensor's name is a string")
                return PackMessage(_parse_handle(handle), names, _parse_count(size))
    except RefitError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise RefitError(
            f"the trainer sent a request that cannot be read: {content[:80]!a}: {error}. {_SAME}"
        ) from error
    raise RefitError(f"the trainer sent an unknown request: {content[:80]!a}. {_SAME}")


def encode_refusal(error: Exception) -> bytes:
    """The reply that ends a refit."""
    return _REFUSED + str(error).encode(errors="replace")


def check_answer(answer: bytes) -> None:
    """RefitError, with the engine's reason, unless the reply is the acknowledgement."""
    if answer != ACK:
        reason = answer.removeprefix(_REFUSED).decode(errors="replace")
        raise RefitError(f"the engine refused the weights: {reason}")


def encode_handles(handles: Mapping[str, Any]) -> str:
    """What `IpcHandles.weights` returned, as JSON, for engines whose messages hold plain values."""
    plain = {}
    for device, (_, rebuilds, offsets) in handles.items():
        memory = [[name_dtype(dtype), _plain_handle(read_handle(of))] for dtype, of in rebuilds]
        plain[device] = {"memory": memory, "offsets": offsets}
    return json.dumps(plain, ensure_ascii=False)


def decode_handles(content: str) -> dict[str, Any]:
    """The inverse of `encode_handles`. RefitError for anything else."""
    try:
        found = {}
        for device, fields in json.loads(content).items():
            memory = [(dtype_named(dtype), _parse_handle(of)) for dtype, of in fields["memory"]]
            offsets = {name: _parse_count(offset) for name, offset in fields["offsets"].items()}
            rebuilds = [(dtype, make_rebuild(handle, dtype)) for dtype, handle in memory]
            found[device] = (True, rebuilds, offsets)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise RefitError(
            f"handles of weights cannot be read: {content[:80]!a}: {error}. {_SAME}"
        ) from error
    return found


def _encode(say: str, **content: Any) -> bytes:
    fields = {"say": say, "digest": UNSEALED, **content}
    return seal(json.dumps(fields, ensure_ascii=False).encode())


def _plain_handle(handle: Any) -> dict[str, Any]:
    if isinstance(handle, Handle):
        return {"host": asdict(handle)}
    return {"device": on_gpu.encode(handle[0])}


def _parse_handle(fields: Any) -> object:
    match fields:
        case {"host": dict(own)}:
            return Handle(**{name: _parse_count(value) for name, value in own.items()})
        case {"device": dict(own)}:
            return (on_gpu.decode(own),)
    raise ValueError("it has no handle of memory")


def _parse_count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size or number")
    return value
