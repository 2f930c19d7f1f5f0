"""Adapters that PEFT makes, saves and loads: what a policy with adapters is compared with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from tests import oracle, scalar_oracle
from tests.exact import Exact, InDouble, load_hf

RANK, ALPHA = 4, 6.0
_ADAPTER, _IN_FULL = ".default", ".modules_to_save"
_TASKS = {"bradley_terry": "SEQ_CLS", "regression": "TOKEN_CLS"}


def make_adapters(
    base: Path,
    target: Path,
    modules: list[str] | str,
    *,
    shared: bool = False,
    seed: int = 17,
    stacks: list[str] | None = None,
    load: Callable[[Path], Any] = load_hf,
) -> Path:
    """A directory that PEFT saves: random adapters on `modules` of the model that `load` makes of
    `base`, A drawn as B is. With `shared` the modules of a fused layer have the same A. `stacks`
    are parameters with stacked experts.
    """
    torch.manual_seed(seed)
    config = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=modules,
        target_parameters=stacks,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(load(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, 0.1)
    if shared:
        share_a(model)
    model.save_pretrained(str(target))
    return target


FUSED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
FUSED |= {"in_proj_ba": "in_proj_qkvz"}
"""Modules of a fused layer, and the one whose A they share."""


def share_a(model: torch.nn.Module) -> None:
    """Give the modules of each fused layer one and the same A."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        leaf = name.rpartition(".")[2]
        if leaf in FUSED and hasattr(module, "lora_A"):
            first = modules[name.removesuffix(leaf) + FUSED[leaf]]
            module.lora_A["default"].weight = first.lora_A["default"].weight


class Loads:
    """Loads the checkpoint's model, by `load`, with the adapters of a directory, for
    `oracle.train`.
    """

    def __init__(
        self, adapters: Path, *, shared: bool = False, load: Callable[..., Any] = load_hf
    ) -> None:
        self._adapters, self._shared, self._load = adapters, shared, load

    def __call__(self, path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model: Any = PeftModel.from_pretrained(
            self._load(path, dtype),
            str(self._adapters),
            is_trainable=True,
            autocast_adapter_dtype=False,
        )
        model = model.to(dtype)
        if self._shared:
            share_a(model)
        return model


def logprobs(base: Path, adapters: Path, tokens: torch.Tensor) -> Exact:
    """What PEFT makes of the tokens with the adapters of a directory."""
    load = Loads(adapters)
    rounded, double = oracle.hf_logprobs(load(base), tokens), load(base, torch.float64)
    with InDouble():
        return Exact.between(rounded.detach(), oracle.hf_logprobs(double, tokens).detach())


def saved_name(name: str) -> str:
    """How PEFT calls in a file what is the parameter `name` in a model."""
    return name.replace(_IN_FULL, "").replace(_ADAPTER, "")


def is_adapter(name: str) -> dict[str, float] | None:
    """For `oracle.train`: adapters are trained as the optimizer says, and so is a scalar head."""
    return {} if ".lora_" in name or _IN_FULL in name else None


def make_head_adapters(kind: str, base: Path, target: Path, modules: list[str]) -> Path:
    """As `make_adapters`, for a model with a scalar head of that kind; PEFT keeps another head than
    that of the base among the adapters.
    """
    torch.manual_seed(23)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type=_TASKS[kind])
    model = get_peft_model(scalar_oracle.load(kind, base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name) is not None:
                parameter.normal_(0.0, 0.3 if _IN_FULL in name else 0.1)
    model.save_pretrained(str(target))
    return target


class LoadsWithHead:
    """As `Loads`, for a model with a scalar head."""

    def __init__(self, kind: str, adapters: Path) -> None:
        self._kind, self._adapters = kind, adapters

    def __call__(self, path: Path | str, dtype: torch.dtype = torch.float32) -> PeftModel:
        model: Any = PeftModel.from_pretrained(
            scalar_oracle.load(self._kind, path, dtype),
            str(self._adapters),
            is_trainable=True,
            autocast_adapter_dtype=False,
        )
        return model.to(dtype).eval()


PARTS = ("gate_proj", "up_proj", "down_proj")
_FILE = "adapter_model.safetensors"
_EXPERTS = "mlp.experts"


def make_expert_adapters(base: Path, target: Path) -> Path:
    """A directory as PEFT saves it, with random adapters on the experts of every layer, each of
    their matrices its own; transformers stacks experts, so that PEFT would not name them so.
    """
    torch.manual_seed(19)
    tensors = {}
    for path, experts in _experts(load_hf(base)):
        count, outputs, inputs = experts.down_proj.shape
        for expert in range(count):
            for part in PARTS:
                out, into = (outputs, inputs) if part == "down_proj" else (inputs, outputs)
                name = f"base_model.model.{path}.{expert}.{part}"
                tensors[f"{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, into)
                tensors[f"{name}.lora_B.weight"] = 0.1 * torch.randn(out, RANK)
    target.mkdir()
    save_file(tensors, target / _FILE, metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(PARTS)}
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


class LoadsExperts:
    """As `Loads`, for adapters of experts, in plain torch: added to the stacked weights."""

    def __init__(self, adapters: Path) -> None:
        self._adapters = adapters

    def __call__(self, path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = load_hf(path, dtype)
        tensors = load_file(self._adapters / _FILE)
        for name, experts in list(_experts(model)):
            for weight, parts in (("gate_up_proj", PARTS[:2]), ("down_proj", PARTS[2:])):
                added = AdaptedExperts(f"base_model.model.{name}", tensors, parts, dtype)
                parametrize.register_parametrization(experts, weight, added)
        return model


class OfExperts(torch.nn.ParameterDict):
    """Adapters by their names in a file."""


class AdaptedExperts(torch.nn.Module):
    """Adds the products of adapters to the stacked weights of experts, `[E, O, I]`."""

    def __init__(
        self,
        path: str,
        tensors: dict[str, torch.Tensor],
        parts: tuple[str, ...],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.names, self.parts = OfExperts(), parts
        for name, tensor in tensors.items():
            if name.startswith(f"{path}.") and name.split(".")[-3] in parts:
                self.names[name.replace(".", "/")] = torch.nn.Parameter(tensor.to(dtype))
        self.path = path

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([each + self._product(n) for n, each in enumerate(weight)])

    def _product(self, expert: int) -> torch.Tensor:
        found = []
        for part in self.parts:
            a, b = (
                self.names[f"{self.path}.{expert}.{part}.lora_{side}.weight".replace(".", "/")]
                for side in "AB"
            )
            found.append(ALPHA / RANK * (b @ a))
        return torch.cat(found)


def _experts(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if name.endswith(_EXPERTS):
            yield name, module


def saved_expert_name(name: str) -> str:
    """How a file calls what is the parameter `name` of `AdaptedExperts` in a model."""
    return name.rpartition(".names.")[2].replace("/", ".")


def is_expert_adapter(name: str) -> dict[str, float] | None:
    """As `is_adapter`."""
    return {} if "/lora_" in name else None
