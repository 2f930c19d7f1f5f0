"""Multi-token prediction in plain torch, after DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
section 2.2: what a policy's MTP layers must reproduce.

transformers has the decoder layers but no forward pass for prediction, so that is written here.

Shapes: B rows, S positions, D model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.exact import load_hf
from tests.losses import token_nll


class SharedHead(nn.Module):
    """What a layer has of its own before the model's head."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


def load_with_mtp(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint's model, and after its layers those for prediction, which its own forward pass
    does not reach; parameters have the names of the files.
    """
    config = json.loads((Path(path) / "config.json").read_text())
    ordinary, further = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    with _more_layers(Path(path), config, ordinary + further) as longer:
        model: Any = load_hf(longer, dtype)
    model.config.num_hidden_layers = ordinary
    tensors, size = load_file(Path(path) / "model.safetensors"), config["hidden_size"]
    for number in range(ordinary, ordinary + further):
        layer, names = model.model.layers[number], f"model.layers.{number}."

        def norm(name: str, names: str = names) -> nn.Module:
            made = type(model.model.norm)(size, eps=config["rms_norm_eps"]).to(dtype)
            made.weight.data.copy_(tensors[names + name])
            return made

        layer.enorm, layer.hnorm = norm("enorm.weight"), norm("hnorm.weight")
        layer.eh_proj = nn.Linear(2 * size, size, bias=False, dtype=dtype)
        layer.eh_proj.weight.data.copy_(tensors[names + "eh_proj.weight"])
        layer.shared_head = SharedHead(norm("shared_head.norm.weight"))
    return model.eval()


@contextmanager
def _more_layers(path: Path, config: dict[str, Any], layers: int) -> Iterator[Path]:
    """The same weights under a config that counts all these layers as ordinary ones."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").symlink_to(path / "model.safetensors")
        shutil.copy(path / "config.json", folder)
        longer = config | {"num_hidden_layers": layers}
        if kinds := config.get("mlp_layer_types"):
            longer["mlp_layer_types"] = [*kinds, *["sparse"] * (layers - len(kinds))]
        (Path(folder) / "config.json").write_text(json.dumps(longer))
        yield Path(folder)


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
    hidden = inner(tokens_BS).last_hidden_state
    found = [_of_tokens(model.lm_head(hidden), later(tokens_BS, 1))]
    positions = torch.arange(length).unsqueeze(0)
    angles = inner.rotary_emb(hidden, positions)
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(length, length, dtype=hidden.dtype).masked_fill(
        unseen, torch.finfo(hidden.dtype).min
    )
    if detached:
        hidden = hidden.detach()
    for k in range(1, depths + 1):
        layer = inner.layers[model.config.num_hidden_layers + (0 if repeated else k - 1)]
        embedded = inner.embed_tokens(later(tokens_BS, k))
        head = model.lm_head.weight
        if detached:
            embedded, head = embedded.detach(), head.detach()
        both = torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), dim=-1)
        hidden = layer(
            layer.eh_proj(both),
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=angles,
        )
        hidden = layer.shared_head.norm(hidden)
        found.append(_of_tokens(hidden @ head.T, later(tokens_BS, k + 1)))
    return found[0], found[1:]


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
    ordinary = json.loads((path / "config.json").read_text())["num_hidden_layers"]

    def apart(name: str) -> bool:
        further = name.startswith("model.layers.") and int(name.split(".")[2]) >= ordinary
        return losses.detached and further

    found = oracle.Learned.of(path, data, global_batch, losses, load=load_with_mtp, apart=apart)
    return found, losses.seen[: data.size // global_batch]
