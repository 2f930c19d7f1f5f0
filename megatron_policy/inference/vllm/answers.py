"""What vLLM's workers answer to whom calls the methods of `worker.py`, and what is read from it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.receipt import OVER, READY, RECEIVING
from megatron_policy.refit.manifest import StagedVersion

Accepted = tuple[int, StagedVersion]
"""The step of the weights that a worker has accepted; of deltas, their chain and number too."""

Answer = dict[str, Any]
"""What a worker's method has returned, `{"value": ..}`, or why it failed, `{"refused": ".."}`."""

log = logging.getLogger(__name__)


def read_answers(answers: Sequence[Answer]) -> list[Any]:
    """What the workers' methods have returned. RefitError with the reasons if any has failed."""
    refused = [(rank, said["refused"]) for rank, said in enumerate(answers) if "refused" in said]
    if refused:
        reasons = "; ".join(f"vLLM's worker {rank}: {reason}" for rank, reason in refused)
        raise RefitError(reasons)
    return [said["value"] for said in answers]


def read_step(answers: Sequence[Answer]) -> int:
    """The step of the weights that all workers have accepted; RefitError if they have accepted
    different ones.
    """
    first, *others = read_answers(answers)
    if any(other != first for other in others):
        raise RefitError(
            f"vLLM's workers have accepted different weights: {[first, *others]} (their step, "
            "chain and number). They are mixed until the next complete refit"
        )
    return int(first[0])


def read_progress(answers: Sequence[Answer]) -> tuple[str, str]:
    """How far the receipts of all workers are: the state of the one that is least far; and why none
    may load, if any has refused what it got, or if they got weights of several steps.
    """
    found = [said["value"] for said in answers if "value" in said]
    states, steps = {state for state, _ in found}, {step for _, step in found}
    if len(found) < len(answers):
        why = "another of vLLM's workers has refused what it received"
    elif RECEIVING not in states and len(steps) > 1:
        why = f"weights of several steps have reached vLLM's workers: {sorted(steps)}"
    else:
        why = ""
    return next((each for each in (RECEIVING, READY) if each in states), OVER), why


def read_state(states: Sequence[Sequence[Any]]) -> tuple[int | None, bool]:
    """The step of the weights of all workers, and whether they are mixed: within one worker, or
    from worker to worker. The step is None before the first refit, and where workers differ.
    """
    (step, _, version), alike = states[0], True
    for other, mixed, number in states:
        alike = alike and not mixed and (other, number) == (step, version)
    return step if len({step for step, *_ in states}) == 1 else None, not alike


def look_for_version(answers: Sequence[Answer], path: str) -> Iterator[float]:
    """Look for a version that not all workers have, by their `refit_held_version`: how long to
    pause before each next look. RefitError if none comes in time.
    """
    from megatron_policy.refit.receive.disk import look_for_newer

    (held, timeout_s), *others = read_answers(answers)
    alike = held is not None and all(version == held for version, _ in others)
    return look_for_newer(tuple(held) if alike else None, path, timeout_s)


def return_errors(method: Callable[..., Any]) -> Callable[..., Answer]:
    """The same method, which returns its errors. Of workers that raise, vLLM reads the answer of
    the first alone, and takes those of the others for answers to its next calls.
    """

    @functools.wraps(method)
    def answer(*args: Any, **keywords: Any) -> Answer:
        try:
            return {"value": method(*args, **keywords)}
        except Exception as error:
            log.warning("%s failed", method.__name__, exc_info=True)
            ours = isinstance(error, RefitError | ConfigError)
            return {"refused": str(error) if ours else f"{type(error).__name__}: {error}"}

    return answer
