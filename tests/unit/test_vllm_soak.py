"""What the soak of refits into vLLM takes for growth."""

from __future__ import annotations

from tests.soak.vllm_refits import KIB, MIB, Outcome


def test_a_leak_is_told_from_an_allocator_that_takes_memory_at_first() -> None:
    leaking, steady = Outcome("stream"), Outcome("stream")
    for number in range(100):
        taken = 300 * MIB + min(number // 10, 5) * MIB
        for outcome, leaked in ((leaking, 6 * KIB * number), (steady, 64 * (number % 7))):
            memory = {"resident": taken + leaked, "allocated": taken // 2 + leaked}
            outcome.add("engine", memory | {"objects": 10_000})
            outcome.add("trainer", memory | {"objects": 9_000 + 70 * (outcome is leaking) * number})
    assert steady.growing() == []
    assert leaking.growing() == [
        "stream: allocated of the engine +6144.0 a refit, at most 4096",
        "stream: allocated of the trainer +6144.0 a refit, at most 4096",
        "stream: objects of the trainer +70.0 a refit, at most 64",
    ]
    assert "| 305.3 to 305.6 | +6.0 (+6.0) |" in leaking.row()
