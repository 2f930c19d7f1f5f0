"""Adapters alone over every transport: the engine has the exported bits, and everything it needs to
load them; with whole models it has the fields that were overridden.
"""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.files import publishing
from megatron_policy.converters.formats.hf_writing import ShardFile
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.manifest import ServedModel
from megatron_policy.refit.receive.collective import join_collective
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.collective.transport import Collective
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.ipc.transport import IpcStream
from megatron_policy.refit.transports.peft import PeftDirectory
from megatron_policy.workers.worker.refit import WorkerRefit
from tests import oracle, peft_models
from tests.collective_engine import SECRET
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB
from tests.dist.mailbox import WAIT_S, Mailbox
from tests.dist.resuming import replaced
from tests.dist.test_adapter_handover import ANEW
from tests.dist.test_adapters import adapted
from tests.exact import Exact, InDouble, assert_equal, load_hf
from tests.small_disk import small_disk

OVERRIDES = {"rms_norm_eps": 0.1}
DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
TOKENS = BatchedDataDict({"input_ids": DATA["input_ids"]})


def config_of(path: Path, megatron: dict[str, Any], **peft: Any) -> dict[str, Any]:
    top = {"hf_config_overrides": OVERRIDES, "refit_timeout_s": WAIT_S}
    return adapted(path, megatron, None, **ANEW, **peft) | top


class Engine:
    """What an engine has loaded, and what it knew of the model at that time."""

    def __init__(self, expected: Any = None, **options: Any) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.knew: list[ServedModel | None] = []
        self.receiver = Receiver(self._load, expected=expected, timeout_s=WAIT_S, **options)

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.knew.append(self.receiver.model)
        self.weights |= {name: tensor.clone() for name, tensor in weights}


def info_of(policy: MegatronPolicy, adapters: bool) -> Any:
    worker = WorkerRefit()
    worker.policy = policy
    return worker.prepare_refit_info(adapters=adapters)


def trainer(config: dict[str, Any], box: Path, ports: tuple[int, int]) -> dict[str, Any]:
    """One rank: a step, then adapters alone and whole models over every transport."""
    mail = Mailbox(box)
    with open_policy(config, init_reference_model=False) as policy:
        policy.train(own_steps(policy, DATA)[0], LOSSES["token"](), mbs=1)
        seen: dict[str, Any] = {"logprobs": policy.logprobs(TOKENS)}
        groups = [
            Collective.join(policy.exporter, "127.0.0.1", port, size, train, WAIT_S, secret=SECRET)
            for port, size, train in zip(
                ports,
                (2, policy.topology.world_size + 1),
                (None, policy.topology.world_size),
                strict=True,
            )
        ]
        if policy.rank == 0:
            mail.put("info", {kind: info_of(policy, kind) for kind in (True, False)})
        for kind in (True, False):
            seen[f"exported {kind}"] = {n: t.clone() for n, t in policy.export(adapters=kind)}
            on_disk = PeftDirectory(box / "peft") if kind else _hf_directory(policy, box)
            transports = {
                "stream": IpcStream(f"ipc://{box}/{kind}.sock", buffer_bytes=4096),
                "group": groups[0].transport(),
                "stages": groups[1].transport(),
                "disk": on_disk,
            }
            sent = {n: policy.refit(t, adapters=kind) for n, t in transports.items()}
            seen[f"sent {kind}"] = {n: manifest.model for n, manifest in sent.items()}
            mail.put(f"published {kind} {policy.rank}")
            _lend(policy, mail, kind)
        for group in groups:
            group.close()
        return seen


def _hf_directory(policy: MegatronPolicy, box: Path) -> HfDirectory:
    return HfDirectory(box / "hf", policy.config.model_name)


def _lend(policy: MegatronPolicy, mail: Mailbox, adapters: bool) -> None:
    handles = IpcHandles(policy.exporter)
    names = list(policy.exporter.plan(adapters=adapters).info())
    half = math.ceil(len(names) / 2)
    for part, group in enumerate((names[:half], names[half:])):
        exported = handles.weights(group, policy.steps, adapters=adapters)
        if policy.rank == 0:
            mail.put(f"handles {adapters} {part}", exported)
        mail.get(f"taken {adapters} {part}")
    if policy.rank == 0:
        mail.put(f"manifest {adapters}", handles.manifest(policy.steps))
    handles.release()


def engines(box: Path, ports: tuple[int, int], world: int) -> dict[Any, Engine]:
    """All engines, each in turn with adapters alone and a whole model."""
    mail = Mailbox(box)
    info = mail.get("info")
    made = {
        (name, kind): Engine(info[kind], staged=name != "stream")
        for name in ("stream", "group", "stages", "disk", "handles")
        for kind in (True, False)
    }
    groups = {
        "group": join_collective("127.0.0.1", ports[0], 1, 2, None, WAIT_S, secret=SECRET),
        "stages": join_collective(
            "127.0.0.1", ports[1], world, world + 1, world, WAIT_S, secret=SECRET
        ),
    }
    for kind in (True, False):
        made["stream", kind].receiver.receive_ipc_stream(f"ipc://{box}/{kind}.sock")
        for name, group in groups.items():
            made[name, kind].receiver.receive_collective(group)
        mail.get(f"published {kind} 0")
        made["disk", kind].receiver.receive_directory(box / ("peft" if kind else "hf"))
        lent = made["handles", kind].receiver
        for part in (0, 1):
            lent.receive_ipc_handles(mail.get(f"handles {kind} {part}"))
            mail.put(f"taken {kind} {part}")
        lent.finish_ipc(mail.get(f"manifest {kind}"))
    for group in groups.values():
        group.close()
    return made


@pytest.mark.parametrize("name", ["TP2+SP", "PP2", "EP2"])
def test_engines_have_the_adapters_and_their_scale_over_every_transport(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    case = (LAYOUTS | EXPERT_LAYOUTS)[name]
    path = checkpoint("qwen3_moe" if name == "EP2" else "qwen2", tied=False, **SIZES)
    with (
        reserved_port() as one,
        reserved_port() as other,
        ThreadPoolExecutor(1) as threads,
    ):
        ports = one, other
        received = threads.submit(engines, tmp_path, ports, case.world)
        seen = ranks.run(case.world, trainer, config_of(path, case.megatron), tmp_path, ports)
        made = received.result()
    exported = {kind: seen[0][f"exported {kind}"] for kind in (True, False)}
    modules = {n.removeprefix("base_model.model.").rpartition(".lora_")[0] for n in exported[True]}
    for (transport, kind), engine in made.items():
        assert engine.weights.keys() == exported[kind].keys(), (transport, kind)
        for weight, tensor in exported[kind].items():
            assert torch.equal(engine.weights[weight], tensor), (transport, weight)
        model = engine.receiver.model
        assert model is not None and model.hf_config_overrides == OVERRIDES
        assert engine.knew and all(each == model for each in engine.knew), transport
        if not kind:
            assert model.adapters is None
            continue
        assert model.adapters is not None
        scale = model.adapters["lora_alpha"] / model.adapters["r"]
        assert scale == peft_models.ALPHA / peft_models.RANK
        assert set(model.adapters["target_modules"]) == modules
        assert model.adapters["base_model_name_or_path"] == str(path)
    for rank in seen:
        for kind in (True, False):
            assert {model.adapters is not None for model in rank[f"sent {kind}"].values()} == {kind}
    if name != "EP2":
        assert_peft_computes_alike(path, made["stream", True], seen[0]["logprobs"])


def assert_peft_computes_alike(path: Path, engine: Engine, logprobs: torch.Tensor) -> None:
    """As an engine would: the fields of the manifest, the tensors, and nothing else."""
    model = engine.receiver.model
    assert model is not None and model.adapters is not None

    def read(dtype: torch.dtype) -> torch.Tensor:
        base = load_hf(path, dtype)
        for norm in base.modules():
            if hasattr(norm, "variance_epsilon"):
                norm.variance_epsilon = OVERRIDES["rms_norm_eps"]
        adapted_model: Any = get_peft_model(base, LoraConfig(**model.adapters)).to(dtype)
        set_peft_model_state_dict(adapted_model, engine.weights)
        return oracle.hf_logprobs(adapted_model, DATA["input_ids"]).detach()

    rounded = read(torch.float32)
    with InDouble():
        exact = Exact.between(rounded, read(torch.float64))
    assert_equal("logprobs of peft", logprobs[:, 1:], exact)


def _full(put: Any) -> Any:
    def call(self: Any, name: str, tensor: torch.Tensor) -> None:
        raise OSError("no room on this disk")

    return call


def misuse(config: dict[str, Any], plain: dict[str, Any], box: Path) -> list[str]:
    said = []

    def refused(call: Any, error: type[Exception]) -> None:
        with pytest.raises(error) as raised:
            call()
        said.append(str(raised.value))

    with open_policy(config, init_optimizer=False) as policy:
        policy.refit(PeftDirectory(box / "there"), adapters=True)
        refused(lambda: policy.refit(PeftDirectory(box / "new")), ConfigError)
        hf = HfDirectory(box / "new", policy.config.model_name)
        refused(lambda: policy.refit(hf, adapters=True), ConfigError)
        refused(lambda: policy.refit(PeftDirectory(box / "there"), adapters=True), RefitError)
        refused(lambda: policy.export_peft(box / "there"), ConfigError)
        with replaced(ShardFile, "put", _full):
            refused(lambda: policy.export_peft(box / "new"), ExportError)
        policy.refit(PeftDirectory(box / "there", overwrite=True), adapters=True)
        handles = IpcHandles(policy.exporter)
        name = next(iter(policy.exporter.plan(adapters=True).info()))
        handles.weights([name], 0, adapters=True)
        refused(lambda: handles.weights(["model.norm.weight"], 0), RefitError)
        refused(lambda: handles.weights(["model.norm.weight"], 0, adapters=True), RefitError)
        handles.release()
    with open_policy(plain, init_optimizer=False) as policy:
        refused(lambda: policy.refit(PeftDirectory(box / "new"), adapters=True), ConfigError)
        assert sorted(p.name for p in box.iterdir()) == ["there"] or policy.rank
    assert not (box / "new").exists()
    return said


def export_to_a_full_disk(config: dict[str, Any], full: Path, late: bool) -> str:
    """The error of an export, of which `late` only the writing finds the disk full."""

    def room_for_anything(check: Any) -> Any:
        return (lambda final, needed: None) if late else check

    with open_policy(config, init_optimizer=False) as policy:
        checked = replaced(publishing, "check_room", room_for_anything)
        with checked, pytest.raises(ExportError) as error:
            policy.export_peft(full / "exported")
        return str(error.value)


@pytest.mark.parametrize("late", [False, True])
def test_a_disk_without_room_for_adapters_is_named_with_the_bytes_and_left_empty(
    ranks, checkpoint, tmp_path: Path, late: bool
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES | {"hidden": 256, "ffn": 512})
    config = config_of(path, LAYOUTS["TP2"].megatron, dim=64)
    with small_disk(tmp_path / "full") as full:
        for said in ranks.run(2, export_to_a_full_disk, config, Path(full), late):
            if late:
                assert f"{full}/exported cannot be written: No space left on device" in said
                assert re.search(rf"it takes [\d,]+ bytes, and {full} has [\d,]+ left", said)
            else:
                needs = rf"{full}/exported needs [\d,]+ bytes, but {full} has 1,048,576 left"
                assert re.search(needs, said), said
        assert list(Path(full).iterdir()) == []


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_sent_is_refused_and_the_policy_goes_on(
    ranks, checkpoint, tmp_path: Path, world: int
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    layout = LAYOUTS["TP2" if world == 2 else "one process"].megatron
    config = config_of(path, layout)
    plain = config | {"megatron_cfg": {**config["megatron_cfg"], "peft": {"enabled": False}}}
    for said in ranks.run(world, misuse, config, plain, tmp_path):
        whole, adapters, exists, taken, full, mixed, unknown, none = said
        assert f"{tmp_path / 'new'} cannot be written: no room on this disk" in full
        assert "PeftDirectory writes adapters alone: refit with adapters=True" in whole
        assert "HfDirectory writes whole models: take PeftDirectory" in adapters
        assert "exists; choose another path" in exists
        assert (
            taken == f"{tmp_path}/there exists; choose another path, or replace it: overwrite=True"
        )
        assert "adapters alone or whole models: begin again" in mixed
        assert "no HF tensor model.norm.weight" in unknown
        assert "no adapters to hand over" in none


def exported(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, init_optimizer=False) as policy:
        policy.export_peft(path)


def _edit(path: Path) -> None:
    file = path / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 6', '"lora_alpha": 7'))


def _flip(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _lose(name: str) -> Any:
    return lambda path: (path / name).unlink()


DAMAGE = {
    "adapter_config.json is not what was written": _edit,
    "1 with a wrong digest": _flip,
    "has no megatron_policy.json that names a step": _lose("megatron_policy.json"),
    "has neither model.safetensors nor": _lose("adapter_config.json"),
    "adapter_model.safetensors: give a directory": _lose("adapter_model.safetensors"),
}


def test_a_directory_of_adapters_that_was_changed_is_refused(
    ranks, checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    ranks.run(1, exported, config_of(path, {}), tmp_path / "whole")
    assert isinstance(PeftModel.from_pretrained(load_hf(path), str(tmp_path / "whole")), PeftModel)
    Engine().receiver.receive_directory(tmp_path / "whole")
    for number, (said, act) in enumerate(DAMAGE.items()):
        copy = tmp_path / str(number)
        copy.mkdir()
        for file in (tmp_path / "whole").iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        act(copy)
        engine = Engine()
        with pytest.raises(RefitError, match=said):
            engine.receiver.receive_directory(copy)
        assert not engine.weights
