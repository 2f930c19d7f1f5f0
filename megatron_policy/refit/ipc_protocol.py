"""What trainer and engine say to each other in the stream over a socket; knows neither of them.

The trainer asks (ZeroMQ REQ, bound at `ipc:///tmp/<device id>.sock`), the engine answers (REP). A
question is one pickled object (protocol of NeMo RL 0.5 and later, `stream_weights_via_ipc_zmq`):

    (handle, names, used_bytes)    a pack: the tensors of these names, in this order, row-major,
                                   each from a multiple of 512 bytes on, in the memory that the
                                   handle opens; `used_bytes` is where the next would start
    an end                         what says that all packs were sent

The answer `ack` means that a pack was consumed, or the end accepted. A pack's memory is used again
after the answer to it. With our own receiver the stream has a beginning and its own end:

    ("announce", {name: (shape, dtype)})    all that will come, before the first pack
    ("complete", manifest)                  the end: `Manifest.encoded()`

and the answer may be `refused: ` and a reason in UTF-8, which ends it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from megatron_policy import device
from megatron_policy.device.shared import GLOBALS
from megatron_policy.errors import RefitError
from megatron_policy.refit.intake import Form
from megatron_policy.refit.manifest import Manifest
from megatron_policy.refit.shared_memory import Handle

ACK = b"ack"
ANNOUNCE, COMPLETE = "announce", "complete"
_REFUSED = b"refused: "


@dataclass(frozen=True)
class Pack:
    """Tensors in lent memory."""

    handle: object
    names: Sequence[str]
    used_bytes: int


@dataclass(frozen=True)
class Dialect:
    """How the engine is told that all was sent.

    `end` None is our own way, with an announcement and a manifest that our receiver checks. A
    host's own receiver knows neither: `end` is the object it takes for the end, and the checking
    is its own.
    """

    end: object | None = None

    def opening(self, announced: dict[str, Form]) -> bytes | None:
        """The first question, if there is one."""
        return pickle.dumps((ANNOUNCE, announced)) if self.end is None else None

    def closing(self, manifest: Manifest) -> bytes:
        """The last question."""
        return pickle.dumps((COMPLETE, manifest.encoded()) if self.end is None else self.end)


def question(pack: Pack) -> bytes:
    """A pack as it is sent."""
    handle = pack.handle
    plain = (_HOST_MEMORY, *astuple(handle)) if isinstance(handle, Handle) else handle
    return pickle.dumps((plain, list(pack.names), pack.used_bytes))


def understood(content: bytes) -> Pack | dict[str, Form] | Manifest:
    """A question of our dialect. RefitError for anything else. Where there is no GPU, what a pickle
    may name are dtypes only, so that it can call nothing.
    """
    try:
        said = _Unpickler(io.BytesIO(content)).load()
        match said:
            case (kind, dict(announced)) if kind == ANNOUNCE:
                return announced
            case (kind, bytes(encoded)) if kind == COMPLETE:
                return Manifest.decoded(encoded)
            case (handle, list(names), int(used_bytes)):
                return Pack(_opened_handle(handle), names, used_bytes)
    except RefitError:
        raise
    except Exception as error:
        raise RefitError(f"the trainer sent what cannot be read: {error}. {_SAME}") from error
    raise RefitError(f"the trainer sent a {type(said).__name__} that means nothing here. {_SAME}")


def refusal(error: Exception) -> bytes:
    """The answer that ends a refit."""
    return _REFUSED + str(error).encode()


def check_answer(answer: bytes) -> None:
    """RefitError, with the engine's reason, unless it is the acknowledgement."""
    if answer != ACK:
        reason = answer.removeprefix(_REFUSED).decode(errors="replace")
        raise RefitError(f"the engine refused the weights: {reason}")


def _opened_handle(said: Any) -> object:
    match said:
        case (kind, int(), int(), int(), int(), int()) if kind == _HOST_MEMORY:
            return Handle(*said[1:])
    return said


_HOST_MEMORY = "host memory"
_SAME = "Use the same version of megatron_policy on both sides"


class _Unpickler(pickle.Unpickler):
    """Loads plain values, dtypes, and what handles of a GPU name: anything else could be run."""

    def find_class(self, module: str, name: str) -> Any:
        if device.is_accelerated() and (module, name) in GLOBALS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
