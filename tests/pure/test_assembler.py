"""What arrives of a refit is complete, new and undamaged before an engine loads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.errors import RefitError
from megatron_policy.refit.digest import DEVICE, algorithm_for, digest
from megatron_policy.refit.manifest import (
    RefitInfo,
    RefitManifest,
    ServedModel,
    TensorDigest,
    WeightVersion,
)
from megatron_policy.refit.receive.receiver import Receiver
from tests.refit_engine import SmallEngine, bits, zeros
from tests.refit_trainer import FORMS, weights


def manifest_of(tensors: dict[str, torch.Tensor], step: int = 1) -> RefitManifest:
    algorithm = algorithm_for(torch.zeros(1))
    return RefitManifest(
        step,
        algorithm,
        {
            n: TensorDigest(tuple(t.shape), t.dtype, digest(t, algorithm))
            for n, t in tensors.items()
        },
    )


def make(**options: Any) -> tuple[SmallEngine, Receiver]:
    """An engine of zeros and its receiver."""
    engine = SmallEngine(zeros(FORMS))
    return engine, Receiver(engine.load, **{"expected": FORMS, **options})


def give(receiver: Receiver, tensors: dict[str, torch.Tensor], step: int = 1) -> None:
    """A whole refit, tensor by tensor."""
    assembler = receiver.assembler()
    for item in tensors.items():
        assembler.take([item])
    assembler.finish(manifest_of(tensors, step))


OLD, NEW = weights(1), weights(2)


def announce(receiver: Receiver, since: int | None) -> None:
    receiver.assembler().announce(
        RefitInfo(FORMS, ServedModel(version=WeightVersion("chain", 12, since)))
    )


def test_changes_of_weights_that_an_engine_lacks_are_refused_with_the_cause() -> None:
    _, receiver = make()
    with pytest.raises(RefitError, match=r"another engine was asked before.* at each address"):
        announce(receiver, 11)


def test_an_engine_that_stages_nothing_warns_once_that_it_gets_all_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for staged in (True, False):
        _, receiver = make(staged=staged)
        for _ in range(3):
            announce(receiver, None)
    (said,) = caplog.messages
    assert "prepare vLLM, with staged=True" in said


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=12), st.booleans(), st.randoms(), st.booleans()
)
def test_a_complete_set_is_loaded_in_whatever_pieces_and_order_it_comes(
    sizes: list[int], staged: bool, random: Any, expecting: bool
) -> None:
    engine, receiver = make(staged=staged, **({} if expecting else {"expected": None}))
    for step, tensors in ((1, OLD), (2, NEW)):
        rest = list(tensors.items())
        random.shuffle(rest)
        assembler = receiver.assembler()
        for size in [*sizes, len(rest)]:
            piece, rest = rest[:size], rest[size:]
            assembler.take([(name, tensor.clone()) for name, tensor in piece])
        assembler.finish(manifest_of(tensors, step))
        assert bits(engine.weights) == bits(tensors)
        assert receiver.step == step and not receiver.mixed
    assert not staged or len(engine.loads) == 2


def wrong(what: str) -> dict[str, torch.Tensor]:
    """NEW with one tensor that is not as the manifest of NEW says."""
    found = dict(NEW)
    if what == "missing":
        del found["norm"]
    elif what == "extra":
        found["more"] = found["norm"]
    elif what == "damaged":
        found["norm"] = found["norm"].clone()
        found["norm"].view(torch.int16)[7] ^= 1
    elif what == "shape":
        found["norm"] = found["norm"].view(11, 3)
    else:
        found["norm"] = found["norm"].view(torch.float16)
    return found


@pytest.mark.parametrize("expected", [FORMS, None], ids=["expecting", "not expecting"])
@pytest.mark.parametrize("what", ["missing", "extra", "damaged", "shape", "dtype"])
def test_what_is_not_the_set_is_refused_and_the_engine_keeps_the_last(
    what: str, expected: Any
) -> None:
    engine, receiver = make(expected=expected)
    give(receiver, OLD, 1)
    with pytest.raises(RefitError, match="more" if what == "extra" else "norm"):
        assembler = receiver.assembler()
        assembler.take(list(wrong(what).items()))
        assembler.finish(manifest_of(NEW, 2))
    assert bits(engine.weights) == bits(OLD) and receiver.step == 1 and not receiver.mixed
    assert len(engine.loads) == 1
    give(receiver, NEW, 2)
    assert bits(engine.weights) == bits(NEW)


@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_that_cannot_finish_a_set_refuses_it_and_is_mixed_until_the_next(
    staged: bool,
) -> None:
    seen: list[str] = []

    def finish() -> None:
        seen.append(f"finish {len(engine.loads)}")
        if len(seen) == 1:
            raise ValueError("no kernel")

    engine, receiver = make(staged=staged, finish=finish)
    loads = 1 if staged else len(OLD)
    with pytest.raises(RefitError, match=r"ValueError: no kernel\. The engine's weights are mixed"):
        give(receiver, OLD, 1)
    assert receiver.step is None and receiver.mixed
    give(receiver, NEW, 2)
    assert seen == [f"finish {loads}", f"finish {2 * loads}"]
    assert receiver.step == 2 and not receiver.mixed and bits(engine.weights) == bits(NEW)
    with pytest.raises(RefitError, match="norm"):
        give(receiver, wrong("missing"), 3)
    assert len(seen) == 2


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_without_staging_a_refused_set_leaves_the_engine_mixed_until_the_next(what: str) -> None:
    engine, receiver = make(staged=False)
    with pytest.raises(RefitError, match="weights are mixed"):
        assembler = receiver.assembler()
        assembler.take(list(wrong(what).items()))
        assembler.finish(manifest_of(NEW))
    assert receiver.mixed and receiver.step is None
    give(receiver, NEW)
    assert not receiver.mixed and bits(engine.weights) == bits(NEW)


def test_a_tensor_that_comes_twice_or_of_another_model_is_refused_when_it_comes() -> None:
    norm = ("norm", NEW["norm"])
    for pieces in ([[norm, norm]], [[norm], [norm]]):
        assembler = make()[1].assembler()
        with pytest.raises(RefitError, match="norm twice"):
            for piece in pieces:
                assembler.take(piece)
    assembler = make()[1].assembler()
    with pytest.raises(RefitError, match="other, which this model lacks"):
        assembler.take([("other", NEW["norm"])])
    with pytest.raises(RefitError, match=r"norm is .*but must be"):
        assembler.take([("norm", NEW["norm"].float())])


def test_a_manifest_with_less_than_the_engine_expects_is_refused() -> None:
    engine, receiver = make()
    for names, said in ((FORMS.keys() - {"norm"}, "1 missing: norm"), ((), "10 missing")):
        with pytest.raises(RefitError, match=said):
            give(receiver, {name: NEW[name] for name in names})
    assert engine.loads == []


@pytest.mark.parametrize(("step", "fine"), [(3, True), (4, True), (2, False)])
def test_only_steps_older_than_the_last_are_refused(step: int, fine: bool) -> None:
    engine, receiver = make()
    give(receiver, OLD, 3)
    if fine:
        give(receiver, NEW, step)
    else:
        with pytest.raises(RefitError, match="older"):
            give(receiver, NEW, step)
        assert bits(engine.weights) == bits(OLD)
        receiver.step = None
        give(receiver, NEW, step)
    assert receiver.step == step and bits(engine.weights) == bits(NEW)


def test_digests_of_another_algorithm_are_refused_and_can_be_asked_for() -> None:
    _, receiver = make()
    manifest = manifest_of(NEW)
    other = DEVICE
    same = {
        name: replace(s, digest=digest(NEW[name], other)) for name, s in manifest.tensors.items()
    }
    assembler = receiver.assembler()
    assembler.take(list(NEW.items()))
    with pytest.raises(RefitError, match="same kind of device"):
        assembler.finish(RefitManifest(1, other, same))
    assembler = receiver.assembler(other)
    assembler.take(list(NEW.items()))
    assert assembler.finish(RefitManifest(1, other, same)).step == 1


def test_a_load_that_raises_is_a_refusal_with_its_reason() -> None:
    _, receiver = make(expected=None)
    with pytest.raises(RefitError, match=r"KeyError: 'more'.*mixed") as raised:
        give(receiver, {**NEW, "more": NEW["norm"]})
    assert isinstance(raised.value.__cause__, KeyError)
    assert receiver.mixed and receiver.step is None


@pytest.mark.parametrize("staged", [True, False])
def test_an_engine_hears_of_the_beginning_and_the_end_of_each_set_it_loads(staged: bool) -> None:
    heard: list[str] = []
    receiver = Receiver(
        lambda tensors: heard.append(tensors[0][0]),
        begin=lambda: heard.append("begin"),
        finish=lambda: heard.append("finish"),
        staged=staged,
    )
    first, *others = NEW.items()
    receiver.assembler().take([first])  # is never completed
    assembler = receiver.assembler()
    assembler.take([first])
    assembler.take(others)
    assembler.finish(manifest_of(NEW))
    if staged:
        assert heard == ["begin", first[0], "finish"]
    else:
        assert heard == ["begin", first[0], "begin", first[0], others[0][0], "finish"]


def test_the_memory_kept_between_refits_is_used_again_and_can_be_released() -> None:
    places: list[dict[str, int]] = []
    receiver = Receiver(lambda tensors: places.append({n: t.data_ptr() for n, t in tensors}))
    give(receiver, OLD, 1)
    give(receiver, NEW, 2)
    assert places[0] == places[1]
    other = {"norm": torch.ones(2000)}
    give(receiver, other, 3)
    assert list(places[2]) == ["norm"]
    assert len(receiver._engine.kept) == 1
    receiver.release()
    assert not receiver._engine.kept
    give(receiver, NEW, 4)


def test_what_was_taken_is_not_changed_by_what_is_written_there_later() -> None:
    engine, receiver = make()
    memory = {name: tensor.clone() for name, tensor in NEW.items()}
    assembler = receiver.assembler()
    for name, tensor in memory.items():
        assembler.take([(name, tensor)])
        tensor.zero_()
    assembler.finish(manifest_of(NEW))
    assert bits(engine.weights) == bits(NEW)


def test_the_hosts_three_part_form_of_what_to_expect_is_understood() -> None:
    three = {name: (list(shape), dtype, 7) for name, (shape, dtype) in FORMS.items()}
    _, receiver = make(expected=three)
    give(receiver, NEW)
    assert receiver.step == 1


MODEL = ServedModel({"rope_theta": 2.0}, {"r": 4, "lora_alpha": 8})
OTHER = ServedModel({"rope_theta": 2.0}, {"r": 4, "lora_alpha": 9})


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("said", ["expected", "announced", "at the end"])
def test_an_engine_knows_what_to_set_up_when_it_loads(staged: bool, said: str) -> None:
    expected = RefitInfo(FORMS, MODEL if said == "expected" else None)
    knew: list[ServedModel | None] = []
    receiver = Receiver(
        lambda tensors: knew.append(receiver.model), expected=expected, staged=staged
    )
    assert receiver.model is None
    assembler = receiver.assembler()
    if said == "announced":
        assembler.announce(RefitInfo(FORMS, MODEL))
    assembler.take(list(NEW.items()))
    assembler.finish(replace(manifest_of(NEW), model=MODEL))
    assert receiver.model == MODEL
    assert knew == [MODEL if staged or said != "at the end" else None]


@pytest.mark.parametrize("said", ["expected", "announced"])
def test_another_model_than_the_engine_is_set_up_for_is_refused(said: str) -> None:
    engine, receiver = make(expected=RefitInfo(FORMS, MODEL if said == "expected" else None))
    assembler = receiver.assembler()
    if said == "announced":
        assembler.announce(RefitInfo(FORMS, MODEL))
    else:
        with pytest.raises(RefitError, match="lora_alpha is 9 instead of 8"):
            assembler.announce(RefitInfo(FORMS, OTHER))
    assembler.take(list(NEW.items()))
    with pytest.raises(RefitError, match=r"another model than .*adapters\.lora_alpha is 9 instead"):
        assembler.finish(replace(manifest_of(NEW), model=OTHER))
    assert not engine.loads and receiver.model is None and receiver.step is None
    again = receiver.assembler()
    again.take(list(NEW.items()))
    again.finish(replace(manifest_of(NEW), model=MODEL))
    assert receiver.model == MODEL


def test_an_engine_that_a_probe_has_marked_is_mixed_until_the_next_complete_refit() -> None:
    _, receiver = make()
    give(receiver, OLD)
    receiver.mark_mixed()
    assert receiver.mixed and receiver.step == 1
    give(receiver, NEW, 2)
    assert not receiver.mixed and receiver.step == 2
