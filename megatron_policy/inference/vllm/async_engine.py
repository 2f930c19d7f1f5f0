"""One vLLM `AsyncLLM` that follows a policy while it answers requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.answers import (
    look_for_version,
    read_answers,
    read_progress,
    read_state,
    read_step,
)
from megatron_policy.inference.vllm.engine import (
    Prompt,
    make_prompt,
    read_scores,
    scoring_params,
)
from megatron_policy.inference.vllm.receipt import OVER, READY, make_pauses
from megatron_policy.inference.vllm.worker import make_plain

InFlight = Literal["keep", "abort", "wait"]
"""What becomes of requests that are under way when weights arrive. They are kept, and what they
have generated is read again with the new weights; ended with the tokens they have; or waited for.
"""


@dataclass
class Completion:
    """One completion; of each token its log-probability and the step of the weights that drew it,
    None before the first refit.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: list[int | None] = field(default_factory=list)
    finish_reason: str | None = None
    """vLLM's; `abort` if a refit has ended it."""


class AsyncVllmEngine:
    """Calls the workers of an `AsyncLLM` together, and samples and scores with it.

    All methods that receive return the trainer's step, and raise RefitError, as the trainer does,
    if the refit is refused. Of an engine that is prepared with `staged` they pause the `AsyncLLM`
    when all workers have received the weights, and checked them, while these are loaded; of
    others all the time. If a refit leaves mixed weights, the `AsyncLLM` stays paused until the next
    complete one. One refit follows another.
    """

    def __init__(self, llm: Any) -> None:
        """`llm` was made with `worker_extension_cls=EXTENSION`. ConfigError if it has several
        data-parallel engines, of which vLLM's calls hear the first alone.
        """
        parallel = llm.vllm_config.parallel_config
        if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
            raise ConfigError(
                f"data_parallel_size is {parallel.data_parallel_size}: vLLM would say of a refit "
                "what the first engine says. Make one AsyncLLM for each"
            )
        self.llm = llm
        self._step: int | None = None
        self._mixed = False
        self._alone = asyncio.Lock()
        self._numbers = itertools.count()

    async def prepare(
        self,
        info: Mapping[str, Sequence[Any]],
        timeout_s: float = 120.0,
        staged: bool = False,
    ) -> None:
        """Prepare for what will be sent; see `VllmEngine.prepare`."""
        await self._call("refit_prepare", make_plain(info), timeout_s, staged)

    async def join(self, *arguments: Any, **named: Any) -> None:
        """Let all workers join a group with the trainer, with the arguments of
        `RefitExtension.refit_join`.
        """
        await self._call("refit_join", *arguments, **named)

    async def receive_stream(
        self,
        addresses: str | Sequence[str] | Mapping[str, str],
        in_flight: InFlight = "keep",
    ) -> int:
        """One refit over sockets; see `RefitExtension.refit_from_stream`."""
        return await self._receive(in_flight, "refit_from_stream", addresses)

    async def receive_group(self, in_flight: InFlight = "keep") -> int:
        """One refit over the group."""
        return await self._receive(in_flight, "refit_from_group")

    async def receive_directory(self, path: str, in_flight: InFlight = "keep") -> int:
        """One refit from a directory that the trainer has published."""
        return await self._receive(in_flight, "refit_from_directory", path)

    async def receive_deltas(
        self, path: str, in_flight: InFlight = "keep", *, wait: bool = False
    ) -> int:
        """What a trainer has published in a `DeltaDirectory` since the last call; the engine was
        prepared with `staged`. All workers take the version that is the newest for the first. If
        there is nothing new, `wait` for it, as `VllmEngine.receive_deltas` does, while requests
        are answered.
        """
        if wait:
            looks = look_for_version(await self.llm.collective_rpc("refit_held_version"), path)
            while pause_s := await asyncio.to_thread(next, looks, 0.0):
                await asyncio.sleep(pause_s)
        found, *_ = read_answers(await self.llm.collective_rpc("refit_find_deltas", args=(path,)))
        return await self._receive(in_flight, "refit_from_deltas", path, found)

    async def state(self) -> tuple[int | None, bool]:
        """The step of the weights of all workers, and whether they are mixed; see `read_state`."""
        return read_state(await self.llm.collective_rpc("refit_state"))

    async def mark_mixed(self) -> None:
        """Mark the weights of all workers as not to be used, and stay paused, until the next
        complete refit; requests under way are kept.
        """
        await self.llm.pause_generation(mode="keep", clear_cache=True)
        self._mixed = True
        await self._call("refit_mark_mixed")

    async def logprobs(self, rows: Sequence[Prompt]) -> list[list[float]]:
        """Log-probabilities of rows, as `VllmEngine.logprobs`; RefitError while the weights are
        mixed, and nothing is computed with them.
        """
        if self._mixed:
            raise RefitError("vLLM's weights are mixed, and it is paused until a complete refit")
        return list(await asyncio.gather(*map(self._score, rows)))

    async def generate(self, prompt: Prompt, **sampling: Any) -> Completion:
        """One completion; `sampling` are fields of vLLM's `SamplingParams`."""
        done = Completion()
        async for growing in self.stream(prompt, **sampling):
            done = growing
        return done

    async def stream(self, prompt: Prompt, **sampling: Any) -> AsyncIterator[Completion]:
        """The same while it grows: the completion after each step of the engine."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        plain = {"logprobs": 0, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        params = SamplingParams(**plain | sampling)
        done, drawn = Completion(), asyncio.Queue[tuple[Any, int | None] | None]()
        reading = asyncio.create_task(self._read_drawn(prompt, params, drawn))
        try:
            while (each := await drawn.get()) is not None:
                new, step = each
                done.token_ids.extend(new.token_ids)
                found = zip(new.token_ids, new.logprobs or (), strict=True)
                done.logprobs.extend(logprobs[token].logprob for token, logprobs in found)
                done.steps.extend([step] * len(new.token_ids))
                done.finish_reason = new.finish_reason
                yield done
            await reading  # raises what vLLM has
        finally:
            reading.cancel()  # ends the request of a caller that has left

    async def _read_drawn(self, prompt: Prompt, params: Any, drawn: asyncio.Queue[Any]) -> None:
        """Put what vLLM has drawn there with the step of the weights, and None in the end: at once,
        as a caller can ask for it after the next refit.
        """
        try:
            async for output in self._generate(prompt, params):
                (new,) = output.outputs
                drawn.put_nowait((new, self._step))
        finally:
            drawn.put_nowait(None)

    async def _score(self, row: Prompt) -> list[float]:
        outputs = [output async for output in self._generate(row, scoring_params())]
        return read_scores(outputs[0])

    def _generate(self, prompt: Prompt, params: Any) -> AsyncIterator[Any]:
        inputs, number = make_prompt(prompt), f"policy-{next(self._numbers)}"
        outputs: AsyncIterator[Any] = self.llm.generate(inputs, params, number)
        return outputs

    async def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        read_answers(await self.llm.collective_rpc(method, args=arguments, kwargs=named))

    async def _receive(self, in_flight: InFlight, method: str, *arguments: Any) -> int:
        async with self._alone:
            try:
                begun = await self.llm.collective_rpc("refit_begin", args=(method, arguments))
                brings = True
                if all(read_answers(begun)):
                    brings = await self._wait_for_arrival()
                    method, arguments = "refit_switch", ()
                if brings:  # clears what is cached; nothing is computed until it is resumed
                    await self.llm.pause_generation(mode=in_flight, clear_cache=True)
                return read_step(await self.llm.collective_rpc(method, args=arguments))
            except BaseException as error:
                await self._call("refit_give_up", f"vLLM's owner gave up: {error}")
                raise
            finally:
                # Also of a call that was cancelled: workers may have accepted the weights since.
                self._step, self._mixed = await self.state()
                if not self._mixed:
                    await self.llm.resume_generation()

    async def _wait_for_arrival(self) -> bool:
        """Wait until all workers have received what was begun; whether any of it is new."""
        for pause in make_pauses():
            answers = await self.llm.collective_rpc("refit_progress")
            state, why = read_progress(answers)
            if why and state != OVER:
                await self._call("refit_give_up", why)  # and hear of all that have not ended
            elif state in (READY, OVER):
                read_answers(answers)
                return state == READY
            await asyncio.sleep(pause)
        raise AssertionError("it asks without end")
