"""The guard alone: cheap while clear, exact about this thread and others, out of the way after."""

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch import fx

from paceline.compiling import guard


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    guard.install()
    yield
    guard.uninstall()


class CallsBack(fx.Tracer):
    """A tracer that runs a function in the middle of its trace, and traces nothing else."""


def trace_and(action: object) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        action()  # type: ignore[operator]
        return x

    CallsBack().trace(body)


def test_clear_says_nothing_and_counts_nothing() -> None:
    guard.check("step 0")
    state = guard.state()
    assert state.clear
    assert (state.traces, state.active, state.culprit, state.installed) == (0, (), None, True)


def test_each_trace_is_counted_and_forgotten() -> None:
    for _ in range(3):
        fx.symbolic_trace(lambda x: x + 1)
    assert guard.traces() == 3
    assert guard.state().active == ()
    guard.check()


def test_inside_ones_own_trace_the_guard_says_so() -> None:
    caught: list[guard.TracingFlagSet] = []

    def look() -> None:
        with pytest.raises(guard.TracingFlagSet) as error:
            guard.check("inside")
        caught.append(error.value)

    trace_and(look)
    (error,) = caught
    assert (error.thread, error.leaked) == (threading.current_thread().name, False)
    assert "this very thread is inside an FX trace" in str(error)
    assert "test_compiling_guard.py" in error.stack[0]
    guard.check("after")


def test_the_flag_of_another_thread_is_explained_after_it_ended() -> None:
    thread = threading.Thread(target=lambda: fx.symbolic_trace(lambda x: x + 1), name="drafter-2")
    thread.start()
    thread.join(10)
    with pytest.raises(guard.TracingFlagSet, match="was tracing at that moment") as caught, guard.explain("step 9"):
        raise RuntimeError(f"Detected that you are {guard.PHRASE} a dynamo-optimized function.")
    assert caught.value.thread == "drafter-2"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"^ours$"), guard.explain("step 9"):
        raise RuntimeError("ours")


def test_explain_decorates() -> None:
    @guard.explain("evaluation")
    def evaluate() -> None:
        raise RuntimeError(guard.PHRASE)

    with pytest.raises(guard.TracingFlagSet, match=r"^evaluation: "):
        evaluate()


@pytest.mark.skipif(guard.implementation() != "global", reason="this torch keeps the flag per thread")
def test_a_flag_set_by_hand_is_a_leak_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic_trace, "_is_fx_tracing_flag", True)
    with pytest.raises(guard.TracingFlagSet, match="before the guard was installed, or by hand") as caught:
        guard.check("step 1")
    assert caught.value.leaked
    assert caught.value.thread is None


def test_a_module_call_wrapped_by_someone_else_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.nn.Module.__call__

    def profiled(self: torch.nn.Module, *inputs: torch.Tensor) -> object:
        return original(self, *inputs)

    monkeypatch.setattr(torch.nn.Module, "__call__", profiled)
    guard.check("step 1")


def test_installing_twice_wraps_once() -> None:
    guard.install()
    fx.symbolic_trace(lambda x: x + 1)
    assert guard.traces() == 1


def test_usable_alone_without_the_rest_of_paceline() -> None:
    program = """
import sys
import paceline.compiling.guard as guard
guard.install()
guard.check("step 0")
ours = sorted(name for name in sys.modules if name.startswith("paceline"))
assert ours == ["paceline", "paceline.compiling", "paceline.compiling.guard"], ours
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})
