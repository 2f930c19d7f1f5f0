"""The task, as pictures: count the shapes of a kind."""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

KINDS = ("circle", "square", "triangle")
COLORS = ("#c0392b", "#27704a", "#2a5bb5", "#8e44ad")
CELL, CELLS = 16, 2
SIDE = CELL * CELLS
"""Pixels along a picture, which has a square of cells with at most one shape in each."""
FEWEST, MOST = 1, 4
"""Shapes of a picture."""
HELD_OUT = 128

# The demonstrators tire on purpose: after so many right answers most of them do not count any more,
# so a model that imitates them perfectly is right one time in three. The reward is always right.
TIRED, CARE = 200 * 128, 0.33
LAZY = " some"

START, SEEN, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
"""What stands around a picture in a prompt, and for each of its tokens."""
PATCH, MERGE = 8, 2
"""Pixels along a patch, and patches along a token, of the model that `checkpoint.py` makes."""
TOKENS = (SIDE // (PATCH * MERGE)) ** 2


@dataclass(frozen=True)
class Shape:
    """One shape, within its cell."""

    kind: str
    color: str
    left: int
    top: int
    size: int


@dataclass(frozen=True)
class Problem:
    """A picture, and of which kind shapes are to be counted."""

    shapes: tuple[Shape, ...]
    kind: str

    @property
    def prompt(self) -> str:
        """The input of the policy, beside the picture."""
        return f"{START}{SEEN * TOKENS}{END}how many {self.kind}s?"

    @property
    def answer(self) -> str:
        """The expected continuation."""
        return f" {self.count(self.kind)}"

    def count(self, kind: str) -> int:
        """The shapes of a kind."""
        return sum(shape.kind == kind for shape in self.shapes)

    def draw(self) -> Image.Image:
        """The picture."""
        picture = Image.new("RGB", (SIDE, SIDE), "white")
        pen = ImageDraw.Draw(picture)
        for shape in self.shapes:
            left, top, right, bottom = (
                *(shape.left, shape.top),
                *(shape.left + shape.size, shape.top + shape.size),
            )
            if shape.kind == "circle":
                pen.ellipse((left, top, right, bottom), fill=shape.color)
            elif shape.kind == "square":
                pen.rectangle((left, top, right, bottom), fill=shape.color)
            else:
                peak = ((left + right) // 2, top)
                pen.polygon([(left, bottom), (right, bottom), peak], fill=shape.color)
        return picture


class Problems:
    """Random problems to train on, `HELD_OUT` others for measuring, and demonstrations."""

    def __init__(self, seed: int) -> None:
        # Independent of the seed: all runs are measured on the same problems.
        fixed = random.Random(0)
        pictures = [_place(fixed) for _ in range(HELD_OUT)]
        self.held_out = tuple(Problem(each, fixed.choice(KINDS)) for each in pictures)
        self._kept_back = frozenset(pictures)
        self._random = random.Random(seed)
        self._shown = 0

    def draw(self, count: int) -> list[Problem]:
        """The next `count` problems, three for each picture, none of which is held out."""
        drawn: list[Problem] = []
        while len(drawn) < count:
            shapes = _place(self._random)
            if shapes not in self._kept_back:
                drawn += (Problem(shapes, kind) for kind in KINDS)
        return drawn[:count]

    def demonstrate(self, problem: Problem) -> str:
        """A demonstrator's answer: right until they tire, and then with probability `CARE`."""
        self._shown += 1
        careful = self._shown <= TIRED or self._random.random() < CARE
        return problem.answer if careful else LAZY


def _place(source: random.Random) -> tuple[Shape, ...]:
    cells = source.sample(range(CELLS**2), source.randint(FEWEST, MOST))
    shapes = []
    for cell in sorted(cells):
        size = source.randint(8, 12)
        left, top = (CELL * at + source.randint(1, CELL - size - 2) for at in divmod(cell, CELLS))
        shapes.append(Shape(source.choice(KINDS), source.choice(COLORS), left, top, size))
    return tuple(shapes)
