"""Runs Python source at the end of a chain of shells, and names the layer that failed when it does not arrive.

The source goes over standard input to ``python -``. The trap: a layer that does not forward standard input makes
``python -`` exit 0 and print nothing, so only an answer that holds the nonce of the question counts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from paceline.doctor.chain import Layer, wrap
from paceline.doctor.travel import luggage
from paceline.errors import UserError

_LAYER_PATIENCE = 15.0
"""Seconds that one layer may take when the failed one is looked for."""


@dataclass(frozen=True)
class Place:
    """Where to run: behind `layers` (none: here), with this `python` (several words are a command)."""

    layers: tuple[Layer, ...]
    python: str
    timeout: float

    def command(self, *words: str) -> list[str]:
        return wrap(self.layers, [*python_words(self.python), *words])

    @property
    def name(self) -> str:
        return " · ".join(layer.text for layer in self.layers) or "here"


@dataclass(frozen=True)
class Outcome:
    """How a command ended; `code` is None when it was stopped at its time-out."""

    code: int | None
    stdout: str
    stderr: str

    def last_words(self) -> str:
        lines = [line.strip() for line in (self.stdout + "\n" + self.stderr).splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def ending(self) -> str:
        words = f": {self.last_words()}" if self.last_words() else " and printed nothing"
        return "did not answer in time" if self.code is None else f"ended with code {self.code}{words}"


class ChainError(UserError):
    """The chain failed; `layer` is the one that did, or None where Python itself at its end is at fault."""

    def __init__(self, what: str, remedy: str, layer: Layer | None = None) -> None:
        super().__init__(what, remedy)
        self.layer = layer


def python_words(python: str) -> list[str]:
    """The command of an interpreter. A leading ``~`` is the home of whoever runs it there, not of the caller."""
    words = shlex.split(python) or ["python3"]
    if words[0].startswith("~/"):
        return ["sh", "-c", 'exec "$HOME/$0" "$@"', words[0][2:], *words[1:]]
    return words


def gather(place: Place, traveller: str, argument: dict[str, Any]) -> dict[str, Any]:
    """A traveller's facts from `place`.

    Raises:
        ChainError: no answer came; names the layer, or the interpreter, that failed.
    """
    nonce = luggage.new_nonce()
    outcome = run(place.command("-"), luggage.pack(traveller, argument, nonce).encode(), place.timeout)
    answer = luggage.unpack(outcome.stdout, nonce)
    if answer is None:
        raise blame(place, outcome)
    if "traceback" in answer:
        raise ChainError(f"the probe itself failed {_at(place)}: {answer['fault']}", answer["traceback"].strip())
    return answer


def run(command: Sequence[str], data: bytes, timeout: float) -> Outcome:
    """Run a command with `data` as its standard input; at the time-out, end it and all that it started here."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as fault:
        return Outcome(127, "", f"{command[0]}: {fault.strerror}")
    code: int | None = None
    try:
        out, err = process.communicate(data, timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        end_tree(process.pid)
        out, err = process.communicate()
    return Outcome(code, out.decode(errors="replace"), err.decode(errors="replace"))


def end_tree(pid: int) -> None:
    """Kill a process and its descendants. They stay in our session until then, so that ssh may ask for a password."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            end_tree(int(child))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- whose fault it is -----------------------------------------------------------------------------------------------


def blame(place: Place, whole: Outcome) -> ChainError:
    """Walk the chain outwards in, with a word that must come back, and name the first layer that does not pass it."""
    patience = min(place.timeout, _LAYER_PATIENCE)
    for depth, layer in enumerate(place.layers, 1):
        fault = _layer_fault(place.layers[:depth], layer, patience)
        if fault is not None:
            return fault
    return _interpreter_fault(place, whole, patience)


def _layer_fault(layers: Sequence[Layer], layer: Layer, patience: float) -> ChainError | None:
    word = luggage.new_nonce()
    through_input = run(wrap(layers, ["cat"]), word.encode(), patience)
    if word in through_input.stdout:
        return None
    echoed = run(wrap(layers, ["echo", word]), b"", patience)
    name = f"layer {len(layers)} ({layer.text})"
    if word in echoed.stdout:
        return ChainError(
            f"{name} runs commands but does not forward standard input, so the source never arrives",
            _INPUT_REMEDY,
            layer,
        )
    outcome = echoed if echoed.code is not None or through_input.code is None else through_input
    return ChainError(f"{name} {outcome.ending()}", _layer_remedy(layer, outcome), layer)


_INPUT_REMEDY = "give it what makes it forward it (docker and kubectl exec: -i; ssh: no -n), or another way in"


def _layer_remedy(layer: Layer, outcome: Outcome) -> str:
    if outcome.code is None:
        return f"try it by hand: {layer.text}; it may wait for a password or a host that is down (--timeout gives more)"
    if outcome.code == 127 or "No such file" in outcome.stderr:
        return "the program is not there: correct its name, or install it"
    if layer.words[0].endswith("ssh") and outcome.code == 255:
        return f"ssh itself failed, not the command behind it: try `{layer.text} true` by hand"
    return f"try it by hand: {layer.text}"


def _interpreter_fault(place: Place, whole: Outcome, patience: float) -> ChainError:
    version = run(place.command("--version"), b"", patience)
    said = (version.stdout + version.stderr).strip()
    known = [line for line in said.splitlines() if line.startswith("Python ")]
    where = _at(place)
    if version.code != 0 or not known:
        return ChainError(
            f"{place.python!r} is not a Python {where}: it {version.ending()}", _other_pythons(place, patience)
        )
    if _too_old(known[-1]):
        return ChainError(
            f"{place.python!r} {where} is {known[-1]}; 3.8 or later is needed", _other_pythons(place, patience)
        )
    if whole.code is None:
        return ChainError(
            f"{place.python!r} ({known[-1]}) {where} gave no answer within {place.timeout:g} s",
            "the chain itself works: give --timeout more seconds, or look at that machine's load and file systems",
        )
    if whole.code == 0 and not whole.stderr.strip():
        return ChainError(
            f"{place.python!r} ({known[-1]}) {where} ran, but did not read its standard input",
            "name the interpreter itself (conda run needs --no-capture-output; a wrapper may close standard input)",
        )
    return ChainError(f"{place.python!r} ({known[-1]}) {where} {whole.ending()}", "see the message")


def _too_old(version: str) -> bool:
    numbers = [int(part) for part in version.split()[1].split(".")[:2] if part.isdigit()]
    return tuple(numbers) < (3, 8)


def _other_pythons(place: Place, patience: float) -> str:
    script = "for p in python3 python .venv/bin/python venv/bin/python /opt/*/bin/python; do command -v $p; done"
    there = run(wrap(place.layers, ["sh", "-c", script]), b"", patience)
    found = [line for line in there.stdout.splitlines() if "/" in line]
    return f"there is {', '.join(found)}: name one with --python" if found else "name the right one with --python"


def _at(place: Place) -> str:
    return f"behind {place.layers[-1].text!r}" if place.layers else "here"


# -- any script --------------------------------------------------------------------------------------------------------

_SCRIPT = """\
import sys
sys.stdout.write({mark} + "\\n")
sys.stdout.flush()
for _stream in (sys.stdout, sys.stderr):
    _stream.reconfigure(line_buffering=True)
import linecache, traceback
sys.argv = {argv}
sys.excepthook = lambda kind, fault, place: traceback.print_exception(kind, fault, place.tb_next or place)
_text = {text}
linecache.cache[{name}] = (len(_text), None, _text.splitlines(True), {name})
__file__ = {name}
exec(compile(_text, {name}, "exec", 0, True))
"""


def pack_script(text: str, name: str, arguments: Sequence[str], nonce: str) -> str:
    """`text` as a program for ``python -`` that says it has begun (the nonce reversed), then runs as ``__main__``."""
    return _SCRIPT.format(
        mark=ascii(nonce[::-1]), argv=ascii([name, *arguments]), text=ascii(text), name=ascii(Path(name).name)
    )


def read_script(path: str) -> str:
    """The source, decoded as Python would.

    Raises:
        UserError: it cannot be read or decoded.
    """
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as fault:
        raise UserError(f"{path} cannot be read as Python source: {fault}", "give the path of a Python file") from fault


def stream(place: Place, script: str, arguments: Sequence[str]) -> int:
    """Run a script at `place`; its output comes through as it is printed. Returns its exit code.

    Raises:
        UserError: the script cannot be read.
        ChainError: it never began; names the layer that failed, or the time-out ended it.
    """
    nonce = luggage.new_nonce()
    source = pack_script(read_script(script), script, arguments, nonce).encode()
    command = place.command("-")
    together = subprocess.STDOUT if _one_file() else None
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=together)
    except OSError as fault:
        raise blame(place, Outcome(127, "", f"{command[0]}: {fault.strerror}")) from fault
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(place.timeout, end_tree, [process.pid])
    timer.daemon = True
    timer.start()
    threading.Thread(target=_feed, args=(process.stdin, source), daemon=True).start()
    begun = _pour(process.stdout, nonce[::-1].encode())
    code = process.wait()
    late = timer.finished.is_set()
    timer.cancel()
    if not begun:
        raise blame(place, Outcome(None if late else code, "", ""))
    if late:
        raise ChainError(f"{script} {_at(place)} was ended after {place.timeout:g} s", "give --timeout more seconds")
    return code


def _one_file() -> bool:
    """Whether our two streams are one terminal, file or pipe: then what the script prints must keep its order."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def _feed(stdin: IO[bytes], source: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), stdin:
        stdin.write(source)


def _pour(stdout: IO[bytes], mark: bytes) -> bool:
    """Banners before the mark go to standard error at once, what comes after it to standard output. Whether it came."""
    pending, begun = b"", False
    while chunk := os.read(stdout.fileno(), 1 << 16):
        if begun:
            _write(sys.stdout, chunk)
            continue
        banner, found, rest = (pending + chunk).partition(mark)
        begun = bool(found) and b"\n" in rest
        kept = len(banner) - (0 if found else _begun_mark(banner, mark))
        _write(sys.stderr, banner[:kept])
        pending = b"" if begun else banner[kept:] + found + rest
        _write(sys.stdout, rest.partition(b"\n")[2] if begun else b"")
    _write(sys.stderr, pending)
    return begun


def _begun_mark(data: bytes, mark: bytes) -> int:
    """How many of the last bytes may be the first ones of the mark: they wait for what comes next."""
    return next((length for length in range(len(mark) - 1, 0, -1) if data.endswith(mark[:length])), 0)


def _write(text_stream: TextIO, data: bytes) -> None:
    text_stream.flush()
    text_stream.buffer.write(data)
    text_stream.buffer.flush()
