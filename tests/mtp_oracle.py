"""Multi-token prediction in plain torch, after DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
section 2.2: what a policy's MTP layers must reproduce. MiMo's take the hidden states first, as they
are before the model's final norm, then the embedding (vLLM's `mimo.py` and `mimo_mtp.py`). Those of
Qwen3-Next and Qwen3.5 are as DeepSeek-V3's (vLLM's `qwen3_next_mtp.py`). That of Nemotron 3 is too,
with a layer of attention and one of experts in place of an ordinary one (vLLM's
`nemotron_h_mtp.py`, Megatron-Core's `MultiTokenPredictionLayer` with the pattern `*E`).

transformers has the decoder layers but no forward pass for prediction, so that is written here.

Shapes: B rows, S positions, D model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.exact import load_hf
from tests.losses import token_nll
from tests.mtp_checkpoints import (
    count_layers,
    count_ordinary,
    decoder_names,
    is_nemotron,
    layer_name,
    ordinary_name,
    own_names,
)


def attach(module: nn.Module, name: str, child: nn.Module) -> None:
    """Give a module a descendant of this dotted name."""
    first, _, rest = name.partition(".")
    if not rest:
        module.add_module(first, child)
        return
    if first not in dict(module.named_children()):
        module.add_module(first, nn.Module())
    attach(module.get_submodule(first), rest, child)


def load_with_mtp(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint's model, and after its layers those for prediction, which its own forward pass
    does not reach; parameters have the names of the files. `further` has of each of them its
    decoder layers, of which there are two if layers have one part each, and its own modules, in the
    order of `OWN`.
    """
    config = json.loads((Path(path) / "config.json").read_text())
    ordinary, size = count_ordinary(config), config["hidden_size"]
    tensors = load_file(Path(path) / "model.safetensors")
    with _more_layers(Path(path), config, tensors) as longer:
        model: Any = load_hf(longer, dtype)
    model.config.num_hidden_layers = ordinary
    decoders, model.further = iter(model.model.layers[ordinary:]), []
    starts = [tuple(decoder_names(config, number)) for number in range(count_layers(config))]
    for number, names in enumerate(starts):
        start, own = layer_name(config, number), []
        for name in own_names(config):
            weight = tensors[start + name].to(dtype)
            module = deepcopy(_final_norm(model.model))
            if weight.ndim > 1:
                module = nn.Linear(2 * size, size, bias=False, dtype=dtype)
            module.weight.data.copy_(weight)
            own.append(module)
        model.further.append(([next(decoders) for _ in names], own))
    if layer_name(config, 0) != ordinary_name(config, ordinary):
        model.model.layers = model.model.layers[:ordinary]
        for names, (layers, _) in zip(starts, model.further, strict=True):
            for name, layer in zip(names, layers, strict=True):
                attach(model, name.removesuffix("."), layer)
    for number, (_, own) in enumerate(model.further):
        for name, module in zip(own_names(config), own, strict=True):
            attach(model, layer_name(config, number) + name.removesuffix(".weight"), module)
    return model.eval()


def _final_norm(inner: Any) -> Any:
    """The norm after the last layer of a model without its head."""
    return inner.norm_f if hasattr(inner, "norm_f") else inner.norm


@contextmanager
def _more_layers(
    path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Iterator[Path]:
    """The same weights under a config that counts all these layers as ordinary ones."""
    ordinary, further = count_ordinary(config), count_layers(config)
    starts = [start for number in range(further) for start in decoder_names(config, number)]
    layers = ordinary + len(starts)
    with tempfile.TemporaryDirectory() as folder:
        for number, start in enumerate(starts, start=ordinary):
            own = ordinary_name(config, number)
            tensors = {name.replace(start, own): tensor for name, tensor in tensors.items()}
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        longer = config | {"num_hidden_layers": layers}
        for key, kind in (("mlp_layer_types", "sparse"), ("layer_types", "full_attention")):
            if kinds := config.get(key):
                longer[key] = [*kinds, *[kind] * (layers - len(kinds))]
        if is_nemotron(config):
            longer["layers_block_type"] = [*config["layers_block_type"], "full_attention", "moe"]
        (Path(folder) / "config.json").write_text(json.dumps(longer))
        yield Path(folder)


@contextmanager
def _input_of(norm: nn.Module) -> Iterator[list[torch.Tensor]]:
    """What the norm takes in this context."""
    taken: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    yield taken
    handle.remove()


def later(values_BS: torch.Tensor, places: int) -> torch.Tensor:
    """Each position's value so many places further on, 0 beyond the row."""
    found = torch.zeros_like(values_BS)
    if places < values_BS.size(1):
        found[:, : values_BS.size(1) - places] = values_BS[:, places:]
    return found


def further_logprobs(
    model: Any, tokens_BS: torch.Tensor, depths: int, repeated: bool, detached: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities `[B, S]` of token t + 1 at position t, and for k = 1, 2, ... of token
    t + k + 1; what is beyond the row is the padding token 0.
    """
    inner, length = model.model, tokens_BS.size(1)
    mimo = model.config.model_type == "qwen2"  # transformers' class of it
    with _input_of(_final_norm(inner)) as before:
        hidden = inner(tokens_BS).last_hidden_state
    found = [_of_tokens(model.lm_head(hidden), later(tokens_BS, 1))]
    positions = torch.arange(length).unsqueeze(0)
    # Nemotron's attention rotates nothing.
    angles = inner.rotary_emb(hidden, positions) if hasattr(inner, "rotary_emb") else None
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(length, length, dtype=hidden.dtype).masked_fill(
        unseen, torch.finfo(hidden.dtype).min
    )
    if mimo:
        (hidden,) = before
    if detached:
        hidden = hidden.detach()
    for k in range(1, depths + 1):
        layers, own = model.further[0 if repeated else k - 1]
        embedded = inner.get_input_embeddings()(later(tokens_BS, k))
        head = model.lm_head.weight
        if detached:
            embedded, head = embedded.detach(), head.detach()
        hidden = _project(own, hidden, embedded, mimo)
        for layer in layers:
            hidden = layer(
                hidden,
                attention_mask=mask[None, None],
                position_ids=positions,
                position_embeddings=angles,
            )
        hidden = own[3](hidden)
        found.append(_of_tokens(hidden @ head.T, later(tokens_BS, k + 1)))
    return found[0], found[1:]


def _project(
    own: list[Any], hidden: torch.Tensor, embedded: torch.Tensor, mimo: bool
) -> torch.Tensor:
    """What the decoder layer of such a layer takes."""
    embedding_norm, hidden_norm, projection, _ = own
    both = (embedding_norm(embedded), hidden_norm(hidden))
    projected: torch.Tensor = projection(torch.cat(both[::-1] if mimo else both, dim=-1))
    return projected


def _of_tokens(logits: torch.Tensor, tokens_BS: torch.Tensor) -> torch.Tensor:
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, tokens_BS.unsqueeze(-1)).squeeze(-1)


@dataclass
class MtpLoss:
    """The differentiated loss, token level: the main one, and `factor` times the mean of the
    further ones. `seen` has the losses of each call: the main one, then those of k = 1, 2, ...
    """

    factor: float
    depths: int = 1
    repeated: bool = False
    detached: bool = False
    seen: list[list[float]] = field(default_factory=list)

    def __call__(self, model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
        tokens_BS = data["input_ids"]
        main, further = further_logprobs(
            model, tokens_BS, self.depths, self.repeated, self.detached
        )
        mask_BS = data["token_mask"].float() * data["sample_mask"].unsqueeze(-1)
        count = mask_BS[:, 1:].sum()
        losses = [token_nll(main[:, :-1], data, count)]
        losses += [
            -(each * later(mask_BS, k + 1)).sum() / count for k, each in enumerate(further, start=1)
        ]
        self.seen.append([loss.item() for loss in losses])
        return losses[0] + self.factor * torch.stack(losses[1:]).mean()


def learned(
    path: Path, data: BatchedDataDict, global_batch: int, **kind: Any
) -> tuple[oracle.Learned, list[list[float]]]:
    """What training with such a loss gives, and the exact losses of each step."""
    losses = MtpLoss(**kind)
    config = json.loads((path / "config.json").read_text())
    further = [layer_name(config, number) for number in range(count_layers(config))]

    def apart(name: str) -> bool:
        return losses.detached and name.startswith(tuple(further))

    found = oracle.Learned.of(path, data, global_batch, losses, load=load_with_mtp, apart=apart)
    return found, losses.seen[: data.size // global_batch]
