"""Rows that transformers' own processors lay out, with the tokens that they put around pictures,
tiles and rows of them, are read; and refused with a placeholder in another place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Shell
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import inside
from megatron_policy.training.checks import check_batch
from tests.picture_models import BY_ROW, CANVASES, IMAGE, TINY
from tests.unit.test_wrong_grids import make_shell
from tests.vllm.picture_cases import SEEING

SIDE = {"height": 8, "width": 8}
TILED = {"do_image_splitting": True, "size": {"longest_edge": 16}}
CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 4,
    "pan_and_scan_max_num_crops": 2,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_seq_length": 16, "image": CROPS | {"size": SIDE}},
    "idefics3": {"image": TILED},
    "internvl": {"image": {"crop_to_patches": True, "min_patches": 1, "max_patches": 4}},
    "llava": {},
    "llava_next": {"image": {"image_grid_pinpoints": CANVASES}},
    "llava_onevision": {
        "image": {"image_grid_pinpoints": CANVASES},
        "vision_aspect_ratio": TINY["llava_onevision"]["vision_aspect_ratio"],
    },
    "mistral3": {},
    "smolvlm": {"image": TILED},
}
"""What processors have other than in `SEEING`, by their families."""
MARKS = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SIZES = [[(8, 12)], [(16, 8), (8, 12)], [(8, 8), (20, 8), (8, 16)]]


def make_processor(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A processor without the part that reads videos, which needs torchvision."""
    seeing, more = SEEING[family], dict(PARTS[family])
    parts = {key: value for key, value in seeing.parts.items() if key != "processor_class"}
    image = parts.pop("image_processor") | more.pop("image", {})
    vision = ModuleType("torchvision.transforms.v2")
    vision.functional = None  # type: ignore[attr-defined]
    if find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.transforms", vision.__name__):
            monkeypatch.setitem(sys.modules, name, vision)
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    kind = family.replace("mistral3", "pixtral")
    module = import_module(f"transformers.models.{kind}.processing_{kind}")
    monkeypatch.setattr(module, "num2words", str, raising=False)  # of SmolVLM's videos
    parts |= dict.fromkeys(parts.keys() & {"video_processor"}) | more
    reader = getattr(transformers, image.pop("image_processor_type") + "Pil")(**image)
    words = [*(seeing.words.get(number, f"w{number}") for number in range(128)), *MARKS]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([*seeing.words.values(), *MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        extra_special_tokens={name: words[number] for name, number in seeing.named.items()},
        **{name: words[n] for n, name in enumerate(("unk_token", "bos_token", "eos_token"))},
        pad_token=words[2],
    )
    make = getattr(module, seeing.parts["processor_class"])
    return make(image_processor=reader, tokenizer=tokenizer, **parts)


def lay_out(processor: Any, family: str, sizes: list[tuple[int, int]], between: str) -> Any:
    """A row as the processor gives it."""
    random, seeing = np.random.default_rng(7), SEEING[family]
    pictures = [random.integers(1, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    shown = " ".join(seeing.words[token] for token in seeing.picture)
    text = f"w3 w4 {between.join([shown] * len(sizes))} w5 w6 w7"
    asked = {"return_tensors": "pt", "return_mm_token_type_ids": True}
    found = {**processor(text=[text], images=[pictures], **asked)}
    media = {
        key: [found.pop(key)[0] if family in BY_ROW else found.pop(key)]
        for key in ("pixel_values", "image_sizes", "batch_num_images", "pixel_attention_mask")
        if key in found
    }
    return BatchedDataDict({**media, **found})


def read(rows: BatchedDataDict, shell: Shell) -> None:
    checked = check_batch(rows, 256, shell.attachments, shell)
    taken = shell.find_types(checked, inside(checked)) == 1
    assert torch.equal(taken, checked["input_ids"] == IMAGE), "all placeholders are of pictures"


def misplace(ids_S: torch.Tensor) -> Iterator[torch.Tensor]:
    """The last placeholder behind a word, and one that is taken from the first picture put into the
    second one, if there are two.
    """
    at = (ids_S == IMAGE).nonzero().flatten()
    for one, other in ((at[-1], len(ids_S) - 2), *((a, b - 1) for a, b in pairwise(at))):
        moved = ids_S.clone()
        moved[one], moved[other] = ids_S[other], ids_S[one]
        if other > one and not torch.equal(moved, ids_S):
            yield moved


@pytest.mark.parametrize("family", PARTS)
def test_what_a_processor_lays_out_is_read_and_nothing_else(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, processor = make_shell(family, tmp_path), make_processor(family, monkeypatch)
    for sizes in SIZES:
        for between in (" w8 w9 ", " w8 ", " "):
            rows = lay_out(processor, family, sizes, between)
            read(rows, shell)
            found = rows["input_ids"]
            types = {key: rows.pop(key) for key in [*rows] if key.endswith("token_type_ids")}
            assert types, "the processor says of which token is what"
            for moved in misplace(found[0]):
                with pytest.raises(BatchError, match="row 0 has tokens 120 in groups of"):
                    check_batch(rows | {"input_ids": moved[None]}, 256, shell.attachments, shell)
