"""What every layout must reproduce: the Hugging Face model in one process, trained with torch's own
AdamW.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests.checkpoints import saved_tensors
from tests.exact import ROOM, UNIT, Exact, InDouble, furthest, load_hf
from tests.losses import loss_mask, token_nll
from tests.margins import check

LR, WEIGHT_DECAY, CLIP = 1e-2, 0.1, 0.5
# A key bias shifts all scores of a query alike, so its gradient is exactly zero in theory and
# rounding noise in practice; with Adam's usual epsilon the update would be the noise's sign times
# the learning rate.
EPS = 1e-3
BETAS = (0.9, 0.999)


Gradients = dict[str, torch.Tensor]
LossOf = Callable[[PreTrainedModel, BatchedDataDict], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """Losses, gradients before clipping and their norms of each step, and the weights afterwards;
    gradients and weights under their Hugging Face names.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: list[Gradients]
    weights: dict[str, torch.Tensor]

    def average_of_towers(self) -> Gradients:
        """What AdamW keeps of the gradients of towers and projectors, clipped to `CLIP`: its first
        moment after the last step, by the names that the parameters have in the model's shell.
        """
        found: Gradients = {}
        for gradients, norm in zip(self.gradients, self.grad_norms, strict=True):
            share = (1 - BETAS[0]) * min(1.0, CLIP / (norm + 1e-6))
            for name in filter(is_of_tower, gradients):
                own = name_in_shell(name)
                found[own] = BETAS[0] * found.get(own, 0.0) + share * gradients[name]
        return found


LEAST_LOSS_ROUNDING = 8 * UNIT
"""Relative: a loss is a sum of the order of 64 terms, rounded to fp32. One number's rounding error
can be next to nothing by luck, so this is the least that is taken for it.
"""


@dataclass(frozen=True)
class Rounding:
    """How far training in fp32 is from training in fp64: losses and gradient norms relative, over
    all steps, weights absolute, over all elements.
    """

    loss: float
    grad_norm: float
    weights: float

    @classmethod
    def of(cls, rounded: Trained, exact: Trained) -> Rounding:
        pairs = zip(rounded.losses, exact.losses, strict=True)
        return cls(
            loss=max(LEAST_LOSS_ROUNDING, *(abs(one / other - 1) for one, other in pairs)),
            # Of the vector: a norm's own error is smaller, by a luck that depends on the order.
            grad_norm=max(map(_apart, rounded.gradients, exact.gradients)),
            weights=max(furthest(rounded.weights[n], w) for n, w in exact.weights.items()),
        )


def _apart(rounded: Gradients, exact: Gradients) -> float:
    """The distance of two gradients relative to the length of the second."""
    squares = [
        ((rounded[n].double() - g).square().sum(), g.square().sum()) for n, g in exact.items()
    ]
    return math.sqrt(sum(d for d, _ in squares) / sum(length for _, length in squares))


def make_batch(rows: int, length: int, vocab: int, seed: int = 0) -> BatchedDataDict:
    """Right-padded sequences of unequal length with holes in the token mask and some samples left
    out.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows,), generator=random)
    lengths[0] = length
    inside = torch.arange(length) < lengths.unsqueeze(1)
    tokens = torch.randint(1, vocab, (rows, length), generator=random)
    holes = torch.rand(rows, length, generator=random) < 0.8
    sample_mask = (torch.rand(rows, generator=random) < 0.8).float()
    sample_mask[0] = 1.0
    return BatchedDataDict(
        {
            "input_ids": torch.where(inside, tokens, 0),
            "input_lengths": lengths,
            "token_mask": (inside & holes).long(),
            "sample_mask": sample_mask,
        }
    )


def hf_logprobs(
    model: PreTrainedModel, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Next-token log-probabilities `[B, S - 1]`."""
    logits = model(tokens).logits[:, :-1].float() / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def token_level(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    return token_nll(hf_logprobs(model, data["input_ids"]), data, loss_mask(data).sum())


def logit_level(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    logprobs = model(data["input_ids"]).logits[:, :-1].float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return (entropy * loss_mask(data)).sum() / loss_mask(data).sum()


WITH_DECAY = ("InternVLVisionEmbeddings", "ParakeetEncoderAttention", "RadioPatchEmbeddings")
"""Modules that hold matrices themselves, for positions and places that no patch has."""
WITHOUT_DECAY = {
    *(("XIELUActivation", name) for name in ("alpha_n", "alpha_p", "beta", "eps")),
    ("Ernie4_5_MoeStatics", "e_score_correction_bias"),
    ("Gemma3nTextAltUp", "correct_output_scale"),
    ("GptOssAttention", "sinks"),
    ("Lfm2MoeSparseMoeBlock", "expert_bias"),
    ("MiniMaxM2SparseMoeBlock", "e_score_correction_bias"),
    ("CLIPVisionEmbeddings", "class_embedding"),
    ("RadioLayerScale", "lambda1"),
    *((f"Llava{kind}Model", "image_newline") for kind in ("Next", "Onevision")),
    *(("InternVLVisionLayer", name) for name in ("lambda_1", "lambda_2")),
    *(
        (f"{model}GatedDeltaNet", name)
        for model in ("OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
        for name in ("A_log", "dt_bias")
    ),
    *(("KimiLinearForgetGate", name) for name in ("A_log", "dt_bias")),
    *(
        (kind, name)
        for kind in (
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "NemotronHMamba2Mixer",
        )
        for name in ("A_log", "D", "dt_bias")
    ),
}
"""What other modules than linear layers, routers, experts and norms hold themselves."""


def decays(module: torch.nn.Module, name: str) -> bool:
    """Whether the parameter or buffer `name` of a Hugging Face module has weight decay. The module
    says what it is: matrices of linear layers, convolutions, embeddings, routers and experts have,
    what a norm scales and shifts by, biases, attention sinks and constants of recurrences have not.
    """
    kind = type(module).__name__
    convolution = torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d
    linear = torch.nn.Linear | torch.nn.Embedding | convolution
    if isinstance(module, linear) or kind.endswith("Router"):
        assert name in ("weight", "bias", "e_score_correction_bias"), (kind, name)
        return name == "weight"
    if kind.endswith("MultiModalProjector") or kind in WITH_DECAY:
        return True
    if kind.endswith(("Experts", "PositionEmbeddings")):
        return not name.endswith("bias")
    norm = kind.endswith(("Norm", "Norm1P", "Norm1d", "NormGated", "RMSNorm"))
    assert norm or (kind, name) in WITHOUT_DECAY, (kind, name)
    return False


def list_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The model's parameters by the names that they have in its files."""
    return {name_on_file(model, name): each for name, each in model.named_parameters()}


ON_FILE = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"),
        (("model.language_model.", "model."), ("model.visual.", "visual.")),
    ),
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        (
            ("model.language_model.", "model."),
            ("model.visual.", "visual."),
            ("model.audio_tower.", "audio_tower."),
        ),
    ),
    **dict.fromkeys(
        ("gemma3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3"),
        (
            ("model.language_model.", "language_model.model."),
            ("model.", ""),
            ("lm_head.", "language_model.lm_head."),
        ),
    ),
}
"""What names of parameters of a model begin with, and those of its files in its place."""


def name_on_file(model: PreTrainedModel, name: str) -> str:
    """What the files of a model call the parameter `name`."""
    for held, written in ON_FILE.get(model.config.model_type, ()):
        if name.startswith(held):
            return written + name.removeprefix(held)
    return name


def name_in_shell(name: str) -> str:
    """What checkpoints of training call a parameter of what surrounds a decoder, or an adapter
    there, which has the name that PEFT gives it.
    """
    own = re.sub(r"^(base_model\.model\.)?(model\.)?", "", name)
    return re.sub(r"\.lora_([AB])\.default\.weight$", lambda m: f".adapter.{m[1].lower()}", own)


def is_of_tower(name: str) -> bool:
    """Whether a parameter is of what sees or hears, a projector included."""
    parts = ("vis", "projector.", ".connector.", "image_newline", "audio_tower.", "embed_audio.")
    return any(part in name for part in parts)


def _gradient(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's gradient; zero for correction biases that a model keeps as parameters, and
    for a tower if no row has a picture.
    """
    if parameter.grad is None:
        assert name.endswith("e_score_correction_bias") or is_of_tower(name), name
        return torch.zeros_like(parameter)
    return parameter.grad


def _decaying(model: PreTrainedModel, trained: Collection[str]) -> set[str]:
    """Which of the `trained` parameters have weight decay."""
    return {
        found
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if (found := name_on_file(model, f"{path}.{name}")) in trained and decays(module, name)
    }


def train(
    path: Path | str,
    data: BatchedDataDict,
    global_batch_size: int,
    loss_of: LossOf,
    dtype: torch.dtype = torch.float32,
    lr: float = LR,
    weight_decay: float = WEIGHT_DECAY,
    load: Callable[[Path | str, torch.dtype], PreTrainedModel] = load_hf,
    apart: Callable[[str], bool] = lambda name: False,
    clip: float = CLIP,
    scale: float = 1.0,
    own: Callable[[str], Mapping[str, float] | None] = lambda name: {},
) -> Trained:
    """One step per global batch, fp32 main weights (fp64 in fp64), weight decay of what decays,
    gradients clipped to the norm `clip`, or not at all if that is 0; those of parameters that are
    `apart`, by name, by their own norm, which is not in the result. Gradients are computed of the
    loss times `scale`. `own` says by name what differs for a parameter, its `lr` or its
    `weight_decay`; None if it is frozen.
    """
    model = load(path, dtype)
    live = {name: p for name, p in list_parameters(model).items() if own(name) is not None}
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    main = {name: p.detach().to(wide, copy=True) for name, p in live.items()}
    decaying = _decaying(model, live)
    optimizer = torch.optim.AdamW(
        [
            {"params": [m], "weight_decay": weight_decay if n in decaying else 0.0} | (own(n) or {})
            for n, m in main.items()
        ],
        lr=lr,
        betas=BETAS,
        eps=EPS,
    )
    losses, norms, gradients = [], [], []
    for index in range(data.size // global_batch_size):
        model.zero_grad()
        with InDouble() if dtype is torch.float64 else nullcontext():
            loss = loss_of(model, data.get_batch(index, global_batch_size))
        (loss * scale).backward()
        for name, parameter in live.items():
            main[name].grad = _gradient(name, parameter).to(wide) / scale
        gradients.append({name: m.grad.clone() for name, m in main.items()})
        together = [m for n, m in main.items() if not apart(n)]
        limit = clip or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_(together, limit)))
        torch.nn.utils.clip_grad_norm_([m for n, m in main.items() if apart(n)], limit)
        losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(main[name])
    weights = {name: p.detach().clone() for name, p in list_parameters(model).items()}
    return Trained(losses, norms, gradients, weights)


@dataclass(frozen=True)
class Learned:
    """What training in fp64 gives, and how far it is from that in `dtype`."""

    path: Path | str
    exact: Trained
    rounded: Trained
    rounding: Rounding
    load: Callable[[Path | str, torch.dtype], PreTrainedModel] = load_hf
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        path: Path | str,
        data: BatchedDataDict,
        size: int,
        loss_of: LossOf,
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> Learned:
        """As `train`, whose arguments these are."""
        exact = train(path, data, size, loss_of, torch.float64, **more)
        rounded = train(path, data, size, loss_of, dtype, **more)
        rounding, load = Rounding.of(rounded, exact), more.get("load", load_hf)
        return cls(path, exact, rounded, rounding, load, dtype)

    def read(self, compute: Callable[[PreTrainedModel], torch.Tensor]) -> Exact:
        """What `compute` makes of the trained model, without gradients."""
        rounded = compute(self._model(self.rounded, self.dtype)).detach()
        model = self._model(self.exact, torch.float64)
        with InDouble():
            exact = compute(model).detach()
        return Exact.between(rounded, exact)

    def _model(self, trained: Trained, dtype: torch.dtype) -> PreTrainedModel:
        model = self.load(self.path, dtype)
        with torch.no_grad():
            for name, parameter in list_parameters(model).items():
                parameter.copy_(trained.weights[name])
        return model

    def assert_same_steps(self, steps: Sequence[Mapping[str, Any]], context: object = "") -> None:
        """Losses and gradient norms of what a policy's `train` returned are as close as rounding
        allows; so are those of its first steps if these are fewer.
        """
        for index, step in enumerate(steps):
            self.assert_same_loss(step["loss"], index, context)
            self.assert_same_norm(step["grad_norm"], index, context)

    def assert_same_loss(self, found: torch.Tensor, index: int, context: object = "") -> None:
        """The loss of a step, one number, is as close as rounding allows."""
        apart = abs(found.item() / self.exact.losses[index] - 1)
        check("loss", apart, ROOM * self.rounding.loss, context)

    def assert_same_total(self, found: float, *steps: int) -> None:
        """The sum of the losses of these steps is as close as rounding allows."""
        apart = abs(found / sum(self.exact.losses[index] for index in steps) - 1)
        check("loss", apart, ROOM * self.rounding.loss)

    def assert_same_norm(self, found: torch.Tensor, index: int, context: object = "") -> None:
        """The gradient norm of a step, one number, is as close as rounding allows."""
        apart = abs(found.item() / self.exact.grad_norms[index] - 1)
        check("grad norm", apart, ROOM * self.rounding.grad_norm, context)

    def assert_same_weights(self, found: Mapping[str, torch.Tensor]) -> None:
        """Whole weights by their names in a checkpoint."""
        for name, tensor in found.items():
            self.assert_same_weight(tensor, self._saved[name], name)

    @cached_property
    def _saved(self) -> dict[str, torch.Tensor]:
        """What a checkpoint of the trained model has, in fp64."""
        return saved_tensors(self._model(self.exact, torch.float64))

    def assert_same_weight(self, found: torch.Tensor, exact: torch.Tensor, name: str) -> None:
        """A weight, or a shard of one, is as close to what it should be as rounding allows."""
        check("weights", furthest(found, exact), ROOM * self.rounding.weights, name)

    @cached_property
    def towers_rounding(self) -> float:
        """How far `Trained.average_of_towers` is from that in fp64, over all elements."""
        rounded, exact = self.rounded.average_of_towers(), self.exact.average_of_towers()
        largest = max(float(each.abs().max()) for each in exact.values())
        return max(UNIT * largest, *(furthest(rounded[n], each) for n, each in exact.items()))

    def compare_towers(self, found: Gradients) -> float:
        """The largest difference of any element from `Trained.average_of_towers` in fp64."""
        exact = self.exact.average_of_towers()
        assert found.keys() == exact.keys(), found.keys() ^ exact.keys()
        return max(furthest(found[name], each) for name, each in exact.items())
