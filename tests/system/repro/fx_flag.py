"""How torch's FX-tracing flag breaks compiled calls, each way made certain by events instead of chance.

    python fx_flag.py

Prints one JSON object: for each scenario what the calls of a compiled function said, and what the guard said; first
"bare", with nothing installed, then "guarded".
"""

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable

import torch
import torch.fx._symbolic_trace as symbolic_trace
from torch._higher_order_ops.utils import _set_compilation_env
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.compiling import guard

X = torch.ones(4)
WAIT = 20


@torch.compile(backend="eager")
def victim(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


def call_victim() -> str:
    """What a compiled call does now: "ok", or the first line of its error."""
    try:
        victim(X)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "ok"


def facts(where: str) -> dict:
    """The flag, three compiled calls, and the guard's words about it."""
    found = {"flag": guard.read_flag(), "calls": [call_victim() for _ in range(3)], "guard": None}
    try:
        guard.check(where)
    except guard.TracingFlagSet as error:
        found["guard"] = {
            "message": str(error),
            "thread": error.thread,
            "stack": list(error.stack),
            "leaked": error.leaked,
            "patched": error.state.module_call_patched,
        }
    return found


def in_thread(name: str, action: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            action()
        except AssertionError as error:  # torch notices its lost patcher only as it leaves the trace
            print(f"{name}: {error}", file=sys.stderr)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread


class SlowTrace:
    """A trace in a thread of its own that stays inside until it is let go."""

    def __init__(self, name: str) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = in_thread(name, self.trace_slowly)
        assert self.inside.wait(WAIT)

    def trace_slowly(self) -> None:
        def body(x: torch.Tensor) -> torch.Tensor:
            self.inside.set()
            self.leave.wait(WAIT)
            return x + 1

        make_fx(body)(X)

    def end(self) -> None:
        self.leave.set()
        self.thread.join(WAIT)


def race() -> dict:
    """One thread traces while another calls a function that was compiled long ago."""
    tracer = SlowTrace("drafter-2")
    during = facts("step 12")
    explained = explain()
    tracer.end()
    return {"during": during, "explained": explained, "after": facts("step 13")}


def explain() -> str:
    try:
        with guard.explain("step 12"):
            victim(X)
    except guard.TracingFlagSet as error:
        return str(error)
    return "no error"


def overlap() -> dict:
    """A enters, B enters, A leaves, B leaves: B puts back the flag that A had set."""
    first = SlowTrace("drafter-1")
    second = SlowTrace("drafter-2")
    first.end()
    second.end()
    return {"after": facts("step 12")}


def overlap_with_operator() -> dict:
    """The same with an eager higher-order operator (cond, scan, eager flex_attention) in the second thread."""
    tracer = SlowTrace("drafter-1")
    inside, leave = threading.Event(), threading.Event()

    def eager_operator() -> None:
        with _set_compilation_env():
            inside.set()
            leave.wait(WAIT)

    operator = in_thread("drafter-2", eager_operator)
    assert inside.wait(WAIT)
    tracer.end()
    leave.set()
    operator.join(WAIT)
    return {"after": facts("step 12")}


def fork() -> dict:
    """fork() while another thread traces: the child has the flag, and nobody to clear it."""
    tracer = SlowTrace("drafter-2")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(facts("first step of the child")).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        in_child = json.loads(pipe.read())
    os.waitpid(child, 0)
    tracer.end()
    return {"child": in_child, "after": facts("step 12")}


def spawned(worker: int, answers: "multiprocessing.Queue") -> None:
    guard.install()
    first = guard.read_flag()
    make_fx(lambda x: x.sin())(X)  # it traces as well, while the parent does and while the other worker does
    answers.put({"worker": worker, "first": first, "traces": guard.traces(), **facts(f"worker {worker}")})


def spawn() -> dict:
    """Two workers, spawned while a thread of the parent traces, compile and call at the same time."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    tracer = SlowTrace("drafter-2")
    workers = [context.Process(target=spawned, args=(worker, answers)) for worker in range(2)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    tracer.end()
    return {"workers": found}


def clean() -> None:
    """Undo a leak by hand, between scenarios."""
    names = vars(symbolic_trace)
    if guard.implementation() == "global":
        names["_is_fx_tracing_flag"] = False
    names["CURRENT_PATCHER"] = None
    torch.nn.Module.__call__ = names["_orig_module_call"]
    torch.nn.Module.__getattr__ = names["_orig_module_getattr"]


def run(scenarios: list[Callable[[], dict]]) -> dict:
    found = {}
    for scenario in scenarios:
        found[scenario.__name__] = scenario()
        clean()
    return found


def main() -> None:
    victim(X)
    bare = run([race, overlap, overlap_with_operator, fork])
    guard.install()
    guarded = run([race, overlap, overlap_with_operator, fork, spawn])
    print(json.dumps({"bare": bare, "guarded": guarded}))


if __name__ == "__main__":
    main()
