"""After the warm-up, compiling is an error, and so is flex_attention's dense path.

Torch's stance "fail_on_recompile" raises at a call whose guards fail, but lets a backward pass that is compiled lazily
through. So the counters are compared as well, and each compilation that starts is recorded with its trigger.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from paceline.compiling import counters, guard

_STANCE_PHRASE = "torch.compile stance is 'fail_on_recompile'"
_STANCE_PLACE = re.compile(r"filename: '(.*?)', function name: '(.*?)', line number: (\d+)")
_DENSE = "_math_attention_inner"
_CURE = (
    "shapes, gradient mode and train/eval mode must be those of the warm-up: pad the batch to the run's shape, or add "
    "this call to the warm-up's parts"
)


class CompiledAfterWarmup(RuntimeError):
    """Something compiled, or would have, after the warm-up ended. `reasons` are the guards that failed."""

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class DenseFlexAttention(RuntimeError):
    """flex_attention took its unfused path, which holds the whole score matrix."""


@dataclass(frozen=True)
class Compilation:
    """One compilation that started: what set it off, in which thread, from where."""

    trigger: str
    compile_id: str
    thread: str
    stack: tuple[str, ...]

    def __str__(self) -> str:
        origin = " < ".join(self.stack[:3]) or "autograd's own thread"
        return f"{self.trigger} (graph {self.compile_id}, thread {self.thread!r}) from {origin}"


class Forbidden:
    """The state after `forbid`: call `check` between steps, and run steps inside `explain`."""

    def __init__(self) -> None:
        self._seen: deque[Compilation] = deque(maxlen=8)
        self._baseline = counters.read()
        callback_handler.register_start_callback(self._record)
        torch.compiler.set_stance("fail_on_recompile")

    def compilations(self) -> counters.Counters:
        """What moved since the warm-up, or since `check` last raised. All zero in a healthy run."""
        return counters.read() - self._baseline

    def check(self, where: str) -> None:
        """Raise if anything was compiled, such as a backward that nothing had asked for before. Microseconds.

        Raises:
            CompiledAfterWarmup: names what was compiled, from where, and the counters.
        """
        moved = self.compilations()
        if moved == counters.Counters() and not self._seen:
            return
        seen = tuple(str(compilation) for compilation in self._seen)
        self._baseline = counters.read()
        self._seen.clear()
        what = "\n".join(f"  {line}" for line in seen) or "  (torch did not say what)"
        raise CompiledAfterWarmup(
            f"{where}: compiled after the warm-up:\n{what}\n  counters: {moved}\ncure: {_CURE}", reasons=seen
        )

    @contextlib.contextmanager
    def explain(self, where: str) -> Iterator[None]:
        """Turn the stance's error and the FX-tracing error into ours. A ``with`` block or a decorator.

        Raises:
            CompiledAfterWarmup: names the function, which guard failed, and which shape came.
        """
        try:
            with guard.explain(where):
                yield
        except RuntimeError as error:
            if _STANCE_PHRASE not in str(error):
                raise
            raise _translated(where, str(error)) from error

    def lift(self) -> None:
        """Allow compiling again."""
        torch.compiler.set_stance("default")
        with contextlib.suppress(ValueError):  # torch._dynamo.reset may have dropped it already
            callback_handler.remove_start_callback(self._record)

    def _record(self, args: CallbackArgs) -> None:
        if args.callback_trigger is CallbackTrigger.CUDAGRAPH_RECORDING:
            return  # compiles nothing
        lazy = args.callback_trigger is CallbackTrigger.LAZY_BACKWARD
        self._seen.append(
            Compilation(
                trigger="a backward, compiled lazily" if lazy else args.callback_trigger.name.lower(),
                compile_id=args.compile_id,
                thread=threading.current_thread().name,
                stack=guard.short_stack(sys._getframe(1), torch_frames=0),
            )
        )


def forbid() -> Forbidden:
    """End the warm-up: from now on a recompilation raises, in every thread of this process."""
    guard.install()
    return Forbidden()


def dense_flex_raises() -> Callable[[], None]:
    """Make flex_attention's dense path raise `DenseFlexAttention`, forward and backward; returns how to undo it.

    That path is what an uncompiled call, or a compiled one past Dynamo's recompile limit, runs: it holds a score for
    every query and key (76 GiB at 16,384 tokens). `scaled_dot_product_attention` is not touched.
    """
    names = vars(importlib.import_module("torch._higher_order_ops.flex_attention"))  # the package shadows the module
    original = names[_DENSE]
    names[_DENSE] = _refuse_dense

    def undo() -> None:
        if names[_DENSE] is _refuse_dense:
            names[_DENSE] = original

    return undo


def _refuse_dense(query: torch.Tensor, key: torch.Tensor, *_: object) -> None:
    scores = [*query.shape[:-1], key.shape[-2]]
    gib = torch.Size(scores).numel() * 4 / 2**30
    raise DenseFlexAttention(
        f"flex_attention took its dense path on {query.device}: scores {scores} would take {gib:.3g} GiB in float32. "
        "It was called uncompiled, or Dynamo gave up compiling it (recompile limit, graph break).\n"
        "cure: call it through torch.compile with the shapes of the warm-up, or use dense SDPA on purpose"
    )


def _translated(where: str, text: str) -> CompiledAfterWarmup:
    place = _STANCE_PLACE.search(text)
    function = f"{place[2]} ({place[1]}:{place[3]})" if place else "a compiled function"
    reasons = tuple(line.strip().removeprefix("- ") for line in text.splitlines() if line.strip().startswith("- "))
    why = "\n".join(f"  guard failed: {reason}" for reason in reasons) or "  the warm-up never called it"
    return CompiledAfterWarmup(f"{where}: {function} would have to be compiled anew\n{why}\ncure: {_CURE}", reasons)
