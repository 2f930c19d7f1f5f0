"""The bases that the policies' methods come from do not hide each other's."""

from __future__ import annotations

import inspect
from itertools import combinations

import pytest

from megatron_policy import Policy
from megatron_policy.hosts.nemo_rl.worker import NemoRLWorker
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl


def hidden(cls: type) -> list[str]:
    """What two bases of `cls` define of which neither derives from the other: one of the two would
    never be called. Abstract classes may name what others define.
    """
    bases = [each for each in cls.__mro__[1:-1] if not inspect.isabstract(each)]
    return sorted(
        f"{name}: {one.__name__}, {other.__name__}"
        for one, other in combinations(bases, 2)
        if not issubclass(one, other)
        for name in vars(one).keys() & vars(other).keys()
        if not name.startswith("__")
    )


@pytest.mark.parametrize("cls", [Policy, MegatronPolicyWorkerImpl, NemoRLWorker])
def test_no_base_hides_a_method_or_an_attribute_of_another(cls: type) -> None:
    assert hidden(cls) == []


def test_a_method_that_two_bases_define_is_found() -> None:
    class One:
        def save(self) -> None: ...

    class More(One):
        def save(self) -> None: ...

    class Other:
        def save(self) -> None: ...

    assert hidden(type("Extended", (More, One), {})) == []
    assert hidden(type("Twice", (One, Other), {})) == ["save: One, Other"]
    assert hidden(type("Below", (type("Between", (Other,), {}), One), {})) == ["save: Other, One"]
