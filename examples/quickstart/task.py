"""The task, as text: sort letters, as shown by careless demonstrators."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LETTERS = "abcdefghij"
LENGTH = 5
HELD_OUT = 256

# The demonstrators are careless on purpose: about one demonstration in four is right, so a model
# that imitates them perfectly is right one time in four. The reward is always right.
CARE = 0.27


class Question(Protocol):
    """A prompt and its one right answer."""

    @property
    def prompt(self) -> str: ...

    @property
    def answer(self) -> str: ...


class Questions(Protocol):
    """Where questions to train on come from; `held_out` are others, for measuring."""

    @property
    def held_out(self) -> Sequence[Question]: ...

    def draw(self, count: int) -> Sequence[Question]: ...

    def demonstrate(self, question: Question, /) -> str: ...


@dataclass(frozen=True)
class Problem:
    """Letters to put in alphabetical order."""

    letters: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The input of the policy."""
        return f"sort{_spelled(self.letters)} ="

    @property
    def answer(self) -> str:
        """The expected continuation."""
        return _spelled(sorted(self.letters))


def reward(problem: Question, text: str) -> float:
    """1 if `text` is the answer and nothing else, 0 otherwise; ignores white space."""
    return float(text.split() == problem.answer.split())


class Problems:
    """Random problems to train on, `HELD_OUT` others for measuring, and demonstrations."""

    def __init__(self, seed: int) -> None:
        # Independent of the seed: all runs are measured on the same problems.
        fixed = random.Random(0)
        held_out: dict[Problem, None] = {}
        while len(held_out) < HELD_OUT:
            held_out[_any(fixed)] = None
        self.held_out = tuple(held_out)
        self._kept_back = frozenset(held_out)
        self._random = random.Random(seed)

    def draw(self, count: int) -> list[Problem]:
        """The next `count` problems, none of them held out."""
        drawn: list[Problem] = []
        while len(drawn) < count:
            problem = _any(self._random)
            if problem not in self._kept_back:
                drawn.append(problem)
        return drawn

    def demonstrate(self, problem: Problem) -> str:
        """A demonstrator's answer: right with probability `CARE`, otherwise with a mistake."""
        if self._random.random() < CARE:
            return problem.answer
        return self._random.choice(MISTAKES)(problem, self._random)


def _any(source: random.Random) -> Problem:
    return Problem(tuple(source.choices(LETTERS, k=LENGTH)))


def leave_as_is(problem: Problem, source: random.Random) -> str:
    """Forgets to sort."""
    return _spelled(problem.letters)


def last_first(problem: Problem, source: random.Random) -> str:
    """Sorts in reverse order."""
    return _spelled(sorted(problem.letters, reverse=True))


def misread(problem: Problem, source: random.Random) -> str:
    """Mistakes one of the letters for another."""
    letters = list(problem.letters)
    letters[source.randrange(len(letters))] = source.choice(LETTERS)
    return _spelled(sorted(letters))


MISTAKES: tuple[Callable[[Problem, random.Random], str], ...] = (leave_as_is, last_first, misread)


def _spelled(letters: Sequence[str]) -> str:
    return "".join(f" {letter}" for letter in letters)
