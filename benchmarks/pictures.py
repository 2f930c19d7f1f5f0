"""A training step with pictures relative to a plain loop over transformers' own model (row
29): one picture of 256 patches in each row.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.recurrent import COMMON, over_plain_loop
from benchmarks.results import Measurement

_TEXT = {name: value for name, value in COMMON.items() if name != "torch_dtype"}
SEEING = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "image_token_id": 8188,
    "video_token_id": 8189,
    "vision_start_token_id": 8190,
    "vision_end_token_id": 8191,
    "text_config": _TEXT
    | {
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 4,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_heads": 4,
        "out_hidden_size": 512,
        "patch_size": 16,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
    },
}


def pictures_over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of `MegatronPolicy.train` relative to the loop's, alternating in one process."""
    return over_plain_loop(folder / "pictures", SEEING, repetitions)
