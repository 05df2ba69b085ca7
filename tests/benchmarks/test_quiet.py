"""Host times count where a CPU was nobody else's."""

from __future__ import annotations

import os

import pytest
from gpu import quiet
from gpu.quiet import Turn, summary, turns, yardstick_us


def test_only_quiet_turns_count() -> None:
    found = [
        Turn(0, 3.0, {"a": 6.0}),
        Turn(1, 6.0, {"a": 1.0}),
        Turn(2, 3.2, {"a": 7.0}),
        Turn(3, 3.1, {"a": 9.0}),
        Turn(4, 3.4, {"a": 99.0}),
    ]
    assert [turn.cpu for turn in quiet.quiet(found)] == [0, 2, 3]
    assert summary("a", found) == (7.0, {"least_us": 1.0, "median_us_of_all_turns": 7.0, "most_us": 99.0})


def test_every_cpu_takes_its_turns_and_all_may_be_used_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = os.sched_getaffinity(0)
    seen: list[int] = []

    def measure() -> dict[str, float]:
        (cpu,) = os.sched_getaffinity(0)
        seen.append(cpu)
        return {"row": 1.0}

    found = turns(measure, 2)
    assert seen == sorted(cpus) * 2 == [turn.cpu for turn in found]
    assert all(turn.yardstick_us > 0 for turn in found)
    assert os.sched_getaffinity(0) == cpus

    def fail() -> dict[str, float]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        turns(fail, 1)
    assert os.sched_getaffinity(0) == cpus


def test_the_longer_yardstick_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter([1.0, 5.0] * 64)
    monkeypatch.setattr(quiet, "yardstick_us", lambda: next(given))
    assert all(turn.yardstick_us == 5.0 for turn in turns(dict, 1))


def test_the_yardstick_is_a_few_microseconds() -> None:
    assert 0.1 < yardstick_us() < 1000
