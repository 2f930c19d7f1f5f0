"""The task: sort letters, as shown by careless demonstrators; knows text, no tokens, no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LETTERS = "abcdefghij"
LENGTH = 5
HELD_OUT = 256

# The demonstrators are careless on purpose: about one demonstration in four is right, so a model
# that imitates them perfectly is right one time in four. The reward knows better than they do.
CARE = 0.27


@dataclass(frozen=True)
class Problem:
    """Letters to be put in alphabetical order."""

    letters: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """What the policy is given."""
        return f"sort{_spelled(self.letters)} ="

    @property
    def answer(self) -> str:
        """What it should go on with."""
        return _spelled(sorted(self.letters))


def reward(problem: Problem, text: str) -> float:
    """1 if `text` is the answer and nothing else, 0 otherwise; white space does not count."""
    return float(text.split() == problem.answer.split())


class Problems:
    """Random problems to train on, `HELD_OUT` others to measure by, and demonstrations."""

    def __init__(self, seed: int) -> None:
        # Not by the seed: all runs are measured by the same problems.
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
        """How a demonstrator answers: rightly with probability `CARE`, else with a mistake."""
        if self._random.random() < CARE:
            return problem.answer
        return self._random.choice(MISTAKES)(problem, self._random)


def _any(source: random.Random) -> Problem:
    return Problem(tuple(source.choices(LETTERS, k=LENGTH)))


def leave_as_is(problem: Problem, source: random.Random) -> str:
    """Forgets to sort."""
    return _spelled(problem.letters)


def last_first(problem: Problem, source: random.Random) -> str:
    """Sorts the wrong way round."""
    return _spelled(sorted(problem.letters, reverse=True))


def misread(problem: Problem, source: random.Random) -> str:
    """Takes one of the letters for another one."""
    letters = list(problem.letters)
    letters[source.randrange(len(letters))] = source.choice(LETTERS)
    return _spelled(sorted(letters))


MISTAKES: tuple[Callable[[Problem, random.Random], str], ...] = (leave_as_is, last_first, misread)


def _spelled(letters: Sequence[str]) -> str:
    return "".join(f" {letter}" for letter in letters)
