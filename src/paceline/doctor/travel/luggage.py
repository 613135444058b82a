"""Packs this folder into one text for ``python -``, and takes the answer out of whatever came back.

The source goes over standard input, so no shell's quoting can touch it. The answer lies between two marks made from a
nonce, so it is found among banners and messages of the day; the marks are the nonce reversed, so an echo of what was
sent is not mistaken for an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import traceback
from typing import Any

PACKAGE = "paceline.doctor.travel"
ALWAYS = ("luggage", "common")
NEEDS = {"probe": ("fx_source", "gpus")}
"""What a traveller imports besides, in order."""
CHILDREN = {"probe": ("torch_part",), "compile_check": ("compile_once",)}
"""What a traveller starts in processes of their own."""
SOURCES: dict[str, str] = {}
"""Filled in by the prelude at the far end, where there are no files to read."""

_PRELUDE = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("Python 3.8 or later is needed here; this is " + sys.version.split()[0])
import linecache, types
SOURCES = {sources}
for name in {order}:
    text, place = SOURCES[name], "<paceline " + name + ">"
    linecache.cache[place] = (len(text), None, text.splitlines(True), place)
    module = types.ModuleType("{package}." + name)
    sys.modules[module.__name__] = module
    exec(compile(text, place, "exec"), module.__dict__)
luggage = sys.modules["{package}.luggage"]
luggage.SOURCES.update(SOURCES)
luggage.deliver({module}, {argument}, {nonce})
"""


class NoAnswer(Exception):
    """The process ended, or was stopped at its time-out, without an answer between the marks."""

    def __init__(self, returncode: int | None, stdout: str, stderr: str) -> None:
        super().__init__("no answer")
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr

    def last_words(self) -> str:
        """The last line that was printed, on standard error if there is one."""
        lines = [line for line in (self.stdout + "\n" + self.stderr).splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def new_nonce() -> str:
    return secrets.token_hex(12)


def pack(module: str, argument: dict[str, Any], nonce: str) -> str:
    """The whole program for ``python -``: ASCII only, so that no locale on the way can spoil it."""
    order = (*ALWAYS, *NEEDS.get(module, ()), module)
    return _PRELUDE.format(
        sources=ascii({name: _source(name) for name in (*order, *CHILDREN.get(module, ()))}),
        order=ascii(order),
        package=PACKAGE,
        module=ascii(module),
        argument=ascii(argument),
        nonce=ascii(nonce),
    )


def unpack(stdout: str, nonce: str) -> dict[str, Any] | None:
    """The answer between the marks, or None."""
    begin, end = _marks(nonce)
    _, found, rest = stdout.partition(begin)
    body, ended, _ = rest.partition(end)
    return json.loads(body) if found and ended else None


def deliver(module: str, argument: dict[str, Any], nonce: str) -> None:
    """Run the traveller and print its answer between the marks; its own fault is an answer too."""
    try:
        answer = sys.modules[PACKAGE + "." + module].main(argument)
    except Exception as fault:  # noqa: BLE001  it must travel home, whatever it is
        answer = {"fault": f"{type(fault).__name__}: {fault}", "traceback": traceback.format_exc()}
    begin, end = _marks(nonce)
    sys.stdout.write("\n" + begin + json.dumps(answer) + end + "\n")
    sys.stdout.flush()


def run_child(
    module: str, argument: dict[str, Any], timeout: float, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a traveller in a fresh interpreter of the same kind, with this process's environment or the one given.

    Raises:
        NoAnswer: it ended or timed out without answering.
    """
    nonce = new_nonce()
    child = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    code: int | None = None
    try:
        out, err = child.communicate(pack(module, argument, nonce).encode(), timeout=timeout)
        code = child.returncode
    except subprocess.TimeoutExpired:
        _kill_session(child)
        out, err = child.communicate()
    answer = unpack(out.decode(errors="replace"), nonce)
    if answer is None:
        raise NoAnswer(code, out.decode(errors="replace"), err.decode(errors="replace"))
    return answer


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """The child leads a session of its own, so its compilers and their workers go with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)


def _source(name: str) -> str:
    if name in SOURCES:
        return SOURCES[name]
    with open(os.path.join(os.path.dirname(__file__), name + ".py"), encoding="utf-8") as file:
        return file.read()


def _marks(nonce: str) -> tuple[str, str]:
    backwards = nonce[::-1]
    return "<<" + backwards + ">>", "<</" + backwards + ">>"
