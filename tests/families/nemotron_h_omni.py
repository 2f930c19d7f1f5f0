from functools import partial
from typing import Any

from tests.families import nemotron_h
from tests.samples import RECURRENT, Fields, Samples, enclose

VISION: Fields = {
    "model_type": "radio",
    "hidden_size": 16,
    "initializer_range": 0.1,
    "max_img_size": 16,
    "mlp_ratio": 1.5,
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_cls_tokens": 2,
    "num_hidden_layers": 2,
    "num_registers": 3,
    "patch_size": 2,
    "video_temporal_patch_size": 2,
}
AUDIO: Fields = {
    "attention_bias": False,
    "conv_kernel_size": 3,
    "hidden_size": 12,
    "initializer_range": 0.1,
    "intermediate_size": 20,
    "layerdrop": 0.0,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_mel_bins": 8,
    "projection_bias": False,
    "projection_hidden_size": 20,
    "scale_input": False,
    "subsampling_conv_channels": 4,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
    "subsampling_factor": 8,
}
WIDTHS: Fields = {
    "downsample_ratio": 0.5,
    "projector_hidden_size": 24,
    "video_pruning_rate": 0.0,
    "video_temporal_patch_size": 2,
    "vision_hidden_size": VISION["hidden_size"],
}
TOWER = {
    "vision_config": {
        "model_type": "radio",
        "num_channels": 3,
        "num_hidden_layers": 32,
        "patch_size": 16,
        "video_temporal_patch_size": 2,
    },
    "audio_config": AUDIO
    | {
        "conv_kernel_size": 9,
        "convolution_bias": False,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_mel_bins": 128,
        "projection_hidden_size": 4096,
        "subsampling_conv_channels": 256,
    },
    "projector_hidden_size": 20480,
    "video_pruning_rate": 0.7,
    "vision_hidden_size": 1280,
}
NOT_WEIGHTS = ("num_batches_tracked", "summary_idxs")
"""What transformers writes beside the weights."""


def publish(config: Any, tensors: Fields) -> Fields:
    """No numbers that are not weights: an export that is not of a whole directory leaves them."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(NOT_WEIGHTS)}


SAMPLES = Samples(
    architecture="NemotronH_Omni_Reasoning_V3",
    surround=partial(
        enclose,
        decoder="nemotron_h",
        vision=VISION,
        audio_config=AUDIO,
        image_token_id=0,
        audio_token_id=10**6,
        **WIDTHS,
    ),
    publish=publish,
    epsilon="layer_norm_epsilon",
    head_dim=True,
    untied=True,
    experts=True,
    tiny=nemotron_h.PARTS,
    turns=nemotron_h.SAMPLES.turns,
    ranges=RECURRENT
    | {"embedding": (-0.2, 0.2), "cls_register_token": (-0.2, 0.2), "lambda1": (0.5, 1.5)}
    | {"running_var": (0.5, 1.5), "bias_": (-0.2, 0.2)},
    draw=nemotron_h.draw,
    trained=(),
    shared=False,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {},
            {
                "attachments": (
                    *("pixel_values", "image_grid_hw", "pixel_values_videos"),
                    *("input_features", "input_features_mask"),
                ),
                "moe": nemotron_h.EXPERTS,
                "mamba2": nemotron_h.MAMBA,
                "tied": False,
            },
        ),
        (
            {"audio_config": None},
            {"attachments": ("pixel_values", "image_grid_hw", "pixel_values_videos")},
        ),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"downsample_ratio": 0.25}, "downsample_ratio = 0.25: its class counts tokens so"),
        ({"image_token_id": None}, "config.json has no image_token_id, which"),
        (
            {"audio_config": AUDIO | {"subsampling_conv_kernel_size": 5}},
            "audio_config.subsampling_conv_kernel_size = 5: frames are counted with 3",
        ),
        (
            {"audio_config": AUDIO | {"subsampling_conv_stride": 3, "num_mel_bins": 27}},
            "audio_config.subsampling_conv_stride = 3: frames are counted with 2",
        ),
    ),
    published={
        "Nemotron-3-Nano-Omni-30B-A3B-Reasoning": nemotron_h.SAMPLES.published[
            "Nemotron-3-Nano-30B-A3B"
        ]
        | TOWER
        | {"image_token_id": 18, "audio_token_id": 27, "parameters": 33_015_680_832},
    },
)
