"""Assembles the weights of a refit on the engine's side, for every transport: collects what
arrives, checks that the set is complete, and only then hands it to the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.refit.deltas.message import decode_message
from megatron_policy.refit.deltas.patching import OtherWeightsError, Patches
from megatron_policy.refit.digest import Digests, algorithm_for
from megatron_policy.refit.manifest import (
    Form,
    RefitInfo,
    RefitManifest,
    ServedModel,
    StagedVersion,
    WeightVersion,
    compare_forms,
    describe_problems,
    with_digests,
)
from megatron_policy.refit.streams import read_streams

if TYPE_CHECKING:
    from megatron_policy.refit.transports.collective.shards import ShardLayout, ShardRun

_log = logging.getLogger(__name__)

Load = Callable[[list[tuple[str, Tensor]]], object]
"""Copies weights, by Hugging Face name, into an engine, which must not keep the tensors."""

Begin = Callable[[], object]
"""Prepares an engine for the first weights of a set."""

Finish = Callable[[], object]
"""Ends a set of weights that has arrived whole and was loaded."""

MIXED = "The engine's weights are mixed until the next complete refit"
KEEPS = "The engine keeps the weights it had"


@dataclass
class EngineState:
    """What an engine keeps between refits.

    `step` is the step of the last set it accepted. `mixed` is true from when it begins to load
    until it has accepted a set. With `staged`, a set is kept in `kept` until it is complete.
    `model` is what the trainer has said of the model of the set that is loaded. `ready` is called
    with the step of a staged set before it is loaded.
    """

    load: Load
    begin: Begin
    finish: Finish
    expected: RefitInfo | None = None
    staged: bool = True
    step: int | None = None
    mixed: bool = False
    model: ServedModel | None = None
    ready: Callable[[int], object] = lambda step: None
    kept: dict[str, Tensor] = field(default_factory=dict)
    version: StagedVersion = None
    """The chain of deltas that the staged set is of, and its version; None if it is of none."""
    warned: bool = False
    """Whether it was said that the trainer cannot send what has changed alone."""

    def warn_unless_staged(self) -> None:
        """Warn once that a trainer that would send what has changed sends all weights."""
        if not self.staged and not self.warned:
            self.warned = True
            _log.warning(
                "a DeltaStream sends this engine all weights in every refit, since it stages none "
                "that could be changed: make the Receiver, or prepare vLLM, with staged=True"
            )


class WeightAssembler:
    """Assembles one refit. Any method may raise RefitError, which refuses the set and ends this."""

    def __init__(self, engine: EngineState, algorithm: str | None = None) -> None:
        """`algorithm` is the manifest's digest algorithm; None: the one for the tensors' device."""
        self.arrived: dict[str, Form] = {}
        """Shape and dtype of each tensor that was taken."""
        self._engine = engine
        self._digests = None if algorithm is None else Digests(algorithm)
        self._forms: Mapping[str, Form] | None = engine.expected
        self._model = None if engine.expected is None else engine.expected.model
        self._begun = False
        self._version: WeightVersion | None = None
        self._streams: dict[str, Tensor] = {}  # of what has changed, in place of weights
        self.patches = Patches({})  # what was changed of the staged set

    @property
    def receives_in_place(self) -> bool:
        """Whether a transport may put its own memory in `kept`, and fill it before it calls `take`.
        Weights that are to be changed later are kept in host memory.
        """
        return self._engine.staged and not (self._version and device.is_accelerated())

    @property
    def kept(self) -> dict[str, Tensor]:
        """The staged tensors of the last refit or this one."""
        return self._streams if self.of_changes else self._engine.kept

    @property
    def version(self) -> StagedVersion:
        """The chain and the version of the weights that the engine has staged, if there is one."""
        return self._engine.version if self._engine.staged else None

    @property
    def of_changes(self) -> bool:
        """Whether this refit is of what has changed."""
        return self._version is not None and self._version.since is not None

    def announce(self, announced: Mapping[str, Form]) -> None:
        """Take the names, shapes and dtypes that the trainer announces; of a `RefitInfo` also what
        it says of their model.
        """
        expected, model = self._engine.expected, getattr(announced, "model", None)
        self._version = None if model is None else model.version
        if self.of_changes:
            self._check_version()
        else:
            self._engine.version = None  # a transport may now fill what is kept
            if self._version is not None:
                self._engine.warn_unless_staged()
            if expected is not None:
                self._compare(expected, announced)
        self._forms = dict(announced)
        self._agree(model)

    def form(self, name: str) -> Form:
        """The shape and dtype that the tensor must have."""
        if self._forms is None:
            raise self.refusal(
                "shapes and dtypes are not known: give the receiver `expected`, what the trainer's "
                "prepare_refit_info returned"
            )
        if name not in self._forms:
            raise self.refusal(f"the trainer sends {name}, which this model lacks")
        return self._forms[name]

    def take(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take some contiguous tensors of the set; the caller may reuse their memory afterwards."""
        taken = [(name, self._keep(name, tensor)) for name, tensor in tensors]
        if not self._engine.staged:
            self._load(taken)

    def finish(self, manifest: RefitManifest) -> RefitManifest:
        """Check that the whole set arrived as it was sent, and let the engine load it."""
        self.stage(manifest)
        if self.of_changes:
            self.patch(self.read_changes(), manifest.step)
        else:
            self.check_step(manifest.step)
            if self._engine.staged:
                self._engine.ready(manifest.step)
                self._load(list(self._engine.kept.items()))
            self._accept(manifest.step, manifest.model)
            self.end_version()
        return manifest

    def stage(self, manifest: RefitManifest) -> RefitManifest:
        """Check that the whole set arrived as it was sent. `reload` follows."""
        engine = self._engine
        if manifest.model.version != self._version:
            raise self.refusal(
                f"the trainer has announced {self._version} and sent {manifest.model.version}"
            )
        if engine.expected is not None and not self.of_changes:
            sent = manifest.tensors.items()
            self._compare(engine.expected, {n: (tuple(s.shape), s.dtype) for n, s in sent})
        self._agree(manifest.model)
        if not manifest.tensors:
            raise self.refusal("the trainer has sent nothing")
        digests = self._digests
        if self.arrived and digests is not None and manifest.algorithm != digests.algorithm:
            raise self.refusal(
                f"the trainer's digests are {manifest.algorithm}, the engine's "
                f"{digests.algorithm}: "
                "both must keep weights on the same kind of device, and be of one release"
            )
        try:
            found = {} if digests is None else digests.read()
            manifest.check(with_digests(self.arrived, found))
        except RefitError as error:
            raise self.refusal(str(error)) from error
        if engine.staged and not self.of_changes:
            engine.kept = {name: engine.kept[name] for name in manifest.tensors}
        return manifest

    def patch(self, messages: Iterable[bytes], step: int) -> None:
        """Change the staged set to that of a later step, and let the engine load it; after a
        failure what is staged is what it was.
        """
        self.apply(messages, step)
        self.load_applied(step)

    def apply(self, messages: Iterable[bytes], step: int) -> None:
        """Change the staged set to that of a later step, for `load_applied`, unless `patches` are
        undone; after a failure it is what it was.
        """
        self.check_step(step)
        engine, self.patches = self._engine, Patches(self._engine.kept)
        try:
            for message in messages:
                self.patches.apply(decode_message(message))
            self.patches.check()
        except BaseException as error:
            self.patches.undo()
            if isinstance(error, OtherWeightsError):
                engine.version = None
                raise self.refusal(f"{error}. All weights are taken next time") from error
            if isinstance(error, RefitError):
                raise self.refusal(str(error)) from error
            raise

    def load_applied(self, step: int) -> None:
        """Let the engine load the staged set, which was changed; after a failure that is undone."""
        self._model = self._model or self._engine.model
        try:
            self._engine.ready(step)
            self._load(list(self._engine.kept.items()))
            self._accept(step, self._model)
        except BaseException:
            self.patches.undo()
            raise
        self.end_version()

    def end_version(self) -> None:
        """The staged set is of the version that was announced, if one was."""
        if self._version is not None:
            self._engine.version = self._version.chain, self._version.number

    def read_changes(self) -> Iterable[bytes]:
        """The messages that were taken, of what has changed."""
        try:
            return read_streams(self._streams)
        except ValueError as error:
            raise self.refusal(f"what has changed cannot be read: {error}") from error

    def _check_version(self) -> None:
        """Refuse changes of other weights than those that are staged."""
        sent, own = self._version, self.version
        assert sent is not None and sent.since is not None
        if own is None or own[0] != sent.chain or not sent.since <= own[1] <= sent.number:
            raise self.refusal(
                f"the trainer sends what has changed since version {sent.since} of its weights, "
                f"which this engine lacks (it has {own}): another engine was asked before. Let one "
                "engine receive at each address, and refit again: after two such failures in turn "
                "all weights are sent"
            )

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        form = (tuple(tensor.shape), tensor.dtype)
        if name in self.arrived:
            raise self.refusal(f"the trainer sent {name} twice")
        if self._forms is not None and self.form(name) != form:
            raise self.refusal(f"{name} is {form}, but must be {self.form(name)}")
        held = tensor
        if self._engine.staged:  # in the memory of the last refit if it fits
            kept, old = self.kept, self.kept.get(name)
            where = tensor.device if self._version is None else torch.device("cpu")
            if not self.of_changes:
                self._engine.version = None
            if old is None or (old.shape, old.dtype, old.device) != (*form, where):
                kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
            held = kept[name].copy_(tensor)
        if self._digests is None:
            self._digests = Digests(algorithm_for(tensor))
        self.arrived[name] = form
        self._digests.add(name, held if held.device == tensor.device else tensor)
        return held

    def _load(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._engine.mixed, self._engine.model = True, self._model
        if not self._begun:
            self._call_engine(self._engine.begin)
            self._begun = True
        self._call_engine(lambda: self._engine.load(tensors))

    def _accept(self, step: int, model: ServedModel | None) -> None:
        engine = self._engine
        self._call_engine(engine.finish)
        engine.step, engine.mixed, engine.model = step, False, model

    def check_step(self, step: int) -> None:
        last = self._engine.step
        if last is not None and step < last:
            raise self.refusal(
                f"weights of step {step} are older than those of step {last}, which the engine "
                "has accepted. If the trainer was rolled back, set the receiver's `step` to None"
            )

    def _call_engine(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            raise self.refusal(
                f"the engine could not load the weights: {type(error).__name__}: {error}"
            ) from error

    def _agree(self, model: ServedModel | None) -> None:
        """Take what the trainer says of the model, which is what it has said before."""
        if model is not None and self._model is not None:
            differing = model.differences(self._model)
            if differing:
                raise self.refusal(
                    f"the engine is set up for another model than the trainer's: "
                    f"{describe_problems({'fields differ': differing})}"
                )
        self._model = model or self._model

    def _compare(self, expected: Mapping[str, Form], found: Mapping[str, Form]) -> None:
        if problems := compare_forms(expected, found):
            raise self.refusal(f"these are not the weights of the engine's model: {problems}")

    def refusal(self, why: str) -> RefitError:
        """The error for that reason, which also says what the engine now has."""
        return RefitError(f"{why}. {MIXED if self._engine.mixed else KEEPS}")


class ShardAssembler:
    """One refit of one engine rank's own elements."""

    def __init__(
        self, layout: ShardLayout, assembler: WeightAssembler, where: torch.device, engine: int
    ) -> None:
        """`engine` is the number of this rank. Tensors are made on the device, or are those that
        the assembler keeps.
        """
        self._assembler, self._engine = assembler, engine
        kept = assembler.kept if assembler.receives_in_place else {}
        for name, (shape, dtype) in layout.forms.items():
            old = kept.get(name)
            if old is None or (tuple(old.shape), old.dtype, old.device) != (shape, dtype, where):
                kept[name] = torch.empty(shape, dtype=dtype, device=where)
        self._tensors = {name: kept[name] for name in layout.forms}
        self._missing = {name: tensor.numel() for name, tensor in self._tensors.items()}
        self._arrived: dict[str, Form] = {}
        self._digests: Digests | None = None

    def put(self, run: ShardRun, flat: Tensor) -> None:
        """Copy the elements of a run, `[N]`, to where they belong."""
        name, at = f"{self._engine}/{run.tensor.name}", 0
        if self._digests is None:
            self._digests = Digests(algorithm_for(flat))
        self._digests.add(name, flat)
        self._arrived[name] = tuple(flat.shape), flat.dtype
        whole = self._tensors[run.of].view(-1)
        for size, stride, offset in run.regions:
            to = whole.as_strided(size, stride, whole.storage_offset() + offset)
            to.copy_(flat[at : at + to.numel()].view(size))
            at += to.numel()
        self._missing[run.of] -= at

    def check(self, sent: RefitManifest) -> None:
        """RefitError unless all of it arrived as it was sent."""
        prefix = f"{self._engine}/"
        own = {name: of for name, of in sent.tensors.items() if name.startswith(prefix)}
        found = {} if self._digests is None else self._digests.read()
        try:
            stated = RefitManifest(sent.step, sent.algorithm, own, sent.model)
            stated.check(with_digests(self._arrived, found))
            if wrong := [name for name, count in self._missing.items() if count]:
                raise RefitError(describe_problems({"not sent whole": wrong}))
        except RefitError as error:
            raise self._assembler.refusal(str(error)) from error
        # Other ranks load as soon as this one has checked.
        self._assembler.check_step(sent.step)
        if self._assembler.of_changes:
            self._assembler.take(list(self._tensors.items()))
            self._assembler.apply(self._assembler.read_changes(), sent.step)

    def undo(self) -> None:
        """Some rank has not got what it should, so that none loads, after `check`."""
        self._assembler.patches.undo()

    def finish(self, sent: RefitManifest) -> RefitManifest:
        """Let the engine load it, after `check`."""
        if self._assembler.of_changes:
            self._assembler.load_applied(sent.step)
            return sent
        self._assembler.take(list(self._tensors.items()))
        digests = Digests(sent.algorithm)
        for name, tensor in self._tensors.items():
            digests.add(name, tensor)
        forms = {name: (tuple(t.shape), t.dtype) for name, t in self._tensors.items()}
        whole = with_digests(forms, digests.read())
        return self._assembler.finish(RefitManifest(sent.step, sent.algorithm, whole, sent.model))
