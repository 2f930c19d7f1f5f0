"""The example with pictures without a policy: problems, pictures and demonstrations."""

from __future__ import annotations

from collections import Counter

from PIL import ImageColor

from examples.quickstart.task import reward
from examples.shapes.task import CELL, KINDS, LAZY, SIDE, TIRED, TOKENS, Problem, Problems, Shape

WHITE = (255, 255, 255)


def test_a_picture_has_the_shapes_that_are_asked_for_and_nothing_else() -> None:
    shapes = tuple(
        Shape(kind, color, CELL * column, 0, 8)
        for column, (kind, color) in enumerate((("circle", "#c0392b"), ("square", "#2a5bb5")))
    )
    assert [Problem(shapes, kind).answer for kind in KINDS] == [" 1", " 1", " 0"]
    picture = Problem(shapes, "circle").draw()
    assert picture.size == (SIDE, SIDE)
    seen = Counter(picture.getdata())
    red, blue = map(ImageColor.getrgb, ("#c0392b", "#2a5bb5"))
    assert seen.keys() == {WHITE, red, blue}
    assert seen[blue] == 9 * 9 and 45 < seen[red] < 81


def test_problems_to_train_on_are_of_other_pictures_three_of_each() -> None:
    problems = Problems(seed=1)
    assert problems.held_out == Problems(seed=2).held_out
    drawn = problems.draw(300)
    assert [problem.kind for problem in drawn[:6]] == [*KINDS, *KINDS]
    assert len({problem.shapes for problem in drawn[:3]}) == 1
    assert not {p.shapes for p in drawn} & {p.shapes for p in problems.held_out}
    assert {int(problem.answer) for problem in drawn} == {0, 1, 2, 3, 4}
    for problem in drawn:
        assert problem.prompt.count("<|image_pad|>") == TOKENS
        assert sum(problem.count(kind) for kind in KINDS) == len(problem.shapes)
        assert all(s.left >= 0 and s.left + s.size < SIDE for s in problem.shapes)


def test_demonstrators_count_until_they_tire_and_then_every_third_time() -> None:
    problems = Problems(seed=0)
    problem = problems.held_out[0]
    told = [problems.demonstrate(problem) for _ in range(TIRED + 900)]
    assert set(told[:TIRED]) == {problem.answer}
    assert 200 < Counter(told[TIRED:])[problem.answer] < 400
    assert reward(problem, problem.answer) == 1.0 and reward(problem, LAZY) == 0.0
