"""Answers from an OpenAI-compatible server: many requests under way, tried again where that can help."""

from __future__ import annotations

import http.client
import json
import os
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.data.rows import Message
from paceline.errors import UserError
from paceline.regenerate.draft import Answer, Draft
from paceline.regenerate.judge import is_looping
from paceline.regenerate.options import RegenerateOptions

_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)
_REFUSED = (401, 403, 404, 405)
_LONGEST_WAIT = 60.0
_GIVE_UP_AFTER = 20
_BROKEN = (http.client.HTTPException, OSError, ValueError, KeyError, IndexError, TypeError)


class Endpoint:
    """A server that answers drafts."""

    def __init__(self, options: RegenerateOptions) -> None:
        """Reach the server and learn its model's name. Raises UserError."""
        self.options = options
        url = urlsplit(options.endpoint if "//" in options.endpoint else f"http://{options.endpoint}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise UserError(
                f"endpoint = {options.endpoint!r} is no http address", "for example http://localhost:8000/v1"
            )
        self._secure = url.scheme == "https"
        self._host, self._port = url.hostname, url.port
        path = url.path.rstrip("/")
        self._path = path if path.endswith("/v1") or path.count("/") > 1 else f"{path}/v1"
        self._pace = _Pace(options.requests_per_minute)
        self._stop = threading.Event()
        self.name = options.served_name or self._ask_name()

    def write(self, drafts: Iterable[Draft]) -> Iterator[Draft]:
        """Finish every draft, in the order in which the server is done with them.

        Raises UserError where the server refuses for a reason that no waiting mends, or answers nothing any more.
        """
        todo: queue.Queue[Draft] = queue.Queue(maxsize=self.options.in_flight)
        done: queue.Queue[Draft | Exception] = queue.Queue()
        workers = [
            threading.Thread(target=self._work, args=(todo, done), daemon=True) for _ in range(self.options.in_flight)
        ]
        for worker in workers:
            worker.start()
        try:
            yield from self._collect(drafts, todo, done)
        finally:
            self._stop.set()

    def _collect(
        self, drafts: Iterable[Draft], todo: queue.Queue[Draft], done: queue.Queue[Draft | Exception]
    ) -> Iterator[Draft]:
        under_way, failed_in_a_row = 0, 0
        source = iter(drafts)
        more = True
        while more or under_way:
            while more and under_way < self.options.in_flight:
                draft = next(source, None)
                more = draft is not None
                if draft is not None:
                    todo.put(draft)
                    under_way += 1
            if not under_way:
                break
            result = done.get()
            under_way -= 1
            if isinstance(result, Exception):
                raise result
            failed_in_a_row = failed_in_a_row + 1 if "failed" in result.flags else 0
            yield result
            if failed_in_a_row >= max(_GIVE_UP_AFTER, self.options.in_flight):
                raise UserError(
                    f"the last {failed_in_a_row} rows failed at {self.options.endpoint}: {result.error}",
                    "look at the server; what is done is kept, and starting again goes on from there",
                )

    def _work(self, todo: queue.Queue[Draft], done: queue.Queue[Draft | Exception]) -> None:
        connection = _Connection(self)
        while not self._stop.is_set():
            try:
                draft = todo.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                self._finish(draft, connection)
                done.put(draft)
            except Exception as error:  # noqa: BLE001  (raised again in the thread that waits for this draft)
                done.put(error)

    def _finish(self, draft: Draft, connection: _Connection) -> None:
        while (messages := draft.prompt()) is not None:
            draft.add(self._answer(messages, draft, connection))

    def _answer(self, messages: list[Message], draft: Draft, connection: _Connection) -> Answer:
        """One turn, tried up to `retries` times more."""
        body = json.dumps(self._request(messages, draft)).encode()
        reason = ""
        for attempt in range(self.options.retries + 1):
            self._pace.wait(self._stop)
            if self._stop.is_set():
                break
            try:
                reply = connection.post(f"{self._path}/chat/completions", body)
                if reply.status == 200:
                    return read_answer(reply.json())
                reason = f"{reply.status} {reply.text()}"
                if reply.status in _REFUSED:
                    raise UserError(
                        f"{self.options.endpoint} refuses: {reason}",
                        f"check the address, the model's name {self.name!r} and ${self.options.api_key_variable}",
                    )
                if reply.status not in _AGAIN:
                    break
                self._pace.hold(reply.retry_after)
            except _BROKEN as error:
                connection.close()
                reason = f"{type(error).__name__}: {error}"
            self._stop.wait(self._backoff(attempt))
        return Answer({}, 0, ("failed",), reason)

    def _backoff(self, attempt: int) -> float:
        longest = min(_LONGEST_WAIT, self.options.retry_seconds * 2**attempt)
        return longest * random.uniform(0.5, 1.0)

    def _request(self, messages: list[Message], draft: Draft) -> dict[str, Any]:
        options = self.options
        found: dict[str, Any] = {
            "model": self.name,
            "messages": [_as_sent(item) for item in messages],
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
        }
        if options.temperature:
            found |= {"top_p": options.top_p, "seed": options.seed}
        if options.temperature and options.top_k:
            found["top_k"] = options.top_k
        if draft.conversation.tools:
            found["tools"] = list(draft.conversation.tools)
        if options.thinking != "template":
            on = options.thinking == "on"
            found["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
        return found

    def _ask_name(self) -> str:
        connection = _Connection(self)
        reason = ""
        for attempt in range(self.options.retries + 1):
            try:
                reply = connection.get(f"{self._path}/models")
                if reply.status == 200:
                    return str(reply.json()["data"][0]["id"])
                reason = f"{reply.status} {reply.text()}"
                if reply.status not in _AGAIN:
                    break
            except _BROKEN as error:
                connection.close()
                reason = f"{type(error).__name__}: {error}"
            self._stop.wait(self._backoff(attempt))
        raise UserError(
            f"{self.options.endpoint} does not tell its model: {reason}", "start the server, or set served_name"
        )

    def open(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self.options.timeout_seconds)

    def headers(self) -> dict[str, str]:
        key = os.environ.get(self.options.api_key_variable, "")
        found = {"Content-Type": "application/json", "Accept": "application/json"}
        return found | ({"Authorization": f"Bearer {key}"} if key else {})


@dataclass(frozen=True)
class _Reply:
    status: int
    body: bytes
    retry_after: float

    def json(self) -> Any:
        return json.loads(self.body)

    def text(self) -> str:
        return " ".join(self.body.decode("utf-8", "replace").split())[:200]


class _Connection:
    """One kept-alive connection of one thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._open: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes) -> _Reply:
        return self._send("POST", path, body)

    def get(self, path: str) -> _Reply:
        return self._send("GET", path, None)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _send(self, method: str, path: str, body: bytes | None) -> _Reply:
        if self._open is None:
            self._open = self._endpoint.open()
        self._open.request(method, path, body=body, headers=self._endpoint.headers())
        response = self._open.getresponse()
        return _Reply(response.status, response.read(), _seconds(response.getheader("Retry-After")))


def _seconds(header: str | None) -> float:
    try:
        return min(_LONGEST_WAIT, max(0.0, float(header or 0)))
    except ValueError:  # a date: the back-off does
        return 0.0


class _Pace:
    """When the next request may go out, for all threads."""

    def __init__(self, per_minute: int) -> None:
        self._gap = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, stop: threading.Event) -> None:
        with self._lock:
            now = time.monotonic()
            mine = max(now, self._next)
            self._next = mine + self._gap
        if mine > now:
            stop.wait(mine - now)

    def hold(self, seconds: float) -> None:
        """Nothing goes out before this long from now: the server asked for it."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


def read_answer(reply: dict[str, Any]) -> Answer:
    """An answer from a chat completion. Raises KeyError, IndexError, TypeError or ValueError for another thing."""
    if not isinstance(reply, dict):
        raise TypeError("the reply is no object")
    choice = reply["choices"][0]
    said, usage = choice["message"], reply.get("usage") or {}
    if not isinstance(said, dict) or not isinstance(usage, dict):
        raise TypeError("the reply holds no message")
    content = said.get("content") or ""
    reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
    calls = said.get("tool_calls") or []
    if not isinstance(content, str) or not isinstance(reasoning, str) or not isinstance(calls, list):
        raise TypeError("the message's content is no text")
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    flags = ["truncated"] if choice.get("finish_reason") in ("length", "content_filter") else []
    flags += ["empty"] if not content.strip() and not calls else []
    flags += ["looping"] if is_looping(content) or is_looping(reasoning) else []
    return Answer(message, int(usage.get("completion_tokens") or 0), tuple(flags))


def _as_sent(message: Message) -> Message:
    """A message as the interface spells it: arguments of tool calls are JSON text there."""
    sent = {key: value for key, value in message.items() if key != "thinking"}
    calls = sent.get("tool_calls")
    if calls:
        sent["tool_calls"] = [_call_as_sent(call) for call in calls]
    return sent


def _call_as_sent(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return call | {"function": function | {"arguments": text}}
