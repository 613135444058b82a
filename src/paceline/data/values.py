"""JSON values out of a stream of bytes, one at a time: lines, the elements of an array, or values one after another.

Damage costs the value that it hits, never the file: what cannot be parsed is yielded as a Problem with its number, and
reading goes on at the next line or element. A file that ends in the middle of a value gives every whole one before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from paceline.data.rows import Problem, excerpt

LARGEST = 64 << 20
"""Bytes of one row beyond which it is set aside unread."""
_CHUNK = 1 << 20
_SPACE = re.compile(r"[\s,]*")
_NEXT_ELEMENT = re.compile(r"[\}\]]\s*[,\n]\s*(?=[\{\[])")
_WRAPPER = re.compile(rb'\s*\{\s*"(?:data|rows|train|examples|items)"\s*:\s*(?=\[\s*[\[\{])')
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]{1,100})"\s*:')

Numbered = tuple[int, Any]
"""(1-based number, parsed value or Problem)"""


def read_values(stream: IO[bytes], *, named_lines: bool = False) -> Iterator[Numbered]:
    """Values of a JSON file of any form, told by its beginning; `named_lines` says that its name ends in .jsonl."""
    head = _peel_mark(stream.read(_CHUNK))
    wrapped = _WRAPPER.match(head)
    if wrapped:
        yield from read_elements(Joined(head[wrapped.end() :], stream))
        return
    joined = Joined(head, stream)
    yield from read_lines(joined) if looks_like_lines(head, named_lines=named_lines) else read_elements(joined)


class Joined:
    """A head that was read already, followed by the rest of its stream."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._head = head
        self._stream = stream

    def read(self, size: int) -> bytes:
        if self._head:
            taken, self._head = self._head[:size], self._head[size:]
            return taken
        return self._stream.read(size)


def _peel_mark(head: bytes) -> bytes:
    return head.removeprefix(b"\xef\xbb\xbf")


def looks_like_lines(head: bytes, *, named_lines: bool = False) -> bool:
    """Whether a file holds one value a line, rather than one array or pretty-printed values."""
    lines = [line for line in head[: 1 << 16].split(b"\n") if line.strip()]
    if not lines:
        return True
    first = _parsed(lines[0])
    if isinstance(first, list):
        return len(lines) > 1 or (named_lines and not any(_is_row(item) for item in first))
    if isinstance(first, dict):
        return True
    whole = any(isinstance(_parsed(line), dict) for line in lines[1:5])
    if lines[0].lstrip()[:1] == b"[":
        return named_lines and whole  # the last element of an array on lines of its own parses alone, too
    # An object that begins alone on its line is a pretty-printed one.
    return whole or lines[0].strip() != b"{"


def _is_row(item: Any) -> bool:
    return isinstance(item, dict) and "role" not in item and "from" not in item


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_lines(stream: Joined) -> Iterator[Numbered]:
    """One value a line; blank lines count for the numbering and are otherwise passed over."""
    for number, line in enumerate(_split_lines(stream), 1):
        if line is None:
            yield number, Problem("row-too-large", f"line {number}")
        elif line.strip():
            yield number, parse_line(line)


def _split_lines(stream: Joined) -> Iterator[bytes | None]:
    """Lines without their ends; None stands for one that is too large to hold."""
    parts: list[bytes] = []
    held = 0
    while chunk := stream.read(_CHUNK):
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            yield b"".join([*parts, piece]) if held <= LARGEST else None
            parts, held = [], 0
        held += len(pieces[-1])
        parts = [*parts, pieces[-1]] if held <= LARGEST else []
    if held:
        yield b"".join(parts) if held <= LARGEST else None


def parse_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Problem("not-utf8", excerpt(line.decode("utf-8", "backslashreplace")))
    except (ValueError, RecursionError) as error:
        return Problem("not-json", excerpt(f"{_said(error)}: {line.decode('utf-8', 'replace')}"))


def _said(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def read_elements(stream: Joined) -> Iterator[Numbered]:
    """The elements of an array, or of an object's only list, or values one after another."""
    buffer = _Buffer(stream)
    buffer.enter()
    number = 0
    while buffer.at_value():
        number += 1
        value = buffer.take()
        yield number, value


class _Buffer:
    """Decoded text of a stream with a place in it, that reads on when a value does not end within what it holds."""

    def __init__(self, stream: Joined) -> None:
        self._stream = stream
        self._text = ""
        self._at = 0
        self._tail = b""
        self._ended = False
        self._decoder = json.JSONDecoder()
        self._keys: set[str] = set()

    def _more(self, size: int = _CHUNK) -> bool:
        """Read on; drops what was consumed. False at the end of the file."""
        if self._ended:
            return False
        chunk = self._stream.read(size)
        data = self._tail + chunk
        self._ended = not chunk
        keep = 0 if self._ended else _open_sequence(data)
        self._tail = data[len(data) - keep :]
        # Bytes that are no UTF-8 travel as lone surrogates, and the row that holds them is set aside later.
        fresh = data[: len(data) - keep].decode("utf-8", "surrogateescape")
        self._text = self._text[self._at :] + fresh
        self._at = 0
        return True

    def enter(self) -> None:
        """Step over the bracket that opens the outermost array."""
        self._skip_space()
        if self._text.startswith("[", self._at):
            self._at += 1

    def _skip_space(self) -> None:
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text) or not self._more():
                return

    def at_value(self) -> bool:
        """Whether another value begins; closing brackets of what wraps them are stepped over."""
        while True:
            self._skip_space()
            if self._at >= len(self._text):
                return False
            if self._text[self._at] not in "]}":
                return True
            self._at += 1

    def take(self) -> Any:
        """The value here, or the Problem with it; moves behind it either way."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                held = len(self._text) - self._at
                if self._may_go_on(error) and held <= LARGEST and self._more(max(_CHUNK, held)):
                    continue
                return self._resume(error, cut=self._may_go_on(error) and held <= LARGEST)
            except (ValueError, RecursionError) as error:
                return self._resume(error, cut=False)
            if end == len(self._text) and not isinstance(value, dict | list) and self._more():
                continue  # a number may go on in the next chunk
            self._at = end
            if isinstance(value, dict):
                self._learn(value)
            return value

    def _learn(self, value: dict[str, Any]) -> None:
        first = next(iter(value), None)
        if first is not None and len(self._keys) < 64:
            self._keys.add(first)

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether the error can come from the end of the buffer alone: it lies there, or a string is still open."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - 16

    def _resume(self, error: Exception, *, cut: bool) -> Problem:
        """Go to the next place where an element can begin, and say what was wrong with this one."""
        shown = excerpt(f"{_said(error)}: {self._text[self._at : self._at + 300]}")
        opener, own = self._text[self._at], _FIRST_KEY.match(self._text, self._at)
        if own and not self._keys:
            self._learn({own.group(1): None})
        self._at += 1
        found = self._find_element(opener)
        while not found and self._drop_and_read():
            found = self._find_element(opener)
        if not found:
            self._at = len(self._text)
        return Problem("cut-off" if cut and not found else "not-json", shown)

    def _find_element(self, opener: str) -> bool:
        """Move to where an element begins next: a list after a broken list, else an object with a known first key."""
        for match in _NEXT_ELEMENT.finditer(self._text, self._at):
            place = match.end()
            key = _FIRST_KEY.match(self._text, place)
            known = not self._keys or (key is not None and key.group(1) in self._keys)
            if self._text[place] == "[" if opener == "[" else self._text[place] == "{" and known:
                self._at = place
                return True
        return False

    def _drop_and_read(self) -> bool:
        self._at = max(self._at, len(self._text) - 256)
        return self._more()


def _open_sequence(data: bytes) -> int:
    """How many bytes at the end are the beginning of a UTF-8 character that is not whole yet."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if needed > back else 0
    return 0
