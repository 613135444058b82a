"""From what the workers of a run answered (or did not) to what is wrong: pure, so made-up answers are its tests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.doctor import stacks
from paceline.doctor.findings import Finding, Level, error, info, ok, warning

State = Literal["answered", "elsewhere", "gone", "stopped", "silent", "unopened", "ended"]
_RANKS = re.compile(r"\branks?\s+(\d+(?:(?:\s*,\s*|\s+and\s+)\d+)*)")
_WARM = re.compile(r"warm|compil|start|load", re.IGNORECASE)
_CIRCLE = 5.0
"""Seconds after which ranks that wait for each other are not merely seen at different instants."""
_NEAR_LIMIT = 5
_STOP_REST = "see the other workers; once they have ended too, go on with --resume"
_LONG = 60.0
"""Seconds in one phase after which a wait is no longer the pipeline's usual breathing."""


@dataclass(frozen=True)
class Seen:
    """One worker as it was seen. `now`: seconds of `time.time` on its host when it was looked at."""

    rank: int
    state: State
    now: float
    host: str | None = None
    pid: int | None = None
    answer: dict[str, Any] = field(default_factory=dict)
    heartbeat: dict[str, Any] = field(default_factory=dict)
    waited: float = 0.0
    letter: str = ""
    traced_by: int = 0
    fault: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def status(self) -> dict[str, Any]:
        """What the worker says of itself, on another host by its heartbeat; empty where it says nothing."""
        if self.state == "elsewhere" and self.heartbeat:
            return {**self.heartbeat, "since": self.heartbeat.get("time")}
        status = self.answer.get("status") or {}
        return status if "fault" not in status else {}

    @property
    def waits_for(self) -> str | None:
        return self.status.get("waits_for")

    @property
    def phase(self) -> str:
        return str(self.status.get("phase") or self.heartbeat.get("phase") or "?")

    @property
    def step(self) -> int | None:
        step = self.status.get("step", self.heartbeat.get("step"))
        return step if isinstance(step, int) else None

    @property
    def finished(self) -> bool:
        """Whether it said that its part of the run ended well. Its pid may be another process's by now."""
        return self.state in ("ended", "unopened", "elsewhere") and self.heartbeat.get("phase") == "end"

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop, and has. A launcher says so for workers that could not close their sockets."""
        return self.state in ("ended", "gone", "unopened", "elsewhere") and self.heartbeat.get("phase") == "interrupted"

    @property
    def is_there(self) -> bool:
        return not self.finished and not self.interrupted and self.state not in ("gone", "ended")

    @property
    def seconds_in_phase(self) -> float:
        since = self.status.get("since")
        return max(0.0, self.now - since) if isinstance(since, (int, float)) else 0.0

    @property
    def threads(self) -> list[stacks.Thread]:
        threads = self.answer.get("threads")
        return stacks.parse(threads) if isinstance(threads, list) else []


@dataclass(frozen=True)
class Left:
    """What a run has left in its folder.

    `step`: the last in its metrics. `total`: steps that its configuration asks for, 0 where epochs decide.
    `evaluations`: (step, τ). `checkpoint`: step of the newest whole one. `words`: its
    logs and stacks that are not empty, below the folder. `claimed`: its configuration lies there.
    """

    folder: str = ""
    step: int | None = None
    total: int = 0
    evaluations: tuple[tuple[int, float], ...] = ()
    checkpoint: int | None = None
    words: tuple[str, ...] = ()
    claimed: bool = True

    @property
    def standing(self) -> str:
        """How far the run came, and what of it is kept."""
        of = f" of {self.total}" if self.total else ""
        kept = "there is no whole checkpoint yet"
        if self.checkpoint is not None:
            kept = f"the newest whole checkpoint is of step {self.checkpoint}"
        # A step is recorded while the next one runs, so its checkpoint may be there first.
        return f"at step {max(self.step or 0, self.checkpoint or 0)}{of}; {kept}"

    def resumption(self, command: str = "") -> str:
        """How a run that was stopped on purpose goes on: by `command`, or from the configuration in its folder."""
        if not (command or self.claimed):
            return "start it again as before: it was stopped before it had written its configuration"
        own = f"paceline train {self.folder}/config.toml --resume (in the directory where it was started)"
        return f"go on from step {self.checkpoint or 0}: {command or own}"

    def words_of(self, rank: int) -> str:
        """Where this rank's last words are: only files that exist are named."""
        found = [f"{self.folder}/{path}" for path in self.words if f"rank-{rank}." in path]
        here = (
            [] if any("logs/" in path for path in found) else ["what it printed where it was started (terminal, job)"]
        )
        return f"read the end of {', '.join([*here, *found])}"

    @property
    def way_on(self) -> str:
        """How the run goes on when its cause is mended."""
        if self.checkpoint is not None:
            return self.resumption()
        return f"start again: there is no whole checkpoint yet, so remove {self.folder} or choose another run.name"


def left_from(left: dict[str, Any]) -> Left:
    """Of what the traveller `workers` found left in a run's folder."""
    return Left(
        folder=left["folder"],
        step=left["step"],
        total=left["total"],
        evaluations=tuple((step, tau) for step, tau in left["evaluations"]),
        checkpoint=left["checkpoint"],
        words=tuple(left["words"]),
        claimed=left["claimed"],
    )


def seen_from(facts: dict[str, Any]) -> list[Seen]:
    """The workers of what the traveller `workers` brought back."""
    return [
        Seen(
            rank=worker["rank"],
            state=worker["state"],
            now=(worker.get("answer") or {}).get("time") or facts["time"],
            host=worker.get("host"),
            pid=worker.get("pid"),
            answer=worker.get("answer") or {},
            heartbeat=worker.get("heartbeat") or {},
            waited=worker.get("waited", 0.0),
            letter=worker.get("letter", ""),
            traced_by=worker.get("traced_by", 0),
            fault=worker.get("fault", ""),
        )
        for worker in facts["workers"]
    ]


def diagnose(workers: Sequence[Seen], left: Left | None = None) -> list[Finding]:
    """What is wrong with a run, the cause before its consequences; one OK finding if nothing is."""
    left = left or Left()
    if not workers:
        return [
            error(
                "run",
                "no worker has ever answered here",
                "neither live/ nor heartbeat/ names a rank",
                "the run has not started, or this is not its folder",
                "give the run's own folder (runs/NAME), on the host where it runs",
            )
        ]
    if all(worker.finished for worker in workers):
        return [_finished(workers, left)]
    if all(worker.finished or worker.interrupted for worker in workers):
        return [warning("run", "was interrupted", left.standing, "it is not finished", left.resumption())]
    missing = [finding for worker in workers for finding in _absence(worker, workers, left)]
    waiting = _waits(workers)
    inside = [finding for worker in workers for finding in _inside(worker)]
    found = [*missing, *waiting, *inside]
    if all(finding.level <= Level.INFO for finding in found):
        found.insert(0, _all_well(workers))
    return found


# -- workers that do not answer --------------------------------------------------------------------------------------


def _absence(worker: Seen, workers: Sequence[Seen], left: Left) -> list[Finding]:
    last = _last_heard(worker)
    if worker.finished:
        return [info(worker.name, "has ended well", f"pid {worker.pid}{last}")]
    if worker.interrupted:
        return [
            warning(worker.name, "was interrupted", f"pid {worker.pid}{last}", "other workers were not", _STOP_REST)
        ]
    others_wait = any(other.is_there for other in workers if other is not worker)
    if worker.state in ("gone", "ended"):
        return [_end(worker, left, others_wait, last)]
    if worker.state == "stopped":
        return [_stop(worker, others_wait, last)]
    if worker.state == "silent":
        return [_silence(worker, last)]
    return _elsewhere_or_unopened(worker, last)


def _elsewhere_or_unopened(worker: Seen, last: str) -> list[Finding]:
    if worker.state == "elsewhere":
        return [
            info(worker.name, "runs on another host", worker.host, remedy=f"ask there: --through 'ssh {worker.host}'")
        ]
    unopened = info(worker.name, "has no socket", f"pid {worker.pid}{last}", "it is starting, or could not open one")
    return [unopened] if worker.state == "unopened" else []


def _end(worker: Seen, left: Left, others_wait: bool, last: str) -> Finding:
    how = "without closing its socket" if worker.state == "gone" else "before the run did"
    return error(
        worker.name,
        "the worker is gone",
        f"pid {worker.pid} has ended {how}{last}",
        "the others wait for it until their time-out" if others_wait else "no worker is left, so the run stands still",
        f"{left.words_of(worker.rank)}; where it says nothing, look for the OOM killer (dmesg | grep -i oom); "
        f"then {left.way_on}",
    )


def _stop(worker: Seen, others_wait: bool, last: str) -> Finding:
    tracer = f", traced by pid {worker.traced_by}" if worker.traced_by else ""
    return error(
        worker.name,
        "the worker is stopped",
        f"pid {worker.pid} is in state {worker.letter} (a stop signal or a debugger){tracer}{last}",
        "it does nothing, and the others wait for it" if others_wait else "it does nothing",
        f"end the debugger (pid {worker.traced_by})" if worker.traced_by else f"kill -CONT {worker.pid}",
    )


def _silence(worker: Seen, last: str) -> Finding:
    in_kernel = worker.letter == "D"
    why = (
        "it waits in the kernel (state D): a disk, a network file system or a driver does not answer"
        if in_kernel
        else "a native call holds the interpreter, so no thread of it can answer"
    )
    remedy = "look at dmesg and at the mounts" if in_kernel else f"paceline doctor --pid {worker.pid} shows its stacks"
    return error(
        worker.name,
        "the worker does not answer",
        f"pid {worker.pid} is alive (state {worker.letter or '?'}) but gave nothing in {worker.waited:.1f} s{last}",
        why,
        remedy,
    )


def _last_heard(worker: Seen) -> str:
    beat = worker.heartbeat
    if not beat:
        return ""
    ago = worker.now - float(beat.get("time", worker.now))
    return f"; last heard of {ago:.0f} s ago at step {beat.get('step')} in phase {beat.get('phase')}"


# -- who waits for whom ----------------------------------------------------------------------------------------------


def _waits(workers: Sequence[Seen]) -> list[Finding]:
    """One finding for each cause that ranks wait for, however long the chain that leads to it."""
    by_rank = {worker.rank: worker for worker in workers}
    causes: dict[tuple[int, ...], list[Seen]] = {}
    for worker in workers:
        if worker.waits_for:
            causes.setdefault(_root(worker, by_rank), []).append(worker)
    return [_wait(root, waiting, by_rank) for root, waiting in causes.items()]


def _named_ranks(worker: Seen) -> list[int]:
    numbers = [int(n) for found in _RANKS.findall(worker.waits_for or "") for n in re.findall(r"\d+", found)]
    return [number for number in numbers if number != worker.rank]


def _root(worker: Seen, by_rank: dict[int, Seen]) -> tuple[int, ...]:
    """The ranks at the end of the chain of waits: one that does not wait itself, a circle, or those that lag."""
    path = [worker.rank]
    while True:
        here = by_rank[path[-1]]
        ahead = _blockers(here, by_rank)
        if not ahead:
            return (path[-1],) if len(path) > 1 else ()
        if ahead[0] in path:
            return tuple(sorted(path[path.index(ahead[0]) :]))
        if ahead[0] not in by_rank:
            return (ahead[0],)
        path.append(ahead[0])


def _blockers(worker: Seen, by_rank: dict[int, Seen]) -> list[int]:
    """Of the ranks that it waits for, those that hold it up: in a collective, the ones that are not in it too."""
    return [rank for rank in _named_ranks(worker) if rank not in by_rank or _awaited(by_rank[rank]) != _awaited(worker)]


def _awaited(worker: Seen) -> str:
    """The thing alone, without the ranks it is awaited from: equal for all that wait in one collective."""
    text = worker.waits_for or ""
    found = _RANKS.search(text)
    return text[: found.start()] if found else text


def _wait(root: tuple[int, ...], waiting: list[Seen], by_rank: dict[int, Seen]) -> Finding:
    lines = "; ".join(f"{w.name} waits for {w.waits_for}" for w in waiting)
    subject = waiting[0].name if len(waiting) == 1 else f"{len(waiting)} ranks"
    if not root:
        return _unexplained(subject, lines, waiting)
    if len(root) > 1:
        circle = " and ".join(f"rank {rank}" for rank in root)
        if min(by_rank[rank].seconds_in_phase for rank in root) < _CIRCLE:
            return info(subject, "waits", lines, "a circle, but a young one: they were not asked at the same instant")
        return error(
            subject,
            "ranks wait for each other",
            lines,
            f"{circle} wait in a circle, so none of them will ever go on",
            "end the run, and keep the stacks below: transfers were launched in different orders on different ranks",
        )
    last = next(iter(root))
    culprit = by_rank.get(last)
    if culprit is None:
        return warning(
            subject,
            "waits for a rank that is not here",
            lines,
            f"rank {last} left no trace in this folder",
            f"see whether it started: logs/rank-{last}.log of this folder, where there is one, and its host",
        )
    doing, level = _doing(culprit)
    make = {Level.ERROR: error, Level.WARNING: warning}.get(level)
    value = f"{lines}; {culprit.name} {doing}"
    if make is None:
        return info(subject, "waits", value)
    return make(subject, "waits", value, f"{culprit.name} holds the others up", f"look at {culprit.name}")


def _unexplained(subject: str, lines: str, waiting: list[Seen]) -> Finding:
    longest = max(worker.seconds_in_phase for worker in waiting)
    if longest < _LONG:
        return info(subject, "waits", lines)
    return warning(
        subject,
        "waits",
        f"{lines}, for {longest:.0f} s",
        "every rank that is named waits in the same thing, so it is the transfer itself that does not end",
        "look at the network (NCCL_DEBUG=INFO at the next start) and at the ranks of other hosts",
    )


def _doing(worker: Seen) -> tuple[str, Level]:
    """What a rank that others wait for does, and how bad that is."""
    if worker.state != "answered":
        words = {"gone": "is gone", "stopped": "is stopped", "silent": "does not answer", "ended": "has ended"}
        return words.get(worker.state, f"runs on {worker.host}"), Level.ERROR if worker.state in words else Level.INFO
    threads = worker.threads
    lasting = f" for {worker.seconds_in_phase:.0f} s" if worker.seconds_in_phase >= 1 else ""
    if stacks.deadlock(threads, ""):
        return "is deadlocked between the compile lock and autograd (see below)", Level.ERROR
    at_work = [finding.value for finding in stacks.compiling(threads, "") if finding.what == "compiling"]
    if at_work:
        warm = bool(_WARM.search(worker.phase))
        return f"is compiling{lasting}: {at_work[0]}", Level.INFO if warm else Level.WARNING
    where = next((t.own_code.place for t in threads if t.own_code and t.name == "MainThread"), "")
    at = f", at {where}" if where else ""
    level = Level.WARNING if worker.seconds_in_phase >= _LONG else Level.INFO
    return f"is in phase {worker.phase}{lasting} (step {worker.step}){at}", level


# -- what an answer itself shows -------------------------------------------------------------------------------------


def _inside(worker: Seen) -> list[Finding]:
    if worker.state != "answered":
        return []
    serious = [f for f in stacks.recognise(worker.threads, worker.name) if f.level is Level.ERROR]
    return [*_faults(worker), *_flag(worker), *serious, *_recompiles(worker)]


def _faults(worker: Seen) -> list[Finding]:
    parts = {name: part["fault"] for name, part in worker.answer.items() if isinstance(part, dict) and "fault" in part}
    return [info(worker.name, f"its {name} could not be read", fault) for name, fault in parts.items()]


def _flag(worker: Seen) -> list[Finding]:
    """The FX flag outside a compilation: leaked, or set by a thread that traces."""
    fx = worker.answer.get("fx") or {}
    if not (fx.get("flag") or fx.get("patcher_left") or fx.get("module_call_patched")):
        return []
    by_itself = [t.name for t in worker.threads if t.find(stacks.is_tracing)]
    if not fx.get("leaked", not by_itself):
        return []  # somebody traces now: its stacks tell that story
    culprit = fx.get("culprit") or {}
    who = (
        f"set by thread {culprit['thread']!r} at {' <- '.join(culprit['stack'][:3])}"
        if culprit
        else "nobody traces now"
    )
    what = (
        "the FX-tracing flag is set for good"
        if fx.get("flag")
        else "FX's patch of nn.Module.__call__ was left in place"
    )
    return [
        error(
            worker.name,
            what,
            who,
            "every call of a compiled function in this process fails from now on",
            "restart the worker; let one thread of a process trace, and never fork while it does",
        )
    ]


def _recompiles(worker: Seen) -> list[Finding]:
    dynamo = worker.answer.get("dynamo") or {}
    again = dynamo.get("recompiles") or []
    if not again:
        return []
    last = again[-1]
    most = max(Counter((one["file"], one["line"]) for one in again).values())
    value = f"{len(again)}; the last: {last['function']} ({last['file']}:{last['line']}): {last['reason']}"
    if most < _NEAR_LIMIT:
        return [info(worker.name, "recompilations", value)]
    return [
        warning(
            worker.name,
            "recompilations",
            value,
            f"one function was compiled {most + 1} times; past its limit (8, unless set) it runs eager",
            "make the shape that changes a constant of the run",
        )
    ]


def _finished(workers: Sequence[Seen], left: Left) -> Finding:
    """What a run that ended well gave. A warm-up alone ends well too, and has made no step of a run."""
    step = left.step or 0
    reached = max((worker.step or 0 for worker in workers), default=0)
    if step < (left.total or 1) or reached < step:
        last = f"the last step in metrics.jsonl is {step}" if step else "no step is recorded, as after a warm-up alone"
        return ok("run", "all workers have ended well", last)
    measured = ""
    if left.evaluations:
        best, tau = max(left.evaluations, key=lambda one: (one[1], -one[0]))
        measured = f", τ {tau:.2f} (best at step {best})"
    return ok("run", "finished", f"{step} of {max(step, left.total)} steps{measured}")


def _all_well(workers: Sequence[Seen]) -> Finding:
    steps = [worker.step for worker in workers if worker.step is not None]
    span = (
        f"step {min(steps)}"
        if steps and min(steps) == max(steps)
        else f"steps {min(steps)} to {max(steps)}"
        if steps
        else "no step yet"
    )
    phases = ", ".join(sorted({worker.phase for worker in workers if worker.state == "answered"})) or "none answers"
    return ok("run", "nothing is wrong", f"{_count(workers)}; {span}; {phases}")


def _count(workers: Sequence[Seen]) -> str:
    answered = sum(worker.state == "answered" for worker in workers)
    return f"{answered} of {len(workers)} workers answer"
