"""Methods for vLLM's workers, with which they receive weights.

    vllm serve MODEL --worker-extension-cls megatron_policy.inference.vllm.worker.RefitExtension

or `LLM(MODEL, worker_extension_cls=...)`. vLLM makes its worker class inherit from the named one,
and `collective_rpc(METHOD, args=...)` calls a method of every worker; `read_answers` reads what it
returns. Run with vLLM 0.31.0 on CPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_policy import device
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.answers import Accepted, Answer, return_errors
from megatron_policy.inference.vllm.receipt import (
    Receipts,
    find_own,
    run_in_turn,
    wait_for_turn,
)
from megatron_policy.inference.vllm.reload import ModelReload
from megatron_policy.refit.manifest import RefitManifest, StagedVersion
from megatron_policy.refit.receive.assembler import MIXED
from megatron_policy.refit.receive.collective import CollectiveGroup, join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.protocol import decode_handles

PlainInfo = dict[str, tuple[list[int], str]]

ADAPTERS = 1
"""vLLM's number of the policy's adapters."""


def make_plain(info: Mapping[str, Sequence[Any]]) -> PlainInfo:
    """The trainer's `prepare_refit_info` in a form that vLLM can send to its workers: its messages
    cannot hold dtypes.
    """
    return {
        name: (list(shape), str(dtype).removeprefix("torch."))
        for name, (shape, dtype, *_) in info.items()
    }


class RefitExtension:
    """Mixed into vLLM's worker; all names begin with `refit` to avoid the worker's own.

    All methods but `refit_state` return an `Answer`: `read_answers` raises RefitError, as the
    trainer does, if a refit is refused; of those that end a refit `read_step` returns the trainer's
    step. Without a complete refit `refit_state` tells what the engine holds.
    """

    model_runner: Any  # vLLM's
    vllm_config: Any
    add_lora: Callable[[Any], bool]

    refit_model: ModelReload | None = None
    refit_receiver: Receiver | None = None
    refit_adapters: Receiver | None = None
    refit_group: CollectiveGroup | None = None
    refit_version: StagedVersion = None  # of the weights that were loaded last
    refit_staged = False
    refit_completed = False  # new ones were loaded, and their version is not in `refit_version`

    @functools.cached_property
    def _refit_receipts(self) -> Receipts:
        """The refits that were begun."""
        return Receipts()

    @return_errors
    def refit_prepare(
        self, info: PlainInfo, timeout_s: float = 120.0, staged: bool = False
    ) -> None:
        """Prepare for what will be sent, `make_plain(prepare_refit_info())`, once before the first
        refit.

        `staged` keeps all weights aside until they are checked, so that a refused refit leaves
        the engine unchanged; that takes memory for the whole model, unsharded, on every worker.
        """
        self._refit_receipts.give_up("vLLM was prepared for others")
        if self.refit_model is not None:
            self.refit_model.close()  # of a trainer that has left in the middle
        self.refit_model = model = ModelReload(
            self.model_runner.get_model(), self.vllm_config, keeps_tensors=staged
        )

        def finish() -> None:
            model.finish()
            self.refit_completed = True

        self.refit_receiver = Receiver(
            lambda weights: run_in_turn(lambda: model.load(weights)),
            begin=lambda: run_in_turn(model.begin),
            finish=lambda: run_in_turn(finish),
            ready=wait_for_turn,
            expected={
                name: (tuple(shape), dtype_named(dtype)) for name, (shape, dtype) in info.items()
            },
            timeout_s=timeout_s,
            staged=staged,
        )
        self.refit_adapters, self.refit_version, self.refit_staged = None, None, staged

    @return_errors
    def refit_begin(self, method: str, arguments: Sequence[Any]) -> bool:
        """Begin one of the methods that receive, in a thread beside what the worker computes.
        `refit_progress` tells how far it is; when all workers are ready, `refit_switch` loads what
        has arrived, or `refit_give_up` leaves it.

        False, and nothing is begun, of an engine without `staged`, which loads weights as they
        arrive; and of a group of GPUs: two groups of NCCL that are used at the same time, vLLM's
        and this one, can wait for each other forever.
        """
        receiver = self._refit_prepared()
        if not self.refit_staged or (method == "refit_from_group" and device.is_accelerated()):
            return False
        receive = functools.partial(getattr(self, method), *arguments)
        self._refit_receipts.begin((receiver, method, [*arguments]), receive, receiver.timeout_s)
        return True

    def refit_progress(self) -> Answer:
        """How far the refit that was begun is; for `read_progress`."""
        return self._refit_receipts.progress

    def refit_switch(self) -> Answer:
        """Load what has arrived of the refit that was begun, and return what the method returns
        that receives. Nothing may be generated meanwhile.
        """
        return self._refit_receipts.switch()

    @return_errors
    def refit_give_up(self, why: str) -> None:
        """Load nothing of the refit that was begun, if that has not ended. The receipt ends when
        the trainer does, or after the timeout; another one waits for that.
        """
        self._refit_receipts.give_up(why)

    @return_errors
    def refit_from_stream(self, addresses: str | Sequence[str] | Mapping[str, str]) -> Accepted:
        """One refit from a training rank on this machine.

        `addresses` are the driver's `get_refit_addresses`, by GPU; or a list with one for each of
        vLLM's workers; or the only worker's. Start it before the trainer's
        `stream_weights_via_ipc_zmq`, or at the same time.
        """
        address = _choose_address(addresses, torch.distributed.get_rank())
        return self._refit_by(lambda receiver: receiver.receive_ipc_stream(address))

    @return_errors
    def refit_from_handles(self, handles: str) -> None:
        """Some weights of a refit from this machine: `encode_handles` of what the trainer's
        `get_weights_ipc_handles` has returned. Where no GPU is shared, each of vLLM's workers takes
        the entry of its number, or the only one.

        Until `refit_finish_handles`, or `refit_drop_handles`, nothing may be generated.
        """
        received = decode_handles(handles)
        try:
            self._refit_alone().receive_ipc_handles(received, _choose_device(list(received)))
        except BaseException:
            self._refit_end()
            raise
        device.synchronize()

    @return_errors
    def refit_finish_handles(self, manifest: str) -> Accepted:
        """End a refit by `refit_from_handles`; `manifest` is the trainer's, encoded."""
        sent = RefitManifest.decode(manifest.encode())
        return self._refit_by(lambda receiver: receiver.finish_ipc(sent))

    @return_errors
    def refit_drop_handles(self) -> None:
        """Give up a refit by `refit_from_handles` that the trainer will not end."""
        self._refit_alone().release()
        self._refit_end()

    @return_errors
    def refit_join(
        self,
        rank: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        secret: str | None = None,
    ) -> None:
        """Join a group with the trainer, with the arguments of its `init_collective`; leave the one
        joined before. The engine is prepared by then: it waits as long as that says.

        `rank` is that of the first worker, the others follow. `secret` is the driver's
        `get_refit_secret()`.
        """
        own = rank + torch.distributed.get_rank()
        limit_s = self._refit_alone().timeout_s
        group = join_collective(ip, port, own, world_size, train_world_size, limit_s, secret=secret)
        if self.refit_group is not None:
            self.refit_group.close()
        self.refit_group = group

    @return_errors
    def refit_from_group(self) -> Accepted:
        """One refit over the group."""
        if (group := self.refit_group) is None:
            raise ConfigError("this worker is in no group with a trainer: call refit_join first")
        return self._refit_by(lambda receiver: receiver.receive_collective(group))

    @return_errors
    def refit_from_directory(self, path: str) -> Accepted:
        """One refit from a directory that the trainer has published."""
        return self._refit_by(lambda receiver: receiver.receive_directory(path))

    @return_errors
    def refit_held_version(self) -> tuple[StagedVersion, float]:
        """The chain and number of the deltas that the worker has, None if it must load them again,
        and for how many seconds it waits for others; for `look_for_version`.
        """
        receiver = self._refit_prepared()
        return None if receiver.mixed else receiver.version, receiver.timeout_s

    @return_errors
    def refit_find_deltas(self, path: str) -> str:
        """The newest version in a `DeltaDirectory`, for `refit_from_deltas`."""
        from megatron_policy.refit.receive.disk import find_deltas

        return find_deltas(path)

    @return_errors
    def refit_from_deltas(self, path: str, found: str | None = None) -> Accepted:
        """What a trainer has published in a `DeltaDirectory` since the last call. The engine is
        prepared with `staged`: what is staged is changed. `found` is what one of the workers has
        found, for all to take the same version, also if the trainer publishes meanwhile.
        """
        return self._refit_by(lambda receiver: receiver.receive_deltas(path, found=found))

    @return_errors
    def refit_from_adapters(self, path: str) -> Accepted:
        """One refit of adapters alone, from the directory of a `PeftDirectory`, in place of those
        before: vLLM's own, number `ADAPTERS`, of an engine with `enable_lora`.
        """
        if self.refit_adapters is None:
            self.refit_adapters = Receiver(lambda weights: None)
        return _load_adapters(self.refit_adapters, path, self.add_lora), None

    def refit_state(self) -> tuple[int | None, bool, StagedVersion]:
        """The step of the weights, whether they are mixed, and the chain and number of deltas, for
        `read_state`. After a refit without `staged` has failed, do not generate before the next
        one. Of an engine with adapters, it is their step.
        """
        receivers = [self.refit_adapters, self.refit_receiver]
        steps = [of.step for of in receivers if of is not None and of.step is not None]
        mixed = self.refit_receiver is not None and self.refit_receiver.mixed
        return (steps[0] if steps else None), mixed, self.refit_version

    @return_errors
    def refit_mark_mixed(self) -> None:
        """Say that the weights are not to be used until the next complete refit: a probe has found
        that the engine computes with others.
        """
        self._refit_prepared().mark_mixed()

    def _refit_prepared(self) -> Receiver:
        if self.refit_receiver is None:
            raise ConfigError("prepare the engine for what will be sent: call refit_prepare first")
        return self.refit_receiver

    def _refit_alone(self) -> Receiver:
        """The receiver, which one thread uses at a time."""
        self._refit_receipts.check_ended()
        return self._refit_prepared()

    def _refit_by(self, receive: Callable[[Receiver], object]) -> Accepted:
        receiver = self._refit_alone()
        try:
            receive(receiver)
        except RefitError as error:
            if not receiver.mixed or MIXED in str(error):
                raise
            raise RefitError(f"{error}. {MIXED}") from error
        finally:
            self._refit_end()
            if self.refit_completed:
                self.refit_version, self.refit_completed = receiver.version, False
        self.refit_adapters = None
        assert receiver.step is not None, "it has accepted a refit"
        return receiver.step, receiver.version

    def _refit_end(self) -> None:
        if (receipt := find_own()) is not None and not receipt.loads:
            return  # nothing of the engine was touched
        assert self.refit_model is not None, "it was prepared"
        run_in_turn(self.refit_model.close)
        device.synchronize()
        # Adapters that were merged or cached belong to the weights before.
        run_in_turn(self.model_runner.reset_lora_state)


def _load_adapters(receiver: Receiver, path: str, add_lora: Callable[[Any], bool]) -> int:
    """Check the adapters in a directory, and let vLLM load them; their step."""
    from vllm.lora.request import LoRARequest

    before = receiver.step
    manifest = receiver.receive_directory(path)
    receiver.release()  # vLLM reads them itself
    try:
        add_lora(LoRARequest("policy", ADAPTERS, path, load_inplace=True))
    except BaseException as error:
        receiver.step = before
        raise RefitError(
            f"vLLM refuses the adapters in {path}: {error}. It keeps those it had"
        ) from error
    return manifest.step


def _choose_device(devices: Sequence[str]) -> str | None:
    """The one whose handles this worker takes, of those that a trainer has sent; None for its own,
    where there are GPUs.
    """
    rank = torch.distributed.get_rank()
    if device.is_accelerated() or not devices:
        return None
    return devices[rank] if rank < len(devices) else devices[0]


def _choose_address(addresses: str | Sequence[str] | Mapping[str, str], rank: int) -> str:
    """The address for vLLM's worker `rank`."""
    if isinstance(addresses, str):
        addresses = [addresses]
    if isinstance(addresses, Mapping):
        if (own := device.device_id()) in addresses:
            return addresses[own]
        raise ConfigError(
            f"no training rank sends to the device {own} of vLLM's worker {rank}: they send to "
            f"{', '.join(addresses)}. Where no GPU is shared, give a list of addresses, one for "
            "each of vLLM's workers, and the same to the trainer: IpcStream({rank: address})"
        )
    if rank >= len(addresses):
        raise ConfigError(
            f"vLLM's worker {rank} has no address: {len(addresses)} are given, and each needs one"
        )
    return addresses[rank]
