"""What enters the first layer of a model has an owner, which can read attachments of the rows: a
list with another number of vectors for each row, and a tensor with a vector for each. Here a model
adds them to the embedding of its marked tokens, by a matrix of its own that is trained, and marked
tokens do not count as positions. Under every way to split and to batch, both engines make of it
what one process of Hugging Face makes of `inputs_embeds` and `position_ids`.

Shapes: B rows, S positions, N marked tokens of a row, F features.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters import registry
from megatron_policy.converters.families import qwen2
from megatron_policy.converters.rows import Whole
from megatron_policy.engines.hugging_face import assemble as hugging_face
from megatron_policy.engines.megatron import assemble as megatron
from megatron_policy.engines.megatron.layers.norm import replicated
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.embedder import Embedder, Entering
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.packing.tokens import Blocks
from megatron_policy.parallel.groups import Groups
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, own_steps, policy_config
from tests.dist.fsdp_cases import BATCHINGS
from tests.dist.layouts import LENGTH, OVERLAPPED, SIZES, SP, VOCAB, Layout, layout
from tests.dist.resuming import TOKENIZER
from tests.exact import Exact, InDouble, assert_equal, load_hf
from tests.losses import loss_mask, token_nll
from tests.margins import check

MARK, FEATURES = 7, LENGTH
"""As many features as positions: what is taken for a sequence is cut to a microbatch's width."""
WEIGHT = "picture.weight"
RECOMPUTED = {"activation_checkpointing": True}
CP2 = {"context_parallel_size": 2}
CASES = {
    "one process": (layout(1), "padded"),
    "one process, packed": (layout(1), "packed"),
    "TP2": (layout(2, tp=2), "dynamic"),
    "TP2+SP": (layout(2, tp=2, **SP), "packed"),
    "PP2": (layout(2, pp=2), "padded"),
    "PP2xVPP2, recomputed": (layout(2, pp=2, vpp=2, **RECOMPUTED), "packed"),
    "CP2": (layout(2, **CP2), "padded"),
    "CP2, packed": (layout(2, **CP2), "packed"),
    "DP2, overlaps": (layout(2, **OVERLAPPED), "packed"),
    "TP2xCP2+SP": (layout(4, tp=2, **SP, **CP2), "packed"),
    "FSDP2": (Layout(1, megatron={"dtensor_cfg": {}}), "padded"),
    "FSDP2 x 2": (Layout(2, megatron={"dtensor_cfg": {}}), "packed"),
    "FSDP2 CP2": (Layout(2, megatron={"dtensor_cfg": CP2}), "packed"),
    "FSDP2 TP2": (Layout(2, tp=2, megatron={"dtensor_cfg": {"tensor_parallel_size": 2}}), "packed"),
    "FSDP2 TP2+SP": (
        Layout(2, tp=2, megatron={"dtensor_cfg": {"tensor_parallel_size": 2} | SP}),
        "dynamic",
    ),
    "FSDP1 x 2": (Layout(2, megatron={"fsdp_cfg": {}}), "packed"),
}

DAILY = ("TP2+SP", "PP2xVPP2, recomputed", "CP2", "FSDP2 CP2")


@cache
def data() -> BatchedDataDict:
    """Two global batches, in which a fourth of the tokens is marked; some rows have none."""
    found, random = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB), torch.Generator()
    random.manual_seed(3)
    tokens_BS, rows = found["input_ids"], 2 * GLOBAL_BATCH
    marked_BS = (torch.rand(tokens_BS.shape, generator=random) < 0.25) & (tokens_BS != 0)
    marked_BS[1::4] = False
    found["input_ids"] = torch.where(marked_BS, MARK, tokens_BS.masked_fill(tokens_BS == MARK, 8))
    found["vectors"] = [
        torch.randn(count, FEATURES, generator=random) if count else None
        for count in marked_BS.sum(1).tolist()
    ]
    found["tint"] = torch.randn(rows, FEATURES, generator=random)
    return found


def features_of(tokens_BS: torch.Tensor, vectors: Any, tints: Any) -> torch.Tensor:
    """`[B, S, F]`: each marked token's own vector and that of its row; 0 for others."""
    features_BSF = torch.zeros(*tokens_BS.shape, FEATURES)
    for features_SF, tokens_S, vectors_NF, tint_F in zip(
        features_BSF, tokens_BS, vectors, tints, strict=True
    ):
        if vectors_NF is not None:
            features_SF[tokens_S == MARK] = vectors_NF + tint_F
    return features_BSF


def positions_of(tokens_BS: torch.Tensor) -> torch.Tensor:
    return ((tokens_BS != MARK).cumsum(1) - 1).clamp(min=0)


def load_marked(path: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = load_hf(path, dtype)
    model.picture = torch.nn.Linear(FEATURES, SIZES["hidden"], bias=False, dtype=dtype)
    model.picture.load_state_dict({"weight": load_file(Path(path) / "model.safetensors")[WEIGHT]})
    return model


def hf_logprobs(model: Any, rows: BatchedDataDict) -> torch.Tensor:
    """Next-token log-probabilities `[B, S - 1]`."""
    tokens_BS = rows["input_ids"]
    features_BSF = features_of(tokens_BS, rows["vectors"], rows["tint"]).to(model.dtype)
    logits_BSV = model(
        inputs_embeds=model.get_input_embeddings()(tokens_BS) + model.picture(features_BSF),
        position_ids=positions_of(tokens_BS),
        attention_mask=torch.ones_like(tokens_BS),
    ).logits
    logprobs_BSV = logits_BSV[:, :-1].float().log_softmax(-1)
    return logprobs_BSV.gather(-1, tokens_BS[:, 1:].unsqueeze(-1)).squeeze(-1)


def hf_loss(model: Any, rows: BatchedDataDict) -> torch.Tensor:
    return token_nll(hf_logprobs(model, rows), rows, loss_mask(rows).sum())


@dataclass(frozen=True)
class Marked:
    """See `Embedder`."""

    text: Embedder
    picture: torch.nn.Module | None
    groups: Groups
    transposed: bool
    """Whether hidden states are `[R, S, D]`, not `[S, R, D]`."""
    splits: Callable[[], bool]
    """Whether tensor-parallel ranks have a share of the positions each."""
    attachments: tuple[str, ...] = ("vectors", "tint")

    def embed(self, tokens_RT: torch.Tensor) -> torch.Tensor:
        return self.text.embed(tokens_RT)

    def enter(self, tokens_RT: torch.Tensor, microbatch: Microbatch) -> Entering:
        assert self.picture is not None
        attached = (microbatch.attached(key) for key in ("vectors", "tint"))
        features_BSF = features_of(microbatch.tokens_BS, *attached)
        layout = microbatch.layout
        own_TRF = layout.take(features_BSF, self.groups.cp.rank() % layout.ranks)
        if self.splits():
            own_TRF = own_TRF.chunk(self.groups.tp.size())[self.groups.tp.rank()]
        added: torch.Tensor = self.picture(own_TRF)
        hidden = self.text.embed(tokens_RT)
        return Entering(hidden + (added.transpose(0, 1) if self.transposed else added))

    def positions(self, microbatch: Microbatch) -> torch.Tensor:
        return positions_of(microbatch.tokens_BS)

    def find_blocks(self, microbatch: Microbatch) -> Blocks:
        return ()


class Picture(torch.nn.Module):
    """Where the matrix is among a chunk's modules; its gradient is summed over tensor-parallel
    ranks that have a share of the positions each.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = replicated(config, config.hidden_size, FEATURES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(features, self.weight)


@contextmanager
def marked_models(summed: bool = True, also: tuple[str, ...] = ()) -> Iterator[None]:
    """In this context models of this process are such; unless `summed`, as if the gradient of the
    matrix were whole on each rank. They declare attachments that nothing reads `also`.
    """

    def architecture(fields: Any) -> Any:
        return replace(qwen2.architecture(fields), attachments=("vectors", "tint", *also))

    row = Whole(f"embedding.{WEIGHT}", (WEIGHT,), ("hidden_size", FEATURES))
    family = replace(
        registry.FAMILIES["qwen2"], table=(*qwen2.TABLE, row), architecture=architecture
    )
    build_chunks, build_module = megatron.build_chunks, hugging_face.build_module
    pipeline, engine = megatron.Pipeline, hugging_face.FsdpEngine

    def with_picture(*args: Any) -> Any:
        chunks = build_chunks(*args)
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.picture = Picture(chunk.config)
                chunk.embedding.picture.weight.sequence_parallel &= summed
        return chunks

    def module_with_picture(config: Any, surrounded: bool) -> Any:
        module = build_module(config, surrounded)
        size = module.config.hidden_size
        module.picture = torch.nn.Linear(FEATURES, size, bias=False, device="meta")
        return module

    def of_megatron(*args: Any) -> Any:
        made = pipeline(*args)
        first = made.models[0]
        picture = first.embedding.picture if first.pre_process else None

        def splits() -> bool:
            return bool(first.config.sequence_parallel)

        return replace(made, embedder=Marked(made.embedder, picture, made.groups, False, splits))

    def of_hugging_face(*args: Any) -> Any:
        made = engine(*args)
        picture, region = made.decoder.model.picture, made.head.region

        def splits() -> bool:
            return bool(region.splits_tokens)

        return replace(made, embedder=Marked(made.embedder, picture, made.groups, True, splits))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, "qwen2", family)
        patch.setattr(megatron, "build_chunks", with_picture)
        patch.setattr(megatron, "Pipeline", of_megatron)
        patch.setattr(hugging_face, "build_module", module_with_picture)
        patch.setattr(hugging_face, "FsdpEngine", of_hugging_face)
        yield


def train_marked(config: dict[str, Any], summed: bool = True) -> dict[str, Any]:
    """Two steps, what they leave, and the log-probabilities of the first rows before and after."""
    with marked_models(summed), open_policy(config) as policy:
        keys = ("input_ids", "input_lengths", "vectors", "tint")
        share = own_share(policy, data())
        texts = BatchedDataDict({key: share[key] for key in keys})
        seen: dict[str, Any] = {"dp": policy.coords.dp, "before": policy.logprobs(texts)}
        mbs = GLOBAL_BATCH // policy.topology.dp // 4
        seen["steps"] = [
            policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=mbs)
            for step in own_steps(policy, data())
        ]
        seen["weights"] = {name: tensor.clone() for name, tensor in policy.export()}
        seen["after"] = policy.logprobs(texts)
        return seen


@pytest.fixture(scope="module")
def marked(checkpoint, tmp_path_factory) -> Path:
    """A checkpoint with the matrix in it."""
    folder = tmp_path_factory.mktemp("marked") / "model"
    shutil.copytree(checkpoint("qwen2", tied=True, **SIZES), folder)
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(5)
    weights[WEIGHT] = 0.1 * torch.randn(SIZES["hidden"], FEATURES, generator=random)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def configured(path: Path, name: str) -> dict[str, Any]:
    case, batching = CASES[name]
    return policy_config(path, case.megatron, **BATCHINGS[batching])


@pytest.fixture(scope="module")
def hf(marked) -> oracle.Learned:
    return oracle.Learned.of(marked, data(), GLOBAL_BATCH, hf_loss, load=load_marked)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.daily) if name in DAILY else name for name in CASES],
)
def test_attachments_enter_the_first_layer_as_embeddings_do_in_hf(ranks, marked, hf, name) -> None:
    with torch.no_grad():
        rounded = hf_logprobs(load_marked(marked), data())
        exact_model = load_marked(marked, torch.float64)
        with InDouble():
            before = Exact.between(rounded, hf_logprobs(exact_model, data()))
    after = hf.read(lambda model: hf_logprobs(model, data()))
    seen = ranks.run(CASES[name][0].world, train_marked, configured(marked, name))
    order = BatchedDataDict({"row": torch.arange(data().size)})
    shares = order.shard_by_batch_size(1 + max(rank["dp"] for rank in seen), GLOBAL_BATCH)
    for rank in seen:
        rows = shares[rank["dp"]]["row"]
        inside = torch.arange(1, LENGTH) < data()["input_lengths"][rows].unsqueeze(1)
        for found, exact in (("before", before), ("after", after)):
            assert_equal("logprobs", rank[found][:, 1:][inside], exact[rows][inside], found)
        hf.assert_same_steps(rank["steps"])
        assert rank["weights"].keys() >= {WEIGHT, "model.embed_tokens.weight"}
        hf.assert_same_weights(rank["weights"])


def test_a_partial_gradient_of_the_matrix_would_be_seen(ranks, marked, hf) -> None:
    """Under sequence parallelism, with which each rank sees its own positions."""
    for rank in ranks.run(2, train_marked, configured(marked, "TP2+SP"), False):
        hf.assert_same_loss(rank["steps"][0]["loss"], 0)
        apart = (rank["weights"][WEIGHT].double() - hf.exact.weights[WEIGHT]).abs().max()
        assert apart > 100 * hf.rounding.weights
        check("weights without the sum", hf.rounding.weights, float(apart) / 100)


def leave_attachments_unread(config: dict[str, Any]) -> None:
    unread = r"declares the attachments sound, which what embeds its tokens does not read"
    refused = pytest.raises(ConfigError, match=unread)
    with marked_models(also=("sound",)), refused, open_policy(config):
        pass


@pytest.mark.parametrize("name", ["one process", "FSDP2"])
def test_attachments_that_nothing_would_read_are_refused(ranks, marked, name: str) -> None:
    ranks.run(1, leave_attachments_unread, configured(marked, name))


def continue_marked(config: dict[str, Any]) -> tuple[BatchedDataDict, torch.Tensor, torch.Tensor]:
    """Texts, with log-probabilities as they were written and as they are read."""
    prompts = data().select_indices([0, 1, 2])
    del prompts["token_mask"], prompts["sample_mask"]
    prompts["input_lengths"] = prompts["input_lengths"] // 2
    for row, length in enumerate(prompts["input_lengths"].tolist()):
        prompts["input_ids"][row, length:] = 0
        if (vectors := prompts["vectors"][row]) is not None:
            prompts["vectors"][row] = vectors[: int((prompts["input_ids"][row] == MARK).sum())]
    with marked_models(), open_policy(config, tokenizer=TOKENIZER) as policy:
        done = policy.generate(prompts, greedy=True)
        lengths = done.lengths_B
        texts = BatchedDataDict({**prompts, "input_ids": done.tokens_BT, "input_lengths": lengths})
        return texts, done.logprobs_BT, policy.logprobs(texts)


@pytest.mark.parametrize("name", ["TP2+SP", "PP2xVPP2, recomputed", "FSDP2 CP2"])
def test_rows_with_attachments_are_continued_as_they_are_read(ranks, marked, name: str) -> None:
    config = configured(marked, name) | {"generation": {"max_new_tokens": 4}}
    for texts, written, read in ranks.run(2, continue_marked, config):
        with torch.no_grad():
            rounded = hf_logprobs(load_marked(marked), texts)
            exact_model = load_marked(marked, torch.float64)
            with InDouble():
                exact = Exact.between(rounded, hf_logprobs(exact_model, texts))
        for row, end in enumerate(texts["input_lengths"].tolist()):
            for found in (written, read):
                own = slice(end - 4, end)
                assert_equal("logprobs", found[row, own], exact[row, end - 5 : end - 1], name)
