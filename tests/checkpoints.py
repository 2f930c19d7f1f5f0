"""Tiny random Hugging Face checkpoints of the real architectures, with nothing in them trivial."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn
from unittest import SkipTest

import torch
from packaging.version import Version
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    __version__,
)
from transformers.core_model_loading import revert_weight_conversion

from tests.families import SAMPLES

IS_OLDER = Version(__version__) < Version("5.23")
"""Whether transformers is older than the pinned release."""
SPECIAL = ("<unk>", "<pad>", "<s>", "</s>")
TEXT = Path(__file__).resolve().parent.parent / "LICENSE"

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_checkpoint(
    path: Path | str,
    family: str,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    groups: int = 2,
    head_dim: int | None = None,
    ffn: int = 128,
    vocab: int = 256,
    max_position: int = 512,
    tied: bool = False,
    dtype: torch.dtype | str = torch.float32,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    window: int | None = None,
    full_layers: int = 0,
    max_shard_size: str | int | None = None,
    tokenizer: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a checkpoint of `family` (weights, config, tokenizer) and return its path.

    `window` is the sliding window in tokens, on the layers that have one in the family; of the qwen
    families, the first `full_layers` layers do without it. `max_shard_size` ("40KB" or bytes)
    splits the weights over files with an index.
    Further keywords go to the family's config as they are (`attention_bias=True`, ...).
    The same arguments give the same bytes.
    """
    assert family in SAMPLES, f"no samples of {family!r} in tests/families, only {list(SAMPLES)}"
    samples = SAMPLES[family]
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tied,
        "rope_theta": rope_theta,
        samples.epsilon: 1e-6,
        # Large enough that attention is far from uniform and the layers matter.
        "initializer_range": 0.1,
        # With a padding token torch's embedding would keep that row from learning.
        "pad_token_id": None,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
    }
    if head_dim is not None or samples.head_dim:
        fields["head_dim"] = head_dim or hidden // heads
    if rope_scaling is not None:
        fields["rope_scaling"] = dict(rope_scaling)
    fields |= samples.tiny | samples.take_turns(layers)
    if samples.windows is not None:
        fields |= samples.windows(layers, window, full_layers)
    else:
        assert window is None, f"{family} has no sliding window"
    fields |= config
    model = _random_model(family, samples.surround(fields), seed).to(_dtype(dtype))
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    save_as_published(model, path, **sharding)
    if samples.own:
        file = Path(path) / "config.json"
        written = json.loads(file.read_text()) | samples.own
        written |= {"model_type": family, "architectures": [samples.architecture]}
        file.write_text(json.dumps(written, indent=2))
    if tokenizer:
        make_tokenizer(vocab).save_pretrained(path)
    return Path(path)


def save_as_published(model: Any, path: Path | str, **sharding: Any) -> None:
    """Write a model of transformers under the names that its makers publish."""
    samples = SAMPLES.get(model.config.model_type)
    if samples is not None and samples.publish is not None:
        tensors = revert_weight_conversion(model, model.state_dict())
        tensors = samples.publish(model.config, tensors)
        sharding |= {"state_dict": tensors, "save_original_format": False}
    model.save_pretrained(path, **sharding)


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """All that a checkpoint of the model has; there, experts can be one by one."""
    with tempfile.TemporaryDirectory() as folder:
        save_as_published(model, folder)
        return load_file(Path(folder, "model.safetensors"))


def hf_config(path: Path | str) -> Any:
    """The checkpoint's config as transformers' own class of its model has it."""
    fields = json.loads((Path(path) / "config.json").read_text())
    samples = SAMPLES.get(fields["model_type"])
    if samples is not None and samples.own:
        fields = {name: value for name, value in fields.items() if name not in samples.own}
        return AutoConfig.for_model(**fields | {"model_type": samples.hf_model_type})
    return AutoConfig.from_pretrained(path)


def class_of_model(config: Any) -> Any:
    """transformers' automatic class of models with such a config."""
    return AutoModelForImageTextToText if "vision_config" in vars(config) else AutoModelForCausalLM


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer of at most `vocab` tokens, trained on this project's licence."""
    assert vocab >= 128, f"{vocab} tokens are too few for the letters of a text"
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    inner.decoder = ByteLevelDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), show_progress=False
    )
    inner.train_from_iterator(TEXT.read_text(encoding="utf-8").splitlines(), trainer)
    unk, pad, bos, eos = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token=unk, pad_token=pad, bos_token=bos, eos_token=eos
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) <= vocab
    return tokenizer


def skip_under_older(why: str) -> NoReturn:
    """Skip the test under a release of transformers before the pinned one, which has every class
    that is tested; under others it fails.
    """
    assert IS_OLDER, f"transformers {__version__}: {why}"
    raise SkipTest(f"transformers {__version__}: {why}")


def config_of(kind: str, **fields: Any) -> Any:
    """The config of transformers' class; skips the test where this release has none."""
    if kind not in CONFIG_MAPPING:
        skip_under_older(f"it has no {kind}")
    return AutoConfig.for_model(kind, **fields)


def check_decoder(model: Any) -> None:
    """Skip the test where the decoder of a model that sees is no part of it."""
    parts = {part for name, _ in model.named_modules() for part in name.split(".")}
    if hasattr(model.config, "vision_config") and parts.isdisjoint(
        ("language_model", "text_model")
    ):
        skip_under_older(f"its {model.config.model_type} has no module that is the decoder")


def _random_model(family: str, fields: dict[str, Any], seed: int) -> Any:
    ranges = {"norm": (0.5, 1.5)} | SAMPLES[family].ranges
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = config_of(SAMPLES[family].hf_model_type or family, **fields)
        model = class_of_model(config).from_config(config, dtype=torch.float32)
        check_decoder(model)
        with torch.no_grad():
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                if not parameter.is_floating_point():
                    continue
                unset = name.endswith("gate.weight") and not parameter.any()
                if unset or name.endswith("bias"):  # transformers 5.17 leaves routers at zero
                    parameter.normal_(0.0, 0.1)
                for part, between in ranges.items():
                    if name.endswith(part) or (part in name and not name.endswith("bias")):
                        parameter.uniform_(*between)
    return model


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
