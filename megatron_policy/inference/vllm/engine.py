"""One vLLM `LLM` that follows a policy, for the process that owns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_policy.errors import RefitError
from megatron_policy.inference.vllm.worker import make_plain

EXTENSION = "megatron_policy.inference.vllm.worker.RefitExtension"
"""What vLLM's option `worker_extension_cls` has to be."""


class VllmEngine:
    """Calls the workers of an `LLM` together, and samples and scores with it."""

    def __init__(self, llm: Any) -> None:
        """`llm` was made with `worker_extension_cls=EXTENSION`."""
        self.llm = llm

    def prepare(
        self,
        info: Mapping[str, Sequence[Any]],
        timeout_s: float = 120.0,
        staged: bool = False,
    ) -> None:
        """Prepare for what will be sent; see `RefitExtension.refit_prepare`. `info` is what the
        trainer's `prepare_refit_info` has returned.
        """
        self.llm.collective_rpc("refit_prepare", args=(make_plain(info), timeout_s, staged))

    def join(
        self,
        rank: int,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        secret: str | None = None,
    ) -> None:
        """Let all workers join a group with the trainer; see `RefitExtension.refit_join`."""
        arguments = (rank, ip, port, world_size, train_world_size, secret)
        self.llm.collective_rpc("refit_join", args=arguments)

    def receive_stream(self, addresses: str | Sequence[str] | Mapping[str, str]) -> int:
        """One refit over sockets; returns the trainer's step, as all refits do. See
        `RefitExtension.refit_from_stream`.
        """
        return self._receive("refit_from_stream", addresses)

    def receive_group(self) -> int:
        """One refit over the group."""
        return self._receive("refit_from_group")

    def receive_directory(self, path: str) -> int:
        """One refit from a directory that the trainer has published."""
        return self._receive("refit_from_directory", path)

    def state(self) -> tuple[int | None, bool]:
        """The step of the weights of all workers, and whether they are mixed: within one worker, or
        from worker to worker. The step is None before the first refit, and where workers differ.
        """
        states = self.llm.collective_rpc("refit_state")
        steps = {step for step, _ in states}
        alike = len(steps) == 1
        return steps.pop() if alike else None, not alike or any(mixed for _, mixed in states)

    def mark_mixed(self) -> None:
        """Mark the weights of all workers as not to be used, until the next complete refit."""
        self.llm.collective_rpc("refit_mark_mixed")

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability in fp32 of each token but the first of its row, given those before; by
        vLLM's `prompt_logprobs`, which are those of the model itself: no temperature, no filters.
        """
        from vllm import SamplingParams

        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
        outputs = self._generate(rows, scoring)
        return [
            [
                found[token].logprob
                for token, found in zip(row[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for row, output in zip(rows, outputs, strict=True)
        ]

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
        """One completion of each prompt, as vLLM's `CompletionOutput` with `token_ids` and
        `logprobs`; `sampling` are fields of `SamplingParams`.
        """
        from vllm import SamplingParams

        params = SamplingParams(**{"logprobs": 0, "detokenize": False} | sampling)
        return [output.outputs[0] for output in self._generate(prompts, params)]

    def _generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs: list[Any] = self.llm.generate(inputs, params, use_tqdm=False)
        return outputs

    def _receive(self, method: str, *arguments: Any) -> int:
        try:
            steps: set[int] = set(self.llm.collective_rpc(method, args=arguments))
        finally:
            # It was computed with the old weights; a refit that failed can have loaded some.
            self.llm.reset_prefix_cache()
        if len(steps) > 1:
            raise RefitError(f"vLLM's workers have accepted weights of several steps: {steps}")
        return steps.pop()
