"""The ways in which torch's FX-tracing flag kills a launch, and what the guard says to each.

The scenarios are in repro/fx_flag.py. They are certain on torch versions that keep the flag in a global of the process.
"""

import sys
from pathlib import Path

import pytest

from paceline.compiling import guard

sys.path.insert(0, str(Path(__file__).parent / "repro"))
from spawning import answer, start

pytestmark = pytest.mark.skipif(
    guard.implementation() != "global", reason="this torch keeps the flag per thread: the scenarios cannot happen"
)

LEAKS = ["overlap", "overlap_with_operator"]


@pytest.fixture(scope="module")
def found() -> dict:
    return answer(start("fx_flag.py"))


@pytest.fixture
def bare(found: dict) -> dict:
    """Without our rules, and without the guard."""
    return found["bare"]


@pytest.fixture
def guarded(found: dict) -> dict:
    return found["guarded"]


def fails(calls: list[str]) -> bool:
    return all(guard.PHRASE in call for call in calls)


def test_a_trace_in_one_thread_breaks_compiled_calls_in_another(bare: dict) -> None:
    assert fails(bare["race"]["during"]["calls"])
    assert bare["race"]["after"]["calls"] == ["ok"] * 3


@pytest.mark.parametrize("scenario", LEAKS)
def test_overlapping_traces_leave_the_flag_set_for_good(bare: dict, scenario: str) -> None:
    assert fails(bare[scenario]["after"]["calls"])


def test_a_fork_during_a_trace_leaves_the_flag_set_in_the_child_alone(bare: dict) -> None:
    assert fails(bare["fork"]["child"]["calls"])
    assert bare["fork"]["after"]["calls"] == ["ok"] * 3


def test_even_uninstalled_the_guard_sees_the_tracing_thread_in_its_frames(bare: dict) -> None:
    found = bare["race"]["during"]["guard"]
    assert found["thread"] == "drafter-2"
    assert "trace_slowly" in found["stack"][0]


def test_the_guard_names_thread_and_stack_of_a_race(guarded: dict) -> None:
    found = guarded["race"]["during"]["guard"]
    assert (found["thread"], found["leaked"]) == ("drafter-2", False)
    assert "fx_flag.py" in found["stack"][0]
    assert "trace_slowly" in found["stack"][0]
    assert found["message"].startswith("step 12: ")
    assert "is tracing right now" in found["message"]
    assert "spawn" in found["message"]


def test_the_bare_error_explains_itself(guarded: dict) -> None:
    assert "'drafter-2'" in guarded["race"]["explained"]
    assert "trace_slowly" in guarded["race"]["explained"]


@pytest.mark.parametrize("scenario", LEAKS)
def test_the_guard_names_who_left_the_flag_set(guarded: dict, scenario: str) -> None:
    found = guarded[scenario]["after"]["guard"]
    assert (found["thread"], found["leaked"]) == ("drafter-2", True)
    assert "fx_flag.py" in found["stack"][0]
    assert "at the same time as: drafter-1" in found["message"]
    assert "restart" in found["message"]


def test_the_guard_sees_modules_that_stayed_patched(guarded: dict) -> None:
    assert guarded["overlap"]["after"]["guard"]["patched"]


def test_the_guard_tells_a_forked_child_who_traced_in_its_parent(guarded: dict) -> None:
    found = guarded["fork"]["child"]["guard"]
    assert (found["thread"], found["leaked"]) == ("drafter-2", True)
    assert "forked" in found["message"]
    assert guarded["fork"]["after"]["guard"] is None


def test_spawned_workers_never_see_the_flag(guarded: dict) -> None:
    for worker in guarded["spawn"]["workers"]:
        assert not worker["first"]
        assert worker["traces"] > 0
        assert not worker["flag"]
        assert worker["calls"] == ["ok"] * 3
        assert worker["guard"] is None
