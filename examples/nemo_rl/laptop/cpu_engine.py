"""An inference engine without a GPU, in the place of NeMo RL's worker for vLLM.

transformers computes, each token anew from the whole text: for tiny models. What matters here is
the rest: NeMo RL's own driver starts, calls and refits it like vLLM.

Shapes: B rows, T positions, V tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from megatron_policy.hosts.nemo_rl.refit import cpu_address
from megatron_policy.refit.receive.receiver import Receiver


class Engine:
    """Under the names by which NeMo RL calls vLLM's worker, without `async_engine`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is `policy.generation`; ValueError for what is not sampled here."""
        if config["top_k"] not in (None, -1) or config["top_p"] != 1.0:
            raise ValueError("generation.top_k and top_p are not for this engine: leave them out")
        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(config["model_name"]).eval()
        self._weights = self._model.state_dict()
        self._receiver = Receiver(self._load)
        self._random = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._weights[name].copy_(tensor)

    # -- refits ----------------------------------------------------------------------------------

    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> None:
        """The names, shapes and dtypes of the weights to come."""
        self._receiver = Receiver(self._load, expected=state_dict_info)

    def update_weights_via_ipc_zmq(self) -> bool:
        """Take the weights of the training worker beside this one."""
        self._receiver.receive_ipc_stream(cpu_address())
        return True

    # -- generation ------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> Any:
        """Continue each prompt, as `GenerationOutputSpec` has it."""
        count, filler = self._config["max_new_tokens"], self._config["_pad_token_id"]
        prompts_B = data["input_lengths"].long()
        lengths_B, running_B = prompts_B.clone(), torch.ones_like(prompts_B, dtype=torch.bool)
        ids_BT = pad(data["input_ids"], (0, count), value=filler)
        logprobs_BT = torch.zeros(ids_BT.shape)
        rows = torch.arange(len(ids_BT))
        for _ in range(count):
            if not running_B.any():
                break
            tokens_B, scores_B = self._next(ids_BT, lengths_B, greedy)
            ids_BT[rows[running_B], lengths_B[running_B]] = tokens_B[running_B]
            logprobs_BT[rows[running_B], lengths_B[running_B]] = scores_B[running_B]
            lengths_B = lengths_B + running_B
            running_B = running_B & ~torch.isin(tokens_B, self._stops())
        return BatchedDataDict(
            {
                "output_ids": ids_BT,
                "logprobs": logprobs_BT,
                "generation_lengths": lengths_B - prompts_B,
                "unpadded_sequence_lengths": lengths_B,
                "truncated": running_B,
            }
        )

    def _next(
        self, ids_BT: torch.Tensor, lengths_B: torch.Tensor, greedy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row, and its log-probability."""
        inside_BT = torch.arange(ids_BT.size(1)) < lengths_B.unsqueeze(-1)
        logits_BTV = self._model(input_ids=ids_BT, attention_mask=inside_BT.long()).logits
        last_BV = logits_BTV[torch.arange(len(ids_BT)), lengths_B - 1].float()
        scores_BV = (last_BV / self._config["temperature"]).log_softmax(-1)
        drawn_B1 = torch.multinomial(scores_BV.exp(), 1, generator=self._random)
        chosen_B1 = scores_BV.argmax(-1, keepdim=True) if greedy else drawn_B1
        return chosen_B1.squeeze(-1), scores_BV.gather(-1, chosen_B1).squeeze(-1)

    def _stops(self) -> torch.Tensor:
        return torch.tensor(self._config["stop_token_ids"] or [], dtype=torch.long)

    # -- what takes effect on GPUs only ----------------------------------------------------------

    def post_init(self) -> None:
        """Do nothing."""

    def report_device_id(self) -> list[str]:
        """Where this engine is."""
        return [cpu_address()]

    def wake_up(self, **kwargs: Any) -> None:
        """Do nothing: the weights have stayed."""

    def sleep(self) -> None:
        """Do nothing."""

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    def _get_raw_spec_counters(self) -> dict[str, float]:
        return {}

    def start_gpu_profiling(self) -> None:
        """Do nothing."""

    def stop_gpu_profiling(self) -> None:
        """Do nothing."""

    def shutdown(self) -> bool:
        """Do nothing: the process ends."""
        return True


@ray.remote
class CpuEngine(Engine):
    """`Engine` as an actor."""
