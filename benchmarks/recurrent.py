"""Layers that hand on a state: training steps relative to a plain loop over transformers' own
(rows 26 and 27), and how what a scan holds grows with its tokens (row 28).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_model
from benchmarks.processes import run_fresh, run_ranks
from benchmarks.results import Measurement, ratio_of_minima

COMMON = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
DELTA_NETS = COMMON | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mlp_only_layers": [0, 1, 2, 3],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MAMBA2 = COMMON | {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "layers_block_type": ["linear_attention", "mlp"] * 3 + ["full_attention", "mlp"],
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 4,
    "ssm_state_size": 64,
    # transformers clamps steps to it, the makers' code and this package do not.
    "time_step_min": 1e-30,
}
SCANS = ("delta rule", "state space")
FEW, MANY = 4096, 32768
"""Tokens of a scan."""
TOLERANCE = 1e-5
"""Relative: the same sums in fp32, in other pieces."""


def delta_nets_over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds of `MegatronPolicy.train` relative to the loop's, alternating in one process:
    three layers of gated delta nets and one of gated attention.
    """
    return over_plain_loop(folder / "delta nets", DELTA_NETS, repetitions)


def mamba2_over_plain_loop(folder: Path, repetitions: int) -> Measurement:
    """The same with three layers of Mamba2, one of attention and four MLPs."""
    return over_plain_loop(folder / "Mamba2", MAMBA2, repetitions)


def over_plain_loop(path: Path, config: Mapping[str, Any], repetitions: int) -> Measurement:
    """The same of a model with any config."""
    arguments = ("megatron", write_model(path, config), str(2 * repetitions))
    (result,) = run_ranks(1, "benchmarks.transformers_steps", *arguments, limit_s=1200.0)
    seconds = {name: tuple(result[name]) for name in ("plain loop", "ours")}
    ratio = ratio_of_minima(seconds["ours"], seconds["plain loop"])
    return Measurement(ratio, seconds, result["verified"])


def growth_of_memory(folder: Path, repetitions: int) -> Measurement:
    """What a scan with its backward pass holds beyond what it is given and gives, of eight times
    the tokens relative to the same of fewer; the worse of two scans.
    """
    ratios, seconds = {}, {}
    for scan in SCANS:
        few, many = (
            [run_fresh("benchmarks.scan_once", scan, str(tokens)) for _ in range(repetitions)]
            for tokens in (FEW, MANY)
        )
        for one, other in zip(few[0]["first"], many[0]["first"], strict=True):
            if abs(one - other) > TOLERANCE * max(map(abs, few[0]["first"])):
                raise RuntimeError(f"{scan}: later tokens changed what earlier ones give")
        peaks = [min(run["held_bytes"] for run in runs) for runs in (few, many)]
        ratios[f"{scan}, MiB of {FEW} tokens"] = round(peaks[0] / 2**20, 1)
        ratios[scan] = round(peaks[1] / peaks[0], 4)
        for tokens, runs in ((FEW, few), (MANY, many)):
            seconds[f"{scan}, {tokens} tokens"] = tuple(run["cpu_s"] for run in runs)
    verified = f"outputs of the first tokens are equal within {TOLERANCE:g}"
    return Measurement(max(ratios[scan] for scan in SCANS), seconds, verified, ratios)
