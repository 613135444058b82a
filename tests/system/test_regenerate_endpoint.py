"""Regeneration through a real HTTP server that refuses, fails, hangs up and talks nonsense."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.regenerate import RegenerateOptions, regenerate

FAULTS = ("429", "500", "503", "close", "half", "nonsense", "other")


class Server(ThreadingHTTPServer):
    """A chat completion server with faults.

    `faults` are dealt out to requests in turn; an empty name answers. After `holds_after` answers, requests wait until
    `released` is set.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.seen: list[dict] = []
        self.answered = 0
        self.holds_after = 1 << 30
        self.held, self.released = threading.Event(), threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def fault(self) -> str:
        with self.lock:
            return self.faults.pop() if self.faults else ""

    def admit(self) -> None:
        with self.lock:
            waits = self.answered >= self.holds_after
            self.answered += not waits
        if waits:
            self.held.set()
            self.released.wait(60)
            with self.lock:
                self.answered += 1

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that are killed in the middle are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "served-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append(body | {"key": self.headers.get("Authorization")})
        fault = self.server.fault()
        if fault == "close":
            self.close_connection = True
        elif fault in ("half", "nonsense"):
            whole = json.dumps(self._reply(body)).encode()
            self._raw(200, whole[:25] if fault == "half" else b"<html>not what you want", len(whole))
            self.close_connection = True
        elif fault == "other":
            self._send(200, {"choices": [{"message": None}]})
        elif fault:
            self._send(int(fault), {"error": fault})
        else:
            self.server.admit()
            self._send(200, self._reply(body))

    def _reply(self, body: dict) -> dict:
        asked = body["messages"][-1]["content"]
        text = {"loop": "round and " * 60, "nothing": ""}.get(asked, f"answer {len(body['messages'])} to {asked}")
        reason = "length" if asked == "long" else "stop"
        message = {"role": "assistant", "content": text}
        return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": 7}}

    def _send(self, status: int, body: object) -> None:
        encoded = json.dumps(body).encode()
        self._raw(status, encoded, len(encoded))

    def _raw(self, status: int, body: bytes, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield running
    running.released.set()
    running.shutdown()
    thread.join()
    running.server_close()


def prompts(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "kind": "k"}) + "\n" for text in texts))
    return str(path)


def options(server: Server, source: str, tmp_path: Path, **changes: object) -> RegenerateOptions:
    base = {"retry_seconds": 0.0, "in_flight": 4, "endpoint": server.url}
    return RegenerateOptions(sources=(source,), output=str(tmp_path / "out.jsonl"), **(base | changes))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_fault_is_tried_again(server: Server, tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(30)]
    source = prompts(tmp_path / "in.jsonl", texts)
    server.faults = list(FAULTS) * 6
    random.Random(0).shuffle(server.faults)
    lines: list[str] = []
    assert regenerate(options(server, source, tmp_path, retries=50), lines.append) == 0
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == texts
    assert all(row["messages"][1]["content"] == f"answer 1 to {text}" for row, text in zip(rows, texts, strict=True))
    assert all(row["kind"] == "k" and row["flags"] == [] and row["tokens"] == 7 for row in rows)
    assert len(server.seen) == 30 + len(FAULTS) * 6
    assert any("30 of 30 rows" in line for line in lines)


def test_what_is_sent(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    source = prompts(tmp_path / "in.jsonl", ["a"])
    regenerate(
        options(
            server,
            source,
            tmp_path,
            temperature=0.7,
            top_p=0.9,
            top_k=20,
            seed=3,
            max_new_tokens=55,
            thinking="off",
            api_key_variable="MY_KEY",
        ),
        lambda _: None,
    )
    (sent,) = server.seen
    assert sent == {
        "model": "served-model",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 55,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "key": "Bearer secret",
    }


def test_turns_follow_each_other_with_new_history(server: Server, tmp_path: Path) -> None:
    turns = [("user", "one"), ("assistant", "old"), ("user", "two"), ("assistant", "old"), ("user", "three")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert regenerate(options(server, str(tmp_path / "in.jsonl"), tmp_path), lambda _: None) == 0
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert [item["content"] for item in row["messages"]] == [
        "one",
        "answer 1 to one",
        "two",
        "answer 3 to two",
        "three",
        "answer 5 to three",
    ]


def test_flagged_rows_go_to_their_own_file(server: Server, tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", ["good", "long", "loop", "nothing"])
    lines: list[str] = []
    assert regenerate(options(server, source, tmp_path), lines.append) == 0
    assert [row["messages"][0]["content"] for row in read_rows(tmp_path / "out.jsonl")] == ["good"]
    flagged = {row["messages"][0]["content"]: row["flags"] for row in read_rows(tmp_path / "out.flagged.jsonl")}
    assert flagged == {"long": ["truncated"], "loop": ["looping"], "nothing": ["empty"]}
    assert any("1 empty, 1 looping, 1 truncated" in line for line in lines)
    regenerate(options(server, source, tmp_path, keep=("truncated",)), lines.append)
    assert [row["messages"][0]["content"] for row in read_rows(tmp_path / "out.jsonl")] == ["good", "long"]
    assert len(server.seen) == 4


def test_failures_are_flagged_and_tried_again_by_the_next_start(server: Server, tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", ["a", "b", "c"])
    server.faults = ["500"] * 3
    assert regenerate(options(server, source, tmp_path, retries=2, in_flight=1), lambda _: None) == 1
    assert len(read_rows(tmp_path / "out.jsonl")) == 2
    (failed,) = read_rows(tmp_path / "out.flagged.jsonl")
    assert failed["flags"] == ["failed"]
    assert "500" in failed["error"]
    assert regenerate(options(server, source, tmp_path, retries=2, in_flight=1), lambda _: None) == 0
    assert len(read_rows(tmp_path / "out.jsonl")) == 3
    assert read_rows(tmp_path / "out.flagged.jsonl") == []
    assert len(server.seen) == 3 + 2 + 1


@pytest.mark.parametrize(("fault", "what"), [("401", "refuses: 401"), ("404", "refuses: 404")])
def test_a_refusal_stops_at_once(server: Server, tmp_path: Path, fault: str, what: str) -> None:
    source = prompts(tmp_path / "in.jsonl", [str(number) for number in range(50)])
    server.faults = [fault] * 100
    with pytest.raises(UserError, match=what):
        regenerate(options(server, source, tmp_path), lambda _: None)
    assert len(server.seen) < 10


def test_a_request_that_is_wrong_is_not_repeated(server: Server, tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", ["a", "b"])
    server.faults = ["400"]
    assert regenerate(options(server, source, tmp_path, in_flight=1), lambda _: None) == 1
    assert len(server.seen) == 2


def test_a_server_that_only_fails_is_given_up(server: Server, tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", [str(number) for number in range(500)])
    server.faults = ["503"] * 5000
    with pytest.raises(UserError, match="last 20 rows failed"):
        regenerate(options(server, source, tmp_path, retries=1), lambda _: None)
    assert len(server.seen) < 100


def test_nobody_listens(tmp_path: Path) -> None:
    source = prompts(tmp_path / "in.jsonl", ["a"])
    nowhere = RegenerateOptions(
        sources=(source,), output=str(tmp_path / "o.jsonl"), endpoint="127.0.0.1:9", retries=1, retry_seconds=0.0
    )
    with pytest.raises(UserError, match="does not tell its model"):
        regenerate(nowhere, lambda _: None)


def test_bad_rows_are_counted_and_repeated_ones_answered_once(server: Server, tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', "{broken", '{"messages": []}', '{"prompt": "a"}', '{"prompt": "b"}', '{"text": "raw"}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    said: list[str] = []
    assert regenerate(options(server, str(tmp_path / "in.jsonl"), tmp_path), said.append) == 0
    assert len(server.seen) == 2
    text = "\n".join(said)
    for part in ("1 rows set aside: not-json", "1 rows set aside: no-messages", "1 rows repeat another"):
        assert part in text


# A shell starts background jobs with SIGINT ignored, and a test runner may be one: the child takes it back.
_CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from paceline.regenerate import RegenerateOptions, regenerate
source, output, url = sys.argv[1:]
regenerate(RegenerateOptions(sources=(source,), output=output, endpoint=url, in_flight=3, retry_seconds=0.0))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_shuffled_and_started_again(server: Server, tmp_path: Path, how: signal.Signals) -> None:
    texts = [f"question {number}" for number in range(50)]
    source = prompts(tmp_path / "in.jsonl", texts)
    output = tmp_path / "out.jsonl"
    server.holds_after = 10
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, source, str(output), server.url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as child:
        assert server.held.wait(120), "the child never asked an eleventh question"
        child.send_signal(how)
        assert child.wait(60) != 0
    journal = tmp_path / "out.journal.jsonl"
    before = len(journal.read_bytes().splitlines()) - 1
    assert 1 <= before <= 13
    if how == signal.SIGINT:  # a polite stop leaves what is done where every other command can take it
        assert len(read_rows(output)) == before
    else:  # and a kill in the middle of a line leaves half of it
        with journal.open("ab") as file:
            file.write(b'{"key": "torn", "messages": [{"ro')
    server.released.set()
    random.Random(1).shuffle(texts)
    prompts(tmp_path / "in.jsonl", texts)
    asked = len(server.seen)
    assert regenerate(options(server, source, tmp_path), lambda _: None) == 0
    assert len(server.seen) - asked == 50 - before
    rows = read_rows(output)
    assert [row["messages"][0]["content"] for row in rows] == texts
    assert Counter(row["messages"][1]["content"] for row in rows) == Counter(f"answer 1 to {text}" for text in texts)
