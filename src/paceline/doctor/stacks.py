"""What the stacks of one process say: FX races, the compile-lock deadlock, waits in collectives and data loading.

Works on stacks from a worker's own answer and on py-spy's alike; pure, so that recorded dumps are its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.doctor.findings import Finding, error, info, warning

_OWN_PROCESS = (
    "drive each device from a process of its own, started by spawn, and let one thread of it call compiled code"
)


@dataclass(frozen=True)
class Frame:
    function: str
    file: str
    line: int
    locals: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """The function's own name, without the functions and classes round it."""
        return self.function.rpartition(".")[2]

    @property
    def place(self) -> str:
        return f"{self.short} ({self.file}:{self.line})"

    def is_in(self, ending: str, *functions: str) -> bool:
        """Whether the frame is one of `functions` (any, if none is named) in the file that ends so."""
        return self.file.endswith(ending) and (not functions or self.short in functions)


@dataclass(frozen=True)
class Thread:
    """`frames`: innermost first. `active`, `owns_gil`: None where that was not seen."""

    name: str
    frames: tuple[Frame, ...]
    os_id: int | None = None
    active: bool | None = None
    owns_gil: bool | None = None
    native: bool = False

    def find(self, test: Callable[[Frame], bool]) -> Frame | None:
        return next((frame for frame in self.frames if test(frame)), None)

    @property
    def own_code(self) -> Frame | None:
        """The innermost frame that is neither torch's nor Python's library: where the user's code stands."""
        return self.find(lambda frame: not _is_library(frame))


_LIBRARIES = ("torch/", "threading.py", "<frozen", "concurrent/futures", "multiprocessing/", "queue.py")


def _is_library(frame: Frame) -> bool:
    inner = frame.file.rsplit("site-packages/", maxsplit=1)[-1]
    generated = (frame.file, frame.short) == ("<string>", "<lambda>")  # torch's tracers write these
    in_python = "/lib/python3" in frame.file or inner in ("selectors.py", "socket.py")
    return generated or in_python or inner.startswith(_LIBRARIES)


def parse(threads: Iterable[dict[str, Any]]) -> list[Thread]:
    """Threads as the travellers write them down."""
    return [_parse_thread(thread) for thread in threads]


def _parse_thread(thread: dict[str, Any]) -> Thread:
    frames = tuple(
        Frame(frame["name"], frame["file"], frame["line"], tuple(frame.get("locals", ()))) for frame in thread["frames"]
    )
    os_id = thread.get("os_thread_id")
    return Thread(
        name=thread.get("name") or f"a thread without a name ({os_id or thread.get('thread_id')})",
        frames=frames,
        os_id=os_id,
        active=thread.get("active"),
        owns_gil=thread.get("owns_gil"),
        native=not any(frame.is_in("threading.py", "_bootstrap") or frame.short == "<module>" for frame in frames),
    )


# -- what single frames mean -----------------------------------------------------------------------------------------


def is_tracing(frame: Frame) -> bool:
    """Inside FX's tracer, for as long as which the flag is set."""
    return frame.is_in("torch/fx/_symbolic_trace.py", "trace") or "old_is_fx_tracing_flag" in frame.locals


def is_compiling(frame: Frame) -> bool:
    return frame.is_in("torch/_dynamo/convert_frame.py", "_compile", "_compile_inner", "compile_inner")


def calls_compiled(frame: Frame) -> bool:
    return frame.is_in("torch/_dynamo/eval_frame.py", "compile_wrapper")


def is_in_backward(frame: Frame) -> bool:
    return frame.is_in("torch/autograd/graph.py", "_engine_run_backward") or frame.is_in(
        "torch/autograd/__init__.py", "grad", "backward"
    )


def _compiles_backward(frame: Frame) -> bool:
    return frame.is_in("torch/_inductor/compile_fx.py", "compile_fx_backward", "bw_compiler") or frame.is_in(
        "_functorch/_aot_autograd/runtime_wrappers.py", "_backward_impl"
    )


def waits_for_lock(thread: Thread) -> bool:
    """Its innermost frame is one whose next act is to take the compile lock."""
    if not thread.frames or thread.active:
        return False
    innermost = thread.frames[0]
    return innermost.is_in("torch/_dynamo/convert_frame.py", "__call__") or innermost.is_in(
        "torch/_inductor/compile_fx.py", "compile_fx_backward", "bw_compiler"
    )


def is_collective(frame: Frame) -> bool:
    collective = frame.is_in("torch/distributed/distributed_c10d.py") and not frame.short.startswith("wrapper")
    return collective or frame.is_in("torch/distributed/_functional_collectives.py", "wait_tensor")


def _waits_for_device(frame: Frame) -> bool:
    return frame.is_in("torch/cuda/__init__.py", "synchronize") or frame.is_in("torch/cuda/streams.py", "synchronize")


def _loads_data(frame: Frame) -> bool:
    return frame.is_in("torch/utils/data/dataloader.py") or "/paceline/data/" in f"/{frame.file}"


# -- recognising -----------------------------------------------------------------------------------------------------


def recognise(threads: Sequence[Thread], subject: str) -> list[Finding]:
    """What is wrong with a process, by one look at all of its threads. Nothing, if nothing is recognised."""
    dead = deadlock(threads, subject)
    found = [dead] if dead else [*races(threads, subject), *compiling(threads, subject)]
    return [*found, *waits(threads, subject)]


def deadlock(threads: Sequence[Thread], subject: str) -> Finding | None:
    """One thread holds the compile lock and waits for autograd; autograd's thread waits for the compile lock."""
    holders = [t for t in threads if t.frames and is_in_backward(t.frames[0]) and t.find(is_compiling)]
    waiters = [t for t in threads if waits_for_lock(t) and t.find(_compiles_backward)]
    if not (holders and waiters):
        return None
    others = [t.name for t in threads if waits_for_lock(t) and t not in waiters]
    blocked = [t.name for t in threads if t.frames and is_in_backward(t.frames[0]) and t not in holders]
    behind = [
        *(f"{name} waits for the same lock" for name in others),
        *(f"{name} waits in its backward" for name in blocked),
    ]
    return error(
        subject,
        "deadlock between the compile lock and autograd",
        f"{holders[0].name} holds the compile lock (it compiles, at {_where(holders[0])}) and waits in "
        f"{holders[0].frames[0].place} for the device's autograd thread; {waiters[0].name} is that thread and waits "
        f"for the compile lock, to compile a backward at {waiters[0].frames[0].place}"
        + "".join(f"; {line}" for line in behind),
        "it never ends: several threads of this process compile for one device, and a backward that is compiled "
        "lazily needs the lock that the tracing of another forward holds",
        f"end the process; {_OWN_PROCESS}",
    )


def races(threads: Sequence[Thread], subject: str) -> list[Finding]:
    """A thread that traces, and others that call compiled functions or trace as well."""
    tracing = [t for t in threads if t.find(is_tracing)]
    if not tracing:
        return []
    names = " and ".join(f"{t.name} (from {_where(t)})" for t in tracing)
    if len(tracing) > 1:
        return [
            error(
                subject,
                "FX race: overlapping traces",
                f"{names} are inside Tracer.trace at once",
                "up to torch 2.13 each puts back the flag that it found, so it stays set for good, and every later "
                "call of a compiled function fails with 'Detected that you are using FX to symbolically trace'",
                f"{_OWN_PROCESS}; then restart: a flag that has leaked is never cleared",
            )
        ]
    callers = [t for t in threads if t not in tracing and (t.find(calls_compiled) or t.find(is_compiling))]
    if callers:
        return [
            error(
                subject,
                "FX race",
                f"{names} is inside Tracer.trace while {', '.join(t.name for t in callers)} calls a compiled function",
                "up to torch 2.13 the flag that Tracer.trace sets is one for the whole process: each compiled call "
                "asks it and fails with 'Detected that you are using FX to symbolically trace a dynamo-optimized "
                "function'",
                _OWN_PROCESS,
            )
        ]
    busy = [t for t in threads if t not in tracing and not t.native and _runs_own_code(t)]
    value = f"{names} is inside Tracer.trace, which sets the FX-tracing flag of the whole process (up to torch 2.13)"
    if not busy:
        return [info(subject, "tracing", value, "nothing is wrong while no other thread calls compiled functions")]
    return [
        warning(
            subject,
            "FX race possible",
            f"{value}; also running: {', '.join(f'{t.name} (at {_where(t)})' for t in busy)}",
            "if one of them calls a compiled function before the trace ends, that call fails with 'Detected that you "
            "are using FX to symbolically trace a dynamo-optimized function'",
            _OWN_PROCESS,
        )
    ]


def _runs_own_code(thread: Thread) -> bool:
    """Neither Python's own helper threads nor one that merely waits for others to end."""
    waits = thread.frames[0].is_in("threading.py") if thread.frames else True
    main_waits = thread.find(lambda frame: frame.is_in("threading.py", "join", "_wait_for_tstate_lock"))
    return thread.own_code is not None and not (waits and main_waits) and not thread.name.startswith("paceline-live")


def compiling(threads: Sequence[Thread], subject: str) -> list[Finding]:
    """Who compiles now, and who queues for the lock behind it."""
    at_work = [t for t in threads if (t.find(is_compiling) or t.find(_compiles_backward)) and not waits_for_lock(t)]
    queue = [t for t in threads if waits_for_lock(t)]
    found = [info(subject, "compiling", f"{t.name} compiles what {_where(t)} calls") for t in at_work]
    if at_work and queue:
        found.append(
            warning(
                subject,
                "threads queue for the compile lock",
                ", ".join(f"{t.name} (at {_where(t)})" for t in queue),
                "several threads of this process compile: that is the ground on which FX races and deadlocks grow",
                _OWN_PROCESS,
            )
        )
    return found


def waits(threads: Sequence[Thread], subject: str) -> list[Finding]:
    """Waits that are no fault by themselves, but say where to look."""
    found: list[Finding] = []
    for thread in threads:
        if frame := thread.find(is_collective):
            value = f"{thread.name} is in {frame.place}, called at {_where(thread)}"
            found.append(info(subject, "in a collective", value, "it waits until every rank of the group has come"))
        elif frame := thread.find(_waits_for_device):
            value = f"{thread.name} waits for the GPU in {frame.place}, called at {_where(thread)}"
            found.append(
                info(subject, "waits for the GPU", value, "the GPU computes, or a kernel on it waits for a peer")
            )
        elif not thread.native and (frame := thread.find(_loads_data)):
            value = f"{thread.name} is in {frame.place}"
            found.append(info(subject, "loads data", value, "if it stays there, data comes slower than it is used"))
    return found


def contention(samples: Sequence[Sequence[Thread]], subject: str) -> list[Finding]:
    """Threads that want to run Python while one and the same other holds the interpreter in every look."""
    if len(samples) < 2:
        return []
    owners = [{t.name for t in threads if t.owns_gil} for threads in samples]
    wanting = [{t.name for t in threads if t.active and not t.owns_gil and not t.native} for threads in samples]
    always, eager = set.intersection(*owners), set.intersection(*wanting)
    if not always or len(eager) < 2:
        return []
    return [
        warning(
            subject,
            "contention for the interpreter",
            f"{', '.join(sorted(always))} held the GIL in each of {len(samples)} looks while "
            f"{', '.join(sorted(eager))} wanted to run",
            "threads of one process take turns in Python, so devices that they drive wait for each other",
            _OWN_PROCESS,
        )
    ]


def unmoved(samples: Sequence[Sequence[Thread]]) -> set[str]:
    """Names of the threads whose stacks were the same in every look."""
    stacks = [{thread.name: thread.frames for thread in threads} for threads in samples]
    return {
        name for name, frames in (stacks[0] if stacks else {}).items() if all(s.get(name) == frames for s in stacks)
    }


def _where(thread: Thread) -> str:
    frame = thread.own_code
    return frame.place if frame else (thread.frames[-1].place if thread.frames else "nowhere in Python")
