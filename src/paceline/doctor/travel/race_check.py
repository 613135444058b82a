"""Which hazards of threads and fork this torch has: each reproduced, with events instead of luck, in a fork of its own.

The process imports torch once; every reproduction then runs in a forked child, so that what one leaves behind (that is
what they show) cannot touch the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

_PATIENCE = 20.0


def main(argument: dict[str, Any]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    import torch
    import torch.fx.experimental.proxy_tensor

    torch.set_num_threads(1)
    _compiled()  # here, so that the children inherit what it imports
    return {"torch": torch.__version__, "hazards": {name: _apart(trial) for name, trial in TRIALS.items()}}


# -- the reproductions: each returns what was seen ---------------------------------------------------------------------


def call_during_trace() -> dict[str, Any]:
    """One thread is inside make_fx; another calls a function that was compiled and warmed up long before."""
    victim, entered, leave = _compiled(), threading.Event(), threading.Event()
    with _running(lambda: _trace(entered, leave)):
        entered.wait(_PATIENCE)
        during = _call(victim)
        leave.set()
    return {"hit": during != "fine", "seen": during, "after": _call(victim)}


def overlapping_traces() -> dict[str, Any]:
    """A begins to trace, B begins, A ends, B ends: B puts back the value that A had set."""
    victim = _compiled()
    a_in, b_in, a_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        _trace(a_in, b_in)
        a_out.set()

    with _running(first):
        a_in.wait(_PATIENCE)
        with _running(lambda: _trace(b_in, a_out)):
            pass
    return _verdict(victim)


def trace_and_eager_operator() -> dict[str, Any]:
    """The same with an eager higher-order operator (cond, eager flex_attention), which saves the flag too."""
    from torch._higher_order_ops.utils import _set_compilation_env

    victim = _compiled()
    a_in, b_in, a_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        _trace(a_in, b_in)
        a_out.set()

    def second() -> None:
        with _set_compilation_env():
            b_in.set()
            a_out.wait(_PATIENCE)

    with _running(first):
        a_in.wait(_PATIENCE)
        with _running(second):
            pass
    return _verdict(victim)


def fork_during_trace() -> dict[str, Any]:
    """fork() while another thread traces: the child has the flag, and not the thread that would clear it."""
    victim, entered, leave = _compiled(), threading.Event(), threading.Event()
    with _running(lambda: _trace(entered, leave)):
        entered.wait(_PATIENCE)
        seen = _apart(lambda: _verdict(victim))
        leave.set()
    return seen


TRIALS: dict[str, Callable[[], dict[str, Any]]] = {
    "call during a trace": call_during_trace,
    "overlapping traces": overlapping_traces,
    "trace over an eager operator": trace_and_eager_operator,
    "fork during a trace": fork_during_trace,
}


# -- their parts -----------------------------------------------------------------------------------------------------


def _compiled() -> Callable[[Any], Any]:
    import torch

    compiled = torch.compile(lambda x: x.relu() + 1, backend="eager")
    compiled(torch.ones(4))
    return compiled


def _trace(entered: threading.Event, leave: threading.Event) -> None:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(x: Any) -> Any:
        entered.set()
        leave.wait(_PATIENCE)
        return x + 1

    # Overlapping traces may break each other besides; what they leave behind is looked at afterwards.
    with contextlib.suppress(Exception):
        make_fx(traced)(torch.ones(4))
    entered.set()


def _call(victim: Callable[[Any], Any]) -> str:
    import torch

    try:
        victim(torch.ones(4))
    except Exception as fault:  # noqa: BLE001  which one it is, is the result
        return f"{type(fault).__name__}: {str(fault).splitlines()[0][:120]}"
    return "fine"


def _verdict(victim: Callable[[Any], Any]) -> dict[str, Any]:
    """A compiled call after every trace has ended must work."""
    seen = _call(victim)
    return {"hit": seen != "fine", "seen": seen}


@contextlib.contextmanager
def _running(target: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_PATIENCE)


def _apart(trial: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The trial's result from a forked child; a child that dies or hangs is a result too."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer_and_exit(trial, writing)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], 3 * _PATIENCE)
    data = b"".join(iter(lambda: os.read(reading, 65536), b"")) if ready else b""
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(data) if data else {"fault": "the child hung" if not ready else "the child died"}


def _answer_and_exit(trial: Callable[[], dict[str, Any]], writing: int) -> None:
    try:
        answer = trial()
    except Exception as fault:  # noqa: BLE001  it goes to the parent
        answer = {"fault": f"{type(fault).__name__}: {fault}"[:300]}
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)
