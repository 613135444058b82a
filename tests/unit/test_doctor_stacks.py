"""What stacks mean: a recorded deadlock, and made-up races and waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.doctor import stacks
from paceline.doctor.findings import Finding, Level
from paceline.doctor.stacks import Frame, Thread

RECORDED = Path(__file__).parent / "recorded" / "deadlock_three_threads_one_gpu.json"

TRACE = Frame("Tracer.trace", "torch/fx/_symbolic_trace.py", 890, ("old_is_fx_tracing_flag",))
WRAPPER = Frame("_TorchDynamoContext.__call__.<locals>.compile_wrapper", "torch/_dynamo/eval_frame.py", 1024)
COMPILE = Frame("_compile.<locals>._compile_inner", "torch/_dynamo/convert_frame.py", 1534)
LOCK = Frame("CatchErrorsWrapper.__call__", "torch/_dynamo/convert_frame.py", 2314)
ENGINE = Frame("_engine_run_backward", "torch/autograd/graph.py", 869)
LAZY = Frame("compile_fx_backward", "torch/_inductor/compile_fx.py", 2418)
BACKWARD = Frame("CompiledFunction._backward_impl", "torch/_functorch/_aot_autograd/runtime_wrappers.py", 2889)
BOOT = Frame("Thread._bootstrap", "threading.py", 1030)


def mine(line: int) -> Frame:
    return Frame("work", "train.py", line)


def thread(name: str, *frames: Frame, **known: bool) -> Thread:
    return Thread(name, frames, native=BOOT not in frames, **known)


def recognised(*threads: Thread) -> list[Finding]:
    return stacks.recognise(threads, "process 1")


def recorded() -> list[Thread]:
    return stacks.parse(json.loads(RECORDED.read_text()))


def test_the_recorded_deadlock_is_recognised() -> None:
    """Three threads on one H200, torch 2.11.0, as py-spy saw them; each hung there for good."""
    (found,) = stacks.recognise(recorded(), "process 416")
    assert found.level is Level.ERROR
    assert found.what == "deadlock between the compile lock and autograd"
    assert "drafter-2 holds the compile lock (it compiles, at work (hang.py:15))" in found.value
    assert "a thread without a name (454) is that thread" in found.value
    assert "drafter-1 waits for the same lock" in found.value
    assert "drafter-0 waits in its backward" in found.value
    assert "spawn" in found.remedy


@pytest.mark.parametrize("missing", ["drafter-2", "a thread without a name (454)"])
def test_either_half_alone_is_no_deadlock(missing: str) -> None:
    halves = [one for one in recorded() if one.name != missing]
    assert len(halves) == len(recorded()) - 1
    assert stacks.deadlock(halves, "") is None


def test_a_backward_that_computes_is_no_deadlock() -> None:
    """One thread waits for its own backward while autograd's thread compiles it: it holds the lock and works."""
    caller = thread("MainThread", ENGINE, mine(3), Frame("<module>", "train.py", 9))
    busy = thread("native", COMPILE, LAZY, BACKWARD)
    assert [found.what for found in recognised(caller, busy)] == ["compiling"]


def test_a_trace_beside_a_compiled_call_is_the_race() -> None:
    (found,) = recognised(
        thread("drafter-1", TRACE, WRAPPER, mine(5), BOOT), thread("drafter-2", WRAPPER, mine(7), BOOT)
    )
    assert (found.level, found.what) == (Level.ERROR, "FX race")
    assert "drafter-1 (from work (train.py:5)) is inside Tracer.trace while drafter-2" in found.value


def test_overlapping_traces_say_that_the_flag_stays() -> None:
    (found,) = recognised(thread("a", TRACE, mine(1), BOOT), thread("b", TRACE, mine(2), BOOT))
    assert (found.level, found.what) == (Level.ERROR, "FX race: overlapping traces")
    assert "for good" in found.why


def test_a_trace_beside_a_busy_thread_is_a_warning() -> None:
    (found,) = recognised(thread("a", TRACE, mine(1), BOOT), thread("b", mine(2), BOOT))
    assert (found.level, found.what) == (Level.WARNING, "FX race possible")
    assert "b (at work (train.py:2))" in found.value


def test_a_trace_alone_is_no_fault() -> None:
    joins = thread("MainThread", Frame("Thread.join", "threading.py", 1119), Frame("<module>", "train.py", 9))
    (found,) = recognised(thread("a", TRACE, mine(1), BOOT), joins)
    assert (found.level, found.what) == (Level.INFO, "tracing")


def test_the_tracer_is_known_by_its_local_even_if_the_file_is_not() -> None:
    frame = Frame("trace", "<frozen>", 3, ("old_is_fx_tracing_flag",))
    assert stacks.is_tracing(frame)
    assert not stacks.is_tracing(Frame("trace", "torch/jit/_trace.py", 3))


def test_threads_that_queue_for_the_compile_lock() -> None:
    found = recognised(thread("a", COMPILE, WRAPPER, mine(1), BOOT), thread("b", LOCK, WRAPPER, mine(2), BOOT))
    assert [(one.level, one.what) for one in found] == [
        (Level.INFO, "compiling"),
        (Level.WARNING, "threads queue for the compile lock"),
    ]


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3), "in a collective"),
        (Frame("synchronize", "torch/cuda/__init__.py", 3), "waits for the GPU"),
        (Frame("_next_data", "torch/utils/data/dataloader.py", 3), "loads data"),
    ],
)
def test_waits_are_named(frame: Frame, what: str) -> None:
    (found,) = recognised(thread("MainThread", frame, mine(4), BOOT))
    assert (found.level, found.what) == (Level.INFO, what)
    assert frame.place in found.value


def test_contention_needs_the_same_owner_in_every_look() -> None:
    def look(owner: str) -> list[Thread]:
        return [thread(name, mine(1), BOOT, active=True, owns_gil=name == owner) for name in ("a", "b", "c")]

    (found,) = stacks.contention([look("a"), look("a"), look("a")], "p")
    assert found.what == "contention for the interpreter"
    assert found.value.startswith("a held the GIL in each of 3 looks while b, c")
    assert stacks.contention([look("a"), look("b"), look("a")], "p") == []
    assert stacks.contention([look("a")], "p") == []


def test_unmoved_threads() -> None:
    first = [thread("a", mine(1)), thread("b", mine(1))]
    second = [thread("a", mine(1)), thread("b", mine(2))]
    assert stacks.unmoved([first, second]) == {"a"}
