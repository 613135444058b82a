"""The phase before step 0: the real modules run once on synthetic batches, one worker first, the rest on its cache.

The leader of each kind of device holds the cache's lock while it compiles. The others meet it at the barrier, wait for
the lock (so that no warm-up of another launch is writing), and run the same parts on the finished cache; their
counters prove the hit. Who gets the lock and finds the cache unfinished compiles, whatever its role: that keeps a
launch alive whose leader was killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.compiling import counters, guard, settings
from paceline.compiling.cache import CompileCache
from paceline.compiling.counters import Counters
from paceline.compiling.lock import Holder
from paceline.compiling.snapshot import Restorable, snapshot
from paceline.errors import UserError


@dataclass(frozen=True)
class WarmPart:
    """One thing that training runs, ready to run on synthetic batches: a step, an evaluation, a decode."""

    name: str
    run: Callable[[], None]
    """Forward and, for a step, backward and the optimiser: what is not run here is compiled lazily later."""
    state: Sequence[Restorable] = ()
    """Everything that `run` changes: it is put back bit for bit, with the random states and gradients."""
    signature: str = ""
    """Shapes and modes, as text: a cache that was finished for others does not count as warm for these."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.signature}".strip()


@dataclass(frozen=True)
class Role:
    """This worker's place in the warm-up."""

    leader: bool
    name: str = "rank 0"
    wait_seconds: float = 1800.0
    """How long to wait for the cache's lock."""


@dataclass(frozen=True)
class PhaseReport:
    """One line of the start: printed as it ends."""

    name: str
    seconds: float
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.seconds:.1f} s{'; ' if self.note else ''}{self.note}"


@dataclass(frozen=True)
class PartReport:
    """What one part took, and what it compiled or loaded."""

    name: str
    seconds: float
    counters: Counters


@dataclass(frozen=True)
class WarmReport:
    """The whole phase, for one worker."""

    role: Role
    parts: tuple[PartReport, ...]
    repair: str
    """What was found in the cache and done about it; empty for a worker that only used it."""
    waited: float
    """Seconds spent at barriers and for the lock."""
    seconds: float
    warnings: tuple[str, ...] = field(default=())

    @property
    def counters(self) -> Counters:
        total = Counters()
        for part in self.parts:
            total = total - (Counters() - part.counters)
        return total


Barrier = Callable[[str], None]
Reporter = Callable[[PhaseReport], None]


def warm_up(
    parts: Sequence[WarmPart], cache: CompileCache, role: Role, barrier: Barrier, report: Reporter
) -> WarmReport:
    """Compile everything that the run will need, or load it, and leave every state as it was.

    Dynamo's settings are made to hold in every thread first (`paceline.compiling.settings`).

    Args:
        parts: what to run; the same names and signatures on every worker of one kind of device.
        cache: `CompileCache.activate` should have been called at the start of the process.
        barrier: meets the other workers; called with a phase's name, and bounded by a time-out of its own.
        report: called after each phase.

    Raises:
        UserError: the lock or the barrier was not passed in time; names who holds the lock.
    """
    guard.install()
    settings.apply_settings()
    cache.activate()
    clock = _Clock(report)
    if role.leader:
        outcome = _lead(parts, cache, role, clock)
        clock.wait("meeting the other workers", lambda: _meet(barrier, "warm-up: leader is done", cache))
    else:
        clock.wait("waiting for the leader", lambda: _meet(barrier, "warm-up: leader is done", cache))
        outcome = _follow(parts, cache, role, clock)
    clock.wait("warm-up of every worker", lambda: _meet(barrier, "warm-up: everyone is done", cache))
    return WarmReport(
        role=role,
        parts=outcome.parts,
        repair=outcome.repair,
        waited=clock.waited,
        seconds=clock.total(),
        warnings=_warnings(outcome, role, cache),
    )


@dataclass(frozen=True)
class _Outcome:
    parts: tuple[PartReport, ...]
    compiler: bool
    repair: str = ""
    lost: str | None = None
    """What the end of the warm-up found damaged, in one line."""


class _Clock:
    """Times phases and reports them."""

    def __init__(self, report: Reporter) -> None:
        self.report = report
        self.waited = 0.0
        self._start = time.monotonic()

    def total(self) -> float:
        return time.monotonic() - self._start

    def wait(self, name: str, action: Callable[[], None]) -> None:
        began = time.monotonic()
        action()
        self.waited_since(name, began)

    def waited_since(self, name: str, began: float) -> None:
        seconds = time.monotonic() - began
        self.waited += seconds
        self.report(PhaseReport(name, seconds))


def _lead(parts: Sequence[WarmPart], cache: CompileCache, role: Role, clock: _Clock) -> _Outcome:
    began = time.monotonic()
    _say_who_is_waited_for(cache, clock)
    with cache.lock(role.name, role.wait_seconds) as killed:
        clock.waited_since("lock of the compile cache", began)
        return _compile(parts, cache, killed, clock)


def _follow(parts: Sequence[WarmPart], cache: CompileCache, role: Role, clock: _Clock) -> _Outcome:
    began = time.monotonic()
    _say_who_is_waited_for(cache, clock)
    with cache.lock(role.name, role.wait_seconds) as killed:
        clock.waited_since("lock of the compile cache", began)
        if not cache.holds([part.label for part in parts]):
            return _compile(parts, cache, killed, clock)
    return _Outcome(_run_all(parts, cache, clock), compiler=False)


def _compile(parts: Sequence[WarmPart], cache: CompileCache, killed: Holder | None, clock: _Clock) -> _Outcome:
    """Under the lock: repair, run, and record that it ended."""
    began = time.monotonic()
    repair = cache.repair(killed)
    clock.report(PhaseReport("check of the compile cache", time.monotonic() - began, repair.message))
    reports = _run_all(parts, cache, clock)
    compiled = any(part.counters.compiled for part in reports)
    lost = cache.finish([part.label for part in parts], sum(part.seconds for part in reports) if compiled else None)
    return _Outcome(reports, compiler=True, repair=repair.message, lost=lost)


def _run_all(parts: Sequence[WarmPart], cache: CompileCache, clock: _Clock) -> tuple[PartReport, ...]:
    try:
        return tuple(_run(part, clock) for part in parts)
    except UserError:
        raise
    except Exception as error:
        if blamed := cache.blame(error):
            raise blamed from error
        raise


def _run(part: WarmPart, clock: _Clock) -> PartReport:
    restore = snapshot(part.state)
    before, began = counters.read(), time.monotonic()
    try:
        part.run()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    finally:
        restore()
    done = PartReport(part.name, time.monotonic() - began, counters.read() - before)
    clock.report(PhaseReport(f"warm-up of {part.name}", done.seconds, _compiled_or_loaded(done.counters)))
    return done


def _meet(barrier: Barrier, phase: str, cache: CompileCache) -> None:
    try:
        barrier(phase)
    except (RuntimeError, OSError, UserError) as error:
        reason = error.what if isinstance(error, UserError) else str(error)
        raise UserError(
            f"the workers did not meet at {phase!r}: {reason}; the compile cache's lock is held by "
            f"{cache.holder() or 'nobody'}",
            "look at the worker that is missing (paceline doctor RUN_DIR), or raise compiling.warmup_seconds",
        ) from error


def _say_who_is_waited_for(cache: CompileCache, clock: _Clock) -> None:
    if holder := cache.holder():
        clock.report(PhaseReport("lock of the compile cache", 0.0, f"held by {holder}"))


def _compiled_or_loaded(moved: Counters) -> str:
    if not (moved.compiled or moved.loaded):
        return "nothing compiled"
    return f"{moved.compiled} graphs compiled, {moved.loaded} loaded, {moved.traces} traces"


def _warnings(outcome: _Outcome, role: Role, cache: CompileCache) -> tuple[str, ...]:
    compiled = sum(part.counters.compiled for part in outcome.parts)
    if outcome.compiler or not compiled:
        return (outcome.lost,) if outcome.lost else ()
    bypassed = sum(part.counters.fxgraph_cache_bypass for part in outcome.parts)
    return (f"{role.name} compiled {compiled} graphs that the cache should have held: {_why_missed(cache, bypassed)}",)


def _why_missed(cache: CompileCache, bypassed: int) -> str:
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") != str(cache.compiled[0]):
        return f"TORCHINDUCTOR_CACHE_DIR was changed to {os.environ.get('TORCHINDUCTOR_CACHE_DIR')!r} after the start"
    if bypassed:
        return f"{bypassed} of them cannot be cached (TORCH_LOGS=+torch._inductor.codecache says why)"
    if full := cache.no_room():
        return full
    if torch.cuda.is_initialized() and torch.cuda.device_count() > 1:
        return (
            f"this process sees {torch.cuda.device_count()} GPUs, and the device's index is part of the keys; "
            "show each process one GPU (CUDA_VISIBLE_DEVICES)"
        )
    return "its graphs differ from the leader's, in shapes, gradient flags or captured constants"
