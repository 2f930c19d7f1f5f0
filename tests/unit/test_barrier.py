"""Ranks that go through saves and loads together: what each hears of the others' failures."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron_policy.coordination.barrier import _GIVEN_UP, Coordinator
from megatron_policy.errors import CheckpointError

TIMEOUT_S = 1.0


def seats(store: dist.Store) -> list[Coordinator]:
    return [Coordinator(store, rank, 2, TIMEOUT_S) for rank in range(2)]


def test_a_rank_that_is_late_hears_of_every_failure_that_it_missed() -> None:
    early, late = seats(dist.HashStore())
    for number in range(4):
        with pytest.raises(CheckpointError), early.begin().critical_section():
            raise OSError(28, "No space left on device", f"file {number}")
    for number in range(4):
        with pytest.raises(CheckpointError, match=f"rank 0: file {number}: No space left"):
            late.begin().wait_for("where")


def test_all_ranks_raise_the_failure_that_came_first() -> None:
    first, second = (seat.begin() for seat in seats(dist.HashStore()))
    with pytest.raises(CheckpointError, match="the cause"), first.critical_section("written"):
        raise RuntimeError("the cause")
    with (
        pytest.raises(CheckpointError, match="rank 0: the cause"),
        second.critical_section("written"),
    ):
        raise FileNotFoundError(2, "No such file or directory", "what the other took away")
    with pytest.raises(CheckpointError, match="rank 0: the cause"):
        second.wait_for_all("written")


def test_where_all_have_arrived_a_failure_that_follows_stops_nobody() -> None:
    """Or one rank would go on beside its training, and the other raise."""
    hasty, late = (seat.begin() for seat in seats(dist.HashStore()))
    for each in (hasty, late):
        with each.critical_section("ready"):
            pass
    hasty.wait_for_all("ready")
    with pytest.raises(CheckpointError, match="the cause"), hasty.critical_section():
        raise RuntimeError("the cause")
    late.wait_for_all("ready")
    with pytest.raises(CheckpointError, match="rank 0: the cause"):
        late.wait_for("where")


def test_ranks_that_have_found_different_things_all_hear_of_it() -> None:
    one, other = (seat.begin() for seat in seats(dist.HashStore()))
    with one.critical_section("found"):
        one.check_same_value("a save")
    with (
        pytest.raises(CheckpointError, match="found another, another a save: "),
        other.critical_section(),
    ):
        other.check_same_value("another")
    with pytest.raises(CheckpointError, match="rank 1: this rank has found"):
        one.wait_for_all("found")


def test_an_empty_message_is_a_message() -> None:
    one, other = (seat.begin() for seat in seats(dist.HashStore()))
    one.publish("where", "")
    assert other._decide("where", _GIVEN_UP) != _GIVEN_UP, "who gives up late wins over it"
    assert one.wait_for("where") == other.wait_for("where") == ""


def test_notes_do_not_pile_up() -> None:
    store = dist.HashStore()
    coordinators = seats(store)
    seen = []
    for _ in range(20):
        both = [coordinator.begin() for coordinator in coordinators]
        both[0].publish("where", "here")
        for each in both:
            assert each.wait_for("where") == "here"
            with each.critical_section("written"):
                pass
        for each in both:
            each.wait_for_all("written")
        seen.append(store.num_keys())
    assert max(seen[10:]) == max(seen[5:10])


def test_silence_is_noticed_and_told() -> None:
    waiting, _ = seats(dist.HashStore())
    under = waiting.begin()
    with under.critical_section("written"):
        pass
    with pytest.raises(CheckpointError, match=r"no sign of life for 1 s.*checkpoint_timeout_s"):
        under.wait_for_all("written")


def test_a_rank_that_arrives_after_another_has_given_up_gives_up_too() -> None:
    """Or it would go on, with what the other has not done."""
    waiting, late = (seat.begin() for seat in seats(dist.HashStore()))
    with waiting.critical_section("ready"):
        pass
    with pytest.raises(CheckpointError, match="no sign of life"):
        waiting.wait_for_all("ready")
    with late.critical_section("ready"):
        pass
    with pytest.raises(CheckpointError, match="rank 0: a rank gave no sign of life"):
        late.wait_for_all("ready")


def test_a_rank_that_arrives_last_after_a_failure_does_not_go_on_alone() -> None:
    store = dist.HashStore()
    waiting, failing, late = (Coordinator(store, rank, 3, TIMEOUT_S).begin() for rank in range(3))
    for each in (waiting, failing):
        with each.critical_section("ready"):
            pass
    with pytest.raises(CheckpointError, match="the cause"), failing.critical_section():
        raise RuntimeError("the cause")
    with pytest.raises(CheckpointError, match="rank 1: the cause"):
        waiting.wait_for_all("ready")
    with late.critical_section("ready"):
        pass
    with pytest.raises(CheckpointError, match="rank 1: the cause"):
        late.wait_for_all("ready")


def test_a_rank_that_fails_goes_when_the_others_have_come_to_hear_of_it() -> None:
    failing, working = (seat.begin() for seat in seats(dist.HashStore()))
    gone = threading.Event()

    def fail() -> None:
        with (
            pytest.raises(CheckpointError, match="the cause"),
            failing.critical_section("verified"),
        ):
            raise RuntimeError("the cause")
        gone.set()

    thread = threading.Thread(target=fail)
    thread.start()
    with working.critical_section("verified"):
        # Longer than silence is borne: signs of life go on.
        assert not gone.wait(2 * TIMEOUT_S)
    with pytest.raises(CheckpointError, match="rank 0: the cause"):
        working.wait_for_all("verified")
    thread.join()
    assert gone.is_set()


def test_a_rank_that_fails_does_not_wait_for_one_that_shows_no_sign_of_life() -> None:
    failing, _ = seats(dist.HashStore())
    with (
        pytest.raises(CheckpointError, match="the cause"),
        failing.begin().critical_section("verified"),
    ):
        raise RuntimeError("the cause")


def test_no_rank_goes_before_all_are_done() -> None:
    early, late = (seat.begin() for seat in seats(dist.HashStore()))
    gone = threading.Event()

    def part() -> None:
        early.leave_together()
        gone.set()

    thread = threading.Thread(target=part)
    thread.start()
    with late.critical_section("written"):
        assert not gone.wait(2 * TIMEOUT_S)
    late.leave_together()
    thread.join(60)
    assert gone.is_set()


def test_what_is_done_stays_done_when_a_rank_is_gone_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, _ = seats(dist.HashStore())
    here.begin().leave_together()
    assert here.lost_a_rank and "no sign of life for 1 s" in caplog.text


def test_a_rank_that_has_failed_is_not_waited_for_in_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()
    coordinators = [Coordinator(store, rank, 2, 1000.0) for rank in range(2)]
    done, failing = (coordinator.begin() for coordinator in coordinators)

    def fail() -> None:
        with pytest.raises(CheckpointError, match="the cause"), failing.critical_section():
            raise RuntimeError("the cause")

    thread = threading.Thread(target=fail)
    thread.start()
    done.leave_together()
    assert coordinators[0].lost_a_rank and "rank 1: the cause" in caplog.text
    thread.join(600)
    assert not thread.is_alive(), "nor does it wait for the others"
    with pytest.raises(CheckpointError):
        done.wait_for_all("written")
