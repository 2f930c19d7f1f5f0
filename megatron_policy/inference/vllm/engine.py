"""One vLLM `LLM` that follows a policy, for the process that owns it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_policy.inference.vllm.answers import (
    look_for_version,
    read_answers,
    read_progress,
    read_state,
    read_step,
)
from megatron_policy.inference.vllm.receipt import OVER, READY, make_pauses
from megatron_policy.inference.vllm.worker import ADAPTERS, make_plain
from megatron_policy.refit.manifest import RefitManifest
from megatron_policy.refit.transports.ipc.protocol import encode_handles

EXTENSION = "megatron_policy.inference.vllm.worker.RefitExtension"
"""What vLLM's option `worker_extension_cls` has to be."""


def scoring_params() -> Any:
    """vLLM's `SamplingParams` of a row that is to be scored."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, prompt_logprobs=0)


Prompt = Sequence[int] | Mapping[str, Any]
"""Tokens, or one of vLLM's own prompts: `prompt_token_ids` with one placeholder for each picture,
and `multi_modal_data` with the pictures.
"""


def make_prompt(prompt: Prompt) -> Mapping[str, Any]:
    """vLLM's own form of a prompt."""
    return prompt if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}


def read_scores(output: Any) -> list[float]:
    """The log-probability of each token of a row but the first, in vLLM's output for it."""
    found = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [of_position[token].logprob for token, of_position in found]


class VllmEngine:
    """Calls the workers of an `LLM` together, and samples and scores with it.

    All methods that receive return the trainer's step, and raise RefitError, as the trainer does,
    if the refit is refused. Requests that the `LLM` has begun go on afterwards: what they have
    generated stays, and is read again with the new weights. With `staged` none of the workers loads
    before all have received, and checked, weights of the same step.
    """

    def __init__(self, llm: Any) -> None:
        """`llm` was made with `worker_extension_cls=EXTENSION`."""
        self.llm = llm
        self._adapters: Any = None  # vLLM's request for them, while the engine has any

    def prepare(
        self,
        info: Mapping[str, Sequence[Any]],
        timeout_s: float = 120.0,
        staged: bool = False,
    ) -> None:
        """Prepare for what will be sent; see `RefitExtension.refit_prepare`. `info` is what the
        trainer's `prepare_refit_info` has returned.
        """
        self._call("refit_prepare", make_plain(info), timeout_s, staged)

    def join(self, *arguments: Any, **named: Any) -> None:
        """Let all workers join a group with the trainer, with the arguments of
        `RefitExtension.refit_join`.
        """
        self._call("refit_join", *arguments, **named)

    def receive_stream(self, addresses: str | Sequence[str] | Mapping[str, str]) -> int:
        """One refit over sockets; see `RefitExtension.refit_from_stream`."""
        return self._receive("refit_from_stream", addresses)

    def receive_group(self) -> int:
        """One refit over the group."""
        return self._receive("refit_from_group")

    def receive_directory(self, path: str) -> int:
        """One refit from a directory that the trainer has published."""
        return self._receive("refit_from_directory", path)

    def receive_deltas(self, path: str, *, wait: bool = False) -> int:
        """What a trainer has published in a `DeltaDirectory` since the last call; the engine was
        prepared with `staged`. All workers take the version that is the newest for the first. If
        there is nothing new, `wait` for it: RefitError if nothing comes in the `timeout_s` seconds
        of `prepare`.
        """
        if wait:
            held = self.llm.collective_rpc("refit_held_version")
            for pause_s in look_for_version(held, path):
                time.sleep(pause_s)
        found, *_ = read_answers(self.llm.collective_rpc("refit_find_deltas", args=(path,)))
        return self._receive("refit_from_deltas", path, found)

    def receive_handles(self, handles: Mapping[str, Any]) -> None:
        """Some weights of a refit: what the trainer's `get_weights_ipc_handles` has returned. See
        `RefitExtension.refit_from_handles`; `finish_handles` or `drop_handles` is to follow.
        """
        self._call("refit_from_handles", encode_handles(handles))

    def finish_handles(self, manifest: RefitManifest) -> int:
        """End a refit by `receive_handles`."""
        return self._load("refit_finish_handles", manifest.encode().decode())

    def drop_handles(self) -> None:
        """Give up a refit by `receive_handles`, which the trainer will not end."""
        try:
            self._call("refit_drop_handles")
        finally:
            self.forget_cached()

    def receive_adapters(self, path: str) -> int:
        """One refit of adapters alone, from the directory of a `PeftDirectory`; see
        `RefitExtension.refit_from_adapters`. What follows is computed with them, until whole
        weights are received.
        """
        from vllm.lora.request import LoRARequest

        step = self._load("refit_from_adapters", path)
        self._adapters = LoRARequest("policy", ADAPTERS, path)
        return step

    def state(self) -> tuple[int | None, bool]:
        """The step of the weights of all workers, and whether they are mixed; see `read_state`."""
        return read_state(self.llm.collective_rpc("refit_state"))

    def forget_cached(self) -> None:
        """Let nothing be read that was computed with the weights before."""
        self.llm.reset_prefix_cache(reset_running_requests=True)
        engine = self.llm.llm_engine
        if engine.model_config.is_multimodal_model:
            engine.reset_encoder_cache()

    def mark_mixed(self) -> None:
        """Mark the weights of all workers as not to be used, until the next complete refit."""
        self._call("refit_mark_mixed")

    def logprobs(self, rows: Sequence[Prompt]) -> list[list[float]]:
        """Log-probability in fp32 of each token but the first of its row, given those before; by
        vLLM's `prompt_logprobs`, which are those of the model itself: no temperature, no filters.
        A row with pictures has the tokens that vLLM makes of them too.
        """
        return [read_scores(output) for output in self._generate(rows, scoring_params())]

    def generate(self, prompts: Sequence[Prompt], **sampling: Any) -> list[Any]:
        """One completion of each prompt, as vLLM's `CompletionOutput` with `token_ids` and
        `logprobs`; `sampling` are fields of `SamplingParams`.
        """
        from vllm import SamplingParams

        params = SamplingParams(**{"logprobs": 0, "detokenize": False} | sampling)
        return [output.outputs[0] for output in self._generate(prompts, params)]

    def _generate(self, prompts: Sequence[Prompt], params: Any) -> list[Any]:
        inputs = [make_prompt(prompt) for prompt in prompts]
        outputs: list[Any] = self.llm.generate(
            inputs, params, use_tqdm=False, lora_request=self._adapters
        )
        return outputs

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        read_answers(self.llm.collective_rpc(method, args=arguments, kwargs=named))

    def _receive(self, method: str, *arguments: Any) -> int:
        try:
            begun = self.llm.collective_rpc("refit_begin", args=(method, arguments))
            if not all(read_answers(begun)):
                return self._load(method, *arguments)
            self._wait_for_arrival()
        except BaseException as error:
            self._call("refit_give_up", f"vLLM's owner gave up: {error}")
            raise
        return self._load("refit_switch")

    def _wait_for_arrival(self) -> None:
        """Wait until all workers have received what was begun."""
        for pause in make_pauses():
            answers = self.llm.collective_rpc("refit_progress")
            state, why = read_progress(answers)
            if why and state != OVER:
                self._call("refit_give_up", why)  # and hear of all that have not ended
            elif state in (READY, OVER):
                read_answers(answers)
                return
            time.sleep(pause)

    def _load(self, method: str, *arguments: Any) -> int:
        try:
            step = read_step(self.llm.collective_rpc(method, args=arguments))
        finally:
            self.forget_cached()  # also if it failed: some can have been loaded
        self._adapters = None
        return step
