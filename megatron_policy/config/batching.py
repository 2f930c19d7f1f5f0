"""How a configuration asks for its microbatches."""

from __future__ import annotations

import math

from megatron_policy.config.parallel_sizes import parallel_sizes
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.multiples import Multiples


def batching_of(config: PolicyConfig, training: bool) -> Batching:
    """The batching of `config`, for training or for inference such as log-probabilities.

    ConfigError when a microbatch has fewer tokens than the layout can split.
    """
    name = "train_mb_tokens" if training else "logprob_mb_tokens"
    dynamic, packing = config.dynamic_batching, config.sequence_packing
    multiples = multiples_of(config)
    if dynamic.enabled:
        tokens, rounded = getattr(dynamic, name), dynamic.sequence_length_round
        assert tokens and rounded, "PolicyConfig.parse fills them in"
        round_to = math.lcm(rounded, multiples.row)
        made = Batching(
            *("dynamic", tokens, round_to, None, f"dynamic_batching.{name}", multiples.row),
            patches=config.max_patches_per_microbatch,
        )
    elif packing.enabled:
        tokens, round_to = getattr(packing, name), multiples.sequence
        assert tokens, "PolicyConfig.parse fills it in"
        key = f"sequence_packing.{name}"
        made = Batching(
            *("packed", tokens, round_to, packing.algorithm, key, multiples.row),
            patches=config.max_patches_per_microbatch,
        )
    else:
        return Batching("padded", patches=config.max_patches_per_microbatch)
    if made.tokens < made.row_multiple:
        raise ConfigError(
            f"policy.{made.key}={made.tokens} is less than {made.row_multiple}, the fewest "
            "positions that this layout and make_sequence_length_divisible_by can split: raise "
            "it"
        )
    return made


def multiples_of(config: PolicyConfig) -> Multiples:
    """The multiples to which lengths are rounded up under the configuration's layout."""
    sizes = parallel_sizes(config)
    divisible_by = config.make_sequence_length_divisible_by
    return Multiples.of(divisible_by, sizes.tp, sizes.cp, sizes.sequence_parallel)
