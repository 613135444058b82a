"""Who sets torch's "FX is tracing" flag: recorded, checked between steps, explained.

Every call of a ``torch.compile``d function first asks whether FX is tracing, and raises "Detected that you are using
FX to symbolically trace a dynamo-optimized function" if so. Up to torch 2.13 that flag is one global of the process,
saved and restored by every trace, so a thread that traces breaks every other thread's compiled calls; two traces that
overlap, or a fork during one, leave it set for good. From 2.14 on it is kept per thread, but the patches that a trace
makes (``CURRENT_PATCHER``, ``nn.Module.__call__``) are still global.

Works alone, in anyone's script::

    import paceline.compiling.guard as guard

    guard.install()  # once, at the start
    for step in range(steps):
        guard.check(f"step {step}")  # well under a microsecond while nothing is wrong
        with guard.explain(f"step {step}"):  # turns torch's bare error into one that names thread and stack
            train_step()

`install` wraps ``torch.fx.Tracer.trace``, which runs only while something compiles or traces, never in a step that is
already compiled. Bookkeeping takes no lock, so that a fork can never inherit a held one; each change is one dict or
deque operation, atomic in CPython.
"""

import contextlib
import functools
import itertools
import os
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Literal

import torch
import torch._higher_order_ops.utils as higher_order_utils
import torch.fx._symbolic_trace as symbolic_trace

Implementation = Literal["global", "per thread", "unknown"]

PHRASE = "using FX to symbolically trace"
"""What torch's own error contains, in every version from 2.5 on."""

_TORCH_FOLDER = str(Path(torch.__file__ or "").resolve().parent) + os.sep
_STDLIB_FOLDER = sysconfig.get_paths()["stdlib"] + os.sep
_WRAPPERS = ("eval_frame.py", "torch/_compile.py")
"""Frames between any two others: they say nothing."""
_ENV_NAME = "_set_compilation_env"

_torch_names: Mapping[str, Any] = vars(symbolic_trace)
_original_trace: Callable[..., Any] = symbolic_trace.Tracer.trace
_original_env: Callable[..., Any] = vars(higher_order_utils)[_ENV_NAME]


@dataclass
class Trace:
    """One passage through ``Tracer.trace`` (or an eager higher-order operator, which writes the same flag)."""

    number: int
    kind: str
    thread: str
    thread_id: int
    native_id: int
    pid: int
    stack: tuple[str, ...]
    started: float
    overlapped: list[str] = field(default_factory=list)
    ended: float | None = None

    def of_this_process(self) -> bool:
        """False in a child that was forked while its parent traced."""
        return self.pid == os.getpid()

    def describe(self) -> str:
        """Thread, kind, overlaps and stack, over several lines."""
        lines = [f"thread {self.thread!r} (native id {self.native_id}), {self.kind}"]
        if self.overlapped:
            lines.append(f"  at the same time as: {', '.join(self.overlapped)}")
        return "\n".join(lines + [f"  {line}" for line in self.stack])


@dataclass
class _Record:
    """Everything that this module remembers, per process."""

    installed: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    active: dict[int, Trace] = field(default_factory=dict)
    recent: deque[Trace] = field(default_factory=lambda: deque(maxlen=16))
    leaks: deque[Trace] = field(default_factory=lambda: deque(maxlen=1))
    counts: dict[int, int] = field(default_factory=dict)
    """Traces by thread: each thread writes its own entry, so that none is lost."""
    clean_module_call: object = _torch_names["_orig_module_call"]


_record = _Record()


@dataclass(frozen=True)
class GuardState:
    """What `state` saw: read-only, safe to ask for from any thread and between any two instructions.

    `flag` is the process's flag, or the asking thread's where torch keeps one per thread. `leaked`: set although no
    trace is running that would clear it again. `culprit`: the trace that runs now, or that left the flag set.
    """

    flag: bool
    implementation: Implementation
    installed: bool
    active: tuple[Trace, ...]
    leaked: bool
    culprit: Trace | None
    patcher_left: bool
    module_call_patched: bool
    traces: int

    @property
    def clear(self) -> bool:
        """Nothing is wrong: compiled functions can be called."""
        return not (self.flag or self.patcher_left or self.module_call_patched)


class TracingFlagSet(RuntimeError):
    """Torch believes that FX is tracing; compiled functions cannot be called. Says who, from where, and the cure."""

    def __init__(self, message: str, state: GuardState) -> None:
        super().__init__(message)
        self.state = state
        self.leaked = state.leaked
        self.thread = state.culprit.thread if state.culprit else None
        self.stack = state.culprit.stack if state.culprit else ()


def implementation() -> Implementation:
    """How this torch keeps the flag, from the names that its module defines."""
    if "_get_is_fx_tracing" in _torch_names:
        return "per thread"
    return "global" if "_is_fx_tracing_flag" in _torch_names else "unknown"


_IMPLEMENTATION = implementation()


def read_flag() -> bool:
    """The raw flag: the process's, or this thread's from torch 2.14 on."""
    if _IMPLEMENTATION == "global":
        return _torch_names["_is_fx_tracing_flag"]
    if _IMPLEMENTATION == "per thread":
        return _torch_names["_get_is_fx_tracing"]()
    return False


def traces() -> int:
    """How often ``Tracer.trace`` ran since `install`. 0 after a start is the proof that nothing was compiled."""
    return sum(list(_record.counts.values()))


def install() -> None:
    """Record who traces, from now on. Call it once, early; a second call does nothing."""
    if _record.installed:
        return
    symbolic_trace.Tracer.trace = _recording_trace
    _replace_everywhere(_ENV_NAME, _original_env, _recording_env)
    _record.installed = True


def uninstall() -> None:
    """Take the wrappers out again and forget what they recorded. For tests."""
    if symbolic_trace.Tracer.trace is _recording_trace:
        symbolic_trace.Tracer.trace = _original_trace
    _replace_everywhere(_ENV_NAME, _recording_env, _original_env)
    for records in (_record.active, _record.recent, _record.leaks, _record.counts):
        records.clear()
    _record.installed = False


def check(where: str = "") -> None:
    """Raise if compiled functions cannot be called now.

    Call it between steps, in the thread that calls compiled code.

    Args:
        where: what the error should name, such as "step 12".

    Raises:
        TracingFlagSet: names the thread and the stack that set the flag, whether it is being traced now or the flag
            has leaked for good, and the cure.
    """
    if not (read_flag() or _torch_names["CURRENT_PATCHER"] is not None or _module_call_is_patched()):
        return
    raise _explained(where, state())


@contextlib.contextmanager
def explain(where: str = "") -> Iterator[None]:
    """Turn torch's bare FX-tracing error into `TracingFlagSet`. A ``with`` block or a decorator."""
    try:
        yield
    except TracingFlagSet:
        raise
    except RuntimeError as error:
        if PHRASE not in str(error):
            raise
        raise _explained(where, state()) from error


def state() -> GuardState:
    """The flag, how torch keeps it, who traces, and whether it leaked."""
    flag = read_flag()
    patcher_left = _torch_names["CURRENT_PATCHER"] is not None
    module_call_patched = _module_call_is_patched()
    active = tuple(list(_record.active.values())) if _record.installed else tuple(_traces_in_frames())
    running = tuple(trace for trace in active if trace.of_this_process())
    suspicious = flag or patcher_left or module_call_patched
    leaked = suspicious and (bool(_record.leaks) or not running)
    return GuardState(
        flag=flag,
        implementation=_IMPLEMENTATION,
        installed=_record.installed,
        active=running,
        leaked=leaked,
        culprit=_culprit(active, running, leaked),
        patcher_left=patcher_left,
        module_call_patched=module_call_patched,
        traces=traces(),
    )


def _culprit(active: tuple[Trace, ...], running: tuple[Trace, ...], leaked: bool) -> Trace | None:
    if leaked:
        inherited = [trace for trace in active if not trace.of_this_process()]
        return next(iter([*_record.leaks, *inherited]), _last_overlapping())
    mine = [trace for trace in running if trace.thread_id == threading.get_ident()]
    return next(iter([*mine, *running]), _last_of_another_thread())


def _last_overlapping() -> Trace | None:
    return next((trace for trace in reversed(list(_record.recent)) if trace.overlapped), None)


def _last_of_another_thread() -> Trace | None:
    """The race is often over before its victim can look: then the trace that ended last is the one it met."""
    me = threading.get_ident()
    return next((trace for trace in reversed(list(_record.recent)) if trace.thread_id != me), None)


def _module_call_is_patched() -> bool:
    """Whether FX's patch of ``nn.Module.__call__`` is in place; other libraries' wrappers do not count."""
    call = torch.nn.Module.__call__
    if call is _record.clean_module_call:
        return False
    if call.__code__.co_filename == _original_trace.__code__.co_filename:
        return True
    _record.clean_module_call = call
    return False


# -- recording -------------------------------------------------------------------------------------------------------


@functools.wraps(_original_trace)
def _recording_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
    me = threading.get_ident()
    _record.counts[me] = _record.counts.get(me, 0) + 1
    with _recorded(f"FX trace by {type(self).__name__}"):
        return _original_trace(self, *args, **kwargs)


@contextlib.contextmanager
def _recording_env(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Eager higher-order operators (cond, scan, eager flex_attention) save and restore the same flag."""
    with _recorded("eager higher-order operator"), _original_env(*args, **kwargs):
        yield


@contextlib.contextmanager
def _recorded(kind: str) -> Iterator[None]:
    trace = _begin(kind, sys._getframe(3))
    try:
        yield
    finally:
        _end(trace)


def _begin(kind: str, frame: FrameType) -> Trace:
    thread = threading.current_thread()
    trace = Trace(
        number=next(_record.numbers),
        kind=kind,
        thread=thread.name,
        thread_id=threading.get_ident(),
        native_id=threading.get_native_id(),
        pid=os.getpid(),
        stack=short_stack(frame),
        started=time.time(),
    )
    others = [other for other in list(_record.active.values()) if other.thread_id != trace.thread_id]
    for other in others:
        trace.overlapped.append(other.thread)
        other.overlapped.append(trace.thread)
    if not _record.active and not read_flag():
        _record.leaks.clear()
    _record.active[trace.number] = trace
    return trace


def _end(trace: Trace) -> None:
    trace.ended = time.time()
    _record.active.pop(trace.number, None)
    _record.recent.append(trace)
    nobody_traces = not any(other.of_this_process() for other in list(_record.active.values()))
    if nobody_traces and (read_flag() or _torch_names["CURRENT_PATCHER"] is not None):
        _record.leaks.append(trace)


def _replace_everywhere(name: str, old: object, new: object) -> None:
    """Modules that took the function by ``from … import`` hold their own reference."""
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    for names in map(vars, modules):
        if names.get(name) is old:
            names[name] = new


# -- stacks ----------------------------------------------------------------------------------------------------------


def short_stack(frame: FrameType | None, user_frames: int = 6, torch_frames: int = 2) -> tuple[str, ...]:
    """The innermost frames of the user's own code, then the innermost of torch's, as "file:line function"."""
    own: list[str] = []
    torchs: list[str] = []
    while frame is not None and len(own) < user_frames:
        code = frame.f_code
        if code.co_filename.startswith(_TORCH_FOLDER):
            if len(torchs) < torch_frames and not code.co_filename.endswith(_WRAPPERS):
                torchs.append(_place(code, frame.f_lineno))
        elif not _is_plumbing(code):
            own.append(_place(code, frame.f_lineno))
        frame = frame.f_back
    return tuple(own + torchs)


def _is_plumbing(code: CodeType) -> bool:
    name = code.co_filename
    return name == __file__ or (name.startswith(_STDLIB_FOLDER) and "site-packages" not in name)


def _place(code: CodeType, line: int) -> str:
    name = code.co_filename
    short = name.split("site-packages" + os.sep)[-1]
    return f"{short}:{line} {code.co_name}"


def _traces_in_frames() -> Iterator[Trace]:
    """Threads inside ``Tracer.trace`` right now, read from their frames: all that can be known without `install`."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    for thread_id, frame in sys._current_frames().items():
        inside: FrameType | None = frame
        while inside is not None and inside.f_code is not _original_trace.__code__:
            inside = inside.f_back
        if inside is None:
            continue
        thread = names.get(thread_id)
        yield Trace(
            number=0,
            kind="FX trace (seen in its frames)",
            thread=thread.name if thread else f"thread {thread_id}",
            thread_id=thread_id,
            native_id=(thread.native_id or 0) if thread else 0,
            pid=os.getpid(),
            stack=short_stack(inside.f_back),
            started=time.time(),
        )


# -- words -----------------------------------------------------------------------------------------------------------

_SPAWN = (
    "drive each device from a process of its own, started by spawn (never fork, never threads), "
    "and let one thread of it call compiled code"
)
_WARM = "run every shape once, forward and backward, in that thread before any other thread starts"


def _explained(where: str, now: GuardState) -> TracingFlagSet:
    at = f"{where}: " if where else ""
    what, cure = _verdict(now)
    who = now.culprit.describe() if now.culprit else _nobody_known(now)
    message = f"{at}torch believes that FX is tracing, so compiled functions cannot be called: {what}.\n{who}\n"
    return TracingFlagSet(f"{message}cure: {cure}", now)


def _verdict(now: GuardState) -> tuple[str, str]:
    """(what happened, what to do)."""
    culprit = now.culprit
    if now.leaked and culprit and not culprit.of_this_process():
        return (
            f"this process was forked while thread {culprit.thread!r} of its parent (pid {culprit.pid}) was tracing, "
            "and inherited the flag set for good",
            f"restart it, and start processes with spawn: {_SPAWN}",
        )
    if now.leaked:
        return (
            f"nobody is tracing, the mark was left behind for good ({_marks(now)}); "
            "this happens when traces of two threads overlap, or a process is forked during one",
            f"this process cannot be saved: restart it. Then {_SPAWN}",
        )
    if culprit and culprit.ended is None and culprit.thread_id == threading.get_ident():
        return (
            "this very thread is inside an FX trace",
            "call the uncompiled function inside your own make_fx, symbolic_trace or custom operator",
        )
    if culprit and culprit.ended is None:
        return (f"another thread, {culprit.thread!r}, is tracing right now", f"{_SPAWN}; or {_WARM}")
    return ("another thread was tracing at that moment, and has finished since", f"{_SPAWN}; or {_WARM}")


def _marks(now: GuardState) -> str:
    marks = {
        "the flag is set": now.flag,
        "CURRENT_PATCHER is not None": now.patcher_left,
        "nn.Module.__call__ is still patched": now.module_call_patched,
    }
    return ", ".join(mark for mark, present in marks.items() if present)


def _nobody_known(now: GuardState) -> str:
    if now.installed:
        return "no trace was recorded that could have left it: it was set before the guard was installed, or by hand"
    return "who did it is not known: call paceline.compiling.guard.install() at the start of the program"
