"""A rollout for verl that needs no GPU: transformers generates, in a Ray actor for each replica.

Named by `actor_rollout_ref.rollout.name=transformers` where `VERL_USE_EXTERNAL_MODULES` names this
module. It is for laptops and tests: requests that wait for each other are generated together, but
there is no paged cache, no HTTP server and no tensor parallelism.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

NAME = "transformers"
REQUESTS_AT_ONCE = 256
SETTLE_S = 0.02
"""How long a batch waits for further requests."""

Weights = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Sampling:
    """What requests that are generated together have in common."""

    most: int
    temperature: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, asked: dict[str, Any], longest: int) -> Sampling:
        """The sampling that an agent loop asks for, `longest` tokens unless it says so itself."""
        told = asked.get("max_tokens", asked.get("max_new_tokens", longest))
        return cls(
            most=max(1, min(told, longest)),
            temperature=asked.get("temperature", 1.0),
            top_k=max(0, asked.get("top_k", -1)),
            top_p=asked.get("top_p", 1.0),
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`."""
        if self.temperature == 0:
            return {"do_sample": False, "max_new_tokens": self.most}
        return {
            "do_sample": True,
            "max_new_tokens": self.most,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt that waits for its continuation."""

    ids: list[int]
    sampling: Sampling
    answer: asyncio.Future[TokenOutput] = field(repr=False)


class Server:
    """The model of one replica, as a Ray actor: weights come in, continuations go out."""

    def __init__(self, path: str, seed: int, response_length: int) -> None:
        config = AutoConfig.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        ends = self._model.generation_config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        self._longest, self._pad = response_length, self._ends[0] or 0
        self._targets = dict(self._model.named_parameters())
        self._arrived: set[str] = set()
        self._waiting: list[Request] = []
        self._running: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._rejects = False
        self._step: int | None = None
        torch.manual_seed(seed)

    def ready(self) -> None:
        """Answers once the model is built."""

    def load(self, weights: Weights) -> None:
        """Take some of the weights, by their names in a Hugging Face checkpoint.

        Raises KeyError for a name that the model lacks, ValueError for another shape.
        """
        with torch.no_grad():
            for name, value in weights:
                # A tied output layer is its embedding: verl's engines may send it all the same.
                target = self._targets.get(name)
                if target is None and name == "lm_head.weight":
                    target = self._model.get_output_embeddings().weight
                if target is None:
                    raise KeyError(f"the rollout's model has no weight {name!r}")
                if target.shape != value.shape:
                    raise ValueError(f"{name} has shape {value.shape}, wanted {target.shape}")
                target.copy_(value)
                self._arrived.add(name)

    def loaded(self, step: int | None) -> None:
        """All weights of a step have been sent. Raises RuntimeError if one is missing."""
        missing = self._targets.keys() - self._arrived
        self._arrived.clear()
        if missing:
            raise RuntimeError(f"the rollout did not get the weights {sorted(missing)}")
        self._step = step

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """Continue one prompt; the answer to one that is sent back has no tokens and the reason
        "aborted", with which verl's client asks again.
        """
        while not self._open.is_set():
            if self._rejects:
                return self._aborted()
            await self._open.wait()
        answer = asyncio.get_running_loop().create_future()
        sampling = Sampling.of(sampling_params, self._longest)
        self._waiting.append(Request(list(prompt_ids), sampling, answer))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._serve())
        output: TokenOutput = await answer
        return output

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(SETTLE_S)
            alike = [each for each in self._waiting if each.sampling == self._waiting[0].sampling]
            batch = alike[:REQUESTS_AT_ONCE]
            if not batch:  # they have been sent back meanwhile
                return
            self._waiting = [each for each in self._waiting if each not in batch]
            try:
                outputs = await asyncio.to_thread(self._continued, batch)
            except Exception as error:
                for request in batch:
                    request.answer.set_exception(error)
                continue
            for request, output in zip(batch, outputs, strict=True):
                request.answer.set_result(output)

    @torch.inference_mode()
    def _continued(self, batch: list[Request]) -> list[TokenOutput]:
        width = max(len(each.ids) for each in batch)
        ids = torch.tensor([[self._pad] * (width - len(each.ids)) + each.ids for each in batch])
        reach = torch.tensor([[0] * (width - len(e.ids)) + [1] * len(e.ids) for e in batch])
        found = self._model.generate(
            input_ids=ids,
            attention_mask=reach,
            pad_token_id=self._pad,
            return_dict_in_generate=True,
            output_scores=True,
            **batch[0].sampling.arguments(),
        )
        tokens = found.sequences[:, width:]
        scores = torch.stack(found.scores, dim=1).float()
        logprobs = torch.log_softmax(scores, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return [self._output(*row) for row in zip(tokens.tolist(), logprobs.tolist(), strict=True)]

    def _output(self, tokens: list[int], logprobs: list[float]) -> TokenOutput:
        last = next((at for at, token in enumerate(tokens) if token in self._ends), len(tokens) - 1)
        return TokenOutput(
            token_ids=tokens[: last + 1],
            log_probs=logprobs[: last + 1],
            stop_reason="completed",
            extra_fields={"global_steps": self._step},
        )

    def _aborted(self) -> TokenOutput:
        fields = {"global_steps": self._step}
        return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=fields)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Send back what waits, and return when what is being generated has ended by itself. New
        requests wait until `resume_generation`, or are sent back as well with `reject_request`.
        """
        self._rejects = reject_request
        self._open.clear()
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            request.answer.set_result(self._aborted())
        if self._running is not None:
            await self._running

    async def resume_generation(self) -> None:
        """Let requests in again."""
        self._open.set()

    # In host memory nothing is given back or cached between requests.
    async def wake_up(self, tags: Sequence[str] = ()) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **_: Any) -> None: ...

    async def stop_profile(self) -> None: ...


def server_name(replica: int) -> str:
    """By this name the processes that train find a replica's server."""
    return f"{NAME}_server_{replica}"


class Adapter(BaseRollout):  # type: ignore[misc]
    """The rollout as a process that trains sees it: the first rank of each replica sends."""

    def __init__(self, *args: Any, replica_rank: int = -1, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        size = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send all weights, in buckets. Every rank walks the iterator, which is a collective."""
        if wire_format != "named_tensors" or peft_config is not None:
            raise NotImplementedError(
                "this rollout takes whole weights only: set checkpoint_engine.backend=naive, and "
                "model.lora.merge=True with LoRA"
            )
        server = ray.get_actor(server_name(self.replica_rank)) if self.is_leader_rank else None
        bucket: Weights = []
        async for name, value in ensure_async_iterator(weights):
            if server is None:
                continue
            bucket.append((name, value.detach().cpu().clone()))
            if sum(each.nbytes for _, each in bucket) >= self._bucket_bytes:
                await server.load.remote(bucket)
                bucket = []
        if server is not None:
            await server.load.remote(bucket)
            await server.loaded.remote(global_steps)


class Replica(RolloutReplica):  # type: ignore[misc]
    """One server, on the node of the processes whose weights it gets."""

    async def launch_servers(self) -> None:
        """Start the server and wait until its model is built."""
        name = server_name(self.replica_rank)
        server = ray.remote(Server).options(name=name, max_concurrency=self.max_concurrency)
        handle = server.remote(
            self.model_config.path,
            self.config.seed + self.replica_rank,
            self.config.response_length,
        )
        await handle.ready.remote()
        self.servers = [handle]
        self._server_handle, self._server_address = handle, name


base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{Adapter.__name__}"
RolloutReplicaRegistry.register(NAME, lambda: Replica)
