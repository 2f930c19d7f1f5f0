"""The engine: a transformers model in its own process, which receives weights and generates.

From this project it imports only the receiver, nothing of training, Megatron-Core or Ray. It does
what an adapter for any inference engine does: copy named tensors into a model, and say which
method of the receiver should wait for them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from megatron_policy.refit.receive.collective import CollectiveGroup, join_collective
from megatron_policy.refit.receive.receiver import Receiver


class Engine:
    """Answers queries about tokens with the weights it received last."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
        self.weights: dict[str, Tensor] = self.model.state_dict()
        self.timeout_s = timeout_s
        self.receiver = Receiver(self.load, timeout_s=timeout_s)
        self.groups: dict[str, CollectiveGroup] = {}

    def load(self, weights: list[tuple[str, Tensor]]) -> None:
        """Copy the tensors that the receiver has checked; they are only valid during the call."""
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    # -- refits ----------------------------------------------------------------------------------

    def expect(self, info: Mapping[str, Any]) -> None:
        """Refuse weights of any other model from now on; `info` is the trainer's list of its own.

        ValueError, before any weight is sent, if the shapes differ from this model's.
        """
        for name, (shape, *_) in info.items():
            if name not in self.weights or tuple(self.weights[name].shape) != tuple(shape):
                raise ValueError(f"the trainer has {name} {tuple(shape)}, but this engine does not")
        self.receiver = Receiver(self.load, expected=info, timeout_s=self.timeout_s)

    def stream(self, address: str) -> int:
        """One refit over a socket and shared memory; returns the trainer's step, as all
        refits do.
        """
        return self.receiver.receive_ipc_stream(address).step

    def handles(self, handles: Mapping[str, Any]) -> None:
        """Receive some weights of a refit by handles."""
        self.receiver.receive_ipc_handles(handles)

    def finish(self, manifest: Any) -> int:
        """End a refit by handles."""
        return self.receiver.finish_ipc(manifest).step

    def join(self, name: str, port: int, secret: str, *sizes: int | None) -> None:
        """Join a group with the trainer, using its secret; `sizes` are this engine's rank in it,
        and how many ranks it and the trainer have.
        """
        self.groups[name] = join_collective(
            "127.0.0.1", port, *sizes, timeout_s=self.timeout_s, secret=secret
        )

    def collective(self, name: str) -> int:
        """One refit over a group, of whole tensors or of the shards that this rank has."""
        return self.receiver.receive_collective(self.groups[name]).step

    def directory(self, path: str) -> int:
        """One refit from a directory that the trainer has published."""
        return self.receiver.receive_directory(path).step

    def follow(self, path: str) -> int:
        """What a directory has that is newer than the weights here."""
        return self.receiver.receive_deltas(path)

    # -- generation ------------------------------------------------------------------------------

    @torch.no_grad()
    def logprobs(self, tokens: list[list[int]]) -> list[list[float]]:
        """In fp32, of each token but the first of its row, given those before."""
        ids = torch.tensor(tokens)
        logits = self.model(ids).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        found: list[list[float]] = logprobs.tolist()
        return found

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The next `count` tokens by greedy decoding."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        generated: list[int] = out[0, len(prompt) :].tolist()
        return generated

    def modules(self) -> list[str]:
        """Top-level names of all modules that this process has imported."""
        return sorted({name.partition(".")[0] for name in sys.modules})


def serve(pipe: Connection, path: str, timeout_s: float) -> None:
    """Call the methods named on the pipe until it closes: this process ends with its owner."""
    engine = Engine(path, timeout_s)
    pipe.send((True, None))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(engine, method)(*arguments))
        except Exception as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a container's host name need not resolve
    transformers_logging.disable_progress_bar()
    serve(Connection(int(sys.argv[1])), sys.argv[2], float(sys.argv[3]))
