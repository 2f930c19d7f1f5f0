"""Who samples the answers of GRPO: the policy itself, or a vLLM that follows it.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from megatron_policy import BatchedDataDict, ConfigError, Policy
from megatron_policy.inference.vllm.process import EngineProcess
from megatron_policy.refit.transports.ipc.transport import IpcStream

from .codec import Codec
from .settings import Lengths

CHECKOUT = Path(__file__).resolve().parents[2]


class Rollouts(Protocol):
    """Samples with the weights that it was given last."""

    def generate(self, prompts: BatchedDataDict) -> BatchedDataDict:
        """One answer to each prompt, `[B, S]`, as `Policy.generate` returns them: tokens under
        `output_ids`, log-probabilities of the new ones, and lengths.
        """

    def follow(self) -> None:
        """Take the policy's weights, after each step."""


class OwnRollouts:
    """The policy samples for itself."""

    def __init__(self, policy: Policy) -> None:
        self.generate = policy.generate

    def follow(self) -> None:
        """Nothing to do: it has the weights."""


class VllmRollouts:
    """A vLLM on the same machine, which receives all weights through shared memory."""

    def __init__(
        self,
        policy: Policy,
        engine: EngineProcess,
        tokenizer: PreTrainedTokenizerBase,
        folder: str,
        longest: int,
    ) -> None:
        """`longest` is the most tokens that an answer gets; `folder` is for a socket."""
        self._policy, self._engine, self._longest = policy, engine, longest
        self._tokenizer = tokenizer
        self._address = f"ipc://{folder}/refit.sock"
        engine.prepare(policy.prepare_refit_info())

    def follow(self) -> None:
        self._engine.begin("receive_stream", addresses=self._address)
        try:
            self._policy.refit(IpcStream(self._address))
        finally:
            self._engine.result()

    def generate(self, prompts: BatchedDataDict) -> BatchedDataDict:
        lengths = prompts["input_lengths"].tolist()
        rows = [row[:n] for row, n in zip(prompts["input_ids"].tolist(), lengths, strict=True)]
        stop = [self._tokenizer.eos_token_id]
        found = self._engine.sample(
            rows, temperature=1.0, max_tokens=self._longest, stop_token_ids=stop
        )
        ends = [n + len(tokens) for n, (tokens, _) in zip(lengths, found, strict=True)]
        output_BS = torch.full((len(rows), max(ends)), self._tokenizer.pad_token_id)
        logprobs_BS = torch.zeros(output_BS.shape)
        for row, (prompt, (tokens, logprobs)) in enumerate(zip(rows, found, strict=True)):
            output_BS[row, : ends[row]] = torch.tensor(prompt + tokens)
            logprobs_BS[row, len(prompt) : ends[row]] = torch.tensor(logprobs)
        return BatchedDataDict(
            output_ids=output_BS,
            logprobs=logprobs_BS,
            unpadded_sequence_lengths=torch.tensor(ends),
        )


@contextmanager
def vllm_rollouts(
    policy: Policy, model: str, codec: Codec, lengths: Lengths, rows: int, log: Path
) -> Iterator[VllmRollouts]:
    """A vLLM that starts from the checkpoint `model`, for `rows` answers at a time; `log` gets what
    it prints.
    """
    longest = lengths.answer + 1
    engine = EngineProcess(
        model,
        find_vllm(),
        log,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=rows,
        max_model_len=lengths.prompt + longest,
        skip_tokenizer_init=True,
    )
    with engine, tempfile.TemporaryDirectory(prefix="rollouts-") as folder:
        yield VllmRollouts(policy, engine, codec.tokenizer, folder, longest)


def find_vllm() -> Path:
    """The interpreter of vLLM's environment: VLLM_PYTHON, or that of `make vllm-env`. ConfigError
    without one.
    """
    path = Path(os.environ.get("VLLM_PYTHON", CHECKOUT / ".venv-vllm" / "bin" / "python"))
    if not path.exists():
        raise ConfigError(
            f"there is no {path}: run `make vllm-env` for vLLM's CPU build, or set VLLM_PYTHON to "
            "the interpreter of an environment that has vLLM"
        )
    return path
